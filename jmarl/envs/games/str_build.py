"""StrBuild (`str_build`): two builders write a word on a wall, block by block.

Task: a string of the letters A to Z. A letter is 5 cells wide and high, with 2 empty columns between letters; the wall is as
wide as the string, 5 high and one cell deep (x from the left, y from the ground, z = 0). Roles: both builders read the cells to
fill and the blocks of both; each has its own palette of two kinds of block, without a limit. They write at the same time,
`/setblock x y z block`, 300 commands together (150 each); if both place a block in a cell, that of builder 2 remains. See
`blocks.py` for commands; a block of the other's palette is refused.

Worth of a wall, from -3 to 2, which is the joint reward (of several turns see `building.py`):

    + 2    * coverage     cells of the letters that hold a block, of all cells of the letters
    - 1.5  * extra        other cells of the wall that hold a block, of all other cells
    - 1    * adjacent     pairs of blocks of one kind, of all pairs of blocks that share a side (0 if there is no pair)
    - 0.25 * palette      builders whose two kinds are not both on the wall, 0 to 2

So an empty wall is worth 0 - 0 - 0 - 0.5 = -0.5. The letter I all of stone, a kind of builder 1, is worth
2 - 0 - 1 - 0.5 = 0.5: builder 1 did not use its other kind, and builder 2 used none. The maximum needs both builders: one alone
reaches 1.75. The minimum is a wall with all cells filled except those of the letters, in one kind.

Data: any string can be a task. `tasks` draws from all strings of 1 to 4 letters (475,254), or from a CSV file (`data=`) with a
column `string`, as the published ten have it. The shapes of the letters are this project's own. Parts of the reward: the four
in points. Measures: `worth`, `solved` (worth 2), `accepted` and `refused` commands. Left out: a server that shows the wall,
because the reward does not need the game; kinds that look alike, because a name is enough to tell blocks apart (the published
reward counts stone and stone bricks as one texture).
"""

from __future__ import annotations

import csv
import random
import string
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jmarl.config.paths import expand_home
from jmarl.envs.data import split_rows
from jmarl.envs.games.blocks import Cell, World, block_letters
from jmarl.envs.games.building import Building, BuildingState, ratio
from jmarl.envs.games.random_tasks import draw_tasks

COVERAGE, EXTRA, ADJACENT, PALETTE = 2.0, -1.5, -1.0, -0.25
PALETTES = (("oak_planks", "stone"), ("white_concrete", "obsidian"))
LETTER_SIZE, SPACING, MAX_LETTERS = 5, 2, 4
MAX_LISTED = 12  # cells of each kind that the feedback names
FONT = {
    "A": "..#.. .#.#. ##### #...# #...#",
    "B": "####. #..#. ##### #...# #####",
    "C": "##### #.... #.... #.... #####",
    "D": "####. #..## #...# #..## ####.",
    "E": "##### #.... ####. #.... #####",
    "F": "##### #.... ###.. #.... #....",
    "G": "##### #.... #.### #...# #####",
    "H": "#...# #...# ##### #...# #...#",
    "I": ".###. ..#.. ..#.. ..#.. .###.",
    "J": "..### ...#. ...#. #..#. ####.",
    "K": "#..## #.##. ###.. #.##. #..##",
    "L": "#.... #.... #.... #.... #####",
    "M": "##.## ##.## #.#.# #...# #...#",
    "N": "##..# ###.# #.#.# #.### #..##",
    "O": "##### #...# #...# #...# #####",
    "P": "##### #...# ##### #.... #....",
    "Q": "####. #..#. #..#. ####. ...##",
    "R": "####. #..#. ####. #.##. #..##",
    "S": "##### #.... ##### ....# #####",
    "T": "##### ..#.. ..#.. ..#.. ..#..",
    "U": "#...# #...# #...# #...# #####",
    "V": "#...# #...# ##.## .###. ..#..",
    "W": "#...# #...# #.#.# ##.## ##.##",
    "X": "##.## .###. ..#.. .###. ##.##",
    "Y": "#...# ##.## .###. ..#.. ..#..",
    "Z": "##### ..##. .##.. ##... #####",
}


def picture(text: str) -> list[str]:
    """Return the rows of the wall from the top, with # for a cell that needs a block."""
    glyphs = [FONT[letter].split() for letter in text]
    return [("." * SPACING).join(glyph[row] for glyph in glyphs) for row in range(LETTER_SIZE)]


def target_cells(text: str) -> set[Cell]:
    """Return the cells of the letters."""
    rows = picture(text)
    return {(x, LETTER_SIZE - 1 - row, 0) for row, line in enumerate(rows) for x, mark in enumerate(line) if mark == "#"}


def load_strings(path: str | Path) -> list[str]:
    """Return the column `string` of a CSV file."""
    with open(expand_home(path), newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or "string" not in rows[0]:
        raise ValueError(f"{path} has no row with a column string: give a CSV file with a header")
    return [check_string(row["string"].strip(), f"row {i} of {path}") for i, row in enumerate(rows)]


def check_string(text: Any, source: str) -> str:
    """Return a string of letters; anything else raises ValueError, which names its source."""
    if not isinstance(text, str) or not text or not set(text) <= set(FONT):
        raise ValueError(f"{source}: string={text!r:.40}: it needs a string of the letters A to Z")
    return text


class StrBuild(Building):
    """The environment; see the module.

    Args:
        data: a CSV file of strings to draw tasks from.
        max_letters: largest length of the strings that are drawn otherwise.
        num_turns, max_commands: see `Building`.
    """

    allowed_commands = ("setblock",)
    worth_range = (EXTRA + ADJACENT + 2 * PALETTE, COVERAGE)

    def __init__(
        self, data: str | Path | None = None, *, max_letters: int = MAX_LETTERS, num_turns: int = 1, max_commands: int = 300
    ):
        super().__init__(num_turns, max_commands)
        if not 1 <= max_letters <= 10:
            raise ValueError(f"max_letters={max_letters}: give 1 to 10")
        self.max_letters, self.strings = max_letters, load_strings(data) if data is not None else None

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        rng = random.Random(f"str_build {split} {seed}")
        if self.strings is not None:
            strings = split_rows(self.strings, split)
            return [{"string": text} for text in rng.sample(strings, min(count, len(strings)))]

        def draw() -> tuple[str, dict]:
            text = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(1, self.max_letters)))
            return f"str_build {text}", {"string": text}

        return draw_tasks(draw, split, count, max_draws=100 * count + 1000)

    def box_size(self, task: dict) -> Cell:
        return len(task["string"]) * (LETTER_SIZE + SPACING) - SPACING, LETTER_SIZE, 1

    def initial_stocks(self, task: dict) -> list[dict[str, float]]:
        check_string(task.get("string"), f"task {task!r:.80}")
        return [dict.fromkeys(palette, float("inf")) for palette in PALETTES]

    def score(self, task: dict, world: World) -> tuple[dict[str, float], bool]:
        target, (width, height, _) = target_cells(task["string"]), self.box_size(task)
        kinds = {placed.block for placed in world.values()}
        same_kind = [
            placed.block == world[neighbor].block
            for (x, y, z), placed in world.items()
            for neighbor in ((x + 1, y, z), (x, y + 1, z))
            if neighbor in world
        ]
        num_covered = len(target & world.keys())
        parts = {
            "coverage": COVERAGE * num_covered / len(target),
            "extra": EXTRA * (len(world) - num_covered) / (width * height - len(target)),
            "adjacent": ADJACENT * ratio(sum(same_kind), len(same_kind)),
            "palette": PALETTE * sum(not kinds >= set(palette) for palette in PALETTES),
        }
        return parts, sum(parts.values()) > COVERAGE - 1e-9

    def prompts(self, state: BuildingState) -> list[str]:
        target = target_cells(state.task["string"])
        rows = []
        for y in range(LETTER_SIZE - 1, -1, -1):
            rows.append(f"y={y}: x = {' '.join(str(x) for x, cell_y, _ in sorted(target) if cell_y == y)}")
        cells, prompts = "\n".join(rows), []
        for agent, palette in enumerate(PALETTES):
            overlap_rule = "your block replaces its" if agent == 1 else "its block replaces yours"
            prompts.append(
                f"Two builders write {state.task['string']} on a wall with blocks. Fill these cells (z is 0) and no others:\n"
                f"{cells}\n"
                f"Blocks that share a side must be of different kinds.\n"
                f"You are builder {agent + 1} and have {' and '.join(palette)}: use both. Builder {2 - agent} has "
                f"{' and '.join(PALETTES[1 - agent])}; where both build, {overlap_rule}.\n"
                f"Write up to {self.max_commands // 2} commands, one a line, such as:\n/setblock {min(target)[0]} "
                f"{min(target)[1]} 0 {palette[0]}"
            )
        return prompts

    def feedback(self, state: BuildingState) -> str:
        target, world = target_cells(state.task["string"]), state.world

        def same_as_neighbor(cell: Cell) -> bool:
            x, y, z = cell
            neighbors = (world.get((x + 1, y, z)), world.get((x, y + 1, z)))
            return any(placed is not None and placed.block == world[cell].block for placed in neighbors)

        legend = ", ".join(f"{letter} {kind}" for kind, letter in _palette_letters().items())
        lines = [f"What stands now ({legend}, # is still empty):", self.render(state)]
        lines += _list_cells("Empty, to be filled", target - world.keys())
        lines += _list_cells("Too much, clear with air", world.keys() - target)
        lines += _list_cells("Same kind as the block to the right or above", list(filter(same_as_neighbor, world)))
        return "\n".join([*lines, "Write more commands; what stands stays."])

    def render(self, state: BuildingState) -> str:
        """Return the wall: the initials of blocks, # for a cell that still needs one."""
        world, width = state.world, self.box_size(state.task)[0]
        letters, target = _palette_letters(), target_cells(state.task["string"])
        lines = []
        for y in range(LETTER_SIZE - 1, -1, -1):
            cells = [(x, y, 0) for x in range(width)]
            lines.append("".join(letters[world[c].block] if c in world else "#" if c in target else "." for c in cells))
        return "\n".join(lines)

    def solution(self, task: dict) -> list[str]:
        """Return commands by which the builders alternate in both directions, and each alternates its two kinds."""
        lines: tuple[list[str], list[str]] = [], []
        for x, y, z in sorted(target_cells(task["string"])):
            agent = (x + y) % 2
            lines[agent].append(f"/setblock {x} {y} {z} {PALETTES[agent][len(lines[agent]) % 2]}")
        return ["\n".join(agent_lines) for agent_lines in lines]


def _palette_letters() -> dict[str, str]:
    return block_letters(kind for palette in PALETTES for kind in palette)


def _list_cells(heading: str, cells: Collection[Cell]) -> list[str]:
    """Return a line that names the cells; no line if there are none."""
    listed = ", ".join(f"{x} {y}" for x, y, _ in sorted(cells)[:MAX_LISTED])
    return [f"{heading} (x y): {listed}{' and more' if len(cells) > MAX_LISTED else ''}"] if cells else []
