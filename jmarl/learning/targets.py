"""What the policy loss and the value loss need of every token of a batch of rollouts: masks, weights, advantages, returns.

Computed once per batch, for one agent; `objective` runs the model on them, `update` lifts both to a stack."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from jmarl.algorithms import Algorithm
from jmarl.models import decoder
from jmarl.models.config import ModelConfig
from jmarl.rl import advantages, losses, masked
from jmarl.sampling.scoring import score
from jmarl.types import Batch, Running

Metrics = dict[str, Num[Array, ""]]
PerToken = Float[Array, "prompt group token"]
TokenMask = Bool[Array, "prompt group token"]


class PolicyTargets(NamedTuple):
    """What the policy loss needs of each token: arrays [P, G, T], or [M] of any tokens."""

    mask: Bool[Array, "*token"]  # tokens that are trained
    share: Float[Array, "*token"]  # 1 / number of trained tokens of the whole batch, the weight of a token in metrics
    weights: Float[Array, "*token"]  # weight of a token in the loss
    old_logprobs: Float[Array, "*token"]
    ref_logprobs: Float[Array, "*token"]
    advantages: Float[Array, "*token"]
    kl_weights: Float[Array, "*token"]  # weights times the coefficient of the KL term


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


def make_policy_targets(
    reference: Any, running: Running, batch: Batch, params: Any, model: ModelConfig, algorithm: Algorithm
) -> tuple[PolicyTargets, Metrics]:
    """Return masks, token weights, reference log-probabilities and advantages of one agent's batch, and metrics."""
    loss, valid = algorithm.loss, jnp.isfinite(batch.rewards)
    if loss.mask_overlong:
        valid &= batch.ended
    mask = batch.action_mask & valid[..., None]
    rescored = loss.old_logprobs == "rescored" or loss.importance_cap is not None
    old = jax.lax.stop_gradient(batch_logprobs(params, batch, model, algorithm)) if rescored else batch.old_logprobs
    penalty = jnp.zeros_like(old)
    if batch.penalty is not None:
        ref, penalty = batch.ref_logprobs, jnp.where(mask, batch.penalty, 0)
    elif reference is None:
        ref = batch.old_logprobs
    else:
        ref = batch_logprobs(reference, batch, model, algorithm)
        if loss.kl_in == "reward":
            penalty = kl_penalty(batch, ref, mask, running.kl_coef, algorithm)
    advantage, metrics = make_advantages(running, batch, penalty, mask, algorithm)
    if rescored:
        metrics["mismatch"] = masked.mean(jnp.abs(old - batch.old_logprobs), mask)
    if loss.importance_cap is not None:
        weight = importance(old, batch.truncated_logprobs, mask, loss.importance_cap, loss.importance_level)
        advantage, token_weight = advantage * weight, jnp.broadcast_to(weight, mask.shape)
        metrics["importance"] = masked.mean(token_weight, mask)
        metrics["importance_capped"] = masked.mean(token_weight >= loss.importance_cap, mask)
    weights = losses.token_weights(mask, loss.loss_aggregation or "token_mean", valid, algorithm.max_new_tokens)
    share = mask / jnp.maximum(mask.sum(), 1)
    advantage = jnp.broadcast_to(advantage, mask.shape)
    return PolicyTargets(mask, share, weights, old, ref, advantage, running.kl_coef * weights), metrics


def batch_logprobs(params: Any, batch: Batch, model: ModelConfig, algorithm: Algorithm) -> PerToken:
    """Return the log-probabilities that parameters give to the completions of one agent's batch."""
    weights = decoder.cast(params, jnp.dtype(algorithm.compute_dtype))
    scores = score(weights, model, batch.prompts, batch.prompt_lengths, batch.tokens, temperature=algorithm.temperature)
    return scores.logprobs


def kl_penalty(batch: Batch, ref: PerToken, mask: TokenMask, kl_coef: Float[Array, ""], algorithm: Algorithm) -> PerToken:
    """Return what the KL term subtracts from the reward of each token: the estimated KL of the behavior policy to the
    reference, whose log-probabilities are ref."""
    return kl_coef * jnp.where(mask, losses.kl_estimate(batch.old_logprobs, ref, algorithm.loss.kl_estimator or "k1"), 0)


def make_advantages(
    running: Running, batch: Batch, penalty: PerToken, mask: TokenMask, algorithm: Algorithm
) -> tuple[Float[Array, "prompt group token_or_1"], Metrics]:
    """Return advantages of one agent's batch, and metrics. penalty: subtracted from token rewards."""
    if algorithm.row.per_token:
        return token_advantages(running, batch, penalty, mask, algorithm)
    row, valid, num_roles = algorithm.row, mask.any(-1), running.baseline.shape[0]
    roles = jnp.zeros(valid.shape, jnp.int32) if batch.roles is None else batch.roles
    returns = batch.rewards - penalty.sum(-1)
    finite = jnp.isfinite(returns)
    expected = jnp.zeros(())
    if row.baseline == "ema":
        expected = running.baseline[roles]
    if batch.values is not None:
        expected = batch.values[..., 0]
        if row.critic and algorithm.value_kind == "q":
            expected = advantages.per_group(masked.mean, expected, finite, batch.groups)
    advantage = advantages.estimate(
        row.estimator,
        returns - expected,
        batch.groups,
        scale=algorithm.loss.advantage_scale or "none",
        roles=roles,
        num_roles=num_roles,
        running_std=advantages.running_std(running),
    )
    largest = advantages.per_group(largest_magnitude, advantage, finite, batch.groups)
    metrics = {
        "advantage_std": jnp.sqrt(masked.mean((advantage - masked.mean(advantage, valid)) ** 2, valid)),
        "zero_variance_share": masked.mean(largest < advantages.EPS, valid),
    }
    return advantage[..., None], metrics


def largest_magnitude(x: Float[Array, " group"], valid: Bool[Array, " group"]) -> Float[Array, ""]:
    """Return the largest valid |x| of a group."""
    return jnp.max(jnp.where(valid, jnp.abs(x), 0))


def token_advantages(
    running: Running, batch: Batch, penalty: PerToken, mask: TokenMask, algorithm: Algorithm
) -> tuple[PerToken, Metrics]:
    """Return advantages by GAE over the tokens of each completion, and metrics."""
    valid = batch.action_mask & jnp.isfinite(batch.rewards)[..., None]
    rewards = advantages.terminal_rewards(batch.rewards, valid) - penalty
    advantage = advantages.gae(rewards, batch.values, valid, lam=algorithm.gae_lambda)
    scale = algorithm.loss.advantage_scale
    if scale == "running_std":
        advantage = advantages.divide(advantage, advantages.running_std(running))
    elif scale == "batch_std":
        roles = jnp.zeros(mask.shape[:2], jnp.int32) if batch.roles is None else batch.roles
        roles = jnp.broadcast_to(roles[..., None], mask.shape)
        std = advantages.role_std(advantage, mask, roles, running.baseline.shape[0])
        advantage = advantages.divide(advantage, std)
    return advantage, {"advantage_std": advantages.group_std(advantage.reshape(-1), mask.reshape(-1))}


def importance(
    old: PerToken, sampled: PerToken, mask: TokenMask, cap: float, level: str
) -> Float[Array, "prompt group token_or_1"]:
    """Return min(learner / sampler, cap) of each token or completion (truncated importance sampling)."""
    difference = jnp.where(mask, old - sampled, 0)
    if level == "sequence":
        difference = difference.sum(-1, keepdims=True)
    return jnp.minimum(jnp.exp(difference), cap)


def make_value_targets(batch: Batch, algorithm: Algorithm) -> tuple[ValueTargets, Metrics]:
    """Return the targets of a critic: lambda-returns where it gives a value for every token, else returns.

    Critics of tokens learn the rewards less the batch's penalty, as the advantages do. Other critics learn the plain returns,
    because the value of a prompt must not depend on the penalty (`critics.penalizes_tokens`)."""
    valid = batch.action_mask & jnp.isfinite(batch.rewards)[..., None]
    old = jnp.broadcast_to(batch.values, valid.shape)
    if algorithm.value_kind == "token":
        mask = valid
        rewards = advantages.terminal_rewards(batch.rewards, mask)
        rewards = rewards if batch.penalty is None else rewards - batch.penalty
        targets = old + advantages.gae(rewards, old, mask, lam=algorithm.gae_lambda)
    else:
        mask = value_mask(batch, algorithm.value_kind)
        targets = jnp.broadcast_to(jnp.nan_to_num(batch.rewards)[..., None], valid.shape)
    metrics = {"explained_variance": explained_variance(old, targets, mask)}
    return ValueTargets(mask, mask / jnp.maximum(mask.sum(), 1), targets, old), metrics


def explained_variance(values: PerToken, targets: PerToken, mask: TokenMask) -> Float[Array, ""]:
    """Return 1 - var(y - v) / var(y) of targets y and values v, as Stable-Baselines3 and verl do; 0 if all targets are equal.

    A critic that is wrong by a constant explains all variance: `value` and `value_loss` show the constant."""

    def variance(x: PerToken) -> Float[Array, ""]:
        return masked.mean((x - masked.mean(x, mask)) ** 2, mask)

    total = variance(targets)
    return jnp.where(total > 0, 1 - variance(targets - values) / jnp.where(total > 0, total, 1), 0)


def value_mask(batch: Batch, kind: str) -> TokenMask:
    """Return where a critic gives its value of a valid completion: at the end of the prompt (v), or after the last
    token (q), for which the token axis is one longer than the completions."""
    valid = jnp.isfinite(batch.rewards)[..., None]
    position = 0 if kind == "v" else batch.action_mask.sum(-1, keepdims=True)
    return valid & (jnp.arange(batch.action_mask.shape[-1]) == position)
