"""The directories and logs of several runs that are trained together, and the means over the runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jmarl.columns import EPISODES, INTERVAL, RUNS
from jmarl.config import TrainConfig, flat
from jmarl.evaluation.evaluate import Evaluation, numbers
from jmarl.evaluation.statistics import mean_and_interval
from jmarl.files.checkpoint import Checkpointer
from jmarl.files.config_file import record_choices
from jmarl.files.lock import locked
from jmarl.files.own_files import Watch, set_aside
from jmarl.files.run_directory import checkpoints_of, open_run, open_writer
from jmarl.files.run_files import shown
from jmarl.logs import samples
from jmarl.logs.completions_file import TRAIN
from jmarl.logs.metrics_writer import MetricsWriter
from jmarl.logs.rollout_log import RolloutLog, completions_record
from jmarl.logs.step_log import QueuedStep, StepLog
from jmarl.logs.terminal import say
from jmarl.models.stack import to_host
from jmarl.runs.kinds.seeds import Runs, agents_of_run, join_states
from jmarl.runs.run import PreparedRun
from jmarl.team import Team
from jmarl.types import TeamState


@contextlib.contextmanager
def open_seeds(
    run: PreparedRun, runs: Runs, states: Sequence[TeamState]
) -> Iterator[tuple[TeamState, list[tuple[Checkpointer, dict[str, Any]]], SeedsLog, Callable[[], str]]]:
    """Open the directory of each run, or resume all runs at the newest step that all of them have saved.

    Args:
        run: a single run, with the settings of all.
        runs: the same for all of them.
        states: initial state of each run; donated.

    Returns:
        The state of all runs, the checkpoints of each (see `OpenRun`), the log of all, and why files of them are lost.
    """
    cfg, cfgs, writer = run.cfg, [setup.cfg for setup in runs.alone], None
    with contextlib.ExitStack() as opened:
        if cfg.run.output_dir:
            opened.enter_context(locked(cfg.run.output_dir))
        step = common_step(cfgs) if cfg.run.resume else None
        if cfg.run.output_dir and not cfg.run.resume:
            set_aside(cfg.run.output_dir)
        pairs = zip(cfgs, states, strict=True)
        own = [opened.enter_context(open_run(own, state, run.identity, None, step)) for own, state in pairs]
        logs = [RolloutLog(run.team, cfg, one.writer, not one.changes) for cfg, one in zip(cfgs, own, strict=True)]
        state = join_states([one.state for one in own], runs)
        record_choices(cfg, run.team, run.task.env, run.task.items)
        updates = int(state.step)
        if cfg.run.resume and cfg.run.progress:
            say(f"resuming {shown(cfg.run.output_dir)} from step {updates} of {cfg.run.num_updates}")
        if cfg.run.output_dir or cfg.run.progress:
            writer = opened.enter_context(open_writer(cfg.replace(max_completions_mb=0), flat(cfg), updates))
        log = SeedsLog(run.team, cfg, logs, writer)
        watches = [Watch(x.cfg.run.output_dir, x.writer) for x in (log, *logs)]
        savers = [saver for one in own for saver in one.savers]
        yield state, savers, log, lambda: next(filter(None, [watch.lost() for watch in watches]), "")


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
            self.writer.completions(step.number + 1, TRAIN, completions_record(self.team, step.experience[0]))

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
        if name in WITH_INTERVAL or name.startswith(("eval/pass@", "eval/best@", "eval/majority@")):
            means[f"{name}{INTERVAL}"] = float(interval)
        if (known := np.isfinite(values).sum()) < len(rows):
            means[f"{name}{RUNS}"] = float(known)
    return means
