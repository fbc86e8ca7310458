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
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Answer, Observations, Step, TextEnvironment, Unanswered, class_name, describe
from jmarl.envs.messages import MAX_TURNS, SimulatedEnvironment, as_text_environment
from jmarl.envs.rewards import Processor, RewardFunction


class Fault(NamedTuple):
    """In place of an answer: there is none, and why."""

    why: str


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
                f"{class_name(env)}.reset returned {found!r:.80}: return a state and what each agent reads, (state, texts)"
            )
        return found[0], _observations(env, found[1])

    return _asked(call, f"in {class_name(env)}.reset, task {task!r:.200}")


def step_once(env: TextEnvironment, state: Any, messages: Sequence[str], seed: int) -> Step | Fault:
    """A call of `Engine.step`."""

    def call():
        found = env.step(copy.deepcopy(state), list(messages), np.random.default_rng(seed))
        if not isinstance(found, tuple) or len(found) not in (4, 5, 6):
            raise TypeError(
                f"{class_name(env)}.step returned {found!r:.80}: return Step(state, observations, reward, done, info)"
            )
        step = Step(*found)
        return step if step.done else step._replace(observations=_observations(env, step.observations))

    return _asked(call, f"in {class_name(env)}.step, messages {list(messages)!r:.400}")


def solve_once(env: TextEnvironment, state: Any) -> list[str | None] | Fault:
    """What `solve` says, checked."""

    def call():
        found = env.solve(copy.deepcopy(state))
        right = isinstance(found, list | tuple) and len(found) == env.num_agents
        if not right or not all(text is None or isinstance(text, str) for text in found):
            raise TypeError(f"{class_name(env)}.solve returned {found!r:.80}: return a list of {env.num_agents}, texts or None")
        return list(found)

    return _asked(call, f"in {class_name(env)}.solve")


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


def _observations(env: Any, texts: Any) -> list[str | None]:
    """What each agent reads, checked."""
    if not isinstance(texts, list | tuple) or not all(text is None or isinstance(text, str) for text in texts):
        raise TypeError(f"{class_name(env)} wrote {texts!r:.80} for its agents: give a list of one text (or None) an agent")
    if all(text is None for text in texts):
        raise ValueError(f"{class_name(env)} asks no agent to act, and its episode is not over: end it with done=True")
    return list(texts)


class InProcess(Engine):
    """One after the other, here."""

    def __init__(self, env: TextEnvironment):
        self.env = env

    def reset(self, tasks, seeds):
        return [reset_once(self.env, task, seed) for task, seed in zip(tasks, seeds, strict=True)]

    def step(self, states, messages, seeds):
        return [step_once(self.env, *call) for call in zip(states, messages, seeds, strict=True)]


def vectorize(env: Any, max_turns: int = MAX_TURNS) -> Any:
    """An environment of one episode as one of many; another as it is. max_turns: as for `as_text_environment`."""
    return LockStep(as_text_environment(env, max_turns)) if isinstance(env, TextEnvironment | SimulatedEnvironment) else env


class LockStep:
    """An environment of one episode, played many times side by side, for `train` and `play`.

    env: a `TextEnvironment` (anything with `reset` and `step` as there), or an engine that has one. num_agents: how many agents
    it has, if it does not say so. processor: applied to rewards, as `RewardProcessors` make them.
    """

    def __init__(self, env: Any, num_agents: int | None = None, processor: Processor | None = None):
        self.engine: Engine = env if isinstance(env, Engine) else InProcess(as_text_environment(env))
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

        environment.__name__ = class_name(self.env)
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
                f"{class_name(self.env)}: {count} episodes were not done after {self.max_turns} turns and were cut there (this "
                "is told once): end an episode with Observation([...], done=True), or set max_turns of the environment",
                stacklevel=3,
            )

    def _number(self, name: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{class_name(self.env)} gave info[{name!r}] = {value!r:.80}: give a number") from None

    def _checked(self, reward: float | Sequence[float]) -> Any:
        low, high = self.reward_range
        try:
            values = [float(value) for value in np.ravel(reward)]
        except (TypeError, ValueError):
            name = class_name(self.env)
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
