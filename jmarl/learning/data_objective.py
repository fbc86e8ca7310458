"""The losses of given data: pairs of completions of which one was preferred, and texts to imitate or predict.

The completions of a pair are the group of their prompt, which is computed once for both. A reward model is trained by the same
loss as DPO, with scores in place of log-probabilities."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from jmarl.algorithms import Algorithm
from jmarl.rl import masked
from jmarl.types import PreferenceBatch, TextBatch


class PairTargets(NamedTuple):
    """What the preference loss needs of pairs; single completions are scored with an axis of 1."""

    token_weights: Float[Array, "pair completion token"]  # weight of a token's number in the number of its completion
    reference: Float[Array, "pair completion"]  # subtracted from the number of a completion
    team_margin: Float[Array, " pair"]  # added to the margin: that of the other agents
    share: Float[Array, " pair"]  # 1 / valid pairs of the whole batch; 0: padding


class TextTargets(NamedTuple):
    """What the loss of texts needs of each token: arrays [P, 1, T], or [M] of any tokens."""

    cloned: Float[Array, "*token"]  # 1 / tokens that agents wrote in the whole batch; 0 elsewhere
    predicted: Float[Array, "*token"]  # 1 / tokens that answered them in the whole batch; 0 elsewhere


def pair_token_weights(mask: Bool[Array, "*pair token"], algorithm: Algorithm) -> Float[Array, "*pair token"]:
    """Return the weight of each token's number in that of its completion, whose tokens are in mask.

    All 1 (the sum of log-probabilities), 1 / length for ipo (their mean), or 1 behind the last token (a score; T is then one
    longer)."""
    count = mask.sum(-1, keepdims=True)
    if algorithm.row.margin == "score":
        return (jnp.arange(mask.shape[-1]) == count).astype(jnp.float32)
    weights = mask.astype(jnp.float32)
    return weights / jnp.maximum(count, 1) if algorithm.ipo else weights


def make_pair_targets(batch: PreferenceBatch, algorithm: Algorithm) -> PairTargets:
    """Return the targets of one agent's batch of pairs."""
    share = batch.valid / jnp.maximum(batch.valid.sum(), 1)
    return PairTargets(pair_token_weights(batch.action_mask, algorithm), batch.reference, batch.team_margin, share)


def make_text_targets(batch: TextBatch) -> TextTargets:
    """Return the targets of one agent's batch of texts."""
    masks = (batch.kinds == kind for kind in (1, 2))
    return TextTargets(*(mask / jnp.maximum(mask.sum(), 1) for mask in masks))


def completion_numbers(
    token_numbers: Float[Array, "pair completion token"], targets: PairTargets
) -> Float[Array, "pair completion"]:
    """Return the numbers of completions from those of their tokens, less the reference's."""
    return masked.total(token_numbers * targets.token_weights, targets.token_weights != 0, -1) - targets.reference


def pairs_loss(
    token_numbers: Float[Array, "pair 2 token"], targets: PairTargets, algorithm: Algorithm
) -> tuple[Float[Array, ""], dict[str, Num[Array, ""]]]:
    """Return the loss of log-probabilities or values of tokens and its metrics, additive over parts of a batch."""
    numbers = completion_numbers(token_numbers, targets)
    margins = numbers[:, 0] - numbers[:, 1] + targets.team_margin
    loss, metrics = algorithm.row.loss(margins, targets.share, **algorithm.options)
    metrics |= {"chosen": numbers[:, 0], "rejected": numbers[:, 1]}
    return loss, {name: masked.total(targets.share * x, targets.share > 0) for name, x in metrics.items()} | {"loss": loss}


def texts_loss(
    logp: Float[Array, " token"], entropy: Float[Array, " token"], targets: TextTargets, algorithm: Algorithm
) -> tuple[Float[Array, ""], dict[str, Num[Array, ""]]]:
    """Return the loss of tokens and their part of its metrics.

    The mean negative log-probability of what agents wrote (behavior cloning) and of what answered them (a world model),
    weighted."""
    cloning, predicting = algorithm.bc_weight, algorithm.world_model_weight
    loss, _ = algorithm.row.loss(logp, cloning * targets.cloned + predicting * targets.predicted)
    metrics = {"nll": -jnp.sum(targets.cloned * logp), "entropy": jnp.sum(targets.cloned * entropy)}
    if predicting:
        metrics["nll_world"] = -jnp.sum(targets.predicted * logp)
    return loss, metrics | {"loss": loss}
