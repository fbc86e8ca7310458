"""A run: everything of it that does not change from step to step, and the task that it learns."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jmarl.config import TrainConfig
from jmarl.evaluation.evaluate import EvalMetrics
from jmarl.learning.setup import Setup
from jmarl.rollout.experience import Source
from jmarl.team import Team
from jmarl.types import TeamState


class Task(NamedTuple):
    """What a run learns from: an environment and items to play, or given data."""

    env: Any  # a reward function, the result of `make_reward`, or an environment; None: items are pairs or trajectories
    items: Any
    held_out: Any = ()
    eval_metrics: EvalMetrics | None = None  # further metrics of an evaluation
    overlap: str = ""  # a line that counts the held-out items that are also trained on; empty if there are none


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is checked, with settings that are resolved. A reward model that is trained on the way is a run of its own."""

    setup: Setup  # team, critics, algorithm and settings, none of which is auto
    task: Task  # checked: an `Environment`, and lists of the items that it plays
    identity: dict[str, Any]  # what must not change when it resumes: team, critics, environment, data, reward; JSON values
    make_source: Callable[[TeamState], Source]  # initial state -> source of experience, which copies what it needs of it

    @property
    def team(self) -> Team:
        """Who learns."""
        return self.setup.team

    @property
    def cfg(self) -> TrainConfig:
        """The settings."""
        return self.setup.cfg

    @property
    def plays(self) -> bool:
        """Whether the team learns from rollouts; otherwise from pairs or texts."""
        return self.setup.algorithm.row.data == "rollouts"
