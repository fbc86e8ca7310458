"""Commands of builders: how they are read, and the boxes that they fill."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmarl.envs.games.blocks import Cell, Command, box_cells, commands_for, cover_with_boxes, read_commands


def place(cells: Iterable[Cell], block: str) -> str:
    """Return the commands that place a block into cells."""
    return "\n".join(f"/setblock {x} {y} {z} {block}" for x, y, z in cells)


@pytest.mark.parametrize(("text", "expected"), [
    ("/setblock 1 2 0 stone", [((1, 2, 0), (1, 2, 0), "stone")]),
    ("setblock 1 2 0 minecraft:Stone", [((1, 2, 0), (1, 2, 0), "stone")]),
    ("/fill 3 2 1 0 4 1 glass", [((0, 2, 1), (3, 4, 1), "glass")]),
    ("- /setblock 1 1 0 a\n2. /setblock 2 1 0 b", [((1, 1, 0),) * 2 + ("a",), ((2, 1, 0),) * 2 + ("b",)]),
    ("```\n/setblock 1 1 0 a\n```", [((1, 1, 0),) * 2 + ("a",)]),
    ("Use `/setblock 1 1 0 a` first", [((1, 1, 0),) * 2 + ("a",)]),
    ("/setblock 1 1 0 a /setblock 2 1 0 b", [((1, 1, 0),) * 2 + ("a",), ((2, 1, 0),) * 2 + ("b",)]),
    ("/setblock -1 +2 0 a", [((-1, 2, 0),) * 2 + ("a",)]),
    ("I will build the letter now.\n\n", []),
    ("/kill @e\n/give me stone", []),
    ("/setblock 1 2 stone", [None]),
    ("/setblock 1 2 0", [None]),
    ("/setblock 1.0 2 0 stone", [None]),
    ("/setblock ~1 2 0 stone", [None]),
    ("/setblock nan inf 1e9 stone", [None]),
    ("/setblock 99999 0 0 stone", [None]),
    ("/setblock ² 0 0 stone", [None]),
    ("/setblock ١ 0 0 stone", [None]),
    ("/fill 0 0 0 1 1 1 stone hollow", [None]),
    ("/setblock 0 0 0 stone and so on", [None]),
])  # fmt: skip
def test_commands_are_read(text, expected):
    assert read_commands(text, 10) == [None if command is None else Command(*command) for command in expected]


def test_only_the_first_commands_are_read():
    text = place([(x, 0, 0) for x in range(9)], "stone")
    assert [command.low[0] for command in read_commands(text, 4)] == [0, 1, 2, 3]
    assert len(read_commands("/setblock\n" * 9, 4)) == 4, "those that cannot be read count too"


@given(st.sets(st.tuples(*[st.integers(0, 4)] * 3), max_size=60))
def test_boxes_cover_each_cell_once(cells):
    covered = [cell for low, high in cover_with_boxes(cells) for cell in box_cells(low, high)]
    assert len(covered) == len(cells) and set(covered) == cells


def test_a_full_box_is_one_box():
    assert cover_with_boxes(itertools.product(range(3), range(4), range(5))) == [((0, 0, 0), (2, 3, 4))]
    assert commands_for({(0, 0, 0): "a", (1, 0, 0): "a", (5, 5, 5): "b"}) == "/fill 0 0 0 1 0 0 a\n/setblock 5 5 5 b"
