"""Several environments as one: tasks of each by weight, metrics of each by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jmarl.lockstep import Step, TextEnvironment


class Mixture(TextEnvironment):
    """environments: by name; they must be for teams of one size. weights: of tasks, by name; default: equal.

    The tasks of a list are shared out so that each environment has its share of it to within one task, in an order drawn from
    the seed. A metric of an environment has its name in front: `math/correct`.
    """

    def __init__(self, environments: Mapping[str, TextEnvironment], weights: Mapping[str, float] | None = None):
        sizes = {name: env.num_agents for name, env in environments.items()}
        if not sizes or len(set(sizes.values())) > 1:
            raise ValueError(f"a mixture is of environments for teams of one size, and these have {sizes} agents")
        self.environments = dict(environments)
        self.weights = {name: 1.0 for name in sizes} if weights is None else dict(weights)
        if self.weights.keys() != sizes.keys() or not all(0 < w < np.inf for w in self.weights.values()):
            raise ValueError(f"weights={self.weights}: give a number above 0 for each of {', '.join(sizes)}")
        each = list(self.environments.values())
        self.roles = tuple("|".join(dict.fromkeys(names)) for names in zip(*(env.roles for env in each), strict=True))
        self.reward_range = (min(env.reward_range[0] for env in each), max(env.reward_range[1] for env in each))
        self.max_turns = max(env.max_turns for env in each)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        share = np.array(list(self.weights.values())) / sum(self.weights.values()) * count
        sizes = share.astype(int)
        for i in np.argsort(sizes - share, kind="stable")[: count - sizes.sum()]:  # the largest remainders
            sizes[i] += 1
        found = [
            {"environment": name, "task": task}
            for (name, env), size in zip(self.environments.items(), sizes, strict=True)
            if size
            for task in env.tasks(split, int(size), seed)
        ]
        return [found[i] for i in np.random.default_rng(seed).permutation(len(found))]

    def reset(self, task, rng):
        if task.get("environment") not in self.environments:
            raise ValueError(f"task {task!r:.80} is of no environment of this mixture: {', '.join(self.environments)}")
        state, observations = self.environments[task["environment"]].reset(task["task"], rng)
        return (task["environment"], state), observations

    def step(self, state, messages, rng):
        name, of = state
        step = self.environments[name].step(of, messages, rng)
        info = {f"{name}/{key}": value for key, value in step.info.items()} | {f"{name}/reward": float(np.mean(step.reward))}
        return Step((name, step.state), step.observations, step.reward, step.done, info)

    def render(self, state: Any) -> str:
        name, of = state
        return self.environments[name].render(of)

    def describe(self) -> dict[str, Any]:
        return {name: env.describe() | {"weight": self.weights[name]} for name, env in self.environments.items()}
