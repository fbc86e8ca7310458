"""The optimizer of one agent, the state of a stack at step 0, and one optimizer step."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Num

from jmarl.algorithms import Algorithm
from jmarl.algorithms.constraints import PER_AGENT
from jmarl.config import Optimizer
from jmarl.models import lora, sharding
from jmarl.models.config import ModelConfig
from jmarl.models.platforms import gradient_memory, optimizer_step, platform_of
from jmarl.models.sharding import DeviceMesh, constrain, place
from jmarl.models.stack import is_placed
from jmarl.models.weights import decays
from jmarl.objectives.policy import initial_running
from jmarl.types import StackState, TeamState


def single(name: str, value: Any) -> Any:
    """Return a setting that must be one for all agents of a stack; raises TypeError for a tuple with one per agent."""
    if isinstance(value, tuple):
        raise TypeError(f"{name}={value} has a value per agent: make the settings of a stack with per_agent.settings_of_stack")
    return value


def schedule(algorithm: Algorithm) -> optax.Schedule:
    """Return the learning rate by position: linear warm-up, then constant, or linear or cosine down to 0. A position is
    update * steps per update + step of the update, whether or not these steps are made."""
    settings, steps = algorithm.optimizer, algorithm.steps_per_update
    peak: float = single("learning_rate", settings.learning_rate)
    warmup_steps = settings.warmup_updates * steps
    remaining_steps = (algorithm.num_updates - settings.warmup_updates) * steps
    after_warmup = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, remaining_steps),
        "cosine": lambda: optax.cosine_decay_schedule(peak, remaining_steps),
    }[settings.lr_schedule]()
    if not warmup_steps:
        return after_warmup
    warmup = optax.linear_schedule(peak / warmup_steps, peak, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after_warmup], [warmup_steps])


def make_optimizer(
    settings: Optimizer,
    rate: optax.Schedule,
    decay: Float[Array, ""] | float,
    clip: Float[Array, ""] | float,
    norm: Float[Array, ""] | None = None,
) -> optax.GradientTransformation:
    """Return the optimizer of one agent: a clip by the global norm, then the update; its last part is the learning rate, whose
    state counts the steps that were made. norm: of the gradients, where a device has only a part of them."""
    name = single("optimizer", settings.optimizer)
    if name == "adamw":
        scale = optax.scale_by_adam(settings.adam_b1, settings.adam_b2, settings.adam_eps)
    elif name == "lion":
        scale = optax.scale_by_lion()
    else:
        scale = optax.trace(settings.momentum) if settings.momentum else optax.identity()
    optimizer = optax.chain(scale, decay_matrices(decay), optax.scale_by_learning_rate(rate))
    return optax.chain(optax.clip_by_global_norm(clip) if norm is None else clip_by(norm, clip), optimizer)


def decay_matrices(decay: Float[Array, ""] | float) -> optax.GradientTransformation:
    """Return `optax.add_decayed_weights` for the leaves that `weights.decays` names. A mask of optax would be another tree of
    states, which checkpoints of runs with and without it do not share."""

    def add(grads: Any, params: Any) -> Any:
        def one_leaf(path: Any, grad: Array, param: Array) -> Array:
            return grad + decay * param if decays(".".join(key.key for key in path)) else grad

        return jax.tree_util.tree_map_with_path(one_leaf, grads, params)

    return optax.stateless(add)


def clip_by(norm: Float[Array, ""], limit: Float[Array, ""] | float) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm` for gradients whose norm is given."""

    def clip(grads: Any, params: Any) -> Any:
        del params
        return jax.tree.map(lambda x: jnp.where(norm < limit, x, x / norm.astype(x.dtype) * limit), grads)

    return optax.stateless(clip)


def steps_done(state: StackState) -> Int[Array | np.ndarray, "*agent"]:
    """Return how many optimizer steps have changed the parameters of a stack, or of one agent."""
    return state.opt_state[1][-1].count


def init_stack(
    params: Any, algorithm: Algorithm, roles: int = 1, learns: bool = True, mesh: DeviceMesh | None = None
) -> StackState:
    """Return the state of a stack at step 0, on the mesh on which its parameters [A, ...] are.

    A KL term freezes a copy of the parameters as reference. With LoRA only adapters are trained, and their base is the
    reference. roles: that each parameter set plays; learns: False for a stack that never learns, which has parameters only."""
    base, params = lora.split(params)
    agents = jax.tree.leaves(params)[0].shape[0]
    running = initial_running(agents, roles, algorithm.loss.kl_coef)
    skipped = jnp.zeros(agents, jnp.int32)
    if not learns:
        return place(StackState(params, (), None, skipped, running, None, base), mesh)
    settings = algorithm.optimizer
    for name in PER_AGENT:
        single(name, getattr(settings, name))
    plain = Optimizer(optimizer=single("optimizer", settings.optimizer), momentum=settings.momentum)
    opt_state, grads = _init_moments(params, plain, mesh, platform_of(params))
    reference = jax.tree.map(jnp.copy, params) if algorithm.loss.kl_coef and base is None else None
    return place(StackState(params, opt_state, reference, skipped, running, grads, base), mesh)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _init_moments(params: Any, settings: Optimizer, mesh: DeviceMesh | None, platform: str) -> tuple[Any, Any]:
    """Return the initial optimizer state, and room for gradients where they are kept. They are made where they stay, because
    three times the parameters is much to move."""
    optimizer = make_optimizer(settings, optax.constant_schedule(1.0), 0.0, 1.0)
    return constrain((jax.vmap(optimizer.init)(params), gradient_memory(platform, params)), mesh)


def apply_gradients(
    state: StackState,
    grads: Any,
    loss: Float[Array, ""],
    steps: Bool[Array, ""] | None = None,
    numbers: Mapping[str, Float[Array, ""]] = {},
    position: Int[Array, ""] | None = None,
    *,
    algorithm: Algorithm,
    model: ModelConfig | None = None,
) -> tuple[StackState, dict[str, Num[Array, ""]]]:
    """Make one optimizer step of one agent, if it makes one (`steps`; None: it does). A loss or gradient that is not finite
    changes nothing and is counted.

    numbers: the agent's own, by setting (`PER_AGENT`), in place of those of the settings; its learning rate multiplies the
    schedule. Traced ones are no part of the program. position: of the step in the schedule; None: the number of steps made so
    far. model: needed where a mesh divides its weights, and so the gradients."""
    divided = model is not None and model.placement.splits_weights
    norm = sharding.norm(grads) if divided else optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    ok = finite if steps is None else finite & steps
    place: Any = steps_done(state) if position is None else position
    rate, settings = numbers.get("learning_rate", 1.0) * schedule(algorithm)(place), algorithm.optimizer
    decay, clip = (numbers.get(name, getattr(settings, name)) for name in ("weight_decay", "max_grad_norm"))
    update = make_optimizer(settings, lambda _: rate, decay, clip, norm if divided else None).update
    params, opt_state = optimizer_step(update, grads, state.opt_state, state.params, ok)
    skipped = state.skipped + ~finite
    metrics = {"grad_norm": norm, "learning_rate": rate, "skipped": skipped}
    grads = None if state.grads is None else grads
    return state._replace(params=params, opt_state=opt_state, skipped=skipped, grads=grads), metrics


def init_state(
    params: Sequence[Any],
    algorithm: Algorithm | Sequence[Algorithm],
    mesh: DeviceMesh | None = None,
    roles: Sequence[int] | None = None,
    learns: Sequence[bool] | None = None,
) -> TeamState:
    """Return the state at step 0 from each stack's parameters, which become part of it, on the mesh if there is one.

    algorithm: one for all stacks, or one per stack; roles: that each parameter set of a stack plays (None: one); learns: which
    stacks learn (None: all). Raises ValueError for parameters that an earlier run has consumed."""
    for i, tree in enumerate(params):
        if any(is_placed(x) and x.is_deleted() for x in jax.tree.leaves(tree)):
            raise ValueError(
                f"the parameters of stack {i} were consumed by an earlier run (training updates them in place): "
                "make them again with make_team"
            )
    algorithms = [algorithm] * len(params) if isinstance(algorithm, Algorithm) else algorithm
    roles, learns = roles or [1] * len(params), [True] * len(params) if learns is None else learns
    stacks = tuple(
        init_stack(place(p, mesh), a, r, bool(learn), mesh)
        for p, a, r, learn in zip(params, algorithms, roles, learns, strict=True)
    )
    return TeamState(place(jnp.int32(0), mesh), stacks)
