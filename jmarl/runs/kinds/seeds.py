"""Runs on rollouts from several seeds, whose agents are in the same stacks: each step plays the episodes of all runs, samples
their completions in one program, and learns in one update.

With K runs of a team, a stack has the shape [K * A, ...]: rows i * A to (i + 1) * A are the agents of run i. The second part of
this file joins the states, sampling requests and batches of the runs, and extracts the part of one run, on the devices where
the run alone would have it. `runs.seeds` trains such runs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import with_fastest_updates
from jmarl.config import TrainConfig
from jmarl.evaluation.evaluate import Evaluation, check_result, play_held_out, summarize
from jmarl.lazy import Table
from jmarl.learning.batches import concatenate_agents
from jmarl.learning.choose import update_settings, with_settings
from jmarl.learning.setup import Setup, make_setup, mesh_of_critics
from jmarl.logs.goodput import timed_sampler
from jmarl.models import lora, sharding
from jmarl.models.sharding import DeviceMesh, put
from jmarl.models.stack import is_shared, map_own, take_agents, to_host
from jmarl.objectives.policy import penalizes_tokens
from jmarl.processes import exchange
from jmarl.rollout.experience import Source
from jmarl.rollout.make_batches import rollout_batches
from jmarl.rollout.together import CallersEnvironment, run_together
from jmarl.rollout.turns import Rollout
from jmarl.runs.kinds import rollouts
from jmarl.runs.precompile import choose_updates
from jmarl.runs.run import Kind, PreparedRun, Task
from jmarl.runs.start import start
from jmarl.sampling.generate import Past, Sampler, SampleRequest, on_host
from jmarl.sampling.stack_program import GROUP_CACHE
from jmarl.team import StackSpec, Team, initial_params, map_stacks
from jmarl.types import Batches, Completions, StackState, TeamState

T = TypeVar("T")
POPULATION = Table[Any]({"start": "jmarl.league.population:with_scales", "source": "jmarl.league.population:with_exploits"})


def several(seeds: Sequence[int]) -> Kind:
    """Return the kind of runs from several seeds. Their state at step 0 is a list, with one entry per run."""
    seeds = [int(seed) for seed in seeds]
    own = dict(check=partial(check, seeds), source=partial(source, seeds), start=partial(start_seeds, seeds), seeds=seeds)
    return rollouts.ROLLOUTS._replace(**own)


def check(
    seeds: Sequence[int], cfg: TrainConfig, team: Team, task: Task, wandb_config: dict | None
) -> tuple[Task, dict[str, Any], TrainConfig]:
    """Check the run of the first seed. See `Kind.check`."""
    first = cfg.for_seed(seeds[0]).replace(progress=cfg.run.progress)
    task, data, first = rollouts.check(first, team, task, wandb_config)
    return task, data, cfg.replace(long_context=first.run.long_context)


def start_seeds(
    seeds: Sequence[int], team: Team, params: Sequence[Any], cfg: TrainConfig, task: Task
) -> tuple[Setup, list[TeamState]]:
    """Return the setup of a single run, and the state of each. With LoRA they share the base of the first. See `Kind.start`.

    params: not donated; if weights are random, those of the first run. What is auto is chosen for all runs together; on several
    GPUs it is what is fast where memory does not matter, and nothing is proved.
    """

    def params_of_next(old: Any, stack: StackState) -> Any:
        if stack.base is None or not lora.targets_of(old):  # new adapters are those of its seed
            return map_own(jnp.copy, old if stack.base is None else stack.base)
        return lora.join(stack.base, jax.tree.map(jnp.copy, lora.split(old)[1]))

    setup, first = start(team, [map_own(jnp.copy, stack) for stack in params], cfg.for_seed(seeds[0]))
    states = [first]
    for seed in seeds[1:]:
        if team.random_weights:
            own = initial_params(team, None, seed=seed)
        else:
            own = [params_of_next(old, stack) for old, stack in zip(params, first.stacks, strict=True)]
        states.append(start(team, own, cfg.for_seed(seed))[1])
    if cfg.population.members:
        states = [POPULATION["start"](state, setup.team.stacks[0].mesh, cfg.population) for state in states]
    joint, joined = runs_of(setup._replace(cfg=cfg), seeds).joint, joined_shapes(states[0], len(seeds))
    if mesh_of(joint) is not None:
        joint = with_settings(joint, update_settings(with_fastest_updates(cfg)))
    joint = choose_updates(rollouts.ROLLOUTS, joint, joined, task)
    return with_settings(setup._replace(cfg=cfg), update_settings(joint.cfg)), states


def source(seeds: Sequence[int], run: PreparedRun, states: Sequence[TeamState]) -> Source:
    """Return the source of several runs, which call one environment in the thread of the caller. See `Kind.source`."""
    del states
    runs, task = runs_of(run.setup, seeds), run.task
    setups = [setup._replace(cfg=setup.cfg.replace(overlap_rewards=False)) for setup in runs.alone]

    def play_run(step: int, setup: Setup, sample: Any) -> Rollout:
        tasks = partial(rollouts.tasks_at, task.items, setup.cfg, step)
        return rollouts.play_step(sample, setup, tasks(), CallersEnvironment(task.env, sample), step, tasks)

    def evaluate_run(setup: Setup, sample: Any) -> Rollout:
        return play_held_out(sample, setup.team, task.held_out, CallersEnvironment(task.env, sample), setup.cfg)

    def play(step: int, state: TeamState) -> list[Rollout]:
        played = play_together(runs, state, [partial(play_run, step, setup) for setup in setups])
        if step == 0:  # later updates may lack a valid reward
            for rollout in played:
                rollouts.check_valid(rollout)
        return played

    def evaluate(state: TeamState) -> list[Evaluation]:
        played = play_together(runs, state, [partial(evaluate_run, setup) for setup in setups])
        results = [summarize(rollout) for rollout in played]
        for result in results if not int(state.step) else ():
            check_result(result)
        return results

    own = Source(play, evaluate if task.held_out else None)
    return POPULATION["source"](own, runs.joint, len(seeds)) if run.cfg.population.members else own


# --- the stacks of several runs ----------------------------------------------------------------------------------------------


class Runs(NamedTuple):
    """K runs that are trained together: everything that does not change from step to step."""

    joint: Setup  # of all runs together, whose stacks have K * A agents
    alone: list[Setup]  # [K] of each run, with its seed and directory, and where its agents would be alone


def runs_of(setup: Setup, seeds: Sequence[int]) -> Runs:
    """Return the runs of several seeds. setup: of a single run, with the settings of all."""
    count, cfg = len(seeds), setup.cfg
    mesh = sharding.mesh_for(cfg.run.mesh, [len(s.members) * count for s in setup.team.stacks], cfg.run.strategy)

    def repeat(specs: Sequence[StackSpec], mesh: DeviceMesh | None) -> tuple[StackSpec, ...]:
        return tuple(dataclasses.replace(spec, members=spec.members * count, mesh=mesh) for spec in specs)

    critics = repeat(setup.critics, mesh_of_critics(setup.algorithm, mesh))
    joint = make_setup(Team(repeat(setup.team.stacks, mesh)), critics, setup.algorithm, cfg, seeds)
    return Runs(joint, [setup._replace(cfg=cfg.for_seed(seed)) for seed in seeds])


def mesh_of(setup: Setup) -> DeviceMesh | None:
    """Return where the agents of a setup are."""
    return setup.team.stacks[0].mesh


def join_states(states: Sequence[TeamState], runs: Runs) -> TeamState:
    """Return the state of all runs with stacks [K * A, ...]; the states of the runs are donated."""
    jax.block_until_ready(states)  # before the first program that moves data between devices, see `stack.take_agents`

    def join(stacks: Sequence[StackState], spec: StackSpec) -> StackState:
        joined = jax.tree.map(_concatenate, *(stack._replace(base=None) for stack in stacks))
        return sharding.place(joined._replace(base=stacks[0].base), spec.mesh)  # the runs share one base

    stacks = tuple(map(join, zip(*(state.stacks for state in states), strict=True), runs.joint.team.stacks))
    critics = tuple(map(join, zip(*(state.critics for state in states), strict=True), runs.joint.critics))
    return TeamState(sharding.place(states[0].step, mesh_of(runs.joint)), stacks, critics)


def joined_shapes(state: TeamState, count: int) -> TeamState:
    """Return the shapes of the state of `count` runs from that of one, on the device of the first."""

    def join(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count * x.shape[0], *x.shape[1:]), x.dtype, sharding=x.sharding)

    return state._replace(stacks=map_own(join, state.stacks), critics=map_own(join, state.critics))


def _concatenate(*arrays: jax.Array) -> jax.Array:
    """Concatenate arrays on axis 0 and free them at once, so that only one is in memory twice. Waits, as `take_agents`."""
    if len(arrays) == 1:
        return arrays[0]
    joined = jax.block_until_ready(jnp.concatenate(arrays))
    for x in arrays:
        x.delete()
    return joined


def state_of_run(state: TeamState, run: int, runs: Runs) -> TeamState:
    """Return the state of one run from the state of all, on the devices where the run alone would have it."""
    joint, alone = runs.joint, runs.alone[run]

    def of_run(stack: StackState, old: StackSpec, new: StackSpec) -> StackState:
        return stack_of_run(stack, run, len(runs.alone), old.mesh, new.mesh)

    return TeamState(
        put(state.step, mesh_of(alone)),
        tuple(map(of_run, state.stacks, joint.team.stacks, alone.team.stacks)),
        tuple(map(of_run, state.critics, joint.critics, alone.critics)),
    )


def stack_of_run(stack: T, run: int, count: int, old_mesh: DeviceMesh | None, mesh: DeviceMesh | None) -> T:
    """Return the agents of one of `count` runs from a stack, moved to a mesh by one program. Shared arrays stay."""
    if count > 1:
        own = jax.tree.map(lambda x: None if is_shared(x) else x, stack, is_leaf=is_shared)
        new_mesh = mesh if mesh is not None and old_mesh is not None and mesh.size == old_mesh.size else None
        own = jax.block_until_ready(_slice_run(own, run=run, count=count, mesh=new_mesh))
        stack = jax.tree.map(lambda x, part: x if is_shared(x) else part, stack, own, is_leaf=is_shared)
    return put(stack, mesh)


@partial(jax.jit, static_argnames=("run", "count", "mesh"))
def _slice_run(own: Any, *, run: int, count: int, mesh: DeviceMesh | None) -> Any:
    return sharding.constrain(jax.tree.map(lambda x: x[_rows(x, run, count)], own), mesh)


def agents_of_run(tree: T, run: int, count: int) -> T:
    """Return the agents of one of `count` runs from arrays [K * A, ...], which may be on the host. Shared arrays stay."""
    return map_own(lambda x: take_agents(x, _rows(x, run, count)), tree) if count > 1 else tree


def _rows(x: Any, run: int, count: int) -> slice:
    return slice(run * (x.shape[0] // count), (run + 1) * (x.shape[0] // count))


def play_together(runs: Runs, state: TeamState, plays: Sequence[Callable[[Sampler], T]]) -> list[T]:
    """Return the result of each run's function, which takes the function that samples completions for its run."""
    params = [lora.model_of(stack) for stack in state.stacks]
    return run_together(plays, partial(sample_together, runs, params))


def sample_together(
    runs: Runs, params: Sequence[Any], requests: dict[int, SampleRequest]
) -> dict[int, tuple[Completions, ...]]:
    """Return the completions of each stack for each request. Keys are the indices of the runs.

    One program samples for all runs if all of them request equal shapes; otherwise each run is sampled alone.
    """
    count, mesh, mesh_of_run = len(runs.alone), mesh_of(runs.joint), mesh_of(runs.alone[0])
    if len(requests) == count and (joint := join_requests(list(requests.values()), mesh)) is not None:
        completions = [on_host(stack) for stack in timed_sampler(runs.joint.team, params)(joint)]
        return {run: tuple(agents_of_run(stack, run, count) for stack in completions) for run in requests}
    completions_of = {}
    for run, request in requests.items():
        own = [stack_of_run(stack, run, count, mesh, mesh_of_run) for stack in params]
        past = request.past and request.past._replace(caches=_put_caches(request.past.caches, mesh_of_run))
        completions_of[run] = timed_sampler(runs.alone[run].team, own)(request._replace(past=past))
    return completions_of


def _put_caches(caches: Sequence[Any], mesh: DeviceMesh | None) -> Any:
    """Place the cache of each stack as the sampler on this mesh returns it."""
    if mesh is None:
        return jax.device_put(caches, exchange.own_device())
    return tuple(jax.device_put(cache, sharding.shardings(mesh, sharding.by_hand(GROUP_CACHE))) for cache in caches)


def join_requests(requests: Sequence[SampleRequest], mesh: DeviceMesh | None) -> SampleRequest | None:
    """Return one request for the agents of all runs; None if their shapes differ. Prompts are padded to the widest."""
    first = requests[0]

    def equal(field: Callable[[SampleRequest], Any]) -> bool:
        return all(field(request) == field(first) for request in requests)

    settings = equal(lambda r: (r.settings, r.randomness._replace(seed=None), r.group, r.turn))
    settings = settings and equal(lambda r: (r.keep_cache, r.prompt_ids.tolist()))
    shapes = equal(lambda r: ([lengths.shape for _, lengths in r.encoded], jax.tree.map(jnp.shape, r.past)))
    if not (settings and shapes):
        return None
    encoded = []
    for stack_prompts in zip(*(request.encoded for request in requests), strict=True):
        width = max(ids.shape[-1] for ids, _ in stack_prompts)
        padded = [np.pad(ids, ((0, 0), (0, 0), (0, width - ids.shape[-1])), "edge") for ids, _ in stack_prompts]
        encoded.append((np.concatenate(padded), np.concatenate([lengths for _, lengths in stack_prompts])))
    past = None
    if first.past is not None:
        pasts = [request.past for request in requests if request.past is not None]
        caches = jax.tree.map(lambda *x: jnp.concatenate(x), *(past.caches for past in pasts))
        past = Past(_put_caches(caches, mesh), tuple(map(np.concatenate, zip(*(past.rows for past in pasts), strict=True))))
    # Sample the agents that act in any run; completions of inactive agents are ignored.
    acts = [request.acts for request in requests if request.acts is not None]
    acts_in_any = np.any(acts, 0) if len(acts) == len(requests) else None
    randomness = first.randomness._replace(seed=np.array([request.randomness.seed for request in requests]))
    return first._replace(encoded=tuple(encoded), randomness=randomness, past=past, acts=acts_in_any)


def batches_together(runs: Runs, state: TeamState, played: Sequence[Rollout]) -> Batches:
    """Return the batches of all runs for one update. Values and random keys are those of each run."""
    algorithm = runs.joint.algorithm
    reads_state = algorithm.critic_kind is not None and (penalizes_tokens(algorithm) or not algorithm.reuses_values)
    needed = map_stacks(state, lambda stack: stack._replace(opt_state=(), grads=None))
    if not (penalizes_tokens(algorithm) or algorithm.critic_kind == "head"):  # only critics are read
        needed = needed._replace(stacks=tuple(stack._replace(params=(), reference=None, base=None) for stack in needed.stacks))
    batches = [
        rollout_batches(setup, state_of_run(needed, i, runs) if reads_state else state, rollout)
        for i, (setup, rollout) in enumerate(zip(runs.alone, played, strict=True))
    ]

    def join(parts: Sequence[Sequence[Any]]) -> list[Any]:
        return [concatenate_agents(to_host(stacks)) for stacks in zip(*parts, strict=True)]

    return Batches(join([run.stacks for run in batches]), join([run.critics for run in batches]))
