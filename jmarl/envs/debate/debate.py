"""Debate: two agents argue for and against a motion, and a judge scores both sides when all speeches are made.

Task: `motion` and perhaps `background`, `pro_points` and `con_points` (key points of both sides) and `swapped`. A side reads
the motion, its background, its own key points as notes, and all that was said so far; not the other side's notes.
Roles: pro speaks first, then con, `speeches` times each, so every episode has exactly max_turns = 2 * speeches turns; the
side that waits reads None. With `simultaneous` both speak in each of `speeches` turns, knowing the turns before.
Reward: 0 until the last turn, then
    separate (default)  each side's own score, in [0, 1]
    zero_sum            own score minus the other's, in [-1, 1]: the two rewards sum to 0
by the judge: `RuleBasedJudge` (`debate_rules`, the default) or `LLMJudge` (`debate_llm`). What a judge cannot answer for (it
was not reached, or could not be understood) is masked and counted.
info, in the last turn: `pro_score`, `con_score`, `pro_wins`, `con_wins`, `draw` (scores less than 0.01 apart),
`agent_0_wins`, and the judge's own numbers.

Who plays whom. Two trained policies: `Debate`. Against a frozen policy: `Debate`, and `frozen_agents=(1,)` in the settings of
training. Against a script: `DebateScripted`, for a team of one. Self-play: `Debate(swap=True)`, where each motion is two
tasks, with agent 0 as pro in one and as con (`swapped`) in the other, and a team with shared weights, if it is to be one
policy; rewards are the agents', whatever side they are on.

Data: 70 motions of this project (`motions.json`), split by a hash of the motion: about a fifth is `eval`. Or `data=`, a
JSON Lines file with the field `motion`, and perhaps the others above; without key points, coverage is left out of the score.
Left out: more than two sides, a vote before and after, and texts beyond 2,000 characters a speech, which nobody reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.data import check_split, load_rows, split_of
from jmarl.envs.debate.rules import SIDES, SPEECH_CHARS, RuleBasedJudge, Transcript, Verdict, is_copy, sentences_of

DRAW = 0.01
WORDS = {"pro": "FOR", "con": "AGAINST"}
Judge = Callable[[Transcript, np.random.Generator], Verdict]


class Debate(TextEnvironment):
    """speeches: of each side. judge: default by rules. zero_sum, swap, simultaneous, data: see above."""

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
            raise ValueError(f"speeches={speeches}: each side needs 1 or more")
        self.speeches, self.zero_sum, self.swap, self.simultaneous = speeches, zero_sum, swap, simultaneous
        self.judge: Judge = RuleBasedJudge() if judge is None else judge
        self.roles = ("debater_0", "debater_1") if swap else SIDES
        self.max_turns = speeches if simultaneous else 2 * speeches
        self.reward_range = (-1.0, 1.0) if zero_sum else (0.0, 1.0)
        self.motions = load_motions(data)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        check_split(split)
        chosen = [motion for motion in self.motions if split_of(motion["motion"]) == split]
        order = np.random.default_rng(seed).permutation(len(chosen))
        sides = (False, True) if self.swap else (False,)
        return [chosen[i] | {"swapped": swapped} for i in order for swapped in sides][:count]

    def reset(self, task, rng):
        state = begin(task, self.simultaneous)
        return state, self._observations(state)

    def step(self, state, messages, rng):
        for side in speaking(state):
            state = said(state, side, messages[agent_of(side, state)])
        if len(state.speeches) < 2 * self.speeches:
            return Step(state, self._observations(state), [0.0, 0.0], False)
        rewards, info = self._judged(state, rng)
        return Step(state, [None, None], rewards, True, info)

    def _observations(self, state: Transcript) -> list[str | None]:
        texts: list[str | None] = [None, None]
        for side in speaking(state):
            texts[agent_of(side, state)] = prompt(state, side, self.speeches)
        return texts

    def _judged(self, state: Transcript, rng: np.random.Generator) -> tuple[list[float], dict[str, float]]:
        """Rewards of agents 0 and 1, and what to log."""
        verdict = self.judge(state, rng)
        scores = {"pro": verdict.pro, "con": verdict.con}
        best = winner(verdict)
        own = [scores[side] for side in (SIDES[::-1] if state.swapped else SIDES)]
        rewards = [own[0] - own[1], own[1] - own[0]] if self.zero_sum else own
        info = {"pro_score": verdict.pro, "con_score": verdict.con, "draw": float(best == "draw")}
        info |= {f"{side}_wins": float(best == side) for side in SIDES}
        info["agent_0_wins"] = info["con_wins" if state.swapped else "pro_wins"]
        return rewards, info | dict(verdict.info)

    def render(self, state: Transcript) -> str:
        return f"Motion: {state.motion}\n{transcript(state)}".strip()

    def describe(self) -> dict[str, Any]:
        own = getattr(self.judge, "describe", None)
        judge = own() if callable(own) else {"class": type(self.judge).__name__}
        rules = {"speeches": self.speeches, "zero_sum": self.zero_sum, "simultaneous": self.simultaneous}
        return super().describe() | rules | {"judge": judge}


DebateEnvironment = Debate


class DebateScripted(Debate):
    """One trained agent against a script (`script`) that argues from its side's key points; both speak `speeches` times, which
    is as many turns. Agent 0, the only one, is con where the task says `swapped`; a task that does not say it is drawn.
    `solved` in info is that it won."""

    def __init__(self, speeches: int = 2, judge: Judge | None = None, zero_sum: bool = False, data: str | Path | None = None):
        super().__init__(speeches, judge, zero_sum, swap=True, data=data)
        self.roles, self.max_turns = ("debater",), speeches

    def reset(self, task, rng):
        state = self._answered(begin({"swapped": bool(rng.integers(2))} | dict(task), False))
        return state, [prompt(state, speaking(state)[0], self.speeches)]

    def step(self, state, messages, rng):
        state = self._answered(said(state, speaking(state)[0], messages[0]))
        if len(state.speeches) < 2 * self.speeches:
            return Step(state, [prompt(state, speaking(state)[0], self.speeches)], 0.0, False)
        rewards, info = self._judged(state, rng)
        return Step(state, [None], rewards[0], True, info | {"solved": info["agent_0_wins"]})

    def _answered(self, state: Transcript) -> Transcript:
        """With the script's speech, if it is its turn."""
        (side,) = speaking(state)
        if len(state.speeches) == 2 * self.speeches or agent_of(side, state) == 0:
            return state
        return said(state, side, script(state, side, self.speeches))


def winner(verdict: Verdict) -> str:
    """pro, con or draw."""
    if abs(verdict.pro - verdict.con) < DRAW:
        return "draw"
    return "pro" if verdict.pro > verdict.con else "con"


def load_motions(data: str | Path | None = None) -> list[dict]:
    """This project's motions, or those of a JSON Lines file; none twice."""
    if data is None:
        rows = json.loads(files("jmarl.envs.debate").joinpath("motions.json").read_text(encoding="utf-8"))
    else:
        rows = load_rows("", ["motion"], path=data)
    found: dict[str, dict] = {}
    for row in rows:
        points = {f"{side}_points": list(row.get(f"{side}_points") or []) for side in SIDES}
        found.setdefault(row["motion"], {"motion": row["motion"], "background": row.get("background") or ""} | points)
    return list(found.values())


def begin(task: Mapping[str, Any], simultaneous: bool) -> Transcript:
    """The debate on a task before anyone has spoken."""
    motion = task.get("motion")
    if not isinstance(motion, str) or not motion.strip():
        raise ValueError(f"task {dict(task)!r:.80} has no motion: give a text")
    background = task.get("background") or ""
    if not isinstance(background, str):
        raise ValueError(f"background={background!r:.40} of the motion {motion!r:.40}: give a text, or leave it out")
    points = {}
    for side in SIDES:
        given = task.get(f"{side}_points") or ()
        if isinstance(given, str) or not all(isinstance(point, str) and point.strip() for point in given):
            raise ValueError(f"{side}_points={given!r:.60} of the motion {motion!r:.40}: give a list of texts, or none")
        points[side] = tuple(given)
    return Transcript(motion, background, points, swapped=bool(task.get("swapped", False)), at_once=simultaneous)


def speaking(state: Transcript) -> tuple[str, ...]:
    """The sides that speak in the coming turn."""
    return SIDES if state.at_once else (SIDES[len(state.speeches) % 2],)


def agent_of(side: str, state: Transcript) -> int:
    return SIDES.index(side) ^ state.swapped


def said(state: Transcript, side: str, text: str) -> Transcript:
    """With one more speech: cut, and of what can be encoded, so that it can be read."""
    text = text[:SPEECH_CHARS].encode("utf-8", "replace").decode()
    return state._replace(speeches=(*state.speeches, (side, text)))


def transcript(state: Transcript) -> str:
    """A line a speech, so that no speech looks like two."""
    return "\n".join(f"{WORDS[side]}: {' '.join(text.split())}" for side, text in state.speeches)


def prompt(state: Transcript, side: str, speeches: int) -> str:
    """What a side reads before it speaks."""
    lines = [f"A debate on the motion: {state.motion}"]
    lines += [f"Background: {state.background}"] if state.background else []
    lines += [f"You argue {WORDS[side]} the motion."]
    if state.points[side]:
        lines += ["Your notes, to be argued in your own words:", *(f"- {point}" for point in state.points[side])]
    if state.speeches:
        lines += ["What was said so far:", transcript(state)]
    number = len(state.said_by(side)) + 1
    asked = "new reasons and evidence in a few full sentences" + ", answering the other side" * bool(state.speeches)
    lines += [f"Give speech {number} of {speeches}: {asked}."]
    return "\n".join(lines)


# What the script says around a key point, by its number, and at the end of a speech: more words than what it quotes.
AROUND = (
    "First, {}, and anyone who has looked at this closely for a few years has seen it happen with their own eyes.",
    "Moreover, {}, and waiting would only make a familiar trouble larger, dearer and harder to mend for everyone who has to "
    "deal with it later on.",
    "Finally, {}, and the other speaker would rather look at rare exceptions and old habits than at the daily life of those "
    "who are waiting for an answer.",
)
ENDS = {
    "pro": (
        "For example, neighbours of mine thought hard about the claim that {}, and each of them came to accept it in the end "
        "after long talks over the kitchen table.",
        "The other bench makes large promises with great warmth, however, whoever weighs them against the plain facts on this "
        "paper will accept the claim that {}.",
        "According to those who live with the results, the balance is clear, so careful listeners in this hall should all "
        "accept the claim that {}.",
    ),
    "con": (
        "For example, colleagues from an earlier job tried for a while to believe that {}, and gave it up one by one as soon "
        "as the first bills lay on their desks.",
        "Fine words were heard from the other bench today, however, a sober look at what has already gone wrong elsewhere "
        "leaves nobody sure that {}.",
        "According to people who would carry the burden, the price is too high, so thoughtful voters will hardly be won over "
        "by the bare claim that {}.",
    ),
}


def script(state: Transcript, side: str, speeches: int) -> str:
    """A speech of the scripted opponent: its share of the key points, each with more about it, and an end. The end
    is the first that nobody has said, and the first of all when there is none left; else it is the same whatever was said."""
    number = len(state.said_by(side))
    does = "help" if side == "pro" else "harm"
    points = state.points[side] or (f"this motion would {does} most of those whom it concerns",)
    own = [AROUND[k % 3].format(_inside(point)) for k, point in enumerate(points) if k % speeches == number]
    heard = [sentence for _, text in state.speeches for sentence in sentences_of(text)]
    ends = [end.format(_inside(state.motion)) for end in ENDS[side]]
    fresh = [end for end in ends if not is_copy(sentences_of(end)[0], heard)]
    return " ".join([*own, (fresh or ends)[0]])


def _inside(text: str) -> str:
    """A key point or a motion as a part of a sentence."""
    return text[:1].lower() + text[1:].rstrip(".!?")
