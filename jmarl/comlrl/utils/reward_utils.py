"""Calls of reward functions, at CoMLRL's module path. A trainer calls rewards itself; see `jmarl.envs.rewards`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jmarl.comlrl.rewards import bind_rewards
from jmarl.envs.rewards import RewardFunction

F = TypeVar("F", bound=Callable[..., Any])


def call_reward_function(
    reward_func: Callable,
    prompts: Sequence[str],
    agent_completions: Sequence[Sequence[str]],
    *,
    num_agents: int,
    batch_items: Sequence[Mapping[str, Any]] | None = None,
    signature: inspect.Signature | None = None,
) -> list[float]:
    """Return the reward of each joint action, as a trainer would compute it (the mean over agents).

    agent_completions: [N][J]. prompts, batch_items: one of each for all joint actions, or one per joint action.
    """
    del signature  # it is that of the function
    count = len(agent_completions[0])
    items = [dict(item) for item in batch_items] if batch_items else [{}]
    prompts = list(prompts) * count if len(prompts) == 1 else list(prompts)
    items = items * count if len(items) == 1 else items
    function = RewardFunction(bind_rewards(reward_func, num_agents, False), num_agents=num_agents)
    result = function([list(texts) for texts in agent_completions], prompts, items, np.random.default_rng(0))
    return [float(x) for x in result.total]


def normalize_reward_lengths(rewards: Sequence[float], *, num_agents: int, num_generations: int, algorithm: str) -> list[float]:
    """Return rewards as a list with one number per agent or per generation. A single number goes to every agent."""
    values = [float(reward) for reward in rewards]
    if num_agents == 1 or len(values) in (num_agents, num_generations):
        return values
    if len(values) == 1:
        return values * num_agents
    raise ValueError(
        f"a reward of {algorithm} returned {len(values)} numbers for {num_agents} agents: return one, or one per agent"
    )


def resolve_reward_range(reward_func: Callable) -> tuple[float, float] | None:
    """Return the range that a reward declares in its attribute reward_range; None without one."""
    bounds = vars(reward_func).get("reward_range") if hasattr(reward_func, "__dict__") else None
    if bounds is None:
        return None
    if isinstance(bounds, str) or len(bounds) != 2:
        raise ValueError(f"reward_range={bounds!r} is not allowed: give (smallest, largest)")
    low, high = map(float, bounds)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"reward_range={bounds!r} is not allowed: give two finite numbers, the smaller one first")
    return low, high


def set_reward_range(reward_func: F, minimum: float, maximum: float) -> F:
    """Declare the range of a reward's values, and return the reward."""
    reward_func.reward_range = (float(minimum), float(maximum))  # type: ignore[attr-defined]
    resolve_reward_range(reward_func)
    return reward_func
