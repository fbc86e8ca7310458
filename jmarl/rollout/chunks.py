"""A turn that is sampled and rewarded in parts: prompts cut, and what came of them put side by side again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jmarl.config import Episodes
from jmarl.envs.base import Answer
from jmarl.envs.reward_values import RewardResult
from jmarl.sampling.generate import Encoded
from jmarl.team import StackSpec, Team
from jmarl.types import Completions


def parts_of(count: int, episodes: Episodes) -> int:
    """In how many equal parts `count` prompts are sampled. Turns that go on from caches go on from whole batches."""
    whole = episodes.history == "append" and episodes.num_turns > 1
    return 1 if whole else math.gcd(count, episodes.sample_parts)


class InTurn:
    """Calls made one after the other, at once or (`beside`) in a thread, while the caller goes on. Leaving waits for them."""

    def __init__(self, beside: bool):
        self.thread = ThreadPoolExecutor(1) if beside else None
        self.called: list[Any] = []

    def call(self, f: Callable, *arguments: Any) -> None:
        self.called.append(self.thread.submit(f, *arguments) if self.thread else f(*arguments))

    def results(self) -> Iterator[Any]:
        return (one.result() if self.thread else one for one in self.called)

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *error: object) -> None:
        if self.thread:
            self.thread.shutdown(cancel_futures=True)


def cut_prompts(team: Team, encoded: Encoded, part: slice) -> Encoded:
    """Of each agent's prompts those of a part."""

    def cut(x: np.ndarray, spec: StackSpec) -> np.ndarray:
        a, roles = len(spec.members), len(spec.members[0])
        return x.reshape(a, roles, -1, *x.shape[2:])[:, :, part].reshape(a, -1, *x.shape[2:])

    return tuple((cut(ids, spec), cut(n, spec)) for spec, (ids, n) in zip(team.stacks, encoded, strict=True))


def joined_completions(team: Team, parts: Sequence[tuple[Completions, ...]]) -> tuple[Completions, ...]:
    """Of each stack the completions of all parts, an agent's side by side; without what later turns could follow."""
    if len(parts) == 1:
        return parts[0]
    out = []
    for spec, of_stack in zip(team.stacks, zip(*parts, strict=True), strict=True):
        a, roles = len(spec.members), len(spec.members[0])

        def join(*xs: np.ndarray, a: int = a, roles: int = roles) -> np.ndarray:
            whole = np.concatenate([x.reshape(a, roles, -1, *x.shape[2:]) for x in xs], 2)
            return whole.reshape(a, -1, *whole.shape[3:])

        steps = np.max([done.steps for done in of_stack], 0)
        rows = jax.tree.map(join, *(done._replace(steps=None, kept=None) for done in of_stack))
        out.append(rows._replace(steps=steps))
    return tuple(out)


def joined_answers(answers: Sequence[Answer]) -> Answer:
    """The answer to the joint actions of all parts."""
    if len(answers) == 1:
        return answers[0]
    results = [answer.result for answer in answers]
    starts = np.cumsum([0, *(len(of.total) for of in results)])
    total, invalid, rewards = (np.concatenate(x) for x in zip(*((r.total, r.invalid, r.rewards) for r in results), strict=True))
    names = dict.fromkeys(name for of in results for name in of.parts)
    result = RewardResult(
        total,
        {name: np.concatenate([part_of(of, name) for of in results]) for name in names},
        invalid,
        rewards,
        {int(start) + j: why for of, start in zip(results, starts, strict=False) for j, why in of.faults.items()},
        sum(of.num_raised for of in results),
    )
    after = [state for answer in answers for state in answer.after]
    return Answer(result, np.concatenate([answer.done for answer in answers]), after)


def part_of(result: RewardResult, name: str) -> np.ndarray:
    """A part of the reward [J]; NaN where there is none of this name."""
    return result.parts.get(name, np.full(len(result.total), np.nan))
