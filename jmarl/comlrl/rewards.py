"""Rewards with the signatures that CoMLRL 1.4.3 accepts, as functions that `RewardFunction` accepts.

A reward takes one list of completions per agent, or before them the prompts (one required parameter more than agents, whatever
its name), or a single list of all agents' lists. `prompts`, `batch_items` and `rng` are recognized by name wherever they stand.
Left out: a parameter with a default never takes completions, and an argument is never left out after a TypeError.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jmarl.envs.reward_values import as_list
from jmarl.envs.rewards import OPTIONAL_NAMES, bind_completions


def bind_rewards(functions: Callable | Sequence[Callable], num_agents: int, per_agent: bool) -> Callable | list[Callable]:
    """Return the rewards of a trainer as functions of one list of completions per agent.

    per_agent: rewards get `prompts` of one joint action with one entry per agent, and may return one number per agent, as in
        actor-critics.
    """
    if callable(functions):
        return bind_reward(functions, num_agents, per_agent)
    return [bind_reward(function, num_agents, per_agent) for function in functions]


def bind_reward(function: Callable, num_agents: int, per_agent: bool) -> Callable:
    """Return one reward as a function of one list of completions per agent. See `bind_rewards`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # RewardFunction says what to do
        return function
    lists = [p for p in parameters if p.name not in OPTIONAL_NAMES and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    prompts_first = not variadic and sum(p.default is p.empty for p in lists) == num_agents + 1
    one_list = not variadic and len(lists) == 1 < num_agents
    if not (prompts_first or one_list or per_agent):
        return function
    name = getattr(function, "__name__", type(function).__name__)
    call = bind_completions(function, name, num_agents + prompts_first if not one_list else 1)

    def reward(*completions: list[str], prompts: list[Any], batch_items: list[Any], rng: Any) -> Any:
        prompts = prompts[0] if per_agent else prompts
        texts = [prompts, *completions] if prompts_first else [list(completions)] if one_list else list(completions)
        value = call(texts, {"prompts": prompts, "batch_items": batch_items, "rng": rng})
        entries = as_list(value) if per_agent else None
        return [entries] if entries is not None and len(entries) == num_agents > 1 else value

    reward.__name__ = name
    return reward
