"""Environments of one episode, and how many of them are played side by side (host world, no jax).

A new environment is a class with `reset` and `step`:

    class Guess(TextEnvironment):
        roles, reward_range = ("guesser",), (0.0, 1.0)

        def tasks(self, split="train", count=100, seed=0):
            return [{"number": n} for n in range(count)]

        def reset(self, task, rng):
            return task, ["Guess a number below 100."]

        def step(self, state, messages, rng):
            right = messages[0].strip() == str(state["number"])
            return Step(state, ["Guess again."], float(right), done=right, info={"right": float(right)})

It is a function of (state, messages, rng): what happens to an episode depends on nothing else, so the steps of a batch may be
computed in any order, in any process, and again. Who computes them is an `Engine`: `InProcess` here, `pool.Pool` beside it.
`LockStep` makes of one of them what the training loop plays (`environment.Environment`).
"""

from __future__ import annotations

import copy
import json
import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.environment import Answer, describe
from jmarl.envs.messages import MAX_TURNS, Message, Observation, Reward, SimulatedEnvironment
from jmarl.envs.rewards import Processor, RewardFunction

Observations = Sequence[str | None]  # [N] what each agent reads; None: it does not act in the coming step


class Step(NamedTuple):
    """What came of one joint action."""

    state: Any
    observations: Observations  # of the next step; not read where the episode is over
    reward: float | Sequence[float]  # of the whole team, or one an agent; NaN masks the joint action
    done: bool
    info: Mapping[str, float] = {}  # parts of the reward and other numbers for the log; NaN where there is none
    truncated: bool = False  # done only because the episode reached max_turns


class Fault(NamedTuple):
    """In place of an answer: there is none, and why."""

    why: str


class Unanswered(RuntimeError):
    """Raised by a `step` that cannot say what a joint action is worth, through no fault of the agents (a judge that cannot be
    reached). The joint action is masked and counted, and its episode is over."""


class TextEnvironment:
    """An environment of one episode. Override `reset` and `step`, and `tasks` if it has tasks of its own.

    roles: names of the agents [N]; reward_range: of each reward of a step, from and to; max_turns: steps after which every
    episode is over; data_sets: of the hub, that its tasks can also be drawn from.
    """

    roles: tuple[str, ...] = ("agent",)
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    max_turns: int = 1
    data_sets: tuple[str, ...] = ()

    @property
    def num_agents(self) -> int:
        return len(self.roles)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """So many tasks of a split (as far as there are), the same for the same seed; dicts that JSON can hold. `train` and
        `eval` have none in common."""
        raise NotImplementedError(f"{type(self).__name__} has no tasks of its own: give train(...) items")

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[Any, Observations]:
        """A task -> the state of an episode and what each agent reads [N]. A task that lacks something is a ValueError."""
        raise NotImplementedError

    def step(self, state: Any, messages: Sequence[str], rng: np.random.Generator) -> Step:
        """What each agent wrote [N] ("" if it did not act) -> what comes of it. No text may raise. The state may be changed: it
        is a copy."""
        raise NotImplementedError

    def solve(self, state: Any) -> Sequence[str | None]:
        """A right solution: messages of the next joint action [N]; None: of an agent that does not act, or for which there is
        no such message. For demonstrations and tests. The state is a copy."""
        raise NotImplementedError(f"{_name(self)} has no solver of its own: override solve")

    def render(self, state: Any) -> str:
        """A picture of a state in text."""
        return repr(state)

    def describe(self) -> dict[str, Any]:
        """What a run that is resumed must find unchanged."""
        low, high = self.reward_range
        return {
            "class": type(self).__name__,
            "roles": list(self.roles),
            "max_turns": self.max_turns,
            "reward_range": [low, high],
        }


class Simulated(TextEnvironment):
    """A `SimulatedEnvironment` as a `TextEnvironment`, whose states are copies of it. max_turns: where it declares none."""

    def __init__(self, env: SimulatedEnvironment, max_turns: int = MAX_TURNS):
        self.simulated = env
        self.roles, self.reward_range = env.roles, env.reward_range
        self.max_turns = max_turns if env.max_turns is None else env.max_turns
        if env.max_turns is not None and env.max_turns < 1:
            raise ValueError(f"{_name(self)} has max_turns={env.max_turns}: give at least 1, or None")

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
            raise TypeError(f"{_name(self)}.step returned {found!r:.80}: return observation(s) and a Reward")
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
            raise TypeError(f"{_name(self)} gave {read!r:.80}: give {wanted}; Observation([...], done=True) ends an episode")
        return list(each)

    def describe(self):
        return super().describe() | {"class": type(self.simulated).__name__} | self.simulated.describe()


def _text(observation: Observation | None) -> str | None:
    return None if observation is None else observation.text


def text_environment(env: Any, max_turns: int = MAX_TURNS) -> Any:
    """A `SimulatedEnvironment` as a `TextEnvironment`, of max_turns turns where it declares none; anything else as it is."""
    return Simulated(env, max_turns) if isinstance(env, SimulatedEnvironment) else env


class Engine:
    """Computes many calls of one environment, in their order. Each call has a seed of its own, so results depend on neither
    where nor when it is made. What is lost or takes too long is a `Fault`."""

    env: TextEnvironment

    def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[tuple[Any, Observations] | Fault]:
        raise NotImplementedError

    def step(self, states: Sequence[Any], messages: Sequence[Sequence[str]], seeds: Sequence[int]) -> list[Step | Fault]:
        """messages [B][N]"""
        raise NotImplementedError


def reset_once(env: TextEnvironment, task: dict, seed: int) -> tuple[Any, Observations] | Fault:
    """A call of `Engine.reset`."""

    def call():
        found = env.reset(copy.deepcopy(task), np.random.default_rng(seed))
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(
                f"{_name(env)}.reset returned {found!r:.80}: return a state and what each agent reads, (state, texts)"
            )
        return found[0], _observations(env, found[1])

    return _asked(call, f"in {_name(env)}.reset, task {task!r:.200}")


def step_once(env: TextEnvironment, state: Any, messages: Sequence[str], seed: int) -> Step | Fault:
    """A call of `Engine.step`."""

    def call():
        found = env.step(copy.deepcopy(state), list(messages), np.random.default_rng(seed))
        if not isinstance(found, tuple) or len(found) not in (4, 5, 6):
            raise TypeError(f"{_name(env)}.step returned {found!r:.80}: return Step(state, observations, reward, done, info)")
        step = Step(*found)
        return step if step.done else step._replace(observations=_observations(env, step.observations))

    return _asked(call, f"in {_name(env)}.step, messages {list(messages)!r:.400}")


def solve_once(env: TextEnvironment, state: Any) -> list[str | None] | Fault:
    """What `solve` says, checked."""

    def call():
        found = env.solve(copy.deepcopy(state))
        right = isinstance(found, list | tuple) and len(found) == env.num_agents
        if not right or not all(text is None or isinstance(text, str) for text in found):
            raise TypeError(f"{_name(env)}.solve returned {found!r:.80}: return a list of {env.num_agents}, texts or None")
        return list(found)

    return _asked(call, f"in {_name(env)}.solve")


def _asked(call: Callable[[], Any], where: str) -> Any:
    try:
        return call()
    except Unanswered as error:
        return Fault(str(error))
    except SystemExit as error:  # which must not end a run with status 0
        raise RuntimeError(f"exit({error.code}) was called {where}") from error
    except Exception as error:
        error.add_note(where)
        raise


def _name(env: Any) -> str:
    return type(env.simulated if isinstance(env, Simulated) else env).__name__


def _observations(env: Any, texts: Any) -> list[str | None]:
    """What each agent reads, checked."""
    if not isinstance(texts, list | tuple) or not all(text is None or isinstance(text, str) for text in texts):
        raise TypeError(f"{_name(env)} wrote {texts!r:.80} for its agents: give a list of one text (or None) an agent")
    if all(text is None for text in texts):
        raise ValueError(f"{_name(env)} asks no agent to act, and its episode is not over: end it with done=True")
    return list(texts)


class InProcess(Engine):
    """One after the other, here."""

    def __init__(self, env: TextEnvironment):
        self.env = env

    def reset(self, tasks, seeds):
        return [reset_once(self.env, task, seed) for task, seed in zip(tasks, seeds, strict=True)]

    def step(self, states, messages, seeds):
        return [step_once(self.env, *call) for call in zip(states, messages, seeds, strict=True)]


def side_by_side(env: Any, max_turns: int = MAX_TURNS) -> Any:
    """An environment of one episode as one of many; another as it is. max_turns: as for `text_environment`."""
    return LockStep(text_environment(env, max_turns)) if isinstance(env, TextEnvironment | SimulatedEnvironment) else env


class LockStep:
    """An environment of one episode, played many times side by side, for `train` and `play`.

    env: a `TextEnvironment` (anything with `reset` and `step` as there), or an engine that has one. num_agents: how many agents
    it has, if it does not say so. processor: applied to rewards, as `RewardProcessors` make them.
    """

    def __init__(self, env: Any, num_agents: int | None = None, processor: Processor | None = None):
        self.engine: Engine = env if isinstance(env, Engine) else InProcess(text_environment(env))
        self.env = self.engine.env
        if isinstance(self.env, type):
            raise TypeError(f"{self.env.__name__} is a class: give an environment, {self.env.__name__}(...)")
        if num_agents is None and not isinstance(self.env, TextEnvironment):
            raise TypeError(f"how many agents has {type(self.env).__name__}? It is no TextEnvironment: say num_agents=")
        declared = self.env if isinstance(self.env, TextEnvironment) else TextEnvironment()
        self.num_agents = declared.num_agents if num_agents is None else num_agents
        self.roles, self.reward_range, self.max_turns = declared.roles, declared.reward_range, declared.max_turns
        self.processor = processor
        self._warned = False

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return self.env.tasks(split, count, seed)

    def describe(self) -> dict[str, Any]:
        return describe(self.env)

    def reset(self, items, rng):
        starts = self.engine.reset(items, _seeds(rng, len(items)))
        faults = [start for start in starts if isinstance(start, Fault)]
        if faults and len(faults) == len(starts):
            raise RuntimeError(f"the episode of task {items[0]!r:.80} could not begin, and no other: {faults[0].why}")
        # An episode that could not begin has its fault as state: no agent acts, and its only step is masked and counted.
        states = [start if isinstance(start, Fault) else start[0] for start in starts]
        nobody = [None] * self.num_agents
        return states, _rows([nobody if isinstance(start, Fault) else start[1] for start in starts], self.num_agents)

    def step(self, states, actions, rng):
        calls = list(zip(states, zip(*actions, strict=True), _seeds(rng, len(states)), strict=True))
        going = [call for call in calls if not isinstance(call[0], Fault)]
        answers = iter(self.engine.step(*map(list, zip(*going, strict=True))) if going else ())
        found = [state if isinstance(state, Fault) else next(answers) for state in states]
        faults = {j: step.why for j, step in enumerate(found) if isinstance(step, Fault)}
        rewards = [math.nan if isinstance(step, Fault) else self._checked(step.reward) for step in found]

        def environment(*texts):  # checked and counted as what a reward function returns
            return rewards

        environment.__name__ = _name(self.env)
        judge = RewardFunction(environment, num_agents=self.num_agents, processors=self.processor)
        result = judge(actions, [None] * len(found), [{}] * len(found), rng)
        parts = result.parts if self.processor else {}
        self._warn_truncated(sum(step.truncated for step in found if isinstance(step, Step)))
        infos = [{} if isinstance(step, Fault) else step.info for step in found]
        for name in dict.fromkeys(name for info in infos for name in info):
            parts[name] = np.array([self._number(name, info.get(name, math.nan)) for info in infos])
        done = np.array([isinstance(step, Fault) or bool(step.done) for step in found], bool)
        result = result._replace(parts=parts, faults=result.faults | faults, num_raised=len(faults))
        return Answer(result, done, [None if isinstance(s, Fault) else (s.state, s.observations) for s in found])

    def observe(self, after):
        return [state for state, _ in after], _rows([texts for _, texts in after], self.num_agents)

    def _warn_truncated(self, count: int) -> None:
        """Warn of the first episodes that are cut."""
        if count and not self._warned:
            self._warned = True
            warnings.warn(
                f"{_name(self.env)}: {count} episodes were not done after {self.max_turns} turns and were cut there (this is "
                "told once): end an episode with Observation([...], done=True), or set max_turns of the environment",
                stacklevel=3,
            )

    def _number(self, name: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{_name(self.env)} gave info[{name!r}] = {value!r:.80}: give a number") from None

    def _checked(self, reward: float | Sequence[float]) -> Any:
        low, high = self.reward_range
        try:
            values = [float(value) for value in np.ravel(reward)]
        except (TypeError, ValueError):
            name = _name(self.env)
            raise ValueError(f"{name} gave the reward {reward!r:.80}: give a number, or one for each agent") from None
        for value in values:
            if value < low - 1e-9 or value > high + 1e-9:
                raise ValueError(
                    f"{type(self.env).__name__} gave the reward {value}, and its reward_range is {self.reward_range}"
                )
        return reward


def _seeds(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(2**63, size=count).tolist()


def _rows(texts: Sequence[Observations], num_agents: int) -> list[list[Any]]:
    """Observations [B][N] as [N][B]."""
    for row in texts:
        if isinstance(row, str) or len(row) != num_agents:
            raise ValueError(f"the environment wrote {row!r:.80} for {num_agents} agents: give one text an agent")
    return [list(of_agent) for of_agent in zip(*texts, strict=True)]
