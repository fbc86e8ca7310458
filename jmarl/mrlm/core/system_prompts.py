"""Put the system prompt of each policy before what it reads in an environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmarl.envs.base import Answer, Texts, describe, special_tokens
from jmarl.models.hub.messages import ChatPrompt, as_prompt, with_instruction

SystemPrompt = tuple[str, bool]  # the text, and whether it is a message of a chat


class WithSystemPrompts:
    """An `Environment` whose prompts begin with a system prompt of each agent.

    Args:
        env: the environment.
        prompts: of each agent [N]; None: none.
        first_only: whether prompts of later turns continue a conversation, which has the system prompt already.
    """

    def __init__(self, env: Any, prompts: Sequence[SystemPrompt | None], first_only: bool):
        self.env, self.prompts, self.first_only = env, list(prompts), first_only
        self.num_agents, self.roles, self.special_tokens = env.num_agents, env.roles, special_tokens(env)
        self.max_turns, self.reward_range = env.max_turns, env.reward_range

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return self.env.tasks(split, count, seed)

    def describe(self) -> dict[str, Any]:
        return describe(self.env) | {"system_prompts": self.prompts}

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Any], list[list[Any]]]:
        states, prompts = self.env.reset(items, rng)
        return states, self._prefixed(prompts)

    def step(self, states: Sequence[Any], actions: Texts, rng: np.random.Generator) -> Answer:
        return self.env.step(states, actions, rng)

    def observe(self, after: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        states, prompts = self.env.observe(after)
        return states, prompts if self.first_only else self._prefixed(prompts)

    def _prefixed(self, prompts: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return [[prefixed(system, text) for text in texts] for system, texts in zip(self.prompts, prompts, strict=True)]


def prefixed(system: SystemPrompt | None, prompt: Any) -> Any:
    """Return a prompt after a system prompt. A prompt that is None, of an agent that does not act, stays None."""
    prompt = as_prompt(prompt)
    if system is None or prompt is None:
        return prompt
    text, chat = system
    if chat and not isinstance(prompt, ChatPrompt):
        prompt = ChatPrompt([{"role": "user", "content": prompt}])
    return with_instruction(text, prompt)
