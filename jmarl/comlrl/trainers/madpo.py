"""MADPO: multi-agent DPO on pairs of the team's own completions, ranked by the reward."""

from __future__ import annotations

from jmarl.comlrl.config import trainer_config
from jmarl.comlrl.preference_settings import PairsConfig, RoundsSettings
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer
from jmarl.config import Positive


@trainer_config
class MADPOConfig(PairsConfig):
    """`PairsConfig` of multi-agent DPO on pairs of the untrained team's completions. Without num_updates, there are as many
    updates as num_train_epochs passes over the pairs take; if there are fewer pairs, they are used more often."""

    algorithm: str = "madpo"
    output_dir: str = "runs/madpo"

    def count_updates(self, num_items: int) -> int:
        return self.updates_on_pairs(self.pairs_of(num_items))


@trainer_config
class MADPOIterConfig(RoundsSettings, PairsConfig):
    """`PairsConfig` of multi-agent DPO in rounds, each on pairs of the team's completions against a comparator's."""

    algorithm: str = "madpo_iter"
    output_dir: str = "runs/madpo_iter"
    num_train_epochs: Positive = 1

    def updates_per_round(self, num_items: int) -> int:
        return self.round_updates or self.updates_on_pairs(self.pairs_of_round(num_items))


class MADPOTrainer(MAGRPOTrainer):
    """Multi-agent DPO: the reward ranks the team's completions, and the team learns from the pairs. Arguments as for
    `MAGRPOTrainer`."""

    config_class = MADPOConfig


class MADPOIterTrainer(MAGRPOTrainer):
    """Multi-agent DPO in rounds. Arguments as for `MAGRPOTrainer`."""

    config_class = MADPOIterConfig
