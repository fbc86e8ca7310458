"""The team that a trainer holds, with its current weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax

from jmarl.team import Team, save_team


class TrainedTeam:
    """What all trainers share: a team, its weights between runs, and how they are saved."""

    team: Team
    _params: list[Any]

    @property
    def params(self) -> list[Any]:
        """The current parameters [A, ...] of each stack. Raises RuntimeError if a training that did not finish has deleted
        them."""
        if any(x.is_deleted() for x in jax.tree.leaves(self._params)):  # updates are made in place
            raise RuntimeError(
                "train() did not finish, and the weights it was changing are lost: make a new trainer; with resume=True in its "
                "settings it continues from the last checkpoint"
            )
        return self._params

    def save_model(self, output_dir: str | os.PathLike) -> None:
        """Write each agent as a Hugging Face directory: `agent_0/`, `agent_1/`, …"""
        save_team(Path(output_dir), self.team, self.params)
