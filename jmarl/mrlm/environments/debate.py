"""MRLM's `environments.debate`; see `jmarl.envs.debate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jmarl.envs.debate.debate import Debate
from jmarl.envs.debate.rule_judge import RuleBasedJudge as RuleBasedJudge
from jmarl.envs.messages import EnvironmentMode
from jmarl.mrlm.environments.played import PlayedByMessages, check_client, one_source
from jmarl.mrlm.names import refusing

__getattr__ = refusing(__name__)


@dataclass(frozen=True)
class DebateTopic:
    """A motion, with the points of both sides."""

    proposition: str
    background: str = ""
    pro_key_points: Sequence[str] = ()
    con_key_points: Sequence[str] = ()

    def motion(self) -> dict[str, Any]:
        """Return the topic as a task of `Debate`."""
        points = {"pro_points": list(self.pro_key_points), "con_points": list(self.con_key_points)}
        return {"motion": self.proposition, "background": self.background, **points}


class DebateEnvironment(PlayedByMessages, Debate):
    """`Debate` under MRLM's name and arguments. `reset()` returns what both sides read; None for the side that is silent.

    Args:
        topics: motions of the user, of which a fifth is held out.
        max_turns: speeches of each side, as speeches.
        mode: CLIENT, since environments are never trained.
        judge: as for `Debate`.
        opponent_model: refused: an opponent is a second policy, frozen in mode CLIENT.
        **options: other arguments of `Debate`.
    """

    def __init__(
        self,
        topics: Sequence[DebateTopic] | None = None,
        max_turns: int | None = None,
        mode: EnvironmentMode = EnvironmentMode.CLIENT,
        judge: Any = None,
        opponent_model: Any = None,
        *,
        speeches: int | None = None,
        **options: Any,
    ):
        check_client(mode)
        if opponent_model is not None:
            raise ValueError("opponent_model= is not here: give the trainer two policies, the opponent in mode CLIENT")
        super().__init__(one_source(speeches=speeches, max_turns=max_turns) or 2, judge, **options)
        if topics is not None:
            self.motions = [topic.motion() for topic in topics]
