"""Several runs of one team, which differ in their seed alone, trained at once: their agents lie side by side in the stacks.

With LoRA the runs have one base, so one more costs its adapters and activations, and under `vmap` the tokens of all runs meet
the base in one product. What a run's numbers depend on is its own: adapters, order of the items, random keys, rewards, clips,
schedules. Each therefore learns what it would learn alone, but for rounding (programs have other shapes), for the noise of
dropout, which depends on how far batches are padded, and, in episodes that end at different times, for which rows are in a
minibatch. Its directory `seed_S` is that of a run alone: metrics, checkpoints to go on from alone or together, models.

Sampled in one program is what the runs ask for at one time in the same shapes; episodes of several turns that end at different
times are sampled run by run until they meet again. Left out: rows on pairs, which learn in rounds, and W&B.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jmarl.algorithms import find_row
from jmarl.config import TrainConfig, flat
from jmarl.envs.base import Environment, TextEnvironment, describe
from jmarl.envs.reward_environment import Formatter, Transition
from jmarl.evaluation.evaluate import Evaluation, play_held_out, summarize
from jmarl.learning.per_agent import with_adapters
from jmarl.memory import explain_memory
from jmarl.models import lora, sharding
from jmarl.models.hub.agents import Agent
from jmarl.models.stack import map_own
from jmarl.rollout.prompt_check import items_that_fit
from jmarl.team import Team, initial_params
from jmarl.training.checks import check_run, check_settings, check_team, environment_of
from jmarl.training.files import fingerprint
from jmarl.training.files.checkpoint import Checkpointer
from jmarl.training.files.lock import locked
from jmarl.training.files.run_directory import checkpoints_of, open_run, set_aside
from jmarl.training.files.saving import Saves, write_models
from jmarl.training.logs.metrics_writer import MetricsWriter, say
from jmarl.training.logs.rollout_log import RolloutLog
from jmarl.training.logs.seeds_log import SeedsLog
from jmarl.training.loop import Ending, Source, run_loop
from jmarl.training.records import Played, TrainResult
from jmarl.training.rollouts import check_valid, play_step, tasks_at
from jmarl.training.stacked_seeds import Runs, alone, batches_together, play_together, together
from jmarl.training.start import start
from jmarl.types import Batches, TeamState


def train_seeds(
    team: Team,
    reward: Callable | Environment | TextEnvironment,
    items: Sequence[dict],
    cfg: TrainConfig,
    *,
    seeds: Sequence[int],
    params: Sequence[Any] | None = None,
    formatters: Sequence[Formatter] | None = None,
    external_transition: Transition | None = None,
    critic: Agent | None = None,
    eval_items: Sequence[dict] = (),
) -> list[TrainResult]:
    """Train a team once from each seed, all at once; arguments as for `train`. Returns what `train` returns for each alone.

    With an output_dir every run has its own in it, `seed_0`, …, and beside them are the mean reward and its 95 % interval over
    the runs. params: best with `make_team(..., lora=True)`; without LoRA every run has a copy of all weights, and those given
    stay as they are.
    """
    env = environment_of(team, reward, formatters, external_transition, cfg)
    check_seeds(seeds, cfg)
    cfgs = tuple(cfg.for_seed(int(seed)) for seed in seeds)
    check_run(items, cfgs[0], None)
    check_team(team, cfg)
    items, eval_items = items_that_fit(team, env, items, eval_items, cfg)
    where = [sharding.mesh_for(cfg.run.mesh, [len(s.members) * count for s in team.stacks]) for count in (1, len(cfgs))]
    params = once(team, initial_params(team, params, cfg.lora.lora_rank > 0), cfgs[0], where[0])
    started = [start(team, [map_own(jnp.copy, p) for p in params], c, critic) for c in cfgs]
    runs = Runs(started[0][0], cfgs, *where)
    identity = {
        "team": team.describe(),
        "critics": Team(runs.setup.critics.specs).describe(),
        "environment": describe(env),
        "data": fingerprint.of_data(items),
        "reward": fingerprint.of_reward(env),
    }
    with contextlib.ExitStack() as opened, explain_memory():
        if cfg.run.output_dir:
            opened.enter_context(locked(cfg.run.output_dir))
        state, logs, savers = open_runs(runs, [of_seed for _, of_seed in started], identity, opened)
        del started, params  # with the bases that lie elsewhere than that of all
        writer, saves = None, Saves(cfg.run, savers, lambda state, i: alone(state, i, runs))
        if cfg.run.resume and cfg.run.progress:
            say(f"resuming {cfg.run.output_dir} from step {int(state.step)} of {cfg.run.num_updates}")
        if cfg.run.output_dir:
            run = cfg.run
            new = MetricsWriter(
                run.output_dir, flat(cfg), total_steps=run.num_updates, start_step=int(state.step), progress=run.progress
            )
            writer = opened.enter_context(new)
        source, log = seeds_source(runs, items, env, eval_items), SeedsLog(team, cfgs[0], logs, writer)
        ending = run_loop(runs.all, state, source, log, saves)
        return [result_of_run(runs, ending, i, log) for i in range(len(cfgs))]


def result_of_run(runs: Runs, ending: Ending, i: int, log: SeedsLog) -> TrainResult:
    """Return what `train` would return of one of the runs, whose models are written."""
    run, state = runs.cfgs[i].run, alone(ending.state, i, runs)
    before, after = (None if results is None else results[i] for results in (ending.before, ending.after))
    unsaved = write_models(run, runs.team, state) if run.output_dir and run.save_models and not ending.interrupted else ""
    return TrainResult(runs.team, state, log.logs[i].rewards, before, after, ending.interrupted, unsaved or ending.unsaved)


def check_seeds(seeds: Sequence[int], cfg: TrainConfig) -> None:
    """Refuse what cannot be trained together; experiments call it before they load models."""
    seeds = [int(seed) for seed in seeds]
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={seeds} is not allowed: give at least one, and each once")
    if find_row(cfg.algorithm).data != "rollouts":
        raise ValueError(
            f"algorithm={cfg.algorithm!r} learns from pairs in rounds, and runs are trained together only by rows on rollouts "
            "(magrpo, ippo, c3, …): call train once a seed"
        )
    if cfg.run.saves and cfg.run.save_total_limit < 2:
        raise ValueError(
            f"save_total_limit={cfg.run.save_total_limit} is not allowed with several seeds: keep at least 2, because a "
            "kill may come when only some of them have the newest"
        )
    if cfg.run.replay_rollout:
        raise ValueError("replay_rollout makes the update of one run: leave seeds out, and set output_dir to that run's seed_N")
    if cfg.run.output_dir and checkpoints_of(cfg).exists():
        raise ValueError(
            f"output_dir={cfg.run.output_dir!r} holds the checkpoints of a single run, and runs of several seeds have "
            "theirs in seed_0, … there: choose another output_dir"
        )
    for seed in seeds:
        check_settings(cfg.for_seed(seed))


def once(team: Team, params: Sequence[Any], cfg: TrainConfig, mesh: Mesh | None) -> list[Any]:
    """Return the parameters that every run starts from: where new LoRA adapters come the base alone, on the devices of all."""
    starts = []
    for given, adapted_ in zip(params, with_adapters(team, params, cfg, mesh), strict=True):
        fresh = cfg.lora.lora_rank and not lora.targets_of(given)
        starts.append(lora.split(adapted_)[0] if fresh else adapted_)
    return starts


def open_runs(
    runs: Runs, states: Sequence[TeamState], identity: dict[str, Any], opened: contextlib.ExitStack
) -> tuple[TeamState, list[RolloutLog], list[tuple[Checkpointer, dict]]]:
    """Open the directory of each run. Returns the state of all (if they resume, at the newest step that all have), the log of
    each run, and the checkpoints of each with what they say of it. opened: closes them."""
    cfg = runs.cfgs[0]
    step = common_step(runs.cfgs) if cfg.run.resume else None
    if cfg.run.output_dir and not cfg.run.resume:
        set_aside(str(Path(cfg.run.output_dir).parent))
    pairs = zip(runs.cfgs, states, strict=True)
    open_ = [opened.enter_context(open_run(c, state, identity, None, step)) for c, state in pairs]
    logs = [RolloutLog(runs.team, c, run.writer) for c, run in zip(runs.cfgs, open_, strict=True)]
    return together([run.state for run in open_], runs), logs, [saver for run in open_ for saver in run.savers]


def common_step(cfgs: Sequence[TrainConfig]) -> int:
    """Return the newest step of which all runs have an intact checkpoint. (A kill may come when only some have the newest.)
    Reads only: the directories are not locked yet."""
    with contextlib.ExitStack() as opened:
        savers = [opened.enter_context(Checkpointer(checkpoints_of(cfg), read_only=True)) for cfg in cfgs]
        common = set.intersection(*(set(saver.steps()) for saver in savers))
        for step in sorted(common, reverse=True):
            if all([saver.is_intact(step, cfgs[0].run.strict_checkpoints) for saver in savers]):
                return step
        steps = ", ".join(f"{cfg.run.output_dir}: {saver.steps()}" for cfg, saver in zip(cfgs, savers, strict=True))
    raise ValueError(f"the runs have no checkpoint of one step in common ({steps}): resume them one by one with train")


def seeds_source(runs: Runs, items: Sequence[dict], env: Environment, eval_items: Sequence[dict]) -> Source:
    """Return what several runs learn from: each step plays the episodes of all, whose completions are sampled together."""
    cfgs = [cfg.replace(overlap_rewards=False) for cfg in runs.cfgs]  # all of them call one environment
    setups = [setup._replace(cfg=cfg) for setup, cfg in zip(runs.setups, cfgs, strict=True)]

    def play(step: int, state: TeamState) -> list[Played]:
        tasks = [partial(tasks_at, items, cfg, step) for cfg in cfgs]
        plays = [
            partial(play_step, setup=setup, tasks=draw(), env=env, step=step, further=draw)
            for draw, setup in zip(tasks, setups, strict=True)
        ]
        rollouts = play_together(runs, state, plays)
        for rollout in rollouts if step == 0 else ():
            check_valid(rollout)
        return [Played(rollout, draw()) for rollout, draw in zip(rollouts, tasks, strict=True)]

    def make_batches(state: TeamState, played: Sequence[Played]) -> Batches:
        return batches_together(runs, state, [one.rollout for one in played])

    def evaluate(state: TeamState) -> list[Evaluation]:
        plays = [partial(play_held_out, team=runs.team, items=eval_items, env=env, cfg=cfg) for cfg in cfgs]
        return [summarize(rollout) for rollout in play_together(runs, state, plays)]

    return Source(play, make_batches, evaluate if eval_items else None)
