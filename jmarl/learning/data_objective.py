"""The loss of rows that learn from data: pairs of completions of which one was preferred, and texts to imitate or predict.

What `objective` is for rollouts. A pair's completions lie side by side as the group of their prompt, which is computed once for
both. A reward model is trained by the same loss as DPO, of scores in place of log-probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmarl.algorithms import algorithm, option
from jmarl.config import Learning
from jmarl.rl import masked
from jmarl.types import PreferenceBatch, TextBatch


class Pairs(NamedTuple):
    """What the preference loss needs of pairs [P]."""

    take: jax.Array  # [P, 2, T] float32: what each token's number counts in its completion's
    reference: jax.Array  # [P, 2] float32: subtracted from it
    others: jax.Array  # [P] float32: added to the margin
    share: jax.Array  # [P] float32: 1 / valid pairs of the whole batch; 0: padding


class Texts(NamedTuple):
    """What the loss of texts needs of each token, [P, 1, T]."""

    cloned: jax.Array  # float32: 1 / tokens of agents in the whole batch; 0 elsewhere
    predicted: jax.Array  # float32: 1 / tokens of what answered them in the whole batch; 0 elsewhere


def scores_values(learning: Learning) -> bool:
    """Whether a row compares the scores of a value head, not log-probabilities."""
    return algorithm(learning.algorithm).advantage == "score_margin"


def takes(mask: jax.Array, learning: Learning) -> jax.Array:
    """[..., T] float32: how a completion's number is made of its tokens', those of mask [..., T] bool: their sum (of
    log-probabilities), their mean (for ipo), or what stands behind the last of them (a score; T is then one longer)."""
    count = mask.sum(-1, keepdims=True)
    if scores_values(learning):
        return (jnp.arange(mask.shape[-1]) == count).astype(jnp.float32)
    row = algorithm(learning.algorithm)
    sums = mask.astype(jnp.float32)
    return sums / jnp.maximum(count, 1) if option("preference_loss", learning.preference_loss, row) == "ipo" else sums


def make_pairs(batch: PreferenceBatch, learning: Learning) -> Pairs:
    """Of one agent's batch."""
    share = batch.valid / jnp.maximum(batch.valid.sum(), 1)
    return Pairs(takes(batch.action_mask, learning), batch.reference, batch.others, share)


def make_texts(batch: TextBatch) -> Texts:
    """Of one agent's batch."""
    kinds = (batch.kinds == kind for kind in (1, 2))
    return Texts(*(mask / jnp.maximum(mask.sum(), 1) for mask in kinds))


def completions_scores(of_tokens: jax.Array, of: Pairs) -> jax.Array:
    """[P, 2] of numbers of tokens [P, 2, T], less the reference's."""
    return masked.total(of_tokens * of.take, of.take != 0, -1) - of.reference


def pairs_loss(of_tokens: jax.Array, of: Pairs, learning: Learning) -> tuple[jax.Array, dict]:
    """Loss of log-probabilities or values of tokens [P, 2, T] and its metrics, additive over parts of a batch."""
    row = algorithm(learning.algorithm)
    options = {argument: option(name, getattr(learning, name), row) for argument, name in row.options.items()}
    scores = completions_scores(of_tokens, of)
    loss, metrics = row.loss(scores[:, 0] - scores[:, 1] + of.others, of.share, **options)
    metrics |= {"chosen": scores[:, 0], "rejected": scores[:, 1]}
    return loss, {name: masked.total(of.share * x, of.share > 0) for name, x in metrics.items()} | {"loss": loss}


def texts_loss(logp: jax.Array, entropy: jax.Array, of: Texts, learning: Learning) -> tuple[jax.Array, dict]:
    """Loss of tokens and their part of its metrics, arrays [M]: the mean surprise of what agents wrote (behaviour cloning) and
    of what they were answered (a world model), each with its weight."""
    row = algorithm(learning.algorithm)
    cloning, predicting = (option(name, getattr(learning, name), row) for name in ("bc_weight", "world_model_weight"))
    loss, _ = row.loss(logp, cloning * of.cloned + predicting * of.predicted)
    metrics = {"nll": -jnp.sum(of.cloned * logp), "entropy": jnp.sum(of.cloned * entropy)}
    if predicting:
        metrics["nll_world"] = -jnp.sum(of.predicted * logp)
    return loss, metrics | {"loss": loss}
