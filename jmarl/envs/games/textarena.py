"""Games of TextArena, between agents that take turns: make("textarena:TicTacToe-v0"), with the extra `textarena`.

In YAML: `environment: textarena:TicTacToe-v0` and, where a game takes several numbers of players, `options: {num_players: 3}`.
Each agent is a player, `player_0` and so on. It reads what TextArena writes for its player, as the wrappers of the game's id
lay it out (`TicTacToe-v0-train` is shorter); the others read nothing in this turn. Moves that are made at the same time are
asked for one after the other, as TextArena does. A task is a seed: {"seed": 4}. Its own tasks are even seeds for the split
train and odd ones for eval. Games without luck begin in the same way with all of them.

Rewards come with the last move, one per player as the game gives it, most often 1, 0 or -1. What it does with an invalid move
is its own rule: most allow one, and end with -1 at the second in a row. Where a game gives a text in place of a reward, as some
do at an invalid move, it is the lowest one. Rewards outside of `reward_range`, which Poker gives to players who leave it more
than once, are moved and stretched to that range, so that their order stays. A player without a reward masks the joint action.
Of long messages the end is read. One at which the game raises, such as a number of 4500 digits, counts as an empty one.

Measures: `invalid` (the message was no valid move) and `raised` (the game raised at it) of each turn; at the end
`ended_by_invalid`, `rescaled` and `draw`, and `won_player_0` and so on; of games for one player `solved` (its reward is 1).

A state is the game as a pickle: what is copied are its bytes, and every step plays a game of its own. TextArena draws from the
generators of `random` and numpy that all of Python shares. They are seeded for each call, and restored after it. Left out:
games that need a network, and those with faults (REFUSED); games whose id ends with -raw, which give no text.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import numbers
import pickle
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.config.validation import check, did_you_mean
from jmarl.envs.base import Observations, Step, TextEnvironment, Unanswered
from jmarl.envs.data import check_split

REFUSED = {  # folders of textarena.envs, by the reason
    "it downloads word lists": "Codenames DontSayIt Hangman LetterAuction SpellingBee WordChains WordLadder WordSearch Wordle",
    "it asks a hosted model": "Debate GuessWho ScenarioPlanning TwentyQuestions",
    "it never returns once all of its players have left": "MarketEntryGame PublicGoodsGame",
    "it raises at every message": "CharacterConclave",
    "its file is no Python": "Klondike",
}
MAX_PLAYERS = 15
MAX_CHARACTERS = 5000  # of a message, its last ones: some games take a time that is the square of the length
_shared = threading.Lock()  # for who has seeded the generators that all of Python shares


class Position(NamedTuple):
    """The state of an episode."""

    turn: int
    seat: int  # of the player who acts
    game: bytes  # see `pickled`


class TextArena(TextEnvironment):
    """A game of TextArena, see the module.

    Args:
        game: its id, such as "TicTacToe-v0".
        num_players: how many play. None: the fewest that the game takes.
        max_turns: messages after which an episode is truncated, with rewards of 0. Most games end before.
        reward_range: lowest and highest reward of a player.
    """

    def __init__(
        self, game: str, num_players: int | None = None, max_turns: int = 100, reward_range: Sequence[float] = (-1.0, 1.0)
    ):
        check("max_turns", max_turns, isinstance(max_turns, int) and max_turns >= 1, "a number of messages, at least 1")
        low, high = (float(bound) for bound in reward_range)
        check("reward_range", reward_range, -math.inf < low < high < math.inf, "two numbers, the lower one first")
        self.game, self.max_turns, self.reward_range = game, max_turns, (low, high)
        check_game(game)
        counts = range(1, MAX_PLAYERS + 1) if num_players is None else (num_players,)
        try:
            count = next((count for count in counts[:-1] if self._takes(count)), counts[-1])
            self._begin(count, seed=0)
        except Exception as error:  # they refuse a number of players in many ways
            players = "" if num_players is None else f" with num_players={num_players!r}"
            is_newer = isinstance(error, SyntaxError) and sys.version_info < (3, 12)
            hint = "; its file is for Python 3.12 or newer" if is_newer else ""
            raise ValueError(f"textarena:{game} cannot begin{players}: {error}{hint}") from error
        self.roles = tuple(f"player_{i}" for i in range(count))

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        check_split(split)
        numbers = np.random.default_rng(seed).choice(1 << 30, count, replace=False)
        return [{"seed": 2 * int(number) + (split == "eval")} for number in numbers]

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"game": self.game}

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[Position, Observations]:
        seed = task.get("seed", int(rng.integers(1 << 31)))
        check("seed", seed, isinstance(seed, int) and 0 <= seed < 1 << 32, "a whole number of at most 32 bits")
        return self._begin(self.num_agents, seed)

    def step(self, state: Position, messages: Sequence[str], rng: np.random.Generator) -> Step:
        seed = int(rng.integers(1 << 32))
        try:
            return self._move(state, messages[state.seat][-MAX_CHARACTERS:], seed)
        except Exception as error:
            raised = error
        try:
            step = self._move(state, "", seed)
        except Exception as error:
            raise Unanswered(f"textarena:{self.game} raised at an empty message: {error!r:.200}") from raised
        return step._replace(info={**step.info, "invalid": 1.0, "raised": 1.0})

    def render(self, state: Position) -> str:
        return "\n".join(text for _, text in unpickled(state.game).state.logs)

    def _takes(self, num_players: int) -> bool:
        """Return whether a game of so many players begins."""
        try:
            self._new_game(num_players, seed=0)
        except Exception:
            return False
        return True

    def _new_game(self, num_players: int, seed: int) -> Any:
        """Return a game at its beginning. Raises ValueError, or what the game raises, if it takes other numbers of players."""
        textarena = import_textarena()
        with seeded(seed):
            game = textarena.make(self.game)
            game.reset(num_players=num_players, seed=seed)
        if (count := game.state.num_players) != num_players:
            raise ValueError(f"it is a game for {count} players")
        return game

    def _begin(self, num_players: int, seed: int) -> tuple[Position, Observations]:
        """Return the first position and what each player reads. Raises ValueError if a game gives no text."""
        game = self._new_game(num_players, seed)
        seat, text = game.get_observation()
        if not isinstance(text, str):
            raise ValueError(f"players get no text: take {self.game.removesuffix('-raw')}")
        return Position(0, seat, pickled(game)), [text if i == seat else None for i in range(num_players)]

    def _move(self, state: Position, message: str, seed: int) -> Step:
        """Return the result of a message of the player who acts. Raises what the game raises."""
        game = unpickled(state.game)
        before = mistakes(game)
        with seeded(seed):
            done, _ = game.step(message)
            seat, text = (state.seat, None) if done else game.get_observation()
        info = {"invalid": float(mistakes(game) > before), "raised": 0.0}
        turn = state.turn + 1
        after = Position(turn, seat, pickled(game))
        if done:
            rewards, end = self._outcome(game.state.rewards)
            return Step(
                after, [None] * self.num_agents, rewards, True, info | end | {"ended_by_invalid": mistakes(game)[0] > 0}
            )
        is_last = turn >= self.max_turns
        observations = [text if i == seat else None for i in range(self.num_agents)]
        return Step(after, observations, [0.0] * self.num_agents, is_last, info, is_last)

    def _outcome(self, rewards: Mapping[int, Any]) -> tuple[list[float], dict[str, float]]:
        """Return the rewards [N] of the players at the end, inside of `reward_range`, and the measures of the outcome."""
        low, high = self.reward_range
        given = [rewards.get(i, math.nan) for i in range(self.num_agents)]
        values = [float(x) if isinstance(x, numbers.Real) else low for x in given]
        worst, best = min(values), max(values)
        is_outside = worst < low or best > high
        if self.num_agents == 1:
            return [min(max(best, low), high)], {"rescaled": float(is_outside), "solved": float(best >= 1)}
        won = {f"won_{role}": float(x == best > worst) for role, x in zip(self.roles, values, strict=True)}
        if is_outside:
            values = [low + (high - low) * (x - worst) / (best - worst) if best > worst else high for x in values]
        return values, {"rescaled": float(is_outside), "draw": float(best == worst), **won}


def import_textarena() -> Any:
    """Return the package. Raises ImportError if it is not installed."""
    try:
        return importlib.import_module("textarena")
    except ImportError as error:
        raise ImportError("games of TextArena need the textarena package: pip install 'jmarl[textarena]'") from error


def check_game(game: str) -> None:
    """Raise ValueError unless it is the id of a game of TextArena that can be played here."""
    import_textarena()
    registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    if game not in registry:
        raise ValueError(
            f"there is no game {game!r:.80} in textarena{did_you_mean(str(game), registry)}; "
            "print(textarena.envs.registration.ENV_REGISTRY.keys()) has them all"
        )
    folder = registry[game].entry_point.split(".")[2]  # of textarena.envs.FOLDER.env:Class
    for reason, folders in REFUSED.items():
        if folder in folders.split():
            raise ValueError(f"textarena:{game} is not played here, because {reason}: choose another game")


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of `random` and numpy in the context, and restore them after it. What games print is dropped."""
    with _shared, contextlib.redirect_stdout(io.StringIO()):
        of_random, of_numpy = random.getstate(), np.random.get_state()
        try:
            random.seed(seed)
            np.random.seed(seed)
            yield
        finally:
            random.setstate(of_random)
            np.random.set_state(of_numpy)


def mistakes(game: Any) -> tuple[int, int]:
    """Return how many players a game has blamed for its end or theirs, and the invalid moves in a row. An invalid move makes
    this greater."""
    return sum(bool(player["invalid_move"]) for player in game.state.game_info.values()), game.state.error_count


def pickled(game: Any) -> bytes:
    """Return a game as a pickle, apart from its wrappers: their `__getattr__` never ends in an object that is not made yet."""
    layers = []
    wrapper = importlib.import_module("textarena").Wrapper
    while isinstance(game, wrapper):
        layers.append((type(game), {name: value for name, value in vars(game).items() if name != "env"}))
        game = game.env
    return pickle.dumps((game, layers[::-1]), pickle.HIGHEST_PROTOCOL)


def unpickled(data: bytes) -> Any:
    """Return the game of `pickled`, as a new object."""
    game, layers = pickle.loads(data)
    for cls, fields in layers:
        inner, game = game, object.__new__(cls)
        vars(game).update(fields, env=inner)
    return game
