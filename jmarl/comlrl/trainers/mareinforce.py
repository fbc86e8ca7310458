"""MAREINFORCE: multi-agent REINFORCE without a baseline."""

from __future__ import annotations

from typing import Literal

from jmarl.comlrl.config import trainer_config
from jmarl.comlrl.peer_settings import ReinforceConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer


@trainer_config
class MAREINFORCEConfig(ReinforceConfig):
    """`ReinforceConfig` of MAREINFORCE: no baseline."""

    algorithm: str = "mareinforce"
    advantage_mode: Literal["mean", "raw", "max", "rloo"] = "raw"
    output_dir: str = "runs/mareinforce"


class MAREINFORCETrainer(MAGRPOTrainer):
    """Multi-agent REINFORCE. Arguments as for `MAGRPOTrainer`."""

    config_class = MAREINFORCEConfig
