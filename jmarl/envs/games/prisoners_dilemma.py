"""The iterated prisoner's dilemma (`ipd`): two agents cooperate or defect in each of several rounds, both at once.

Task: the number of rounds; there is one, the same in both splits. Roles: both agents read all rounds so far, each with its own
choices first. The first word "cooperate" or "defect", or letter C or D (a capital, and a word of its own), in a message is the
choice. A message without one counts as "defect".

Own reward of each round: the payoff, by default 3 if both cooperate, 1 if both defect, and if only one defects 5 for it and 0
for the other. So an agent gains by defecting in a round, whatever the other does, and both gain by cooperating. Both know the
number of rounds.

Measures, over the rounds so far: `cooperation_1` and `cooperation_2` (share of rounds in which the agent cooperated), `payoff`
(mean over rounds and agents), `illegal` (share of messages without a choice). There is no `solve`: which choice is best
depends on the other agent. `always_cooperate`, `always_defect`, `tit_for_tat` and `win_stay_lose_shift` are players that answer
a prompt (Axelrod, "The Evolution of Cooperation", 1984; Nowak and Sigmund, Nature 364, 1993). Left out: more than two players,
noise, and a number of rounds that is drawn.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.games.random_tasks import all_tasks

WORDS = {"C": "cooperate", "D": "defect"}
_PAST = {"C": "cooperated", "D": "defected"}
_CHOICE = re.compile(r"(?<![\w'’])(?:(?i:cooperate|defect)|[CD])(?!\w)")  # not the d of I'd
_ROUND = re.compile(r"^Round \d+: you (c|d)\w+, the other (c|d)", re.MULTILINE)
_THIS_ROUND = re.compile(r"^This is round (\d+)", re.MULTILINE)
_BRIEF = re.compile(r"(?:[CD] [CD] )*move")

Rounds = tuple[tuple[str, str], ...]  # the choices of each round, C or D: an agent's own and the other's


class DilemmaState(NamedTuple):
    """The state of an episode."""

    num_rounds: int
    rounds: tuple[tuple[str, str], ...] = ()  # choices of agents 0 and 1
    num_illegal: int = 0  # messages without a choice


def read_choice(text: str) -> str | None:
    """Return C or D, the choice in a message; None if there is none."""
    choice = _CHOICE.search(text)
    return choice[0][0].upper() if choice else None


def format_prompt(rounds: Rounds, num_rounds: int, payoffs: Sequence[float], brief: bool = False) -> str:
    """Return what an agent reads. rounds: its own choice first. payoffs: as in `PrisonersDilemma`."""
    if brief:
        return " ".join([*(choice for choices in rounds for choice in choices), "move"])
    both_cooperate, both_defect, alone, against = payoffs
    past = [f"Round {t}: you {_PAST[own]}, the other {_PAST[other]}." for t, (own, other) in enumerate(rounds, 1)]
    return "\n".join([
        f"You play {num_rounds} rounds with another player. In each, both choose at the same time to cooperate or to defect. "
        f"If both cooperate, each gets {both_cooperate:g}. If both defect, each gets {both_defect:g}. If only one defects, it "
        f"gets {alone:g} and the other gets {against:g}.",
        *past,
        f"This is round {len(rounds) + 1} of {num_rounds}. Answer with one word: cooperate or defect.",
    ])  # fmt: skip


def read_rounds(prompt: str) -> Rounds:
    """Return the rounds in a prompt of either form, the reader's own choice first. Raises ValueError for another text."""
    if _BRIEF.fullmatch(prompt):
        choices = prompt.split()[:-1]
        return tuple(zip(choices[::2], choices[1::2], strict=True))
    rounds = tuple((own.upper(), other.upper()) for own, other in _ROUND.findall(prompt))
    number = _THIS_ROUND.search(prompt)
    if number is None or int(number[1]) != len(rounds) + 1:
        raise ValueError(f"{prompt!r:.120} does not show all rounds so far: give a prompt of format_prompt")
    return rounds


def always_cooperate(prompt: str) -> str:
    """Answer a prompt with cooperate."""
    return _answer(prompt, True)


def always_defect(prompt: str) -> str:
    """Answer a prompt with defect."""
    return _answer(prompt, False)


def tit_for_tat(prompt: str) -> str:
    """Answer a prompt with cooperate in the first round, then with the other's last choice."""
    rounds = read_rounds(prompt)
    return _answer(prompt, not rounds or rounds[-1][1] == "C")


def win_stay_lose_shift(prompt: str) -> str:
    """Answer a prompt with cooperate in the first round, then with the last own choice if the other cooperated, and otherwise
    with the opposite one."""
    rounds = read_rounds(prompt)
    return _answer(prompt, not rounds or rounds[-1][0] == rounds[-1][1])


def _answer(prompt: str, cooperates: bool) -> str:
    """Return a choice in the form of a prompt: a letter or a word."""
    letter = "C" if cooperates else "D"
    return letter if _BRIEF.fullmatch(prompt) else WORDS[letter]


class PrisonersDilemma(TextEnvironment):
    """The environment; see the module.

    Args:
        rounds: of an episode.
        payoffs: for each agent if both cooperate, if both defect, for an agent that defects alone, and for the other one then.
        brief: prompts of letters, such as "C D D D move" in the third round, for models that are trained from scratch.
    """

    roles = ("player 1", "player 2")

    def __init__(
        self, *, rounds: int = 10, payoffs: tuple[float, float, float, float] = (3.0, 1.0, 5.0, 0.0), brief: bool = False
    ):
        if rounds < 1:
            raise ValueError(f"rounds={rounds}: give at least 1")
        self.payoffs = tuple(map(float, payoffs))
        if len(self.payoffs) != 4 or not all(map(math.isfinite, self.payoffs)):
            raise ValueError(f"payoffs={payoffs}: give four finite numbers")
        both_cooperate, both_defect, alone, against = self.payoffs
        if not alone > both_cooperate > both_defect > against:
            raise ValueError(
                f"payoffs={payoffs}: this is no dilemma; give (both cooperate, both defect, defect alone, cooperate alone) "
                "where the third is highest, then the first, the second, and the fourth"
            )
        self.max_turns, self.brief = rounds, brief
        self.reward_range = (against, alone)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return all_tasks([{"rounds": self.max_turns}], split, count, seed)

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[DilemmaState, list[str]]:
        num_rounds = task.get("rounds")
        if not isinstance(num_rounds, int) or not 1 <= num_rounds <= self.max_turns:
            raise ValueError(f"task {task!r:.80} has no number of rounds: give rounds from 1 to {self.max_turns}")
        state = DilemmaState(num_rounds)
        return state, self.observations(state)

    def step(self, state: DilemmaState, messages: Sequence[str], rng: np.random.Generator) -> Step:
        choices = [read_choice(text) for text in messages]
        first, second = (choice or "D" for choice in choices)
        after = DilemmaState(state.num_rounds, (*state.rounds, (first, second)), state.num_illegal + choices.count(None))
        count = len(after.rounds)
        info = {f"cooperation_{n + 1}": sum(pair[n] == "C" for pair in after.rounds) / count for n in range(2)}
        info["payoff"] = sum(self.payoff(*pair) + self.payoff(*pair[::-1]) for pair in after.rounds) / (2 * count)
        info["illegal"] = after.num_illegal / (2 * count)
        rewards = [self.payoff(first, second), self.payoff(second, first)]
        return Step(after, self.observations(after), rewards, count == state.num_rounds, info)

    def payoff(self, own: str, other: str) -> float:
        """Return the payoff of a round for an agent. own, other: C or D."""
        return self.payoffs[("CC", "DD", "DC", "CD").index(own + other)]

    def observations(self, state: DilemmaState) -> list[str]:
        """Return what each agent reads."""
        swapped = tuple((second, first) for first, second in state.rounds)
        return [format_prompt(rounds, state.num_rounds, self.payoffs, self.brief) for rounds in (state.rounds, swapped)]

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"payoffs": list(self.payoffs), "brief": self.brief}

    def render(self, state: DilemmaState) -> str:
        return " ".join(["".join(pair) for pair in state.rounds] or ["no round yet"])
