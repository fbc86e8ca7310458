"""Sudoku 4 x 4 (`sudoku`): a proposer fills a puzzle, a checker names the digits that are wrong, the proposer corrects them.

Task: a puzzle with one solution. Its blanks are named A, B, C, … in reading order. Roles act in turns:

    step 1   the proposer writes a digit for each blank, in order; a missing one is no digit
    step 2   the checker reads the filled puzzle and names the blanks that it believes wrong, or writes "ok"
    step 3   only if it named some: the proposer writes a digit for each of those, in order; the others remain

Steps 2 and 3 are repeated until the checker names no blank or `max_turns` steps are over. Digits and names are read from words
of one character. If there are fewer digits than expected, they are read from a run of exactly as many digits (`2411`); names
are also read from runs of distinct names (`AB`). Both agents read the rules: each row, column and 2 x 2 box has 1 to 4 once.

Joint reward of a step, from -1 to 1: by how much the step raises

    phi = 0.5 * (share of blanks that are right) + 0.5 * (1 if all are right, else 0)

So the rewards of an episode sum to its last phi, in [0, 1]. A checker's step itself earns nothing; its return is what follows.

Measures: `solved`, `right` (share of right blanks), and of a checker's step `flagged_wrong` (share of the wrong blanks that it
named) and `flagged_right` (share of the right ones). Data: generated, from the 288 filled squares, with any blanks that leave
one solution. With `single=True` one agent plays both roles. `solve` plays both roles without a mistake. Left out, to keep the
game small: larger squares.
"""

import itertools
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.games.random_tasks import draw_tasks
from jmarl.envs.vector import Step, TextEnvironment

Square = tuple[int, ...]  # 16 digits in reading order; 0 is a blank
NAMES = "ABCDEFGHIJKLMNOP"
_WORD = re.compile(r"(?<!\w)(?:([1-4])|([A-P]))(?!\w)")
_RUN = re.compile(r"(?<!\w)(?:([1-4]{2,16})|([A-P]{2,16}))(?!\w)")
MAX_CHARACTERS = 2000  # of a message that are read
RULES = "Each row, column and 2 by 2 box of this 4 by 4 square has the digits 1, 2, 3 and 4 once."


class SudokuState(NamedTuple):
    """The state of an episode. Blanks have the numbers 0, 1, … in reading order."""

    puzzle: Square
    solution: Square
    filled: tuple[int, ...]  # the digit of each blank; 0: none yet
    open_blanks: tuple[int, ...]  # the blanks that the proposer fills next
    turn: int = 0

    def __deepcopy__(self, memo: dict) -> "SudokuState":
        return self  # it is immutable

    @property
    def is_proposing(self) -> bool:
        """Whether the proposer acts next, not the checker."""
        return self.turn % 2 == 0

    @property
    def blank_cells(self) -> list[int]:
        """The cell of each blank."""
        return [cell for cell, digit in enumerate(self.puzzle) if not digit]

    @property
    def right(self) -> list[bool]:
        """Whether the digit of each blank is right."""
        return [self.solution[cell] == digit for cell, digit in zip(self.blank_cells, self.filled, strict=True)]

    @property
    def phi(self) -> float:
        """The potential whose change is the reward; see the module."""
        return 0.5 * sum(self.right) / len(self.right) + 0.5 * all(self.right)


@cache
def units() -> list[tuple[int, ...]]:
    """Return the rows, columns and boxes, as cells of a square."""
    rows = [tuple(range(4 * r, 4 * r + 4)) for r in range(4)]
    columns = [tuple(range(c, 16, 4)) for c in range(4)]
    boxes = [tuple(8 * r + 2 * c + i for i in (0, 1, 4, 5)) for r in range(2) for c in range(2)]
    return rows + columns + boxes


@cache
def filled_squares() -> tuple[Square, ...]:
    """Return all 288 squares that keep the rules."""
    rows = list(itertools.permutations((1, 2, 3, 4)))
    squares = (sum(four_rows, ()) for four_rows in itertools.product(rows, repeat=4))
    return tuple(square for square in squares if all(len({square[i] for i in unit}) == 4 for unit in units()[4:]))


def solutions(puzzle: Square) -> list[Square]:
    """Return all filled squares that agree with a puzzle."""
    clues = [(cell, digit) for cell, digit in enumerate(puzzle) if digit]
    return [square for square in filled_squares() if all(square[cell] == digit for cell, digit in clues)]


def read_message(text: str, num_blanks: int, num_digits: int) -> tuple[list[int], set[int]]:
    """Return the digits and the blanks that a message names.

    Args:
        text: the message.
        num_blanks: blanks of the puzzle; a run of names must consist of these.
        num_digits: digits that are expected; if there are fewer, a run of exactly as many digits is read.
    """
    text = text[:MAX_CHARACTERS]
    words = _WORD.findall(text)
    digits = [int(digit) for digit, _ in words if digit]
    blanks = {NAMES.index(name) for _, name in words if name}
    for digit_run, name_run in _RUN.findall(text):
        if len(digits) < num_digits == len(digit_run):
            digits = [int(digit) for digit in digit_run]
        run_blanks = {NAMES.index(name) for name in name_run}
        if len(run_blanks) == len(name_run) and max(run_blanks, default=0) < num_blanks:
            blanks |= run_blanks
    return digits, blanks


class Sudoku(TextEnvironment):
    """The environment; see the module.

    Args:
        blanks: fewest and most blanks of the puzzles that `tasks` draws.
        max_turns: steps of an episode; 1: the proposer alone, once.
        single: whether one agent plays both roles.
        brief: prompts of a few tokens, without words, for models that are trained from scratch.
    """

    reward_range = (-1.0, 1.0)

    def __init__(self, *, blanks: tuple[int, int] = (2, 6), max_turns: int = 3, single: bool = False, brief: bool = False):
        low, high = blanks
        if not 1 <= low <= high <= 10:
            raise ValueError(f"blanks={blanks}: give (fewest, most), between 1 and 10")
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: give at least 1")
        self.roles = ("solver",) if single else ("proposer", "checker")
        self.blanks, self.max_turns, self.brief = (low, high), max_turns, brief

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        rng = random.Random(f"{seed} {split}")

        def draw() -> tuple[str, dict] | None:
            solution = rng.choice(filled_squares())
            blank_cells = set(rng.sample(range(16), rng.randint(*self.blanks)))
            puzzle = tuple(0 if cell in blank_cells else digit for cell, digit in enumerate(solution))
            if len(solutions(puzzle)) != 1:
                return None
            return repr(puzzle), {"puzzle": "".join(map(str, puzzle))}

        return draw_tasks(draw, split, count, max_draws=20 * count + 200)

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[SudokuState, list[str | None]]:
        text = task.get("puzzle")
        if not isinstance(text, str) or not re.fullmatch("[0-4]{16}", text) or "0" not in text:
            raise ValueError(f"task {task!r:.80} has no puzzle: give 16 digits from 0 to 4, with 0 for a blank, at least one")
        puzzle = tuple(map(int, text))
        squares = solutions(puzzle)
        if len(squares) != 1:
            raise ValueError(f"puzzle {text} has {len(squares)} solutions: it needs exactly one")
        num_blanks = puzzle.count(0)
        state = SudokuState(puzzle, squares[0], (0,) * num_blanks, tuple(range(num_blanks)))
        return state, self.observations(state)

    def step(self, state: SudokuState, messages: Sequence[str], rng: np.random.Generator) -> Step:
        digits, named_blanks = read_message(messages[self._acting_agent(state)], len(state.filled), len(state.open_blanks))
        if state.is_proposing:
            filled = list(state.filled)
            for blank, digit in itertools.zip_longest(state.open_blanks, digits[: len(state.open_blanks)], fillvalue=0):
                filled[blank] = digit
            after = state._replace(filled=tuple(filled), open_blanks=(), turn=state.turn + 1)
        else:
            open_blanks = tuple(blank for blank in range(len(state.filled)) if blank in named_blanks)
            after = state._replace(open_blanks=open_blanks, turn=state.turn + 1)
        right = after.right
        info = {"solved": float(all(right)), "right": sum(right) / len(right)}
        if not state.is_proposing:
            info |= {"flagged_wrong": _flagged_share(after, False), "flagged_right": _flagged_share(after, True)}
        done = after.turn >= self.max_turns or not (state.is_proposing or after.open_blanks)
        return Step(after, self.observations(after), after.phi - state.phi, done, info)

    def _acting_agent(self, state: SudokuState) -> int:
        return state.turn % 2 if self.num_agents == 2 else 0

    def observations(self, state: SudokuState) -> list[str | None]:
        """Return what the agent that acts next reads; None for the other."""
        prompts: list[str | None] = [None] * self.num_agents
        prompts[self._acting_agent(state)] = self._prompt(state)
        return prompts

    def _prompt(self, state: SudokuState) -> str:
        names = [NAMES[blank] for blank in (state.open_blanks or range(len(state.filled)))]
        if self.brief:
            return " ".join([*_cell_texts(state), *(["fill", *names] if state.is_proposing else ["check"])])
        square = self.render(state)
        if state.is_proposing:
            request = f"Fill the blanks {' '.join(names)}"
            if state.turn:
                request = f"A checker thinks that {' '.join(names)} were wrong. Fill them again"
            return f"{RULES}\n\n{square}\n\n{request}: answer with {len(names)} digits, in this order, separated by spaces."
        digits = ", ".join(f"{NAMES[blank]} = {digit or 'nothing'}" for blank, digit in enumerate(state.filled))
        return (
            f"{RULES}\n\n{square}\n\nFilled in were {digits}. Which of these are wrong? Answer with their letters, "
            "separated by spaces, or with ok."
        )

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"blanks": list(self.blanks), "brief": self.brief}

    def render(self, state: SudokuState) -> str:
        cells = [cell.replace(" ", "") for cell in _cell_texts(state)]
        rows = [cells[i : i + 4] for i in range(0, 16, 4)]
        return "\n".join(" ".join(f"{cell:>2}" for cell in row) for row in rows)

    def solve(self, state: SudokuState) -> list[str | None]:
        """Return the message of the agent that acts next, without a mistake."""
        if state.is_proposing:
            message = " ".join(str(state.solution[state.blank_cells[blank]]) for blank in state.open_blanks)
        else:
            message = " ".join(NAMES[blank] for blank, right in enumerate(state.right) if not right) or "ok"
        return [message if agent == self._acting_agent(state) else None for agent in range(self.num_agents)]


def _flagged_share(state: SudokuState, right: bool) -> float:
    """Return the share of the right, or of the wrong, blanks that the checker named; NaN if there are none."""
    flags = [blank in state.open_blanks for blank, is_right in enumerate(state.right) if is_right == right]
    return sum(flags) / len(flags) if flags else float("nan")


def _cell_texts(state: SudokuState) -> list[str]:
    """Return the text of each cell, of one or two tokens.

    It is the digit of the puzzle, or the name of a blank, with its digit if it has one that is not to be replaced.
    """
    texts = list(map(str, state.puzzle))
    for blank, cell in enumerate(state.blank_cells):
        digit = 0 if blank in state.open_blanks else state.filled[blank]
        texts[cell] = f"{NAMES[blank]} {digit}" if digit else NAMES[blank]
    return texts
