"""The base of the building games: two builders place blocks by commands (`blocks.py`) at the same time, in one or more turns.

Builders act in their order: what a later one places overwrites what an earlier one placed. Of each builder the first
max_commands / N commands are read.

With several turns the building remains, and the next commands continue from it. A building has a worth (the sum of `score`).
The first turn earns the worth of the building, a later turn the change of its worth, plus the turn's own `penalties`; so do the
parts of the reward. So the rewards of an episode (gamma 1) sum to the worth of the final building plus all penalties. An
episode ends when the building is right.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.games.blocks import NUM_CORNERS, Cell, CommandReport, World, apply_commands, read_commands
from jmarl.envs.vector import Step, TextEnvironment


class BuildingState(NamedTuple):
    """The state of an episode."""

    task: dict
    world: World
    stocks: tuple[dict[str, float], ...]  # [N] blocks left, by kind; infinite if there is no limit
    turn: int = 0
    worth: float = 0.0  # of the building
    parts: dict[str, float] = {}  # whose sum is the worth


class Building(TextEnvironment):
    """What StrBuild and HouseBuild share; see the module.

    Subclasses set `allowed_commands`, `worth_range` and `max_penalty`, and override the methods up to `solution`.

    Args:
        num_turns: number of joint actions of an episode.
        max_commands: commands of a joint action; each builder has an equal share.
    """

    roles = ("builder 1", "builder 2")
    allowed_commands: tuple[str, ...] = tuple(NUM_CORNERS)
    worth_range: tuple[float, float]  # of a building
    max_penalty: float = 0.0  # of a turn

    def __init__(self, num_turns: int = 1, max_commands: int = 300):
        if num_turns < 1 or max_commands < len(self.roles):
            raise ValueError(
                f"num_turns={num_turns}, max_commands={max_commands}: give at least one turn, and a command for each of the "
                f"{len(self.roles)} builders"
            )
        self.max_turns, self.max_commands = num_turns, max_commands
        low, high = self.worth_range
        largest_change = high - low if num_turns > 1 else 0.0
        self.reward_range = (min(low, -largest_change) - self.max_penalty, max(high, largest_change))

    # ---- what a subclass defines

    def box_size(self, task: dict) -> Cell:
        """Return the size of the box, whose lowest cell is (0, 0, 0)."""
        raise NotImplementedError

    def initial_stocks(self, task: dict) -> list[dict[str, float]]:
        """Return the blocks of each agent [N], by kind. A malformed task raises ValueError."""
        raise NotImplementedError

    def score(self, task: dict, world: World) -> tuple[dict[str, float], bool]:
        """Return the parts whose sum is the worth of a building, and whether the building is right."""
        raise NotImplementedError

    def penalties(self, task: dict, reports: Sequence[CommandReport]) -> dict[str, float]:
        """Return what a turn loses by how it was built, as numbers of at most 0."""
        return {}

    def prompts(self, state: BuildingState) -> list[str]:
        """Return what each agent reads in the first turn [N]."""
        raise NotImplementedError

    def feedback(self, state: BuildingState) -> str:
        """Return the text that later turns add to the prompts: the building, and what is wrong with it."""
        raise NotImplementedError

    def solution(self, task: dict) -> list[str]:
        """Return messages that earn the maximum in the first turn, if `max_commands` suffices."""
        raise NotImplementedError

    # ---- the episode

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[BuildingState, list[str]]:
        state = BuildingState(task, {}, tuple(self.initial_stocks(task)))
        return state, self.prompts(state)

    def step(self, state: BuildingState, messages: Sequence[str], rng: np.random.Generator) -> Step:
        task, world, size = state.task, dict(state.world), self.box_size(state.task)
        stocks = tuple(dict(stock) for stock in state.stocks)
        reports = []
        for agent, text in enumerate(messages):
            commands = read_commands(text, self.max_commands // self.num_agents, self.allowed_commands)
            reports.append(apply_commands(world, agent, stocks[agent], commands, size))
        parts, solved = self.score(task, world)
        penalties, worth = self.penalties(task, reports), sum(parts.values())
        after = BuildingState(task, world, stocks, state.turn + 1, worth, parts)
        done = solved or after.turn >= self.max_turns
        observations = [] if done else [f"{prompt}\n\n{self.feedback(after)}" for prompt in self.prompts(after)]
        measures = {
            "worth": worth,
            "solved": float(solved),
            "accepted": float(sum(report.accepted for report in reports)),
            "refused": float(sum(report.refused for report in reports)),
        }
        reward = worth - state.worth + sum(penalties.values())
        changes = {name: value - state.parts.get(name, 0.0) for name, value in parts.items()}
        return Step(after, observations, reward, done, measures, parts=changes | penalties)

    def solve(self, state: BuildingState) -> list[str | None]:
        """Return the solution of a task; None if something is built already."""
        return [None] * self.num_agents if state.world else list(self.solution(state.task))

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"num_turns": self.max_turns, "max_commands": self.max_commands}


def ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 if the whole is 0."""
    return part / whole if whole else 0.0
