"""MAPPO: PPO with one central critic (arXiv 2103.01955)."""

from __future__ import annotations

from jmarl.comlrl.config import trainer_config
from jmarl.comlrl.peer_settings import RolloutConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer


@trainer_config
class MAPPOConfig(RolloutConfig):
    """`RolloutConfig` of PPO with one central critic."""

    algorithm: str = "mappo"
    output_dir: str = "runs/mappo"


class MAPPOTrainer(MAGRPOTrainer):
    """PPO with one central critic. Arguments as for `MAGRPOTrainer`; critic_model= may be any model."""

    config_class = MAPPOConfig
