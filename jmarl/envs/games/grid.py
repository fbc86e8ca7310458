"""Grid planning: a team guides one walker to its goal. Each agent writes some moves; they are made by turns.

Task: a square grid with walls, a walker and a goal within reach of the moves of one turn. Roles: all agents see all of it, and
each writes `moves` words of up, down, left, right and stay. The walker makes the first word of agent 0, the first of
agent 1, and so on, then the second words. A move against a wall or the border is lost, and so is a missing word. The walker
stops at the goal, so that agents can each guide it as if alone at little cost. With `stop=False` it walks on and has to stand
there when the turn is over: two plans for the whole way lead past the goal, and agents have to share it.

Reward, joint, of a turn: what the turn adds to

    phi = 1 at the goal, else 0.5 * max(0, 1 - d / d0)

where the walker stands at the end of the turn, with d the shortest way to the goal that is left and d0 that of the task. So
an episode's rewards add up to its last phi, in [0, 1]; the reward of one turn is in (-0.5, 1]. The episode is over when a turn
ends at the goal, or after `max_turns` turns.

Data: made here; a size, number of walls and places make a task. `solve` writes moves that reach the goal. Left out: diagonal
moves, several walkers, agents that see only a part.
"""

from __future__ import annotations

import random
import re
from collections import deque
from functools import lru_cache
from typing import NamedTuple

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.data import check_split, split_of

Place = tuple[int, int]  # column from the left, row from the top, both from 1
MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0), "stay": (0, 0)}
WORDS = re.compile(r"\b(" + "|".join(MOVES) + r")\b")
MOST_READ = 2000  # characters of a message


class Walk(NamedTuple):
    """The state: a task, and the way so far."""

    size: int
    walls: frozenset[Place]
    goal: Place
    way: tuple[Place, ...]
    turn: int = 0

    def __deepcopy__(self, memo) -> Walk:
        return self  # nothing in it can be changed, and a copy takes as long as a step


def moved(place: Place, word: str, size: int, walls: frozenset[Place]) -> Place:
    x, y = place[0] + MOVES[word][0], place[1] + MOVES[word][1]
    return (x, y) if 1 <= x <= size and 1 <= y <= size and (x, y) not in walls else place


@lru_cache(maxsize=4096)  # a turn asks twice, and every joint action of a task again
def distances(goal: Place, size: int, walls: frozenset[Place]) -> dict[Place, int]:
    """Moves to the goal from each place that can reach it."""
    found, open_ = {goal: 0}, deque([goal])
    while open_:
        place = open_.popleft()
        for near in (moved(place, word, size, walls) for word in MOVES):
            if near not in found:
                found[near] = found[place] + 1
                open_.append(near)
    return found


class GridPlanning(TextEnvironment):
    """The environment; see the module.

    num_agents: that guide the walker. moves: words of each agent a turn. size, walls: of the grids that `tasks` makes.
    stop: the walker stops at the goal; False: all words are made. brief: prompts of a few words, such as
    "walker 1 2 goal 3 4 wall 2 2", for models that are trained from nothing.
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
            raise ValueError(f"size={size}, walls={walls}: a grid is 2 to 9 wide, and at most a third of it is walls")
        self.roles = tuple(f"guide {n + 1}" for n in range(num_agents))
        self.moves, self.size, self.walls, self.max_turns = moves, size, walls, max_turns
        self.stop, self.brief = stop, brief

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        check_split(split)
        rng, found = random.Random(f"{seed} {split}"), dict[str, dict]()
        places = [(x, y) for x in range(1, self.size + 1) for y in range(1, self.size + 1)]
        for _ in range(20 * count + 200):
            if len(found) == count:
                break
            walker, goal, *walls = rng.sample(places, 2 + self.walls)
            task = {"size": self.size, "walls": sorted(map(list, walls)), "walker": list(walker), "goal": list(goal)}
            far = distances(goal, self.size, frozenset(walls)).get(walker)
            if far is not None and far <= self.moves * self.num_agents and split_of(repr(sorted(task.items()))) == split:
                found[repr(task)] = task
        return list(found.values())

    def reset(self, task, rng):
        missing = [name for name in ("size", "walls", "walker", "goal") if name not in task]
        if missing:
            raise ValueError(f"task {task!r:.80} has no {', '.join(missing)}: it needs size, walls, walker and goal")
        walls, goal, walker = frozenset((x, y) for x, y in task["walls"]), tuple(task["goal"]), tuple(task["walker"])
        if walker == goal or walker not in distances(goal, task["size"], walls):
            raise ValueError(f"the walker of task {task!r:.120} is at its goal or cannot reach it")
        state = Walk(task["size"], walls, goal, (walker,))
        return state, self.observations(state)

    def step(self, state, messages, rng):
        before = self.closeness(state)
        words = [(WORDS.findall(text[:MOST_READ].lower()) + ["stay"] * self.moves)[: self.moves] for text in messages]
        way, bumps = list(state.way), 0
        for word in (word for move in zip(*words, strict=True) for word in move):
            if way[-1] != state.goal or not self.stop:
                way.append(moved(way[-1], word, state.size, state.walls))
                bumps += way[-1] == way[-2] and word != "stay"
        after = state._replace(way=tuple(way), turn=state.turn + 1)
        solved = way[-1] == state.goal
        info = {"solved": float(solved), "closeness": self.closeness(after), "bumps": float(bumps)}
        done = solved or after.turn >= self.max_turns
        return Step(after, self.observations(after), info["closeness"] - before, done, info)

    def closeness(self, state: Walk) -> float:
        """phi."""
        if state.way[-1] == state.goal:
            return 1.0
        left = distances(state.goal, state.size, state.walls)
        return 0.5 * max(0.0, 1 - left[state.way[-1]] / left[state.way[0]])

    def observations(self, state: Walk) -> list[str]:
        """What each agent reads."""
        walls = sorted(state.walls)
        if self.brief:
            places = [("walker", state.way[-1]), ("goal", state.goal), *(("wall", wall) for wall in walls)]
            return [" ".join(f"{name} {x} {y}" for name, (x, y) in places)] * self.num_agents
        at = ", ".join(f"column {x} row {y}" for x, y in walls) or "nowhere"
        end = "and at the goal it stops" if self.stop else "and it stands at the goal only if it is there after the last move"
        text = (
            f"A walker is on a grid of {state.size} columns (1 is left) and {state.size} rows (1 is at the top). It is at "
            f"column {state.way[-1][0]} row {state.way[-1][1]}, its goal at column {state.goal[0]} row {state.goal[1]}, walls "
            f"at {at}. A move against a wall or the border is lost, {end}."
        )
        return [f"{text} {self._share(n)}" for n in range(self.num_agents)]

    def _share(self, agent: int) -> str:
        last = f"Answer with {self.moves} words, each up, down, left, right or stay."
        if self.num_agents == 1:
            return f"Lead it to its goal. {last}"
        own = [str(k) for k in range(agent + 1, self.moves * self.num_agents + 1, self.num_agents)]
        return (
            f"You and your team lead it to its goal together: you choose moves {', '.join(own)}, your team the others. {last}"
        )

    def describe(self):
        own = {"moves": self.moves, "size": self.size, "walls": self.walls, "stop": self.stop, "brief": self.brief}
        return super().describe() | own

    def render(self, state: Walk) -> str:
        marks = {**dict.fromkeys(state.walls, "#"), **dict.fromkeys(state.way, "·"), state.goal: "G", state.way[-1]: "W"}
        rows = range(1, state.size + 1)
        return "\n".join(" ".join(marks.get((x, y), ".") for x in rows) for y in rows)

    def solve(self, state: Walk) -> list[str]:
        """Messages that lead the walker along a shortest way."""
        left = distances(state.goal, state.size, state.walls)
        words, at = [], state.way[-1]
        while len(words) < self.moves * self.num_agents:
            best = min(MOVES, key=lambda word: left[moved(at, word, state.size, state.walls)])
            words.append(best if at != state.goal else "stay")
            at = moved(at, words[-1], state.size, state.walls)
        return [" ".join(words[n :: self.num_agents]) for n in range(self.num_agents)]
