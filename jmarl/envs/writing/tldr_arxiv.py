"""Two summaries of a post (`tldr`) or two paragraphs of an introduction (`arxiv`), from arXiv 2508.04652; one turn.

`tldr`: agent 0 (`summary`) writes a concise summary of a post, agent 1 (`elaboration`) a longer, detailed one with more
distinct words and with transition words. `arxiv`: from an abstract, agent 0 (`background`) writes the paragraph of an
introduction on background and motivation, agent 1 (`method`) the paragraph on method and implications. Each prompt says what
the other agent writes. Baseline: `single=True`, see `two_texts.py`.

Joint reward, from 0 to 2.98 (nominally 3.0; twelve categories of transition words reach 0.95 of 1), with the levels of
`gated_reward.py`:

                tokens of each   length 2 / length 1             words 2 / words 1               J up to   transitions in
    tldr        8 to 256         1.1, full 1.6 to 3.2, 5.0       1.3, full from 2.0 on           0.03      text 2
    arxiv       128 to 256       0.8, full 1.3 to 1.6, 2.0       0.5, full 0.7 to 1.3, 1.7       0.23      both, joined

Parts of the reward: the levels `length`, `structure`, `vocabulary`, `style`. Measures: `normalised`, the reward / 3, and what
the levels score (`tokens_1`, `tokens_2`, `length_ratio`, `unique_ratio`, `categories`, `jaccard`; NaN if undefined).

Data: `trl-lib/tldr` (field `prompt`) and `OpenMLRL/arXiv_abstract` (`abstract_text`), from the hub (`data="hub"`) or from a
JSON Lines file with these fields; by default 40 posts and 40 abstracts written for this project, whose contents are made up. A
row is a task. About a fifth of the texts is held out (`eval`), by a hash of the text: a text is held out in whatever file.

Left out: whether a text is true to its source, or makes sense at all. The published reward does not look at the source: lists
of words reach its maximum, and agents that repeat their prompts earn 2.2 of 2.98 in `arxiv` on this project's abstracts (mean;
0.5 in `tldr`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jmarl.envs.data import check_split, load_rows, split_of
from jmarl.envs.writing import word_lists
from jmarl.envs.writing.gated_reward import ARXIV, NOMINAL_MAX, TLDR, Gates, WordLists, max_reward, measure, score_levels
from jmarl.envs.writing.two_texts import SEPARATOR, Score, TwoTexts

TEXTS = Path(__file__).with_name("texts.json")


class Writing(TwoTexts):
    """What `Tldr` and `Arxiv` share: data and the gated reward.

    Args:
        single: whether one agent writes both texts.
        data: "hub", or a JSON Lines file with the same fields; None: the texts written for this project.
        stop_words: instead of those of `word_lists.py`.
        transitions: words and phrases by category, instead of those of `word_lists.py`.
        substring: whether transition words also count inside other words ("so" in "some"), as in the published reward.
    """

    gates: Gates
    texts_name: str  # key in texts.json

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
        self.word_lists = WordLists.create(
            word_lists.STOP_WORDS if stop_words is None else stop_words,
            word_lists.TRANSITIONS if transitions is None else transitions,
        )
        self.data, self.substring = data, substring
        self.reward_range = (0.0, max_reward(self.word_lists))

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        check_split(split)
        texts = [text for text in dict.fromkeys(map(self.source, self._rows())) if split_of(text) == split]
        order = np.random.default_rng(seed).permutation(len(texts))[:count]
        return [{self.field: texts[i]} for i in order]

    def _rows(self) -> Sequence[dict]:
        if self.data is None:
            return [{self.field: text} for text in json.loads(TEXTS.read_text(encoding="utf-8"))[self.texts_name]]
        return load_rows(self.data_sets[0], (self.field,), path=None if self.data == "hub" else self.data)

    def score(self, first: str, second: str) -> Score:
        measures = measure(first, second, self.gates, self.word_lists, self.substring)
        levels = score_levels(measures, self.gates)
        reward = sum(levels.values())
        return Score(reward, levels, {"normalised": reward / NOMINAL_MAX} | measures)

    def describe(self) -> dict[str, Any]:
        words = json.dumps([sorted(self.word_lists.stop_words), self.word_lists.transitions])
        return super().describe() | {"substring": self.substring, "word_lists": zlib.crc32(words.encode())}


class Tldr(Writing):
    """A concise and a longer summary of a post; see the module."""

    writers, field, texts_name, gates = ("summary", "elaboration"), "prompt", "tldr", TLDR
    data_sets = ("trl-lib/tldr",)

    def source(self, task: dict) -> str:
        """Return the post without the marker at its end, after which the data set expects a summary."""
        return super().source({self.field: super().source(task).removesuffix("TL;DR:")})

    def prompts(self, source: str) -> tuple[str, str, str]:
        concise = "Write a concise summary of this post, in one or two sentences."
        longer = "a longer, detailed summary of it, with more different words and with transition words"
        return (
            f"{concise} Another writer writes {longer}; write the concise one only.\n\n{source}",
            "Another writer writes a concise summary of this post. "
            f"Write {longer} (such as: however, for example, therefore, finally).\n\n{source}",
            f"{concise} Then write {SEPARATOR}, and behind it {longer} "
            f"(such as: however, for example, therefore, finally).\n\n{source}",
        )


class Arxiv(Writing):
    """Two paragraphs of an introduction, written from an abstract; see the module."""

    writers, field, texts_name, gates = ("background", "method"), "abstract_text", "arxiv", ARXIV
    data_sets = ("OpenMLRL/arXiv_abstract",)

    def prompts(self, source: str) -> tuple[str, str, str]:
        opening = "The introduction of a paper is written from its abstract."
        first, second = "on background and motivation", "on the method and its implications"
        form = "about 150 to 180 words, with transition words"
        return (
            f"{opening} Write its first paragraph, {first}, in {form}. Another writer writes the second one, {second}."
            f"\n\nAbstract: {source}",
            f"{opening} Another writer writes its first paragraph, {first}. Write the second one, {second}, in {form}."
            f"\n\nAbstract: {source}",
            f"{opening} Write its first paragraph, {first}, then {SEPARATOR}, and behind it the second one, {second}, "
            f"each in {form}.\n\nAbstract: {source}",
        )
