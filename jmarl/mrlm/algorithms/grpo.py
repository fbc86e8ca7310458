"""GRPO: the baseline is the mean of the group (arXiv 2402.03300)."""

from __future__ import annotations

from typing import Any

from jmarl.mrlm.algorithms.trainer import Trainer
from jmarl.mrlm.names import refuse

__path__: list[str] = []  # its submodules are in names.ALIASES


class GRPOTrainer(Trainer):
    """GRPO for one policy or a team. Arguments as for `Trainer`."""

    section, algorithm, team_algorithm = "grpo", "grpo", "grpo"
    defaults = {"num_generations": 4}


def __getattr__(name: str) -> Any:
    return refuse(__name__, name)
