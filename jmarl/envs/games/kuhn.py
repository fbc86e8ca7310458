"""Kuhn poker (`kuhn`): one hand of the smallest poker, with exact values and the distance of a policy from an equilibrium.

Task: a deal of two of the cards jack, queen and king (the highest), one for each player; there are six. Both put one chip into
the pot. Roles act in turns; the one that does not act has no prompt:

    first    check or bet (one chip more)
    second   after a check: check, which ends the hand, or bet; after a bet: fold or call
    first    after a check and a bet: fold or call

After a fold the other wins the pot; otherwise the higher card does. The first of the words check, bet, fold and call in a
message is the answer. A message without one, and one that is not allowed there, is illegal: the player folds at once, so it
loses its ante, which is all that it has in the pot.

Own reward in the last step: the chips won, from -2 to 2; the two sum to 0. 0 in the steps before.

Measures of the last step: `first_chips` (reward of the first player), `illegal` (0 or 1). Data: the six deals, the same in both
splits, because a game is all of its deals. There is no `solve`: a good player mixes its answers.

`information_sets` returns all 12 prompts. A policy is {prompt: {answer: probability}} over them; probability that is missing is
that of an illegal answer. `game_value`, `best_response_value` and `nash_conv` are exact. At an equilibrium the first player
loses 1/18 of a chip a hand (Kuhn, "A simplified two-person poker", 1950). Left out: larger decks and more players.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.games.random_tasks import all_tasks

CARDS = ("jack", "queen", "king")  # from the lowest
DEALS = tuple(permutations(CARDS, 2))  # cards of the first and the second player
_ANSWER = re.compile(r"\b(?:check|bet|fold|call)\b")

History = tuple[str, ...]  # the answers so far
Policy = Mapping[str, Mapping[str, float]]  # prompt -> answer -> probability
_Odds = Mapping[tuple[str, History], Mapping[str, float]]  # card and history -> answer -> probability


class KuhnHand(NamedTuple):
    """The state of an episode."""

    cards: tuple[str, str]
    history: History = ()


class InformationSet(NamedTuple):
    """What a player knows when it acts. player: 0 or 1."""

    player: int
    card: str
    history: tuple[str, ...]
    answers: tuple[str, str]


def legal_answers(history: History) -> tuple[str, str]:
    """Return the two answers that are allowed after a history that is not over."""
    return ("fold", "call") if history[-1:] == ("bet",) else ("check", "bet")


def is_over(history: History) -> bool:
    """Return whether the hand is over."""
    return history[-1:] in (("fold",), ("call",)) or history == ("check", "check")


def first_chips(cards: Sequence[str], history: History) -> int:
    """Return the chips that the first player wins in a hand that is over."""
    if history[-1] == "fold":  # also in place of an illegal answer; who folds has not bet
        return 1 if len(history) % 2 == 0 else -1
    stake = 2 if history[-1] == "call" else 1
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake


def format_prompt(card: str, history: History, brief: bool = False) -> str:
    """Return what the player that acts next reads."""
    if brief:
        return " ".join([card, *history])
    past = {
        (): "You act first.",
        ("check",): "The other player checked.",
        ("bet",): "The other player bet.",
        ("check", "bet"): "You checked, and the other player bet.",
    }[history]
    return (
        "You play one hand of Kuhn poker. The cards are jack, queen and king, the king is the highest. You and the other "
        "player have put one chip each into the pot and hold one card each. A bet is one chip more. After a fold the other "
        f"player wins the pot, otherwise the higher card does. You hold the {card}. {past} Answer with one word: "
        f"{' or '.join(legal_answers(history))}. Anything else is a fold."
    )


@cache
def information_sets(brief: bool = False) -> dict[str, InformationSet]:
    """Return all 12 situations in which a player acts, by their prompts. Do not change the result."""
    histories: tuple[History, ...] = ((), ("check",), ("bet",), ("check", "bet"))
    return {
        format_prompt(card, history, brief): InformationSet(len(history) % 2, card, history, legal_answers(history))
        for history in histories
        for card in CARDS
    }


def game_value(policy: Policy) -> float:
    """Return the expected chips of the first player if both play a policy."""
    return _value_of_deals(_odds(policy), 0, best=False)


def best_response_value(policy: Policy, player: int) -> float:
    """Return the expected chips of a player (0 or 1) that plays best against the other one's part of a policy."""
    return _value_of_deals(_odds(policy), player, best=True)


def nash_conv(policy: Policy) -> float:
    """Return the sum of what each player would gain if it alone changed to a best response; 0 at an equilibrium."""
    odds = _odds(policy)  # the game has sum 0, so the values under the policy cancel
    return _value_of_deals(odds, 0, best=True) + _value_of_deals(odds, 1, best=True)


def _odds(policy: Policy) -> _Odds:
    """Return a policy by card and history, with the probability of illegal answers added to that of a fold.

    Raises ValueError if it is no policy."""
    sets = next((sets for sets in map(information_sets, (False, True)) if sets.keys() == policy.keys()), None)
    if sets is None:
        raise ValueError(
            f"a policy of {len(policy)} prompts: give the 12 prompts of information_sets(), or those of brief=True"
        )
    odds = {}
    for prompt, (_, card, history, answers) in sets.items():
        given = policy[prompt]
        illegal = 1 - sum(given.values())
        if not given.keys() <= set(answers) or min(given.values(), default=0) < 0 or not illegal >= -1e-6:
            raise ValueError(f"{dict(given)} for {prompt!r}: give probabilities of {' and '.join(answers)}, of sum 1 or less")
        folds = given.get("fold", 0.0) + max(illegal, 0.0)
        odds[card, history] = {answer: given.get(answer, 0.0) for answer in answers} | {"fold": folds}
    return odds


def _value_of_deals(odds: _Odds, player: int, best: bool) -> float:
    """Return the expected chips of a player, who plays best or by the odds. The other one plays by the odds."""
    return sum(_value(odds, player, best, card, (), {x: 1 / len(DEALS) for x in CARDS if x != card}) for card in CARDS)


def _value(odds: _Odds, player: int, best: bool, card: str, history: History, reach: dict[str, float]) -> float:
    """Return the chips of a player that holds a card, weighted by `reach` and summed over the other's cards.

    reach: the other's card -> probability of the deal and of the other's answers so far."""
    if is_over(history):
        sign = 1 - 2 * player
        return sum(p * sign * first_chips((card, other)[::sign], history) for other, p in reach.items())
    if len(history) % 2 == player:
        own = odds[card, history]
        values = {answer: _value(odds, player, best, card, (*history, answer), reach) for answer in own}
        return max(values.values()) if best else sum(own[answer] * values[answer] for answer in own)
    total = 0.0
    for answer in odds[card, history]:  # the same answers whatever the card
        reach_after = {other: p * odds[other, history][answer] for other, p in reach.items()}
        total += _value(odds, player, best, card, (*history, answer), reach_after)
    return total


class KuhnPoker(TextEnvironment):
    """The environment; see the module.

    Args:
        brief: prompts of a card and the answers so far, such as "queen check bet", for models that are trained from scratch.
    """

    roles = ("first", "second")
    reward_range = (-2.0, 2.0)
    max_turns = 3

    def __init__(self, *, brief: bool = False):
        self.brief = brief

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return all_tasks([{"cards": list(cards)} for cards in DEALS], split, count, seed)

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[KuhnHand, list[str | None]]:
        cards = task.get("cards")
        if not isinstance(cards, list | tuple) or tuple(cards) not in DEALS:
            raise ValueError(f"task {task!r:.80} has no deal: give two different cards of {', '.join(CARDS)}")
        state = KuhnHand((cards[0], cards[1]))
        return state, self.observations(state)

    def step(self, state: KuhnHand, messages: Sequence[str], rng: np.random.Generator) -> Step:
        word = _ANSWER.search(messages[len(state.history) % 2].lower())
        answer = word[0] if word else ""
        illegal = answer not in legal_answers(state.history)
        after = state._replace(history=(*state.history, "fold" if illegal else answer))
        if not is_over(after.history):
            return Step(after, self.observations(after), [0.0, 0.0], False)
        chips = float(first_chips(after.cards, after.history))
        return Step(after, [None, None], [chips, -chips], True, {"first_chips": chips, "illegal": float(illegal)})

    def observations(self, state: KuhnHand) -> list[str | None]:
        """Return what the player that acts next reads; None for the other."""
        prompts: list[str | None] = [None, None]
        player = len(state.history) % 2
        prompts[player] = format_prompt(state.cards[player], state.history, self.brief)
        return prompts

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"brief": self.brief}

    def render(self, state: KuhnHand) -> str:
        return " ".join([*state.cards, *state.history])
