"""Environments that fail, or that keep their state in the object. Processes of a pool import them, and not jax with them."""

from __future__ import annotations

import os
import time

from jmarl.envs.base import Step, TextEnvironment, Unanswered
from jmarl.envs.messages import Message, Observation, Reward, SimulatedEnvironment


class Unpicklable(Exception):
    """Cannot be pickled, because `pickle` passes one argument to its constructor."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


INVALID_STEPS = {
    "three": (None, ["again"], 0.5),
    "gymnasium": ({"a": "again"}, 0.5, False, {}),
    "numbers": Step(None, [1], 0.5, False),
    "nobody": Step(None, [None], 0.5, False),
}


class Troubled(TextEnvironment):
    """Fails in the way that its message says."""

    reward_range = (0.0, 1.0)

    def reset(self, task, rng):
        if task.get("lost"):
            raise Unanswered("no judge")
        return {"drawn": rng.random()}, [task.get("prompt", "go")]

    def step(self, state, messages, rng):
        message = messages[0]
        if message == "sleep":
            time.sleep(600)  # longer than any bound below
        if message == "die":
            os._exit(3)
        if message == "unanswered":
            raise Unanswered("the judge does not answer")
        if message == "bug":
            raise KeyError("a mistake")
        if message == "timeout":
            raise TimeoutError("of its own")
        if message == "unpicklable error":
            raise Unpicklable(1, 2)
        if message == "exit":
            raise SystemExit(0)
        if message == "unpicklable state":
            return Step(lambda: 0, ["again"], 0.5, False)
        if message in ("no reward", "no number"):
            return Step(
                state, ["again"], None if message == "no reward" else 0.5, True, {} if message == "no reward" else {"n": None}
            )
        if message in INVALID_STEPS:
            return INVALID_STEPS[message]
        if message == "once" and not os.path.exists(os.environ["TROUBLED_FILE"]):
            open(os.environ["TROUBLED_FILE"], "w").close()
            os._exit(4)
        return Step(state, ["again"], 7.0 if message == "large" else 0.5, True, {"drawn": state["drawn"], "more": rng.random()})


class Count(SimulatedEnvironment):
    """Keeps its state in the object, as MRLM's environments do."""

    reward_range = (0.0, 1.0)
    max_turns = 3

    def reset(self):
        self.texts, self.number = [], int(self.rng.integers(1000))
        return Observation([Message("system", "Count the apples."), Message("user", f"From {self.number}.")])

    def step(self, action):
        self.texts.append(action.content)
        return Observation([Message("user", str(len(self.texts)))], done=len(self.texts) == 3), Reward(
            0.5, {"n": len(self.texts)}
        )
