"""`build_formatters` at its module path in CoMLRL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jmarl.envs.reward_environment import Formatter, bind_formatter


def build_formatters(
    formatters: Formatter | Sequence[Formatter] | None, num_agents: int, *, pass_none_external_prompts: bool = True
) -> list[Callable[..., Any]]:
    """Return a function of (item, external_prompts=None) for each agent.

    formatters: one for all agents, one per agent, or None: the item's prompt, and in later turns the transition's text. A
    formatter gets external_prompts if it has that parameter; with pass_none_external_prompts also where it is None.
    """
    if formatters is None:
        return [_prompt_of_item] * num_agents
    per_agent = [formatters] * num_agents if callable(formatters) else list(formatters)
    if len(per_agent) != num_agents:
        raise ValueError(f"{len(per_agent)} formatters for {num_agents} agents: give one for all, or one per agent")
    bound = [bind_formatter(formatter, every_turn=True) for formatter in per_agent]
    del pass_none_external_prompts  # the default of a formatter's parameter is None in both cases
    return [_with_default(formatter) for formatter in bound]


def _prompt_of_item(item: dict, external_prompts: Any = None) -> Any:
    return item.get("prompt", "") if external_prompts is None else external_prompts


def _with_default(bound: Callable[[dict, Any], Any]) -> Callable[..., Any]:
    return lambda item, external_prompts=None: bound(item, external_prompts)
