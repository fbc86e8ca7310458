"""Several runs in the stacks of one team: sample for all of them in one program, and learn in one update.

The agents of run i are rows i * A to (i + 1) * A of a stack [K * A, ...]. Also takes one run out again, to the devices where it
would be alone. `seeds` trains such runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmarl.config import TrainConfig
from jmarl.learning.batches import concatenate_agents
from jmarl.learning.critics import penalizes_tokens, reuses_values
from jmarl.learning.setup import Setup
from jmarl.models import lora, sharding
from jmarl.models.sharding import mesh_of, put
from jmarl.models.stack import fetched, is_shared, map_own, part
from jmarl.rollout.turns import Rollout
from jmarl.sampling.generate import Past, Sampler, SampleRequest, on_host, sample_team
from jmarl.team import Team, each_stack
from jmarl.training.lock_step import run_in_lock_step
from jmarl.training.rollouts import rollout_batches
from jmarl.types import Batch, Batches, Completions, TeamState

T = TypeVar("T")


class Runs(NamedTuple):
    """What does not change about runs that are trained together."""

    setup: Setup  # of one run
    cfgs: tuple[TrainConfig, ...]  # of each run, with its seed and directory
    mesh_alone: Mesh | None  # where the models of one run would lie
    mesh: Mesh | None  # where those of all lie

    def wide(self, specs: Sequence[Any]) -> tuple:
        """Stacks with the agents of all runs, run by run."""
        return tuple(dataclasses.replace(spec, members=spec.members * len(self.cfgs)) for spec in specs)

    @property
    def team(self) -> Team:
        return self.setup.team

    @property
    def setups(self) -> list[Setup]:
        """The setup of each run."""
        return [self.setup._replace(cfg=cfg) for cfg in self.cfgs]

    @property
    def all(self) -> Setup:
        """The setup of all runs together."""
        critics = self.setup.critics
        return self.setup._replace(
            team=Team(self.wide(self.team.stacks)), critics=critics._replace(specs=self.wide(critics.specs))
        )

    @property
    def has_own_critics(self) -> bool:
        return self.setup.algorithm.row.critic == "own"


def together(states: Sequence[TeamState], runs: Runs) -> TeamState:
    """The state of all runs, each stack [K * A, ...]; those given are consumed."""
    where = runs.mesh if runs.has_own_critics else sharding.of_one_agent(runs.mesh)
    jax.block_until_ready(states)  # before the first program that moves data between devices, see `stack.part`

    def joined(stacks, where):
        whole = jax.tree.map(_concatenated, *(stack._replace(base=None) for stack in stacks))
        return sharding.place(whole._replace(base=stacks[0].base), where)

    stacks = tuple(joined(of, runs.mesh) for of in zip(*(state.stacks for state in states), strict=True))
    critics = tuple(joined(of, where) for of in zip(*(state.critics for state in states), strict=True))
    return TeamState(sharding.place(states[0].step, runs.mesh), stacks, critics)


def _concatenated(*arrays: jax.Array) -> jax.Array:
    """Arrays on axis 0; they are freed one by one, so that all weights are never there twice. Waits, as `stack.part` does."""
    if len(arrays) == 1:
        return arrays[0]
    whole = jax.block_until_ready(jnp.concatenate(arrays))
    for x in arrays:
        x.delete()
    return whole


def agents_of_run(tree: T, run: int, count: int) -> T:
    """One run's part of arrays [K * A, ...]; what agents share is in every part."""
    return map_own(lambda x: part(x, _places(x, run, count)), tree) if count > 1 else tree


def _places(x: Any, run: int, count: int) -> slice:
    return slice(run * (x.shape[0] // count), (run + 1) * (x.shape[0] // count))


@partial(jax.jit, static_argnames=("run", "count", "mesh"))
def _cut(own: Any, *, run: int, count: int, mesh: Mesh | None) -> Any:
    return sharding.constrain(jax.tree.map(lambda x: x[_places(x, run, count)], own), mesh)


def cut(stack: T, run: int, count: int, where: Mesh | None) -> T:
    """`agents_of_run` of a stack, by one program, on the mesh where one run would be."""
    if count > 1:
        own, lies = jax.tree.map(lambda x: None if is_shared(x) else x, stack, is_leaf=is_shared), mesh_of(stack)
        there = where if where is not None and lies is not None and where.size == lies.size else None
        mine = jax.block_until_ready(_cut(own, run=run, count=count, mesh=there))
        stack = jax.tree.map(lambda x, own: x if is_shared(x) else own, stack, mine, is_leaf=is_shared)
    return put(stack, where)


def alone(state: TeamState, run: int, runs: Runs) -> TeamState:
    """The state of one run, where it would be of that run alone."""
    count, own = len(runs.cfgs), runs.has_own_critics
    where = runs.mesh_alone if own else sharding.of_one_agent(runs.mesh_alone)
    stacks = tuple(cut(stack, run, count, runs.mesh_alone) for stack in state.stacks)
    return TeamState(
        put(state.step, runs.mesh_alone), stacks, tuple(cut(critic, run, count, where) for critic in state.critics)
    )


def play_together(runs: Runs, state: TeamState, plays: Sequence[Callable[[Sampler], T]]) -> list[T]:
    """Return what each run's function returns; it takes the function that samples for its run."""
    params = [lora.model_of(stack) for stack in state.stacks]
    return run_in_lock_step(plays, partial(sample_together, runs, params))


def sample_together(
    runs: Runs, params: Sequence[Any], requests: dict[int, SampleRequest]
) -> dict[int, tuple[Completions, ...]]:
    """Return the completions of each stack that runs request, by the number of the run: by one program where all runs request
    equal shapes, and else run by run."""
    count = len(runs.cfgs)
    if len(requests) == count and (request := as_one(list(requests.values()), runs.mesh)) is not None:
        done = [on_host(completions) for completions in sample_team(runs.all.team, params, request)]
        return {run: tuple(agents_of_run(completions, run, count) for completions in done) for run in requests}
    return {run: sample_team(runs.team, *apart(params, request, run, runs)) for run, request in requests.items()}


def apart(params: Sequence[Any], request: SampleRequest, run: int, runs: Runs) -> tuple[list[Any], SampleRequest]:
    """One run's parameters and its request, where that run alone would have them."""
    own = [cut(of_stack, run, len(runs.cfgs), runs.mesh_alone) for of_stack in params]
    past = request.past and request.past._replace(caches=_put_caches(request.past.caches, runs.mesh_alone))
    return own, request._replace(past=past)


def _put_caches(caches: Any, mesh: Mesh | None) -> Any:
    return jax.device_put(caches, jax.devices()[0] if mesh is None else sharding.batch_shardings(mesh, caches))


def as_one(requests: Sequence[SampleRequest], mesh: Mesh | None) -> SampleRequest | None:
    """The request of all runs' agents, if theirs have the same shapes (prompts are padded to the widest)."""
    first = requests[0]

    def alike(field: Callable[[SampleRequest], Any]) -> bool:
        return all(field(request) == field(first) for request in requests)

    fixed = alike(
        lambda r: (r.settings, r.randomness._replace(seed=None), r.group, r.turn, r.keep_cache, r.prompt_ids.tolist())
    )
    shapes = alike(lambda r: [lengths.shape for _, lengths in r.encoded])
    if not (fixed and shapes and alike(lambda r: jax.tree.map(jnp.shape, r.past))):
        return None
    encoded = []
    for of_stack in zip(*(request.encoded for request in requests), strict=True):
        width = max(ids.shape[-1] for ids, _ in of_stack)
        missing = [(ids, width - ids.shape[-1]) for ids, _ in of_stack]
        wide = [np.pad(ids, ((0, 0), (0, 0), (0, m)), "edge") if m else ids for ids, m in missing]
        encoded.append((np.concatenate(wide), np.concatenate([lengths for _, lengths in of_stack])))
    past = None
    if first.past is not None:
        pasts = [request.past for request in requests if request.past is not None]
        caches = jax.tree.map(lambda *x: jnp.concatenate(x), *(past.caches for past in pasts))
        past = Past(_put_caches(caches, mesh), tuple(map(np.concatenate, zip(*(past.rows for past in pasts), strict=True))))
    # Agents that write in any run: completions of inactive agents are ignored.
    acts = [request.acts for request in requests if request.acts is not None]
    writes = np.any(acts, 0) if len(acts) == len(requests) else None
    randomness = first.randomness._replace(seed=np.array([request.randomness.seed for request in requests]))
    return first._replace(encoded=tuple(encoded), randomness=randomness, past=past, acts=writes)


def batches_together(runs: Runs, state: TeamState, rollouts: Sequence[Rollout]) -> Batches:
    """Return what all runs learn from in one update; values and random keys are those of each run."""
    algorithm = runs.setup.algorithm
    reads_state = algorithm.row.critic is not None and (penalizes_tokens(algorithm) or not reuses_values(algorithm))
    needed = each_stack(state, lambda stack: stack._replace(opt_state=(), grads=None))
    if not (penalizes_tokens(algorithm) or algorithm.has_value_head):  # only critics are read
        needed = needed._replace(stacks=tuple(stack._replace(params=(), reference=None, base=None) for stack in needed.stacks))
    batches = [
        rollout_batches(setup, alone(needed, i, runs) if reads_state else state, rollout)
        for i, (setup, rollout) in enumerate(zip(runs.setups, rollouts, strict=True))
    ]

    def join(parts: Sequence[Sequence[Any]]) -> list[Batch]:
        return [concatenate_agents(fetched(stacks)) for stacks in zip(*parts, strict=True)]

    return Batches(join([own.stacks for own in batches]), join([own.critics for own in batches]))
