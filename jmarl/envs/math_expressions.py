r"""Numbers with roots, pi and operations in them, such as 3\sqrt{2} or (6 - \pi)/4, for `math_numbers`.

What an agent wrote is first taken apart by a small grammar (numbers, \frac, \sqrt, \pi, + - * / ^ and brackets; few and short
numbers, one digit as exponent) and computed in floating point. Only if that is nearly the right answer, `math-verify` says with
sympy whether it is the right answer. So what takes sympy long cannot be reached by guessing, and what comes to it is small: its
own time limit, which works in the main thread only, is off. Nothing is ever given to `eval`, here or there.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

_TOKEN = re.compile(r"\\(?:frac|sqrt|pi|cdot|times|div)(?![a-zA-Z])|[0-9]{1,9}(?:\.[0-9]{1,12})?|[-+*/^(){}]| ")
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


@functools.lru_cache(maxsize=4096)
def nearly(text: str) -> float:
    """The value of an expression; NaN if it is none or has none."""
    try:
        value, rest = _sum(tokens(text))
    except (ArithmeticError, ValueError, IndexError):  # no real number, or the grammar asks for more than there is
        return math.nan
    return value if not rest and math.isfinite(value) else math.nan


# One function a line of the grammar: from tokens to a value and the tokens that are left.

Read = tuple[float, list[str]]


def _sum(left: list[str]) -> Read:
    value, left = _product(left)
    while left and left[0] in "+-":
        more, rest = _product(left[1:])
        value, left = (value + more if left[0] == "+" else value - more), rest
    return value, left


def _product(left: list[str]) -> Read:
    value, left = _signed(left)
    while left and left[0] not in "+-)}":
        divide = left[0] in ("/", r"\div")
        more, left = _signed(left[1:]) if divide or left[0] in ("*", r"\cdot", r"\times") else _power(left)
        value = value / more if divide else value * more
    return value, left


def _signed(left: list[str]) -> Read:
    if left[0] in "+-":
        value, rest = _signed(left[1:])
        return (-value if left[0] == "-" else value), rest
    return _power(left)


def _power(left: list[str]) -> Read:
    value, left = _atom(left)
    if left and left[0] == "^":
        exponent, left = _atom(left[1:])
        value = math.pow(value, exponent)
    return value, left


def _atom(left: list[str]) -> Read:
    first, rest = left[0], left[1:]
    if first in ("(", "{"):
        value, rest = _sum(rest)
        if rest[0] != _CLOSED_BY[first]:
            raise ValueError(rest[0])
        return value, rest[1:]
    if first == r"\pi":
        return math.pi, rest
    if first == r"\sqrt":
        return _of(math.sqrt, rest)
    if first == r"\frac":
        above, rest = _of(float, rest)
        below, rest = _of(float, rest)
        return above / below, rest
    return float(first), rest


def _of(function: Callable[[float], float], left: list[str]) -> Read:
    """Of what is in braces."""
    if left[0] != "{":
        raise ValueError(left[0])
    value, left = _atom(left)
    return function(value), left


# ---- the library

_ONE_AT_A_TIME = threading.Lock()  # parsers share tables that they fill as they go


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the limit is off
    how = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
    with _ONE_AT_A_TIME:
        return math_verify.parse(rf"\boxed{{{text}}}", how, fallback_mode="no_fallback", parsing_timeout=None)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def equal(gold: str, text: str) -> bool:
    """Of two expressions."""
    import math_verify

    if not abs(nearly(gold) - nearly(text)) <= _NEAR * max(1.0, abs(nearly(gold))):
        return False
    gold_parsed, parsed = _parsed(gold), _parsed(text)
    with _ONE_AT_A_TIME:
        return math_verify.verify(gold_parsed, parsed, timeout_seconds=None)


def is_rational(text: str) -> bool:
    """Of an expression that has a value: once roots are drawn and operations done."""
    return any(bool(found.doit().is_rational) for found in _parsed(text))
