"""The cases of a test over two axes: some of them in each run of CI, all of them with `-m nightly` too."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def product(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return the parameters of all cases. CI runs a diagonal, which has each value; the rest is nightly."""
    sizes = len(first), len(second)
    diagonal = {(i % sizes[0], i % sizes[1]) for i in range(max(sizes))}
    return [
        pytest.param(first[i], second[j], marks=[] if (i, j) in diagonal else pytest.mark.nightly)
        for i, j in itertools.product(*map(range, sizes))
    ]
