"""IPPO: independent PPO (arXiv 2011.09533)."""

from __future__ import annotations

from jmarl.comlrl.config import trainer_config
from jmarl.comlrl.peer_settings import RolloutConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer


@trainer_config
class IPPOConfig(RolloutConfig):
    """`RolloutConfig` of independent PPO. Each token has a value, of a separate model per agent (use_separate_critic=True) or
    of a second head of the agent (False)."""

    algorithm: str = "ippo"
    output_dir: str = "runs/ippo"


class IPPOTrainer(MAGRPOTrainer):
    """Independent PPO. Arguments as for `MAGRPOTrainer`; critics start from critic_model= or critics=."""

    config_class = IPPOConfig
