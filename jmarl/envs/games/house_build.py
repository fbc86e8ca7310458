"""HouseBuild (`house_build`): two builders build a house from its plan, each with only a part of the material.

Task: a house of blocks in layers, generated (`house_plans.py`: floor, walls with corners, door, windows, a flat, gable or hip
roof) or from a file. Roles: both builders read the plan as boxes, and the blocks that they have themselves. They write at the
same time, `/fill x1 y1 z1 x2 y2 z2 block` and `/setblock x y z block`, 300 commands together (150 each); if both place a block
in a cell, that of builder 2 remains. Limits: if the house has c blocks of a kind, each builder has ceil(c/2) + floor(c/4) of
it, about three quarters, so that neither can build the house alone. A command that needs more blocks than are left is refused
as a whole. See `blocks.py` for commands.

Joint reward of a turn, from -2 to 2 in the first turn:

    the worth of the building
    + 2    * match      cells with the right block, of the cells that hold a block in the plan or in the building (an IoU)
    - 0.5  * extra      blocks where the plan has air, of all blocks of the building (0 if there are none)
    - 0.25 * idle       builders without a right block in the building, 0 to 2
    and the penalties of the turn
    - 0.5  * overlap    cells that both put a block into, of the cells that either did (0 if none)
    - 0.25 * short      builders with a command that was refused because it needs more blocks than are left, 0 to 2

Nothing built: -0.5. The house shared without an overlap: 2. Both put blocks only into the same cells of air and ask for too
many: -2. Of several turns see `building.py`; stocks are for the whole episode, and used blocks remain used.

Data: `tasks` draws houses of 4 to 6 by 4 to 6 cells, 4 to 7 high, or from a JSON file (`data=`, rows with inventory and
target_spec, as the published ten have them; these have five different plans, and equal plans are one task). Parts of the
reward: the five in points. Measures: `worth`, `solved` (all cells are right, air too), `accepted` and `refused` commands. Left
out: the direction of stairs and doors and the enemies of the published variant, because commands cannot express them; and its
reward, the share of right cells of the whole box with air included, by which an empty answer earns up to 0.5.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jmarl.envs.data import split_rows
from jmarl.envs.games.blocks import Cell, CommandReport, World, block_letters, commands_for, cover_with_boxes
from jmarl.envs.games.building import Building, BuildingState, ratio
from jmarl.envs.games.house_plans import Plan, draw_house, house_task, load_houses, plan_key, read_plan
from jmarl.envs.games.random_tasks import draw_tasks

MATCH, EXTRA, IDLE, OVERLAP, SHORT = 2.0, -0.5, -0.25, -0.5, -0.25
MAX_LISTED = 12  # boxes of each kind that the feedback names


def stock_limits(plan: Plan) -> dict[str, float]:
    """Return how many blocks of each kind a builder has."""
    return {block: (count + 1) // 2 + count // 4 for block, count in Counter(plan.values()).items()}


class HouseBuild(Building):
    """The environment; see the module.

    Args:
        data: a JSON file of houses to draw tasks from.
        num_turns, max_commands: see `Building`.
    """

    worth_range = (EXTRA + 2 * IDLE, MATCH)
    max_penalty = -OVERLAP - 2 * SHORT

    def __init__(self, data: str | Path | None = None, *, num_turns: int = 1, max_commands: int = 300):
        super().__init__(num_turns, max_commands)
        self.houses = load_houses(data) if data is not None else None

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        rng = random.Random(f"house_build {split} {seed}")
        if self.houses is not None:
            houses = split_rows(self.houses, split, plan_key)
            return rng.sample(houses, min(count, len(houses)))

        def draw() -> tuple[str, dict]:
            task = house_task(*draw_house(rng))
            return plan_key(task), task

        return draw_tasks(draw, split, count, max_draws=20 * count + 100)

    def box_size(self, task: dict) -> Cell:
        return read_plan(task)[0]

    def initial_stocks(self, task: dict) -> list[dict[str, float]]:
        limits = stock_limits(read_plan(task)[1])
        return [dict(limits) for _ in self.roles]

    def score(self, task: dict, world: World) -> tuple[dict[str, float], bool]:
        plan = read_plan(task)[1]
        builders_of_right_cells = {cell: placed.agent for cell, placed in world.items() if plan.get(cell) == placed.block}
        num_extra = len(world.keys() - plan.keys())
        match = len(builders_of_right_cells) / (len(plan) + num_extra)
        parts = {
            "match": MATCH * match,
            "extra": EXTRA * ratio(num_extra, len(world)),
            "idle": IDLE * (self.num_agents - len(set(builders_of_right_cells.values()))),
        }
        return parts, match == 1

    def penalties(self, task: dict, reports: Sequence[CommandReport]) -> dict[str, float]:
        first, second = (report.filled for report in reports)
        return {
            "overlap": OVERLAP * ratio(len(first & second), len(first | second)),
            "short": SHORT * sum(report.out_of_stock > 0 for report in reports),
        }

    def prompts(self, state: BuildingState) -> list[str]:
        size, plan = read_plan(state.task)
        boxes = "\n".join(_box_lines(plan))
        far_corner, has = " ".join(str(n - 1) for n in size), "You have" if not state.turn else "You still have"
        prompts = []
        for agent, stock in enumerate(state.stocks):
            blocks = ", ".join(f"{count:g} {block}" for block, count in stock.items() if count) or "nothing"
            prompts.append(
                f"Two builders build a house in the box from 0 0 0 to {far_corner} (x y z, y is up). Plan, as boxes of blocks "
                f"from corner to corner, and single blocks; all else is air:\n{boxes}\n"
                f"You are builder {agent + 1}. {has} {blocks}. Builder {2 - agent} works at the same time and has about as "
                f"much: share the work, and do not both fill a cell.\n"
                f"Write up to {self.max_commands // 2} commands, one a line, such as:\n/fill 0 0 0 1 0 0 {plan[min(plan)]}\n"
                f"/setblock 0 0 0 {plan[min(plan)]}"
            )
        return prompts

    def feedback(self, state: BuildingState) -> str:
        plan = read_plan(state.task)[1]
        building = {cell: placed.block for cell, placed in state.world.items()}
        lines = _list_boxes("Still to be put", {c: block for c, block in plan.items() if building.get(c) != block})
        lines += _list_boxes("Too much, clear with air", {c: block for c, block in building.items() if c not in plan})
        return "\n".join([*lines, "Write more commands; what stands stays."])

    def render(self, state: BuildingState) -> str:
        """Return the building beside the plan, layer by layer, rows from z = 0; a lower-case letter is a wrong block."""
        (width, height, depth), plan = read_plan(state.task)
        letters = block_letters(plan.values())
        lines = [", ".join(f"{letter} {block}" for block, letter in letters.items())]
        for y in range(height):
            lines.append(f"y={y}")
            for z in range(depth):
                cells = [(x, y, z) for x in range(width)]
                built, planned = "", "".join(letters[plan[cell]] if cell in plan else "." for cell in cells)
                for cell in cells:
                    block = state.world[cell].block if cell in state.world else None
                    letter = "." if block is None else letters[block]
                    built += letter if block == plan.get(cell) else letter.lower()
                lines.append(f"{built}  {planned}")
        return "\n".join(lines)

    def solution(self, task: dict) -> list[str]:
        """Return commands by which each builder places half of every kind; an odd block goes to the builders in turns."""
        plan, halves = read_plan(task)[1], (Plan(), Plan())
        num_odd = 0
        for kind in dict.fromkeys(plan.values()):
            cells = sorted((cell for cell, block in plan.items() if block == kind), key=lambda c: (c[1], c[2], c[0]))
            middle = (len(cells) + num_odd) // 2
            num_odd = (num_odd + len(cells)) % 2
            halves[0].update(dict.fromkeys(cells[:middle], kind))
            halves[1].update(dict.fromkeys(cells[middle:], kind))
        return [commands_for(half) for half in halves]


def _box_lines(plan: Plan) -> list[str]:
    """Return a line "x1 y1 z1 x2 y2 z2 block" for each box of one kind, or "x y z block" for a single cell, ground first."""
    boxes = [
        (*box, kind)
        for kind in dict.fromkeys(plan.values())
        for box in cover_with_boxes(cell for cell, block in plan.items() if block == kind)
    ]
    boxes.sort(key=lambda box: (box[0][1], box[0][2], box[0][0]))
    return [f"{' '.join(map(str, low if low == high else (*low, *high)))} {kind}" for low, high, kind in boxes]


def _list_boxes(heading: str, plan: Plan) -> list[str]:
    """Return a heading and a line for each box; nothing if the plan is empty."""
    lines = _box_lines(plan)
    more = [f"and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return [f"{heading}:", *lines[:MAX_LISTED], *more] if lines else []
