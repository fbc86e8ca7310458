"""MARLHF: a reward model learns the ranking of the team's completions, and the team learns from its scores (arXiv
2203.02155)."""

from __future__ import annotations

from jmarl.comlrl.config import trainer_config
from jmarl.comlrl.only_in_comlrl import refused_class
from jmarl.comlrl.trainers.madpo import MADPOIterConfig as MADPOIterConfig
from jmarl.comlrl.trainers.madpo import MADPOIterTrainer as MADPOIterTrainer
from jmarl.comlrl.trainers.madpo import PreferenceConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer

JointRewardModel = refused_class("JointRewardModel")
PreferenceReplayShard = refused_class("PreferenceReplayShard")


@trainer_config
class MARLHFConfig(PreferenceConfig):
    """`PreferenceConfig` of training on a learned reward. rl_algorithm names the algorithm that trains the team. Updates are
    those of the team, counted by prompts as in `TrainerConfig`."""

    algorithm: str = "marlhf"
    output_dir: str = "runs/marlhf"


@trainer_config
class MARLHFIterConfig(MARLHFConfig):
    """`MARLHFConfig` in rounds of round_updates updates. Each round makes new pairs and trains the reward model further."""

    algorithm: str = "marlhf_iter"
    output_dir: str = "runs/marlhf_iter"


class MARLHFTrainer(MAGRPOTrainer):
    """A reward model of the team's ranked completions, and a policy gradient on its scores. Arguments as for `MAGRPOTrainer`;
    the reward model starts from reward_model=."""

    config_class = MARLHFConfig


class MARLHFIterTrainer(MAGRPOTrainer):
    """MARLHF in rounds. Arguments as for `MARLHFTrainer`."""

    config_class = MARLHFIterConfig
