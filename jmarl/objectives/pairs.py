"""The objective of pairs of completions of which one was preferred: DPO and its relatives, and reward models.

The completions of a pair are the group of their prompt, which is computed once for both. A reward model is trained by the same
loss as DPO, with scores in place of log-probabilities."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jmarl.algorithms import Algorithm
from jmarl.objectives.objective import Metrics, Objective, Outputs, PerToken, keep_running
from jmarl.rl import masked
from jmarl.sampling.scoring import token_scores
from jmarl.types import PreferenceBatch


class PairTargets(NamedTuple):
    """What the preference loss needs of pairs; single completions are scored with an axis of 1."""

    token_weights: Float[Array, "pair completion token"]  # weight of a token's number in the number of its completion
    reference: Float[Array, "pair completion"]  # subtracted from the number of a completion
    team_margin: Float[Array, " pair"]  # added to the margin: that of the other agents
    share: Float[Array, " pair"]  # 1 / valid pairs of the whole batch; 0: padding


def prepare(batch: PreferenceBatch, algorithm: Algorithm, *_: Any) -> tuple[PairTargets, Metrics]:
    """Return the targets of one agent's batch of pairs."""
    share = batch.valid / jnp.maximum(batch.valid.sum(), 1)
    return PairTargets(pair_token_weights(batch.action_mask, algorithm), batch.reference, batch.team_margin, share), {}


def pair_token_weights(mask: Bool[Array, "*pair token"], algorithm: Algorithm) -> Float[Array, "*pair token"]:
    """Return the weight of each token's number in that of its completion, whose tokens are in mask.

    All 1 (the sum of log-probabilities), 1 / length for ipo (their mean), or 1 behind the last token (a score; T is then one
    longer)."""
    count = mask.sum(-1, keepdims=True)
    if algorithm.compares_scores:
        return (jnp.arange(mask.shape[-1]) == count).astype(jnp.float32)
    weights = mask.astype(jnp.float32)
    return weights / jnp.maximum(count, 1) if algorithm.ipo else weights


def trained_rows(batch: PreferenceBatch, algorithm: Algorithm) -> Bool[Array, "..."]:
    """Return the pairs that are no padding."""
    del algorithm
    return batch.valid


def token_numbers(outputs: Outputs, values: bool) -> PerToken:
    """Return what pairs are compared by, for each token: log-probabilities (at temperature 1, whatever was sampled with), or
    values before the tokens."""
    if values:
        return outputs.values
    tokens = outputs.tokens
    scores = token_scores(outputs.weights, outputs.hidden, tokens.reshape(-1), 1.0, outputs.model.logit_cap)
    return scores[0].reshape(tokens.shape)


def completion_numbers(
    token_numbers: Float[Array, "pair completion token"], targets: PairTargets
) -> Float[Array, "pair completion"]:
    """Return the numbers of completions from those of their tokens, less the reference's."""
    return masked.total(token_numbers * targets.token_weights, targets.token_weights != 0, -1) - targets.reference


def pairs_loss(outputs: Outputs, targets: PairTargets, algorithm: Algorithm) -> tuple[Float[Array, ""], Metrics]:
    """Return the loss of pairs and its metrics, additive over parts of a batch."""
    return loss_of_numbers(token_numbers(outputs, algorithm.compares_scores), targets, algorithm)


def loss_of_numbers(
    token_numbers: Float[Array, "pair 2 token"], targets: PairTargets, algorithm: Algorithm
) -> tuple[Float[Array, ""], Metrics]:
    """Return the loss of log-probabilities or values of tokens, and its metrics."""
    numbers = completion_numbers(token_numbers, targets)
    margins = numbers[:, 0] - numbers[:, 1] + targets.team_margin
    loss, metrics = algorithm.loss_of(margins, targets.share)
    metrics |= {"chosen": numbers[:, 0], "rejected": numbers[:, 1]}
    return loss, {name: masked.total(targets.share * x, targets.share > 0) for name, x in metrics.items()} | {"loss": loss}


def targets_of_part(targets: PairTargets, n: int) -> tuple[PairTargets, Int[Array, ""]]:
    """Return the targets of one of n parts as of a batch of its own, and the number of its pairs."""
    return targets._replace(share=n * targets.share), (targets.share > 0).sum()


PAIRS = Objective(prepare, pairs_loss, trained_rows, targets_of_part, keep_running, splits_groups=False)
