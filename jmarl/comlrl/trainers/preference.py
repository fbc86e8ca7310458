"""CoMLRL's `trainers.preference`: trainers that learn from pairs of the team's own completions.

MADPO learns from pairs that the reward ranks. MARLHF trains a reward model on them, whose scores the team learns from (arXiv
2203.02155).
"""

from __future__ import annotations

import math

from jmarl.comlrl.only_in_comlrl import JointRewardModel as JointRewardModel
from jmarl.comlrl.only_in_comlrl import PreferenceReplayShard as PreferenceReplayShard
from jmarl.comlrl.roles import CentralizedComparatorAdapter as CentralizedComparatorAdapter
from jmarl.comlrl.roles import CentralizedComparatorParseError as CentralizedComparatorParseError
from jmarl.comlrl.roles import TaggedCentralizedComparatorAdapter as TaggedCentralizedComparatorAdapter
from jmarl.comlrl.settings.preference import LearnedRewardConfig, PairsConfig, RoundsSettings
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer
from jmarl.config import Count, Positive


class MADPOConfig(PairsConfig, algorithm="madpo"):
    """`PairsConfig` of multi-agent DPO on pairs of the untrained team's completions. Without num_updates, there are as many
    updates as num_train_epochs passes over the pairs take; if there are fewer pairs, they are used more often."""

    def count_updates(self, num_items: int) -> int:
        return self.updates_on_pairs(self.pairs_of(num_items))


class MADPOTrainer(MAGRPOTrainer):
    """Multi-agent DPO: the reward ranks the team's completions, and the team learns from the pairs. Arguments as for
    `MAGRPOTrainer`."""

    config_class = MADPOConfig


class MADPOIterConfig(RoundsSettings, PairsConfig, algorithm="madpo_iter"):
    """`PairsConfig` of multi-agent DPO in rounds, each on pairs of the team's completions against a comparator's."""

    num_train_epochs: Positive = 1

    def updates_per_round(self, num_items: int) -> int:
        return self.round_updates or self.updates_on_pairs(self.pairs_of_round(num_items))


class MADPOIterTrainer(MAGRPOTrainer):
    """Multi-agent DPO in rounds. Arguments as for `MAGRPOTrainer`."""

    config_class = MADPOIterConfig


class MARLHFConfig(LearnedRewardConfig, algorithm="marlhf"):
    """`LearnedRewardConfig` with one reward model, of pairs of the untrained team's completions."""


class MARLHFTrainer(MAGRPOTrainer):
    """A reward model of the team's ranked completions, and a policy gradient on its scores. Arguments as for `MAGRPOTrainer`;
    the reward model starts from reward_model=."""

    config_class = MARLHFConfig


class MARLHFIterConfig(RoundsSettings, LearnedRewardConfig, algorithm="marlhf_iter"):
    """`LearnedRewardConfig` in rounds. Each makes new pairs and trains the reward model further on them."""

    num_train_epochs: Positive = 2
    reward_num_train_epochs: Count = 2
    preference_scoring_reward: str = "task"

    def updates_per_round(self, num_items: int) -> int:
        return self.round_updates or math.ceil(self.num_train_epochs * math.ceil(num_items / self.prompts_per_update))


class MARLHFIterTrainer(MAGRPOTrainer):
    """MARLHF in rounds. Arguments as for `MARLHFTrainer`."""

    config_class = MARLHFIterConfig
