"""CoMLRL's `trainers.reinforce`: trainers without a critic, by the baseline of their advantages."""

from __future__ import annotations

from jmarl.comlrl.settings.rollouts import Advantage, ReinforceConfig
from jmarl.comlrl.trainers.centralized import CentralizedMAGRPOConfig as CentralizedMAGRPOConfig
from jmarl.comlrl.trainers.centralized import CentralizedMAGRPOTrainer as CentralizedMAGRPOTrainer
from jmarl.comlrl.trainers.magrpo import MAGRPOConfig as MAGRPOConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer as MAGRPOTrainer


class MAREINFORCEConfig(ReinforceConfig, algorithm="mareinforce"):
    """`ReinforceConfig` of MAREINFORCE: no baseline."""

    advantage_mode: Advantage = "raw"


class MAREINFORCETrainer(MAGRPOTrainer):
    """Multi-agent REINFORCE. Arguments as for `MAGRPOTrainer`."""

    config_class = MAREINFORCEConfig


class MAReMaxConfig(ReinforceConfig, algorithm="maremax"):
    """`ReinforceConfig` of MAReMax: the baseline is the highest return of the group."""

    advantage_mode: Advantage = "max"


class MAReMaxTrainer(MAGRPOTrainer):
    """Multi-agent ReMax. Arguments as for `MAGRPOTrainer`."""

    config_class = MAReMaxConfig


class MARLOOConfig(ReinforceConfig, algorithm="marloo"):
    """`ReinforceConfig` of MARLOO: the baseline of a completion is the mean return of the other completions of its group
    (RLOO, arXiv 2402.14740)."""

    advantage_mode: Advantage = "rloo"


class MARLOOTrainer(MAGRPOTrainer):
    """Multi-agent leave-one-out. Arguments as for `MAGRPOTrainer`."""

    config_class = MARLOOConfig
