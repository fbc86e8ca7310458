"""Several environments as one: tasks of each by weight, metrics of each under its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jmarl.envs.base import Answer, describe
from jmarl.envs.reward_values import RewardResult
from jmarl.envs.vector import LockStep


class Mixture:
    """environments: by name, for teams of one size; each a `TextEnvironment`, one in MRLM's words, an engine in `LockStep`, or
    another mixture. weights: of tasks, by name; default: equal.

    The tasks of a list are shared out so that each environment has its share of it to within one task, in an order drawn from
    the seed. In a step each environment answers its joint actions at once. A metric has its environment's name in front, as in
    `math/correct`, and `math/reward` is its reward. Environments that draw random numbers draw others where a turn is sampled
    in parts (`sample_parts`), because other joint actions are then answered at once.
    """

    def __init__(self, environments: Mapping[str, Any], weights: Mapping[str, float] | None = None):
        self.environments = {
            name: env if callable(getattr(env, "observe", None)) else LockStep(env) for name, env in environments.items()
        }
        sizes = {name: env.num_agents for name, env in self.environments.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"a mixture is of environments for teams of one size, and these have {sizes} agents")
        weights = dict.fromkeys(sizes, 1.0) if weights is None else weights
        if weights.keys() != sizes.keys() or not all(0 < w < np.inf for w in weights.values()):
            raise ValueError(f"weights={dict(weights)}: give a number above 0 for each of {', '.join(sizes)}")
        self.weights = {name: float(weights[name]) for name in sizes}
        each = list(self.environments.values())
        self.num_agents = each[0].num_agents
        self.roles = tuple("|".join(dict.fromkeys(names)) for names in zip(*(env.roles for env in each), strict=True))
        self.reward_range = (min(env.reward_range[0] for env in each), max(env.reward_range[1] for env in each))
        self.max_turns = max(env.max_turns for env in each)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        share = np.array(list(self.weights.values())) / sum(self.weights.values()) * count
        sizes = share.astype(int)
        sizes[np.argsort(sizes - share, kind="stable")[: count - sizes.sum()]] += 1  # the largest remainders
        found = [
            {"environment": name, "task": task}
            for (name, env), size in zip(self.environments.items(), sizes, strict=True)
            for task in (env.tasks(split, int(size), seed) if size else [])
        ]
        return [found[i] for i in np.random.default_rng(seed).permutation(len(found))]

    def describe(self) -> dict[str, Any]:
        return {name: describe(env) | {"weight": self.weights[name]} for name, env in self.environments.items()}

    def reset(self, items, rng):
        for item in items:
            if item.get("environment") not in self.environments or "task" not in item:
                known = ", ".join(self.environments)
                raise ValueError(f"task {item!r:.80} is of no environment of this mixture: give environment ({known}) and task")
        names = [item["environment"] for item in items]
        return self._begun(names, lambda env, of: env.reset([items[i]["task"] for i in of], rng))

    def step(self, states, actions, rng):
        count, parts, faults, raised = len(states), dict[str, np.ndarray](), dict[int, str](), 0
        total, invalid, done = np.full(count, np.nan), np.zeros(count, bool), np.zeros(count, bool)
        rewards, after = np.full((count, self.num_agents), np.nan), _empty(count)
        for name, of in _by_name([name for name, _ in states]).items():
            chosen = [[texts[i] for i in of] for texts in actions]
            answer = self.environments[name].step([states[i][1] for i in of], chosen, rng)
            result = answer.result
            total[of], invalid[of], done[of], rewards[of] = result.total, result.invalid, answer.done, result.rewards
            for part, values in (*result.parts.items(), ("reward", result.total)):
                parts.setdefault(f"{name}/{part}", np.full(count, np.nan))[of] = values
            faults |= {of[j]: f"{name}: {why}" for j, why in result.faults.items()}
            raised += result.num_raised
            for i, follows in zip(of, answer.after, strict=True):
                after[i] = (name, follows)
        return Answer(RewardResult(total, parts, invalid, rewards, dict(sorted(faults.items())), raised), done, after)

    def observe(self, after):
        return self._begun([name for name, _ in after], lambda env, of: env.observe([after[i][1] for i in of]))

    def _begun(self, names: Sequence[str], ask: Callable[[Any, list[int]], tuple[list, list]]) -> tuple[list, list]:
        """States [B] and prompts [N][B] of what each environment answers for its own ones."""
        states, prompts = _empty(len(names)), [_empty(len(names)) for _ in range(self.num_agents)]
        for name, of in _by_name(names).items():
            found, texts = ask(self.environments[name], of)
            for j, i in enumerate(of):
                states[i] = (name, found[j])
                for n in range(self.num_agents):
                    prompts[n][i] = texts[n][j]
        return states, prompts


def _empty(count: int) -> list[Any]:
    return [None] * count


def _by_name(names: Sequence[str]) -> dict[str, list[int]]:
    """Where each name stands; in the order of names, so that random numbers do not depend on that of the tasks' kinds."""
    return {name: [i for i, other in enumerate(names) if other == name] for name in sorted(set(names))}
