"""Rewards with the signatures that CoMLRL 1.4.3 accepts, as functions with signatures that `RewardFunction` reads.

A reward takes one list of completions per agent; or before them the prompts, one required parameter more than agents, whatever
its name; or a single list of all agents' lists. Parameters with a default take completions only if there are as many parameters
as agents. `prompts` and `batch_items` are recognized by name wherever they stand, and `**kwargs` gets these two only. Left out:
a call that raises a TypeError is not repeated with fewer arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

from jmarl.envs.reward_values import as_list
from jmarl.envs.rewards import unique_names

KEYWORDS = ("prompts", "batch_items")  # that CoMLRL passes


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
        own = inspect.signature(function)
    except (TypeError, ValueError):  # `RewardFunction` says what to do
        return function
    signature, one_list = reward_signature(function, own, num_agents)
    if signature == own and not per_agent:
        return function

    def reward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if per_agent and "prompts" in bound.arguments:
            bound.arguments["prompts"] = bound.arguments["prompts"][0]
        value = function(list(bound.args), **bound.kwargs) if one_list else function(*bound.args, **bound.kwargs)
        if not per_agent:
            return value
        return values_later(value, num_agents) if inspect.isawaitable(value) else values_per_agent(value, num_agents)

    (reward.__name__,) = unique_names([function])
    reward.__signature__ = signature  # type: ignore[attr-defined]
    return reward


def reward_signature(function: Callable, own: Signature, num_agents: int) -> tuple[Signature, bool]:
    """Return the signature by which `RewardFunction` passes a reward its arguments, and whether the function takes all lists of
    completions as one."""
    fixed = function.keywords if isinstance(function, functools.partial) else ()
    parameters = [p for p in own.parameters.values() if p.name not in fixed]
    lists = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in (*KEYWORDS, "rng")
    ]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = sum(p.default is p.empty for p in lists)
    one_list = not variadic and len(lists) == 1 < num_agents
    if one_list:
        others = [p.replace(kind=p.KEYWORD_ONLY) if p.kind is not p.VAR_KEYWORD else p for p in parameters if p is not lists[0]]
        parameters = [lists[0].replace(kind=Parameter.VAR_POSITIONAL), *others]
    elif not variadic and required == num_agents + 1 and "prompts" not in own.parameters:
        parameters = [p.replace(name="prompts") if p is lists[0] else p for p in parameters]
    elif required < num_agents == len(lists):
        always = (*KEYWORDS, "rng")  # what a reward gets whether it has a default or not
        parameters = [p.replace(default=p.empty) if p in lists or p.name in always else p for p in parameters]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        named = [Parameter(name, Parameter.KEYWORD_ONLY) for name in KEYWORDS if name not in [p.name for p in parameters]]
        parameters = [p for p in parameters if p.kind is not p.VAR_KEYWORD] + named
    return own.replace(parameters=parameters), one_list


def values_per_agent(value: Any, num_agents: int) -> Any:
    """Return one number per agent as the values of one joint action, and any other value as it is."""
    entries = as_list(value)
    return [entries] if entries is not None and len(entries) == num_agents > 1 else value


async def values_later(value: Any, num_agents: int) -> Any:
    return values_per_agent(await value, num_agents)
