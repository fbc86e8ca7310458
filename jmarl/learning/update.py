"""What a stack learns from a batch: advantages, loss, gradients over micro-batches, clip, AdamW; for one agent, lifted to a
stack. One optimiser step, or several: passes over the batch's parts until the policy has moved as far as it may.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.stages import Lowered

from jmarl.algorithms import algorithm, option
from jmarl.config import Learning
from jmarl.learning.objective import Rows, make_rows, rows_loss, split
from jmarl.learning.optimizer import apply_gradients, updates_done
from jmarl.models import lora
from jmarl.models.config import ModelConfig
from jmarl.models.platforms import COMPILER_OPTIONS
from jmarl.models.sharding import apart, batch_shardings, constrain, mesh_of, over_agents
from jmarl.models.stack import per_agent
from jmarl.rl import advantages, masked
from jmarl.types import TRACES, Batch, Data, Own, Running, StackState


def gradients(params: Any, rows: Rows, base: Any, cfg: ModelConfig, learning: Learning) -> tuple[Any, dict]:
    """Gradients of `rows_loss` and its metrics, accumulated over micro-batches: equal to one big batch's."""
    grad = jax.grad(rows_loss, has_aux=True)
    if learning.micro_batches == 1:
        return grad(params, rows, cfg, learning, base)
    parts = split(rows, learning.micro_batches)
    zeros = (
        jax.tree.map(jnp.zeros_like, params),
        jax.tree.map(jnp.zeros_like, _metrics_like(params, parts, base, cfg, learning)),
    )

    def accumulate(carry, part):
        return jax.tree.map(jnp.add, carry, grad(params, part, cfg, learning, base)), None

    return lax.scan(accumulate, zeros, parts)[0]


def _metrics_like(params, parts, base, cfg, learning):
    part = jax.tree.map(lambda x: x[0], parts)
    return jax.eval_shape(functools.partial(rows_loss, cfg=cfg, learning=learning), params, part, base=base)[1]


def agent_gradients(
    params: Any,
    reference: Any,
    running: Running,
    batch: Data,
    base: Any = None,
    *,
    cfg: ModelConfig,
    learning: Learning,
    trains: str = "policy",
) -> tuple[Any, dict]:
    """Gradients and metrics of one agent from its batch (no agent axis). A critic whose batch has no values learns from those
    of this pass; one beside an agent returns them with the metrics."""
    how: dict[str, Any] = dict(cfg=cfg, learning=learning, trains=trains)
    if trains != "policy" and isinstance(batch, Batch) and batch.values is None:

        def judged(values):
            rows, metrics = make_rows(reference, running, batch._replace(values=values), lora.join(base, params), **how)
            return rows, metrics | ({"values": values} if trains == "values" else {})

        tokens = Rows(batch.prompts, batch.prompt_lengths, batch.tokens, None, None, batch.dropout)
        return jax.grad(rows_loss, has_aux=True)(params, tokens, cfg, learning, base, judged)
    rows, about_batch = make_rows(reference, running, batch, lora.join(base, params), **how)
    grads, metrics = gradients(params, rows, base, cfg, learning)
    return grads, metrics | about_batch


def unless_held(f: Any, held: jax.Array | None, how: str) -> Any:
    """f of one agent as a function of stacks [A, ...]; agents that are held get zeros, without computing where they are not
    all made at once. Where none ever is (None), it is f."""
    if held is None:
        return per_agent(f, how)

    def of_agent(held, *arguments):
        like = jax.eval_shape(f, *arguments)
        return lax.cond(held, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like), lambda: f(*arguments))

    return functools.partial(per_agent(of_agent, how), held)


def one_step(
    state: StackState, reference: Any, batch: Data, own: Own, base: Any, *, cfg, learning: Learning, how: str, trains: str
) -> tuple[StackState, dict]:
    """One optimiser step of a stack [A, ...] on a whole batch."""
    of_agent = functools.partial(agent_gradients, cfg=cfg, learning=learning, trains=trains)
    grads, metrics = unless_held(of_agent, own.held, how)(state.params, reference, state.running, batch, base)
    apply = jax.vmap(functools.partial(apply_gradients, learning=learning))
    still = idle(batch, learning, trains)
    state, of_step = apply(state, grads, metrics["loss"], still if own.held is None else own.held | still, own)
    return state, metrics | of_step


def idle(batch: Data, learning: Learning, trains: str) -> jax.Array:
    """Which agents [A] have no row to learn from, as where they were not asked to act: Adam would go on by its momentum."""
    if not isinstance(batch, Batch):
        return jnp.zeros(batch.tokens.shape[0], bool)
    valid = jnp.isfinite(batch.rewards)
    if trains == "policy" and option("mask_overlong", learning.mask_overlong, algorithm(learning.algorithm)):
        valid &= batch.ended
    return ~jnp.any(valid, (1, 2))


def several_steps(
    state: StackState, reference: Any, batch: Data, own: Own, base: Any, *, cfg, learning: Learning, how: str, trains: str
) -> tuple[StackState, dict]:
    """`num_epochs` passes over `num_minibatches` parts of a batch, an optimiser step each; advantages and reference are those
    of the whole batch. An agent whose policy has moved by more than `target_kl` makes no further step. Metrics are means over
    the steps made; `steps` counts them."""
    n = learning.num_minibatches
    of_rows = functools.partial(make_rows, cfg=cfg, learning=learning, trains=trains)
    rows, about_batch = per_agent(of_rows, how)(reference, state.running, batch, lora.join(base, state.params))
    parts, tokens = minibatches(rows, n)
    gradients_of = unless_held(functools.partial(gradients, cfg=cfg, learning=learning), own.held, how)
    apply = jax.vmap(functools.partial(apply_gradients, learning=learning))

    def step(carry, part):
        state, held = carry
        rows = jax.tree.map(lambda x: x[:, part], parts)
        if rows.dropout is not None:  # another one in each pass
            rows = rows._replace(dropout=jax.vmap(jax.random.fold_in)(rows.dropout, updates_done(state)))
        grads, metrics = gradients_of(state.params, rows, base)
        if learning.target_kl is not None:
            held |= metrics["kl_moved"] > learning.target_kl
        still = held | (tokens[:, part] == 0)  # nothing to learn from: Adam would go on by its momentum
        state, of_step = apply(state, grads, metrics["loss"], still, own)
        return (state, held), (metrics | of_step, ~still)

    order = jnp.tile(jnp.arange(n), learning.num_epochs)
    held = jnp.zeros(rows.tokens.shape[0], bool) if own.held is None else own.held
    (state, _), (metrics, made) = lax.scan(step, (state, held), order)
    last = {name: metrics.pop(name)[-1] for name in ("learning_rate", "skipped")}
    steps = {"steps": made.sum(0)}
    made = made.at[0].set(True)  # the first part was seen, whether or not it was learned from
    return state, {name: masked.mean(x, made, 0) for name, x in metrics.items()} | last | about_batch | steps


def minibatches(rows: Rows, n: int) -> tuple[Rows, jax.Array]:
    """Rows [A, ...] in n parts [A, n, ...], each with a loss and means of its own; and the tokens [A, n] in each."""
    parts = jax.vmap(functools.partial(split, n=n, setting="num_minibatches"))(rows)
    tokens = parts.mask.sum((2, 3, 4))
    policy, values = parts.policy, parts.values
    if policy is not None:
        share = policy.mask / jnp.maximum(tokens, 1)[..., None, None, None]
        policy = policy._replace(weights=n * policy.weights, kl_weights=n * policy.kl_weights, share=share)
    if values is not None:
        values = values._replace(weights=n * values.weights)
        tokens = jnp.maximum(tokens, values.mask.sum((2, 3, 4)))  # a value head also learns from what the policy leaves out
    return parts._replace(policy=policy, values=values), tokens


def remember(state: StackState, batch: Batch, learning: Learning) -> StackState:
    """The state of a stack with a batch's returns in what it remembers."""
    roles = jnp.zeros(batch.rewards.shape, jnp.int32) if batch.roles is None else batch.roles
    decay = option("ema_decay", learning.ema_decay, algorithm(learning.algorithm))
    of_agent = functools.partial(advantages.remember, decay=decay)
    return state._replace(running=jax.vmap(of_agent)(state.running, batch.rewards, roles))


def adapt_kl(state: StackState, metrics: dict, still: jax.Array, learning: Learning) -> tuple[StackState, dict]:
    """Moves each agent's KL coefficient towards its target (arXiv 1909.08593), unless it stays `still`; the metrics show the
    one that was used."""
    if not learning.kl_coef:
        return state, metrics
    used = state.running.kl_coef
    if learning.kl_target is None:
        return state, metrics | {"kl_coef": used}
    error = jnp.where(still, 0, jnp.nan_to_num(jnp.clip(metrics["kl"] / learning.kl_target - 1, -0.2, 0.2)))
    moved = state.running._replace(kl_coef=used * (1 + 0.1 * error))
    return state._replace(running=moved), metrics | {"kl_coef": used}


def learn(
    state: StackState,
    reference: Any,
    batch: Data,
    own: Own | None = None,
    base: Any = None,
    *,
    cfg,
    learning: Learning,
    how: str,
    trains: str = "policy",
) -> tuple[StackState, dict]:
    """One update of a stack [A, ...] on a batch: a pure function for use inside `jit`; arguments as for `update_stack`, with
    what is frozen apart from the state."""
    reference = base if learning.kl_coef and base is not None else reference  # its adapters are off
    steps = one_step if learning.num_epochs * learning.num_minibatches == 1 else several_steps
    before, own = state, own or Own()
    state = remember(state, batch, learning) if trains != "values" and isinstance(batch, Batch) else state
    state, metrics = steps(state, reference, batch, own, base, cfg=cfg, learning=learning, how=how, trains=trains)
    state, metrics = adapt_kl(state, metrics, idle(batch, learning, trains), learning)
    return (state, metrics) if own.held is None else hold(before, state, metrics, own.held)


def hold(before: StackState, after: StackState, metrics: dict, held: jax.Array) -> tuple[StackState, dict]:
    """What agents that are held [A] remember is what they did before; their parameters and moments are so already."""
    was, now = (before.running, before.skipped), (after.running, after.skipped)
    kept = jax.tree.map(lambda x, y: jnp.where(held.reshape(-1, *[1] * (x.ndim - 1)), x, y), was, now)
    return after._replace(running=kept[0], skipped=kept[1]), metrics | {"held": held}


@functools.partial(
    jax.jit,
    static_argnames=("cfg", "learning", "mode", "mesh", "trains"),
    donate_argnames="state",
    keep_unused=True,  # the old gradients, whose memory the new ones take
    compiler_options=COMPILER_OPTIONS,
)
def _update(state: StackState, reference: Any, batch: Data, own: Own | None, base: Any, *, cfg, learning, mode, mesh, trains):
    TRACES["update"] += 1
    agents = batch.tokens.shape[0]
    how = mode if mesh is None or apart(mesh, agents) else "vmap"  # one after the other would gather them from their devices
    of_device = functools.partial(learn, cfg=cfg, learning=learning, how=how, trains=trains)
    state, metrics = over_agents(of_device, mesh, agents)(state, reference, batch, own, base)
    return constrain(state, mesh), metrics


def update_stack(
    state: StackState,
    batch: Data,
    *,
    cfg: ModelConfig,
    learning: Learning,
    mode: str = "map",
    trains: str = "policy",
    own: Own | None = None,
) -> tuple[StackState, dict]:
    """One update of every agent of a stack [A, ...], where the state lies. state is donated. Returns the new state and
    metrics, each [A].

    mode says how the gradients of the agents on one device are made. `vmap`: at once; what small models want. `map`: one
    after the other, with the temporary memory of one; on a CPU as fast.
    trains: `policy`; `values`, of a stack of critics; `both`, of agents with a value head. own: what differs between the
    agents, see `learners`.
    """
    arguments, static = _arguments(state, batch, own, cfg=cfg, learning=learning, mode=mode, trains=trains)
    trained, metrics = _update(*arguments, **static)
    return trained._replace(reference=state.reference, base=state.base), metrics


def lower_update(
    state: StackState,
    batch: Data,
    *,
    cfg: ModelConfig,
    learning: Learning,
    mode: str = "map",
    trains: str = "policy",
    own: Own | None = None,
) -> Lowered:
    """The program of `update_stack` for such arguments; nothing is donated."""
    arguments, static = _arguments(state, batch, own, cfg=cfg, learning=learning, mode=mode, trains=trains)
    return _update.lower(*arguments, **static)


def _arguments(state: StackState, batch: Data, own: Own | None, **static: Any) -> tuple[tuple, dict]:
    """Arguments of `_update`."""
    mesh = mesh_of(state.params)
    if mesh is not None:
        batch, own = jax.device_put((batch, own), batch_shardings(mesh, (batch, own)))
    trained = state._replace(reference=None, base=None)  # frozen: neither donated nor returned
    return (trained, state.reference, batch, own, state.base), static | dict(mesh=mesh)
