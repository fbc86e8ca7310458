"""StrBuild: two builders write a word on a wall, block by block.

Task: a string of the letters A to Z. Each letter is 5 cells wide and high, with 2 empty columns between letters; the wall is as
wide as the string, 5 high and one cell deep (x from the left, y from the ground, z = 0). Roles: both builders read the cells to
fill and the blocks of both; each has a palette of two kinds of its own and as many as it likes. They write at the same time,
`/setblock x y z block`, 300 commands together (150 each); where both put a block, that of builder 2 stands. See `blocks` for
what a command may be; a block of the other's palette is refused.

What the wall is worth, from -3 to 2, the same for both:

    + 2    · coverage     cells of the letters that hold a block, of all cells of the letters
    - 1.5  · extra        other cells of the wall that hold a block, of all other cells
    - 1    · adjacent     of the pairs of blocks that share a side, those of one kind (0 if there is no pair)
    - 0.25 · palette      builders of whom not all kinds of the palette stand on the wall, 0 to 2

So an empty wall is worth 0 - 0 - 0 - 0.5 = -0.5. The letter I all of one kind, stone of builder 1, is worth 2 - 0 - 1 - 0.5 =
0.5: its builder did not use its other kind, and the other builder used nothing. 2 needs both: a builder alone reaches 1.75.
-3 is a wall with all cells filled but those of the letters, in one kind.

Data: any string can be a task; `tasks` draws from all strings of 1 to 4 letters (475,254), or from a file (`data=`) with a
column `string`, as the published ten have it. The letters' shapes are this project's own. Metrics: the four parts in points,
`worth`, `solved` (worth 2), `accepted` and `refused` commands.
Left out: a server that shows the wall; kinds that look alike (published: stone and stone bricks count as one texture).
"""

from __future__ import annotations

import csv
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jmarl.envs.data import check_split, split_of, split_rows
from jmarl.envs.games.blocks import Building, Cell, Placed, Site, World, initials, share_of

COVERAGE, EXTRA, ADJACENT, PALETTE = 2.0, -1.5, -1.0, -0.25
PALETTES = (("oak_planks", "stone"), ("white_concrete", "obsidian"))
SIZE, SPACING, MAX_LETTERS = 5, 2, 4
SHOWN = 12  # cells that feedback names, of each kind
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
    """The wall from the top, # where a block has to be."""
    glyphs = [FONT[letter].split() for letter in text]
    return [("." * SPACING).join(glyph[row] for glyph in glyphs) for row in range(SIZE)]


def target(text: str) -> set[Cell]:
    rows = picture(text)
    return {(x, SIZE - 1 - row, 0) for row, line in enumerate(rows) for x, mark in enumerate(line) if mark == "#"}


def load_strings(path: str | Path) -> list[str]:
    """The column `string` of a CSV file."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or "string" not in rows[0]:
        raise ValueError(f"{path} has no row with a column string: give a CSV file with a header")
    return [checked(row["string"].strip(), f"row {i} of {path}") for i, row in enumerate(rows)]


def checked(text: Any, where: str) -> str:
    if not isinstance(text, str) or not text or not set(text) <= set(FONT):
        raise ValueError(f"{where}: string={text!r:.40}: it needs a string of the letters A to Z")
    return text


class StrBuild(Building):
    """The environment; see the module.

    data: a CSV file of strings to draw tasks from. max_letters: of strings that are drawn. num_turns and max_commands: see
    `Building`.
    """

    commands = ("setblock",)
    worth_range = (EXTRA + ADJACENT + 2 * PALETTE, COVERAGE)

    def __init__(
        self, data: str | Path | None = None, *, max_letters: int = MAX_LETTERS, num_turns: int = 1, max_commands: int = 300
    ):
        super().__init__(num_turns, max_commands)
        if not 1 <= max_letters <= 10:
            raise ValueError(f"max_letters={max_letters}: give 1 to 10")
        self.max_letters, self.strings = max_letters, load_strings(data) if data is not None else None

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        check_split(split)
        rng = random.Random(f"str_build {split} {seed}")
        if self.strings is not None:
            known = split_rows(self.strings, split)
            return [{"string": text} for text in rng.sample(known, min(count, len(known)))]
        found = dict[str, None]()
        for _ in range(100 * count + 1000):
            if len(found) == count:
                break
            text = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(1, self.max_letters)))
            if split_of(f"str_build {text}") == split:
                found[text] = None
        return [{"string": text} for text in found]

    def size(self, task):
        return len(task["string"]) * (SIZE + SPACING) - SPACING, SIZE, 1

    def stocks(self, task):
        checked(task.get("string"), f"task {task!r:.80}")
        return [dict.fromkeys(palette, float("inf")) for palette in PALETTES]

    def score(self, task, world: World):
        wanted, (width, height, _) = target(task["string"]), self.size(task)
        kinds = {placed.block for placed in world.values()}
        pairs = [
            (placed.block, world[beside].block)
            for (x, y, z), placed in world.items()
            for beside in ((x + 1, y, z), (x, y + 1, z))
            if beside in world
        ]
        covered = len(wanted & world.keys())
        parts = {
            "coverage": COVERAGE * covered / len(wanted),
            "extra": EXTRA * (len(world) - covered) / (width * height - len(wanted)),
            "adjacent": ADJACENT * share_of(sum(one == other for one, other in pairs), len(pairs)),
            "palette": PALETTE * sum(not kinds >= set(palette) for palette in PALETTES),
        }
        return parts, sum(parts.values()) > COVERAGE - 1e-9

    def ask(self, site: Site) -> list[str]:
        wanted, rows = target(site.task["string"]), []
        for y in range(SIZE - 1, -1, -1):
            rows.append(f"y={y}: x = {' '.join(str(x) for x, of, _ in sorted(wanted) if of == y)}")
        cells, out = "\n".join(rows), []
        for agent, own in enumerate(PALETTES):
            stands = "your block replaces its" if agent == 1 else "its block replaces yours"
            out.append(
                f"Two builders write {site.task['string']} on a wall with blocks. Fill these cells (z is 0) and no others:\n"
                f"{cells}\n"
                f"Blocks that share a side must be of different kinds.\n"
                f"You are builder {agent + 1} and have {' and '.join(own)}: use both. Builder {2 - agent} has "
                f"{' and '.join(PALETTES[1 - agent])}; where both build, {stands}.\n"
                f"Write up to {self.max_commands // 2} commands, one a line, such as:\n/setblock {min(wanted)[0]} "
                f"{min(wanted)[1]} 0 {own[0]}"
            )
        return out

    def feedback(self, site: Site) -> str:
        wanted, world = target(site.task["string"]), site.world
        same = [
            (x, y, z)
            for (x, y, z), placed in world.items()
            if any(world.get(beside, Placed("", 0)).block == placed.block for beside in ((x + 1, y, z), (x, y + 1, z)))
        ]
        lines = [f"What stands now ({_key()}, # is still empty):", self.render(site)]
        lines += _listed("Empty, to be filled", wanted - world.keys()) + _listed(
            "Too much, clear with air", world.keys() - wanted
        )
        lines += _listed("Same kind as the block to the right or above", same)
        return "\n".join([*lines, "Write more commands; what stands stays."])

    def render(self, state: Any) -> str:
        """The wall: initials of blocks, # what is missing."""
        world, width = state.world, self.size(state.task)[0]
        marks, wanted = initials(kind for palette in PALETTES for kind in palette), target(state.task["string"])
        lines = []
        for y in range(SIZE - 1, -1, -1):
            cells = [(x, y, 0) for x in range(width)]
            lines.append("".join(marks[world[c].block] if c in world else "#" if c in wanted else "." for c in cells))
        return "\n".join(lines)

    def solution(self, task):
        """Builders by turns in both directions, and each its kinds by turns."""
        lines: tuple[list[str], list[str]] = [], []
        for x, y, z in sorted(target(task["string"])):
            agent = (x + y) % 2
            lines[agent].append(f"/setblock {x} {y} {z} {PALETTES[agent][len(lines[agent]) % 2]}")
        return ["\n".join(of) for of in lines]


def _key() -> str:
    return ", ".join(f"{mark} {kind}" for kind, mark in initials(kind for palette in PALETTES for kind in palette).items())


def _listed(name: str, cells: Sequence[Cell] | set[Cell]) -> list[str]:
    """One line, or none."""
    shown = ", ".join(f"{x} {y}" for x, y, _ in sorted(cells)[:SHOWN])
    return [f"{name} (x y): {shown}{' and more' if len(cells) > SHOWN else ''}"] if cells else []
