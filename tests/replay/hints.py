"""An environment of two agents who act one after the other, for tests of messages that others read."""

from __future__ import annotations

from jmarl.envs.base import Step, TextEnvironment
from tests.runs.training_process import WORDS


class Hint(TextEnvironment):
    """The first agent writes a hint, which the second reads. Both earn by what the second writes, and by chance."""

    roles, reward_range, max_turns = ("hints", "guesses"), (0.0, 4.0), 2

    def __init__(self, first: str = "one"):
        self.first = first  # word that the second agent reads

    def tasks(self, split="train", count=100, seed=0):
        return [{"id": i} for i in range(min(count, 6))]

    def reset(self, task, rng):
        return "", [WORDS[task["id"]], None]

    def step(self, state, messages, rng):
        if not state:
            return Step("guess", [None, f"{self.first} {messages[0]}"], 0.0, False)
        letters = len(set(messages[1])) / 10
        return Step(state, [None, None], letters + rng.random(), True, {"letters": letters})


class Other(Hint):
    """The same with another name of the second agent."""

    roles = ("hints", "answers")
