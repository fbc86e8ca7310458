"""Runs on rollouts: draw the tasks of a step, play its episodes, and make the batches of stacks and critics."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from jmarl.algorithms.constraints import HELD_OUT, RANKED, facts
from jmarl.config import TrainConfig
from jmarl.config.constraints import require
from jmarl.envs.base import Environment
from jmarl.envs.calls.user_code import calling
from jmarl.envs.rows import read_rows
from jmarl.evaluation.evaluate import Evaluation, evaluation_of
from jmarl.lazy import Table
from jmarl.learning.setup import Setup
from jmarl.logs.goodput import timed, timed_sampler
from jmarl.logs.rollout_log import RolloutLog
from jmarl.logs.terminal import say
from jmarl.models.lora import model_of
from jmarl.models.platforms import platform_of
from jmarl.models.sharding import place_agents
from jmarl.randomness import Randomness, tasks_of
from jmarl.rollout.chunks import divided
from jmarl.rollout.dynamic_sampling import further_items, replace_uninformative
from jmarl.rollout.experience import Source
from jmarl.rollout.make_batches import VALUES, rollout_batches
from jmarl.rollout.play import first_request, play
from jmarl.rollout.prompt_check import items_that_fit, needs_long_context
from jmarl.rollout.turns import Rollout, check_columns
from jmarl.rollout.zeros import zero_rollout
from jmarl.runs.checks import check_run, check_team, environment_of
from jmarl.runs.precompile import EARLY, compile_all, first_part, longest_prompts, programs_of_run
from jmarl.runs.run import Kind, PreparedRun, Task, fingerprints
from jmarl.runs.start import in_chosen_context, start
from jmarl.sampling.generate import Sampler, SampleRequest, StepSampler
from jmarl.team import Team, to_agents
from jmarl.types import TeamState

LEAGUE = Table[Any](
    {
        "check": "jmarl.league.strangers:check_strangers",
        "sampler": "jmarl.league.league:LeagueSampler",
        "slots": "jmarl.league.league:empty_slots",
    }
)
TALK = Table[Callable[..., dict[str, float]]]({"columns": "jmarl.league.talk:columns_of_talk"})


def check(cfg: TrainConfig, team: Team, task: Task, wandb_config: dict | None) -> tuple[Task, dict[str, Any], TrainConfig]:
    """Check a run on completions; its task gets an `Environment` and lists. See `Kind.check`."""
    env = environment_of(team, task.env, cfg)
    items, held_out = read_rows(task.items), read_rows(() if task.held_out is None else task.held_out)
    check_run(items, cfg, wandb_config)
    require([HELD_OUT, RANKED], facts(cfg, held_out=held_out))
    check_team(team, cfg)
    if cfg.league.strangers:
        LEAGUE["check"](cfg.league.strangers, cfg.episodes.chat, cfg.sampling)
    data = fingerprints(items, held_out)
    cfg = in_chosen_context(team, cfg, partial(needs_long_context, team, env, [*items, *held_out], cfg))
    items, held_out, overlap = items_that_fit(team.in_context(cfg.run.long_context), env, items, held_out, cfg)
    return task._replace(env=env, items=items, held_out=held_out, overlap=overlap), data, cfg


def longest(setup: Setup, task: Task) -> Rollout:
    """Return all turns with completions of full length. See `Kind.longest`."""
    return zero_rollout(setup, longest_prompts(setup, task.items, shared(setup, task).env))


def shared(setup: Setup, task: Task) -> Task:
    """Return a task whose environment all processes of the run call."""
    return task._replace(env=divided(task.env, setup.cfg.episodes.rewards_divided))


def evaluation_on(setup: Setup, task: Task) -> Callable[[TeamState], Evaluation] | None:
    """Return a function from a state to its evaluation on the held-out items of a task; None without them."""
    return evaluation_of(setup.team, task.held_out, task.env, setup.cfg, task.eval_metrics)


def source_of_rollouts(run: PreparedRun, state: TeamState) -> Source:
    """Return the source of a run on rollouts. See `Kind.source`."""
    del state
    task = shared(run.setup, run.task)
    return rollout_source(run.setup, task, task.env)


def rollout_source(setup: Setup, task: Task, env: Environment) -> Source:
    """Return the source of a run on rollouts: each step plays episodes on the next items.

    env: in which the team learns; evaluations are in that of the task.
    """
    items, eval_items, evaluate = task.items, task.held_out, evaluation_on(setup, task)
    cfg = setup.cfg
    early: StepSampler = (EARLY["sampler"] if cfg.episodes.async_steps else StepSampler)(setup.team)
    playing: Callable[..., Rollout] = play
    if cfg.league.on:
        early = league = LEAGUE["sampler"](setup)
        playing = league.play

    def compile_programs(state: TeamState) -> TeamState:
        if (step := int(state.step)) < cfg.run.num_updates:
            started = time.monotonic()
            tasks, following = tasks_at(items, cfg, step), tasks_at(items, cfg, step + 1)
            programs = programs_of_run(setup, state, tasks, eval_items, following, partial(first_part, setup, env))
            count = compile_all(program for _, _, program in programs)
            if cfg.run.progress:
                say(f"compiled {count} programs in {time.monotonic() - started:.1f} s")
        return early.take(state)

    def play_episodes(step: int, state: TeamState) -> Rollout:
        tasks, params = partial(tasks_at, items, cfg, step), params_of(state)
        following = request_of(setup, items, env, step + 1) if cfg.episodes.async_steps else None
        early.begin(step, params)
        sample = timed(partial(early.sample, params, step, following), params)
        with calling(f"update {step + 1}"):
            rollout = play_step(sample, setup, tasks(), env, step, tasks, playing)
        rollout = rollout._replace(notes={**rollout.notes, **early.notes(step, rollout.turns[0].completions)})
        if cfg.run.talk_every and step % cfg.run.talk_every == 0:
            talk = TALK["columns"](setup, params, rollout, env, lambda other: play_step(sample, setup, tasks(), other, step))
            rollout = rollout._replace(notes={**rollout.notes, **talk})
        if step == 0:  # later updates may lack a valid reward
            check_valid(rollout)
            warn_of_cut_completions(setup, rollout)
        return rollout

    def free_and_evaluate(evaluate: Callable[[TeamState], Evaluation], state: TeamState) -> Evaluation:
        early.at(int(state.step))
        return evaluate(state)

    evaluations = evaluate and partial(free_and_evaluate, evaluate)
    return Source(play_episodes, evaluations, compile_programs, early.put_back)


def request_of(setup: Setup, items: Sequence[dict], env: Environment, step: int) -> SampleRequest:
    """Return what the episodes of a step request from the sampler in their first turn."""
    cfg, group, randomness = setup.cfg, setup.cfg.episodes.num_generations, Randomness(setup.cfg.run.seed, step)
    return first_request(setup.team, tasks_at(items, cfg, step), env, cfg.sampling, cfg.episodes, group, randomness)


def start_with_empty_rows(team: Team, params: Sequence[Any], cfg: TrainConfig, task: Task) -> tuple[Setup, TeamState]:
    """Return setup and state before the first step; with async_steps no completion of it has begun, and the slots of a
    league are empty. See `Kind.start`."""
    setup, state = start(team, params, cfg)
    if cfg.league.on:
        return setup, state._replace(pending=tuple(LEAGUE["slots"](params_of(state), cfg.league)))
    if not cfg.episodes.async_steps:
        return setup, state
    rows = EARLY["rows"](setup.team, request_of(setup, task.items, task.env, 0), platform_of(state.stacks))
    pairs = zip(rows, setup.team.stacks, strict=True)
    return setup, state._replace(pending=tuple(place_agents(pending, spec.mesh) for pending, spec in pairs))


def tasks_at(items: Sequence[dict], cfg: TrainConfig, step: int, draw: int = 0) -> list[dict]:
    """Return the tasks of a step. draw: 0 for the first tasks, later the round of dynamic sampling."""
    first = tasks_of(step, len(items), cfg.episodes.num_prompts, cfg.run.seed)
    indices = further_items(step, draw, first, len(items), cfg.run.seed) if draw else first
    return [items[i] for i in indices]


def sampler_of(setup: Setup, state: TeamState) -> Sampler:
    """Return a function that samples completions from the policies of a state, on the devices where it is."""
    return timed_sampler(setup.team, params_of(state))


def params_of(state: TeamState) -> list[Any]:
    """Return the parameters [A, ...] that each stack samples with."""
    return [model_of(stack) for stack in state.stacks]


def play_step(
    sample: Sampler,
    setup: Setup,
    tasks: Sequence[dict],
    env: Environment,
    step: int,
    further: Callable[[int], Sequence[dict]] | None = None,
    playing: Callable[..., Rollout] = play,
) -> Rollout:
    """Play the episodes of one training step.

    Args:
        sample: see `play`.
        tasks: the tasks of the step.
        further: round of dynamic sampling (1, 2, ...) -> its tasks; None: no dynamic sampling.
        playing: `play`, or another function with its arguments.
    """
    team, algorithm, cfg = setup.team, setup.algorithm, setup.cfg

    def play_round(draw: int) -> Rollout:
        round_tasks = further(draw) if further and draw else tasks
        randomness = Randomness(cfg.run.seed, step, draw=draw)
        return playing(sample, team, round_tasks, env, cfg.sampling, cfg.episodes, cfg.episodes.num_generations, randomness)

    rollout = play_round(0)
    if cfg.episodes.dynamic_sampling and further:
        rollout = replace_uninformative(team, rollout, play_round, cfg.episodes.dynamic_sampling, algorithm.row.grouping)
    if algorithm.has_greedy_baseline:
        rollout = rollout._replace(expected=VALUES["greedy"](sample, team, tasks, env, cfg, step, rollout))
    return rollout._replace(tasks=rollout.tasks or tasks)


def check_valid(first: Rollout) -> None:
    """Raise a ValueError if no agent acts in the first rollout, none of its rewards is valid, or a name in it is taken."""
    check_columns(first)
    if not any(turn.acts.any() for turn in first.turns):
        raise ValueError(
            "no agent acts in the first update: every prompt is None, which means that its agent does not act (does a "
            "formatter forget to return its text?)"
        )
    if not np.isfinite(first.joint_returns[0]).any():  # returns of the first turn contain the rewards of all later turns
        fault = next((turn.fault for turn in first.turns if turn.fault), "")
        raise ValueError(f"no joint action of the first update has a valid reward: {fault}")


def warn_of_cut_completions(setup: Setup, first: Rollout) -> None:
    """Warn of agents whose completions in the first rollout are all cut, where cut ones are not trained on."""
    if not setup.algorithm.loss.mask_overlong:
        return
    ended = np.zeros(setup.team.num_agents, int)
    for turn in first.turns:
        rows = to_agents(setup.team, [np.asarray(done.ended) for done in turn.completions])
        ended += [np.sum(own[: len(acts)][acts]) for own, acts in zip(rows, turn.acts, strict=True)]
    acts = np.any([turn.acts.any(1) for turn in first.turns], 0)
    if agents := [str(agent) for agent in np.flatnonzero(acts & (ended == 0))]:
        warnings.warn(
            f"all completions of agent {', '.join(agents)} in the first update are cut at "
            f"max_new_tokens={setup.cfg.sampling.max_new_tokens}, and mask_overlong leaves cut completions out, so nothing is "
            "learned from them: raise max_new_tokens, or set mask_overlong=False",
            stacklevel=2,
        )


ROLLOUTS = Kind(check, longest, rollout_batches, source_of_rollouts, RolloutLog, start_with_empty_rows)
