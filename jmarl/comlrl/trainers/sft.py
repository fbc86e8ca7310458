"""SFT: imitation of given texts and trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jmarl.comlrl.config import trainer_config
from jmarl.comlrl.trainers.dpo import DPOConfig, DPOTrainer
from jmarl.preferences import load_trajectories


@trainer_config
class SFTConfig(DPOConfig):
    """`TrainerConfig` of imitation of texts and trajectories (bc_weight) and of prediction of observations
    (world_model_weight)."""

    algorithm: str = "sft"
    output_dir: str = "runs/sft"
    min_reward: float | None = None
    """Leave out trajectories whose sum of rewards is lower."""


class SFTTrainer(DPOTrainer):
    """Trains an agent on given texts or trajectories. Arguments as for `DPOTrainer`."""

    config_class = SFTConfig

    def _read(self, dataset: Any, num_agents: int) -> Sequence[Any]:
        return load_trajectories(dataset, self.args.min_reward)  # type: ignore[attr-defined]
