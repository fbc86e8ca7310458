"""Tic-tac-toe (`tictactoe`): X and O move in turns, with exact values of every board and a player that never loses.

Task: a board, the empty one, or with `openings` one after so many random moves, without a winner. Roles: x moves first, then o;
the one that does not move has no prompt. A move is the first digit from 1 to 9 in a message that is a word of its own: "5" and
"I take 5." name the centre, "15" and "5th" name nothing. Cells are numbered in reading order. A message without a move and a
move to a cell that is taken are illegal and lose at once.

Own reward in the last step: 1 for the winner and -1 for the loser, 0 in a draw; 0 in all steps before.

Measures of the last step, each 0 or 1: `x_won`, `o_won`, `draw` (one of the three is 1), and `illegal` (the loser lost by an
illegal move). Data: generated. Without `openings` there is one task, the same in both splits; with them the splits have no
board in common. `solve` plays as `minimax`. `minimax` and `random_player` are players that answer a prompt. Left out: boards of
other sizes.
"""

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.games.random_tasks import all_tasks, draw_tasks

EMPTY = "." * 9  # a board: x, o or . for each cell in reading order
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_MOVE = re.compile(r"\b[1-9]\b")
_BRIEF = re.compile(r"(?:[xo.] ){9}(?=move)")
Policy = Mapping[str, Mapping[int, float]]  # board -> move -> probability
_ROW = re.compile(r"^([XO1-9]) ([XO1-9]) ([XO1-9])$", re.MULTILINE)


def winner(board: str) -> str:
    """Return x, o, or an empty text if neither has three in a line."""
    return next((board[a] for a, b, c in LINES if board[a] == board[b] == board[c] != "."), "")


def to_move(board: str) -> str:
    """Return x or o, whoever moves next."""
    return "x" if board.count("x") == board.count("o") else "o"


def legal_moves(board: str) -> list[int]:
    """Return the numbers of the free cells, 1 to 9; none if the game is over."""
    return [] if winner(board) else [cell + 1 for cell in range(9) if board[cell] == "."]


def after_move(board: str, move: int) -> str:
    """Return the board after a legal move of the player to move."""
    return board[: move - 1] + to_move(board) + board[move:]


@cache
def value(board: str) -> int:
    """Return the result for the player to move if both play best: 1 win, 0 draw, -1 loss."""
    return max(minimax_values(board).values(), default=-1 if winner(board) else 0)


def minimax_values(board: str) -> dict[int, int]:
    """Return the value of each legal move for the player who makes it, as `value`."""
    return {move: -value(after_move(board, move)) for move in legal_moves(board)}


@cache
def boards() -> tuple[str, ...]:
    """Return the 4,520 boards of all games that are not over, each after those that lead to it."""
    layers: list[set[str]] = [{EMPTY}]
    while layers[-1]:
        layers.append({after for board in layers[-1] for after in _continuations(board) if legal_moves(after)})
    return tuple(board for layer in layers for board in sorted(layer))


def _continuations(board: str) -> list[str]:
    return [after_move(board, move) for move in legal_moves(board)]


def best_moves(board: str) -> list[int]:
    """Return the moves of a player that plays best, of which `minimax` takes one."""
    values = minimax_values(board)
    return [move for move in values if values[move] == max(values.values())]


def value_against(policy: Policy, mark: str, opponent: str) -> float:
    """Return the expected result of a player, from -1 to 1, on the empty board.

    Args:
        policy: {board: {move: probability}} of the player for the boards on which it moves. What is missing, or of a move that
            is not legal, loses.
        mark: x or o, which the player has.
        opponent: best: the best response to this policy. minimax: any of the best moves of perfect play, all alike. random: any
            legal move.
    """
    values: dict[str, float] = {}
    for board in reversed(boards()):
        after = {move: _result(values, after_move(board, move), mark) for move in legal_moves(board)}
        if to_move(board) == mark:
            odds = {move: policy[board].get(move, 0.0) for move in after}
            values[board] = sum(odds[move] * after[move] for move in after) - max(0.0, 1 - sum(odds.values()))
        elif opponent == "best":
            values[board] = min(after.values())
        else:
            values[board] = float(np.mean([after[move] for move in (best_moves(board) if opponent == "minimax" else after)]))
    return values[EMPTY]


def _result(values: Mapping[str, float], board: str, mark: str) -> float:
    """Return the value of a board for a player: of one that is over, or of `values`."""
    if won := winner(board):
        return 1.0 if won == mark else -1.0
    return values.get(board, 0.0)  # a full board is a draw


def nash_conv(x: Policy, o: Policy) -> float:
    """Return the sum of what each player would gain if it alone changed to a best response; 0 for perfect play, 2 at most
    where both always lose to it."""
    return -value_against(x, "x", "best") - value_against(o, "o", "best")  # the values of x and o against each other cancel


def format_prompt(board: str, brief: bool = False) -> str:
    """Return what the player to move reads."""
    if brief:
        return " ".join([*board, "move"])
    cells = [str(cell + 1) if mark == "." else mark.upper() for cell, mark in enumerate(board)]
    rows = "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))
    return (
        f"You play tic-tac-toe as {to_move(board).upper()}. Three in a row, column or diagonal win. The board, with a number "
        f"in each free cell:\n\n{rows}\n\nAnswer with the number of the free cell that you take. Anything else loses."
    )


def read_board(prompt: str) -> str:
    """Return the board in a prompt of either form. Raises ValueError if there is none."""
    if brief := _BRIEF.search(prompt):
        return brief[0].replace(" ", "")
    rows = _ROW.findall(prompt)
    if len(rows) != 3:
        raise ValueError(f"{prompt!r:.120} has no board: give a prompt of format_prompt")
    return re.sub("[1-9]", ".", "".join(map("".join, rows)).lower())


def minimax(prompt: str) -> str:
    """Answer a prompt with a best move, among equal ones the same for the same prompt."""
    return _choose(prompt, best_moves(read_board(prompt)))


def random_player(prompt: str) -> str:
    """Answer a prompt with a legal move, the same for the same prompt."""
    return _choose(prompt, legal_moves(read_board(prompt)))


def _choose(prompt: str, moves: list[int]) -> str:
    return str(random.Random(prompt).choice(moves))  # it hashes a text alike in all processes


class TicTacToe(TextEnvironment):
    """The environment; see the module.

    Args:
        openings: number of random moves before the boards that `tasks` draws; 0: the empty board.
        brief: prompts of ten words, such as "x . o . . . . . . move", for models that are trained from scratch.
    """

    roles = ("x", "o")
    reward_range = (-1.0, 1.0)
    max_turns = 9

    def __init__(self, *, openings: int = 0, brief: bool = False):
        if not 0 <= openings <= 8:
            raise ValueError(f"openings={openings}: give 0 to 8")
        self.openings, self.brief = openings, brief

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        if not self.openings:
            return all_tasks([{"board": EMPTY}], split, count, seed)
        rng = random.Random(f"{seed} {split}")

        def draw() -> tuple[str, dict] | None:
            board = EMPTY
            for _ in range(self.openings):
                if not (moves := legal_moves(board)):
                    return None
                board = after_move(board, rng.choice(moves))
            return None if winner(board) else (board, {"board": board})

        return draw_tasks(draw, split, count, max_draws=20 * count + 200)

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[str, list[str | None]]:
        board = task.get("board")
        if not isinstance(board, str) or not re.fullmatch("[xo.]{9}", board):
            raise ValueError(f"task {task!r:.80} has no board: give 9 characters, x, o or . each")
        if board.count("x") - board.count("o") not in (0, 1) or not legal_moves(board):
            raise ValueError(f"board {board}: give as many x as o or one more, without three in a line, and a free cell")
        return board, self.observations(board)

    def step(self, state: str, messages: Sequence[str], rng: np.random.Generator) -> Step:
        mover = to_move(state)
        move = _MOVE.search(messages[self.roles.index(mover)])
        if not move or int(move[0]) not in legal_moves(state):
            return self._end(state, "o" if mover == "x" else "x", illegal=True)
        after = after_move(state, int(move[0]))
        if not legal_moves(after):
            return self._end(after, winner(after), illegal=False)
        return Step(after, self.observations(after), [0.0, 0.0], False)

    def _end(self, board: str, won_by: str, illegal: bool) -> Step:
        """Return the last step. won_by: x, o, or an empty text for a draw."""
        info = {"x_won": won_by == "x", "o_won": won_by == "o", "draw": not won_by, "illegal": illegal}
        reward = float(won_by == "x") - float(won_by == "o")
        return Step(board, [None, None], [reward, -reward], True, {name: float(is_so) for name, is_so in info.items()})

    def observations(self, board: str) -> list[str | None]:
        """Return what the agent that moves next reads; None for the other."""
        return [format_prompt(board, self.brief) if role == to_move(board) else None for role in self.roles]

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"openings": self.openings, "brief": self.brief}

    def render(self, state: str) -> str:
        return "\n".join(" ".join(state[row : row + 3]) for row in (0, 3, 6))

    def solve(self, state: str) -> list[str | None]:
        """Return a best move of the agent that moves next."""
        return [None if prompt is None else minimax(prompt) for prompt in self.observations(state)]
