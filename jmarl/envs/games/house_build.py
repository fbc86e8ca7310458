"""HouseBuild: two builders put up a house from its plan, each with only a part of the material.

Task: a house of blocks in layers, made here (floor, walls with corners, door, windows, a flat, gable or hip roof), or from a
file. Roles: both builders read the plan as boxes and what they have themselves; they write at the same time, `/fill x1 y1 z1 x2
y2 z2 block` and `/setblock x y z block`, 300 commands together (150 each); where both put a block, that of builder 2 stands.
Limits: of a kind of which the house has c blocks, each builder has ceil(c/2) + floor(c/4), about three quarters, so that nobody
can build it alone. A command that needs more than is left is refused as a whole. See `blocks` for what a command may be.

Reward of a turn, the same for both (-2 to 2 in the first turn):

    what stands is worth
    + 2    · match      cells with the right block, of the cells that hold a block in the plan or in what stands (an IoU)
    - 0.5  · extra      blocks that stand where the plan has air, of all blocks that stand (0 if none does)
    - 0.25 · idle       builders of whom no right block stands, 0 to 2
    and the turn costs
    - 0.5  · overlap    cells in which both put a block, of the cells in which either did (0 if none did)
    - 0.25 · short      builders with a command that was refused because it needs more blocks than they have left, 0 to 2

Nothing written: -0.5. The house shared out without an overlap: 2. Both put blocks only into the same cells of air and ask for
too many: -2. With several turns see `blocks`; stocks are of the whole episode, and what is used up stays so.

Data: `tasks` makes houses of 4 to 6 by 4 to 6 cells, 4 to 7 high, or draws from a JSON file (`data=`, rows with inventory and
target_spec, as the published ten have them, which are five plans: equal ones are one task). Metrics: the five parts in points,
`worth`, `solved` (all cells right, air too), `accepted` and `refused` commands.
Left out: which way stairs and doors face; the published variant's enemies, and its reward, which is the share of right cells of
the whole box, air included: there an empty answer earns up to 0.5.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from jmarl.envs.data import check_split, split_of, split_rows
from jmarl.envs.games.blocks import AIR, Building, Cell, Site, World, box, boxes, commands_for, initials, share_of

MATCH, EXTRA, IDLE, OVERLAP, SHORT = 2.0, -0.5, -0.25, -0.5, -0.25
MAX_CELLS = 4096  # of a house's box
SHOWN = 12  # boxes that feedback names, of each kind
KINDS = {
    "floor": ("cobblestone", "oak_planks", "stone", "sandstone"),
    "walls": ("bricks", "white_concrete", "spruce_planks", "mud_bricks", "clay"),
    "corners": ("oak_log", "obsidian", "quartz_block", "iron_block"),
    "roof": ("dark_prismarine", "red_terracotta", "hay_block", "slate_tiles"),
    "door": ("oak_door", "iron_door"),
    "windows": ("glass",),
}
ROOFS = ("flat", "gable", "hip")

Plan = dict[Cell, str]  # cells of air are not in it


def draw(rng: random.Random) -> tuple[Cell, Plan]:
    """A house: the size of its box, and its blocks."""
    width, depth, walls = rng.randint(4, 6), rng.randint(4, 6), rng.randint(2, 3)
    kinds = {part: rng.choice(names) for part, names in KINDS.items()}
    right, back, plan = width - 1, depth - 1, Plan()
    for x in range(width):
        for z in range(depth):
            plan[x, 0, z] = kinds["floor"]
            for y in range(1, walls + 1):
                if x in (0, right) and z in (0, back):
                    plan[x, y, z] = kinds["corners"]
                elif x in (0, right) or z in (0, back):
                    plan[x, y, z] = kinds["walls"]
    door = rng.randint(1, right - 1)
    plan[door, 1, 0] = plan[door, 2, 0] = kinds["door"]
    for x, z in ((0, rng.randint(1, back - 1)), (right, rng.randint(1, back - 1)), (rng.randint(1, right - 1), back)):
        if rng.random() < 0.6:
            plan[x, 2, z] = kinds["windows"]
    top, roof = walls + 1, rng.choice(ROOFS)
    steps = {"flat": 1, "gable": (depth + 1) // 2, "hip": (min(width, depth) + 1) // 2}[roof]
    for i in range(steps):  # a gable's steps draw in at the front and the back only
        inset = i if roof == "hip" else 0
        plan |= {(x, top + i, z): kinds["roof"] for x in range(inset, width - inset) for z in range(i, depth - i)}
    return (width, top + steps, depth), plan


def as_task(size: Cell, plan: Plan) -> dict:
    """In the fields of the published houses."""
    letters = initials(plan.values(), "A.#?") | {AIR: "A"}
    layers = [
        {"y": y, "rows": ["".join(letters[plan.get((x, y, z), AIR)] for x in range(size[0])) for z in range(size[2])]}
        for y in range(size[1])
    ]
    inventory = {letter: block for block, letter in letters.items()}
    return {"inventory": inventory, "target_spec": {"type": "y_layers", "size": list(size), "layers": layers}}


def read_plan(task: dict) -> tuple[Cell, Plan]:
    """A task's size and blocks; refuses a malformed one with what is wrong."""
    inventory, spec, told = task.get("inventory"), task.get("target_spec"), f"task {task!r:.80}"
    if not isinstance(inventory, dict) or not all(isinstance(text, str) for pair in inventory.items() for text in pair):
        raise ValueError(f"{told} has no inventory: it needs a block for each letter")
    layers = spec.get("layers") if isinstance(spec, dict) else None
    if not isinstance(layers, list) or not all(isinstance(of, dict) and _is_rows(of.get("rows")) for of in layers):
        raise ValueError(f"{told} has no target_spec with a list of layers, each with y and rows of letters")
    rows = {layer.get("y"): layer["rows"] for layer in layers}
    if not rows or len(rows) != len(layers) or rows.keys() != set(range(len(rows))):
        raise ValueError(f"{told}: its layers are not y = 0, 1, 2, …")
    size = (len(rows[0][0]), len(rows), len(rows[0]))
    if any(len(layer) != size[2] or any(len(row) != size[0] for row in layer) for layer in rows.values()):
        raise ValueError(f"{told}: its layers are not all {size[2]} rows of {size[0]} cells")
    if size[0] * size[1] * size[2] > MAX_CELLS:
        raise ValueError(f"{told} has a box of {size}: {MAX_CELLS} cells are allowed")
    if unknown := {letter for layer in rows.values() for row in layer for letter in row} - inventory.keys():
        raise ValueError(f"{told} has letters that its inventory lacks: {', '.join(sorted(unknown))}")
    cells = box((0, 0, 0), (size[0] - 1, size[1] - 1, size[2] - 1))
    plan = {(x, y, z): inventory[rows[y][z][x]].removeprefix("minecraft:") for x, y, z in cells}
    plan = {cell: block for cell, block in plan.items() if block != AIR}
    if not plan or len(plan) == size[0] * size[1] * size[2]:
        raise ValueError(f"{told} is {'all' if not plan else 'without'} air: a house needs blocks and air")
    return size, plan


def _is_rows(rows: Any) -> bool:
    return isinstance(rows, list) and bool(rows) and all(isinstance(row, str) and row for row in rows)


def load_houses(path: str | Path) -> list[dict]:
    """The rows of a JSON file, each checked."""
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is no list of houses: give a JSON list of rows with inventory and target_spec")
    for row in rows:
        read_plan(row)
    return rows


def limits(plan: Plan) -> dict[str, float]:
    """How many blocks each builder has."""
    return {block: (count + 1) // 2 + count // 4 for block, count in Counter(plan.values()).items()}


class HouseBuild(Building):
    """The environment; see the module.

    data: a JSON file of houses to draw tasks from. num_turns and max_commands: see `Building`.
    """

    worth_range = (EXTRA + 2 * IDLE, MATCH)
    most_faults = -OVERLAP - 2 * SHORT

    def __init__(self, data: str | Path | None = None, *, num_turns: int = 1, max_commands: int = 300):
        super().__init__(num_turns, max_commands)
        self.houses = load_houses(data) if data is not None else None

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        check_split(split)
        rng = random.Random(f"house_build {split} {seed}")
        if self.houses is not None:
            known = split_rows(self.houses, split, _identity)
            return rng.sample(known, min(count, len(known)))
        found = dict[str, dict]()
        for _ in range(20 * count + 100):
            if len(found) == count:
                break
            task = as_task(*draw(rng))
            if split_of(_identity(task)) == split:
                found[_identity(task)] = task
        return list(found.values())

    def size(self, task):
        return read_plan(task)[0]

    def stocks(self, task):
        own = limits(read_plan(task)[1])
        return [dict(own) for _ in self.roles]

    def score(self, task, world: World):
        plan = read_plan(task)[1]
        right = {cell: placed.agent for cell, placed in world.items() if plan.get(cell) == placed.block}
        extra = len(world.keys() - plan.keys())
        match = len(right) / (len(plan) + extra)
        parts = {
            "match": MATCH * match,
            "extra": EXTRA * share_of(extra, len(world)),
            "idle": IDLE * (self.num_agents - len(set(right.values()))),
        }
        return parts, match == 1

    def faults(self, task, works):
        both, either = works[0].put & works[1].put, works[0].put | works[1].put
        return {
            "overlap": OVERLAP * share_of(len(both), len(either)),
            "short": SHORT * sum(work.short > 0 for work in works),
        }

    def ask(self, site: Site) -> list[str]:
        size, plan = read_plan(site.task)
        boxed = "\n".join(f"{_numbers(low, high)} {block}" for low, high, block in _boxes(plan))
        last, has = " ".join(str(n - 1) for n in size), "You have" if not site.turn else "You still have"
        out = []
        for agent, stock in enumerate(site.stocks):
            blocks = ", ".join(f"{count:g} {block}" for block, count in stock.items() if count) or "nothing"
            out.append(
                f"Two builders build a house in the box from 0 0 0 to {last} (x y z, y is up). Plan, as boxes of blocks from "
                f"corner to corner, and single blocks; all else is air:\n{boxed}\n"
                f"You are builder {agent + 1}. {has} {blocks}. Builder {2 - agent} works at the same time and has about as "
                f"much: share the work, and do not both fill a cell.\n"
                f"Write up to {self.max_commands // 2} commands, one a line, such as:\n/fill 0 0 0 1 0 0 {plan[min(plan)]}\n"
                f"/setblock 0 0 0 {plan[min(plan)]}"
            )
        return out

    def feedback(self, site: Site) -> str:
        plan = read_plan(site.task)[1]
        stands = {cell: placed.block for cell, placed in site.world.items()}
        lines = _listed("Still to be put", {c: block for c, block in plan.items() if stands.get(c) != block})
        lines += _listed("Too much, clear with air", {c: block for c, block in stands.items() if c not in plan})
        return "\n".join([*lines, "Write more commands; what stands stays."])

    def render(self, state: Any) -> str:
        """What stands beside the plan, layer by layer, rows from z = 0; a small letter in what stands is a wrong block."""
        (width, height, depth), plan = read_plan(state.task)
        letters = initials(plan.values())
        lines = [", ".join(f"{letter} {block}" for block, letter in letters.items())]
        for y in range(height):
            lines.append(f"y={y}")
            for z in range(depth):
                cells = [(x, y, z) for x in range(width)]
                now = [(state.world[c].block if c in state.world else None, plan.get(c)) for c in cells]
                row = "".join("." if block is None else _mark(letters[block], block == wanted) for block, wanted in now)
                lines.append(row + "  " + "".join("." if wanted is None else letters[wanted] for _, wanted in now))
        return "\n".join(lines)

    def solution(self, task):
        """Each builder half of every kind, odd ones by turns."""
        plan, halves = read_plan(task)[1], (Plan(), Plan())
        extra = 0
        for kind in dict.fromkeys(plan.values()):
            cells = sorted((cell for cell, block in plan.items() if block == kind), key=lambda c: (c[1], c[2], c[0]))
            middle = (len(cells) + extra) // 2
            extra = (extra + len(cells)) % 2
            halves[0].update(dict.fromkeys(cells[:middle], kind))
            halves[1].update(dict.fromkeys(cells[middle:], kind))
        return [commands_for(half) for half in halves]


def _identity(task: dict) -> str:
    return json.dumps([task["inventory"], task["target_spec"]["layers"]], sort_keys=True)


def _boxes(plan: Plan) -> list[tuple[Cell, Cell, str]]:
    kinds = dict.fromkeys(plan.values())
    found = [(*b, kind) for kind in kinds for b in boxes(c for c, of in plan.items() if of == kind)]
    return sorted(found, key=lambda b: (b[0][1], b[0][2], b[0][0]))


def _numbers(low: Cell, high: Cell) -> str:
    return " ".join(map(str, low if low == high else (*low, *high)))


def _mark(letter: str, right: bool) -> str:
    return letter if right else letter.lower()


def _listed(name: str, plan: Plan) -> list[str]:
    """A heading and a line a box, or none."""
    found = [f"{_numbers(low, high)} {block}" for low, high, block in _boxes(plan)]
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return [f"{name}:", *found[:SHOWN], *more] if found else []
