"""Blocks in a box of cells: the commands of builders, and what they change.

A command is `/setblock x y z block` or `/fill x1 y1 z1 x2 y2 z2 block` (both corners included), at the start of a line or after
a slash; other text is ignored. The block `air` clears cells. A command is refused as a whole, and changes nothing, if it

    - cannot be read: it has too few or too many words (so there are no modes such as hollow), or a coordinate that is not an
      integer of up to four digits (no ~, no decimal point, not NaN),
    - leaves the box, or names a block that this builder does not have,
    - needs more blocks than this builder has left. A block that was placed is used up, even if it is overwritten or cleared
      later.

Of each builder only the first 20,000 characters are read, so that no text takes long.
"""

import itertools
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Cell = tuple[int, int, int]
AIR = "air"
MAX_CHARACTERS = 20_000  # of a message
NUM_CORNERS = {"setblock": 1, "fill": 2}
_COORDINATE = re.compile(r"[+-]?[0-9]{1,4}")


class PlacedBlock(NamedTuple):
    """A block in a cell, and the agent that placed it."""

    block: str
    agent: int


World = dict[Cell, PlacedBlock]  # cells of air are not in it


class Command(NamedTuple):
    """A command that was read: fill the box between two corners (included) with a block."""

    low: Cell
    high: Cell
    block: str


class CommandReport(NamedTuple):
    """What the commands of an agent did in one turn."""

    filled: set[Cell]  # cells that it put a block into
    accepted: int
    refused: int  # for any reason
    out_of_stock: int  # of the refused ones: because too few blocks were left


# ---- boxes of cells


def box_cells(low: Cell, high: Cell) -> Iterable[Cell]:
    """Return the cells of a box; both corners are included."""
    xs, ys, zs = (range(a, b + 1) for a, b in zip(low, high, strict=True))
    return itertools.product(xs, ys, zs)


def cover_with_boxes(cells: Iterable[Cell]) -> list[tuple[Cell, Cell]]:
    """Return few boxes (low, high) that contain each cell exactly once, from the ground up.

    A box begins at the first cell that is not covered yet and grows along x, then z, then y.
    """
    uncovered: set[Cell] = set(cells)
    boxes: list[tuple[Cell, Cell]] = []
    for low in sorted(uncovered, key=lambda cell: (cell[1], cell[2], cell[0])):
        if low not in uncovered:
            continue
        high = _grow_box(low, uncovered)
        boxes.append((low, high))
        uncovered.difference_update(box_cells(low, high))
    return boxes


def _grow_box(low: Cell, cells: set[Cell]) -> Cell:
    """Return the high corner of the largest box from `low` on that consists of the given cells."""
    high = list(low)
    for axis in (0, 2, 1):
        while True:
            ranges = [range(a, b + 1) for a, b in zip(low, high, strict=True)]
            ranges[axis] = range(high[axis] + 1, high[axis] + 2)
            if not all(cell in cells for cell in itertools.product(*ranges)):
                break
            high[axis] += 1
    return (high[0], high[1], high[2])


# ---- commands


def read_commands(text: str, max_commands: int, names: Sequence[str] = tuple(NUM_CORNERS)) -> list[Command | None]:
    """Return the first commands of a text; None stands for a command that cannot be read.

    Args:
        text: what a builder wrote.
        max_commands: number of commands that are read; those that cannot be read count too.
        names: the commands that are allowed, of setblock and fill.
    """
    commands: list[Command | None] = []
    for line in text[:MAX_CHARACTERS].replace("`", "\n").replace("/", "\n/").splitlines():
        words = line.split(maxsplit=9)
        if words and words[0].removeprefix("/").lower() in NUM_CORNERS:
            if len(commands) == max_commands:
                break
            commands.append(_parse_command(words, names))
    return commands


def _parse_command(words: list[str], names: Sequence[str]) -> Command | None:
    name, coordinates, block = words[0].removeprefix("/").lower(), words[1:-1], words[-1]
    if name not in names or len(coordinates) != 3 * NUM_CORNERS[name] or not all(map(_COORDINATE.fullmatch, coordinates)):
        return None
    numbers = [int(coordinate) for coordinate in coordinates]
    low, high = (tuple(map(extreme, numbers[:3], numbers[-3:])) for extreme in (min, max))
    return Command(low, high, block.lower().removeprefix("minecraft:"))  # type: ignore[arg-type]


def apply_commands(
    world: World, agent: int, stock: dict[str, float], commands: Sequence[Command | None], size: Cell
) -> CommandReport:
    """Carry out the commands of an agent. Changes `world` and `stock`.

    Args:
        world: the blocks so far.
        agent: the agent that gives the commands.
        stock: its blocks that are left, by kind; infinite if there is no limit.
        commands: as from `read_commands`.
        size: of the box, whose lowest cell is (0, 0, 0).
    """
    filled: set[Cell] = set()
    refused = out_of_stock = 0
    for command in commands:
        if command is None or not _is_allowed(command, stock, size):
            refused += 1
            continue
        cells = list(box_cells(command.low, command.high))
        if command.block == AIR:
            for cell in cells:
                world.pop(cell, None)
        elif len(cells) > stock[command.block]:
            refused, out_of_stock = refused + 1, out_of_stock + 1
        else:
            stock[command.block] -= len(cells)
            world.update(dict.fromkeys(cells, PlacedBlock(command.block, agent)))
            filled.update(cells)
    return CommandReport(filled, len(commands) - refused, refused, out_of_stock)


def _is_allowed(command: Command, stock: Mapping[str, float], size: Cell) -> bool:
    inside = all(low >= 0 and high < limit for low, high, limit in zip(command.low, command.high, size, strict=True))
    return inside and (command.block == AIR or command.block in stock)


def commands_for(blocks: Mapping[Cell, str]) -> str:
    """Return few commands, one a line, that place these blocks."""
    lines = []
    for kind in dict.fromkeys(blocks.values()):
        for low, high in cover_with_boxes(cell for cell, block in blocks.items() if block == kind):
            corners = [low] if low == high else [low, high]
            numbers = " ".join(str(number) for corner in corners for number in corner)
            lines.append(f"/{'setblock' if low == high else 'fill'} {numbers} {kind}")
    return "\n".join(lines)


# ---- pictures


def block_letters(blocks: Iterable[str], reserved: str = ".#?") -> dict[str, str]:
    """Return a distinct character for each block: the first one of its name that is free, else any free letter, else "?"."""
    letters: dict[str, str] = {}
    for block in dict.fromkeys(blocks):
        free = (c for c in block.upper() + string.ascii_uppercase if c.isalnum() and c not in [*letters.values(), *reserved])
        letters[block] = next(free, "?")
    return letters
