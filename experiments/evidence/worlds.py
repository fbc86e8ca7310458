"""Games in which each agent has a reward of its own, tasks for an agent without its team, a game in which one agent decides,
and one whose reward comes a turn late. Not an experiment.

`environment: worlds.py:NAME` in a YAML file beside this one. The reward of the team can still be seen in the measures: on the
grid `closeness` is the return of the team, in Sudoku it is `0.5 * right + 0.5 * solved`, in `Letters` it is `team`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.games.grid import GridPlanning, WalkState, distances
from jmarl.envs.games.sudoku import Sudoku, SudokuState
from jmarl.envs.writing.story import Story
from jmarl.envs.writing.tldr_arxiv import Tldr
from jmarl.envs.writing.two_texts import SEPARATOR, TwoTexts, WritingState


class OwnGrid(GridPlanning):
    """The grid where an agent earns what its own moves bring: half of the share of the way that they shorten."""

    reward_range = (-8.0, 8.0)

    def step(self, state: WalkState, messages: Sequence[str], rng: np.random.Generator) -> Step:
        step = super().step(state, messages, rng)
        to_goal = distances(state.goal, state.size, state.walls)
        path = step.state.path[len(state.path) - 1 :]
        shorter = [to_goal[before] - to_goal[after] for before, after in zip(path, path[1:], strict=False)]
        own = [sum(shorter[agent :: self.num_agents]) for agent in range(self.num_agents)]
        return step._replace(reward=[0.5 * moves / to_goal[state.path[0]] for moves in own])


class OwnSudoku(Sudoku):
    """Sudoku where the proposer earns what its digits bring, and the checker the share of the blanks that it judges rightly."""

    def step(self, state: SudokuState, messages: Sequence[str], rng: np.random.Generator) -> Step:
        step = super().step(state, messages, rng)
        earned = float(step.reward) if state.is_proposing else right_verdicts(step.state)  # type: ignore[arg-type]
        return step._replace(reward=[earned, 0.0] if state.is_proposing else [0.0, earned])


class LoneChecker(TextEnvironment):
    """The checker of Sudoku alone: it judges random digits, half of them right, and earns the share that it judges rightly."""

    roles, reward_range = ("checker",), (0.0, 1.0)

    def __init__(self, **options: Any):
        self.game = Sudoku(**options)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return self.game.tasks(split, count, seed)

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[SudokuState, list[str | None]]:
        state, _ = self.game.reset(task, rng)
        solution = map(int, str(self.game.solve(state)[0]).split())
        digits = [str(digit if rng.random() < 0.5 else (digit + rng.integers(3)) % 4 + 1) for digit in solution]
        step = self.game.step(state, [" ".join(digits), ""], rng)
        return step.state, [step.observations[1]]

    def step(self, state: SudokuState, messages: Sequence[str], rng: np.random.Generator) -> Step:
        after = self.game.step(state, ["", messages[0]], rng).state
        return Step(after, [""], right_verdicts(after), True)


class OneWriter(TwoTexts):
    """One agent writes both texts: its first sentence is text 1, and what follows text 2. A small model writes no separator."""

    def __init__(self, **options: Any):
        super().__init__(single=True, **options)

    def prompts(self, source: str) -> tuple[str, str, str]:
        first, second, both = super().prompts(source)
        for separated, plain in ((f"write {SEPARATOR}, and behind it tell", "tell"), (f"{SEPARATOR}, and behind it ", "")):
            both = both.replace(separated, plain)
        return first, second, both

    def step(self, state: WritingState, messages: Sequence[str], rng: np.random.Generator) -> Step:
        text = messages[0].strip().replace(SEPARATOR, "")
        return super().step(state, [re.sub(r"(?<=[.!?])\s+|\n+", SEPARATOR, text, count=1)], rng)


class OneStory(OneWriter, Story):
    """The story of one writer."""


class SampleTldr(Tldr):
    """Summaries of the 65 posts of the data set that the tests use, in the directory that JMARL_DATA names."""

    def __init__(self, **options: Any):
        if not (data := os.environ.get("JMARL_DATA")):
            raise ValueError("set JMARL_DATA to the directory that holds tldr/train.jsonl.gz, posts of the data set TL;DR")
        posts = Path(data) / "tldr" / "train.jsonl.gz"
        super().__init__(data=posts, substring=True, **options)


class OneTldr(OneWriter, SampleTldr):
    """The summaries of one writer."""


class Letters(TextEnvironment):
    """Each of three agents reads a letter and has to write it. The first one's answer counts eight times as much as another's.

    own: whether each agent earns 1 for its own answer, in place of the joint reward."""

    roles, reward_range, letters = ("first", "second", "third"), (0.0, 1.0), "abcdefgh"
    weights = (0.8, 0.1, 0.1)

    def __init__(self, *, own: bool = False):
        self.own = own

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        texts = ["".join(letters) for letters in itertools.product(self.letters, repeat=3)]
        rng = np.random.default_rng((seed, split == "eval"))
        held_out = {texts[i] for i in np.random.default_rng(0).permutation(len(texts))[:128]}
        chosen = [text for text in texts if (text in held_out) == (split == "eval")]
        return [{"letters": chosen[i]} for i in rng.permutation(len(chosen))[:count]]

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[str, list[str | None]]:
        return task["letters"], [f"copy {letter}" for letter in task["letters"]]

    def step(self, state: str, messages: Sequence[str], rng: np.random.Generator) -> Step:
        right = [float(message.strip() == letter) for message, letter in zip(messages, state, strict=True)]
        team = sum(weight * x for weight, x in zip(self.weights, right, strict=True))
        measures = {"team": team, "first": right[0], "others": (right[1] + right[2]) / 2, "solved": float(all(right))}
        return Step(state, [""] * 3, right if self.own else team, True, measures)


class Remember(Letters):
    """Two agents write two letters, one after the other, and are rewarded behind the second: half for an `a` as first letters,
    half for copying in the second turn what the other wrote in the first. Credit has to reach the first turn."""

    roles, max_turns = ("first", "second"), 2  # type: ignore[assignment]

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[str, list[str | None]]:
        return "", [f"copy {letter}" for letter in task["letters"][:2]]

    def step(self, state: str, messages: Sequence[str], rng: np.random.Generator) -> Step:
        texts = [message.strip()[:1] for message in messages]
        if not state:
            return Step("".join(text or " " for text in texts), [f"copy {text}" for text in reversed(texts)], 0.0, False)
        first = sum(text == "a" for text in state) / 2
        second = sum(text == read for text, read in zip(texts, reversed(state), strict=True)) / 2
        return Step(
            state, [""] * 2, (first + second) / 2, True, {"team": (first + second) / 2, "first": first, "copied": second}
        )


def right_verdicts(state: SudokuState) -> float:
    """Return the share of the blanks that a checker judged rightly."""
    verdicts = [(i in state.open_blanks) != right for i, right in enumerate(state.right)]
    return sum(verdicts) / len(verdicts)
