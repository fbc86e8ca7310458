"""GRPO: the baseline is the mean of the group (arXiv 2402.03300)."""

from __future__ import annotations

from jmarl.mrlm.algorithms.trainer import Trainer
from jmarl.mrlm.names import refusing

__getattr__ = refusing(__name__)


class GRPOTrainer(Trainer):
    """GRPO for one policy or a team. Arguments as for `Trainer`."""

    section, algorithm, team_algorithm = "grpo", "grpo", "grpo"
    defaults = {"num_generations": 4}
