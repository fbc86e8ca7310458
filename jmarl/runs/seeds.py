"""`jmarl.train_seeds`: train a team from several seeds at once, with the agents of all runs in the same stacks.

With LoRA the runs share one base, so an extra run costs only its adapters and activations, and under `vmap` the tokens of all
runs are multiplied with the base in one product. Adapters, item order, random keys, rewards, clipping and schedules belong to
single runs. So a run learns what it would learn alone, except for rounding (programs have other shapes), for dropout (its noise
depends on the padding of batches) and, if episodes end at different times, for the assignment of rows to minibatches. Its
directory `seed_S` equals that of a run alone: metrics, models, and checkpoints from which it resumes alone or with the others.

Requests of all runs with equal shapes are sampled by one program. Episodes of several turns that end at different times are
sampled run by run until the shapes are equal again. Left out: algorithms on pairs, which learn in rounds, and W&B.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import with_fastest_updates
from jmarl.algorithms.constraints import SEEDS, facts
from jmarl.columns import EPISODES, INTERVAL, RUNS
from jmarl.config import TrainConfig, check_argument, flat
from jmarl.config.constraints import require
from jmarl.envs.rows import Rows
from jmarl.evaluation.environment import Reward
from jmarl.evaluation.evaluate import Evaluation, check_result, numbers, play_held_out, summarize
from jmarl.evaluation.statistics import mean_and_interval
from jmarl.files.attempt import write_end
from jmarl.files.checkpoint import Checkpointer
from jmarl.files.config_file import python_config, record_choices
from jmarl.files.interrupt import raised_again
from jmarl.files.lock import check_unlocked, locked
from jmarl.files.own_files import Watch, check_free, set_aside
from jmarl.files.run_directory import (
    checkpoints_of,
    open_run,
    open_writer,
    resolve_auto,
    resolve_resume,
    with_absolute_directory,
)
from jmarl.files.run_files import next_commands, shown
from jmarl.files.saving import Saves, write_models
from jmarl.learning.choose import update_settings, with_settings
from jmarl.learning.setup import Setup
from jmarl.logs import samples
from jmarl.logs.completions_file import TRAIN
from jmarl.logs.goodput import CLOCK
from jmarl.logs.metrics_writer import MetricsWriter
from jmarl.logs.rollout_log import RolloutLog, completions_record
from jmarl.logs.step_log import QueuedStep, StepLog
from jmarl.logs.terminal import say, watched
from jmarl.memory import explain_memory
from jmarl.models import lora, sharding
from jmarl.models.stack import map_own, to_host
from jmarl.processes import exchange
from jmarl.rollout.experience import Source
from jmarl.rollout.together import CallersEnvironment
from jmarl.rollout.turns import Rollout
from jmarl.runs.checks import check_settings, find_own_algorithms
from jmarl.runs.first_words import first_words
from jmarl.runs.kinds.rollouts import ROLLOUTS, check, check_valid, play_step, tasks_at
from jmarl.runs.loop import LoopResult, run_loop
from jmarl.runs.precompile import choose_updates, keep_programs
from jmarl.runs.records import TrainResult
from jmarl.runs.run import Run, Task, identity_of
from jmarl.runs.stacked_seeds import (
    Runs,
    agents_of_run,
    batches_together,
    join_states,
    joined_shapes,
    play_together,
    state_of_run,
)
from jmarl.runs.start import choose_mesh, start
from jmarl.shadows import explaining
from jmarl.team import Team, check_arguments, initial_params
from jmarl.types import StackState, TeamState


@raised_again()
@explain_memory(lambda: [])
def train_seeds(
    team: Team,
    reward: Reward,
    items: Rows,
    cfg: TrainConfig,
    *,
    seeds: Sequence[int],
    params: Sequence[Any] | None = None,
    eval_items: Rows = (),
) -> list[TrainResult]:
    """Train a team once from each seed, all at once. Returns the result of `train` for each seed.

    With an output_dir each run has a directory `seed_0`, ... in it; metrics.jsonl beside them has the mean reward over the runs
    and its 95 % interval.

    Args:
        seeds: one per run, all different.
        params: best from `make_team(..., lora=True)`. Without LoRA each run has a copy of all weights. They are not donated.
        team, reward, items, cfg, eval_items: see `train`.
    """
    check_arguments(team, cfg, reward)
    with CLOCK.running(), watched("preparing the runs", cfg.run.progress, CLOCK.reader()):
        run, runs, states = prepare_seeds(cfg, team, Task(reward, items, eval_items), seeds, params=params)
        source, cfg = run.kind.source(run, states[0]), run.cfg
    with contextlib.ExitStack() as opened, CLOCK.running():
        writer = None
        if cfg.run.output_dir:
            opened.enter_context(locked(cfg.run.output_dir))
        state, logs, savers = open_runs(runs, states, run.identity, opened)
        record_choices(cfg, partial(python_config, cfg, team, run.task.env, run.task.items))
        del states, params  # frees the bases of single runs
        if cfg.run.resume and cfg.run.progress:
            say(f"resuming {shown(cfg.run.output_dir)} from step {int(state.step)} of {cfg.run.num_updates}")
        if cfg.run.output_dir:
            writer = opened.enter_context(open_writer(cfg.replace(max_completions_mb=0), flat(cfg), int(state.step)))
        elif cfg.run.progress:
            writer = opened.enter_context(open_writer(cfg, {}, int(state.step)))
        places = [(cfg.run.output_dir, writer), *((log.cfg.run.output_dir, log.writer) for log in logs)]
        watches = [Watch(directory, writer) for directory, writer in places]
        log = SeedsLog(team, runs.cfgs[0], logs, writer)
        saves = Saves(cfg.run, savers, state_of=lambda state, i: state_of_run(state, i, runs))
        result = run_loop(run, state, source, log, saves)
        result = result._replace(unsaved=result.unsaved or next(filter(None, [watch.lost() for watch in watches]), ""))
        with CLOCK.phase("checkpoint"):
            results = [result_of_run(runs, result, i, log) for i in range(len(runs.cfgs))]
    if cfg.run.output_dir and cfg.run.progress and not any(one.interrupted or one.unsaved for one in results):
        say(next_commands(shown(cfg.run.output_dir), seeds))
    return results


@explaining()
def prepare_seeds(
    cfg: TrainConfig, team: Team, task: Task, seeds: Sequence[int], *, params: Sequence[Any] | None = None
) -> tuple[Run, Runs, list[TeamState]]:
    """Check runs of several seeds. Writes nothing. Arguments as of `prepare`; params are not donated.

    Returns all runs as one, whose stacks have the agents of all; what tells them apart; and the state of each at step 0.
    """
    check_seeds(seeds, cfg)
    cfg = resolve_resume(with_absolute_directory(cfg), seeds)
    cfg = choose_mesh(team, resolve_auto(cfg, cfg.for_seed(int(seeds[0]))), len(seeds))
    cfgs = [cfg.for_seed(int(seed)) for seed in seeds]
    task, data, first = check(cfgs[0].replace(progress=cfg.run.progress), team, task, None)
    keep_programs(say if cfg.run.progress else None)
    cfg, *cfgs = (own.replace(long_context=first.run.long_context) for own in (cfg, *cfgs))
    team = team.in_context(cfg.run.long_context)
    mesh = sharding.mesh_for(cfg.run.mesh, [len(s.members) * len(cfgs) for s in team.stacks], cfg.run.strategy)
    first_words(team, task, cfg, mesh)
    setup, states = start_seeds(team, initial_params(team, params, cfg.lora.lora_rank > 0), cfgs)
    identity = identity_of(setup, states[0], task.env, data)
    runs = choose_for_all(Runs(setup._replace(cfg=cfg), tuple(cfgs), mesh), states[0], task)
    kind = ROLLOUTS._replace(
        make_batches=lambda _, state, rollouts: batches_together(runs, state, rollouts),
        source=lambda run, _: seeds_source(runs, run.task),
    )
    return Run(kind, runs.joint_setup, task, identity, cfg), runs, states


def start_seeds(team: Team, params: Sequence[Any], cfgs: Sequence[TrainConfig]) -> tuple[Setup, list[TeamState]]:
    """Return the setup of the first run, and the state of each at step 0. With LoRA they share the base of the first one."""

    def params_of_next(old: Any, stack: StackState) -> Any:
        if stack.base is None or not lora.targets_of(old):  # new adapters are those of its seed
            return map_own(jnp.copy, old if stack.base is None else stack.base)
        return lora.join(stack.base, jax.tree.map(jnp.copy, lora.split(old)[1]))

    setup, first = start(team, [map_own(jnp.copy, stack) for stack in params], cfgs[0])
    states = [first]
    for cfg in cfgs[1:]:
        own = [params_of_next(old, stack) for old, stack in zip(params, first.stacks, strict=True)]
        states.append(start(team, own, cfg)[1])
    return setup, states


def choose_for_all(runs: Runs, state: TeamState, task: Task) -> Runs:
    """Return the runs without auto, see `choose_updates`. state: of the first run.

    On several GPUs nothing is proved: auto is what is fast where memory does not matter.
    """
    if runs.mesh is not None:
        runs = dataclasses.replace(runs, setup=with_settings(runs.setup, update_settings(with_fastest_updates(runs.setup.cfg))))

    chosen = update_settings(choose_updates(ROLLOUTS, runs.joint_setup, joined_shapes(state, runs), task).cfg)
    cfgs = tuple(cfg.replace(**chosen) for cfg in runs.cfgs)
    return dataclasses.replace(runs, setup=with_settings(runs.setup, chosen), cfgs=cfgs)


def result_of_run(runs: Runs, result: LoopResult, i: int, log: SeedsLog) -> TrainResult:
    """Write the models of run i and return what `train` would return for it."""
    state = state_of_run(result.state, i, runs)
    before, after = (None if results is None else results[i] for results in (result.before, result.after))
    run = runs.cfgs[i].run
    unsaved = ("" if result.interrupted else write_models(run, runs.team, state)) or result.unsaved
    if run.output_dir and not unsaved:
        write_end(run.output_dir, run.num_updates, int(state.step), result.interrupted)
    return TrainResult(runs.team, state, log.logs[i].rewards, before, after, result.interrupted, unsaved)


def check_seeds(seeds: Sequence[int], cfg: TrainConfig) -> None:
    """Raise an error for seeds and settings that cannot be trained together. Experiments call this before they load models."""
    exchange.require_one("several seeds in one program")
    find_own_algorithms(cfg.algorithm, cfg.preference.rl_algorithm)
    check_argument("seeds", seeds, list | tuple | range | np.ndarray, "a list of different numbers, such as [0, 1, 2]")
    seeds, cfg = [int(seed) for seed in seeds], resolve_resume(cfg, seeds)
    single_run = bool(cfg.run.output_dir) and checkpoints_of(cfg).exists()
    require(SEEDS, facts(cfg, seeds=seeds, saves=cfg.run.saves, single_run=single_run))
    if cfg.run.output_dir:
        check_unlocked(cfg.run.output_dir)
        check_free(cfg.run.output_dir)
    for seed in seeds:
        check_settings(cfg.for_seed(seed))


def open_runs(
    runs: Runs, states: Sequence[TeamState], identity: dict[str, Any], opened: contextlib.ExitStack
) -> tuple[TeamState, list[RolloutLog], list[tuple[Checkpointer, dict]]]:
    """Open the directory of each run, or resume all runs at the newest step that all of them have saved.

    Args:
        states: initial state of each run; donated.
        identity: see `open_run`.
        opened: closes the directories.

    Returns:
        The state of all runs, and per run its log and its checkpoints with their metadata (empty without checkpoints).
    """
    cfg = runs.cfgs[0]
    step = common_step(runs.cfgs) if cfg.run.resume else None
    if cfg.run.output_dir and not cfg.run.resume:
        set_aside(str(Path(cfg.run.output_dir).parent))
    pairs = zip(runs.cfgs, states, strict=True)
    open_ = [opened.enter_context(open_run(run_cfg, state, identity, None, step)) for run_cfg, state in pairs]
    own = zip(runs.cfgs, open_, strict=True)
    logs = [RolloutLog(runs.team, run_cfg, run.writer, not run.changes) for run_cfg, run in own]
    return join_states([run.state for run in open_], runs), logs, [saver for run in open_ for saver in run.savers]


def common_step(cfgs: Sequence[TrainConfig]) -> int:
    """Return the newest step of which all runs have an intact checkpoint: a kill may leave the newest one in only some of them.
    Only reads, because the directories are not locked yet."""
    with contextlib.ExitStack() as opened:
        savers = [opened.enter_context(Checkpointer(checkpoints_of(cfg), read_only=True)) for cfg in cfgs]
        common = set.intersection(*(set(saver.steps()) for saver in savers))
        common &= common if cfgs[0].run.resume_step is None else {cfgs[0].run.resume_step}
        for step in sorted(common, reverse=True):
            if all([saver.is_intact(step, cfgs[0].run.strict_checkpoints) for saver in savers]):
                return step
        steps = ", ".join(f"{cfg.run.output_dir}: {saver.steps()}" for cfg, saver in zip(cfgs, savers, strict=True))
    raise ValueError(f"the runs have no checkpoint of one step in common ({steps}): resume them one by one with train")


def seeds_source(runs: Runs, task: Task) -> Source:
    """Return the source of several runs: each step plays the episodes of all runs and samples their completions together."""
    cfgs = [cfg.replace(overlap_rewards=False) for cfg in runs.cfgs]  # the runs call one environment
    setups = [setup._replace(cfg=cfg) for setup, cfg in zip(runs.setups, cfgs, strict=True)]

    def with_environment(play: Callable[..., Rollout], sample: Any) -> Rollout:
        """Play the episodes of one run, and call the environment in the thread of the caller."""
        return play(sample, env=CallersEnvironment(task.env, sample))

    def play_all(state: TeamState, plays: Sequence[Callable[..., Rollout]]) -> list[Rollout]:
        """Play the episodes of all runs."""
        return play_together(runs, state, [partial(with_environment, play) for play in plays])

    def play(step: int, state: TeamState) -> list[Rollout]:
        draws = [partial(tasks_at, task.items, cfg, step) for cfg in cfgs]
        plays = [
            partial(play_step, setup=setup, tasks=draw(), step=step, further=draw)
            for draw, setup in zip(draws, setups, strict=True)
        ]
        rollouts = play_all(state, plays)
        if step == 0:  # later updates may lack a valid reward
            for rollout in rollouts:
                check_valid(rollout)
        return rollouts

    def evaluate(state: TeamState) -> list[Evaluation]:
        plays = [partial(play_held_out, team=runs.team, items=task.held_out, cfg=cfg) for cfg in cfgs]
        results = [summarize(rollout) for rollout in play_all(state, plays)]
        for result in results if not int(state.step) else ():
            check_result(result)
        return results

    return Source(play, evaluate if task.held_out else None)


# --- the logs of all runs --------------------------------------------------------------------------------------------------

SUMMED, WITH_INTERVAL = ("tokens", "tokens_per_s"), ("reward/mean", "eval/reward")


class SeedsLog(StepLog):
    """The logs of all runs, and the means over the runs. The experience of a step is a list with one entry per run."""

    def __init__(self, team: Team, cfg: TrainConfig, logs: Sequence[RolloutLog], writer: MetricsWriter | None):
        super().__init__(team, cfg, writer)
        self.logs = logs

    def write(self, step: QueuedStep) -> dict[str, float]:
        metrics = to_host(step.metrics)
        for i, (log, experience) in enumerate(zip(self.logs, step.experience, strict=True)):
            if log.last_step == step.number or any(waiting.number == step.number for waiting in log.waiting):
                continue  # the call was interrupted and is now repeated
            log.failed_saves = self.failed_saves
            own = [agents_of_run(stack_metrics, i, len(self.logs)) for stack_metrics in metrics]
            log.add(step._replace(experience=experience, metrics=own))
        rows = [row for log in self.logs if (row := log.flush()) is not None]
        mean = over_runs(rows) if rows else {}
        if self.writer and rows:
            self.writer.write(step.number + 1, mean)
        return mean

    def after_row(self, step: QueuedStep, row: dict[str, float]) -> None:
        """Print a sample of the first run: the log of each run handles its own rows, and shows nothing."""
        if self.writer is not None and samples.are_on():
            self.writer.completions(step.number + 1, TRAIN, completions_record(step.experience[0]))

    def evaluation(self, updates: int, result: Sequence[Evaluation], start: float) -> None:
        for log, run_result in zip(self.logs, result, strict=True):
            log.evaluation(updates, run_result, start)
        if self.writer and updates not in self.writer.evaluated:
            rows = [numbers(run_result) for run_result in result]
            counts = {name for row in rows for name in row if name.endswith(EPISODES)}
            rows = [dict.fromkeys(counts, row["eval/episodes"] - row["eval/reward/invalid"]) | row for row in rows]
            plain = [{name: x for name, x in row.items() if not name.endswith(INTERVAL)} for row in rows]
            self.writer.write(updates, {"eval/updates": updates} | over_runs(plain))

    def scores(self, result: Sequence[Evaluation]) -> list[dict[str, float]]:
        return [score for log, run_result in zip(self.logs, result, strict=True) for score in log.scores(run_result)]

    def sync(self) -> None:
        for log in (super(), *self.logs):
            log.sync()

    def logged_evaluation(self, updates: int) -> list[Evaluation] | None:
        results = [log.logged_evaluation(updates) for log in self.logs]
        return None if None in results else results

    def stop_if_not_finite(self) -> None:
        for log in self.logs:
            log.stop_if_not_finite()


def over_runs(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over runs of each column that all runs have, and half the width of the 95 % interval of rewards. Numbers
    of tokens are summed. Runs without a number in the column are in no mean; `NAME_runs` is then the number of the others."""
    means: dict[str, float] = {}
    for name in [name for name in rows[0] if all(name in row for row in rows)]:
        values = np.array([row[name] for row in rows])
        mean, interval = mean_and_interval(values)
        means[name] = float(values.sum() if name in SUMMED else mean)
        if name in WITH_INTERVAL or name.startswith("eval/pass@"):
            means[f"{name}{INTERVAL}"] = float(interval)
        if (known := np.isfinite(values).sum()) < len(rows):
            means[f"{name}{RUNS}"] = float(known)
    return means
