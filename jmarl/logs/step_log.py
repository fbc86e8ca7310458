"""Write one row of metrics per step, and from time to time texts and histograms.

All logs count updates: the row of the first update has step 1, as on the terminal, and an evaluation has the number of updates
before it, the one before training 0. Checkpoints are named so, too.

The row of a step is written one step late: `step` queues it, and the next call or `flush` writes it. So the device works on
while the host logs. `time/step_s` is the time from the end of the step before to the end of this one. A step on rollouts ends
with its rewards, because sampling waits for the update before; so it contains that update and its own sampling, and the first
row contains compilation instead of an update. A step on given data ends with its own update (see `DataLog`).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jmarl.config import TrainConfig
from jmarl.evaluation.evaluate import Evaluation, counts_all, logged
from jmarl.logs.failed_update import NonFiniteWatch
from jmarl.logs.goodput import CLOCK
from jmarl.logs.metrics_writer import MetricsWriter
from jmarl.models.stack import to_host
from jmarl.processes import exchange
from jmarl.team import Team
from jmarl.types import TRACES

ADVANTAGES = "advantages"  # among the metrics of a stack: [A, rows, G], of the completions in its batch


class QueuedStep(NamedTuple):
    """A step whose row is not written yet."""

    number: int
    experience: Any  # what the update learned from
    metrics: Sequence[dict[str, Any]]  # of the update, on the device
    ended_at: float  # `time.monotonic()` when it ended
    traced: int  # programs traced so far
    seconds: Mapping[str, float] = {}  # of each phase since the step before, see `goodput`
    exchanged: dict[str, float] = {}  # columns of what several processes exchanged since the step before


class StepLog:
    """Rows of steps, each written one step late. Without a writer (no output directory) nothing is written.

    Subclasses define what is written for their kind of experience: `row`, `texts`, `fault`, `record` and `evaluation_row`.
    """

    def __init__(self, team: Team, cfg: TrainConfig, writer: MetricsWriter | None, unchanged: bool = False):
        self.team, self.cfg, self.writer = team, cfg, writer
        self.unchanged = unchanged  # whether a resumed run changes nothing, so that what it evaluated holds
        self.failed_saves = 0
        self.last_step: int | None = None  # number of the newest row that this process has written
        self.rewards: list[float] = []  # mean return of each update; of preference rounds, the mean reward of each round
        self.losses: list[float] = []  # of each update on given data, mean over agents
        self.watch = NonFiniteWatch(cfg)
        self.waiting: list[QueuedStep] = []  # steps whose rows are not written yet
        self._started = time.monotonic()

    def step(self, number: int, experience: Any, metrics: Sequence[dict[str, Any]], played_at: float) -> None:
        """Queue the row of a step, and write the row of the one before. played_at: `time.monotonic()` when it was played."""
        self.add(QueuedStep(number, experience, metrics, played_at, sum(TRACES.values()), CLOCK.take(), exchange.take()))

    def add(self, step: QueuedStep) -> None:
        """Queue a step, and write all rows but the newest."""
        self.waiting.append(step)
        self.flush(leave=1)

    def flush(self, leave: int = 0) -> dict[str, float] | None:
        """Write the rows of all queued steps but the newest `leave`. Returns the last row, or None if none was written.

        A step stays in the queue until its row is written, so an interruption loses no row.
        """
        row = None
        while len(self.waiting) > leave:
            step = self.waiting[0]
            with CLOCK.phase("update"):
                jax.block_until_ready(step.metrics)
            row = self.write(step)
            self.last_step = step.number
            self.waiting.pop(0)
            self.after_row(step, row)
        return row

    def write(self, step: QueuedStep) -> dict[str, float]:
        """Write and return the row of a step; waits for its update."""
        seconds = step.ended_at - self._started - step.experience.preparation_s
        row = self.row(step, seconds) | step.experience.notes
        row |= {f"time/{phase}": x for phase, x in step.seconds.items()}
        row |= {"time/step_s": seconds, "compiles": step.traced, "failed_saves": self.failed_saves} | step.exchanged
        if self.writer is not None:
            self.writer.write(step.number + 1, row)
        self._started = step.ended_at
        return row

    def after_row(self, step: QueuedStep, row: dict[str, float]) -> None:
        """Write the texts of a step, and count updates that are not finite."""
        if self.writer is not None and step.number % self.cfg.run.log_every == 0:
            self.texts(step)
        self.watch.count(step.number, step.experience, row, self.fault(step.experience))

    def stop_if_not_finite(self) -> None:
        """Raise `NonFiniteError` after too many updates in a row that were not finite, and write the last one to a file."""
        self.watch.stop(self.record)

    def evaluation(self, updates: int, result: Any, start: float) -> None:
        """Write an evaluation after a number of updates, unless the log of a resumed run has it.

        start: `time.monotonic()` before the evaluation, which does not count as training time.
        """
        if self.writer is not None and updates not in self.writer.evaluated:
            self.writer.write(updates, {"eval/updates": updates} | self.evaluation_row(result))
            self.evaluation_texts(updates, result)
        self._started += time.monotonic() - start

    def logged_evaluation(self, updates: int) -> Any:
        """Return the evaluation after this number of updates from the log of a resumed run; None if the log has none, or if it
        would be the result of a run in which what is evaluated may have changed."""
        holds = self.unchanged or updates < self.cfg.run.num_updates
        row = exchange.from_first(lambda: self.writer.evaluated.get(updates) if self.writer and holds else None)
        return None if row is None else self.evaluation_of(row)

    def sync(self) -> None:
        """Write all queued rows to the disk, so that no checkpoint is ahead of them after a power cut."""
        self.flush()
        if self.writer is not None:
            self.writer.sync()

    def row(self, step: QueuedStep, seconds: float) -> dict[str, float]:
        """Return the metrics of a step, which took `seconds`; waits for its update."""
        raise NotImplementedError

    def fault(self, experience: Any) -> str:
        """Return why an update had nothing to learn from; empty if it had."""
        return ""

    def record(self, experience: Any) -> tuple[Any, dict[str, Any]]:
        """Return an experience on the host, and a readable summary of it as JSON values."""
        raise NotImplementedError

    def texts(self, step: QueuedStep) -> None:
        """Write texts and histograms of a step."""

    def evaluation_row(self, result: Any) -> dict[str, float]:
        """Return the metrics of an evaluation."""
        raise NotImplementedError

    def evaluation_of(self, row: Mapping[str, Any]) -> Any:
        """Return the evaluation that `evaluation_row` has written to a row."""
        return logged(row)

    def scores(self, result: Any) -> list[dict[str, float]]:
        """Return the metrics of an evaluation for each run, to choose the best one by; none where not all episodes count."""
        complete = not isinstance(result, Evaluation) or counts_all(result)
        return [self.evaluation_row(result) if complete else {}]

    def evaluation_texts(self, updates: int, result: Any) -> None:
        """Write texts of an evaluation after a number of updates."""


def update_metrics(team: Team, metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the columns of an update: loss, gradient norm and so on of each agent, then those of a central critic.

    metrics: of each stack, [A] each (roles of shared weights get equal values), followed by those of a central critic. They are
        copied to the host, without the advantages of single completions, which are no columns.
    """
    row, metrics = {}, to_host([{name: x for name, x in own.items() if name != ADVANTAGES} for own in metrics])
    for spec, stack_metrics in zip(team.stacks, metrics, strict=False):
        for a, roles in enumerate(spec.members):
            if "frozen" in stack_metrics and stack_metrics["frozen"][a]:  # not updated in this step
                row |= {f"agent_{agent}/frozen": 1.0 for agent in roles}
            else:
                row |= {f"agent_{agent}/{name}": float(values[a]) for agent in roles for name, values in stack_metrics.items()}
    for critic_metrics in metrics[len(team.stacks) :]:
        row |= {f"critic/{name}": float(values[0]) for name, values in critic_metrics.items()}
    return row
