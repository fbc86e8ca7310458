"""Parse and compare the kinds of answers that have one or several numbers: number, set, interval, assignments.

A parsed answer is a tuple of parts. Two answers are equal if they have equal parts, in any order.
"""

import math
import re
from typing import NamedTuple

from jmarl.envs.math.numbers import (
    CHANGING_WORDS,
    COEFFICIENT,
    NAME_OF_RELATION,
    PRODUCT,
    Unreadable,
    Value,
    equal_values,
    normalize,
    parse_bare_number,
    parse_number,
)

MAX_ANSWER_LENGTH = 200  # characters

ParsedAnswer = tuple[tuple[str, tuple[Value, ...]], ...]  # parts (label, numbers); a label is a variable, or an interval's ends


def parse_answer(text: str, kind: str, unit: str = "", variables: tuple[str, ...] = ()) -> ParsedAnswer:
    """Parse an answer.

    Args:
        text: the answer, without the text around it.
        kind: number, set, interval or assignments.
        unit: "%" if 5% means 5, not 0.05; any other unit is ignored.
        variables: of assignments, the variables that (1, 2) gives values to.

    Raises:
        Unreadable: the text is not an answer of this kind.
    """
    text = normalize(text[: 2 * MAX_ANSWER_LENGTH])
    if not 0 < len(text) <= MAX_ANSWER_LENGTH:
        raise Unreadable(f"{len(text)} characters: 1 to {MAX_ANSWER_LENGTH} are read")
    if kind == "number":
        return (("", (parse_number(text, unit),)),)
    if CHANGING_WORDS.search(text) or re.search(r"hundred|thousand|illion", text):
        raise Unreadable(f"words that change a number: {text}")
    names = set(NAME_OF_RELATION.findall(text))
    if re.search(COEFFICIENT, text) or len(names) > 1 or re.search(PRODUCT, " ".join(names)):
        raise Unreadable(f"products of variables, or several names: {text}")
    text = re.sub(r"(?<![\\a-zA-Z])(?!and\b|or\b)[a-zA-Z]{2,}(?![a-zA-Z])|^[ .:]+|[ .!]+$", "", text).strip()
    if kind == "set":
        return _parse_set(text, unit)
    if kind == "interval":
        return _union([_parse_interval(part) for part in re.split(r"\\cup|\bor\b|\bU\b", text)])
    return _parse_assignments(text, unit, variables)


def same_answer(gold: ParsedAnswer, answer: ParsedAnswer) -> bool:
    """Return whether two answers have equal parts, in any order."""
    unmatched = list(answer)
    for label, values in gold:
        match = next((part for part in unmatched if part[0] == label and all(map(equal_values, values, part[1]))), None)
        if match is None:
            return False
        unmatched.remove(match)
    return not unmatched


def _parse_set(text: str, unit: str) -> ParsedAnswer:
    text = re.sub(r"^[a-z] ?\\in ?", "", text).replace(r"\{", "").replace(r"\}", "").strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    if len(set(re.findall(r"(?<![\\a-z])[a-z](?= ?=|_)", text))) > 1:
        raise Unreadable(f"values of several variables: {text}")
    values: list[Value] = []
    for part in filter(None, map(str.strip, re.split(r",|;|\band\b|\bor\b", text))):
        part = re.sub(r"^[a-z](?:_\{?[0-9]\}?)? ?= ?", "", part)
        for sign in "+-" if r"\pm" in part else "+":
            value = parse_bare_number(part.replace(r"\pm", sign, 1).strip(), unit)
            if not any(equal_values(known, value) for known in values):
                values.append(value)
    if not values:
        raise Unreadable(f"no values: {text}")
    return tuple(("", (value,)) for value in values)


def _parse_assignments(text: str, unit: str, variables: tuple[str, ...]) -> ParsedAnswer:
    parts = [part.strip() for part in re.split(r",|;|\band\b|\\\\", text) if part.strip()]
    if tuple_form := re.fullmatch(r"(?:\( ?([a-z](?: ?, ?[a-z])*+) ?\) ?= ?)?\(([^()=]+)\)", text):
        variables = tuple(re.findall("[a-z]", tuple_form[1])) if tuple_form[1] else variables
        numbers = tuple_form[2].split(",")
        if len(variables) != len(numbers):
            raise Unreadable(f"{len(numbers)} values of {len(variables)} variables: {text}")
        parts = [f"{variable}={number}" for variable, number in zip(variables, numbers, strict=True)]
    values: dict[str, Value] = {}
    for part in parts:
        variable, sign, right_side = part.partition("=")
        variable = variable.strip()
        if not sign or not re.fullmatch("[a-z]", variable):
            raise Unreadable(f"not an assignment to a variable: {part}")
        *steps, last = right_side.split("=")  # x = 4/2 = 2
        if any(re.search(r"(?<![\\a-z])[a-z]", step) for step in steps):
            raise Unreadable(f"several variables with one value: {part}")
        value = parse_bare_number(last.strip(), unit)
        if not equal_values(values.setdefault(variable, value), value):
            raise Unreadable(f"two values of {variable}: {text}")
    if not values:
        raise Unreadable(f"no assignment: {text}")
    return tuple((variable, (values[variable],)) for variable in sorted(values))


# ---- intervals


class Interval(NamedTuple):
    """The numbers between two ends; an end that is None is infinite."""

    low: Value | None = None
    high: Value | None = None
    includes_low: bool = False
    includes_high: bool = False


def _parse_interval(text: str) -> Interval:
    text = re.sub(r"^ ?[a-z] ?\\in ?", "", text).strip()
    if ends := re.fullmatch(r"([\[(])([^,]+),([^,]+)([\])])", text):
        low, high = _parse_end(ends[2], "-"), _parse_end(ends[3], "")
        return Interval(low, high, ends[1] == "[" and low is not None, ends[4] == "]" and high is not None)
    interval = Interval()
    for left, sign, right in (relation for part in re.split(r"\band\b", text) for relation in _relations(part)):
        if re.fullmatch("[a-z]", right):
            left, sign, right = right, sign.translate(str.maketrans("<>", "><")), left
        is_upper = "<" in sign
        if not re.fullmatch("[a-z]", left) or (interval.high if is_upper else interval.low) is not None:
            raise Unreadable(f"not a bound of a variable, or a second one: {text}")
        if is_upper:
            interval = interval._replace(high=parse_bare_number(right), includes_high="=" in sign)
        else:
            interval = interval._replace(low=parse_bare_number(right), includes_low="=" in sign)
    return interval


def _relations(text: str) -> list[tuple[str, str, str]]:
    """Return the relation of "a < x", or both relations of "a < x < b"."""
    parts = [part.strip() for part in re.split(r"(<=|>=|<|>)", text)]
    if len(parts) not in (3, 5) or (len(parts) == 5 and (parts[1][0] != parts[3][0] or not re.fullmatch("[a-z]", parts[2]))):
        raise Unreadable(f"not an inequality: {text}")
    return [(parts[i], parts[i + 1], parts[i + 2]) for i in range(0, len(parts) - 2, 2)]


def _parse_end(text: str, infinity_sign: str) -> Value | None:
    """Return an end of an interval in brackets; None for the infinity of this sign."""
    if re.sub(r"[ +]", "", text) == infinity_sign + r"\infty":
        return None
    return parse_bare_number(text.strip())


def _union(intervals: list[Interval]) -> ParsedAnswer:
    """Merge intervals that overlap or touch, if all ends are rational."""
    merged: list[Interval] = []
    if all(end is None or end.exact is not None for interval in intervals for end in (interval.low, interval.high)):
        for interval in sorted((i for i in intervals if _lower_bound(i) < _upper_bound(i)), key=_lower_bound):
            if merged and _lower_bound(interval) <= _upper_bound(merged[-1]):
                last = merged.pop()
                farthest = max(last, interval, key=_upper_bound)
                interval = last._replace(high=farthest.high, includes_high=farthest.includes_high)
            merged.append(interval)
    else:
        merged = intervals
    if not merged:
        raise Unreadable("an empty interval")
    return tuple((_label(i), tuple(end for end in (i.low, i.high) if end is not None)) for i in merged)


def _label(interval: Interval) -> str:
    """Return what distinguishes an interval besides its finite ends."""
    left, right = "[" if interval.includes_low else "(", "]" if interval.includes_high else ")"
    return f"{left}{interval.low is None} {interval.high is None}{right}"


# A bound is a place just before or just after a number, so that bounds can be compared: [1, 2) reaches from just before 1 to
# just before 2.


def _lower_bound(interval: Interval) -> tuple[float, bool]:
    if interval.low is None:
        return (-math.inf, False)
    return (interval.low.exact, not interval.includes_low)  # type: ignore[return-value]


def _upper_bound(interval: Interval) -> tuple[float, bool]:
    if interval.high is None:
        return (math.inf, True)
    return (interval.high.exact, interval.includes_high)  # type: ignore[return-value]
