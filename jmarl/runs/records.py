"""The results of `train`, `train_seeds` and `fit`."""

from pathlib import Path
from typing import NamedTuple

from jmarl.evaluation.evaluate import Evaluation
from jmarl.models.agent import Agent
from jmarl.team import Team, agents_of, policies, save_team
from jmarl.types import TeamState


class TrainResult(NamedTuple):
    """The result of a run. `save` writes its agents, `agents` returns them as `load_agent` would.

    result.save("out")  # out/agent_0, out/agent_1, ...
    jmarl.evaluate(result.team, jmarl.policies(result.state), items, reward, cfg)
    """

    team: Team
    state: TeamState  # without gradients
    rewards: list[float]  # mean return (with one turn: mean reward) of each update that this process made
    before: Evaluation | None  # on held-out items before training; None after a resume or without held-out items
    after: Evaluation | None  # on held-out items after training
    interrupted: bool = False  # stopped by Ctrl+C or SIGTERM before the last update
    unsaved: str = ""  # why the last checkpoint or the models could not be written; empty if they were written or not wanted

    @property
    def agents(self) -> list[Agent]:
        """The trained agents, on the host, with adapters merged."""
        return agents_of(self.team, policies(self.state))

    def save(self, directory: str | Path) -> None:
        """Write the trained agents as Hugging Face directories `agent_0/`, `agent_1/`, ..."""
        save_team(directory, self.team, policies(self.state))

    def __repr__(self) -> str:  # without weights and texts
        last = f"the last of {len(self.rewards)} with reward {self.rewards[-1]:.3f}" if self.rewards else "none of them now"
        ends = [result.mean_text if result else "" for result in (self.before, self.after)]
        stopped = ", interrupted" * self.interrupted
        return f"TrainResult({int(self.state.step)} updates, {last}{held_out_text(*ends)}{stopped})"


class FitResult(NamedTuple):
    """The result of a run on given data. `save` writes its agents."""

    team: Team
    state: TeamState  # without gradients
    losses: list[float]  # of each update that this process made, mean over agents
    before: dict[str, float] | None  # metrics on held-out data before training; None after a resume or without such data
    after: dict[str, float] | None  # metrics on held-out data after training
    interrupted: bool = False  # as in `TrainResult`
    unsaved: str = ""  # as in `TrainResult`

    def save(self, directory: str | Path) -> None:
        """Write the trained agents as Hugging Face directories `agent_0/`, `agent_1/`, ..."""
        save_team(directory, self.team, policies(self.state))

    def __repr__(self) -> str:  # without weights
        last = f"the last of {len(self.losses)} with loss {self.losses[-1]:.4g}" if self.losses else "none of them now"
        stopped = ", interrupted" * self.interrupted
        ends = [str(result) if result else "" for result in (self.before, self.after)]
        return f"FitResult({int(self.state.step)} updates, {last}{held_out_text(*ends)}{stopped})"


def held_out_text(before: str, after: str) -> str:
    """Return the held-out results of a run as the end of a sentence; an empty text is one that there is not."""
    if before and after:
        return f", held out {before} -> {after}"
    return f", held out {before} before" * bool(before) + f", held out {after} after" * bool(after)
