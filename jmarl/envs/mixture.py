"""Train on several environments at once: each task belongs to one of them, and metrics carry its name (host code, no jax)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jmarl.columns import join_numbers
from jmarl.envs.base import Answer, Texts, close, describe, special_tokens
from jmarl.envs.reward_values import RewardResult
from jmarl.envs.vector import LockStep


class Mixture:
    """A weighted mixture of environments for teams of one size.

    The environments share the tasks of a list by weight, to within one task, in an order drawn from the seed. In a step each
    environment answers all its joint actions at once. The parts of the reward are the rewards of the environments, as in
    `math/reward`; their own parts and measures are measures with the name in front, as in `math/solved`. If a turn is sampled
    in parts (`sample_parts`), environments that draw random numbers draw different ones, because they answer other joint
    actions at once.

    Args:
        environments: by name; each a `TextEnvironment`, a `SimulatedEnvironment`, a `LockStep` or another mixture.
        weights: share of the tasks, by name; default: equal.
    """

    def __init__(self, environments: Mapping[str, Any], weights: Mapping[str, float] | None = None):
        self.environments = {
            name: env if callable(getattr(env, "observe", None)) else LockStep(env) for name, env in environments.items()
        }
        sizes = {name: env.num_agents for name, env in self.environments.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"a mixture needs environments for teams of one size, and these have {sizes} agents")
        weights = dict.fromkeys(sizes, 1.0) if weights is None else weights
        if weights.keys() != sizes.keys() or not all(0 < w < np.inf for w in weights.values()):
            raise ValueError(f"weights={dict(weights)}: give a number above 0 for each of {', '.join(sizes)}")
        self.weights = {name: float(weights[name]) for name in sizes}
        members = list(self.environments.values())
        self.num_agents = members[0].num_agents
        self.roles = tuple("|".join(dict.fromkeys(names)) for names in zip(*(env.roles for env in members), strict=True))
        self.reward_range = (min(env.reward_range[0] for env in members), max(env.reward_range[1] for env in members))
        self.special_tokens = tuple(dict.fromkeys(token for env in members for token in special_tokens(env)))
        self.max_turns = max(env.max_turns for env in members)

    def close(self) -> None:
        """End what the environments have started."""
        for env in self.environments.values():
            close(env)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return up to `count` tasks {"environment": name, "task": its task}."""
        shares = np.array(list(self.weights.values())) / sum(self.weights.values()) * count
        sizes = shares.astype(int)
        sizes[np.argsort(sizes - shares, kind="stable")[: count - sizes.sum()]] += 1  # the largest remainders
        tasks = [
            {"environment": name, "task": task}
            for (name, env), size in zip(self.environments.items(), sizes, strict=True)
            for task in (env.tasks(split, int(size), seed) if size else [])
        ]
        return [tasks[i] for i in np.random.default_rng(seed).permutation(len(tasks))]

    def describe(self) -> dict[str, Any]:
        return {name: describe(env) | {"weight": self.weights[name]} for name, env in self.environments.items()}

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Any], list[list[Any]]]:
        for item in items:
            if item.get("environment") not in self.environments or "task" not in item:
                known = ", ".join(self.environments)
                raise ValueError(
                    f"task {item!r:.80} belongs to no environment of this mixture: give environment ({known}) and task"
                )
        starts = {
            name: (indices, self.environments[name].reset([items[i]["task"] for i in indices], rng))
            for name, indices in _indices_by_name([item["environment"] for item in items]).items()
        }
        return self._merge(starts, len(items))

    def step(self, states: Sequence[Any], actions: Texts, rng: np.random.Generator) -> Answer:
        count, num_raised, num_truncated = len(states), 0, 0
        after: list[Any] = [None] * count
        total, rewards = np.full(count, np.nan), np.full((count, self.num_agents), np.nan)
        invalid, done = np.zeros(count, bool), np.zeros(count, bool)
        measures: dict[str, np.ndarray] = {}
        faults: dict[int, str] = {}
        for name, indices in _indices_by_name([name for name, _ in states]).items():
            own_actions = [[texts[i] for i in indices] for texts in actions]
            answer = self.environments[name].step([states[i][1] for i in indices], own_actions, rng)
            result = answer.result
            total[indices], rewards[indices] = result.total, result.rewards
            invalid[indices], done[indices] = result.invalid, answer.done
            for measure, values in join_numbers({"reward": result.total}, result.parts, result.measures).items():
                measures.setdefault(f"{name}/{measure}", np.full(count, np.nan))[indices] = values
            faults |= {indices[j]: f"{name}: {text}" for j, text in result.faults.items()}
            num_raised, num_truncated = num_raised + result.num_raised, num_truncated + result.num_truncated
            for i, own_after in zip(indices, answer.after, strict=True):
                after[i] = (name, own_after)
        faults = dict(sorted(faults.items()))
        result = RewardResult(total, {}, invalid, rewards, faults, num_raised, measures, num_truncated)
        return Answer(result, done, after)

    def observe(self, after: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        nexts = {
            name: (indices, self.environments[name].observe([after[i][1] for i in indices]))
            for name, indices in _indices_by_name([name for name, _ in after]).items()
        }
        return self._merge(nexts, len(after))

    def _merge(self, turns: Mapping[str, tuple[list[int], tuple[list, list]]], count: int) -> tuple[list[Any], list[list[Any]]]:
        """Merge the indices, states and prompts of each environment into states [B] and prompts [N][B]."""
        states: list[Any] = [None] * count
        prompts: list[list[Any]] = [[None] * count for _ in range(self.num_agents)]
        for name, (indices, (own_states, own_prompts)) in turns.items():
            for j, i in enumerate(indices):
                states[i] = (name, own_states[j])
                for n in range(self.num_agents):
                    prompts[n][i] = own_prompts[n][j]
        return states, prompts


def _indices_by_name(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of each name. The names are sorted, so that random numbers do not depend on the order of tasks."""
    return {name: [i for i, other in enumerate(names) if other == name] for name in sorted(set(names))}
