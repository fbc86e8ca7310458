"""Answers of one or several numbers, for `math_answers`: a number, a set, values of variables, ranges."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from jmarl.envs.math.numbers import CHANGES, Unreadable, Value, equal, number, plain, spelled

LONGEST = 200  # characters of an answer

Reading = tuple[tuple[str, tuple[Value, ...]], ...]  # parts: numbers, and what stands around them (a variable, brackets)


def read(text: str, kind: str, unit: str = "", names: tuple[str, ...] = ()) -> Reading:
    """An answer of a kind; `Unreadable` if it is none. names: of the variables of which (1, 2) gives the values."""
    text = spelled(text[: 2 * LONGEST])
    if not text or len(text) > LONGEST:
        raise Unreadable
    if kind == "number":
        return (("", (number(text, unit),)),)
    if CHANGES.search(text) or re.search(r"hundred|thousand|illion", text):
        raise Unreadable
    text = re.sub(r"(?<![\\a-zA-Z])(?!and\b|or\b)[a-zA-Z]{2,}(?![a-zA-Z])|^[ .:]+|[ .!]+$", "", text).strip()
    if kind == "set":
        return _set(text, unit)
    if kind == "interval":
        return _union([_piece(piece) for piece in re.split(r"\\cup|\bor\b|\bU\b", text)])
    return _assignments(text, unit, names)


def same(gold: Reading, other: Reading) -> bool:
    """The same parts, in any order."""
    left = list(other)
    for label, values in gold:
        match = next((part for part in left if part[0] == label and all(map(equal, values, part[1]))), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _set(text: str, unit: str) -> Reading:
    text = re.sub(r"^[a-z] ?\\in ?", "", text).replace(r"\{", "").replace(r"\}", "").strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    if len(set(re.findall(r"(?<![\\a-z])[a-z](?= ?=|_)", text))) > 1:  # of several variables
        raise Unreadable
    values: list[Value] = []
    for part in filter(None, map(str.strip, re.split(r",|;|\band\b|\bor\b", text))):
        part = re.sub(r"^[a-z](?:_\{?[0-9]\}?)? ?= ?", "", part)
        for sign in "+-" if r"\pm" in part else "+":
            value = plain(part.replace(r"\pm", sign, 1).strip(), unit)
            if not any(equal(old, value) for old in values):
                values.append(value)
    if not values:
        raise Unreadable
    return tuple(("", (value,)) for value in values)


def _assignments(text: str, unit: str, names: tuple[str, ...]) -> Reading:
    found: dict[str, Value] = {}
    parts = [part.strip() for part in re.split(r",|;|\band\b|\\\\", text) if part.strip()]
    if pair := re.fullmatch(r"(?:\( ?([a-z](?: ?, ?[a-z])*+) ?\) ?= ?)?\(([^()=]+)\)", text):
        names = tuple(re.findall("[a-z]", pair[1])) if pair[1] else names
        values = pair[2].split(",")
        if len(names) != len(values):
            raise Unreadable
        parts = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
    for part in parts:
        name, sign, value = part.partition("=")
        if not sign or not re.fullmatch("[a-z]", name := name.strip()):
            raise Unreadable
        of = plain(value.rpartition("=")[2].strip(), unit)
        if not equal(found.setdefault(name, of), of):
            raise Unreadable
    if not found:
        raise Unreadable
    return tuple((name, (found[name],)) for name in sorted(found))


# ---- ranges


class Piece(NamedTuple):
    """From low to high; None: there is no end on that side."""

    low: Value | None = None
    high: Value | None = None
    has_low: bool = False
    has_high: bool = False


def _piece(text: str) -> Piece:
    text = re.sub(r"^ ?[a-z] ?\\in ?", "", text).strip()
    if ends := re.fullmatch(r"([\[(])([^,]+),([^,]+)([\])])", text):
        low, high = _end(ends[2], "-"), _end(ends[3], "")
        return Piece(low, high, ends[1] == "[" and low is not None, ends[4] == "]" and high is not None)
    piece = Piece()
    for left, sign, right in (relation for part in re.split(r"\band\b", text) for relation in _relations(part)):
        if re.fullmatch("[a-z]", right):
            left, sign, right = right, sign.translate(str.maketrans("<>", "><")), left
        side = "high" if "<" in sign else "low"
        if not re.fullmatch("[a-z]", left) or (piece.high if side == "high" else piece.low) is not None:
            raise Unreadable
        piece = piece._replace(**{side: plain(right), f"has_{side}": "=" in sign})
    return piece


def _relations(text: str) -> list[tuple[str, str, str]]:
    """a < x, or of a < x < b both."""
    parts = [part.strip() for part in re.split(r"(<=|>=|<|>)", text)]
    if len(parts) not in (3, 5) or (len(parts) == 5 and (parts[1][0] != parts[3][0] or not re.fullmatch("[a-z]", parts[2]))):
        raise Unreadable
    return [(parts[i], parts[i + 1], parts[i + 2]) for i in range(0, len(parts) - 2, 2)]


def _end(text: str, sign: str) -> Value | None:
    """Of a range in brackets; sign: of the infinity that may stand there."""
    if re.sub(r"[ +]", "", text) == sign + r"\infty":
        return None
    return plain(text.strip())


def _union(pieces: list[Piece]) -> Reading:
    """Pieces that overlap or touch become one (where ends are rational)."""
    out: list[Piece] = []
    if all(end is None or end.exact is not None for piece in pieces for end in piece[:2]):
        for piece in sorted((p for p in pieces if _starts(p) < _stops(p)), key=_starts):
            if out and _starts(piece) <= _stops(out[-1]):
                last = out.pop()
                far = max(last, piece, key=_stops)
                piece = last._replace(high=far.high, has_high=far.has_high)
            out.append(piece)
    else:
        out = pieces
    if not out:
        raise Unreadable
    brackets = [f"{'[' if p.has_low else '('}{p.low is None} {p.high is None}{']' if p.has_high else ')'}" for p in out]
    return tuple((b, tuple(end for end in p[:2] if end is not None)) for b, p in zip(brackets, out, strict=True))


# Places between numbers: just before a number, or just after it. [1, 2) is from before 1 to before 2.


def _starts(piece: Piece) -> tuple[float, bool]:
    return (-math.inf, False) if piece.low is None else (piece.low.exact, not piece.has_low)  # type: ignore[return-value]


def _stops(piece: Piece) -> tuple[float, bool]:
    return (math.inf, True) if piece.high is None else (piece.high.exact, piece.has_high)  # type: ignore[return-value]
