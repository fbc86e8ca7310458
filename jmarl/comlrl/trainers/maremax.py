"""MAReMax: multi-agent policy gradients whose baseline is the best return of the group."""

from __future__ import annotations

from typing import Literal

from jmarl.comlrl.config import trainer_config
from jmarl.comlrl.peer_settings import ReinforceConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer


@trainer_config
class MAReMaxConfig(ReinforceConfig):
    """`ReinforceConfig` of MAReMax: the baseline is the highest return of the group."""

    algorithm: str = "maremax"
    advantage_mode: Literal["mean", "raw", "max", "rloo"] = "max"
    output_dir: str = "runs/maremax"


class MAReMaxTrainer(MAGRPOTrainer):
    """Multi-agent ReMax. Arguments as for `MAGRPOTrainer`."""

    config_class = MAReMaxConfig
