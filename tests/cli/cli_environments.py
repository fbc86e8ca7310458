"""Environments of the tests of the command line. A module of its own, because processes import it too."""

from __future__ import annotations

import os
import time

from jmarl import Step, TextEnvironment


def worth(*completions, worth):
    """The column `worth` of an item."""
    return [float(value) for value in worth]


def asks(item):
    return f"What? {item['prompt']}"


def echo(prompt):
    """A stranger."""
    return prompt


class Words(TextEnvironment):
    """Two agents read a word in each of `turns` turns; the reward counts their letters."""

    roles = ("first", "second")

    def __init__(self, turns: int = 1, word: str = "apples", fails: bool = False):
        self.max_turns, self.word, self.fails = turns, word, fails

    def tasks(self, split="train", count=100, seed=0):
        return [{"text": f"in the market {self.word} {split} {seed} {i}"} for i in range(min(count, 6))]

    def reset(self, task, rng):
        return {"turn": 1, "text": task["text"]}, [task["text"], f"the {task['text']}"]

    def step(self, state, messages, rng):
        if self.fails:
            raise RuntimeError("the judge\nis broken")
        letters = [sum(c.isalpha() for c in text) / 10 for text in messages]
        state["turn"] += 1
        solved = float(letters[0] > letters[1])
        info = {"first_letters": letters[0], "solved": solved}
        again = [f"again {state['text']}"] * 2
        return Step(state, again, [letters[0], letters[1] - 1], state["turn"] > self.max_turns, info)


class WithParts(Words):
    """Says what the reward is the sum of."""

    def step(self, state, messages, rng):
        step = super().step(state, messages, rng)
        return step._replace(parts={"letters": sum(step.reward) / 2 + 0.5, "cost": -0.5})


class Unscored(Words):
    """Has no part `solved`, and no valid reward where the second agent writes more than the first."""

    def step(self, state, messages, rng):
        step = super().step(state, messages, rng)
        return step._replace(info={}, reward=step.reward if step.info["solved"] else float("nan"))


class StopsOnce(Words):
    """Raises KeyboardInterrupt, as Ctrl+C does, when a file of this name exists, and removes it."""

    def __init__(self, file: str = "", **options):
        super().__init__(**options)
        self.file = file

    def step(self, state, messages, rng):
        if " 4" in state["text"] and os.path.exists(self.file):
            os.remove(self.file)
            raise KeyboardInterrupt
        return super().step(state, messages, rng)


class Waits(Words):
    """Waits for a signal in the third of its tasks."""

    def step(self, state, messages, rng):
        if " 2" in state["text"]:
            time.sleep(600)
        return super().step(state, messages, rng)
