"""Compare an agent's answer with the expected one, for `tool_use.py`."""

from __future__ import annotations

import re
from decimal import Decimal

MAX_ANSWER = 200  # characters
NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
CURRENCY = re.compile(r"^([-+]?)[$€£]")
UNIT = re.compile(r"\bhow many (\w+)")
DECORATION = " *_`'\"“”‘’"


def is_correct(answer: str, expected: str, tolerance: float = 0.0, question: str = "") -> bool:
    """Return whether an answer is the expected one.

    If a number is expected, numbers are compared; commas between thousands, a currency sign before the number, and the unit
    that follows "how many" in the question are accepted. Otherwise the texts are compared without regard to case and a leading
    "the". A final full stop and quotes, backticks and asterisks around the answer are ignored. The whole answer must match, so
    a list of answers is never correct.

    Args:
        answer: what the agent wrote.
        expected: a number or a name.
        tolerance: allowed absolute difference between numbers.
        question: gives the unit.
    """
    answer = " ".join(answer[: MAX_ANSWER + 1].split()).strip(DECORATION).removesuffix(".").strip(DECORATION)
    if len(answer) > MAX_ANSWER:
        return False
    if NUMBER.fullmatch(expected):
        number, _, unit = answer.replace("−", "-").partition(" ")
        if unit and unit.casefold() not in UNIT.findall(question.casefold()):
            return False
        number = CURRENCY.sub(r"\1", number)
        if not NUMBER.fullmatch(number):
            return False
        return abs(_to_decimal(number) - _to_decimal(expected)) <= Decimal(str(tolerance))
    return _normalize(answer) == _normalize(expected)


def _to_decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _normalize(text: str) -> str:
    return " ".join(text.split()).casefold().removesuffix(".").removeprefix("the ").strip()
