"""The optimizer of one agent, the state of a stack at step 0, and one optimizer step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jmarl.config import Learning, single
from jmarl.models import lora
from jmarl.models.platforms import gradient_memory, optimizer_step, platform_of
from jmarl.models.sharding import constrain, mesh_of, place
from jmarl.rl import advantages
from jmarl.types import Own, StackState, TeamState


def schedule(cfg: Learning) -> optax.Schedule:
    """Learning rate by optimiser step: linear warm-up, then constant, or linearly or by a cosine down to 0."""
    steps = cfg.num_epochs * cfg.num_minibatches
    peak: float = single("learning_rate", cfg.learning_rate)
    warmup_steps, rest = cfg.warmup_updates * steps, (cfg.num_updates - cfg.warmup_updates) * steps
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
    }[cfg.lr_schedule]()
    if not warmup_steps:
        return after
    warmup = optax.linear_schedule(peak / warmup_steps, peak, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after], [warmup_steps])


def rate_of(cfg: Learning, own: Own) -> optax.Schedule:
    """The schedule of one agent."""
    return schedule(cfg) if own.learning_rate is None else lambda steps: own.learning_rate * schedule(cfg)(steps)


def optimizer(cfg: Learning, own: Own | None = None) -> optax.GradientTransformation:
    """The optimiser of one agent after a clip by the global norm; its last part is the learning rate, which counts steps."""
    own = own or Own()
    rate = rate_of(cfg, own)
    clip = single("max_grad_norm", cfg.max_grad_norm) if own.max_grad_norm is None else own.max_grad_norm
    decay = single("weight_decay", cfg.weight_decay) if own.weight_decay is None else own.weight_decay
    after = {
        "adamw": lambda: optax.adamw(rate, cfg.adam_b1, cfg.adam_b2, cfg.adam_eps, weight_decay=decay),
        "lion": lambda: optax.lion(rate, weight_decay=decay),
        "sgd": lambda: optax.chain(
            optax.trace(cfg.momentum) if cfg.momentum else optax.identity(),
            optax.add_decayed_weights(decay),
            optax.scale_by_learning_rate(rate),
        ),
    }[single("optimizer", cfg.optimizer)]()
    return optax.chain(optax.clip_by_global_norm(clip), after)


def updates_done(state: StackState) -> jax.Array:
    """Number of optimiser steps that changed the parameters, [A] (or [] of one agent): the learning rate's own count."""
    return state.opt_state[1][-1].count


def init_stack(params: Any, cfg: Learning, roles: int = 1, learns: bool = True) -> StackState:
    """Training state of a stack from its parameters [A, ...], each of which plays so many roles, on their mesh; a KL term
    freezes a copy of them as reference. With LoRA only their adapters are trained, and their base is the reference. A stack
    that never `learns` has parameters alone."""
    base, params = lora.split(params)
    agents = jax.tree.leaves(params)[0].shape[0]
    running = advantages.nothing_remembered(agents, roles, cfg.kl_coef)
    if not learns:
        return place(StackState(params, (), None, jnp.zeros(agents, jnp.int32), running, None, base), mesh_of(params))

    optimizer(cfg)  # refuses settings of a whole team
    mesh = mesh_of(params)
    moments, grads = _moments(params, single("optimizer", cfg.optimizer), bool(cfg.momentum), mesh, platform_of(params))
    reference = jax.tree.map(jnp.copy, params) if cfg.kl_coef and base is None else None
    return place(StackState(params, moments, reference, jnp.zeros(agents, jnp.int32), running, grads, base), mesh)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _moments(params: Any, name: str, momentum: bool, mesh: Any, platform: str) -> tuple[Any, Any]:
    """What an optimiser begins with, and room for gradients where they are kept: made where they stay, because thrice the
    parameters is much to move."""
    plain = optimizer(Learning(optimizer=name, momentum=0.5 if momentum else 0.0))
    return constrain((jax.vmap(plain.init)(params), gradient_memory(platform, params)), mesh)


def apply_gradients(
    state: StackState,
    grads: Any,
    loss: jax.Array,
    held: jax.Array | None = None,
    own: Own | None = None,
    *,
    learning: Learning,
) -> tuple[StackState, dict]:
    """One optimiser step of one agent, unless it is `held`. A loss or gradient that is not finite changes nothing and is
    counted."""
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    ok = finite if held is None else finite & ~held
    params, opt_state = optimizer_step(optimizer(learning, own).update, grads, state.opt_state, state.params, ok)
    skipped = state.skipped + ~finite
    metrics = {"grad_norm": norm, "learning_rate": rate_of(learning, own or Own())(updates_done(state)), "skipped": skipped}
    kept = None if state.grads is None else grads
    return state._replace(params=params, opt_state=opt_state, skipped=skipped, grads=kept), metrics


def init_state(
    params: Sequence[Any],
    learning: Learning | Sequence[Learning],
    mesh: Mesh | None = None,
    roles: Sequence[int] | None = None,
    learns: Sequence[bool] | None = None,
) -> TeamState:
    """The state at step 0, on the mesh if there is one, from each stack's parameters, which become part of it. learning: one
    for all stacks or of each; roles: that each parameter set of a stack plays (None: one); learns: which stacks do (None: all).
    """
    for i, tree in enumerate(params):
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(tree)):
            raise ValueError(
                f"the parameters of stack {i} were consumed by an earlier run (training updates them in place): "
                "make them anew with make_team"
            )
    one = [1] * len(params)
    of_each = [learning] * len(params) if isinstance(learning, Learning) else learning
    each = zip(params, of_each, roles or one, one if learns is None else learns, strict=True)
    stacks = tuple(init_stack(place(p, mesh), how, n, bool(learn)) for p, how, n, learn in each)
    return TeamState(place(jnp.int32(0), mesh), stacks)
