"""Environments with MRLM's classes: an object that keeps the state of its episode, messages in and out (host code, no jax).

    class Double(SimulatedEnvironment):
        def reset(self) -> Observation:
            self.number = int(self.rng.integers(100))
            return Observation([Message("user", f"Double {self.number}.")])

        def step(self, action: Message) -> tuple[Observation, Reward]:
            correct = float(action.content.strip() == str(2 * self.number))
            return Observation([], done=True), Reward(correct, {"correct": correct})

`train`, `LockStep` and `Pool` take such an object wherever they take a `TextEnvironment`; each episode is played on a copy of
it. With several `roles`, `reset` returns a list of observations and `step` gets a list of messages. An observation that is None
means that the agent does not act in the coming step.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from jmarl.envs.base import Observations, Step, TextEnvironment
from jmarl.envs.calls.awaiting import awaited
from jmarl.envs.data import check_split
from jmarl.models.hub.messages import ROLES, ChatPrompt

MAX_TURNS = 16  # of an episode if neither the environment nor the run sets a limit


class EnvironmentMode(enum.Enum):
    """The mode of a policy (`jmarl.mrlm.core.LLMEnvironment`)."""

    SERVER = "server"  # trained
    CLIENT = "client"  # frozen


class MessageRole(enum.StrEnum):
    """The role of a message; each equals its text."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    ENVIRONMENT = "environment"  # chat templates do not know it: agents read its messages as the user's


@dataclasses.dataclass(frozen=True)
class Message:
    """A chat message; `role` is a `MessageRole` or its text, such as "user"."""

    role: MessageRole | str
    content: str
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.role in tuple(MessageRole):
            object.__setattr__(self, "role", MessageRole(self.role))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {"role": str(self.role), "content": self.content, "metadata": dict(self.metadata)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Message:
        """Return the message of a dict."""
        return cls(data["role"], data["content"], data.get("metadata", {}))


@dataclasses.dataclass(frozen=True)
class Observation:
    """What an agent reads. `done` ends the episode; `state` is for the caller, agents do not read it."""

    messages: Sequence[Message]
    state: Mapping[str, Any] | None = None
    done: bool = False
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.state, bool):
            raise TypeError(f"state={self.state} is not allowed: state is a dict or None; write done={self.state}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**vars(self), "messages": [message.to_dict() for message in self.messages]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Observation:
        """Return the observation of a dict."""
        messages = [Message.from_dict(message) for message in data["messages"]]
        return cls(messages, data.get("state"), data.get("done", False), data.get("info", {}))

    @property
    def text(self) -> str:
        """The contents of the messages, separated by blank lines."""
        return "\n\n".join(message.content for message in self.messages)


@dataclasses.dataclass(frozen=True)
class Reward:
    """The reward of one step."""

    value: float | Sequence[float]  # of the team, or one per agent
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)  # numbers for the log
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for the caller
    done: bool = False  # ends the episode, as that of an observation

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reward:
        """Return the reward of a dict."""
        return cls(data["value"], data.get("components", {}), data.get("info", {}), data.get("done", False))


Observed = Observation | Sequence[Observation | None]  # one agent: an observation; several: a list with one (or None) per agent


class BaseEnvironment:
    """What policies and environments of MRLM have in common: a mode, and `with env:`, which closes it.

    Attributes:
        mode: SERVER for what is trained, CLIENT for what is not.
    """

    mode: EnvironmentMode = EnvironmentMode.CLIENT

    def __init__(self, mode: EnvironmentMode = EnvironmentMode.CLIENT):
        self._state: dict[str, Any] = {}  # for subclasses; see `get_state`
        self.set_mode(mode)

    def reset(self) -> Any:
        """Begin an episode, and return an observation."""
        raise NotImplementedError(f"{type(self).__name__} has no reset: override it")

    def step(self, action: Any) -> tuple[Any, Reward]:
        """Return an observation and a reward."""
        raise NotImplementedError(f"{type(self).__name__} has no step: override it")

    def close(self) -> None:
        """Free what the environment holds; by default nothing."""

    @property
    def is_server_mode(self) -> bool:
        return self.mode is EnvironmentMode.SERVER

    @property
    def is_client_mode(self) -> bool:
        return self.mode is EnvironmentMode.CLIENT

    def set_mode(self, mode: EnvironmentMode) -> None:
        """Change the mode."""
        self.mode = EnvironmentMode(mode)

    def get_state(self) -> dict[str, Any]:
        """Return a copy of what a subclass keeps in `_state`."""
        return dict(self._state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mode={self.mode.value})"


class SimulatedEnvironment(BaseEnvironment):
    """An environment that keeps the state of its episode in the object. Override `reset` and `step`.

    Before `reset`, `task` is set to the task of the episode, and `rng` to a generator that depends on the task alone; use no
    other random numbers. The object is copied for every reset and step, so put what is large or cannot be copied (a lock, a
    connection) into the class or module.

    Attributes:
        roles: as in `TextEnvironment`.
        reward_range: as in `TextEnvironment`.
        max_turns: an episode that is not done after so many steps is truncated, with a warning. None: after the run's
            `num_turns` (`max_episode_length` of MRLM's trainers) or, without that, MAX_TURNS.
    """

    roles: tuple[str, ...] = ("agent",)
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    max_turns: int | None = None
    task: dict
    rng: np.random.Generator
    _num_steps: int

    def __init__(self, mode: EnvironmentMode = EnvironmentMode.CLIENT, max_turns: int | None = None):
        """mode: CLIENT, since an environment is never trained. A subclass need not call this."""
        super().__init__(mode)
        if max_turns is not None:
            self.max_turns = max_turns

    def set_mode(self, mode: EnvironmentMode) -> None:
        """Raise ValueError unless the mode is CLIENT."""
        if EnvironmentMode(mode) is not EnvironmentMode.CLIENT:
            raise ValueError(f"mode={mode} of {type(self).__name__}: an environment is never trained, so its mode is CLIENT")
        super().set_mode(mode)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return `count` tasks that only hold a seed for `rng`. Seeds are even in `train` and odd in `eval`."""
        check_split(split)
        numbers = np.random.default_rng(seed).choice(2**20, count, replace=False)
        return [{"seed": int(2 * number + (split == "eval"))} for number in numbers]

    def describe(self) -> dict[str, Any]:
        """Return what must not change when a run resumes, besides class, roles, reward range and turns."""
        return {}

    def reset(self) -> Observed:
        """Begin the episode of `self.task`; return what the agents read."""
        raise NotImplementedError(f"{type(self).__name__} has no reset: override it")

    def step(self, action: Any) -> tuple[Observed, Reward]:
        """Return what the agents read next, and the reward. `action` is a message, or a list of one per agent.

        The episode is over when one observation is done.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step: override it")

    def solve(self) -> str | Sequence[str | None]:
        """Return a correct action: a text, or a list of one (or None) per agent. Used for demonstrations and tests."""
        raise NotImplementedError(f"{type(self).__name__} has no solver of its own: override solve")


class SimulatedAdapter(TextEnvironment):
    """A `SimulatedEnvironment` as a `TextEnvironment` whose states are copies of it.

    max_turns: the limit if the environment declares none. chat: whether agents read an observation as chat messages; otherwise
    as one text.
    """

    def __init__(self, env: SimulatedEnvironment, max_turns: int = MAX_TURNS, chat: bool = False):
        self.simulated, self.chat = env, chat
        self.roles, self.reward_range = env.roles, env.reward_range
        self.max_turns = max_turns if env.max_turns is None else env.max_turns
        if env.max_turns is not None and env.max_turns < 1:
            raise ValueError(f"{self.class_name} has max_turns={env.max_turns}: set at least 1, or None")

    @property
    def class_name(self) -> str:
        return type(self.simulated).__name__

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return self.simulated.tasks(split, count, seed)

    def describe(self) -> dict[str, Any]:
        return super().describe() | self.simulated.describe()

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[SimulatedEnvironment, Observations]:
        env = copy.deepcopy(self.simulated)
        seed = zlib.crc32(json.dumps(task, sort_keys=True, default=str).encode())
        env.task, env.rng, env._num_steps = task, np.random.default_rng(seed), 0
        return env, [self._prompt(observation) for observation in self._by_agent(awaited(env.reset()))]

    def step(self, state: SimulatedEnvironment, messages: Sequence[str], rng: np.random.Generator) -> Step:
        actions = [Message("assistant", text) for text in messages]
        result = awaited(state.step(actions[0] if len(self.roles) == 1 else actions))
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Reward):
            raise TypeError(f"{self.class_name}.step returned {result!r:.80}: return observation(s) and a Reward")
        observations, reward = self._by_agent(result[0]), result[1]
        done = reward.done or any(observation is not None and observation.done for observation in observations)
        state._num_steps += 1
        truncated = not done and state._num_steps >= self.max_turns
        texts = [None if done else self._prompt(observation) for observation in observations]
        return Step(state, texts, reward.value, done or truncated, reward.components, truncated)

    def solve(self, state: SimulatedEnvironment) -> Sequence[str | None]:
        solution = awaited(state.solve())
        return [solution] if isinstance(solution, str) and len(self.roles) == 1 else solution

    def _prompt(self, observation: Observation | None) -> str | None:
        """Return what an agent reads; None if it does not act."""
        if observation is None:
            return None
        return chat_of(observation) if self.chat else observation.text

    def _by_agent(self, observed: Any) -> list[Observation | None]:
        """Return observations as a list with one (or None) per agent; raise if they are anything else."""
        num_agents = len(self.roles)
        observations = [observed] if num_agents == 1 and not isinstance(observed, list | tuple) else observed
        fits = isinstance(observations, list | tuple) and len(observations) == num_agents
        if not fits or not all(o is None or isinstance(o, Observation) for o in observations):
            expected = "an Observation" if num_agents == 1 else f"a list of {num_agents} observations (or None)"
            raise TypeError(
                f"{self.class_name} returned {observed!r:.80}: return {expected}; Observation([...], done=True) ends an episode"
            )
        return list(observations)


def chat_of(observation: Observation) -> ChatPrompt:
    """Return what an agent reads as chat messages. Roles that chat templates do not know are the user's."""
    return ChatPrompt({"role": str(m.role) if m.role in ROLES else "user", "content": m.content} for m in observation.messages)


def as_text_environment(env: Any, max_turns: int = MAX_TURNS, chat: bool = False) -> Any:
    """Return a `SimulatedEnvironment` as a `TextEnvironment`, and anything else as it is.

    max_turns: the limit for an environment that declares none. chat: see `SimulatedAdapter`.
    """
    return SimulatedAdapter(env, max_turns, chat) if isinstance(env, SimulatedEnvironment) else env
