"""One model that writes for all roles of a team: the adapter that joins their prompts and splits its completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jmarl.envs.base import Environment
from jmarl.envs.calls.copies import copied
from jmarl.envs.centralized import Centralized, Sections, joint_prompt, parse


class CentralizedComparatorParseError(ValueError):
    """A completion has no section of any role. The texts of all roles are then empty."""


class CentralizedComparatorAdapter(Protocol):
    """What writes the joint prompt and splits a completion."""

    def build_prompt(self, batch_item: Any, agent_prompts: Sequence[str]) -> str:
        """Return one prompt that asks for the texts of all roles."""
        ...

    def parse_completion(self, completion: str, batch_item: Any, num_agents: int) -> Sequence[str]:
        """Return the text of each role."""
        ...


class TaggedCentralizedComparatorAdapter:
    """Sections `<agent_0>...</agent_0>`, as in `jmarl.envs.centralized`."""

    def build_prompt(self, batch_item: Any, agent_prompts: Sequence[str]) -> str:
        del batch_item
        return joint_prompt(agent_prompts)

    def parse_completion(self, completion: str, batch_item: Any, num_agents: int) -> list[str]:
        del batch_item
        sections = parse(completion, num_agents)
        if sections.parse_error:
            raise CentralizedComparatorParseError(f"no section of {num_agents} agents in {completion!r:.80}")
        return sections.texts


class Roles:
    """Splits completions into the texts of the roles by an adapter, and checks what it returns."""

    def __init__(self, num_roles: int, adapter: CentralizedComparatorAdapter):
        for name in ("build_prompt", "parse_completion"):
            if not callable(getattr(adapter, name, None)):
                raise TypeError(f"centralized_adapter= is a {type(adapter).__name__} without the method {name}")
        self.num_roles, self.adapter = num_roles, adapter

    def split(self, completion: str, item: Mapping[str, Any]) -> list[str]:
        """Return the text of each role."""
        try:
            texts = list(self.adapter.parse_completion(completion, copied(dict(item)), self.num_roles))
        except CentralizedComparatorParseError:
            return [""] * self.num_roles
        if len(texts) != self.num_roles or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"parse_completion returned {texts!r:.120}: return {self.num_roles} texts, one per role")
        return texts

    def join(self, prompts: Sequence[str], item: Mapping[str, Any]) -> str:
        """Return the prompt of the one model."""
        prompt = self.adapter.build_prompt(copied(dict(item)), list(prompts))
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"build_prompt returned {prompt!r:.80}: return a text")
        return prompt


class WithRoles(Centralized):
    """`Centralized` with the prompts and sections of an adapter. The states of `env` have the item of their episode."""

    def __init__(self, env: Environment, roles: Roles):
        super().__init__(env, roles.num_roles)
        self.roles = roles

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Any], list[list[str]]]:
        states, prompts = self.env.reset(items, rng)
        return states, [[self.roles.join(texts, item) for texts, item in zip(zip(*prompts, strict=True), items, strict=True)]]

    def sections(self, text: str, state: Any) -> Sections:
        texts = self.roles.split(text, state.item)
        return Sections(texts, sum(not text for text in texts))


def read_roles(adapter: Any, centralized: bool, num_roles: int, trainer: str) -> Roles | None:
    """Return the roles of a trainer whose one model writes for all; None for a team of agents."""
    if centralized:
        return Roles(num_roles, TaggedCentralizedComparatorAdapter() if adapter is None else adapter)
    if adapter is not None:
        raise TypeError(
            f"centralized_adapter= has no effect for {trainer} of several agents: set collaboration_mode='centralized', or use "
            "CentralizedMAGRPOTrainer"
        )
    return None
