r"""Read and compare numbers with roots, pi or operations in them, such as 3\sqrt{2} or (6 - \pi)/4.

An answer is parsed with a small grammar (numbers, \frac, \sqrt, \pi, + - * / ^ and parentheses) and computed in floating point.
Only if the result is close to the right answer does `math-verify` decide with sympy whether they are exactly equal. So an
expression that sympy would take long for cannot be reached by guessing, and the grammar's limits (few and short numbers, one
digit as exponent) keep what does reach it small. math-verify's own time limit works in the main thread only and is switched
off. Expressions of sympy are built here from the parsed numbers, because math-verify's LaTeX parser ends in sympy's `sympify`,
which passes text to `eval`.
"""

import functools
import logging
import math
import re
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

_TOKEN = re.compile(r"\\(?:frac|sqrt|pi|cdot|times|div)(?![a-zA-Z])|[0-9]{1,9}(?:\.[0-9]{1,12})?(?![0-9.])|[-+*/^(){}]| ")
MAX_DEPTH = 5  # of nested brackets
_MAX_CHARACTERS, _MAX_NUMBERS, _MAX_ROOTS, _MAX_POWERS = 60, 8, 3, 2
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_TOLERANCE = 1e-9  # relative above 1, absolute below


def tokenize(text: str) -> list[str]:
    """Return the tokens of an expression; an empty list if it has other characters or exceeds a limit."""
    tokens = _TOKEN.findall(text)
    powers = re.findall(r"\^ ?(\{ ?-?[0-9] ?\}|[0-9](?![0-9.]))?", text)
    num_numbers = sum(token[0].isdigit() for token in tokens)
    within_limits = (
        len(text) <= _MAX_CHARACTERS
        and num_numbers <= _MAX_NUMBERS
        and len(powers) <= _MAX_POWERS
        and text.count(r"\sqrt") <= _MAX_ROOTS
        and nesting_depth(tokens) <= MAX_DEPTH
    )
    adjacent_numbers = re.search(r"[0-9.] +[0-9.]", text)
    if not within_limits or not all(powers) or "".join(tokens) != text or adjacent_numbers:
        return []
    return [token for token in tokens if token != " "]


def nesting_depth(tokens: Sequence[str]) -> float:
    """Return how deep brackets are nested; infinity if they do not match."""
    unclosed: list[str] = []
    depth = 0
    for token in tokens:
        if token in _CLOSING:
            unclosed.append(token)
            depth = max(depth, len(unclosed))
        elif token in _CLOSING.values() and (not unclosed or _CLOSING[unclosed.pop()] != token):
            return math.inf
    return math.inf if unclosed else depth


class _Backend(NamedTuple):
    """The numbers that an expression is computed with."""

    number: Callable[[str], Any]  # from digits
    sqrt: Callable[[Any], Any]
    pi: Any


_FLOATS = _Backend(float, math.sqrt, math.pi)


@functools.lru_cache(maxsize=4096)
def approximate_value(text: str) -> float:
    """Return the value of an expression in floating point; NaN if the text is no expression or has no real value."""
    try:
        value, unread = _parse_sum(tokenize(text), _FLOATS)
    except (ArithmeticError, ValueError, IndexError):  # no real number, or the tokens end too early
        return math.nan
    return value if not unread and math.isfinite(value) else math.nan


# One function for each rule of the grammar. It takes tokens and returns a value and the tokens that it did not read.

_Parsed = tuple[Any, list[str]]


def _parse_sum(tokens: list[str], backend: _Backend) -> _Parsed:
    value, tokens = _parse_product(tokens, backend)
    while tokens and tokens[0] in "+-":
        sign = tokens[0]
        term, tokens = _parse_product(tokens[1:], backend)
        value = value + term if sign == "+" else value - term
    return value, tokens


def _parse_product(tokens: list[str], backend: _Backend) -> _Parsed:
    value, tokens = _parse_signed(tokens, backend)
    while tokens and tokens[0] not in "+-)}":
        divides = tokens[0] in ("/", r"\div")
        if divides or tokens[0] in ("*", r"\cdot", r"\times"):
            factor, tokens = _parse_signed(tokens[1:], backend)
        else:  # no sign: 2\pi
            factor, tokens = _parse_power(tokens, backend)
        value = value / factor if divides else value * factor
    return value, tokens


def _parse_signed(tokens: list[str], backend: _Backend) -> _Parsed:
    if tokens[0] in "+-":
        value, unread = _parse_signed(tokens[1:], backend)
        return (-value if tokens[0] == "-" else value), unread
    return _parse_power(tokens, backend)


def _parse_power(tokens: list[str], backend: _Backend) -> _Parsed:
    value, tokens = _parse_atom(tokens, backend)
    if tokens and tokens[0] == "^":
        exponent, tokens = _parse_atom(tokens[1:], backend)
        value = value**exponent
    return value, tokens


def _parse_atom(tokens: list[str], backend: _Backend) -> _Parsed:
    first, unread = tokens[0], tokens[1:]
    if first in ("(", "{"):
        value, unread = _parse_sum(unread, backend)
        if unread[0] != _CLOSING[first]:
            raise ValueError(f"{first} is closed by {unread[0]}")
        return value, unread[1:]
    if first == r"\pi":
        return backend.pi, unread
    if first == r"\sqrt":
        value, unread = _parse_braces(unread, backend)
        return backend.sqrt(value), unread
    if first == r"\frac":
        numerator, unread = _parse_braces(unread, backend)
        denominator, unread = _parse_braces(unread, backend)
        return numerator / denominator, unread
    return backend.number(first), unread


def _parse_braces(tokens: list[str], backend: _Backend) -> _Parsed:
    if tokens[0] != "{":
        raise ValueError(f"expected {{, read {tokens[0]}")
    return _parse_atom(tokens, backend)


# ---- exact comparison

_SYMPY_LOCK = threading.Lock()  # sympy does not promise to be thread-safe


@functools.lru_cache(maxsize=4096)
def _to_sympy(text: str) -> Any:
    import sympy

    def number(digits: str) -> Any:
        return sympy.Rational(*Fraction(digits).as_integer_ratio())

    return _parse_sum(tokenize(text), _Backend(number, sympy.sqrt, sympy.pi))[0]


@functools.lru_cache(maxsize=4096)
def equal_expressions(gold: str, text: str) -> bool:
    """Return whether two expressions have exactly the same value."""
    expected = approximate_value(gold)
    if not abs(expected - approximate_value(text)) <= _TOLERANCE * max(1.0, abs(expected)):
        return False
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off
    with _SYMPY_LOCK:
        return math_verify.verify(_to_sympy(gold), _to_sympy(text), timeout_seconds=None)


def is_rational(text: str) -> bool:
    """Return whether the value of an expression is rational, such as that of \\sqrt{49}. The expression must have a value."""
    with _SYMPY_LOCK:
        return bool(_to_sympy(text).simplify().is_rational)
