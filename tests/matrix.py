"""The cases of a test over several axes: a few of them in each run of CI, all of them under `-m nightly`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def cover(*axes: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return cases, as places on the axes, that hold all pairs of values of different axes; of two axes each value once.

    Greedy: the next case is the first one of those with the most pairs that are in no case before it.
    """
    places = [range(len(axis)) for axis in axes]
    size = 2 if len(axes) > 2 else 1
    parts = {
        part: set(itertools.product(*(places[axis] for axis in part)))
        for part in itertools.combinations(range(len(axes)), size)
    }

    def new(case: tuple[int, ...]) -> int:
        return sum(tuple(case[axis] for axis in part) in missing for part, missing in parts.items())

    cases: list[tuple[int, ...]] = []
    rest = list(itertools.product(*places))
    while any(parts.values()):
        cases.append(max(rest, key=new))
        rest.remove(cases[-1])
        for part, missing in parts.items():
            missing.discard(tuple(cases[-1][axis] for axis in part))
    return cases


def product(*axes: Sequence[Any]) -> list[Any]:
    """Return the parameters of all cases for `pytest.mark.parametrize`; those that `cover` leaves out are marked nightly."""
    covered = set(cover(*axes))
    cases = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, case, strict=True)), marks=[] if case in covered else pytest.mark.nightly
        )
        for case in cases
    ]
