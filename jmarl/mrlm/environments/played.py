"""MRLM's `reset()` and `step(message)` for the environments of this project, which keep the state of one episode in the object.

Trainers use the environments' own interface, with which many episodes are played at once.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from jmarl.envs.messages import EnvironmentMode, Message, Observation, Reward
from jmarl.envs.vector import vectorize

NUM_TASKS = 100  # that are played one after the other


class PlayedByMessages:
    """Adds MRLM's interface to an environment: without arguments `reset` begins an episode on the next task."""

    mode = EnvironmentMode.CLIENT

    def reset(self, *arguments: Any, **named: Any) -> Any:
        """Begin an episode on the next task and return what the agent reads, or a list of one per agent (or None)."""
        if arguments or named:
            return super().reset(*arguments, **named)  # type: ignore[misc]
        engine: Any = vectorize(self)
        if "_played" not in vars(self):
            self._played: dict[str, Any] = {"tasks": engine.tasks("train", NUM_TASKS, 0), "next": 0, "turn": 0}
        played = self._played
        self.current_task = played["tasks"][played["next"] % len(played["tasks"])]
        played["next"], played["turn"] = played["next"] + 1, 0
        played["states"], prompts = engine.reset([self.current_task], self._rng())
        played["prompts"] = [column[0] for column in prompts]
        return self._observation(False, {})

    def step(self, *arguments: Any, **named: Any) -> Any:
        """Play a message, or a list of one per agent; return what the agent reads next, and the reward."""
        first = arguments[0] if arguments else None
        is_message = isinstance(first, Message) or (isinstance(first, list) and any(isinstance(x, Message) for x in first))
        if not is_message:
            return super().step(*arguments, **named)  # type: ignore[misc]
        if "_played" not in vars(self):
            raise RuntimeError("the episode has not begun: call reset() before step(message)")
        engine, played = vectorize(self), self._played
        messages = first if isinstance(first, list) else [first]
        actions = [["" if message is None else message.content] for message in messages]
        answer = engine.step(played["states"], actions, self._rng())
        played["turn"] += 1
        done = bool(answer.done[0])
        if not done:
            played["states"], prompts = engine.observe(answer.after)
            played["prompts"] = [column[0] for column in prompts]
        info = {name: float(np.ravel(values)[0]) for name, values in (answer.result.parts | answer.result.measures).items()}
        rewards = answer.result.rewards[0]
        value = float(rewards[0]) if len(rewards) == 1 else [float(x) for x in rewards]
        return self._observation(done, info), Reward(value, info)

    def close(self) -> None:
        """End the episode."""
        vars(self).pop("_played", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the episode out, so that environments that differ in it only are equal for trainers."""
        return {name: value for name, value in vars(self).items() if name not in ("_played", "current_task")}

    def _rng(self) -> np.random.Generator:
        return np.random.default_rng((self._played["next"], self._played["turn"]))

    def _observation(self, done: bool, info: dict[str, float]) -> Any:
        observations = [
            None if prompt is None or done else Observation([Message("user", prompt)], info=info)
            for prompt in self._played["prompts"]
        ]
        if done:
            observations = [Observation([], done=True, info=info)] * len(observations)
        return observations[0] if len(observations) == 1 else observations


def check_client(mode: EnvironmentMode) -> None:
    """Raise ValueError unless the mode of an environment is CLIENT."""
    if EnvironmentMode(mode) is not EnvironmentMode.CLIENT:
        raise ValueError(f"mode={mode}: an environment is never trained, so its mode is CLIENT; policies have modes")


def one_source(**sources: Any) -> Any:
    """Return the one value that is not None, or None. Raises ValueError for several."""
    given = {name: value for name, value in sources.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are {len(given)} arguments for one thing: give one of them")
    return next(iter(given.values()), None)
