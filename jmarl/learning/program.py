"""The program that updates a stack: made once per run, compiled once per shape of its batches.

An update is one optimizer step on a batch, or several: passes over its minibatches until the policy has moved as far as
`target_kl` allows. `step` has the functions of one agent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered
from jaxtyping import Array, Bool, Float, Int, Key, Num, Shaped

from jmarl.algorithms import Algorithm
from jmarl.config import Run
from jmarl.learning.optimizer import apply_gradients
from jmarl.learning.per_agent import active_agents, settings_of_stack, updates_before
from jmarl.learning.step import AgentMetrics, gradients, loss_inputs, minibatches, reads_keys, shuffle
from jmarl.models import lora
from jmarl.models.config import ModelConfig
from jmarl.models.platforms import COMPILER_OPTIONS
from jmarl.models.sharding import DeviceMesh, agent_specs, constrain, model_on, on_devices, place_agents, shapes_on, state_specs
from jmarl.models.stack import in_turn, per_agent
from jmarl.objectives.objective import LossInputs, Objective
from jmarl.objectives.table import critic_objective, objective_of
from jmarl.rl import masked
from jmarl.types import TRACES, Data, Running, StackState

AgentMask = Bool[Array, " agent"]
AgentKeys = Key[Array, " agent"]
Metrics = dict[str, Num[Array, "agent ..."] | AgentMask]


@dataclasses.dataclass(frozen=True)
class StackProgram:
    """Update every agent of a stack once: program(state, batch, step) -> (state, metrics). The state is donated.

    It is the static argument of the compiled function, which reads the fields that are compared, and no others."""

    model: ModelConfig
    objective: Objective
    algorithm: Algorithm  # with one value per setting of the optimizer
    mesh: DeviceMesh | None  # that the stack is placed on
    kind: str = dataclasses.field(compare=False)  # update | update of critics
    learns: bool = dataclasses.field(compare=False)  # whether an agent ever does; the state of others has no optimizer
    numbers: Mapping[str, Any] = dataclasses.field(compare=False)  # [A] of the agents' own, by setting (`PER_AGENT`)
    active: Callable[[Any], np.ndarray | None] = dataclasses.field(compare=False)  # step -> agents [A] that learn; None: all
    updates: Callable[[Any], np.ndarray] = dataclasses.field(compare=False)  # step -> positions [A] in schedules, in updates
    keys: Callable[[Any], AgentKeys | None] = dataclasses.field(compare=False)  # step -> keys [A], see `update_agents`

    def __call__(self, state: StackState, batch: Data, step: Any) -> tuple[StackState, Metrics]:
        """Return the new state and the metrics [A, ...]. Without an active agent the state stays as it is.

        Args:
            state: of the stack.
            batch: what it learns from.
            step: number of the update, from which active agents and random keys follow.
        """
        active = self.active(step)
        if active is not None and not active.any():
            return state, {"frozen": jnp.asarray(~active)}
        updated, metrics = _update(*self.arguments(state, batch, step, place_agents), program=self)
        return updated._replace(reference=state.reference, base=state.base), metrics

    def lower(self, state: StackState, batch: Data, step: Any = 0) -> Lowered:
        """Return the program for such arguments, which may be shapes; nothing is donated."""
        return _update.lower(*self.arguments(state, batch, step, shapes_on), program=self)

    def arguments(self, state: StackState, batch: Data, step: Any, place: Callable[..., Any]) -> tuple:
        """Return the arguments of `update_agents` after the program. place: brings what is new in each update to a mesh, where
        each device gets that of its agents."""
        trained = state._replace(reference=None, base=None)  # what is frozen is neither donated nor returned
        new = batch, self.numbers, self.updates(step), self.active(step), self.keys(step)
        return trained, state.frozen, *(new if self.mesh is None else place(new, self.mesh))


@partial(
    jax.jit,
    static_argnames="program",
    donate_argnames="state",
    keep_unused=True,  # the old gradients, whose memory the new ones take
    compiler_options=COMPILER_OPTIONS,
)
def _update(state: StackState, frozen: Any, *new: Any, program: StackProgram) -> tuple[StackState, Metrics]:
    TRACES["update"] += 1
    mesh = program.mesh
    weights, of_frozen = (state_specs(mesh, x) for x in (state, frozen))
    specs = weights, of_frozen, *agent_specs(new)
    state, metrics = on_devices(partial(update_agents, program), mesh, specs, (weights, P("agent")))(state, frozen, *new)
    return constrain(state, mesh), metrics


def update_agents(
    program: StackProgram,
    state: StackState,
    frozen: Any,
    batch: Data,
    numbers: Mapping[str, Float[Array, " agent"]],
    updates: Int[Array, " agent"],
    active: AgentMask | None,
    keys: AgentKeys | None,
) -> tuple[StackState, Metrics]:
    """Make one update of a stack: a pure function for use inside `jit`. Returns the new state and metrics [A, ...].

    Args:
        program: of the stack.
        state: of the stack, without what is frozen.
        frozen: weights that the update reads only, see `StackState.frozen`.
        batch: what the agents learn from.
        numbers: of the optimizer, the agents' own, by setting (`PER_AGENT`).
        updates: of the run in which each agent's turn to learn was before: the clock of its schedule.
        active: agents that learn in this update; None: all do.
        keys: of dropout and of the order of minibatches; None: neither is used.
    """
    objective, algorithm = program.objective, program.algorithm
    static: Any = dict(model=program.model, objective=objective, algorithm=algorithm)
    prepare, compute = partial(loss_inputs, **static), partial(gradients, **static)

    def add_returns(running: Running, batch: Data) -> Running:
        return objective.update_running(running, batch, algorithm)

    def of_batch(params: Any, frozen: Any, *data: Any) -> tuple[Any, AgentMetrics]:
        inputs, batch_metrics = prepare(params, frozen, *data)
        grads, metrics = compute(params, frozen, inputs)
        return grads, metrics | batch_metrics

    before = state
    numbers = {**numbers, **{name: numbers[name] * x for name, x in state.scales.items() if name in numbers}}
    state = state._replace(running=jax.vmap(add_returns)(state.running, batch))
    # Agents without a row to learn from, such as those that did not act, make no step: Adam would move them by its momentum.
    has_rows = jax.vmap(lambda batch: jnp.any(objective.trained_rows(batch, algorithm)))(batch)
    if algorithm.steps_per_update == 1:  # on the whole batch
        steps = has_rows if active is None else active & has_rows
        data = frozen, state.running, batch, keys
        state, metrics = optimizer_step(program, state, of_batch, steps, active, numbers, updates, *data)
    else:
        data = state.params, frozen, state.running, batch, keys
        inputs, batch_metrics = per_agent(prepare, algorithm.optimizer.per_agent)(*data)
        state, metrics = several_steps(program, state, frozen, inputs, numbers, updates, active, keys)
        metrics |= batch_metrics
    state, metrics = adapt_kl(state, metrics, has_rows, algorithm)
    if active is not None:
        state, metrics = keep_inactive(before, state, metrics, active)
    return state, metrics


def several_steps(
    program: StackProgram,
    state: StackState,
    frozen: Any,
    inputs: LossInputs,
    numbers: Mapping[str, Float[Array, " agent"]],
    updates: Int[Array, " agent"],
    active: AgentMask | None,
    keys: AgentKeys | None,
) -> tuple[StackState, Metrics]:
    """Make `num_epochs` passes over `num_minibatches` parts of a batch, an optimizer step each.

    Minibatches are drawn in another order in each epoch. Advantages and reference are those of the whole batch. An agent whose
    policy has moved by more than `target_kl` makes no further step. Metrics are means over the steps made; `steps` counts
    them. The learning rate is that of the last step of the update, whether or not it was made."""
    objective, algorithm = program.objective, program.algorithm
    settings, n = algorithm.optimizer, algorithm.optimizer.num_minibatches
    compute = partial(gradients, model=program.model, objective=objective, algorithm=algorithm)

    def epoch(carry: tuple[StackState, AgentMask], number: Int[Array, ""]) -> tuple[tuple[StackState, AgentMask], tuple]:
        shuffled = inputs if keys is None or n == 1 else jax.vmap(shuffle, (None, 0, 0))(number, keys, inputs)
        parts, tokens = jax.vmap(partial(minibatches, n=n, objective=objective))(shuffled)

        def step(carry: tuple[StackState, AgentMask], part: Int[Array, ""]) -> tuple[tuple[StackState, AgentMask], tuple]:
            state, learns = carry
            position = updates * algorithm.steps_per_update + number * n + part
            inputs = jax.tree.map(lambda x: x[:, part], parts)
            if inputs.dropout is not None:  # other keys in each step
                inputs = inputs._replace(dropout=jax.vmap(jax.random.fold_in)(inputs.dropout, position))
            has_tokens = tokens[:, part] > 0  # without, Adam would move the agent by its momentum
            steps, limit = learns & has_tokens, settings.target_kl
            data = frozen, inputs
            state, metrics = optimizer_step(program, state, compute, steps, active, numbers, position, *data, limit=limit)
            learns = learns if limit is None else learns & ~(metrics["kl_moved"] > limit)
            return (state, learns), (metrics, learns & has_tokens)

        return lax.scan(step, carry, jnp.arange(n))

    learns = jnp.ones(inputs.tokens.shape[0], bool) if active is None else active
    (state, _), steps = lax.scan(epoch, (state, learns), jnp.arange(settings.num_epochs))
    metrics, stepped = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
    last = {name: metrics.pop(name)[-1] for name in ("learning_rate", "skipped")}
    count = {"steps": stepped.sum(0)}
    stepped = stepped.at[0].set(True)  # metrics of the first part are known, whether or not a step was made
    means = {name: masked.mean(x, stepped, 0) for name, x in metrics.items()}
    return state, means | last | count


def optimizer_step(
    program: StackProgram,
    state: StackState,
    compute: Callable,
    steps: AgentMask,
    active: AgentMask | None,
    numbers: Mapping[str, Float[Array, " agent"]],
    position: Int[Array, " agent"],
    *data: Any,
    limit: float | None = None,
) -> tuple[StackState, Metrics]:
    """Make one optimizer step of some agents of a stack.

    Where gradients have no memory of their own (`models.platforms.gradient_memory`) and agents are not computed together, one
    agent makes its step after the other, so that only one agent's gradients are in memory.

    Args:
        program: of the stack.
        state: of the stack, [A, ...].
        compute: (params, *data) of one agent -> its gradients and metrics. Zeros stand for those of inactive agents.
        steps: agents that make a step.
        active, numbers: as in `update_agents`.
        position: of the step in each agent's schedule.
        data: further arguments of `compute`, [A, ...].
        limit: an agent makes no step if its policy has moved by more, in the metric `kl_moved`; None: no limit.
    """

    def change(state: StackState, grads: Any, metrics: AgentMetrics, steps: Any, numbers: Any, position: Any) -> tuple:
        steps = steps if limit is None else steps & ~(metrics["kl_moved"] > limit)
        settings: Any = dict(algorithm=program.algorithm, model=program.model)
        state, step_metrics = apply_gradients(state, grads, metrics["loss"], steps, numbers, position, **settings)
        return state, metrics | step_metrics

    mode = program.algorithm.optimizer.per_agent
    if mode == "map" and state.grads is None:

        def compute_one(state: StackState, active: Any, steps: Any, numbers: Any, position: Any, *data: Any) -> Any:
            return compute(state.params, *data) if active is None else only_active(compute, active, state.params, *data)

        def change_one(state: StackState, computed: Any, active: Any, steps: Any, numbers: Any, position: Any, *_: Any) -> Any:
            grads, metrics = computed
            return change(state, grads, metrics, steps, numbers, position)

        return in_turn(compute_one, change_one, state, active, steps, numbers, position, *data)
    if active is None:
        grads, metrics = per_agent(compute, mode)(state.params, *data)
    else:
        grads, metrics = per_agent(partial(only_active, compute), mode)(active, state.params, *data)
    return jax.vmap(change)(state, grads, metrics, steps, numbers, position)


def only_active(compute: Callable, active: Bool[Array, ""], *arguments: Any) -> Any:
    """Return compute(*arguments) of one agent if it is active, else zeros. In mode `map` they are not computed then."""
    shapes = jax.eval_shape(compute, *arguments)
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
    return lax.cond(active, lambda: compute(*arguments), zeros)


def adapt_kl(state: StackState, metrics: Metrics, has_rows: AgentMask, algorithm: Algorithm) -> tuple[StackState, Metrics]:
    """Move the KL coefficient of each agent that has rows towards its target (arXiv 1909.08593); metrics show the one that was
    used."""
    if not algorithm.loss.kl_coef:
        return state, metrics
    used, target = state.running.kl_coef, algorithm.loss.kl_target
    if target is None:
        return state, metrics | {"kl_coef": used}
    error = jnp.where(has_rows, jnp.nan_to_num(jnp.clip(metrics["kl"] / target - 1, -0.2, 0.2)), 0)
    running = state.running._replace(kl_coef=used * (1 + 0.1 * error))
    return state._replace(running=running), metrics | {"kl_coef": used}


def keep_inactive(before: StackState, after: StackState, metrics: Metrics, active: AgentMask) -> tuple[StackState, Metrics]:
    """Restore the statistics and counts of inactive agents; their parameters and moments have not changed."""

    def choose(old: Shaped[Array, "agent ..."], new: Shaped[Array, "agent ..."]) -> Shaped[Array, "agent ..."]:
        return jnp.where(active.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    running, skipped = jax.tree.map(choose, (before.running, before.skipped), (after.running, after.skipped))
    return after._replace(running=running, skipped=skipped), metrics | {"frozen": ~active}


# --- once per run ------------------------------------------------------------------------------------------------------


def make_program(
    model: ModelConfig,
    members: Sequence[Sequence[int]],
    algorithm: Algorithm,
    run: Run,
    *,
    number: int,
    team_size: int,
    mesh: DeviceMesh | None,
    seeds: Sequence[int] = (),
    critic: bool = False,
) -> StackProgram:
    """Return the program of a stack of agents, or of critics.

    Args:
        model: architecture of the stack.
        members: for each parameter set the agents that it plays, see `StackSpec`.
        algorithm: of the team's agents, or of their critics.
        run: which agents learn when.
        number: of the stack, in the random keys; critics are numbered after the agents' stacks.
        team_size: agents of the team.
        mesh: that the stack is placed on.
        seeds: of each run whose agents are in the stack; empty: of `run`.
        critic: whether these are critics. A central one always learns.
    """
    count = len(members)
    algorithm, numbers = settings_of_stack(algorithm, run, members, team_size)
    objective = critic_objective(algorithm) if critic else objective_of(algorithm)
    seeds, first = seeds or [run.seed], [roles[0] for roles in members]
    always = critic and algorithm.critic_kind == "central"
    learns = always or any(agent not in run.frozen_agents for roles in members for agent in roles)

    def active(step: Any) -> np.ndarray | None:
        agents = None if always else active_agents(run, team_size, step)
        return None if agents is None else agents[first]

    def updates(step: Any) -> np.ndarray:
        return np.full(count, int(step), np.int32) if always else updates_before(run, team_size, step)[first]

    def keys(step: Any) -> AgentKeys | None:
        if not reads_keys(algorithm):
            return None
        own = [update_keys(seed, step, number, count // len(seeds)) for seed in seeds]
        return jnp.concatenate(own) if len(own) > 1 else own[0]

    kind, static = "update of critics" if critic else "update", (model_on(mesh, model), objective, algorithm, mesh)
    return StackProgram(*static, kind, learns, numbers, active, updates, keys)


def update_keys(seed: int, step: Any, stack: int, agents: int) -> AgentKeys:
    """Return keys of an update's dropout and of the order of its minibatches, derived from these numbers alone. stack: critics
    are numbered after the agents' stacks."""
    key = jax.random.key(seed)
    for number in (lora.DROPOUT, step, stack):
        key = jax.random.fold_in(key, number)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(agents))
