"""Write the rows of several seeds that are trained together: those of each run, and the means over the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jmarl.config import TrainConfig
from jmarl.evaluation.evaluate import Evaluation, numbers
from jmarl.evaluation.statistics import mean_and_interval
from jmarl.logs import samples
from jmarl.logs.completions_file import TRAIN
from jmarl.logs.metrics_writer import MetricsWriter
from jmarl.logs.rollout_log import RolloutLog, completions_record
from jmarl.logs.step_log import Step, StepLog
from jmarl.runs.stacked_seeds import agents_of_run
from jmarl.team import Team

SUMMED, WITH_INTERVAL = ("tokens", "tokens_per_s"), ("reward/mean", "eval/reward")


class SeedsLog(StepLog):
    """The logs of all runs, and the means over the runs. The experience of a step is a list with one entry per run."""

    def __init__(self, team: Team, cfg: TrainConfig, logs: Sequence[RolloutLog], writer: MetricsWriter | None):
        super().__init__(team, cfg, writer)
        self.logs = logs

    def write(self, step: Step) -> dict[str, float]:
        metrics = jax.device_get(step.metrics)
        for i, (log, experience) in enumerate(zip(self.logs, step.experience, strict=True)):
            if log.last_step == step.number or any(waiting.number == step.number for waiting in log.waiting):
                continue  # the call was interrupted and is now repeated
            log.failed_saves = self.failed_saves
            own = [agents_of_run(stack_metrics, i, len(self.logs)) for stack_metrics in metrics]
            log.add(step._replace(experience=experience, metrics=own))
        rows = [row for log in self.logs if (row := log.flush()) is not None]
        mean = over_runs(rows) if rows else {}
        if self.writer and rows:
            self.writer.write(step.number, mean)
        return mean

    def after_row(self, step: Step, row: dict[str, float]) -> None:
        """Print a sample of the first run: the log of each run handles its own rows, and shows nothing."""
        if self.writer is not None and samples.are_on():
            self.writer.completions(step.number, TRAIN, completions_record(step.experience[0]))

    def evaluation(self, updates: int, result: Sequence[Evaluation], start: float) -> None:
        for log, run_result in zip(self.logs, result, strict=True):
            log.evaluation(updates, run_result, start)
        if self.writer and updates not in self.writer.evaluated:
            rows = [numbers(run_result) for run_result in result]
            plain = [{name: x for name, x in row.items() if not name.endswith("_ci95")} for row in rows]
            self.writer.write(max(updates - 1, 0), {"eval/updates": updates} | over_runs(plain))

    def sync(self) -> None:
        for log in (super(), *self.logs):
            log.sync()

    def was_evaluated(self, updates: int) -> bool:
        return super().was_evaluated(updates) and all(log.was_evaluated(updates) for log in self.logs)

    def stop_if_not_finite(self) -> None:
        for log in self.logs:
            log.stop_if_not_finite()


def over_runs(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over runs of each column that all runs have, and half the width of the 95 % interval of rewards. Numbers
    of tokens are summed."""
    means: dict[str, float] = {}
    for name in [name for name in rows[0] if all(name in row for row in rows)]:
        values = np.array([row[name] for row in rows])
        mean, interval = mean_and_interval(values)
        means[name] = float(values.sum() if name in SUMMED else mean)
        if name in WITH_INTERVAL or name.startswith("eval/pass@"):
            means[f"{name}_ci95"] = float(interval)
    return means
