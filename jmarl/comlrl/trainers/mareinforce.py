"""MAREINFORCE: multi-agent REINFORCE without a baseline."""

from __future__ import annotations

from jmarl.comlrl.config import TrainerConfig, trainer_config
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer


@trainer_config
class MAREINFORCEConfig(TrainerConfig):
    """`TrainerConfig` of MAREINFORCE: no baseline."""

    algorithm: str = "mareinforce"
    output_dir: str = "runs/mareinforce"


class MAREINFORCETrainer(MAGRPOTrainer):
    """Multi-agent REINFORCE. Arguments as for `MAGRPOTrainer`."""

    config_class = MAREINFORCEConfig
