"""Sample and reward a turn in parts: one after the other, or in the processes of a run.

Each process plays the episodes of its share of an environment of one episode (`LockStep`), with its own engine; seeds are drawn
for all episodes and then divided, so results are those of one process. Any other environment, such as one that is made of a
reward function, is called in the first process only, with the whole step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jmarl.config import Episodes
from jmarl.envs.base import Answer, Environment, Observations, Step, Texts, class_name
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.reward_values import RewardResult
from jmarl.envs.vector import Engine, Fault, LockStep
from jmarl.processes import exchange
from jmarl.rollout.turns import concatenate_numbers


def num_parts(count: int, episodes: Episodes) -> int:
    """Return the number of equal parts in which `count` prompts are sampled. Turns that continue from caches need one part."""
    whole = episodes.history == "append" and episodes.num_turns > 1
    return 1 if whole else math.gcd(count, episodes.sample_parts)


def join_answers(answers: Sequence[Answer]) -> Answer:
    """Concatenate the answers to the joint actions of all parts."""
    if len(answers) == 1:
        return answers[0]
    results = [answer.result for answer in answers]
    sizes = [len(result.total) for result in results]
    starts = np.cumsum([0, *sizes])
    joined = RewardResult(
        np.concatenate([result.total for result in results]),
        concatenate_numbers([result.parts for result in results], sizes),
        np.concatenate([result.invalid for result in results]),
        np.concatenate([result.rewards for result in results]),
        {int(start) + j: why for result, start in zip(results, starts, strict=False) for j, why in result.faults.items()},
        sum(result.num_raised for result in results),
        concatenate_numbers([result.measures for result in results], sizes),
        sum(result.num_truncated for result in results),
    )
    after = [state for answer in answers for state in answer.after]
    return Answer(joined, np.concatenate([answer.done for answer in answers]), after)


# --- in several processes --------------------------------------------------------------------------------------------


def divided(env: Environment, rewards_divided: bool = False) -> Environment:
    """Return an environment that all processes of the run call; in a single process, env itself.

    rewards_divided: reward functions are called in each process, with its share of the joint actions.
    """
    if exchange.count() == 1 or isinstance(env, InFirst | InShares):
        return env
    if rewards_divided and isinstance(env, RewardEnvironment):
        return InShares(env)  # type: ignore[return-value]
    if isinstance(env, LockStep) and type(env).step is LockStep.step and type(env).reset is LockStep.reset:
        if isinstance(env.engine, DividedEngine):
            return env
        env = copy.copy(env)
        env.engine = DividedEngine(env.engine)
        return env
    return InFirst(env)


class DividedEngine(Engine):
    """Computes the calls of this process's episodes, and gets the results of the others. States are given to all: where fewer
    episodes are left in a later turn, some continue in another process."""

    def __init__(self, engine: Engine):
        self.engine, self.env = engine, engine.env

    def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[tuple[Any, Observations] | Fault]:
        own = exchange.share(len(tasks))
        return self._of_all(lambda: self.engine.reset(tasks[own], seeds[own]) if tasks[own] else [])

    def step(self, states: Sequence[Any], messages: Texts, seeds: Sequence[int]) -> list[Step | Fault]:
        own = exchange.share(len(states))
        return self._of_all(lambda: self.engine.step(states[own], messages[own], seeds[own]) if states[own] else [])

    def _of_all(self, call: Any) -> list[Any]:
        states = f"the states of {class_name(self.env)}"
        return [result for results in exchange.gather(call, states) for result in results]


class InFirst:
    """An `Environment` that the first process calls, and all get its results. The states of episodes stay there: those of other
    processes are None."""

    def __init__(self, env: Environment):
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Any], list[list[Any]]]:
        return self._call(lambda: self.env.reset(items, rng), rng)

    def step(self, states: Sequence[Any], actions: Texts, rng: np.random.Generator) -> Answer:
        after, answer = self._call(lambda: _split(self.env.step(states, actions, rng)), rng)
        return answer._replace(after=after)

    def observe(self, after: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        return self._call(lambda: self.env.observe(after), None)

    def _call(self, call: Callable[[], tuple[list[Any], Any]], rng: np.random.Generator | None) -> tuple[list[Any], Any]:
        """Call a function of the first process that returns states and something else. Its random numbers are drawn in all."""
        own: list[list[Any]] = []

        def make() -> tuple[Any, Any, Any]:
            states, other = call()
            own.append(states)
            return len(states), other, None if rng is None else rng.bit_generator.state

        count, other, random = exchange.from_first(make)
        if rng is not None:
            rng.bit_generator.state = random
        return own[0] if own else [None] * count, other


class InShares:
    """A `RewardEnvironment` whose reward each process calls with its share of the joint actions. Prompts are written in all."""

    def __init__(self, env: RewardEnvironment):
        self.reward = env.reward
        self.env = copy.copy(env)
        self.env.reward = env.reward.of_part()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, states: Sequence[Any], actions: Texts, rng: np.random.Generator) -> Answer:
        own = exchange.share(len(states))
        seeds = rng.integers(2**63, size=exchange.count())
        own_rng = np.random.default_rng(seeds[exchange.number()])
        mine = [texts[own] for texts in actions]
        answers = exchange.gather(lambda: [self.env.step(states[own], mine, own_rng)] if states[own] else [])
        answer = join_answers([answer for answers_of_one in answers for answer in answers_of_one])
        self.reward.check_errors(answer.result)
        return answer


def _split(answer: Answer) -> tuple[list[Any], Answer]:
    return answer.after, answer._replace(after=[])
