"""MARLOO: multi-agent policy gradients with a leave-one-out baseline (RLOO, arXiv 2402.14740)."""

from __future__ import annotations

from typing import Literal

from jmarl.comlrl.config import trainer_config
from jmarl.comlrl.peer_settings import ReinforceConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer


@trainer_config
class MARLOOConfig(ReinforceConfig):
    """`ReinforceConfig` of MARLOO: the baseline of a completion is the mean return of the other completions of its group."""

    algorithm: str = "marloo"
    advantage_mode: Literal["mean", "raw", "max", "rloo"] = "rloo"
    output_dir: str = "runs/marloo"


class MARLOOTrainer(MAGRPOTrainer):
    """Multi-agent leave-one-out. Arguments as for `MAGRPOTrainer`."""

    config_class = MARLOOConfig
