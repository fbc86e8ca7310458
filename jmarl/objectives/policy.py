"""The objective of a policy on rollouts: returns minus a baseline, weights of tokens, the KL term, and the loss.

    advantage = estimator(return - penalty - baseline) / scale      of one group; with a critic of tokens: GAE
    loss      = row.loss(log pi, log pi_old, advantage, weights) - entropy_coef H + kl_coef KL

To add a metric, add it to a dict that is returned here. `advantages` [P, G] are no column but stand in the completions of a
step: before the weights of `importance`, of tokens their mean; infinite where the loss ignores a completion (NaN would stop
runs with `jax_debug_nans`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jmarl.algorithms import Algorithm
from jmarl.models import decoder
from jmarl.models.config import ModelConfig
from jmarl.models.rows import on_rows
from jmarl.objectives.objective import Metrics, Objective, Outputs, PerToken, TokenMask
from jmarl.rl import advantages, losses, masked
from jmarl.sampling.scoring import score, score_loss, token_scores
from jmarl.types import Batch, Running


class PolicyTargets(NamedTuple):
    """What the policy loss needs of each token: arrays [P, G, T], or [M] of any tokens."""

    mask: Bool[Array, "*token"]  # tokens that are trained
    share: Float[Array, "*token"]  # 1 / number of trained tokens of the whole batch, the weight of a token in metrics
    weights: Float[Array, "*token"]  # weight of a token in the loss
    old_logprobs: Float[Array, "*token"]
    ref_logprobs: Float[Array, "*token"]
    advantages: Float[Array, "*token"]
    kl_weights: Float[Array, "*token"]  # weights times the coefficient of the KL term


def prepare(
    batch: Batch, algorithm: Algorithm, model: ModelConfig, params: Any, reference: Any, running: Running
) -> tuple[PolicyTargets, Metrics]:
    """Return masks, token weights, reference log-probabilities and advantages of one agent's batch, and metrics."""
    loss, valid = algorithm.loss, trained_rows(batch, algorithm)
    mask = batch.action_mask & valid[..., None]
    rescored = loss.old_logprobs == "rescored" or loss.importance_cap is not None
    old = jax.lax.stop_gradient(batch_logprobs(params, batch, model, algorithm)) if rescored else batch.old_logprobs
    penalty = jnp.zeros_like(old)
    if reference is None:
        ref = batch.old_logprobs
    elif penalizes_tokens(algorithm):
        ref, penalty = batch.ref_logprobs, jnp.where(mask, batch.penalty, 0)
    else:
        ref = batch_logprobs(reference, batch, model, algorithm)
        if loss.kl_in == "reward":
            penalty = kl_penalty(batch, ref, mask, running.kl_coef, algorithm)
    advantage, metrics = make_advantages(batch, running, penalty, mask, algorithm)
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


def trained_rows(batch: Batch, algorithm: Algorithm) -> Bool[Array, "..."]:
    """Return the rows with a valid return; with `mask_overlong` only those that their agent ended."""
    valid = jnp.isfinite(batch.rewards)
    return valid & batch.ended if algorithm.loss.mask_overlong else valid


def batch_logprobs(params: Any, batch: Batch, model: ModelConfig, algorithm: Algorithm) -> PerToken:
    """Return the log-probabilities that parameters give to the completions of one agent's batch."""
    weights = decoder.compute_weights(params, model, jnp.dtype(algorithm.compute_dtype))

    def logprobs(*rows: Array) -> PerToken:
        return score(weights, model, *rows, temperature=algorithm.temperature).logprobs

    return on_rows(logprobs, model.placement.row_parts, batch.prompts, batch.prompt_lengths, batch.tokens)


def penalizes_tokens(algorithm: Algorithm) -> bool:
    """Whether the KL penalty is part of each token's reward, which critics learn too: in rows with values of tokens, as in
    InstructGPT (arXiv 2203.02155). Other rows subtract the sum over a completion from its return, only in the agent's
    advantage: a value of a prompt must not depend on it."""
    return algorithm.value_kind == "token" and algorithm.loss.kl_coef > 0 and algorithm.loss.kl_in == "reward"


def kl_penalty(batch: Batch, ref: PerToken, mask: TokenMask, kl_coef: Float[Array, ""], algorithm: Algorithm) -> PerToken:
    """Return what the KL term subtracts from the reward of each token: the estimated KL of the behavior policy to the
    reference, whose log-probabilities are ref."""
    return kl_coef * jnp.where(mask, losses.kl_estimate(batch.old_logprobs, ref, algorithm.loss.kl_estimator or "k1"), 0)


# --- advantages --------------------------------------------------------------------------------------------------------


def make_advantages(
    batch: Batch, running: Running, penalty: PerToken, mask: TokenMask, algorithm: Algorithm
) -> tuple[Float[Array, "prompt group token_or_1"], Metrics]:
    """Return advantages of one agent's batch, and metrics. penalty: subtracted from token rewards."""
    if algorithm.value_kind == "token":
        return token_advantages(batch, running, penalty, mask, algorithm)
    row, valid = algorithm.row, mask.any(-1)
    returns = batch.rewards - penalty.sum(-1)
    finite = jnp.isfinite(returns)
    groups = batch.groups if has_own_groups(row.grouping, returns.shape[1]) else None
    expected = running.baseline[batch.roles] if row.baseline == "ema" else batch.values[..., 0]
    if row.across_turns:
        expected = jnp.zeros_like(expected)
    if algorithm.value_kind == "q":
        expected = advantages.per_group(masked.mean, expected, finite, groups)
    advantage = advantages.estimate(
        row.estimator,
        returns - expected,
        groups,
        scale=algorithm.loss.advantage_scale or "none",
        roles=batch.roles,
        num_roles=running.baseline.shape[0],
        running_std=advantages.moments_std(running.num_returns, running.squares),
    )
    if row.across_turns:
        advantage += jnp.where(finite, batch.values[..., 0], 0)
    largest = advantages.per_group(largest_magnitude, advantage, finite, groups)
    metrics: Metrics = {
        "advantage_std": jnp.sqrt(masked.mean((advantage - masked.mean(advantage, valid)) ** 2, valid)),
        "zero_variance_share": masked.mean(largest < advantages.EPS, valid),
        "advantages": jnp.where(valid, advantage, jnp.inf),
    }
    return advantage[..., None], metrics


def has_own_groups(grouping: str, group_size: int) -> bool:
    """Return whether the rows that are compared are other than the completions of one prompt: in whole episodes, or if prompts
    have one completion each."""
    return grouping == "episode" or group_size == 1


def largest_magnitude(x: Float[Array, " group"], valid: Bool[Array, " group"]) -> Float[Array, ""]:
    """Return the largest valid |x| of a group."""
    return jnp.max(jnp.where(valid, jnp.abs(x), 0))


def token_advantages(
    batch: Batch, running: Running, penalty: PerToken, mask: TokenMask, algorithm: Algorithm
) -> tuple[PerToken, Metrics]:
    """Return advantages by GAE over the tokens of each completion, and metrics."""
    valid = batch.action_mask & jnp.isfinite(batch.rewards)[..., None]
    rewards = advantages.terminal_rewards(batch.rewards, valid) - penalty
    advantage = advantages.gae(rewards, batch.values, valid, lam=algorithm.gae_lambda)
    scale = algorithm.loss.advantage_scale
    if scale == "running_std":
        advantage = advantages.divide(advantage, advantages.moments_std(running.num_returns, running.squares))
    elif scale == "batch_std":
        roles = jnp.broadcast_to(batch.roles[..., None], mask.shape)
        std = advantages.role_std(advantage, mask, roles, running.baseline.shape[0])
        advantage = advantages.divide(advantage, std)
    means = jnp.where(mask.any(-1), masked.mean(advantage, mask, -1), jnp.inf)
    return advantage, {"advantage_std": advantages.group_std(advantage.reshape(-1), mask.reshape(-1)), "advantages": means}


def importance(
    old: PerToken, sampled: PerToken, mask: TokenMask, cap: float, level: str
) -> Float[Array, "prompt group token_or_1"]:
    """Return min(learner / sampler, cap) of each token or completion (truncated importance sampling)."""
    difference = jnp.where(mask, old - sampled, 0)
    if level == "sequence":
        difference = difference.sum(-1, keepdims=True)
    return jnp.minimum(jnp.exp(difference), cap)


# --- running statistics ------------------------------------------------------------------------------------------------


def initial_running(agents: int, roles: int, kl_coef: float) -> Running:
    """Return the statistics [A, ...] of agents before their first update."""
    return Running(
        baseline=jnp.zeros((agents, roles)),
        num_returns=jnp.zeros(agents),
        mean=jnp.zeros(agents),
        squares=jnp.zeros(agents),
        # An explicit dtype: a weak one would compile the update again after the coefficient has changed.
        kl_coef=jnp.full(agents, kl_coef, jnp.float32),
    )


def update_running(running: Running, batch: Batch, algorithm: Algorithm) -> Running:
    """Return one agent's statistics after the returns of another batch."""
    baseline = advantages.moving_baseline(running.baseline, batch.rewards, batch.roles, algorithm.ema_decay)
    count, mean, squares = advantages.merge_moments(running.num_returns, running.mean, running.squares, batch.rewards)
    return running._replace(baseline=baseline, num_returns=count, mean=mean, squares=squares)


# --- loss --------------------------------------------------------------------------------------------------------------


def policy_loss(outputs: Outputs, targets: PolicyTargets, algorithm: Algorithm) -> tuple[Float[Array, ""], Metrics]:
    """Return `token_loss` of all tokens.

    It is computed for some tokens at a time, unless the ratio is that of whole completions."""
    loss, temperature = partial(token_loss, algorithm=algorithm), algorithm.temperature or 1.0
    _, weights, hidden, tokens, model, _ = outputs
    if algorithm.options.get("level", "token") != "token":
        scores = token_scores(weights, hidden, tokens.reshape(-1), temperature, model.logit_cap)
        logp, entropy = (x.reshape(tokens.shape) for x in scores)
        return loss(logp, entropy, targets)
    return score_loss(weights, hidden, tokens, targets, loss, temperature=temperature, cap=model.logit_cap)


def token_loss(
    logp: Float[Array, "*token"], entropy: Float[Array, "*token"], targets: PolicyTargets, algorithm: Algorithm
) -> tuple[Float[Array, ""], Metrics]:
    """Return the loss of tokens [P, G, T] or [M] and their part of its metrics."""
    settings = algorithm.loss
    loss, metrics = algorithm.loss_of(logp, targets.old_logprobs, targets.advantages, targets.weights)
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * jnp.sum(targets.weights * entropy)
    if settings.kl_coef:
        # At padding the difference may overflow, and 0 times infinity is NaN.
        safe_logp = jnp.where(targets.mask, logp, targets.ref_logprobs)
        kl = losses.kl_estimate(safe_logp, targets.ref_logprobs, settings.kl_estimator or "k3")
        metrics["kl"] = kl
        if settings.kl_in == "loss":
            loss = loss + jnp.sum(targets.kl_weights * kl)
    drift = logp - targets.old_logprobs
    metrics |= {"entropy": entropy, "ratio": jnp.exp(drift), "mismatch": jnp.abs(drift)}
    if algorithm.optimizer.target_kl is not None:
        metrics["kl_moved"] = losses.kl_estimate(targets.old_logprobs, logp, "k3")
    metrics = {name: masked.total(targets.share * x, targets.mask) for name, x in metrics.items()}
    return loss, metrics | {"loss": loss}


def targets_of_part(targets: PolicyTargets, n: int) -> tuple[PolicyTargets, Int[Array, ""]]:
    """Return the targets of one of n parts as of a batch of its own, and the number of its trained tokens."""
    tokens = targets.mask.sum()
    share = targets.mask / jnp.maximum(tokens, 1)
    return targets._replace(weights=n * targets.weights, kl_weights=n * targets.kl_weights, share=share), tokens


POLICY = Objective(prepare, policy_loss, trained_rows, targets_of_part, update_running)
