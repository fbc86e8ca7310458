"""Writing: two agents write two texts that belong together, one turn, one joint reward (arXiv 2508.04652).

`tldr`: of a post, agent 0 (`summary`) writes a concise summary, agent 1 (`elaboration`) a longer, detailed one with more
different words and with transition words. `arxiv`: from an abstract, agent 0 (`background`) writes an introduction's paragraph
on background and motivation, agent 1 (`method`) that on method and implications. Each is told what the other does.

Reward, from 0 to 2.98 (3.0 by name; twelve categories of transitions reach 0.95 of 1), in the levels of `writing_score`:

                tokens of each   length 2 / length 1             words 2 / words 1               J up to   transitions in
    tldr        8 to 256         1.1, full 1.6 to 3.2, 5.0       1.3, full from 2.0 on           0.03      text 2
    arxiv       128 to 256       0.8, full 1.3 to 1.6, 2.0       0.5, full 0.7 to 1.3, 1.7       0.23      both, joined

`info`: the levels `length`, `structure`, `vocabulary`, `style`, whose sum is the reward; `normalised`, the reward / 3; and what
they are made of (`tokens_1`, `tokens_2`, `length_ratio`, `unique_ratio`, `categories`, `jaccard`; NaN where there is none).

Baseline, `single=True`: one agent (`writer`) writes both texts with `[PARAGRAPH_SPLIT]` between them. What stands before the
first separator is text 1, all that stands behind it text 2 (further separators are words of it), both without the white space
around them. Without a separator the reward is 0. `info` then has `form`: 1 where there is exactly one separator.

Data: `trl-lib/tldr` (`prompt`) and `OpenMLRL/arXiv_abstract` (`abstract_text`), from the hub (`data="hub"`) or from a JSON
Lines file of these fields; without either, 40 posts and 40 abstracts written for this project (what they report is made up).
Rows are tasks as they are. About a fifth of the texts is held out, by a hash of the text: it is `eval` in whatever file.

Left out: whether a text is true to what it was written from, or makes sense at all. The published reward does not look at the
source: lists of words reach its maximum, and agents that echo their prompts earn 2.2 of 2.98 in `arxiv` on this project's
abstracts (mean; 0.5 in `tldr`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.data import check_split, load_rows, split_of
from jmarl.envs.writing import words as writing_words
from jmarl.envs.writing.score import ARXIV, NOMINAL_MAX, TLDR, Gates, WordLists, best, levels, measure

SEPARATOR = "[PARAGRAPH_SPLIT]"
TEXTS = Path(__file__).with_name("texts.json")


class Page(NamedTuple):
    """The state: what the texts are about, and the texts."""

    source: str
    texts: tuple[str, ...] = ()


class TwoTexts(TextEnvironment):
    """Two texts, by two agents, or by one (`single`) with `[PARAGRAPH_SPLIT]` between them. Subclasses say what is asked and
    what it is worth."""

    writers: tuple[str, str]
    field: str  # of a task, that has what the texts are about

    def __init__(self, single: bool = False):
        self.single = single
        self.roles = ("writer",) if single else self.writers

    def ask(self, source: str) -> list[str]:
        """What the two agents read, and what a single one does."""
        raise NotImplementedError

    def judge(self, first: str, second: str) -> tuple[float, dict[str, float]]:
        """The reward of two texts, and numbers for the log."""
        raise NotImplementedError

    def source(self, task: dict) -> str:
        """What the texts are about."""
        text = task.get(self.field)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"task {task!r:.80} has no text in {self.field!r}")
        return text.strip()

    def reset(self, task, rng):
        del rng
        source = self.source(task)
        first, second, both = self.ask(source)
        return Page(source), [both] if self.single else [first, second]

    def step(self, state, messages, rng):
        del rng
        if not self.single:
            reward, info = self.judge(*messages)
            return Step(state._replace(texts=tuple(messages)), [None, None], reward, True, info)
        (text,) = messages
        first, separator, second = (part.strip() for part in text.partition(SEPARATOR))
        reward, info = self.judge(first, second)
        info |= {"form": float(text.count(SEPARATOR) == 1)}
        return Step(state._replace(texts=(first, second)), [None], reward if separator else 0.0, True, info)

    def render(self, state: Any) -> str:
        parts = [f"{name}:\n{text}" for name, text in zip(self.writers, state.texts, strict=False)]
        return "\n\n".join([state.source, *parts])


class Writing(TwoTexts):
    """A task of the gated reward.

    data: "hub", or a JSON Lines file in its place; None: the texts written for this project. stop_words, transitions (words
    and phrases by category): in place of those of `writing_words`. substring: transitions count inside of other words too, as
    in the published reward, where "some" has "so"; for comparison.
    """

    gates: Gates
    own: str  # texts of `texts.json`

    def __init__(
        self,
        *,
        single: bool = False,
        data: str | Path | None = None,
        stop_words: Iterable[str] | None = None,
        transitions: Mapping[str, Iterable[str]] | None = None,
        substring: bool = False,
    ):
        super().__init__(single)
        self.lists = WordLists.of(
            writing_words.STOP_WORDS if stop_words is None else stop_words,
            writing_words.TRANSITIONS if transitions is None else transitions,
        )
        self.data, self.substring = data, substring
        self.reward_range = (0.0, best(self.lists))

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        check_split(split)
        texts = [text for text in dict.fromkeys(map(self.source, self._rows())) if split_of(text) == split]
        order = np.random.default_rng(seed).permutation(len(texts))[:count]
        return [{self.field: texts[i]} for i in order]

    def _rows(self) -> Sequence[dict]:
        if self.data is None:
            return [{self.field: text} for text in json.loads(TEXTS.read_text(encoding="utf-8"))[self.own]]
        return load_rows(self.data_sets[0], (self.field,), path=None if self.data == "hub" else self.data)

    def judge(self, first, second):
        found = measure(first, second, self.gates, self.lists, self.substring)
        parts = levels(found, self.gates)
        reward = sum(parts.values())
        return reward, parts | {"normalised": reward / NOMINAL_MAX} | found

    def describe(self) -> dict[str, Any]:
        lists = json.dumps([sorted(self.lists.stop_words), self.lists.transitions])
        return super().describe() | {"substring": self.substring, "word_lists": zlib.crc32(lists.encode())}


class Tldr(Writing):
    """Two summaries of a post, a concise one and a longer one; see the module."""

    writers, field, own, gates = ("summary", "elaboration"), "prompt", "tldr", TLDR
    data_sets = ("trl-lib/tldr",)

    def source(self, task):
        """A post, without the marker behind which the data set wants its summary."""
        return super().source({self.field: super().source(task).removesuffix("TL;DR:")})

    def ask(self, source):
        concise = "Write a concise summary of this post, in one or two sentences."
        longer = "a longer, detailed summary of it, with more different words and with transition words"
        return [
            f"{concise} Another writer writes {longer}; write the concise one only.\n\n{source}",
            "Another writer writes a concise summary of this post. "
            f"Write {longer} (such as: however, for example, therefore, finally).\n\n{source}",
            f"{concise} Then write {SEPARATOR}, and behind it {longer} "
            f"(such as: however, for example, therefore, finally).\n\n{source}",
        ]


class Arxiv(Writing):
    """Two paragraphs of an introduction, written from an abstract; see the module."""

    writers, field, own, gates = ("background", "method"), "abstract_text", "arxiv", ARXIV
    data_sets = ("OpenMLRL/arXiv_abstract",)

    def ask(self, source):
        begin = "The introduction of a paper is written from its abstract."
        first, second = "on background and motivation", "on the method and its implications"
        how = "about 150 to 180 words, with transition words"
        return [
            f"{begin} Write its first paragraph, {first}, in {how}. Another writer writes the second one, {second}."
            f"\n\nAbstract: {source}",
            f"{begin} Another writer writes its first paragraph, {first}. Write the second one, {second}, in {how}."
            f"\n\nAbstract: {source}",
            f"{begin} Write its first paragraph, {first}, then {SEPARATOR}, and behind it the second one, {second}, "
            f"each in {how}.\n\nAbstract: {source}",
        ]
