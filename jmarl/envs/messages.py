"""Environments in MRLM's words: objects with a state of their own, messages in and out (host world, no jax).

    class Double(SimulatedEnvironment):
        def reset(self) -> Observation:
            self.number = int(self.rng.integers(100))
            return Observation([Message("user", f"Double {self.number}.")])

        def step(self, action: Message) -> tuple[Observation, Reward]:
            right = action.content.strip() == str(2 * self.number)
            return Observation([], done=True), Reward(float(right), {"right": float(right)})

`train`, `LockStep` and `Pool` take such an object like any `TextEnvironment`: every episode is played on a copy of it. With
several `roles`, `reset` returns a list of observations, and `step` takes a list of messages; an observation that is None is of
an agent that does not act in the coming step.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jmarl.envs.base import Step, TextEnvironment

SPLITS = ("train", "eval")
MAX_TURNS = 16  # of an episode where nothing else is said


def check_split(split: str) -> None:
    """Refuse a split that there is not."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: choose {' or '.join(SPLITS)}")


class EnvironmentMode(enum.Enum):
    """Of a policy (`trainers.mrlm.LLMEnvironment`)."""

    SERVER = "server"  # it is trained
    CLIENT = "client"  # it plays as it was loaded


@dataclasses.dataclass(frozen=True)
class Message:
    """role: system, user or assistant, as in chats."""

    role: str
    content: str
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Observation:
    """What an agent reads: the contents of its messages, one below the other."""

    messages: Sequence[Message]
    done: bool = False
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        return "\n\n".join(message.content for message in self.messages)


@dataclasses.dataclass(frozen=True)
class Reward:
    """value: of the team, or one an agent; components: numbers for the log."""

    value: float | Sequence[float]
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)


class SimulatedEnvironment:
    """Override `reset` and `step`. Before `reset`, `task` is the task of the episode and `rng` its random numbers, which
    follow from the task alone; use no others. The object is copied for every reset and step, so what is large, or cannot be
    copied (a lock, a connection), belongs into its class or module.

    roles, reward_range: as in `lockstep.TextEnvironment`. max_turns: an episode that is not done after so many steps is cut
    there, with a warning; None: after `num_turns` of the run (`max_episode_length` of MRLM's trainers), or else MAX_TURNS. A
    method `solve()`, if there is one, returns a right action: a text, or a list of one (or None) an agent.
    """

    roles: tuple[str, ...] = ("agent",)
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    max_turns: int | None = None
    task: dict
    rng: np.random.Generator
    _steps_taken: int

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Numbers that episodes are drawn from, unless overridden; those of `eval` are odd."""
        check_split(split)
        numbers = np.random.default_rng(seed).choice(2**20, count, replace=False)
        return [{"seed": int(2 * number + (split == "eval"))} for number in numbers]

    def describe(self) -> dict[str, Any]:
        """What a run that is resumed must find unchanged, beside class, roles, range and turns."""
        return {}

    def reset(self) -> Any:
        """-> Observation, or a list of one an agent."""
        raise NotImplementedError

    def step(self, action: Any) -> tuple[Any, Reward]:
        """Message, or a list of one an agent -> observation(s) and reward. The episode is over when one is done."""
        raise NotImplementedError


class SimulatedAdapter(TextEnvironment):
    """A `SimulatedEnvironment` as a `TextEnvironment`, whose states are copies of it. max_turns: where it declares none."""

    def __init__(self, env: SimulatedEnvironment, max_turns: int = MAX_TURNS):
        self.simulated = env
        self.roles, self.reward_range = env.roles, env.reward_range
        self.max_turns = max_turns if env.max_turns is None else env.max_turns
        if env.max_turns is not None and env.max_turns < 1:
            raise ValueError(f"{self.class_name} has max_turns={env.max_turns}: give at least 1, or None")

    def tasks(self, split="train", count=100, seed=0):
        return self.simulated.tasks(split, count, seed)

    def reset(self, task, rng):
        env = copy.deepcopy(self.simulated)
        about = json.dumps(task, sort_keys=True, default=str).encode()
        env.task, env.rng, env._steps_taken = task, np.random.default_rng(zlib.crc32(about)), 0
        return env, [_text(observation) for observation in self._each(env.reset())]

    def step(self, state, messages, rng):
        actions = [Message("assistant", text) for text in messages]
        found = state.step(actions[0] if len(self.roles) == 1 else actions)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Reward):
            raise TypeError(f"{self.class_name}.step returned {found!r:.80}: return observation(s) and a Reward")
        read, reward = found
        each = self._each(read)
        done = any(observation is not None and observation.done for observation in each)
        state._steps_taken += 1
        truncated = not done and state._steps_taken >= self.max_turns
        texts = [_text(observation) for observation in each]
        return Step(state, texts, reward.value, done or truncated, reward.components, truncated)

    def solve(self, state):
        if not hasattr(state, "solve"):
            return super().solve(state)
        said = state.solve()
        return [said] if len(self.roles) == 1 and isinstance(said, str) else said

    def _each(self, read: Any) -> list[Observation | None]:
        """Of each agent."""
        each = [read] if len(self.roles) == 1 and not isinstance(read, list | tuple) else read
        right = isinstance(each, list | tuple) and len(each) == len(self.roles)
        if not right or not all(o is None or isinstance(o, Observation) for o in each):
            wanted = "an Observation" if len(self.roles) == 1 else f"a list of {len(self.roles)} observations (or None)"
            raise TypeError(
                f"{self.class_name} gave {read!r:.80}: give {wanted}; Observation([...], done=True) ends an episode"
            )
        return list(each)

    @property
    def class_name(self) -> str:
        return type(self.simulated).__name__

    def describe(self):
        return super().describe() | self.simulated.describe()


def _text(observation: Observation | None) -> str | None:
    return None if observation is None else observation.text


def as_text_environment(env: Any, max_turns: int = MAX_TURNS) -> Any:
    """A `SimulatedEnvironment` as a `TextEnvironment`, of max_turns turns where it declares none; anything else as it is."""
    return SimulatedAdapter(env, max_turns) if isinstance(env, SimulatedEnvironment) else env
