"""Write the rows of runs on given data and on preference rounds.

The next examples are drawn, and their update is started, while the device still updates on those before. So a step ends when
its own update has ended, and its columns `time/...` have the seconds since the end of the update before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jmarl.evaluation.evaluate import Evaluation, logged, logged_numbers, numbers
from jmarl.logs.goodput import CLOCK
from jmarl.logs.step_log import QueuedStep, StepLog, update_metrics
from jmarl.logs.terminal import LOSS_TAG
from jmarl.models.stack import to_host
from jmarl.rollout.experience import DataExperience
from jmarl.team import to_agents
from jmarl.types import TRACES


class DataLog(StepLog):
    """The log of a run whose experience is `DataExperience`."""

    def step(self, number: int, experience: DataExperience, metrics: Sequence[dict[str, Any]], played_at: float) -> None:
        del played_at  # when the examples were drawn; `write` sets the end of the step
        self.add(QueuedStep(number, experience, metrics, math.nan, sum(TRACES.values())))

    def write(self, step: QueuedStep) -> dict[str, float]:
        return super().write(step._replace(ended_at=time.monotonic(), seconds=CLOCK.take()))

    def add(self, step: QueuedStep) -> None:
        if "reward/mean" in step.experience.notes:
            self.rewards.append(step.experience.notes["reward/mean"])
        super().add(step)

    def row(self, step: QueuedStep, seconds: float) -> dict[str, float]:
        row = update_metrics(self.team, step.metrics)
        names = [f"agent_{n}/loss" for n in range(self.team.num_agents)]
        self.losses.append(float(np.mean([row[name] for name in names if name in row])))  # frozen agents have no loss
        return row | {LOSS_TAG: self.losses[-1], "tokens_per_s": step.experience.tokens / seconds}

    def record(self, experience: DataExperience) -> tuple[Any, dict[str, Any]]:
        tokens = to_agents(self.team, [np.asarray(batch.tokens) for batch in experience.batches])
        texts = [
            [spec.tokenizer.batch_decode(rows.reshape(-1, rows.shape[-1]))]
            for spec, rows in zip(self.team.agent_specs, tokens, strict=True)
        ]
        return to_host(experience), {"texts": texts}

    def evaluation_row(self, result: dict[str, float] | Evaluation) -> dict[str, float]:
        if isinstance(result, Evaluation):  # preference rounds evaluate by playing
            return numbers(result)
        return {f"eval/{name}": value for name, value in result.items()}

    def evaluation_of(self, row: Mapping[str, Any]) -> dict[str, float] | Evaluation:
        if "eval/reward" in row:
            return logged(row)
        return logged_numbers(row)
