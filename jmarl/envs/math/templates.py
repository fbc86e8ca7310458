"""What the templates of mathematical problems share: the record that they return, and helpers to draw and format numbers.

A template is a function of a difficulty (1, 2 or 3) and a random generator. It returns None if the numbers that it drew do not
make a good problem, and the caller draws again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple


class MathProblem(NamedTuple):
    """A question with its exact answer."""

    question: str
    answer: str  # in the standard form of `answers.py`
    kind: str = "number"  # number, set, interval or assignments
    unit: str = ""
    key: str = ""  # identifies the problem; empty: the question does


Template = Callable[[int, random.Random], MathProblem | None]


def number_problem(question: str, answer: Fraction | int, key: str = "") -> MathProblem:
    """Return a problem whose answer is one number."""
    return MathProblem(question, str(answer), key=key)


def nonzero_integer(rng: random.Random, largest: int) -> int:
    """Draw an integer with an absolute value from 1 to `largest`."""
    return rng.choice((-1, 1)) * rng.randint(1, largest)


def polynomial(*terms: tuple[int, str]) -> str:
    """Format a sum of terms (coefficient, variable): "3x - 5" for (3, "x"), (-5, "")."""
    text = ""
    for coefficient, variable in terms:
        if not coefficient:
            continue
        size = "" if abs(coefficient) == 1 and variable else str(abs(coefficient))
        sign = ("-" if coefficient < 0 else "") if not text else (" - " if coefficient < 0 else " + ")
        text += f"{sign}{size}{variable}"
    return text or "0"
