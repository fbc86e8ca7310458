"""Runs on rollouts from several seeds: each step plays the episodes of all runs and samples their completions together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jmarl.algorithms import with_fastest_updates
from jmarl.config import TrainConfig
from jmarl.evaluation.evaluate import Evaluation, check_result, play_held_out, summarize
from jmarl.learning.choose import Work, update_settings, with_settings
from jmarl.learning.setup import Setup
from jmarl.models import lora
from jmarl.models.stack import map_own
from jmarl.rollout.experience import Source
from jmarl.rollout.together import CallersEnvironment
from jmarl.rollout.turns import Rollout
from jmarl.runs.kinds import rollouts
from jmarl.runs.precompile import Updates, longest_prompts, longest_update
from jmarl.runs.run import Kind, Task
from jmarl.runs.stacked_seeds import batches_together, joined_shapes, mesh_of, play_together, runs_of
from jmarl.runs.start import start
from jmarl.team import Team
from jmarl.types import StackState, TeamState


def several(seeds: Sequence[int]) -> Kind:
    """Return the kind of runs from several seeds. Their state at step 0 is a list, with one entry per run."""
    seeds = [int(seed) for seed in seeds]
    return Kind(partial(check, seeds), partial(longest, seeds), partial(source, seeds), partial(start_seeds, seeds), seeds)


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

    params: not donated. On several GPUs no settings are proved: auto is what is fast where memory does not matter.
    """
    del task

    def params_of_next(old: Any, stack: StackState) -> Any:
        if stack.base is None or not lora.targets_of(old):  # new adapters are those of its seed
            return map_own(jnp.copy, old if stack.base is None else stack.base)
        return lora.join(stack.base, jax.tree.map(jnp.copy, lora.split(old)[1]))

    setup, first = start(team, [map_own(jnp.copy, stack) for stack in params], cfg.for_seed(seeds[0]))
    states = [first]
    for seed in seeds[1:]:
        own = [params_of_next(old, stack) for old, stack in zip(params, first.stacks, strict=True)]
        states.append(start(team, own, cfg.for_seed(seed))[1])
    setup = setup._replace(cfg=cfg)
    if mesh_of(runs_of(setup, seeds).joint) is not None:
        setup = with_settings(setup, update_settings(with_fastest_updates(cfg)))
    return setup, states


def longest(seeds: Sequence[int], setup: Setup, states: Sequence[TeamState], task: Task) -> tuple[Work, Updates]:
    """Return the update of all runs after all turns with completions of full length. See `Kind.longest`."""
    widths, joined = longest_prompts(setup, task.items, task.env), joined_shapes(states[0], len(seeds))
    work, updates = longest_update(runs_of(setup, seeds).joint, joined, widths)
    return work, lambda setup: updates(runs_of(setup, seeds).joint)


def source(seeds: Sequence[int], setup: Setup, task: Task, states: Sequence[TeamState]) -> Source:
    """Return the source of several runs, which call one environment in the thread of the caller. See `Kind.source`."""
    del states
    runs = runs_of(setup, seeds)
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

    return Source(play, partial(batches_together, runs), evaluate if task.held_out else None)
