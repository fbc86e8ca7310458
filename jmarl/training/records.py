"""What one step learns from, before it becomes arrays of each stack, and what `train`, `train_seeds` and `fit` return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jmarl.evaluation.evaluate import Evaluation
from jmarl.models.hub.agents import Agent
from jmarl.rollout.turns import Rollout
from jmarl.team import Team, agents_of, policies, save_team
from jmarl.types import Data, TeamState


class Played(NamedTuple):
    """Episodes that the team played."""

    rollout: Rollout
    tasks: Sequence[dict]  # the items of the step
    notes: Mapping[str, float] = {}  # more numbers for the row of the step
    preparation_s: float = 0.0  # seconds before the step that do not count as its time: a reward model was trained


class Drawn(NamedTuple):
    """Pairs or texts that were drawn from data."""

    batches: tuple[Data, ...]  # one per stack, on the host; without random keys and margins of other agents
    tokens: int  # that are learned from
    notes: Mapping[str, float] = {}  # more numbers for the row of the step
    preparation_s: float = 0.0  # seconds before the step that do not count as its time: pairs were sampled


class TrainResult(NamedTuple):
    """The result of a run. `save` writes its agents, `agents` returns them as `load_agent` would."""

    team: Team
    state: TeamState  # without gradients
    rewards: list[float]  # mean return of each update that this process made; with one turn the mean reward
    before: Evaluation | None  # on the held-out items before training; None when resumed or without such items
    after: Evaluation | None  # on the held-out items after training
    interrupted: bool = False  # by Ctrl+C or SIGTERM before the last update; what was learned is in the state
    unsaved: str = ""  # why the last checkpoint or the models could not be written; empty: they were, or none were to be

    @property
    def agents(self) -> list[Agent]:
        """The trained agents, on the host; adapters are merged."""
        return agents_of(self.team, policies(self.state))

    def save(self, directory: str | Path) -> None:
        """Write the trained agents as Hugging Face directories `agent_0/`, `agent_1/`, ..."""
        save_team(directory, self.team, policies(self.state))

    def __repr__(self) -> str:  # without the weights and texts
        last = f"the last of {len(self.rewards)} with reward {self.rewards[-1]:.3f}" if self.rewards else "none of them now"
        before, after = (f"{result.mean:.3f}" if result else None for result in (self.before, self.after))
        stopped = ", interrupted" * self.interrupted
        return f"TrainResult({int(self.state.step)} updates, {last}, held out {before} -> {after}{stopped})"


class FitResult(NamedTuple):
    """The result of a run on data."""

    team: Team
    state: TeamState  # without gradients
    losses: list[float]  # mean over agents, for each update that this process made
    before: dict[str, float] | None  # on the held-out data before training; None when resumed or without such data
    after: dict[str, float] | None  # on the held-out data after training
    interrupted: bool = False  # by Ctrl+C or SIGTERM before the last update
    unsaved: str = ""  # why the last checkpoint or the models could not be written; empty: they were, or none were to be

    def save(self, directory: str | Path) -> None:
        """Write the trained agents as Hugging Face directories `agent_0/`, `agent_1/`, ..."""
        save_team(directory, self.team, policies(self.state))

    def __repr__(self) -> str:  # without the weights
        last = f"the last of {len(self.losses)} with loss {self.losses[-1]:.4g}" if self.losses else "none of them now"
        stopped = ", interrupted" * self.interrupted
        return f"FitResult({int(self.state.step)} updates, {last}, held out {self.before} -> {self.after}{stopped})"
