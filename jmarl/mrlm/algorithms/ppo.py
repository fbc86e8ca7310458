"""PPO with a critic per policy (arXiv 1707.06347)."""

from __future__ import annotations

from jmarl.mrlm.algorithms.trainer import PPOConfig as PPOConfig
from jmarl.mrlm.algorithms.trainer import Trainer
from jmarl.mrlm.names import refusing

__getattr__ = refusing(__name__)


class PPOTrainer(Trainer):
    """PPO for one policy, IPPO (arXiv 2011.09533) for a team. Arguments as for `Trainer`."""

    section, algorithm, team_algorithm = "ppo", "ppo", "ippo"
    defaults = {"num_generations": 1}
