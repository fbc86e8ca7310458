"""The objective of critics, and of agents with a value head: values of completions, or before each of their tokens.

A value is given once per completion, before it (v) or after it (q), or before each of its tokens. Where agents learn from the
values that the update of their critic computes (`Algorithm.reuses_values`), targets are made of the values of that very pass.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jmarl.algorithms import Algorithm
from jmarl.models.config import ModelConfig
from jmarl.objectives import policy
from jmarl.objectives.objective import Metrics, Objective, Outputs, PerToken, TokenMask, keep_running
from jmarl.objectives.policy import PolicyTargets, policy_loss
from jmarl.rl import advantages, losses, masked
from jmarl.types import Batch, CriticBatch


class ValueTargets(NamedTuple):
    """What the value loss needs of each token."""

    mask: TokenMask  # tokens before which there is a value
    weights: PerToken  # 1 / number of them in the whole batch
    targets: PerToken
    old_values: PerToken


class ActorCriticTargets(NamedTuple):
    """What the loss of an agent with a value head needs."""

    policy: PolicyTargets
    values: ValueTargets


def prepare_values(batch: Batch | CriticBatch, algorithm: Algorithm, *_: Any) -> tuple[ValueTargets, Metrics]:
    """Return the targets of a critic: lambda-returns where it gives a value for every token, else returns.

    Critics of tokens learn the rewards less the batch's penalty, as the advantages do. Other critics learn the plain returns,
    because the value of a prompt must not depend on the penalty (`policy.penalizes_tokens`)."""
    valid = batch.action_mask & jnp.isfinite(batch.rewards)[..., None]
    old = jnp.broadcast_to(batch.values, valid.shape)
    if algorithm.value_kind == "token":
        mask = valid
        rewards = advantages.terminal_rewards(batch.rewards, mask) - batch.penalty
        targets = old + advantages.gae(rewards, old, mask, lam=algorithm.gae_lambda)
    else:
        mask = value_mask(batch, algorithm.value_kind)
        targets = jnp.broadcast_to(jnp.nan_to_num(batch.rewards)[..., None], valid.shape)
    metrics: Metrics = {"explained_variance": explained_variance(old, targets, mask)}
    return ValueTargets(mask, mask / jnp.maximum(mask.sum(), 1), targets, old), metrics


def explained_variance(values: PerToken, targets: PerToken, mask: TokenMask) -> Float[Array, ""]:
    """Return 1 - var(y - v) / var(y) of targets y and values v, as Stable-Baselines3 and verl do; 0 if all targets are equal.

    A critic that is wrong by a constant explains all variance: `value` and `value_loss` show the constant."""

    def variance(x: PerToken) -> Float[Array, ""]:
        return masked.mean((x - masked.mean(x, mask)) ** 2, mask)

    total = variance(targets)
    return jnp.where(total > 0, 1 - variance(targets - values) / jnp.where(total > 0, total, 1), 0)


def value_mask(batch: Batch | CriticBatch, kind: str) -> TokenMask:
    """Return where a critic gives its value of a valid completion: at the end of the prompt (v), or after the last
    token (q), for which the token axis is one longer than the completions."""
    valid = jnp.isfinite(batch.rewards)[..., None]
    position = 0 if kind == "v" else batch.action_mask.sum(-1, keepdims=True)
    return valid & (jnp.arange(batch.action_mask.shape[-1]) == position)


def trained_rows(batch: Batch | CriticBatch, algorithm: Algorithm) -> Bool[Array, "..."]:
    """Return the rows with a valid return."""
    del algorithm
    return jnp.isfinite(batch.rewards)


def value_loss(outputs: Outputs, targets: ValueTargets, algorithm: Algorithm) -> tuple[Float[Array, ""], Metrics]:
    """Return the loss of a critic and its metrics."""
    loss, metrics = loss_of_values(outputs.values, targets, algorithm)
    return loss, metrics | {"loss": loss}


def loss_of_values(values: PerToken, targets: ValueTargets, algorithm: Algorithm) -> tuple[Float[Array, ""], Metrics]:
    """Return the value loss and its metrics, additive over parts of a batch."""
    clip = algorithm.value_clip
    loss, metrics = losses.value_loss(values, targets.targets, targets.old_values, targets.weights, clip=clip)
    return loss, {name: jnp.sum(targets.weights * x) for name, x in metrics.items()} | {"value_loss": loss}


def values_of_part(targets: ValueTargets, n: int) -> tuple[ValueTargets, Int[Array, ""]]:
    """Return the targets of one of n parts as of a batch of its own, and the number of its trained tokens."""
    return targets._replace(weights=n * targets.weights), targets.mask.sum()


# --- agents with a value head ------------------------------------------------------------------------------------------


def prepare_both(batch: Batch, algorithm: Algorithm, *weights: Any) -> tuple[ActorCriticTargets, Metrics]:
    """Return the targets of an agent and of its value head."""
    actor, metrics = policy.prepare(batch, algorithm, *weights)
    values, value_metrics = prepare_values(batch, algorithm)
    return ActorCriticTargets(actor, values), metrics | value_metrics


def loss_of_both(outputs: Outputs, targets: ActorCriticTargets, algorithm: Algorithm) -> tuple[Float[Array, ""], Metrics]:
    """Return the policy loss plus the weighted loss of the value head."""
    values = outputs.values
    loss, metrics = policy_loss(outputs, targets.policy, algorithm)
    head_loss, value_metrics = loss_of_values(values, targets.values, algorithm)
    loss = loss + algorithm.value_coef * head_loss
    return loss, metrics | value_metrics | {"loss": loss}


def both_of_part(targets: ActorCriticTargets, n: int) -> tuple[ActorCriticTargets, Int[Array, ""]]:
    """Return the targets of one of n parts. A value head also learns from what the policy leaves out."""
    (actor, tokens), (values, tokens_of_head) = policy.targets_of_part(targets.policy, n), values_of_part(targets.values, n)
    return ActorCriticTargets(actor, values), jnp.maximum(tokens, tokens_of_head)


OWN_CRITIC = Objective(prepare_values, value_loss, trained_rows, values_of_part, keep_running)
CENTRAL_CRITIC = OWN_CRITIC._replace(caps_parts=True)
ACTOR_CRITIC = Objective(prepare_both, loss_of_both, trained_rows, both_of_part, policy.update_running)


# --- targets from the values of the same pass --------------------------------------------------------------------------


def with_values_of_pass(objective: Objective) -> Objective:
    """Return an objective whose targets are made of the values that its own forward pass computes. They are among its metrics,
    as `values` [P, G, T], for the agents that learn from them."""
    return objective._replace(prepare=prepare_later, loss=partial(loss_of_pass, objective))


def prepare_later(batch: Batch | CriticBatch, algorithm: Algorithm, model: ModelConfig, *weights: Any) -> tuple[Any, Metrics]:
    """Return what the targets are made of besides the values: the batch, and the parameters, reference and statistics."""
    del algorithm, model
    return (batch, *weights), {}


def loss_of_pass(
    objective: Objective, outputs: Outputs, given: tuple[Any, ...], algorithm: Algorithm
) -> tuple[Float[Array, ""], Metrics]:
    """Return the loss on targets that are made of the values of the outputs. given: by `prepare_later`."""
    values, (batch, *weights) = jax.lax.stop_gradient(outputs.values), given
    targets, metrics = objective.prepare(batch._replace(values=values), algorithm, outputs.model, *weights)
    loss, loss_metrics = objective.loss(outputs, targets, algorithm)
    return loss, metrics | loss_metrics | {"values": values}


OWN_CRITIC_OF_PASS = with_values_of_pass(OWN_CRITIC)
ACTOR_CRITIC_OF_PASS = with_values_of_pass(ACTOR_CRITIC)
