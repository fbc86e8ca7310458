"""Blocks in a box of cells: the commands of builders, and episodes of teams that build.

A command is `/setblock x y z block` or `/fill x1 y1 z1 x2 y2 z2 block` (both corners included), at the start of a line or at a
slash; other text is passed over. The block `air` clears. A command is refused as a whole, and changes nothing, if it

    - cannot be read: a word too few or too many (so no modes such as hollow), a coordinate that is not an integer of up to
      four digits (no ~, no decimal point, not NaN),
    - leaves the box, or names a block that this builder does not have,
    - needs more blocks than this builder has left; what was put is used up, also where it is overwritten or cleared later.

Of each builder the first 20,000 characters and the first max_commands / N commands are read. Builders act in their order: what
a later one puts overwrites what an earlier one put.

With several turns the building stays as it is, and the next commands go on from there. What stands is worth `score`; the first
turn earns that of the building, a later one how much it changed, less the `faults` of the turn itself: the rewards of an
episode (gamma 1) add up to the worth of what stands at its end, less all faults. An episode is over when the building is right.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jmarl.envs.base import Step, TextEnvironment

Cell = tuple[int, int, int]
AIR = "air"
MAX_TEXT = 20_000
CORNERS = {"setblock": 1, "fill": 2}
COORDINATE = re.compile(r"[+-]?[0-9]{1,4}")


class Placed(NamedTuple):
    """A block that stands, and whose it is."""

    block: str
    agent: int


World = dict[Cell, Placed]  # cells of air are not in it


class Command(NamedTuple):
    low: Cell
    high: Cell
    block: str

    def cells(self) -> list[Cell]:
        return list(box(self.low, self.high))


class Work(NamedTuple):
    """What an agent's commands of one turn did."""

    put: set[Cell]  # cells in which it put a block
    accepted: int
    refused: int  # for whatever reason
    short: int  # of these: because it had too few blocks left


class Site(NamedTuple):
    """The state of an episode."""

    task: dict
    world: World
    stocks: tuple[dict[str, float], ...]  # [N] blocks left, by kind; infinite where there is no limit
    turn: int = 0
    worth: float = 0.0  # of what stands


def box(low: Cell, high: Cell) -> Iterable[Cell]:
    return itertools.product(range(low[0], high[0] + 1), range(low[1], high[1] + 1), range(low[2], high[2] + 1))


def boxes(cells: Iterable[Cell]) -> list[tuple[Cell, Cell]]:
    """Boxes of which each cell is in exactly one, few and from the ground up: each grows along x, then z, then y."""
    left, found = set(cells), []
    for cell in sorted(left, key=lambda c: (c[1], c[2], c[0])):
        if cell not in left:
            continue
        high = list(cell)
        for axis in (0, 2, 1):
            while True:
                face = [(high[i] + 1,) * 2 if i == axis else (cell[i], high[i]) for i in range(3)]
                if not all(c in left for c in itertools.product(*(range(a, b + 1) for a, b in face))):
                    break
                high[axis] += 1
        found.append((cell, (high[0], high[1], high[2])))
        left.difference_update(box(*found[-1]))
    return found


def read_commands(text: str, at_most: int, names: Sequence[str] = tuple(CORNERS)) -> list[Command | None]:
    """The first commands of a text; None stands for one that cannot be read. names: of commands that there are."""
    found: list[Command | None] = []
    for line in text[:MAX_TEXT].replace("`", "\n").replace("/", "\n/").splitlines():
        words = line.split(maxsplit=9)
        if words and words[0].removeprefix("/").lower() in CORNERS:
            if len(found) == at_most:
                break
            found.append(_command(words, names))
    return found


def _command(words: list[str], names: Sequence[str]) -> Command | None:
    name, numbers = words[0].removeprefix("/").lower(), words[1:-1]
    if name not in names or len(numbers) != 3 * CORNERS[name] or not all(map(COORDINATE.fullmatch, numbers)):
        return None
    at = [int(number) for number in numbers]
    low, high = (tuple(map(of, at[:3], at[-3:])) for of in (min, max))
    return Command(low, high, words[-1].lower().removeprefix("minecraft:"))  # type: ignore[arg-type]


def work(world: World, agent: int, stock: dict[str, float], commands: Sequence[Command | None], size: Cell) -> Work:
    """An agent's commands, carried out: changes the world and the agent's stock."""
    put, refused, short = set[Cell](), 0, 0
    for command in commands:
        if (
            command is None
            or not (command.block == AIR or command.block in stock)
            or not all(low >= 0 and high < limit for low, high, limit in zip(command.low, command.high, size, strict=True))
        ):
            refused += 1
            continue
        cells = command.cells()
        if command.block == AIR:
            for cell in cells:
                world.pop(cell, None)
        elif len(cells) > stock[command.block]:
            refused, short = refused + 1, short + 1
        else:
            stock[command.block] -= len(cells)
            world.update(dict.fromkeys(cells, Placed(command.block, agent)))
            put.update(cells)
    return Work(put, len(commands) - refused, refused, short)


class Building(TextEnvironment):
    """What the environments of builders share; see the module.

    num_turns: joint actions of an episode. max_commands: of one joint action; each builder has an equal share.
    """

    roles = ("builder 1", "builder 2")
    commands: tuple[str, ...] = tuple(CORNERS)  # names of those that there are
    worth_range: tuple[float, float]  # of what stands
    most_faults: float = 0.0  # that a turn may have

    def __init__(self, num_turns: int = 1, max_commands: int = 300):
        if num_turns < 1 or max_commands < 2:
            raise ValueError(f"num_turns={num_turns}, max_commands={max_commands}: at least one turn, and a command for each")
        self.max_turns, self.max_commands = num_turns, max_commands
        low, high = self.worth_range
        change = high - low if num_turns > 1 else 0.0
        self.reward_range = (min(low, -change) - self.most_faults, max(high, change))

    # What an environment of builders says

    def size(self, task: dict) -> Cell:
        """Of the box, which begins at 0 0 0."""
        raise NotImplementedError

    def stocks(self, task: dict) -> list[dict[str, float]]:
        """Of each agent, the blocks that it has [N]."""
        raise NotImplementedError

    def score(self, task: dict, world: World) -> tuple[dict[str, float], bool]:
        """What the worth of a building is the sum of, and whether the building is right."""
        raise NotImplementedError

    def faults(self, task: dict, works: Sequence[Work]) -> dict[str, float]:
        """What a turn loses by how it was built: numbers of at most 0."""
        return {}

    def ask(self, site: Site) -> list[str]:
        """What each agent reads first."""
        raise NotImplementedError

    def feedback(self, site: Site) -> str:
        """What stands, and what is wrong with it."""
        raise NotImplementedError

    def solution(self, task: dict) -> list[str]:
        """Messages that earn the most where nothing stands yet, if `max_commands` suffices."""
        raise NotImplementedError

    # The episode

    def reset(self, task, rng):
        site = Site(task, {}, tuple(self.stocks(task)))
        return site, self.ask(site)

    def step(self, state, messages, rng):
        task, world, size = state.task, dict(state.world), self.size(state.task)
        stocks, share = [dict(stock) for stock in state.stocks], self.max_commands // self.num_agents
        works = [
            work(world, agent, stocks[agent], read_commands(text, share, self.commands), size)
            for agent, text in enumerate(messages)
        ]
        parts, solved = self.score(task, world)
        faults, worth = self.faults(task, works), sum(parts.values())
        after = Site(task, world, tuple(stocks), state.turn + 1, worth)
        done = solved or after.turn >= self.max_turns
        said = [] if done else [f"{text}\n\n{self.feedback(after)}" for text in self.ask(after)]
        info = (
            parts
            | faults
            | {
                "worth": worth,
                "solved": float(solved),
                "accepted": float(sum(w.accepted for w in works)),
                "refused": float(sum(w.refused for w in works)),
            }
        )
        return Step(after, said, worth - state.worth + sum(faults.values()), done, info)

    def solve(self, state):
        return [None] * self.num_agents if state.world else self.solution(state.task)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"num_turns": self.max_turns, "max_commands": self.max_commands}


def share_of(part: float, whole: float) -> float:
    """Nothing of nothing is 0."""
    return part / whole if whole else 0.0


def initials(blocks: Iterable[str], taken: str = ".#?") -> dict[str, str]:
    """A character for each block: the first of its name that no other has, or else any letter."""
    found: dict[str, str] = {}
    for block in dict.fromkeys(blocks):
        found[block] = next(
            (c for c in block.upper() + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c.isalnum() and c not in [*found.values(), *taken]), "?"
        )
    return found


def commands_for(wanted: Mapping[Cell, str]) -> str:
    """Commands that put these blocks, few of them."""
    lines = []
    for block in dict.fromkeys(wanted.values()):
        for low, high in boxes(cell for cell, of in wanted.items() if of == block):
            corners = [low] if low == high else [low, high]
            numbers = " ".join(str(number) for corner in corners for number in corner)
            lines.append(f"/{'setblock' if low == high else 'fill'} {numbers} {block}")
    return "\n".join(lines)
