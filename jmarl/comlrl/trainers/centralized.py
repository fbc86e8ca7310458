"""MAGRPO with one model for all roles of a team, which answers with one completion (the single-model baseline).

An adapter writes the joint prompt from the prompts of the roles, and splits a completion into their texts. Formatters, rewards
and metrics see the roles; the model learns from the whole completion. Left out: several turns.
"""

from __future__ import annotations

from typing import Literal

from jmarl.comlrl.roles import CentralizedComparatorAdapter as CentralizedComparatorAdapter
from jmarl.comlrl.roles import CentralizedComparatorParseError as CentralizedComparatorParseError
from jmarl.comlrl.roles import TaggedCentralizedComparatorAdapter as TaggedCentralizedComparatorAdapter
from jmarl.comlrl.settings.rollouts import ReinforceConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer
from jmarl.config import Count, check


class CentralizedMAGRPOConfig(ReinforceConfig, algorithm="magrpo"):
    """`ReinforceConfig` of MAGRPO with one model for all roles, in one turn. num_agents is the number of roles."""

    output_dir: str = "runs/centralized_magrpo"
    num_turns: Count = 1
    collaboration_mode: Literal["centralized"] = "centralized"

    def __post_init__(self) -> None:
        super().__post_init__()
        check("num_turns", self.num_turns, self.num_turns == 1, "1 for one model that writes for all roles")


class CentralizedMAGRPOTrainer(MAGRPOTrainer):
    """MAGRPO of one model that writes for all num_agents roles. Arguments as for `MAGRPOTrainer`, with one model;
    centralized_adapter= joins and splits the texts of the roles, by default as sections `<agent_0>...</agent_0>`."""

    config_class = CentralizedMAGRPOConfig
