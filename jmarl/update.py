"""What a stack learns from a batch: advantages, loss, gradients over micro-batches, clip, AdamW; for one agent, lifted to a
stack. One optimiser step, or several: passes over the batch's parts until the policy has moved as far as it may.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.stages import Lowered

from jmarl import advantages, losses, masked
from jmarl.algorithms import algorithm, option
from jmarl.config import Learning
from jmarl.models import decoder
from jmarl.models.config import ModelConfig
from jmarl.scoring import score, score_loss
from jmarl.sharding import apart, batch_shardings, constrain, mesh_of, over_agents, place, state_shardings
from jmarl.stack import COMPILER, per_agent
from jmarl.types import TRACES, Batch, StackState


def schedule(cfg: Learning) -> optax.Schedule:
    """Learning rate by optimiser step: linear warm-up, then constant, or linearly or by a cosine down to 0."""
    steps = cfg.num_epochs * cfg.num_minibatches
    peak, warmup_steps, rest = cfg.learning_rate, cfg.warmup_updates * steps, (cfg.num_updates - cfg.warmup_updates) * steps
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
    }[cfg.lr_schedule]()
    if not warmup_steps:
        return after
    warmup = optax.linear_schedule(peak / warmup_steps, peak, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after], [warmup_steps])


def optimizer(cfg: Learning) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) after a clip by the global norm, of one agent."""
    adam = optax.adamw(schedule(cfg), cfg.adam_b1, cfg.adam_b2, cfg.adam_eps, weight_decay=cfg.weight_decay)
    return optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm), adam)


def updates_done(state: StackState) -> jax.Array:
    """Number of optimiser steps that changed the parameters, [A] (or [] of one agent): Adam's own count."""
    return state.opt_state[1][0].count


def init_stack(params: Any, cfg: Learning) -> StackState:
    """Training state of a stack from its parameters [A, ...], on their mesh; a KL term freezes a copy of them as reference."""

    def init(params):
        return jax.vmap(optimizer(cfg).init)(params), jax.tree.map(jnp.zeros_like, params)

    mesh = mesh_of(params)
    where = None if mesh is None else state_shardings(mesh, jax.eval_shape(init, params))
    moments, grads = jax.jit(init, out_shardings=where)(params)  # made where they stay: thrice the parameters is much to move
    reference = jax.tree.map(jnp.copy, params) if cfg.kl_coef else None
    return place(StackState(params, moments, reference, jnp.zeros(jax.tree.leaves(params)[0].shape[0], jnp.int32), grads), mesh)


class Rows(NamedTuple):
    """A batch of one agent with all that the loss needs; splits into micro-batches whose losses add up."""

    prompts: jax.Array  # [P, S]
    lengths: jax.Array  # [P]
    tokens: jax.Array  # [P, G, T], and so are all below but `advantages`
    mask: jax.Array  # bool: tokens that are trained
    share: jax.Array  # 1 / number of trained tokens of the whole batch: what metrics are averaged by
    weights: jax.Array  # how the loss averages tokens
    old_logprobs: jax.Array
    ref_logprobs: jax.Array
    advantages: jax.Array  # [P, G]


def split(rows: Rows, n: int, setting: str = "micro_batches") -> Rows:
    """Leaves [n, ...]: n parts, cut over the prompts first and then over the group; setting: who asked for them.

    Every n-th prompt goes into a part, so that turns, roles and padding are spread over all of them. Several turns may make any
    number of prompts: those missing are filled up by ones of weight 0.
    """
    prompts, group = rows.advantages.shape
    if prompts > n and prompts % n and prompts * group % n:
        missing = -prompts % n
        rows = jax.tree.map(lambda x: jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1)), rows)
        rows, prompts = rows._replace(lengths=jnp.maximum(rows.lengths, 1)), prompts + missing
    over_p = next(k for k in range(min(n, prompts), 0, -1) if n % k == 0 and prompts % k == 0)
    over_g = n // over_p
    if group % over_g:
        raise ValueError(
            f"{setting}={n} does not divide {prompts} prompts of {group} completions evenly: "
            f"use a divisor of num_prompts={prompts}, or that times a divisor of num_generations={group}"
        )

    def cut(x):  # [P, G, ...]
        x = x.reshape(prompts // over_p, over_p, over_g, group // over_g, *x.shape[2:])
        return jnp.moveaxis(x, (1, 2), (0, 1)).reshape(n, x.shape[0], *x.shape[3:])

    def repeat(x):  # [P, ...]: every part of a group has the same prompt
        return jnp.repeat(jnp.swapaxes(x.reshape(prompts // over_p, over_p, *x.shape[1:]), 0, 1), over_g, 0)

    parts = jax.tree.map(cut, rows._replace(prompts=rows.mask, lengths=rows.mask))
    return parts._replace(prompts=repeat(rows.prompts), lengths=repeat(rows.lengths))


def make_rows(reference: Any, batch: Batch, cfg: ModelConfig, learning: Learning) -> tuple[Rows, dict]:
    """Masks, token weights, reference log-probabilities and advantages of one agent's batch (no agent axis)."""
    row = algorithm(learning.algorithm)
    valid = jnp.isfinite(batch.rewards)
    if option("mask_overlong", learning.mask_overlong, row):
        valid &= batch.ended
    mask = batch.action_mask & valid[..., None]
    ref, returns = batch.old_logprobs, batch.rewards
    if reference is not None:
        weights = decoder.cast(reference, jnp.dtype(learning.compute_dtype))
        scored = score(weights, cfg, batch.prompts, batch.prompt_lengths, batch.tokens, temperature=learning.temperature)
        ref = scored.logprobs
        if learning.kl_in == "reward":
            kl = losses.kl_estimate(batch.old_logprobs, ref, learning.kl_estimator)
            returns = returns - learning.kl_coef * masked.total(kl, mask, -1)
    advantage = advantages.estimate(row.advantage, learning.advantage_scale or row.scale, returns, batch.groups)
    same = advantages.members(returns.reshape(-1), batch.groups.reshape(-1))
    nothing = jnp.max(jnp.where(same, jnp.abs(advantage).reshape(-1), 0), -1) < advantages.EPS
    metrics = {
        "advantage_std": jnp.sqrt(masked.mean((advantage - masked.mean(advantage, valid)) ** 2, valid)),
        "zero_variance_share": masked.mean(nothing, valid.reshape(-1)),
    }
    share = mask / jnp.maximum(mask.sum(), 1)
    weights = losses.token_weights(mask, learning.loss_aggregation or row.aggregation, valid, learning.max_new_tokens)
    shared = (batch.prompts, batch.prompt_lengths, batch.tokens)
    return Rows(*shared, mask, share, weights, batch.old_logprobs, ref, advantage), metrics


def token_loss(logp: jax.Array, entropy: jax.Array, of: Rows, learning: Learning) -> tuple[jax.Array, dict]:
    """Loss of tokens and their part of its metrics; all arrays [P, G, T] or, any tokens of them, [M]: the advantages too."""
    row = algorithm(learning.algorithm)
    options = {argument: option(name, getattr(learning, name), row) for argument, name in row.options.items()}
    loss, metrics = row.loss(logp, of.old_logprobs, of.advantages, of.weights, **options)
    if learning.entropy_coef:
        loss = loss - learning.entropy_coef * jnp.sum(of.weights * entropy)
    if learning.kl_coef:
        kl = losses.kl_estimate(logp, of.ref_logprobs, learning.kl_estimator)
        metrics["kl"] = kl
        if learning.kl_in == "loss":
            loss = loss + learning.kl_coef * jnp.sum(of.weights * kl)
    drift = logp - of.old_logprobs
    metrics |= {"entropy": entropy, "ratio": jnp.exp(drift), "mismatch": jnp.abs(drift)}
    if learning.target_kl is not None:
        metrics["kl_moved"] = losses.kl_estimate(of.old_logprobs, logp, "k3")
    metrics = {name: masked.total(of.share * x, of.mask) for name, x in metrics.items()}
    return loss, metrics | {"loss": loss}


def rows_loss(params: Any, rows: Rows, cfg: ModelConfig, learning: Learning) -> tuple[jax.Array, dict]:
    """Loss of one agent's rows and its metrics, both additive over micro-batches."""
    weights = decoder.cast(params, jnp.dtype(learning.compute_dtype))
    inputs = (rows.prompts, rows.lengths, rows.tokens)
    options: dict[str, Any] = dict(temperature=learning.temperature, remat=learning.remat)
    of_loss = functools.partial(token_loss, learning=learning)
    of = rows._replace(advantages=jnp.broadcast_to(rows.advantages[..., None], rows.mask.shape))
    of = of._replace(prompts=None, lengths=None, tokens=None)  # only the tokens' own
    row = algorithm(learning.algorithm)
    if "level" in row.options and option("ratio_level", learning.ratio_level, row) != "token":
        return of_loss(*score(weights, cfg, *inputs, **options), of)
    return score_loss(weights, cfg, *inputs, of, of_loss, **options)


def gradients(params: Any, rows: Rows, cfg: ModelConfig, learning: Learning) -> tuple[Any, dict]:
    """Gradients of `rows_loss` and its metrics, accumulated over micro-batches: equal to one big batch's."""
    grad = jax.grad(rows_loss, has_aux=True)
    if learning.micro_batches == 1:
        return grad(params, rows, cfg, learning)
    parts = split(rows, learning.micro_batches)
    zeros = (
        jax.tree.map(jnp.zeros_like, params),
        jax.tree.map(jnp.zeros_like, _metrics_like(params, parts, cfg, learning)),
    )

    def accumulate(carry, part):
        return jax.tree.map(jnp.add, carry, grad(params, part, cfg, learning)), None

    return lax.scan(accumulate, zeros, parts)[0]


def _metrics_like(params, parts, cfg, learning):
    part = jax.tree.map(lambda x: x[0], parts)
    return jax.eval_shape(functools.partial(rows_loss, cfg=cfg, learning=learning), params, part)[1]


def agent_gradients(params: Any, reference: Any, batch: Batch, cfg: ModelConfig, learning: Learning) -> tuple[Any, dict]:
    """Gradients and metrics of one agent from its batch (no agent axis)."""
    rows, about_batch = make_rows(reference, batch, cfg, learning)
    grads, metrics = gradients(params, rows, cfg, learning)
    return grads, metrics | about_batch


def apply_gradients(
    state: StackState, grads: Any, loss: jax.Array, held: jax.Array | None = None, *, learning: Learning
) -> tuple[StackState, dict]:
    """One optimiser step of one agent, unless it is `held`. A loss or gradient that is not finite changes nothing and is
    counted."""
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    ok = finite if held is None else finite & ~held
    adam = optimizer(learning)

    def choose(ok, new, old):
        return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)

    changes, _ = adam.update(grads, state.opt_state, state.params)
    params = choose(ok, optax.apply_updates(state.params, changes), state.params)
    # The moments are made once more, after the parameters (which `written` has XLA wait for): both are then written in place,
    # and no copy of the moments is kept. (`written` is false for parameters that were broken before.)
    written = jnp.isfinite(sum(leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(params)))
    _, moments = adam.update(
        grads, choose(written, state.opt_state, jax.tree.map(jnp.zeros_like, state.opt_state)), state.params
    )
    opt_state = choose(ok & written, moments, state.opt_state)
    skipped = state.skipped + ~finite
    metrics = {"grad_norm": norm, "learning_rate": schedule(learning)(updates_done(state)), "skipped": skipped}
    return StackState(params, opt_state, state.reference, skipped, grads), metrics


def one_step(state: StackState, reference: Any, batch: Batch, *, cfg, learning: Learning, how: str) -> tuple[StackState, dict]:
    """One optimiser step of a stack [A, ...] on a whole batch."""
    gradients_of = per_agent(functools.partial(agent_gradients, cfg=cfg, learning=learning), how)
    grads, metrics = gradients_of(state.params, reference, batch)
    state, of_step = jax.vmap(functools.partial(apply_gradients, learning=learning))(state, grads, metrics["loss"])
    return state, metrics | of_step


def several_steps(
    state: StackState, reference: Any, batch: Batch, *, cfg, learning: Learning, how: str
) -> tuple[StackState, dict]:
    """`num_epochs` passes over `num_minibatches` parts of a batch, an optimiser step each; advantages and reference are those
    of the whole batch. An agent whose policy has moved by more than `target_kl` makes no further step. Metrics are means over
    the steps made; `steps` counts them."""
    n = learning.num_minibatches
    rows, about_batch = per_agent(functools.partial(make_rows, cfg=cfg, learning=learning), how)(reference, batch)
    parts = jax.vmap(functools.partial(split, n=n, setting="num_minibatches"))(rows._replace(weights=n * rows.weights))
    tokens = parts.mask.sum((2, 3, 4), keepdims=True)  # of each part [A, n]: it has means of its own
    parts = parts._replace(share=parts.mask / jnp.maximum(tokens, 1))
    gradients_of = per_agent(functools.partial(gradients, cfg=cfg, learning=learning), how)
    apply = jax.vmap(functools.partial(apply_gradients, learning=learning))

    def step(carry, part):
        state, held = carry
        grads, metrics = gradients_of(state.params, jax.tree.map(lambda x: x[:, part], parts))
        if learning.target_kl is not None:
            held |= metrics["kl_moved"] > learning.target_kl
        still = held | (tokens[:, part].reshape(-1) == 0)  # nothing to learn from: Adam would go on by its momentum
        state, of_step = apply(state, grads, metrics["loss"], still)
        return (state, held), (metrics | of_step, ~still)

    order = jnp.tile(jnp.arange(n), learning.num_epochs)
    held = jnp.zeros(rows.mask.shape[0], bool)
    (state, _), (metrics, made) = lax.scan(step, (state, held), order)
    last = {name: metrics.pop(name)[-1] for name in ("learning_rate", "skipped")}
    steps = {"steps": made.sum(0)}
    made = made.at[0].set(True)  # the first part was seen, whether or not it was learned from
    return state, {name: masked.mean(x, made, 0) for name, x in metrics.items()} | last | about_batch | steps


@functools.partial(
    jax.jit,
    static_argnames=("cfg", "learning", "mode", "mesh"),
    donate_argnames="state",
    keep_unused=True,  # the old gradients, whose memory the new ones take
    compiler_options=COMPILER,
)
def _update(state: StackState, reference: Any, batch: Batch, *, cfg, learning, mode, mesh):
    TRACES["update"] += 1
    agents = batch.tokens.shape[0]
    how = mode if mesh is None or apart(mesh, agents) else "vmap"  # one after the other would gather them from their devices

    of_device = one_step if learning.num_epochs * learning.num_minibatches == 1 else several_steps
    of_device = functools.partial(of_device, cfg=cfg, learning=learning, how=how)
    state, metrics = over_agents(of_device, mesh, agents)(state, reference, batch)
    return constrain(state, mesh), metrics


def update_stack(
    state: StackState, batch: Batch, *, cfg: ModelConfig, learning: Learning, mode: str = "map"
) -> tuple[StackState, dict]:
    """One update of every agent of a stack [A, ...], where the state lies. state is donated. Returns the new state and
    metrics, each [A].

    mode says how the gradients of the agents on one device are made. `vmap`: at once; what small models want. `map`: one
    after the other, with the temporary memory of one; on a CPU as fast.
    """
    arguments, static = _arguments(state, batch, cfg=cfg, learning=learning, mode=mode)
    trained, metrics = _update(*arguments, **static)
    return trained._replace(reference=state.reference), metrics


def lower_update(state: StackState, batch: Batch, *, cfg: ModelConfig, learning: Learning, mode: str = "map") -> Lowered:
    """The program of `update_stack` for such arguments; nothing is donated."""
    arguments, static = _arguments(state, batch, cfg=cfg, learning=learning, mode=mode)
    return _update.lower(*arguments, **static)


def _arguments(state: StackState, batch: Batch, **static: Any) -> tuple[tuple, dict]:
    """Arguments of `_update`."""
    mesh = mesh_of(state.params)
    if mesh is not None:
        batch = jax.device_put(batch, batch_shardings(mesh, batch))
    trained = state._replace(reference=None)  # frozen: neither donated nor returned
    return (trained, state.reference, batch), static | dict(mesh=mesh)
