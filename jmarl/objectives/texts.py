"""The objective of texts: to write what an agent wrote (behavior cloning) and to predict what answered it (a world model)."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jmarl.algorithms import Algorithm
from jmarl.objectives.objective import Metrics, Objective, Outputs, keep_running
from jmarl.sampling.scoring import score_loss
from jmarl.types import TextBatch


class TextTargets(NamedTuple):
    """What the loss of texts needs of each token: arrays [P, 1, T], or [M] of any tokens."""

    cloned: Float[Array, "*token"]  # 1 / tokens that agents wrote in the whole batch; 0 elsewhere
    predicted: Float[Array, "*token"]  # 1 / tokens that answered them in the whole batch; 0 elsewhere


def prepare(batch: TextBatch, *_: Any) -> tuple[TextTargets, Metrics]:
    """Return the targets of one agent's batch of texts."""
    masks = (batch.kinds == kind for kind in (1, 2))
    return TextTargets(*(mask / jnp.maximum(mask.sum(), 1) for mask in masks)), {}


def trained_rows(batch: TextBatch, algorithm: Algorithm) -> Bool[Array, "..."]:
    """Return the texts that are no padding."""
    del algorithm
    return (batch.kinds > 0).any(-1)


def texts_loss(outputs: Outputs, targets: TextTargets, algorithm: Algorithm) -> tuple[Float[Array, ""], Metrics]:
    """Return `token_loss` of all tokens, computed for some at a time."""
    _, weights, hidden, tokens, model, _ = outputs
    return score_loss(weights, hidden, tokens, targets, partial(token_loss, algorithm=algorithm), cap=model.logit_cap)


def token_loss(
    logp: Float[Array, " token"], entropy: Float[Array, " token"], targets: TextTargets, algorithm: Algorithm
) -> tuple[Float[Array, ""], Metrics]:
    """Return the loss of tokens and their part of its metrics.

    The mean negative log-probability of what agents wrote (behavior cloning) and of what answered them (a world model),
    weighted."""
    cloning, predicting = algorithm.bc_weight, algorithm.world_model_weight
    loss, _ = algorithm.loss_of(logp, cloning * targets.cloned + predicting * targets.predicted)
    metrics = {"nll": -jnp.sum(targets.cloned * logp), "entropy": jnp.sum(targets.cloned * entropy)}
    if predicting:
        metrics["nll_world"] = -jnp.sum(targets.predicted * logp)
    return loss, metrics | {"loss": loss}


def targets_of_part(targets: TextTargets, n: int) -> tuple[TextTargets, Int[Array, ""]]:
    """Return the targets of one of n parts as of a batch of its own, and the number of its tokens."""
    trained = (targets.cloned > 0) | (targets.predicted > 0)
    return TextTargets(n * targets.cloned, n * targets.predicted), trained.sum()


TEXTS = Objective(prepare, texts_loss, trained_rows, targets_of_part, keep_running, splits_groups=False)
