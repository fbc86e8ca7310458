"""Measure how much the completions of a group differ: distinct-1, distinct-2 (Li et al. 2016, arXiv 1510.03055), repeats.

Words are what spaces separate, so texts in languages that write without spaces count as one word.
"""

from __future__ import annotations

from collections.abc import Sequence


def diversity(groups: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return means over groups. groups: the completions of each prompt.

    distinct_1, distinct_2: different words, and pairs of neighboring words, of a group, divided by their number; left out
    where no group has any. repeated: share of completions that equal an earlier one of their group.
    """
    shares: dict[str, list[float]] = {"distinct_1": [], "distinct_2": [], "repeated": []}
    for texts in groups:
        words = [text.split() for text in texts]
        singles = [word for row in words for word in row]
        pairs = [pair for row in words for pair in zip(row, row[1:], strict=False)]
        for name, items in (("distinct_1", singles), ("distinct_2", pairs)):
            if items:
                shares[name].append(len(set(items)) / len(items))
        shares["repeated"].append(1 - len(set(texts)) / len(texts))
    return {name: sum(values) / len(values) for name, values in shares.items() if values}
