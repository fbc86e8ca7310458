"""The loss of one agent on a batch of rollouts, pairs or texts.

`make_loss_inputs` turns a batch into what the loss needs of every token: advantages, weights, targets of values.
`loss_of_inputs` runs the model on them. The first is computed once per batch, the second once per micro-batch; losses and
metrics of micro-batches add up to those of the batch. All functions are for one agent; `update` lifts them to a stack."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmarl.algorithms import Algorithm
from jmarl.learning.data_objective import (
    PairTargets,
    TextTargets,
    make_pair_targets,
    make_text_targets,
    pairs_loss,
    texts_loss,
)
from jmarl.models import decoder, lora
from jmarl.models.config import ModelConfig
from jmarl.models.heads import values_of
from jmarl.rl import advantages, losses, masked
from jmarl.sampling.scoring import hidden_states, score, score_loss, token_scores
from jmarl.types import Batch, Data, PreferenceBatch, Running, TextBatch


class PolicyTargets(NamedTuple):
    """What the policy loss needs of each token: arrays [P, G, T], or [M] of any tokens."""

    mask: jax.Array  # bool: tokens that are trained
    share: jax.Array  # 1 / number of trained tokens of the whole batch, the weight of a token in metrics
    weights: jax.Array  # weight of a token in the loss
    old_logprobs: jax.Array
    ref_logprobs: jax.Array
    advantages: jax.Array
    kl_weights: jax.Array  # weights times the coefficient of the KL term


class ValueTargets(NamedTuple):
    """What the value loss needs of each token, arrays [P, G, T]."""

    mask: jax.Array  # bool: tokens before which there is a value
    weights: jax.Array  # 1 / number of them in the whole batch
    targets: jax.Array
    old_values: jax.Array


class ActorCriticTargets(NamedTuple):
    """What an agent with a value head needs."""

    policy: PolicyTargets
    values: ValueTargets


Targets = PolicyTargets | ValueTargets | ActorCriticTargets | PairTargets | TextTargets


class LossInputs(NamedTuple):
    """A batch of one agent with everything that its loss needs."""

    prompts: jax.Array  # [P, S] int32
    prompt_lengths: jax.Array  # [P] int32
    tokens: jax.Array  # [P, G, T] int32
    targets: Targets | None  # None: they are made from values of the same pass (`values_to_targets`)
    dropout: jax.Array | None = None  # [] typed key, where adapters have dropout

    @property
    def trained_tokens(self) -> jax.Array:
        """Return which tokens of rollouts are trained, bool."""
        assert isinstance(self.targets, PolicyTargets | ValueTargets | ActorCriticTargets)
        return self.targets.policy.mask if isinstance(self.targets, ActorCriticTargets) else self.targets.mask


def split(inputs: LossInputs, n: int, setting: str = "micro_batches") -> LossInputs:
    """Split inputs into n parts, leaves [n, ...]: over the prompts first, then over the group.

    Every n-th prompt goes into a part, so that turns, roles and padding are spread over all parts. Several turns may give any
    number of prompts; missing ones are padded with weight 0. setting: named in the error where n does not divide the batch."""
    keys = None if inputs.dropout is None else jax.random.split(inputs.dropout, n)
    inputs = inputs._replace(dropout=None)
    prompts, group, _ = inputs.tokens.shape
    in_pairs = isinstance(inputs.targets, PairTargets)  # a pair stays together
    group = 1 if in_pairs else group
    if prompts > n and prompts % n and prompts * group % n:
        padding = -prompts % n
        inputs = jax.tree.map(lambda x: jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1)), inputs)
        inputs, prompts = inputs._replace(prompt_lengths=jnp.maximum(inputs.prompt_lengths, 1)), prompts + padding
    over_prompts = next(k for k in range(min(n, prompts), 0, -1) if n % k == 0 and prompts % k == 0)
    over_group = n // over_prompts
    if group % over_group:
        if in_pairs or isinstance(inputs.targets, TextTargets):
            raise ValueError(f"{setting}={n} is more than the {prompts} pairs or texts of an update: use at most batch_size")
        raise ValueError(
            f"{setting}={n} does not divide {prompts} prompts of {group} completions evenly: use a divisor of {prompts}, or "
            f"that times a divisor of {group}; they follow from num_prompts, num_generations and num_minibatches"
        )

    def cut(x: jax.Array) -> jax.Array:  # [P, G, ...]
        x = x.reshape(prompts // over_prompts, over_prompts, over_group, group // over_group, *x.shape[2:])
        return jnp.moveaxis(x, (1, 2), (0, 1)).reshape(n, x.shape[0], *x.shape[3:])

    def repeat(x: jax.Array) -> jax.Array:  # [P, ...]: every part of a group has the same prompt
        by_part = jnp.swapaxes(x.reshape(prompts // over_prompts, over_prompts, *x.shape[1:]), 0, 1)
        return jnp.repeat(by_part, over_group, 0)

    tokens, targets = jax.tree.map(repeat if in_pairs else cut, (inputs.tokens, inputs.targets))
    return LossInputs(repeat(inputs.prompts), repeat(inputs.prompt_lengths), tokens, targets, keys)


def make_loss_inputs(
    reference: Any,
    running: Running,
    batch: Data,
    params: Any,
    *,
    model: ModelConfig,
    algorithm: Algorithm,
    trains: str = "policy",
) -> tuple[LossInputs, dict[str, jax.Array]]:
    """Return everything that the loss of one agent's batch needs, and metrics of the batch.

    running: statistics that include this batch's returns; params: the agent before the update, read only where its
    log-probabilities are computed again; trains: `policy`, `values` (a critic) or `both`."""
    targets: Targets
    metrics: dict[str, jax.Array] = {}
    if isinstance(batch, PreferenceBatch):
        targets = make_pair_targets(batch, algorithm)
    elif isinstance(batch, TextBatch):
        targets = make_text_targets(batch)
    else:
        policy = values = None
        if trains != "values":
            policy, metrics = make_policy_targets(reference, running, batch, params, model, algorithm)
        if trains != "policy":
            values, value_metrics = make_value_targets(batch, algorithm)
            metrics |= value_metrics
        if policy is not None and values is not None:
            targets = ActorCriticTargets(policy, values)
        else:
            targets = policy if policy is not None else values  # type: ignore[assignment]  # one of them is made
    dropout = batch.keys if algorithm.lora.lora_dropout else None
    return LossInputs(batch.prompts, batch.prompt_lengths, batch.tokens, targets, dropout), metrics


def make_policy_targets(
    reference: Any, running: Running, batch: Batch, params: Any, model: ModelConfig, algorithm: Algorithm
) -> tuple[PolicyTargets, dict[str, jax.Array]]:
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


def batch_logprobs(params: Any, batch: Batch, model: ModelConfig, algorithm: Algorithm) -> jax.Array:
    """Return the log-probabilities [P, G, T] that parameters give to the completions of one agent's batch."""
    weights = decoder.cast(params, jnp.dtype(algorithm.compute_dtype))
    scores = score(weights, model, batch.prompts, batch.prompt_lengths, batch.tokens, temperature=algorithm.temperature)
    return scores.logprobs


def kl_penalty(batch: Batch, ref: jax.Array, mask: jax.Array, kl_coef: jax.Array, algorithm: Algorithm) -> jax.Array:
    """Return what the KL term subtracts from the reward of each token [P, G, T]: the estimated KL of the behavior policy to the
    reference, whose log-probabilities are ref."""
    return kl_coef * jnp.where(mask, losses.kl_estimate(batch.old_logprobs, ref, algorithm.loss.kl_estimator or "k1"), 0)


def make_advantages(
    running: Running, batch: Batch, penalty: jax.Array, mask: jax.Array, algorithm: Algorithm
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return advantages [P, G, T or 1] of one agent's batch, and metrics. penalty [P, G, T]: subtracted from token rewards."""
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


def largest_magnitude(x: jax.Array, valid: jax.Array) -> jax.Array:
    """Return the largest valid |x| [] of a group."""
    return jnp.max(jnp.where(valid, jnp.abs(x), 0))


def token_advantages(
    running: Running, batch: Batch, penalty: jax.Array, mask: jax.Array, algorithm: Algorithm
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return advantages [P, G, T] by GAE over the tokens of each completion, and metrics."""
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


def importance(old: jax.Array, sampled: jax.Array, mask: jax.Array, cap: float, level: str) -> jax.Array:
    """Return min(learner / sampler, cap) [P, G, T or 1] of each token or completion (truncated importance sampling)."""
    difference = jnp.where(mask, old - sampled, 0)
    if level == "sequence":
        difference = difference.sum(-1, keepdims=True)
    return jnp.minimum(jnp.exp(difference), cap)


def make_value_targets(batch: Batch, algorithm: Algorithm) -> tuple[ValueTargets, dict[str, jax.Array]]:
    """Return the targets of a critic: lambda-returns where it gives a value for every token, else returns.

    They are of the same rewards as the advantages: less the batch's penalty, if it has one."""
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
    residual, center = masked.mean((targets - old) ** 2, mask), masked.mean(targets, mask)
    total = masked.mean((targets - center) ** 2, mask)
    explained = jnp.where(total > 0, 1 - residual / jnp.where(total > 0, total, 1), 0)
    return ValueTargets(mask, mask / jnp.maximum(mask.sum(), 1), targets, old), {"explained_variance": explained}


def value_mask(batch: Batch, kind: str) -> jax.Array:
    """Return where in [P, G, T] a critic gives its value of a valid completion: at the end of the prompt (v), or after the last
    token (q), for which the token axis is one longer than the completions."""
    valid = jnp.isfinite(batch.rewards)[..., None]
    position = 0 if kind == "v" else batch.action_mask.sum(-1, keepdims=True)
    return valid & (jnp.arange(batch.action_mask.shape[-1]) == position)


ValuesToTargets = Callable[[jax.Array], tuple[LossInputs, dict[str, jax.Array]]]


def loss_of_inputs(
    params: Any,
    inputs: LossInputs,
    base: Any = None,
    values_to_targets: ValuesToTargets | None = None,
    *,
    model: ModelConfig,
    algorithm: Algorithm,
) -> tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array | None]]:
    """Return the loss of one agent's inputs, its metrics, and values [P, G, T] where they are of this pass.

    Loss and metrics are additive over micro-batches. base: the frozen parameters that params are adapters of.
    values_to_targets: makes the targets from the values of this very pass, where the inputs have none."""
    params = lora.join(base, params)
    if inputs.dropout is not None:
        params = lora.with_dropout(params, inputs.dropout, algorithm.lora.lora_dropout)
    weights = decoder.cast(params, jnp.dtype(algorithm.compute_dtype))
    hidden = hidden_states(weights, model, inputs.prompts, inputs.prompt_lengths, inputs.tokens, algorithm.optimizer.remat)
    tokens, targets = inputs.tokens, inputs.targets
    if isinstance(targets, PairTargets):
        loss, metrics = pairs_loss(pair_numbers(params, weights, hidden, tokens, algorithm), targets, algorithm)
        return loss, (metrics, None)
    if isinstance(targets, TextTargets):
        text_loss = functools.partial(texts_loss, algorithm=algorithm)
        loss, metrics = score_loss(weights, hidden, tokens, targets, text_loss)
        return loss, (metrics, None)
    new_values, metrics = None, {}
    if values_to_targets is not None or not isinstance(targets, PolicyTargets):
        values = values_of(params, hidden).reshape(tokens.shape)
    if values_to_targets is not None:
        new_values = jax.lax.stop_gradient(values)
        inputs, metrics = values_to_targets(new_values)
        targets = inputs.targets
    if isinstance(targets, ValueTargets):
        loss, value_metrics = value_loss(values, targets, algorithm)
        return loss, (metrics | value_metrics | {"loss": loss}, new_values)
    if isinstance(targets, PolicyTargets):
        loss, policy_metrics = policy_loss(weights, hidden, tokens, targets, algorithm)
        return loss, (metrics | policy_metrics, new_values)
    assert isinstance(targets, ActorCriticTargets)
    loss, policy_metrics = policy_loss(weights, hidden, tokens, targets.policy, algorithm)
    head_loss, value_metrics = value_loss(values, targets.values, algorithm)
    loss = loss + algorithm.value_coef * head_loss
    return loss, (metrics | policy_metrics | value_metrics | {"loss": loss}, new_values)


def value_loss(values: jax.Array, targets: ValueTargets, algorithm: Algorithm) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the value loss of values [P, G, T] and its metrics, additive over parts of a batch."""
    clip = algorithm.value_clip
    loss, metrics = losses.value_loss(values, targets.targets, targets.old_values, targets.weights, clip=clip)
    return loss, {name: jnp.sum(targets.weights * x) for name, x in metrics.items()} | {"value_loss": loss}


def policy_loss(
    weights: Any, hidden: jax.Array, tokens: jax.Array, targets: PolicyTargets, algorithm: Algorithm
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return `token_loss` of all tokens [P, G, T] from their hidden states [P * G * T, D].

    It is computed for some tokens at a time, unless the ratio is that of whole completions. weights: parameters in the compute
    dtype."""
    loss, temperature = functools.partial(token_loss, algorithm=algorithm), algorithm.temperature or 1.0
    if algorithm.options.get("level", "token") != "token":
        scores = token_scores(weights, hidden, tokens.reshape(-1), temperature)
        logp, entropy = (x.reshape(tokens.shape) for x in scores)
        return loss(logp, entropy, targets)
    return score_loss(weights, hidden, tokens, targets, loss, temperature=temperature)


def token_loss(
    logp: jax.Array, entropy: jax.Array, targets: PolicyTargets, algorithm: Algorithm
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of tokens and their part of its metrics. All arrays are [P, G, T] or, of any tokens, [M]."""
    settings = algorithm.loss
    loss, metrics = algorithm.row.loss(logp, targets.old_logprobs, targets.advantages, targets.weights, **algorithm.options)
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


def pair_numbers(params: Any, weights: Any, hidden: jax.Array, tokens: jax.Array, algorithm: Algorithm) -> jax.Array:
    """Return what pairs are compared by, for each of tokens [P, G, T] with hidden states [P * G * T, D].

    Log-probabilities (at temperature 1, whatever was sampled with), or values before the tokens. weights: params in the compute
    dtype."""
    if algorithm.row.margin == "score":
        return values_of(params, hidden).reshape(tokens.shape)
    return token_scores(weights, hidden, tokens.reshape(-1), 1.0)[0].reshape(tokens.shape)
