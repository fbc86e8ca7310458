"""What an agent's loss is made of, and the loss: from a batch to rows with advantages, weights and a critic's targets.

An agent that acts has the `policy` part, a critic the `value` part, and an agent whose critic is a second head of its own both.
All for one agent; `update` lifts it to a stack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmarl.algorithms import algorithm, option, value_kind
from jmarl.config import Learning
from jmarl.learning.data_objective import Pairs, Texts, make_pairs, make_texts, pairs_loss, scores_values, texts_loss
from jmarl.models import decoder, lora
from jmarl.models.config import ModelConfig
from jmarl.models.heads import values_of
from jmarl.rl import advantages, losses, masked
from jmarl.sampling.scoring import hidden_states, score, score_loss, token_scores
from jmarl.types import Batch, Data, PreferenceBatch, Running, TextBatch


class Policy(NamedTuple):
    """What the policy loss needs of each token; [P, G, T], or of any tokens [M]."""

    mask: jax.Array  # bool: tokens that are trained
    share: jax.Array  # 1 / number of trained tokens of the whole batch: what metrics are averaged by
    weights: jax.Array  # how the loss averages tokens
    old_logprobs: jax.Array
    ref_logprobs: jax.Array
    advantages: jax.Array
    kl_weights: jax.Array  # weights times the coefficient of the KL term


class Values(NamedTuple):
    """What the value loss needs of each token, [P, G, T]."""

    mask: jax.Array  # bool: tokens before which there is a value
    weights: jax.Array  # 1 / number of them in the whole batch
    targets: jax.Array
    old: jax.Array


class Rows(NamedTuple):
    """A batch of one agent with all that the loss needs; splits into micro-batches whose losses add up."""

    prompts: jax.Array  # [P, S]
    lengths: jax.Array  # [P]
    tokens: jax.Array  # [P, G, T]
    policy: Policy | None
    values: Values | None
    dropout: jax.Array | None = None  # [] typed key, where adapters have dropout
    pairs: Pairs | None = None
    texts: Texts | None = None

    @property
    def mask(self) -> jax.Array:
        """Tokens of rollouts that are learned from, bool."""
        part = self.policy or self.values
        assert part is not None
        return part.mask


def split(rows: Rows, n: int, setting: str = "micro_batches") -> Rows:
    """Leaves [n, ...]: n parts, cut over the prompts first and then over the group; setting: who asked for them.

    Every n-th prompt goes into a part, so that turns, roles and padding are spread over all of them. Several turns may make any
    number of prompts: those missing are filled up by ones of weight 0.
    """
    keys, rows = None if rows.dropout is None else jax.random.split(rows.dropout, n), rows._replace(dropout=None)
    prompts, group, _ = rows.tokens.shape
    whole = rows.pairs is not None  # a pair stays together
    group = 1 if whole else group
    if prompts > n and prompts % n and prompts * group % n:
        missing = -prompts % n
        rows = jax.tree.map(lambda x: jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1)), rows)
        rows, prompts = rows._replace(lengths=jnp.maximum(rows.lengths, 1)), prompts + missing
    over_p = next(k for k in range(min(n, prompts), 0, -1) if n % k == 0 and prompts % k == 0)
    over_g = n // over_p
    if group % over_g:
        if whole or rows.texts is not None:
            raise ValueError(f"{setting}={n} is more than the {prompts} pairs or texts of an update: use at most batch_size")
        raise ValueError(
            f"{setting}={n} does not divide {prompts} prompts of {group} completions evenly: use a divisor of {prompts}, or "
            f"that times a divisor of {group}; they come of num_prompts, num_generations and num_minibatches"
        )

    def cut(x):  # [P, G, ...]
        x = x.reshape(prompts // over_p, over_p, over_g, group // over_g, *x.shape[2:])
        return jnp.moveaxis(x, (1, 2), (0, 1)).reshape(n, x.shape[0], *x.shape[3:])

    def repeat(x):  # [P, ...]: every part of a group has the same prompt
        return jnp.repeat(jnp.swapaxes(x.reshape(prompts // over_p, over_p, *x.shape[1:]), 0, 1), over_g, 0)

    rest = jax.tree.map(repeat if whole else cut, rows[2:])
    return Rows(repeat(rows.prompts), repeat(rows.lengths), *rest)._replace(dropout=keys)


def make_rows(
    reference: Any,
    running: Running,
    batch: Data,
    params: Any,
    *,
    cfg: ModelConfig,
    learning: Learning,
    trains: str = "policy",
) -> tuple[Rows, dict]:
    """Everything that the loss of one agent's batch needs (no agent axis), and metrics of the batch.

    running: with this batch's returns in it; params: the agent before it changes, only read where its log-probabilities are
    asked for once more; trains: policy, or values (a critic), or both.
    """
    if isinstance(batch, PreferenceBatch):
        return Rows(*batch[:3], None, None, batch.dropout, pairs=make_pairs(batch, learning)), {}
    if isinstance(batch, TextBatch):
        return Rows(*batch[:3], None, None, batch.dropout, texts=make_texts(batch)), {}
    mask = batch.action_mask & jnp.isfinite(batch.rewards)[..., None]
    policy, values, metrics = None, None, {}
    if trains != "values":
        policy, metrics = make_policy(reference, running, batch, params, cfg, learning)
    if trains != "policy":
        values, of_values = make_values(batch, mask, learning)
        metrics |= of_values
    return Rows(batch.prompts, batch.prompt_lengths, batch.tokens, policy, values, batch.dropout), metrics


def make_policy(reference, running: Running, batch: Batch, params, cfg: ModelConfig, learning: Learning) -> tuple[Policy, dict]:
    """Masks, token weights, reference log-probabilities and advantages of one agent's batch."""
    row = algorithm(learning.algorithm)
    valid = jnp.isfinite(batch.rewards)
    if option("mask_overlong", learning.mask_overlong, row):
        valid &= batch.ended
    mask = batch.action_mask & valid[..., None]

    def scored(params):
        return logprobs_of(params, batch, cfg, learning)

    rescored = learning.old_logprobs == "rescored" or learning.importance_cap is not None
    old = jax.lax.stop_gradient(scored(params)) if rescored else batch.old_logprobs
    ref = batch.old_logprobs if reference is None or batch.penalty is not None else scored(reference)
    penalty = jnp.zeros_like(old)
    if batch.penalty is not None:
        ref, penalty = batch.ref_logprobs, jnp.where(mask, batch.penalty, 0)
    elif reference is not None and learning.kl_in == "reward":
        penalty = kl_penalty(batch, ref, mask, running.kl_coef, learning)
    advantage, metrics = make_advantages(running, batch, penalty, mask, learning)
    if rescored:
        metrics["mismatch"] = masked.mean(jnp.abs(old - batch.old_logprobs), mask)
    if learning.importance_cap is not None:
        cap = learning.importance_cap
        weight = importance(old, batch.truncated_logprobs, mask, cap, learning.importance_level)
        advantage, of_tokens = advantage * weight, jnp.broadcast_to(weight, mask.shape)
        metrics["importance"] = masked.mean(of_tokens, mask)
        metrics["importance_capped"] = masked.mean(of_tokens >= cap, mask)
    weights = losses.token_weights(mask, learning.loss_aggregation or row.aggregation, valid, learning.max_new_tokens)
    per_token = jnp.broadcast_to(advantage, mask.shape)
    share = mask / jnp.maximum(mask.sum(), 1)
    return Policy(mask, share, weights, old, ref, per_token, running.kl_coef * weights), metrics


def logprobs_of(params: Any, batch: Batch, cfg: ModelConfig, learning: Learning) -> jax.Array:
    """Log-probabilities [P, G, T] that a parameter set gives to one agent's batch."""
    weights, rows = decoder.cast(params, jnp.dtype(learning.compute_dtype)), (batch.prompts, batch.prompt_lengths)
    return score(weights, cfg, *rows, batch.tokens, temperature=learning.temperature).logprobs


def kl_penalty(batch: Batch, ref: jax.Array, mask: jax.Array, kl_coef: jax.Array, learning: Learning) -> jax.Array:
    """What the KL term takes from the reward of each token [P, G, T]: of the behaviour policy to the reference's ref."""
    return kl_coef * jnp.where(mask, losses.kl_estimate(batch.old_logprobs, ref, kl_kind(learning)), 0)


def kl_kind(learning: Learning) -> str:
    """Which estimate of the KL is meant."""
    return learning.kl_estimator or {"loss": "k3", "reward": "k1"}[learning.kl_in]


def make_advantages(running: Running, batch: Batch, penalty: jax.Array, mask: jax.Array, learning: Learning) -> tuple:
    """Advantages [P, G, T or 1] of one agent's batch, and metrics of them. penalty [P, G, T]: what the KL term takes from the
    reward of each token."""
    row, valid = algorithm(learning.algorithm), mask.any(-1)
    roles = jnp.zeros(valid.shape, jnp.int32) if batch.roles is None else batch.roles
    how = learning.advantage_scale or row.scale
    std = advantages.running_std(running)
    if row.advantage == "gae":
        counted = batch.action_mask & jnp.isfinite(batch.rewards)[..., None]
        rewards = advantages.at_the_end(batch.rewards, counted) - penalty
        lam = option("gae_lambda", learning.gae_lambda, row)
        of_tokens = advantages.gae(rewards, batch.values, counted, lam=lam)
        if how == "running_std":
            of_tokens = advantages.divide(of_tokens, std)
        elif how == "batch_std":
            of_tokens = advantages.divide(of_tokens, spread_of_roles(of_tokens, mask, roles, running.baseline.shape[0]))
        return of_tokens, {"advantage_std": spread_of_roles(of_tokens, mask, 0 * roles, 1)[0, 0, 0]}
    expected = running.baseline[roles] if row.advantage == "ema_baseline" else 0.0
    returns = batch.rewards - penalty.sum(-1)
    same = advantages.members(returns.reshape(-1), batch.groups.reshape(-1))
    if batch.values is not None:
        expected = batch.values[..., 0]
        if row.critic and value_kind(learning) == "q":
            expected = masked.mean(expected.reshape(-1), same, -1).reshape(returns.shape)
    given: dict[str, Any] = dict(expected=expected, roles=roles, running_std=std)
    advantage = advantages.estimate(row.advantage, how, returns, batch.groups, **given)
    nothing = jnp.max(jnp.where(same, jnp.abs(advantage).reshape(-1), 0), -1) < advantages.EPS
    metrics = {
        "advantage_std": jnp.sqrt(masked.mean((advantage - masked.mean(advantage, valid)) ** 2, valid)),
        "zero_variance_share": masked.mean(nothing, valid.reshape(-1)),
    }
    return advantage[..., None], metrics


def spread_of_roles(x: jax.Array, mask: jax.Array, roles: jax.Array, count: int) -> jax.Array:
    """Population std [P, G, 1] of the tokens of x [P, G, T] in mask that have the same of `count` roles [P, G]."""
    mine = mask & (roles == jnp.arange(count)[:, None, None])[..., None]  # [R, P, G, T]
    mean = masked.mean(x, mine, (1, 2, 3))[:, None, None, None]
    return jnp.sqrt(masked.mean((x - mean) ** 2, mine, (1, 2, 3)))[roles][..., None]


def importance(old: jax.Array, sampled: jax.Array, mask: jax.Array, cap: float, level: str) -> jax.Array:
    """min(learner / sampler, cap) [P, G, T or 1] of each token or of each completion (truncated importance sampling)."""
    difference = jnp.where(mask, old - sampled, 0)
    if level == "sequence":
        difference = difference.sum(-1, keepdims=True)
    return jnp.minimum(jnp.exp(difference), cap)


def make_values(batch: Batch, mask: jax.Array, learning: Learning) -> tuple[Values, dict]:
    """A critic's targets: lambda-returns where it gives a value for every token, returns where it gives one a completion. They
    are of the same rewards as the advantages: less the batch's penalty, if it has one."""
    old = jnp.broadcast_to(batch.values, mask.shape)
    kind, lam = value_kind(learning), option("gae_lambda", learning.gae_lambda, algorithm(learning.algorithm))
    here = mask if kind == "token" else value_mask(batch, kind)
    if kind == "token":
        rewards = advantages.at_the_end(batch.rewards, here)
        rewards = rewards if batch.penalty is None else rewards - batch.penalty
        targets = old + advantages.gae(rewards, old, here, lam=lam)
    else:
        targets = jnp.broadcast_to(jnp.nan_to_num(batch.rewards)[..., None], mask.shape)
    left, around = masked.mean((targets - old) ** 2, here), masked.mean(targets, here)
    total = masked.mean((targets - around) ** 2, here)
    explained = jnp.where(total > 0, 1 - left / jnp.where(total > 0, total, 1), 0)
    return Values(here, here / jnp.maximum(here.sum(), 1), targets, old), {"explained_variance": explained}


def value_mask(batch: Batch, kind: str) -> jax.Array:
    """Where in [P, G, T] a critic gives its value of a valid completion: at the end of the prompt (v), or after the last token
    (q), for which the token axis is one longer than the completions."""
    valid = jnp.isfinite(batch.rewards)[..., None]
    at = 0 if kind == "v" else batch.action_mask.sum(-1, keepdims=True)
    return valid & (jnp.arange(batch.action_mask.shape[-1]) == at)


def token_loss(logp: jax.Array, entropy: jax.Array, of: Policy, learning: Learning) -> tuple[jax.Array, dict]:
    """Loss of tokens and their part of its metrics; all arrays [P, G, T] or, any tokens of them, [M]."""
    row = algorithm(learning.algorithm)
    options = {argument: option(name, getattr(learning, name), row) for argument, name in row.options.items()}
    loss, metrics = row.loss(logp, of.old_logprobs, of.advantages, of.weights, **options)
    if learning.entropy_coef:
        loss = loss - learning.entropy_coef * jnp.sum(of.weights * entropy)
    if learning.kl_coef:
        known = jnp.where(of.mask, logp, of.ref_logprobs)  # or a padding's difference overflows, and 0 times it is no number
        kl = losses.kl_estimate(known, of.ref_logprobs, kl_kind(learning))
        metrics["kl"] = kl
        if learning.kl_in == "loss":
            loss = loss + jnp.sum(of.kl_weights * kl)
    drift = logp - of.old_logprobs
    metrics |= {"entropy": entropy, "ratio": jnp.exp(drift), "mismatch": jnp.abs(drift)}
    if learning.target_kl is not None:
        metrics["kl_moved"] = losses.kl_estimate(of.old_logprobs, logp, "k3")
    metrics = {name: masked.total(of.share * x, of.mask) for name, x in metrics.items()}
    return loss, metrics | {"loss": loss}


def rows_loss(
    params: Any,
    rows: Rows,
    cfg: ModelConfig,
    learning: Learning,
    base: Any = None,
    judged: Callable[[jax.Array], tuple[Rows, dict]] | None = None,
) -> tuple[jax.Array, dict]:
    """Loss of one agent's rows and its metrics, both additive over micro-batches. base: what params are adapters of. judged:
    makes the rows from the values [P, G, T] that this very pass gives; those given are then tokens alone."""
    params = lora.join(base, params)
    if rows.dropout is not None:
        params = lora.with_dropout(params, rows.dropout, learning.lora_dropout)
    weights = decoder.cast(params, jnp.dtype(learning.compute_dtype))
    hidden = hidden_states(weights, cfg, rows.prompts, rows.lengths, rows.tokens, learning.remat)
    if rows.pairs is not None:
        return pairs_loss(numbers_of(params, weights, hidden, rows.tokens, learning), rows.pairs, learning)
    if rows.texts is not None:
        return score_loss(weights, hidden, rows.tokens, rows.texts, functools.partial(texts_loss, learning=learning))
    values: Any = values_of(params, hidden).reshape(rows.tokens.shape) if judged or rows.values else None
    loss, metrics = jnp.zeros(()), {}
    if judged:
        rows, metrics = judged(jax.lax.stop_gradient(values))
    if rows.policy is not None:
        loss, of_policy = policy_loss(weights, hidden, rows.tokens, rows.policy, learning)
        metrics |= of_policy
    if rows.values is not None:
        row, of = algorithm(learning.algorithm), rows.values
        clip = option("value_clip", learning.value_clip, row)
        of_values, more = losses.value_loss(values, of.targets, of.old, of.weights, clip=clip)
        metrics |= {name: jnp.sum(of.weights * x) for name, x in more.items()} | {"value_loss": of_values}
        loss = loss + (1.0 if rows.policy is None else option("value_coef", learning.value_coef, row)) * of_values
        metrics["loss"] = loss
    return loss, metrics


def policy_loss(weights: Any, hidden: jax.Array, tokens: jax.Array, of: Policy, learning: Learning) -> tuple[jax.Array, dict]:
    """`token_loss` of all tokens [P, G, T] from their hidden states [P * G * T, D]: of some at a time, unless the ratio is of
    whole completions. weights: the parameters in the compute dtype."""
    of_loss, temperature = functools.partial(token_loss, learning=learning), learning.temperature or 1.0
    row = algorithm(learning.algorithm)
    if "level" in row.options and option("ratio_level", learning.ratio_level, row) != "token":
        scores = token_scores(weights, hidden, tokens.reshape(-1), temperature)
        logp, entropy = (x.reshape(tokens.shape) for x in scores)
        return of_loss(logp, entropy, of)
    return score_loss(weights, hidden, tokens, of, of_loss, temperature=temperature)


def numbers_of(params: Any, weights: Any, hidden: jax.Array, tokens: jax.Array, learning: Learning) -> jax.Array:
    """What pairs are compared by, of each of tokens [P, G, T] with hidden states [P * G * T, D]: their log-probabilities (at
    temperature 1, whatever was sampled with), or values before them. weights: params in the compute dtype."""
    if scores_values(learning):
        return values_of(params, hidden).reshape(tokens.shape)
    return token_scores(weights, hidden, tokens.reshape(-1), 1.0)[0].reshape(tokens.shape)
