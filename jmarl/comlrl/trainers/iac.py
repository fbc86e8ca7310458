"""IAC: independent actor-critics, one critic per agent (CoLLM-DC, arXiv 2601.21972)."""

from __future__ import annotations

from jmarl.comlrl.config import TrainerConfig, trainer_config
from jmarl.comlrl.only_in_comlrl import refused_class
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer

RolloutSample = refused_class("RolloutSample")


@trainer_config
class IACConfig(TrainerConfig):
    """`TrainerConfig` of independent actor-critics. As in CoMLRL, one completion per prompt. The critic values the prompt
    (critic_type="v") or, with 2 or more completions, the prompt with a completion ("q")."""

    algorithm: str = "iac"
    num_generations: int = 1
    output_dir: str = "runs/iac"


class ActorCriticTrainerBase(MAGRPOTrainer):
    """The base of trainers with critics. Arguments as for `MAGRPOTrainer`; critics start from critic_model= or critics=."""


class IACTrainer(ActorCriticTrainerBase):
    """Independent actor-critics. Arguments as for `MAGRPOTrainer`; critics start from critic_model= or critics=."""

    config_class = IACConfig
