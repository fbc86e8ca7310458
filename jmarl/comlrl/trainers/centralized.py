"""Centralized collaboration: one model writes for all roles of a team, in one completion (the single-model baseline).

An adapter writes the joint prompt from the prompts of the roles, and splits a completion into their texts. Formatters, rewards
and metrics see the roles; the model learns from the whole completion. Left out: several turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jmarl.comlrl.config import TrainerConfig, trainer_config
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer
from jmarl.envs.centralized import joint_prompt, parse


class CentralizedComparatorParseError(ValueError):
    """A completion has no section of any role. The texts of all roles are then empty."""


class CentralizedComparatorAdapter(Protocol):
    """What writes the joint prompt and splits a completion."""

    def build_prompt(self, batch_item: Mapping[str, Any], agent_prompts: Sequence[str]) -> str:
        """Return one prompt that asks for the texts of all roles."""
        ...

    def parse_completion(self, completion: str, batch_item: Mapping[str, Any], num_agents: int) -> Sequence[str]:
        """Return the text of each role."""
        ...


class TaggedCentralizedComparatorAdapter:
    """Sections `<agent_0>...</agent_0>`, as in `jmarl.envs.centralized`."""

    def build_prompt(self, batch_item: Mapping[str, Any], agent_prompts: Sequence[str]) -> str:
        del batch_item
        return joint_prompt(agent_prompts)

    def parse_completion(self, completion: str, batch_item: Mapping[str, Any], num_agents: int) -> list[str]:
        del batch_item
        sections = parse(completion, num_agents)
        if sections.parse_error:
            raise CentralizedComparatorParseError(f"no section of {num_agents} agents in {completion!r:.80}")
        return sections.texts


@trainer_config
class CentralizedMAGRPOConfig(TrainerConfig):
    """`TrainerConfig` of MAGRPO with one model for all roles. num_agents is the number of roles."""

    algorithm: str = "magrpo"
    output_dir: str = "runs/centralized_magrpo"


class CentralizedMAGRPOTrainer(MAGRPOTrainer):
    """MAGRPO of one model that writes for all roles."""

    config_class = CentralizedMAGRPOConfig
