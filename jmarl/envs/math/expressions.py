r"""Numbers with roots, pi and operations in them, such as 3\sqrt{2} or (6 - \pi)/4, for `math_numbers`.

What an agent wrote is taken apart by a small grammar (numbers, \frac, \sqrt, \pi, + - * / ^ and brackets; few and short
numbers, one digit as exponent) and computed in floating point. Only if that is nearly the right answer, `math-verify` says
with sympy whether it is the right answer. So what takes sympy long cannot be reached by guessing, and what comes to it is
small: its own time limit, which works in the main thread only, is off. It gets expressions that are made here, number by
number: its reader of LaTeX, left out for that, ends in sympy's `sympify`, which gives digits to `eval`.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

_TOKEN = re.compile(r"\\(?:frac|sqrt|pi|cdot|times|div)(?![a-zA-Z])|[0-9]{1,9}(?:\.[0-9]{1,12})?(?![0-9.])|[-+*/^(){}]| ")
_LONGEST, _NUMBERS, _ROOTS, _POWERS, DEPTH = 60, 8, 3, 2, 5
_CLOSED_BY = {"(": ")", "[": "]", "{": "}"}
_NEAR = 1e-9


def tokens(text: str) -> list[str]:
    """Of the grammar; none if the text has something else or is too large."""
    found = _TOKEN.findall(text)
    powers = re.findall(r"\^ ?(\{ ?-?[0-9] ?\}|[0-9](?![0-9.]))?", text)
    small = len(text) <= _LONGEST and len(powers) <= _POWERS and text.count(r"\sqrt") <= _ROOTS and depth(found) <= DEPTH
    counted = sum(token[0].isdigit() for token in found)
    if not small or counted > _NUMBERS or not all(powers) or "".join(found) != text or re.search(r"[0-9.] +[0-9.]", text):
        return []
    return [token for token in found if token != " "]


def depth(brackets: Sequence[str]) -> float:
    """How deep they are nested; infinite if they do not match."""
    open_now: list[str] = []
    deepest = 0
    for bracket in brackets:
        if bracket in _CLOSED_BY:
            open_now.append(bracket)
            deepest = max(deepest, len(open_now))
        elif bracket in _CLOSED_BY.values() and (not open_now or _CLOSED_BY[open_now.pop()] != bracket):
            return math.inf
    return math.inf if open_now else deepest


class _Arithmetic(NamedTuple):
    """What numbers are while an expression is read."""

    number: Callable[[str], Any]
    root: Callable[[Any], Any]
    pi: Any


_FLOATS = _Arithmetic(float, math.sqrt, math.pi)


@functools.lru_cache(maxsize=4096)
def nearly(text: str) -> float:
    """The value of an expression; NaN if it is none or has none."""
    try:
        value, rest = _sum(tokens(text), _FLOATS)
    except (ArithmeticError, ValueError, IndexError):  # no real number, or the grammar asks for more than there is
        return math.nan
    return value if not rest and math.isfinite(value) else math.nan


# One function a line of the grammar: from tokens to a value and the tokens that are left.

_Read = tuple[Any, list[str]]


def _sum(left: list[str], how: _Arithmetic) -> _Read:
    value, left = _product(left, how)
    while left and left[0] in "+-":
        more, rest = _product(left[1:], how)
        value, left = (value + more if left[0] == "+" else value - more), rest
    return value, left


def _product(left: list[str], how: _Arithmetic) -> _Read:
    value, left = _signed(left, how)
    while left and left[0] not in "+-)}":
        divide = left[0] in ("/", r"\div")
        more, left = _signed(left[1:], how) if divide or left[0] in ("*", r"\cdot", r"\times") else _power(left, how)
        value = value / more if divide else value * more
    return value, left


def _signed(left: list[str], how: _Arithmetic) -> _Read:
    if left[0] in "+-":
        value, rest = _signed(left[1:], how)
        return (-value if left[0] == "-" else value), rest
    return _power(left, how)


def _power(left: list[str], how: _Arithmetic) -> _Read:
    value, left = _atom(left, how)
    if left and left[0] == "^":
        exponent, left = _atom(left[1:], how)
        value = value**exponent
    return value, left


def _atom(left: list[str], how: _Arithmetic) -> _Read:
    first, rest = left[0], left[1:]
    if first in ("(", "{"):
        value, rest = _sum(rest, how)
        if rest[0] != _CLOSED_BY[first]:
            raise ValueError(rest[0])
        return value, rest[1:]
    if first == r"\pi":
        return how.pi, rest
    if first == r"\sqrt":
        value, rest = _braced(rest, how)
        return how.root(value), rest
    if first == r"\frac":
        above, rest = _braced(rest, how)
        below, rest = _braced(rest, how)
        return above / below, rest
    return how.number(first), rest


def _braced(left: list[str], how: _Arithmetic) -> _Read:
    if left[0] != "{":
        raise ValueError(left[0])
    return _atom(left, how)


# ---- the library

_ONE_AT_A_TIME = threading.Lock()  # sympy promises nothing of threads


@functools.lru_cache(maxsize=4096)
def _exactly(text: str) -> Any:
    """An expression of sympy."""
    import sympy

    def number(digits: str) -> Any:
        return sympy.Rational(*Fraction(digits).as_integer_ratio())

    return _sum(tokens(text), _Arithmetic(number, sympy.sqrt, sympy.pi))[0]


@functools.lru_cache(maxsize=4096)
def equal(gold: str, text: str) -> bool:
    """Of two expressions."""
    if not abs(nearly(gold) - nearly(text)) <= _NEAR * max(1.0, abs(nearly(gold))):
        return False
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the limit is off
    with _ONE_AT_A_TIME:
        return math_verify.verify(_exactly(gold), _exactly(text), timeout_seconds=None)


def is_rational(text: str) -> bool:
    """Of an expression that has a value: once roots are drawn and operations done."""
    with _ONE_AT_A_TIME:
        return bool(_exactly(text).simplify().is_rational)
