"""Plans of houses for HouseBuild: draw them, convert them to tasks, and read and check tasks.

A task has the fields of the published houses: `inventory` (a block for each letter) and `target_spec`, with layers from the
ground up, of rows from z = 0, of letters from x = 0.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from jmarl.config.paths import expand_home
from jmarl.envs.games.blocks import AIR, Cell, block_letters, box_cells

MAX_CELLS = 4096  # of the box of a house
KINDS = {
    "floor": ("cobblestone", "oak_planks", "stone", "sandstone"),
    "walls": ("bricks", "white_concrete", "spruce_planks", "mud_bricks", "clay"),
    "corners": ("oak_log", "obsidian", "quartz_block", "iron_block"),
    "roof": ("dark_prismarine", "red_terracotta", "hay_block", "slate_tiles"),
    "door": ("oak_door", "iron_door"),
    "windows": ("glass",),
}
ROOFS = ("flat", "gable", "hip")

Plan = dict[Cell, str]  # the block of each cell; cells of air are not in it


def draw_house(rng: random.Random) -> tuple[Cell, Plan]:
    """Draw a house: the size of its box, and its plan."""
    width, depth, wall_height = rng.randint(4, 6), rng.randint(4, 6), rng.randint(2, 3)
    kinds = {part: rng.choice(blocks) for part, blocks in KINDS.items()}
    right, back = width - 1, depth - 1
    plan = _floor_and_walls(width, depth, wall_height, kinds)
    door = rng.randint(1, right - 1)
    plan[door, 1, 0] = plan[door, 2, 0] = kinds["door"]
    for x, z in ((0, rng.randint(1, back - 1)), (right, rng.randint(1, back - 1)), (rng.randint(1, right - 1), back)):
        if rng.random() < 0.6:
            plan[x, 2, z] = kinds["windows"]
    top, roof = wall_height + 1, rng.choice(ROOFS)
    num_steps = {"flat": 1, "gable": (depth + 1) // 2, "hip": (min(width, depth) + 1) // 2}[roof]
    for i in range(num_steps):  # the steps of a gable recede only at the front and the back
        inset = i if roof == "hip" else 0
        plan |= {(x, top + i, z): kinds["roof"] for x in range(inset, width - inset) for z in range(i, depth - i)}
    return (width, top + num_steps, depth), plan


def _floor_and_walls(width: int, depth: int, wall_height: int, kinds: dict[str, str]) -> Plan:
    plan = Plan()
    for x in range(width):
        for z in range(depth):
            plan[x, 0, z] = kinds["floor"]
            at_side, at_front_or_back = x in (0, width - 1), z in (0, depth - 1)
            for y in range(1, wall_height + 1):
                if at_side and at_front_or_back:
                    plan[x, y, z] = kinds["corners"]
                elif at_side or at_front_or_back:
                    plan[x, y, z] = kinds["walls"]
    return plan


def house_task(size: Cell, plan: Plan) -> dict:
    """Return the task of a house."""
    letters = block_letters(plan.values(), "A.#?") | {AIR: "A"}
    layers = [
        {"y": y, "rows": ["".join(letters[plan.get((x, y, z), AIR)] for x in range(size[0])) for z in range(size[2])]}
        for y in range(size[1])
    ]
    inventory = {letter: block for block, letter in letters.items()}
    return {"inventory": inventory, "target_spec": {"type": "y_layers", "size": list(size), "layers": layers}}


def plan_key(task: dict) -> str:
    """Return a text that identifies the plan of a task."""
    return json.dumps([task["inventory"], task["target_spec"]["layers"]], sort_keys=True)


def read_plan(task: dict) -> tuple[Cell, Plan]:
    """Return the size and the plan of a task. A malformed task raises ValueError, which says what is wrong."""
    inventory, spec, name = task.get("inventory"), task.get("target_spec"), f"task {task!r:.80}"
    if not isinstance(inventory, dict) or not all(isinstance(text, str) for pair in inventory.items() for text in pair):
        raise ValueError(f"{name} has no inventory: it needs a block for each letter")
    layers = spec.get("layers") if isinstance(spec, dict) else None
    if not isinstance(layers, list) or not all(isinstance(layer, dict) and _are_rows(layer.get("rows")) for layer in layers):
        raise ValueError(f"{name} has no target_spec with a list of layers, each with y and rows of letters")
    rows = {layer.get("y"): layer["rows"] for layer in layers}
    if not rows or len(rows) != len(layers) or rows.keys() != set(range(len(rows))):
        raise ValueError(f"{name}: its layers are not y = 0, 1, 2, …")
    size = (len(rows[0][0]), len(rows), len(rows[0]))
    num_cells = size[0] * size[1] * size[2]
    if any(len(layer) != size[2] or any(len(row) != size[0] for row in layer) for layer in rows.values()):
        raise ValueError(f"{name}: its layers are not all {size[2]} rows of {size[0]} cells")
    if num_cells > MAX_CELLS:
        raise ValueError(f"{name} has a box of {size}: {MAX_CELLS} cells are allowed")
    if unknown := {letter for layer in rows.values() for row in layer for letter in row} - inventory.keys():
        raise ValueError(f"{name} has letters that its inventory lacks: {', '.join(sorted(unknown))}")
    cells = box_cells((0, 0, 0), (size[0] - 1, size[1] - 1, size[2] - 1))
    plan = {(x, y, z): inventory[rows[y][z][x]].removeprefix("minecraft:") for x, y, z in cells}
    plan = {cell: block for cell, block in plan.items() if block != AIR}
    if not plan or len(plan) == num_cells:
        raise ValueError(f"{name} is {'all' if not plan else 'without'} air: a house needs blocks and air")
    return size, plan


def _are_rows(rows: Any) -> bool:
    return isinstance(rows, list) and bool(rows) and all(isinstance(row, str) and row for row in rows)


def load_houses(path: str | Path) -> list[dict]:
    """Return the rows of a JSON file, after checking them."""
    rows = json.loads(Path(expand_home(path)).read_text(encoding="utf-8"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} has no list of houses: give a JSON list of rows with inventory and target_spec")
    for row in rows:
        read_plan(row)
    return rows
