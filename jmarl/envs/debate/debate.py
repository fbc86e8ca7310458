"""Debate: two agents argue for and against a motion; when all speeches are made, a judge scores both sides.

Task: `motion`; optionally `background`, `pro_points` and `con_points` (key points of the sides), and `swapped`. A side reads
the motion, its background, its own key points as notes, and the speeches so far, but not the notes of the other side.
Roles: pro speaks first, then con, `speeches` times each, so every episode has exactly max_turns = 2 * speeches turns; the side
that is not speaking has no observation (None). With `simultaneous` both speak in each of `speeches` turns and read only the
turns before.

Reward: 0 until the last turn, then
    separate (default)  the side's own score, in [0, 1]
    zero_sum            own score minus the other side's, in [-1, 1]; the two rewards sum to 0
The judge is `RuleBasedJudge` (`rule_judge.py`, the default), `LLMJudge` (`llm_judge.py`), or any function
judge(transcript, rng) -> Verdict. If a judge gives no score (it cannot be reached, or its answer cannot be read), the joint
action is masked and counted.
Metrics, in the last turn: `pro_score`, `con_score`, `pro_wins`, `con_wins`, `draw` (scores less than 0.01 apart),
`agent_0_wins`, and the judge's own.

Opponents. Two trained policies: `Debate`. A frozen policy: `Debate` with `frozen_agents=(1,)` in the training settings. A
script: `DebateScripted`, for a team of one. Self-play: `Debate(swap=True)` with a team that shares its weights; every motion is
then two tasks, with agent 0 as pro in one and as con (`swapped`) in the other. Rewards belong to agents, whatever side they are
on.

Data: 70 motions of this project (`motions.json`), about a fifth of them `eval` by a hash of the motion; or `data=`, a JSON
Lines file with the field `motion`, and optionally the others above. Without key points, the rule-based judge leaves out
coverage.
Left out: more than two sides, votes of an audience before and after, and speeches of more than 2,000 characters, which are cut.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.calls.awaiting import awaited
from jmarl.envs.data import check_split, load_rows, split_of
from jmarl.envs.debate.rule_judge import RuleBasedJudge
from jmarl.envs.debate.script import scripted_speech
from jmarl.envs.debate.transcript import (
    SIDES,
    STANCES,
    DebateVerdict,
    Transcript,
    add_speech,
    agent_of,
    begin_debate,
    format_speeches,
    speaking_sides,
)

DRAW_MARGIN = 0.01
Judge = Callable[[Transcript, np.random.Generator], DebateVerdict]


class Debate(TextEnvironment):
    """The environment for two agents; see the module docstring.

    Args:
        speeches: of each side.
        judge: default: `RuleBasedJudge()`.
        zero_sum: whether the rewards are differences of scores.
        swap: whether every motion is two tasks, with the sides swapped in one.
        simultaneous: whether both sides speak in every turn.
        data: JSON Lines file of motions; default: the project's own.
    """

    def __init__(
        self,
        speeches: int = 2,
        judge: Judge | None = None,
        zero_sum: bool = False,
        swap: bool = False,
        simultaneous: bool = False,
        data: str | Path | None = None,
    ):
        if speeches < 1:
            raise ValueError(f"speeches={speeches}: use at least 1")
        self.speeches, self.zero_sum, self.swap, self.simultaneous = speeches, zero_sum, swap, simultaneous
        self.judge: Judge = RuleBasedJudge() if judge is None else judge
        self.roles = ("debater_0", "debater_1") if swap else SIDES
        self.max_turns = speeches if simultaneous else 2 * speeches
        self.reward_range = (-1.0, 1.0) if zero_sum else (0.0, 1.0)
        self.motions = load_motions(data)

    def swapped_sides(self) -> Debate:
        """Return this debate with `swap`, for self-play."""
        swapped = copy.copy(self)
        swapped.swap, swapped.roles = True, ("debater_0", "debater_1")
        return swapped

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return up to `count` tasks of a split in random order, the same for the same seed."""
        check_split(split)
        motions = [motion for motion in self.motions if split_of(motion["motion"]) == split]
        order = np.random.default_rng(seed).permutation(len(motions))
        swaps = (False, True) if self.swap else (False,)
        return [motions[i] | {"swapped": swapped} for i in order for swapped in swaps][:count]

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[Transcript, list[str | None]]:
        """Return the state and the prompts [2]; raise ValueError for a malformed task."""
        del rng
        state = begin_debate(task, self.simultaneous)
        return state, self._observations(state)

    def step(self, state: Transcript, messages: Sequence[str], rng: np.random.Generator) -> Step:
        """Add the speeches; in the last turn, judge the debate."""
        for side in speaking_sides(state):
            state = add_speech(state, side, messages[agent_of(side, state)])
        if len(state.speeches) < 2 * self.speeches:
            return Step(state, self._observations(state), [0.0, 0.0], False)
        rewards, metrics = self._judge(state, rng)
        return Step(state, [None, None], rewards, True, metrics)

    def _observations(self, state: Transcript) -> list[str | None]:
        prompts: list[str | None] = [None, None]
        for side in speaking_sides(state):
            prompts[agent_of(side, state)] = format_prompt(state, side, self.speeches)
        return prompts

    def _judge(self, state: Transcript, rng: np.random.Generator) -> tuple[list[float], dict[str, float]]:
        """Return the rewards of agents 0 and 1, and the metrics."""
        verdict = awaited(self.judge(state, rng))
        winner = find_winner(verdict)
        scores = [verdict.con, verdict.pro] if state.swapped else [verdict.pro, verdict.con]  # of agents 0 and 1
        rewards = [scores[0] - scores[1], scores[1] - scores[0]] if self.zero_sum else scores
        metrics = {"pro_score": verdict.pro, "con_score": verdict.con, "draw": float(winner == "draw")}
        metrics |= {f"{side}_wins": float(winner == side) for side in SIDES}
        metrics["agent_0_wins"] = metrics["con_wins" if state.swapped else "pro_wins"]
        return rewards, metrics | dict(verdict.info)

    def render(self, state: Transcript) -> str:
        """Return the motion and the speeches as text."""
        return f"Motion: {state.motion}\n{format_speeches(state)}".strip()

    def describe(self) -> dict[str, Any]:
        """Return what a resumed run must find unchanged."""
        describe_judge = getattr(self.judge, "describe", None)
        judge = describe_judge() if callable(describe_judge) else {"class": type(self.judge).__name__}
        rules = {"speeches": self.speeches, "zero_sum": self.zero_sum, "simultaneous": self.simultaneous}
        return super().describe() | rules | {"judge": judge}


DebateEnvironment = Debate  # MRLM's name


class DebateScripted(Debate):
    """One trained agent against a script (`script.py`). Both speak `speeches` times, which is as many turns.

    Agent 0, the only one, is con if the task says `swapped`; if the task does not say, its side is drawn. The measure `solved`
    is 1 if it won. The arguments are those of `Debate`.
    """

    def __init__(self, speeches: int = 2, judge: Judge | None = None, zero_sum: bool = False, data: str | Path | None = None):
        super().__init__(speeches, judge, zero_sum, swap=True, data=data)
        self.roles, self.max_turns = ("debater",), speeches

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[Transcript, list[str | None]]:
        """Return the state and the prompt; the script has spoken if the agent is con."""
        task = {"swapped": bool(rng.integers(2))} | dict(task)
        state = self._let_script_speak(begin_debate(task, False))
        return state, [self._prompt(state)]

    def step(self, state: Transcript, messages: Sequence[str], rng: np.random.Generator) -> Step:
        """Add the agent's speech and the script's; at the end, judge the debate."""
        state = self._let_script_speak(add_speech(state, speaking_sides(state)[0], messages[0]))
        if len(state.speeches) < 2 * self.speeches:
            return Step(state, [self._prompt(state)], 0.0, False)
        rewards, metrics = self._judge(state, rng)
        return Step(state, [None], rewards[0], True, metrics | {"solved": metrics["agent_0_wins"]})

    def _prompt(self, state: Transcript) -> str:
        return format_prompt(state, speaking_sides(state)[0], self.speeches)

    def _let_script_speak(self, state: Transcript) -> Transcript:
        """Add the script's speech if it is its turn."""
        (side,) = speaking_sides(state)
        if len(state.speeches) == 2 * self.speeches or agent_of(side, state) == 0:
            return state
        return add_speech(state, side, scripted_speech(state, side, self.speeches))


def find_winner(verdict: DebateVerdict) -> str:
    """Return pro, con or draw."""
    if abs(verdict.pro - verdict.con) < DRAW_MARGIN:
        return "draw"
    return "pro" if verdict.pro > verdict.con else "con"


def load_motions(data: str | Path | None = None) -> list[dict]:
    """Load this project's motions, or those of a JSON Lines file, without repetitions."""
    if data is None:
        rows = json.loads(files("jmarl.envs.debate").joinpath("motions.json").read_text(encoding="utf-8"))
    else:
        rows = load_rows("", ["motion"], path=data)
    motions: dict[str, dict] = {}
    for row in rows:
        points = {f"{side}_points": list(row.get(f"{side}_points") or []) for side in SIDES}
        motions.setdefault(row["motion"], {"motion": row["motion"], "background": row.get("background") or ""} | points)
    return list(motions.values())


def format_prompt(state: Transcript, side: str, num_speeches: int) -> str:
    """Return what a side reads before it speaks."""
    lines = [f"A debate on the motion: {state.motion}"]
    if state.background:
        lines.append(f"Background: {state.background}")
    lines.append(f"You argue {STANCES[side]} the motion.")
    if state.points[side]:
        lines += ["Your notes, to be argued in your own words:", *(f"- {point}" for point in state.points[side])]
    if state.speeches:
        lines += ["What was said so far:", format_speeches(state)]
    number = len(state.speeches_of(side)) + 1
    reply = ", answering the other side" if state.speeches else ""
    lines.append(f"Give speech {number} of {num_speeches}: new reasons and evidence in a few full sentences{reply}.")
    return "\n".join(lines)
