r"""Numbers as people and language models write them, for `math_answers`: one spelling, one value.

A number of digits alone, in whatever form, becomes a fraction here, exactly. One with roots, pi or operations in it is read and
compared in `math_expressions`.
"""

from __future__ import annotations

import contextlib
import math
import re
from fractions import Fraction
from typing import NamedTuple

from jmarl.envs.math import expressions as math_expressions
from jmarl.envs.math.expressions import DEPTH, depth, nearly

DIGITS = 40  # a number with more of them is not read


class Value(NamedTuple):
    """A number that was read."""

    exact: Fraction | None  # None: there is a root, pi or an operation in it
    latex: str
    simple: bool  # a plain number; if a fraction, then in lowest terms


class Unreadable(ValueError):
    """There is no answer of the kind."""


# ---- one spelling

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "‐": "-", "‑": "-", "－": "-", "⁄": "/", "≈": r"\approx ",
     "≤": "<=", "⩽": "<=", "≥": ">=", "⩾": ">=", "∞": r"\infty ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ",
     "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "√": r"\sqrt ", "π": r"\pi ", "\u00a0": " ", "\u202f": " ", "#": " "}
)  # fmt: skip
_ALONE = r"(?<![0-9A-Za-z.,^)}/])(?<![0-9)}] )"  # no operation before it
_FONT = "(?:text|mathrm|mathbf|textbf|mbox|underline)"
_SPELLINGS = [
    (re.compile(pattern, re.I), spelling)
    for pattern, spelling in (
        (r"(?<=[0-9]) ?(?=[½¼¾⅓⅔])", " "),
        (r"½", "1/2 "),
        (r"¼", "1/4 "),
        (r"¾", "3/4 "),
        (r"⅓", "1/3 "),
        (r"⅔", "2/3 "),
        (r"<\|[^|<>]{0,30}\|>|</s>|[✅✓✔✨⭐\ufe0f\U0001f300-\U0001f3ff\U0001f44d\U0001f44f\U0001f600-\U0001f63f]", " "),
        (r"</?(?:b|i|u|em|strong|span|p|br|code|div|mark)(?: [^<>]{0,40})?/?>", ""),
        (r"\\(?:left|right|displaystyle)(?![a-z])|\\[!,;:]|\*\*|__|`", ""),
        (r"(?<!\\)\\[()\[\] ]|\\q?quad(?![a-z])|~", " "),
        (r"\{,\}", ","),
        (rf"\\{_FONT} ?\{{([^{{}}]*[a-z])\}}\s{{0,3}}(?:\^ ?(?:[23]|\{{ ?[23] ?\}})|[²³])?", r" \1 "),  # of units
        (rf"\\{_FONT} ?\{{([^{{}}]*)\}}", r" \1 "),
        (r"-\s?\\?[$€£¥₹]\s?", "-"),
        (r"\\?[$€£¥₹]", " "),
        (r"\\%|\bper ?cent\b", "%"),
        (r"\\[dt]frac", r"\\frac"),
        (r"\\frac ?([0-9])", r"\\frac{\1}"),
        (r"(\\frac ?\{[^{}]*\}) ?([0-9])", r"\1{\2}"),
        (r"\\frac ?\{ ?-([0-9]++) ?\} ?\{ ?-", r"\\frac{\1}{"),
        (r"\\frac ?\{ ?([0-9]++) ?\} ?\{ ?-", r"\\frac{-\1}{"),
        (rf"{_ALONE}- ?([0-9]++) ?/ ?-([0-9])", r"\1/\2"),
        (rf"{_ALONE}([0-9]++) ?/ ?-([0-9])", r"-\1/\2"),
        (rf"{_ALONE}- ?\(([0-9]++(?: ?/ ?[0-9]++|\.[0-9]++)?)\)(?! ?[\^0-9(*/\\a-z])", r"-\1"),
        (r"(^|[=:,(<>]|\b(?:is|are|or|and) ) ?(?:minus|negative) (?=[0-9.\\])", r"\1 -"),
        (r"\\leq?(?:slant)?(?![a-z])", "<="),
        (r"\\geq?(?:slant)?(?![a-z])", ">="),
        (r"\\lt(?![a-z])", "<"),
        (r"\\gt(?![a-z])", ">"),
        (r"(?<![\\a-z])(?:infinity|infty|inf|oo)(?![a-z])", r"\\infty "),
        (r"(?<![\\a-z])pi(?![a-z])", r"\\pi "),
        (r"(?<=[a-z])(?<!\\pi)(?:\^\{?[23]\}?|[²³])|\^\{?\\circ\}?|°", ""),  # of units
        (r"\\?(?<![a-z])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt ?([0-9](?![0-9])|(?<= )[0-9]++)", r"\\sqrt{\1}"),
        (r"\s+", " "),
    )
]


def spelled(text: str) -> str:
    """With one sign for what has several, and without what only formats."""
    text = text.translate(_CHARACTERS)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text.strip()


# ---- digits

_INT = r"(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)"
_DEC = rf"(?:{_INT}(?:\.[0-9]++)?|\.[0-9]++)"
NUMERAL = re.compile(
    rf"""(?<![0-9A-Za-z.^_{{\\+-])(?<![0-9][.,])(?P<sign>[-+])?
    (?:(?:(?P<whole1>{_INT})\ ?)?\\frac\ ?
        \{{\ ?(?P<n1>-?[0-9]++)\ ?\}}\ ?\{{\ ?(?P<d1>[0-9]++)\ ?\}}
    |(?:(?P<whole2>{_INT})\ )?(?P<n2>{_INT})\ ?/\ ?(?P<d2>{_INT})
    |(?P<m1>{_DEC})
        (?:\ ?(?:\\times|\\cdot|[x*])\ ?10\ ?\^\ ?(?:\{{\ ?(?P<e1>[-+]?[0-9]{{1,2}})\ ?\}}|(?P<e2>[-+]?[0-9]{{1,2}}))
        |[eE](?P<e3>[-+]?[0-9]{{1,2}}))
    |(?P<m2>{_DEC}))
    (?![0-9]|[.,][0-9])(?:\ ?(?P<scale>hundred|thousand|million|billion)\b)?(?P<percent>\ ?%)?""",
    re.X,
)
_SCALES = {None: 1, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
# Words that change what a number is, letters that are rather variables, and what may be a minus.
CHANGES = re.compile(
    r"n['’]t\b|(?<!\\)\b(?:not|cannot|never|minus|negative|twice|squared|cubed|trillion|dozen|lakh|crore|"
    r"(?:is|are|was) (?:false|wrong|incorrect|untrue)|(?:a|an|one|and) (?:half|third|quarter)|"
    r"(?:times|plus|but|except|other than|half of|double|less than|more than|root of|log)\b"
    r"(?=[^#0-9]*[#0-9]| (?:one|two|three|four|five|six|seven|eight|nine|ten)\b))\b",
    re.I,
)
_UNCLEAR = re.compile(r"(?<![A-Za-z'’])[knxyzKNXYZ](?![A-Za-z])| - |# ?[*(] ?#")
_AROUND = re.compile(r"[A-Za-z\s.,;:!?'\"()\[\]*_~≈/’“”#-]*+")


def _value(match: re.Match[str], unit: str) -> Value:
    got = {name.rstrip("123"): text.replace(",", "") for name, text in match.groupdict().items() if text is not None}
    if sum(c.isdigit() for c in match.group()) > DIGITS:
        raise Unreadable
    simple = True
    if "n" in got:
        n, d, whole = int(got["n"]), int(got["d"]), int(got.get("whole", 0))
        if not d or (whole and n < 0):
            raise Unreadable
        exact, simple = whole + Fraction(n, d), math.gcd(n, d) == 1 and not (whole and n > d)
    else:
        exact = Fraction(got["m"]) * Fraction(10) ** int(got.get("e", 0))
    exact *= _SCALES[got.get("scale")] * (-1 if got.get("sign") == "-" else 1)
    return Value(exact / 100 if "percent" in got and unit != "%" else exact, match.group(), simple)


def number(text: str, unit: str = "") -> Value:
    """The one number of a phrase, with words around it; after the last = if there is one."""
    if re.search("[0-9]", exact := text.partition(r"\approx")[0]):
        text = exact
    text = text.replace(r"\approx", " ")
    if "=" in text and re.search("[0-9]", last := text.rpartition("=")[2]):
        text = last
    text = re.sub(r"^ ?([-+]) ", r"\1", text)
    matches, around = list(NUMERAL.finditer(text)), NUMERAL.sub("#", text)
    if CHANGES.search(around):
        raise Unreadable
    if matches and _AROUND.fullmatch(around) and not _UNCLEAR.search(around):
        values = [_value(match, unit) for match in matches]
        if len({value.exact for value in values}) > 1:
            _, said, last = text.rpartition(" is ")
            if not said or re.search(r"\bif\b", text):
                raise Unreadable
            return number(last, unit)
        return values[-1]
    return _expression(text)


def numbers(text: str) -> set[Fraction]:
    """All plain numbers in a text."""
    found = set()
    for match in NUMERAL.finditer(text):
        with contextlib.suppress(Unreadable):  # too long, or divided by 0
            found.add(_value(match, "").exact)
    return found


def plain(text: str, unit: str = "") -> Value:
    """A number with nothing around it."""
    if re.search("[A-Za-z]", re.sub(r"\\[a-z]+", "", text)) or depth(re.findall(r"[(){}\[\]]", text)) > DEPTH:
        raise Unreadable
    return number(text, unit)


def _expression(text: str) -> Value:
    """Words around it are left out."""
    text = re.sub(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}(?![a-zA-Z])", " ", text).strip(" .,;:!")
    if re.fullmatch("[0-9. ]*", text) or math.isnan(nearly(text)):
        raise Unreadable
    return Value(None, text, False)


def equal(gold: Value, value: Value) -> bool:
    """Exactly. What is not rational equals nothing that is."""
    if gold.exact is not None or value.exact is not None:
        return gold.exact == value.exact
    return math_expressions.equal(gold.latex, value.latex)
