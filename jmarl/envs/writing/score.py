"""The gated reward for two texts that belong together: lengths, structure, vocabulary, style (host world, no jax).

Tokens are what white space separates, length is in characters, words are `\\w+` in small letters. Bounds
belong to their range.

    level 1, length       both texts have so many tokens: + 0.5; else 0 in all
    level 2, structure    length of text 2 / length of text 1: up to + 1, a ramp up, full, a ramp down; outside: stop
    level 3, vocabulary   different words of text 2 / those of text 1: up to + 0.5, in the same way
    level 4, style        0.4 * transitions + 0.6 * min(J, cap) / cap: transitions are 0 for none of the categories, else
                          min(1, 0.4 + 0.05 (categories found - 1)); J is the Jaccard index of the two sets of words that are
                          no stop words (0 where both are empty)

White space counts as length, as in the published reward. A text 1 without any word has no ratio of vocabulary: stop.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

Ramp = tuple[float, float, float, float]  # 0 at the first, full from the second to the third, 0 at the fourth

LENGTH, VOCABULARY, TRANSITIONS, JACCARD = 0.5, 0.5, 0.4, 0.6
NOMINAL_MAX = 3.0


class Gates(NamedTuple):
    """What a task asks of two texts."""

    tokens: tuple[int, int]  # of each text, from and to
    structure: Ramp
    vocabulary: Ramp
    jaccard: float  # more than this counts no more
    joined: bool  # transitions are looked for in both texts, not in the second only


TLDR = Gates((8, 256), (1.1, 1.6, 3.2, 5.0), (1.3, 2.0, math.inf, math.inf), 0.03, joined=False)
ARXIV = Gates((128, 256), (0.8, 1.3, 1.6, 2.0), (0.5, 0.7, 1.3, 1.7), 0.23, joined=True)


class WordLists(NamedTuple):
    """All in small letters."""

    stop_words: frozenset[str]
    transitions: dict[str, tuple[str, ...]]  # by category

    @classmethod
    def of(cls, stop_words: Iterable[str], transitions: Mapping[str, Iterable[str]]) -> WordLists:
        for name, phrases in transitions.items():
            if isinstance(phrases, str) or not all(isinstance(p, str) and p.strip() for p in phrases):
                raise ValueError(f"transitions of {name!r} are {phrases!r:.80}: give a list of words and phrases")
        lower = {name: tuple(" ".join(p.lower().split()) for p in phrases) for name, phrases in transitions.items()}
        return cls(frozenset(word.lower() for word in stop_words), lower)


def ramp(x: float, bounds: Ramp) -> float | None:
    """From 0 to 1; None outside the bounds, and for NaN."""
    low, full, until, high = bounds
    if not low <= x <= high:
        return None
    if x < full:
        return (x - low) / (full - low)
    return 1 - (x - until) / (high - until) if x > until else 1.0


def transition_score(categories: float) -> float:
    """Of so many categories found."""
    return min(1.0, 0.4 + 0.05 * (categories - 1)) if categories else 0.0


def best(lists: WordLists) -> float:
    """The most that can be had with these lists: 2.98 with twelve categories."""
    return LENGTH + 1.0 + VOCABULARY + TRANSITIONS * transition_score(len(lists.transitions)) + JACCARD


@functools.cache
def _whole(phrase: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(phrase)}(?!\w)")


def categories_in(text: str, lists: WordLists, substring: bool = False) -> list[str]:
    """The categories of which a word or phrase is in a text, in small or capital letters, with any white space in it.
    substring: also inside of other words, such as "so" in "some", and with single spaces only."""
    text = text.lower() if substring else " ".join(text.lower().split())

    def found(phrase: str) -> bool:  # most are not there at all, and that is quickly seen
        return phrase in text and (substring or _whole(phrase).search(text) is not None)

    return [name for name, phrases in lists.transitions.items() if any(map(found, phrases))]


def measure(first: str, second: str, gates: Gates, lists: WordLists, substring: bool = False) -> dict[str, float]:
    """What the levels are about; NaN where there is none."""
    words = [set(re.findall(r"\w+", text.lower())) for text in (first, second)]
    content = [found - lists.stop_words for found in words]
    union = len(content[0] | content[1])
    categories = categories_in(f"{first} {second}" if gates.joined else second, lists, substring)
    return {
        "tokens_1": float(len(first.split())),
        "tokens_2": float(len(second.split())),
        "length_ratio": len(second) / len(first) if first else math.nan,
        "unique_ratio": len(words[1]) / len(words[0]) if words[0] else math.nan,
        "categories": float(len(categories)),
        "jaccard": len(content[0] & content[1]) / union if union else 0.0,
    }


def levels(found: Mapping[str, float], gates: Gates) -> dict[str, float]:
    """The parts of the reward, which is their sum; 0 behind the level that stops."""
    parts: dict[str, float] = dict.fromkeys(("length", "structure", "vocabulary", "style"), 0.0)
    least, most = gates.tokens
    if not (least <= found["tokens_1"] <= most and least <= found["tokens_2"] <= most):
        return parts
    parts["length"] = LENGTH
    structure = ramp(found["length_ratio"], gates.structure)
    if structure is None:
        return parts
    parts["structure"] = structure
    vocabulary = ramp(found["unique_ratio"], gates.vocabulary)
    if vocabulary is None:
        return parts
    parts["vocabulary"] = VOCABULARY * vocabulary
    overlap = min(found["jaccard"], gates.jaccard) / gates.jaccard
    parts["style"] = TRANSITIONS * transition_score(found["categories"]) + JACCARD * overlap
    return parts
