"""PPO with a critic per policy (arXiv 1707.06347)."""

from __future__ import annotations

from typing import Any

from jmarl.mrlm.algorithms.ppo_config import PPOConfig as PPOConfig
from jmarl.mrlm.algorithms.trainer import Trainer
from jmarl.mrlm.names import refuse

__path__: list[str] = []  # its submodules are in names.ALIASES


class PPOTrainer(Trainer):
    """PPO for one policy, IPPO (arXiv 2011.09533) for a team. Arguments as for `Trainer`."""

    section, algorithm, team_algorithm = "ppo", "ppo", "ippo"
    defaults = {"num_generations": 1}


def __getattr__(name: str) -> Any:
    return refuse(__name__, name)
