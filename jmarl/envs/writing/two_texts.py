"""The base of the writing environments: two agents write one text each, or a single agent writes both (one turn).

The single agent is a baseline (`single=True`). It writes `[PARAGRAPH_SPLIT]` between the texts. Text 1 is what comes before the
first separator, text 2 all that comes after it (further separators are words of text 2), both without surrounding white space.
Without a separator the reward is 0. The measure `form` is 1 if there is exactly one separator.

Subclasses define the prompts and the score. Left out, because the published rewards have none: later turns, in which the agents
could read each other's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jmarl.envs.vector import Step, TextEnvironment

SEPARATOR = "[PARAGRAPH_SPLIT]"


class WritingState(NamedTuple):
    """What the texts are written from, and the texts."""

    source: str
    texts: tuple[str, ...] = ()


class Score(NamedTuple):
    """The reward of two texts."""

    reward: float
    parts: dict[str, float]  # terms that add up to the reward; {} if it is no sum
    measures: dict[str, float]  # other numbers for the log


class TwoTexts(TextEnvironment):
    """Two texts with one joint reward; see the module.

    Subclasses set `writers` (the roles), `field` (of a task, with the source of the texts) and `reward_range`, and override
    `prompts` and `score`.

    Args:
        single: whether one agent writes both texts.
    """

    writers: tuple[str, str]
    field: str

    def __init__(self, single: bool = False):
        self.single = single
        self.roles = ("writer",) if single else self.writers

    def prompts(self, source: str) -> tuple[str, str, str]:
        """Return the prompts of the first writer, of the second writer, and of a single writer of both texts."""
        raise NotImplementedError

    def score(self, first: str, second: str) -> Score:
        """Return the reward of two texts."""
        raise NotImplementedError

    def source(self, task: dict) -> str:
        """Return what the texts of a task are written from."""
        text = task.get(self.field)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"task {task!r:.80} has no text in {self.field!r}")
        return text.strip()

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[WritingState, list[str]]:
        source = self.source(task)
        first, second, both = self.prompts(source)
        return WritingState(source), [both] if self.single else [first, second]

    def step(self, state: WritingState, messages: Sequence[str], rng: np.random.Generator) -> Step:
        if not self.single:
            reward, parts, measures = self.score(*messages)
            return Step(state._replace(texts=tuple(messages)), [None, None], reward, True, measures, parts=parts)
        (text,) = messages
        first, separator, second = (part.strip() for part in text.partition(SEPARATOR))
        reward, parts, measures = self.score(first, second)
        measures = measures | {"form": float(text.count(SEPARATOR) == 1)}
        if not separator:
            reward, parts = 0.0, dict.fromkeys(parts, 0.0)
        return Step(state._replace(texts=(first, second)), [None], reward, True, measures, parts=parts)

    def render(self, state: WritingState) -> str:
        texts = [f"{name}:\n{text}" for name, text in zip(self.writers, state.texts, strict=False)]
        return "\n\n".join([state.source, *texts])
