"""Play a `TextEnvironment` many times side by side (host code, no jax).

`LockStep` is the `Environment` that training plays. It computes rewards and masks; an `Engine` calls `reset` and `step` of the
environment, which may be `async def`: `InProcess` one after the other in this process, `pool.Pool` in several processes.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.columns import join_numbers
from jmarl.envs.base import Answer, Observations, Step, TextEnvironment, Texts, Unanswered, class_name, describe
from jmarl.envs.calls.awaiting import awaited
from jmarl.envs.calls.user_code import calling, excerpt, place_of
from jmarl.envs.messages import MAX_TURNS, SimulatedAdapter, SimulatedEnvironment, as_text_environment
from jmarl.envs.reward_values import (
    Processor,
    RewardResult,
    first_faults,
    mean_over_agents,
    process_rewards,
    reward_result,
    reward_values,
    with_text_length,
)
from jmarl.models.hub.messages import as_prompt

RANGE_TOLERANCE = 1e-9  # by which a reward may exceed reward_range


class Fault(NamedTuple):
    """Stands for the result of a call that has none: the environment raised `Unanswered`, or its process was lost."""

    reason: str


class Engine:
    """Calls `reset` and `step` of many episodes of one environment; results come in the order of the calls.

    Each call has its own seed, so results depend neither on where nor when it is computed. A call that is lost or takes too
    long gives a `Fault`. B is the number of calls.
    """

    env: TextEnvironment

    def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[tuple[Any, Observations] | Fault]:
        """Return the first states and observations of episodes of `tasks` [B]."""
        raise NotImplementedError

    def step(self, states: Sequence[Any], messages: Texts, seeds: Sequence[int]) -> list[Step | Fault]:
        """Return the results of joint actions, `messages` [B][N], in `states` [B]."""
        raise NotImplementedError

    def close(self) -> None:
        """End what the engine has started: processes, connections."""


class InProcess(Engine):
    """Computes the calls in this process, one after the other."""

    def __init__(self, env: TextEnvironment):
        self.env = env

    def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[tuple[Any, Observations] | Fault]:
        return [reset_once(self.env, *call) for call in zip(tasks, seeds, strict=True)]

    def step(self, states: Sequence[Any], messages: Texts, seeds: Sequence[int]) -> list[Step | Fault]:
        return [step_once(self.env, *call) for call in zip(states, messages, seeds, strict=True)]


def reset_once(env: TextEnvironment, task: dict, seed: int) -> tuple[Any, Observations] | Fault:
    """Call `env.reset` with a copy of the task and check the result. Raises what `env.reset` raises, except `Unanswered`."""

    def call() -> tuple[Any, Observations]:
        start = awaited(env.reset(copy.deepcopy(task), np.random.default_rng(seed)))
        if not isinstance(start, tuple) or len(start) != 2:
            raise TypeError(
                f"{class_name(env)}.reset returned {start!r:.80}: return a state and what each agent reads, (state, texts)"
            )
        return start[0], _checked_observations(env, start[1])

    return _result_or_fault(call, method_of(env, "reset"), lambda: f"{class_name(env)}.reset, task {excerpt(task)}")


def step_once(env: TextEnvironment, state: Any, messages: Sequence[str], seed: int) -> Step | Fault:
    """Call `env.step` with a copy of the state and check the result. Raises what `env.step` raises, except `Unanswered`."""

    def call() -> Step:
        result = awaited(env.step(copy.deepcopy(state), list(messages), np.random.default_rng(seed)))
        if not isinstance(result, tuple) or not 4 <= len(result) <= 7:
            raise TypeError(
                f"{class_name(env)}.step returned {result!r:.80}: return Step(state, observations, reward, done, info)"
            )
        step = Step(*result)
        return step if step.done else step._replace(observations=_checked_observations(env, step.observations))

    def where() -> str:
        return f"{class_name(env)}.step, messages {excerpt(list(messages))}, state {excerpt(state)}"

    return _result_or_fault(call, method_of(env, "step"), where)


def solve_once(env: TextEnvironment, state: Any) -> list[str | None] | Fault:
    """Call `env.solve` with a copy of the state and check the result. Raises what `env.solve` raises, except `Unanswered`."""

    def call() -> list[str | None]:
        solution = awaited(env.solve(copy.deepcopy(state)))
        is_list = isinstance(solution, list | tuple) and len(solution) == env.num_agents
        if not is_list or not all(text is None or isinstance(text, str) for text in solution):
            raise TypeError(
                f"{class_name(env)}.solve returned {solution!r:.80}: return a list of {env.num_agents}, texts or None"
            )
        return list(solution)

    return _result_or_fault(call, method_of(env, "solve"), lambda: f"{class_name(env)}.solve, state {excerpt(state)}")


def _result_or_fault(call: Callable[[], Any], method: Any, where: Callable[[], str]) -> Any:
    """Return the result of a call of a method, or a `Fault` if it raised `Unanswered`. Other errors get `where` as a note."""
    try:
        with calling(where, function=method):
            return call()
    except Unanswered as error:
        return Fault(str(error))
    except SystemExit as error:  # must not end a run with status 0
        raise RuntimeError(f"exit({error.code}) was called in {where()}: {place_of(error)}") from error


def method_of(env: Any, name: str) -> Any:
    """Return a method of an environment, of the user's own one inside an adapter."""
    return getattr(env.simulated if isinstance(env, SimulatedAdapter) else env, name)


def _checked_observations(env: Any, texts: Any) -> list[str | None]:
    """Return observations as a list; raise if one is no prompt, or if no agent acts."""
    texts = [as_prompt(text) for text in texts] if isinstance(texts, list | tuple) else texts
    if not isinstance(texts, list) or not all(text is None or isinstance(text, str) for text in texts):
        raise TypeError(
            f"{class_name(env)} returned the observations {texts!r:.80}: return a list with a text (or None) for each agent"
        )
    if all(text is None for text in texts):
        raise ValueError(f"in {class_name(env)} no agent acts in the next step, and the episode is not over: return done=True")
    return texts


def vectorize(env: Any, max_turns: int = MAX_TURNS) -> Any:
    """Return a `LockStep` of an environment of one episode, and any other environment as it is.

    max_turns: the limit for a `SimulatedEnvironment` that declares none.
    """
    if isinstance(env, TextEnvironment | SimulatedEnvironment):
        return LockStep(as_text_environment(env, max_turns))
    return env.within(max_turns) if isinstance(env, LockStep) else env


class LockStep:
    """Many episodes of one environment in lock-step: the `Environment` that `train` and `play` use.

    Args:
        env: a `TextEnvironment`, a `SimulatedEnvironment`, any object with the `reset` and `step` of a `TextEnvironment`, or an
            engine that has one.
        num_agents: needed only for an object that does not declare `roles`.
        processor: applied to every reward, such as `RewardProcessors.scale(100)`.
    """

    def __init__(self, env: Any, num_agents: int | None = None, processor: Processor | None = None):
        self.engine: Engine = env if isinstance(env, Engine) else InProcess(as_text_environment(env))
        self.env = self.engine.env
        if isinstance(self.env, type):
            raise TypeError(f"{self.env.__name__} is a class: pass an instance, {self.env.__name__}(...)")
        if num_agents is None and not isinstance(self.env, TextEnvironment):
            raise TypeError(f"{class_name(self.env)} is no TextEnvironment, so its number of agents is unknown: set num_agents")
        declared = self.env if isinstance(self.env, TextEnvironment) else TextEnvironment()
        self.num_agents = declared.num_agents if num_agents is None else num_agents
        self.roles, self.reward_range, self.max_turns = declared.roles, declared.reward_range, declared.max_turns
        self.special_tokens = declared.special_tokens
        self._processor = None if processor is None else with_text_length(processor)
        self._warned = False

    def close(self) -> None:
        """End what the engine has started."""
        self.engine.close()

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return self.env.tasks(split, count, seed)

    def describe(self) -> dict[str, Any]:
        return describe(self.env)

    def within(self, num_turns: int) -> LockStep:
        """Return this environment in a run of so many turns; another one if that limits its episodes."""
        return self

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Any], list[list[Any]]]:
        starts = self.engine.reset(items, _seeds(rng, len(items)))
        faults = [start for start in starts if isinstance(start, Fault)]
        if faults and len(faults) == len(starts):
            raise RuntimeError(f"no episode could begin; that of task {items[0]!r:.80}: {faults[0].reason}")
        # An episode that could not begin has its fault as state: no agent acts, and its only step is masked and counted.
        states = [start if isinstance(start, Fault) else start[0] for start in starts]
        idle: Observations = [None] * self.num_agents
        return states, self._by_agent([idle if isinstance(start, Fault) else start[1] for start in starts])

    def step(self, states: Sequence[Any], actions: Texts, rng: np.random.Generator) -> Answer:
        if len(actions) != self.num_agents:
            raise ValueError(f"step got messages of {len(actions)} agents, and {class_name(self.env)} has {self.num_agents}")
        messages = list(zip(*actions, strict=True))
        steps = self._steps(states, messages, _seeds(rng, len(states)))
        truncated = sum(bool(step.truncated) for step in steps if isinstance(step, Step))
        self._warn_truncated(truncated)
        done = np.array([isinstance(step, Fault) or bool(step.done) for step in steps], bool)
        after = [None if isinstance(step, Fault) else (step.state, step.observations) for step in steps]
        with calling(function=method_of(self.env, "step")):
            result = self._result(steps, [sum(map(len, joint)) for joint in messages])
        return Answer(result._replace(num_truncated=truncated), done, after)

    def observe(self, after: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        return [state for state, _ in after], self._by_agent([texts for _, texts in after])

    def _steps(self, states: Sequence[Any], messages: Texts, seeds: Sequence[int]) -> list[Step | Fault]:
        """Step the episodes that could begin."""
        calls = [call for call in zip(states, messages, seeds, strict=True) if not isinstance(call[0], Fault)]
        results = iter(self.engine.step(*map(list, zip(*calls, strict=True))) if calls else ())
        return [state if isinstance(state, Fault) else next(results) for state in states]

    def processed(self, step: Step, messages: Sequence[str]) -> Step:
        """Return a step with its reward as `step` computes it: another `LockStep` without a processor gives the same result.

        The parts of a processed reward are measures. A reward that is no number stays as the environment returned it."""
        if self._processor is None:
            return step
        with calling(function=method_of(self.env, "step")):
            result = self._result([step], [sum(map(len, messages))])
        measures = {name: float(values[0]) for name, values in result.measures.items()}
        reward = result.rewards[0].tolist() if math.isfinite(measures[class_name(self.env)]) else step.reward
        return step._replace(reward=reward, info=measures, parts={})

    def _result(self, steps: Sequence[Step | Fault], text_lengths: Sequence[int]) -> RewardResult:
        """Check, process and mask the rewards of steps."""
        name = class_name(self.env)
        rewards = [math.nan if isinstance(step, Fault) else self._in_range(step.reward) for step in steps]
        values, value_faults = reward_values(rewards, self.num_agents, f"reward {name!r}")
        raw = mean_over_agents(values)
        parts = self._columns("parts", [{} if isinstance(step, Fault) else step.parts for step in steps], 0.0)
        measures = self._columns("info", [{} if isinstance(step, Fault) else step.info for step in steps], math.nan)
        self._check_parts(parts, raw)
        if self._processor is not None:  # the parts are those of the raw reward
            parts, measures = {}, join_numbers({name: raw}, parts, measures)
        values, processor_faults = process_rewards(self._processor, values, text_lengths, "the weighted sum")
        faults = {j: step.reason for j, step in enumerate(steps) if isinstance(step, Fault)}
        return reward_result(values, parts, first_faults(value_faults | faults, processor_faults), len(faults), measures)

    def _columns(self, field: str, entries: Sequence[Mapping[str, float]], missing: float) -> dict[str, np.ndarray]:
        """Return the numbers in a field of steps as an array [J] for each name. missing: where a step does not have it."""
        names = dict.fromkeys(name for entry in entries for name in entry)
        return {
            name: np.array([self._number(f"{field}[{name!r}]", entry.get(name, missing)) for entry in entries])
            for name in names
        }

    def _check_parts(self, parts: Mapping[str, np.ndarray], reward: np.ndarray) -> None:
        """Raise if parts do not add up to the reward [J] of each step that has a valid one."""
        if not parts:
            return
        total = np.sum(list(parts.values()), axis=0)
        rounding = 1e-6 + 1e-5 * np.sum(np.abs(list(parts.values())), axis=0)  # of float32, also where terms cancel
        for j in np.flatnonzero(np.isfinite(reward) & ~(np.abs(total - reward) <= rounding)):
            own = ", ".join(f"{name} {values[j]:g}" for name, values in parts.items())
            raise ValueError(
                f"{class_name(self.env)} returned the reward {reward[j]:g} and parts that add up to {total[j]:g} ({own}): "
                "parts are the terms of the reward; put other numbers into info"
            )

    def _in_range(self, reward: Any) -> Any:
        """Return a reward; raise if it is no number or outside reward_range. NaN is allowed."""
        low, high = self.reward_range
        try:
            values = [float(value) for value in np.ravel(reward)]
        except (TypeError, ValueError):
            raise ValueError(
                f"{class_name(self.env)} returned the reward {reward!r:.80}: return a number, or one for each agent"
            ) from None
        for value in values:
            if value < low - RANGE_TOLERANCE or value > high + RANGE_TOLERANCE:
                raise ValueError(
                    f"{class_name(self.env)} returned the reward {value}, and its reward_range is {self.reward_range}: "
                    "correct one of them"
                )
        return reward

    def _number(self, place: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{class_name(self.env)} returned {place} = {value!r:.80}: return a number") from None

    def _warn_truncated(self, count: int) -> None:
        """Warn once that episodes were truncated."""
        if count and not self._warned:
            self._warned = True
            warnings.warn(
                f"{class_name(self.env)}: {count} episodes were not done after {self.max_turns} turns and were truncated "
                "(shown once): end an episode with Observation([...], done=True), or set max_turns of the environment",
                stacklevel=3,
            )

    def _by_agent(self, observations: Sequence[Observations]) -> list[list[Any]]:
        """Transpose observations [B][N] to [N][B]."""
        for texts in observations:
            if isinstance(texts, str) or len(texts) != self.num_agents:
                raise ValueError(
                    f"{class_name(self.env)} returned the observations {texts!r:.80} for {self.num_agents} agents: return "
                    "a list with a text (or None) for each agent"
                )
        return [list(column) for column in zip(*observations, strict=True)]


def _seeds(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(2**63, size=count).tolist()
