"""The program that updates a stack: made once per run, compiled once per shape of its batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered

from jmarl.algorithms import Algorithm
from jmarl.config import Run
from jmarl.learning.per_agent import active_agents, settings_of_stack, updates_before
from jmarl.learning.step import AgentKeys, Given, Metrics, Update, reads_keys, update_agents
from jmarl.memory import ProgramCall
from jmarl.models import lora
from jmarl.models.config import ModelConfig
from jmarl.models.platforms import COMPILER_OPTIONS
from jmarl.models.sharding import DeviceMesh, agent_specs, constrain, model_on, on_devices, place_agents, shapes_on, state_specs
from jmarl.objectives.choose import critic_objective, objective_of
from jmarl.types import TRACES, Data, PerAgent, StackState


@dataclasses.dataclass(frozen=True, eq=False)
class StackProgram:
    """Update every agent of a stack once: program(state, batch, step) -> (state, metrics). The state is donated."""

    kind: str  # update | update of critics
    update: Update
    mesh: DeviceMesh | None  # that the stack is placed on
    agents: PerAgent
    active: Callable[[Any], np.ndarray | None]  # step -> agents [A] that learn in it; None: all always do
    updates: Callable[[Any], np.ndarray]  # step -> position [A] of each agent in its schedule, in updates
    learns: bool  # whether an agent of the stack ever does; the state of others has no optimizer
    keys: Callable[[Any], AgentKeys | None]  # step -> keys [A] of dropout and of the order of minibatches, if there are any
    newest: list[Any] = dataclasses.field(default_factory=list, repr=False)  # shapes of the last call's arguments

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
        # The shapes of the state are those of the first call.
        self.newest[:] = [self.newest[0] if self.newest else shapes_of(state), shapes_of(batch), step]
        trained, given = self.arguments(state, batch, active, step)
        if self.mesh is not None:
            given = given._replace(**place_agents(self.moving(given), self.mesh))
        updated, metrics = _update(trained, given, update=self.update, mesh=self.mesh)
        return updated._replace(reference=state.reference, base=state.base), metrics

    def lower(self, state: StackState, batch: Data, step: Any = 0) -> Lowered:
        """Return the program for such arguments, which may be shapes; nothing is donated."""
        trained, given = self.arguments(state, batch, self.active(step), step)
        if self.mesh is not None:
            given = given._replace(**shapes_on(self.moving(given), self.mesh))
        return _update.lower(trained, given, update=self.update, mesh=self.mesh)

    def arguments(self, state: StackState, batch: Data, active: np.ndarray | None, step: Any) -> tuple[StackState, Given]:
        """Return the arrays that the compiled function takes."""
        trained = state._replace(reference=None, base=None)  # frozen: neither donated nor returned
        mask = None if active is None else jnp.asarray(active)
        updates: Any = self.updates(step)
        return trained, Given(state.reference, batch, self.agents, updates, mask, self.keys(step), state.base)

    def moving(self, given: Given) -> dict[str, Any]:
        """Return the arguments that are new in each update, which each device of a mesh gets for its agents."""
        return {name: getattr(given, name) for name in ("batch", "agents", "updates", "active", "keys")}

    def last_call(self) -> list[ProgramCall]:
        """Describe the last call, to explain a lack of memory; empty before the first."""
        if not self.newest:
            return []
        _, batch, _ = self.newest
        parts = self.update.algorithm.micro_batches * self.update.algorithm.optimizer.num_minibatches
        count, prompts, group, new_tokens = batch.tokens.shape
        lower = partial(self.lower, *self.newest)
        return [ProgramCall(self.kind, count, prompts, group, batch.prompts.shape[-1], new_tokens, parts, lower)]


@partial(
    jax.jit,
    static_argnames=("update", "mesh"),
    donate_argnames="state",
    keep_unused=True,  # the old gradients, whose memory the new ones take
    compiler_options=COMPILER_OPTIONS,
)
def _update(state: StackState, given: Given, *, update: Update, mesh: DeviceMesh | None) -> tuple[StackState, Metrics]:
    TRACES["update"] += 1
    weights, base = (state_specs(mesh, x) for x in (state, (given.reference, given.base)))
    inputs = agent_specs(given)._replace(reference=base and base[0], base=base and base[1])
    update_all = on_devices(partial(update_agents, update), mesh, (weights, inputs), (weights, P("agent")))
    state, metrics = update_all(state, given)
    return constrain(state, mesh), metrics


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
    algorithm, agents = settings_of_stack(algorithm, run, members, team_size)
    objective = critic_objective(algorithm) if critic else objective_of(algorithm)
    seeds, first = seeds or [run.seed], [roles[0] for roles in members]
    always = critic and algorithm.row.critic == "central"
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

    update = Update(model_on(mesh, model), objective, algorithm)
    return StackProgram("update of critics" if critic else "update", update, mesh, agents, active, updates, learns, keys)


def update_keys(seed: int, step: Any, stack: int, agents: int) -> AgentKeys:
    """Return keys of an update's dropout and of the order of its minibatches, derived from these numbers alone. stack: critics
    are numbered after the agents' stacks."""
    key = jax.random.key(seed)
    for number in (lora.DROPOUT, step, stack):
        key = jax.random.fold_in(key, number)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(agents))


def shapes_of(tree: Any) -> Any:
    """Return the shapes of a pytree of arrays, and where those on devices lie."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if isinstance(x, jax.Array) else None)

    return jax.tree.map(shape, tree)
