"""A team that plays the seats of an environment beside one that is played from outside: see `jmarl.remote.openenv.seat`.

Special tokens in prompts that are texts are text: what the player outside writes may be in them. Left out: sampling for
several episodes in one program; they wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from jmarl.config import TrainConfig
from jmarl.sampling.texts import generate
from jmarl.team import Team, initial_params, on_mesh


class TeamSeats:
    """others(prompts [N], seed) -> texts [N], from the agents of a team with one agent for each seat.

    Args:
        team: the team, with its agents. The one in the seat that is played from outside is not asked.
        cfg: settings of sampling and of the chat template, as those of the training.
    """

    def __init__(self, team: Team, cfg: TrainConfig):
        if cfg.episodes.history != "none":
            raise ValueError(
                f"history={cfg.episodes.history!r} is not allowed here: the agents of this team read the whole conversation, "
                "and those beside a seat that is played from outside read only the last prompt; give a team that was trained so"
            )
        self.team, self.cfg, self.lock = team, cfg, threading.Lock()
        self.params = initial_params(on_mesh(team, cfg.run), None, seed=cfg.run.seed)

    def __call__(self, prompts: Sequence[Any], seed: int) -> list[str]:
        with self.lock:  # one program at a time
            asked, special = [[prompt] for prompt in prompts], [[()] for _ in prompts]
            rows = generate(self.team, asked, self.cfg.replace(seed=seed), params=self.params, special=special)
        return [text for [text] in rows]
