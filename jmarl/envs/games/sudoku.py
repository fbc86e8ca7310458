"""Sudoku 4 x 4: a proposer fills a puzzle, a checker says which digits are wrong, the proposer mends those.

Task: a puzzle with one solution; its blanks are named A, B, C, … in reading order. Roles act by turns:

    step 1   the proposer writes a digit for each blank, in order; a missing one is no digit
    step 2   the checker reads the filled puzzle and names the blanks that it believes wrong, or writes "ok"
    step 3   only if it named some: the proposer writes a digit for each of those, in order; the others stay

and so on, 2 and 3 again, until the checker names none or `max_turns` steps are over. Digits and names are read from words of
one character; with fewer digits than asked for, from a run of just as many (`2411`); names also from runs of different ones
(`AB`). Both agents read the rules: each row, column and 2 x 2 box has 1 to 4 once.

Reward, joint, of a step: what the step adds to

    phi = 0.5 * (share of blanks that are right) + 0.5 * (all of them are)

so an episode's rewards add up to its last phi in [0, 1], a checker's step earns nothing by itself, and its return is what came
of it. The reward of a step is in [-1, 1]. Metrics: `solved`, `right` (share), and of a checker's step `flagged_wrong` (of the
wrong blanks the share it named) and `flagged_right` (of the right ones).

Data: made here: each of the 288 filled squares with any blanks that leave one solution. With `single=True` one agent does it
all. `solve` plays both roles without fault. Left out: larger squares.
"""

from __future__ import annotations

import itertools
import random
import re
from functools import cache
from typing import NamedTuple

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.data import check_split, split_of

Square = tuple[int, ...]  # 16 digits in reading order; 0 is a blank
WORDS = re.compile(r"(?<!\w)(?:([1-4])|([A-P]))(?!\w)")
NAMES = "ABCDEFGHIJKLMNOP"
RUNS = re.compile(r"(?<!\w)(?:([1-4]{2,16})|([A-P]{2,16}))(?!\w)")
MOST_READ = 2000  # characters of a message
RULES = "Each row, column and 2 by 2 box of this 4 by 4 square has the digits 1, 2, 3 and 4 once."


class Play(NamedTuple):
    """The state."""

    puzzle: Square
    solution: Square
    filled: tuple[int, ...]  # of each blank; 0: no digit yet
    open: tuple[int, ...]  # numbers of the blanks that the proposer fills next
    turn: int = 0

    def __deepcopy__(self, memo) -> Play:
        return self  # nothing in it can be changed

    @property
    def blanks(self) -> list[int]:
        return [i for i, digit in enumerate(self.puzzle) if not digit]

    @property
    def right(self) -> list[bool]:
        return [self.solution[i] == digit for i, digit in zip(self.blanks, self.filled, strict=True)]

    @property
    def phi(self) -> float:
        return 0.5 * sum(self.right) / len(self.right) + 0.5 * all(self.right)


@cache
def units() -> list[tuple[int, ...]]:
    """Rows, columns and boxes as places of a square."""
    rows = [tuple(range(4 * r, 4 * r + 4)) for r in range(4)]
    columns = [tuple(range(c, 16, 4)) for c in range(4)]
    boxes = [tuple(8 * r + 2 * c + i for i in (0, 1, 4, 5)) for r in range(2) for c in range(2)]
    return rows + columns + boxes


@cache
def filled_squares() -> tuple[Square, ...]:
    """All 288."""
    rows = list(itertools.permutations((1, 2, 3, 4)))
    squares = (sum(four, ()) for four in itertools.product(rows, repeat=4))
    return tuple(s for s in squares if all(len({s[i] for i in unit}) == 4 for unit in units()[4:]))


def solutions(puzzle: Square) -> list[Square]:
    """All fillings that keep the rules."""
    given = [(i, digit) for i, digit in enumerate(puzzle) if digit]
    return [square for square in filled_squares() if all(square[i] == digit for i, digit in given)]


class Sudoku(TextEnvironment):
    """The environment; see the module.

    blanks: of the puzzles that `tasks` makes, from and to. single: one agent plays both roles. brief: prompts of a few tokens,
    without words, for models that are trained from nothing. max_turns: steps; 1: the proposer alone, once.
    """

    reward_range = (-1.0, 1.0)

    def __init__(self, *, blanks: tuple[int, int] = (2, 6), max_turns: int = 3, single: bool = False, brief: bool = False):
        low, high = blanks
        if not 1 <= low <= high <= 10:
            raise ValueError(f"blanks={blanks}: give from and to, between 1 and 10")
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: at least one step")
        self.roles = ("solver",) if single else ("proposer", "checker")
        self.blanks, self.max_turns, self.brief = (low, high), max_turns, brief

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        check_split(split)
        rng, found = random.Random(f"{seed} {split}"), dict[Square, dict]()
        for _ in range(20 * count + 200):
            if len(found) == count:
                break
            solution = rng.choice(filled_squares())
            blanks = set(rng.sample(range(16), rng.randint(*self.blanks)))
            puzzle = tuple(0 if i in blanks else digit for i, digit in enumerate(solution))
            if split_of(repr(puzzle)) == split and len(solutions(puzzle)) == 1:
                found[puzzle] = {"puzzle": "".join(map(str, puzzle))}
        return list(found.values())

    def reset(self, task, rng):
        text = task.get("puzzle")
        if not isinstance(text, str) or not re.fullmatch("[0-4]{16}", text) or "0" not in text:
            raise ValueError(f"task {task!r:.80} has no puzzle: give 16 digits of 0 to 4, 0 for a blank, at least one of them")
        puzzle = tuple(map(int, text))
        found = solutions(puzzle)
        if len(found) != 1:
            raise ValueError(f"puzzle {text} has {len(found)} solutions: it needs one")
        count = puzzle.count(0)
        state = Play(puzzle, found[0], (0,) * count, tuple(range(count)))
        return state, self.observations(state)

    def step(self, state, messages, rng):
        text = messages[self._acting(state)][:MOST_READ]
        proposes = state.turn % 2 == 0
        digits = [int(digit) for digit, _ in WORDS.findall(text) if digit]
        named = {NAMES.index(name) for _, name in WORDS.findall(text) if name}
        for run, letters in RUNS.findall(text):
            if len(digits) < len(state.open) == len(run):
                digits = [int(digit) for digit in run]
            places = {NAMES.index(letter) for letter in letters}
            if len(places) == len(letters) and max(places, default=0) < len(state.filled):
                named |= places
        if proposes:
            filled = list(state.filled)
            for blank, digit in itertools.zip_longest(state.open, digits[: len(state.open)], fillvalue=0):
                filled[blank] = digit
            after = state._replace(filled=tuple(filled), open=(), turn=state.turn + 1)
        else:
            open_ = tuple(i for i in range(len(state.filled)) if i in named)
            after = state._replace(open=open_, turn=state.turn + 1)
        info = {"solved": float(all(after.right)), "right": sum(after.right) / len(after.right)}
        if not proposes:
            info |= {f"flagged_{name}": self._flagged(after, right) for name, right in (("wrong", False), ("right", True))}
        done = after.turn >= self.max_turns or not (proposes or after.open)
        return Step(after, self.observations(after), after.phi - state.phi, done, info)

    def _acting(self, state: Play) -> int:
        return state.turn % 2 if self.num_agents == 2 else 0

    def _flagged(self, state: Play, right: bool) -> float:
        """Of the blanks that are right, or wrong, the share that the checker named; NaN where there are none."""
        of_kind = [i in state.open for i, is_right in enumerate(state.right) if is_right == right]
        return sum(of_kind) / len(of_kind) if of_kind else float("nan")

    def observations(self, state: Play) -> list[str | None]:
        """What the agent that acts next reads; None for the other."""
        read: list[str | None] = [None] * self.num_agents
        read[self._acting(state)] = self._asked(state)
        return read

    def _asked(self, state: Play) -> str:
        proposes, names = state.turn % 2 == 0, [NAMES[i] for i in (state.open or range(len(state.filled)))]
        if self.brief:
            return " ".join([*self._cells(state), "fill" if proposes else "check", *(names if proposes else [])])
        square = self.render(state)
        if proposes:
            which = f"Fill the blanks {' '.join(names)}"
            if state.turn:
                which = f"A checker thinks that {' '.join(names)} were wrong. Fill them again"
            return f"{RULES}\n\n{square}\n\n{which}: answer with {len(names)} digits, in this order, separated by spaces."
        shown = ", ".join(f"{NAMES[i]} = {digit or 'nothing'}" for i, digit in enumerate(state.filled))
        return (
            f"{RULES}\n\n{square}\n\nFilled in were {shown}. Which of these are wrong? Answer with their letters, "
            "separated by spaces, or with ok."
        )

    def _cells(self, state: Play) -> list[str]:
        """The 16 cells in a token or two each: a given digit; a blank's name, with its digit if it has one and is not open."""
        shown = list(map(str, state.puzzle))
        for i, place in enumerate(state.blanks):
            digit = 0 if i in state.open else state.filled[i]
            shown[place] = f"{NAMES[i]} {digit}" if digit else NAMES[i]
        return shown

    def describe(self):
        return super().describe() | {"blanks": list(self.blanks), "brief": self.brief}

    def render(self, state: Play) -> str:
        cells = [cell.replace(" ", "") for cell in self._cells(state)]
        rows = [cells[i : i + 4] for i in range(0, 16, 4)]
        return "\n".join(" ".join(f"{cell:>2}" for cell in row) for row in rows)

    def solve(self, state: Play) -> list[str | None]:
        """What the agent that acts next writes if it makes no mistake."""
        if state.turn % 2 == 0:
            said = " ".join(str(state.solution[state.blanks[i]]) for i in state.open)
        else:
            said = " ".join(NAMES[i] for i, right in enumerate(state.right) if not right) or "ok"
        return [said if n == self._acting(state) else None for n in range(self.num_agents)]
