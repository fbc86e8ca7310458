r"""The gated reward of two texts that belong together: length, structure, vocabulary and style (arXiv 2508.04652).

A level counts only if the levels before it are reached. Tokens are separated by white space, lengths are in characters, words
are `\w+` in lower case. The ends of a range belong to it.

    level 1, length       the number of tokens of both texts is in a range: + 0.5; else the reward is 0
    level 2, structure    length of text 2 / length of text 1: up to + 1 (a ramp up, full, a ramp down); outside: stop
    level 3, vocabulary   distinct words of text 2 / distinct words of text 1: up to + 0.5, in the same way
    level 4, style        0.4 * transitions + 0.6 * min(J, cap) / cap, where transitions is 0 without a transition word, else
                          min(1, 0.4 + 0.05 (number of categories - 1)), and J is the Jaccard index of the two sets of words
                          without stop words (0 if both sets are empty)

White space counts as length, as in the published reward. If text 1 has no words there is no ratio of vocabularies: stop.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

Ramp = tuple[float, float, float, float]  # 0 at the first, full from the second to the third, 0 at the fourth

LENGTH, VOCABULARY, TRANSITIONS, JACCARD = 0.5, 0.5, 0.4, 0.6
NOMINAL_MAX = 3.0


class Gates(NamedTuple):
    """The ranges of a task."""

    tokens: tuple[int, int]  # fewest and most tokens of each text
    structure: Ramp
    vocabulary: Ramp
    jaccard_cap: float  # a larger Jaccard index earns no more
    joined: bool  # whether transition words are looked for in both texts, or only in the second


TLDR = Gates((8, 256), (1.1, 1.6, 3.2, 5.0), (1.3, 2.0, math.inf, math.inf), 0.03, joined=False)
ARXIV = Gates((128, 256), (0.8, 1.3, 1.6, 2.0), (0.5, 0.7, 1.3, 1.7), 0.23, joined=True)


class WordLists(NamedTuple):
    """Word lists in lower case; make them with `create`."""

    stop_words: frozenset[str]
    transitions: dict[str, tuple[str, ...]]  # words and phrases by category

    @classmethod
    def create(cls, stop_words: Iterable[str], transitions: Mapping[str, Iterable[str]]) -> "WordLists":
        """Return the lists in lower case. A category that is not a list of words and phrases raises ValueError."""
        for name, phrases in transitions.items():
            if isinstance(phrases, str) or not all(isinstance(p, str) and p.strip() for p in phrases):
                raise ValueError(f"transitions of {name!r} are {phrases!r:.80}: give a list of words and phrases")
        lower = {name: tuple(" ".join(p.lower().split()) for p in phrases) for name, phrases in transitions.items()}
        return cls(frozenset(word.lower() for word in stop_words), lower)


def ramp(x: float, bounds: Ramp) -> float | None:
    """Return a value from 0 to 1; None outside the bounds and for NaN."""
    low, full_from, full_to, high = bounds
    if not low <= x <= high:
        return None
    if x < full_from:
        return (x - low) / (full_from - low)
    return 1 - (x - full_to) / (high - full_to) if x > full_to else 1.0


def transition_score(num_categories: float) -> float:
    """Return the score, from 0 to 1, of transition words of so many categories."""
    return min(1.0, 0.4 + 0.05 * (num_categories - 1)) if num_categories else 0.0


def max_reward(word_lists: WordLists) -> float:
    """Return the largest reward that these lists allow: 2.98 with twelve categories."""
    return LENGTH + 1.0 + VOCABULARY + TRANSITIONS * transition_score(len(word_lists.transitions)) + JACCARD


@functools.cache
def _whole_word_pattern(phrase: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(phrase)}(?!\w)")


def categories_in(text: str, word_lists: WordLists, substring: bool = False) -> list[str]:
    """Return the categories of the transition words in a text.

    Args:
        text: upper and lower case are the same, and any white space separates the words of a phrase.
        word_lists: the transition words.
        substring: also look inside other words ("so" in "some"); then a phrase must have single spaces.
    """
    text = text.lower() if substring else " ".join(text.lower().split())

    def occurs(phrase: str) -> bool:  # the quick test first: most phrases are not in the text at all
        return phrase in text and (substring or _whole_word_pattern(phrase).search(text) is not None)

    return [name for name, phrases in word_lists.transitions.items() if any(map(occurs, phrases))]


def measure(first: str, second: str, gates: Gates, word_lists: WordLists, substring: bool = False) -> dict[str, float]:
    """Return the measures that `score_levels` scores; a ratio that does not exist is NaN."""
    words = [set(re.findall(r"\w+", text.lower())) for text in (first, second)]
    content_words = [text_words - word_lists.stop_words for text_words in words]
    union_size = len(content_words[0] | content_words[1])
    categories = categories_in(f"{first} {second}" if gates.joined else second, word_lists, substring)
    return {
        "tokens_1": float(len(first.split())),
        "tokens_2": float(len(second.split())),
        "length_ratio": len(second) / len(first) if first else math.nan,
        "unique_ratio": len(words[1]) / len(words[0]) if words[0] else math.nan,
        "categories": float(len(categories)),
        "jaccard": len(content_words[0] & content_words[1]) / union_size if union_size else 0.0,
    }


def score_levels(measures: Mapping[str, float], gates: Gates) -> dict[str, float]:
    """Return the reward of each level; the reward is their sum. Levels after one that is not reached are 0."""
    levels: dict[str, float] = dict.fromkeys(("length", "structure", "vocabulary", "style"), 0.0)
    fewest, most = gates.tokens
    if not (fewest <= measures["tokens_1"] <= most and fewest <= measures["tokens_2"] <= most):
        return levels
    levels["length"] = LENGTH
    structure = ramp(measures["length_ratio"], gates.structure)
    if structure is None:
        return levels
    levels["structure"] = structure
    vocabulary = ramp(measures["unique_ratio"], gates.vocabulary)
    if vocabulary is None:
        return levels
    levels["vocabulary"] = VOCABULARY * vocabulary
    overlap = min(measures["jaccard"], gates.jaccard_cap) / gates.jaccard_cap
    levels["style"] = TRANSITIONS * transition_score(measures["categories"]) + JACCARD * overlap
    return levels
