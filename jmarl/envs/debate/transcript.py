"""The state of a debate, shared by the environment, its prompts and the judges."""

from collections.abc import Mapping
from typing import Any, NamedTuple

SIDES = ("pro", "con")
SPEECH_CHARS = 2000  # longer speeches are cut
STANCES = {"pro": "FOR", "con": "AGAINST"}


class Transcript(NamedTuple):
    """A debate so far; also the state of an episode."""

    motion: str
    background: str
    points: dict[str, tuple[str, ...]]  # key points by side; may be empty
    speeches: tuple[tuple[str, str], ...] = ()  # (side, text) in the order of speaking
    swapped: bool = False  # agent 0 is con
    simultaneous: bool = False  # both sides speak in every turn; pro's speech is stored first

    def speeches_of(self, side: str) -> list[str]:
        """Return the speeches of a side."""
        return [text for speaker, text in self.speeches if speaker == side]


class DebateVerdict(NamedTuple):
    """A judge's scores in [0, 1] and numbers for the log. A judge is a function judge(transcript, rng) -> Verdict."""

    pro: float
    con: float
    info: Mapping[str, float] = {}


def begin_debate(task: Mapping[str, Any], simultaneous: bool) -> Transcript:
    """Return the transcript of a task without speeches; raise ValueError for a malformed task."""
    motion = task.get("motion")
    if not isinstance(motion, str) or not motion.strip():
        raise ValueError(f"task {dict(task)!r:.80} has no motion: give a text")
    background = task.get("background") or ""
    if not isinstance(background, str):
        raise ValueError(f"background={background!r:.40} of the motion {motion!r:.40}: give a text, or leave it out")
    points = {}
    for side in SIDES:
        texts = task.get(f"{side}_points") or ()
        if isinstance(texts, str) or not all(isinstance(point, str) and point.strip() for point in texts):
            raise ValueError(f"{side}_points={texts!r:.60} of the motion {motion!r:.40}: give a list of texts, or none")
        points[side] = tuple(texts)
    return Transcript(motion, background, points, swapped=bool(task.get("swapped", False)), simultaneous=simultaneous)


def add_speech(state: Transcript, side: str, text: str) -> Transcript:
    """Add a speech, cut to `SPEECH_CHARS`, with lone surrogates replaced so that it can be encoded."""
    text = text[:SPEECH_CHARS].encode("utf-8", "replace").decode()
    return state._replace(speeches=(*state.speeches, (side, text)))


def speaking_sides(state: Transcript) -> tuple[str, ...]:
    """Return the sides that speak in the next turn."""
    return SIDES if state.simultaneous else (SIDES[len(state.speeches) % 2],)


def agent_of(side: str, state: Transcript) -> int:
    """Return the index of the agent on this side."""
    return SIDES.index(side) ^ state.swapped


def format_speeches(state: Transcript) -> str:
    """Return one line per speech, so that no speech can look like two."""
    return "\n".join(f"{STANCES[side]}: {' '.join(text.split())}" for side, text in state.speeches)
