"""MARLHF: a reward model learns the ranking of the team's completions, and the team learns from its scores (arXiv
2203.02155)."""

from __future__ import annotations

import math

from jmarl.comlrl.config import trainer_config
from jmarl.comlrl.only_in_comlrl import refused_class
from jmarl.comlrl.preference_settings import LearnedRewardConfig, RoundsSettings
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer
from jmarl.config import Count, Positive

JointRewardModel = refused_class("JointRewardModel")


@trainer_config
class MARLHFConfig(LearnedRewardConfig):
    """`LearnedRewardConfig` with one reward model, of pairs of the untrained team's completions."""

    algorithm: str = "marlhf"
    output_dir: str = "runs/marlhf"


@trainer_config
class MARLHFIterConfig(RoundsSettings, LearnedRewardConfig):
    """`LearnedRewardConfig` in rounds. Each makes new pairs and trains the reward model further on them."""

    algorithm: str = "marlhf_iter"
    output_dir: str = "runs/marlhf_iter"
    num_train_epochs: Positive = 2
    reward_num_train_epochs: Count = 2
    preference_scoring_reward: str = "task"

    def updates_per_round(self, num_items: int) -> int:
        return self.round_updates or math.ceil(self.num_train_epochs * math.ceil(num_items / self.prompts_per_update))


class MARLHFTrainer(MAGRPOTrainer):
    """A reward model of the team's ranked completions, and a policy gradient on its scores. Arguments as for `MAGRPOTrainer`;
    the reward model starts from reward_model=."""

    config_class = MARLHFConfig


class MARLHFIterTrainer(MAGRPOTrainer):
    """MARLHF in rounds. Arguments as for `MARLHFTrainer`."""

    config_class = MARLHFIterConfig
