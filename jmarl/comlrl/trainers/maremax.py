"""MAReMax: multi-agent policy gradients whose baseline is the best return of the group."""

from __future__ import annotations

from jmarl.comlrl.config import TrainerConfig, trainer_config
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer


@trainer_config
class MAReMaxConfig(TrainerConfig):
    """`TrainerConfig` of MAReMax: the baseline is the highest return of the group."""

    algorithm: str = "maremax"
    output_dir: str = "runs/maremax"


class MAReMaxTrainer(MAGRPOTrainer):
    """Multi-agent ReMax. Arguments as for `MAGRPOTrainer`."""

    config_class = MAReMaxConfig
