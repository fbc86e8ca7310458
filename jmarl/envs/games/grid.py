"""Grid planning (`grid`): a team guides one walker to its goal. Each agent writes some of the moves.

Task: a square grid with walls, a walker, and a goal that the moves of one turn can reach. Roles: all agents see the whole grid,
and each writes `moves` words of up, down, left, right and stay. The walker makes the first word of agent 0, the first word of
agent 1, and so on, then the second words. A move into a wall or the border is lost; a missing word means stay. The walker stops
at the goal, so that an agent that plans as if it were alone loses little. With `stop=False` it does not stop and must be at the
goal when the turn ends: two plans for the whole way lead past the goal, so the agents have to share the way.

Joint reward of a turn, from -0.5 to 1: by how much the turn raises

    phi = 1 at the goal, else 0.5 * max(0, 1 - d / d0)

for the walker's place at the end of the turn, where d is the length of the shortest way to the goal and d0 that of the task. So
the rewards of an episode sum to its last phi, in [0, 1]. An episode ends when a turn ends at the goal, or after `max_turns`.

Measures: `solved`, `closeness` (phi), `bumps` (moves into a wall or the border). Data: generated; the size, the walls and the
places make a task. `solve` writes moves that reach the goal. Left out, to keep the game small: diagonal moves, several walkers,
agents that see only a part.
"""

import random
import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.games.random_tasks import draw_tasks
from jmarl.envs.vector import Step, TextEnvironment

Place = tuple[int, int]  # (column from the left, row from the top), both from 1
MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0), "stay": (0, 0)}
_MOVE_WORD = re.compile(r"\b(" + "|".join(MOVES) + r")\b")
MAX_CHARACTERS = 2000  # of a message that are read


class WalkState(NamedTuple):
    """The state of an episode: the grid, and the places of the walker so far."""

    size: int
    walls: frozenset[Place]
    goal: Place
    path: tuple[Place, ...]
    turn: int = 0

    def __deepcopy__(self, memo: dict) -> "WalkState":
        return self  # it is immutable, and a copy would take as long as a step


def move(place: Place, word: str, size: int, walls: frozenset[Place]) -> Place:
    """Return the place after a move; the same place if a wall or the border is in the way."""
    x, y = place[0] + MOVES[word][0], place[1] + MOVES[word][1]
    return (x, y) if 1 <= x <= size and 1 <= y <= size and (x, y) not in walls else place


@lru_cache(maxsize=4096)  # a turn needs it twice, and every joint action of a task needs it
def distances(goal: Place, size: int, walls: frozenset[Place]) -> dict[Place, int]:
    """Return the number of moves to the goal from each place that can reach it."""
    moves_to_goal, queue = {goal: 0}, deque([goal])
    while queue:
        place = queue.popleft()
        for neighbor in (move(place, word, size, walls) for word in MOVES):
            if neighbor not in moves_to_goal:
                moves_to_goal[neighbor] = moves_to_goal[place] + 1
                queue.append(neighbor)
    return moves_to_goal


class GridPlanning(TextEnvironment):
    """The environment; see the module.

    Args:
        num_agents: number of agents that guide the walker.
        moves: words of each agent in a turn.
        size: width of the grids that `tasks` draws.
        walls: number of their walls.
        max_turns: turns of an episode.
        stop: whether the walker stops at the goal; otherwise it makes all moves.
        brief: prompts of a few words, such as "walker 1 2 goal 3 4 wall 2 2", for models that are trained from scratch.
    """

    reward_range = (-0.5, 1.0)

    def __init__(
        self,
        num_agents: int = 2,
        *,
        moves: int = 3,
        size: int = 4,
        walls: int = 2,
        max_turns: int = 1,
        stop: bool = True,
        brief: bool = False,
    ):
        if num_agents < 1 or moves < 1 or max_turns < 1:
            raise ValueError(f"num_agents={num_agents}, moves={moves}, max_turns={max_turns}: all must be at least 1")
        if not 2 <= size <= 9 or not 0 <= walls <= size * size // 3:
            raise ValueError(
                f"size={size}, walls={walls}: size must be 2 to 9, and walls at most a third of the size * size cells"
            )
        self.roles = tuple(f"guide {n + 1}" for n in range(num_agents))
        self.moves, self.size, self.walls, self.max_turns = moves, size, walls, max_turns
        self.stop, self.brief = stop, brief

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        rng = random.Random(f"{seed} {split}")
        places = [(x, y) for x in range(1, self.size + 1) for y in range(1, self.size + 1)]

        def draw() -> tuple[str, dict] | None:
            walker, goal, *walls = rng.sample(places, 2 + self.walls)
            distance = distances(goal, self.size, frozenset(walls)).get(walker)
            if distance is None or distance > self.moves * self.num_agents:
                return None
            task = {"size": self.size, "walls": sorted(map(list, walls)), "walker": list(walker), "goal": list(goal)}
            return repr(sorted(task.items())), task

        return draw_tasks(draw, split, count, max_draws=20 * count + 200)

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[WalkState, list[str]]:
        missing = [name for name in ("size", "walls", "walker", "goal") if name not in task]
        if missing:
            raise ValueError(f"task {task!r:.80} has no {', '.join(missing)}: it needs size, walls, walker and goal")
        walls, goal, walker = frozenset((x, y) for x, y in task["walls"]), tuple(task["goal"]), tuple(task["walker"])
        if walker == goal or walker not in distances(goal, task["size"], walls):
            raise ValueError(f"task {task!r:.120}: the walker is at its goal or cannot reach it")
        state = WalkState(task["size"], walls, goal, (walker,))
        return state, self.observations(state)

    def step(self, state: WalkState, messages: Sequence[str], rng: np.random.Generator) -> Step:
        words = [_MOVE_WORD.findall(text[:MAX_CHARACTERS].lower()) for text in messages]
        words = [(agent_words + ["stay"] * self.moves)[: self.moves] for agent_words in words]
        path, bumps = list(state.path), 0
        for word in (word for round_words in zip(*words, strict=True) for word in round_words):
            if path[-1] != state.goal or not self.stop:
                path.append(move(path[-1], word, state.size, state.walls))
                bumps += path[-1] == path[-2] and word != "stay"
        after = state._replace(path=tuple(path), turn=state.turn + 1)
        solved = path[-1] == state.goal
        info = {"solved": float(solved), "closeness": self.closeness(after), "bumps": float(bumps)}
        done = solved or after.turn >= self.max_turns
        return Step(after, self.observations(after), info["closeness"] - self.closeness(state), done, info)

    def closeness(self, state: WalkState) -> float:
        """Return phi."""
        if state.path[-1] == state.goal:
            return 1.0
        moves_to_goal = distances(state.goal, state.size, state.walls)
        return 0.5 * max(0.0, 1 - moves_to_goal[state.path[-1]] / moves_to_goal[state.path[0]])

    def observations(self, state: WalkState) -> list[str]:
        """Return what each agent reads."""
        walls = sorted(state.walls)
        if self.brief:
            places = [("walker", state.path[-1]), ("goal", state.goal), *(("wall", wall) for wall in walls)]
            return [" ".join(f"{name} {x} {y}" for name, (x, y) in places)] * self.num_agents
        (x, y), (goal_x, goal_y) = state.path[-1], state.goal
        wall_places = ", ".join(f"column {x} row {y}" for x, y in walls) or "nowhere"
        end = "and at the goal it stops" if self.stop else "and it stands at the goal only if it is there after the last move"
        text = (
            f"A walker is on a grid of {state.size} columns (1 is left) and {state.size} rows (1 is at the top). It is at "
            f"column {x} row {y}, its goal at column {goal_x} row {goal_y}, walls at {wall_places}. A move against a wall or "
            f"the border is lost, {end}."
        )
        return [f"{text} {self._instruction(agent)}" for agent in range(self.num_agents)]

    def _instruction(self, agent: int) -> str:
        """Return which moves an agent chooses, and the form of its answer."""
        form = f"Answer with {self.moves} words, each up, down, left, right or stay."
        if self.num_agents == 1:
            return f"Lead it to its goal. {form}"
        own_moves = [str(k) for k in range(agent + 1, self.moves * self.num_agents + 1, self.num_agents)]
        return (
            f"You and your team lead it to its goal together: you choose moves {', '.join(own_moves)}, your team the others. "
            f"{form}"
        )

    def describe(self) -> dict[str, Any]:
        options = {"moves": self.moves, "size": self.size, "walls": self.walls, "stop": self.stop, "brief": self.brief}
        return super().describe() | options

    def render(self, state: WalkState) -> str:
        marks = dict.fromkeys(state.walls, "#") | dict.fromkeys(state.path, "·") | {state.goal: "G", state.path[-1]: "W"}
        rows = range(1, state.size + 1)
        return "\n".join(" ".join(marks.get((x, y), ".") for x in rows) for y in rows)

    def solve(self, state: WalkState) -> list[str]:
        """Return messages that lead the walker along a shortest way."""
        moves_to_goal = distances(state.goal, state.size, state.walls)
        words, place = [], state.path[-1]
        while len(words) < self.moves * self.num_agents:
            best = min(MOVES, key=lambda word: moves_to_goal[move(place, word, state.size, state.walls)])
            words.append(best if place != state.goal else "stay")
            place = move(place, words[-1], state.size, state.walls)
        return [" ".join(words[n :: self.num_agents]) for n in range(self.num_agents)]
