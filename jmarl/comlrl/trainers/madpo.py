"""MADPO: multi-agent DPO on pairs of the team's own completions, ranked by the reward."""

from __future__ import annotations

import math

from jmarl.algorithms import resolve
from jmarl.comlrl.config import TrainerConfig, trainer_config
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer
from jmarl.config import TrainConfig


@trainer_config
class PreferenceConfig(TrainerConfig):
    """`TrainerConfig` of algorithms that learn from pairs of the team's completions."""

    num_generations: int = 16
    """Completions of each prompt and agent, of which pairs are made."""
    num_train_epochs: float = 1

    def count_updates_on_pairs(self, num_items: int) -> int:
        """Return the number of updates in `num_train_epochs` passes over pairs_per_prompt pairs of each item, in batches of
        batch_size. If there are fewer pairs, they are used more often."""
        settings = resolve(self._with_updates(1)).preference
        limit, size = settings.pairs_per_prompt or self.num_generations, settings.batch_size or 1
        return math.ceil(self.num_train_epochs * num_items * limit / size)


@trainer_config
class MADPOConfig(PreferenceConfig):
    """`PreferenceConfig` of multi-agent DPO on pairs of the untrained team's completions. Without num_updates, there are as
    many updates as num_train_epochs passes over pairs_per_prompt pairs of each item take."""

    algorithm: str = "madpo"
    output_dir: str = "runs/madpo"

    def count_updates(self, num_items: int) -> int:
        return self.count_updates_on_pairs(num_items)


@trainer_config
class MADPOIterConfig(PreferenceConfig):
    """`PreferenceConfig` of multi-agent DPO in rounds, each on pairs of the team's completions against a comparator's."""

    algorithm: str = "madpo_iter"
    output_dir: str = "runs/madpo_iter"
    num_prompts: int = 8
    num_iterations: int = 6
    """Rounds, if num_updates is not set. Each round then has as many updates as num_train_epochs passes over its pairs take."""

    def train_config(self, num_items: int) -> TrainConfig:
        config = super().train_config(num_items)
        return config if self.num_updates else config.replace(round_updates=self._updates_per_round(num_items))

    def count_updates(self, num_items: int) -> int:
        return self.num_iterations * self._updates_per_round(num_items)

    def _updates_per_round(self, num_items: int) -> int:
        return self.round_updates or self.count_updates_on_pairs(min(num_items, self.num_prompts))


class MADPOTrainer(MAGRPOTrainer):
    """Multi-agent DPO: the reward ranks the team's completions, and the team learns from the pairs. Arguments as for
    `MAGRPOTrainer`."""

    config_class = MADPOConfig


class MADPOIterTrainer(MAGRPOTrainer):
    """Multi-agent DPO in rounds. Arguments as for `MAGRPOTrainer`."""

    config_class = MADPOIterConfig
