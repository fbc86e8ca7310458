r"""Is an answer right? It is found in a completion, read as what was asked for, and compared exactly.

Where the answer is: at the last mark in the text that is followed by a digit or infinity; marks are `\boxed{…}`, `####`,
`<answer>`, and `answer is`, `answer:` or `answer =`. After a boxed it is what is in the braces, after the others the rest of
the line (of the next one if that is empty; for sets and assignments of all lines on end that begin with a variable and =), up
to the end of the sentence. Without a mark it is the last line with a number, if it reads as one number, else the last number
in it; for other kinds the last line with a digit. The last `TAIL` characters are read, and an answer has at most `LONGEST`.

Kinds, with the answer in its standard form, and what else is read as the same:

    number        "42", "-3/4", "3\sqrt{2}"   1,234  6/8  1 1/2  \frac{3}{4}  1.5e3  1.5 \times 10^3  $5  x = 5
    set           "2, 3"                      {3, 2}  x = 2 or x = 3  2 and 3  3 \pm \sqrt{2}
    interval      "x < 2 or x >= 5"           5 <= x or 2 > x  (-oo, 2) \cup [5, oo)  x \in [1, 2)  1 <= x and x < 2
    assignments   "x = 2, y = 3"              y = 3 and x = 2  (x, y) = (2, 3)  (2, 3)

Words and units may stand around a number and are not checked ("42 apples"), but for some that change it ("not 42", "two
dozen"), with which it is not read. Percent: 5% is 0.05, and where the task's unit is "%" both 5 and 5% are 5 (and 0.05 is
wrong). Numbers are equal if they are exactly equal: 0.33 is not 1/3. A value may not be left to be worked out, so that no
question is answered by writing it down again: where the right answer is rational, 12 + 7 and \sqrt{49} are wrong, and with
`lowest_terms` 6/8 is too.

A verdict is `correct`, `wrong`, or `unparsable`: no answer of that kind can be read. Several numbers where one was asked for
("41 or 42", "1 2 3") are unparsable; of several boxed answers the last one counts. Why it is not correct is said in words that
depend on the answer's text alone, never on what would be right.

Rational numbers are compared as fractions, roots and pi by math-verify (see `math_expressions`). Its own readings of sets and
the like are not used: it takes (3, 2) for x = 2, y = 3, the range from 2 to 3 for the set of both, and 9% for 9.
Left out: variables in answers, functions other than the square root, numbers in words, recurring decimals, complex numbers, the
empty set, thousands commas in sets, checking of units, and of the variable's name in sets and ranges.
"""

from __future__ import annotations

import functools
import re
from itertools import takewhile
from typing import NamedTuple

from jmarl.envs.math.expressions import is_rational
from jmarl.envs.math.forms import LONGEST, Reading, read, same
from jmarl.envs.math.numbers import CHANGES, NUMERAL, Unreadable, number, spelled

TAIL = 4000

WRONG = "That is not the right answer."
NOT_WORKED_OUT = "That is not the right answer, or it is not worked out (a fraction goes in lowest terms)."
FORMS = {
    "number": 'a line "Answer: ..." with one number (if it is a fraction, in lowest terms)',
    "set": 'a line "Answer: x = ... or x = ..." with all solutions',
    "interval": 'a line like "Answer: x < ...", "Answer: ... <= x < ..." or "Answer: x < ... or x >= ..."',
    "assignments": 'a line "Answer: x = ..., y = ..."',
}
KINDS = tuple(FORMS)
UNREADABLE = {kind: f"No answer could be read (or several, where one is asked for): end with {FORMS[kind]}." for kind in FORMS}


class Verdict(NamedTuple):
    status: str  # correct, wrong or unparsable
    why: str  # depends on the text that was read, not on the right answer


def check(completion: str, answer: str, kind: str = "number", unit: str = "", lowest_terms: bool = False) -> Verdict:
    """Of a whole completion. answer: the right one, in the standard form; unit: "%" or any other."""
    return verdict(find_answer(completion, kind), answer, kind, unit, lowest_terms)


def verdict(text: str, answer: str, kind: str = "number", unit: str = "", lowest_terms: bool = False) -> Verdict:
    """Of an answer that stands alone."""
    gold = read_gold(answer, kind, unit)
    try:
        found = read(text, kind, unit, tuple(name for name, _ in gold))
    except Unreadable:
        return Verdict("unparsable", UNREADABLE[kind])
    values = [value for _, values in found for value in values]
    rational = all(value.exact is not None for _, values in gold for value in values)
    worked_out = not rational or all(value.exact is not None and (value.simple or not lowest_terms) for value in values)
    if worked_out and same(gold, found):
        return Verdict("correct", "")
    return Verdict("wrong", WRONG if all(value.simple for value in values) else NOT_WORKED_OUT)


@functools.lru_cache(maxsize=4096)
def read_gold(answer: str, kind: str, unit: str = "") -> Reading:
    """The right answer of a task; one that cannot be read is a ValueError."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: choose {', '.join(KINDS)}")
    try:
        gold = read(answer, kind, unit)
    except Unreadable:
        raise ValueError(f"answer={answer!r:.80} cannot be read as a {kind}: see jmarl.envs.math.answers") from None
    for value in (value for _, values in gold for value in values):
        if value.exact is None and is_rational(value.latex):
            raise ValueError(f"answer={answer!r:.80} has {value.latex}, which is rational: write it as a number or fraction")
    return gold


# ---- where the answer is

_MARK = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|####|<answer>|\banswers?\b[a-z *_]{0,40}?(?:\b(?:is|are)\b|[:=])", re.I)
_SAYS = re.compile(r"[0-9∞½¼¾⅓⅔]|\\infty|\binf|\boo\b", re.I)
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_SETS = re.compile(r"[ \t]{0,8}(?:[-*] |[$*]{1,2}|\\\()?[a-z](?:_\{?[0-9]\}?)? ?=")
_CLAUSE = re.compile(r"[.,;:!?]\s")


def find_answer(completion: str, kind: str = "number") -> str:
    """The part of a completion that is its answer; "" if there is none."""
    text = completion[-TAIL:]
    for mark in reversed(list(_MARK.finditer(text))):
        rest = text[mark.end() : mark.end() + 2 * LONGEST]
        found = _braced(rest) if mark.group().endswith("{") else _sentence(rest.partition("</")[0], kind)
        if _SAYS.search(found):
            return found
    lines = [line for line in reversed(text.splitlines()) if _SAYS.search(line)]
    if kind != "number":
        return lines[0].strip() if lines else ""
    return next(filter(None, map(_last_number, lines)), "")


def _last_number(line: str) -> str:
    """The line, if it can be read as one number; else from where the last of its numbers begins."""
    line = spelled(line)
    try:
        if len(line) <= LONGEST and number(line):
            return line
    except Unreadable:
        pass
    found = list(NUMERAL.finditer(line))
    if not found:
        return ""
    last = found[-1].start()
    before = _CLAUSE.split(line[found[-2].end() if len(found) > 1 else 0 : last])[-1]
    changed = CHANGES.search(re.sub(r"^ ?but\b", "", before) + "#")  # "it isn't 22"; "not 21 but 22" is fine
    return line[:LONGEST] if changed else _sentence(line[last : last + 2 * LONGEST])


def _braced(rest: str) -> str:
    """Up to the brace that closes, or to the end of the line where none does."""
    depth = 1
    for i, c in enumerate(rest):
        depth += (c == "{") - (c == "}")
        if not depth:
            return rest[:i]
    return rest.partition("\n")[0]


def _sentence(rest: str, kind: str = "number") -> str:
    """The first line that is not empty, as far as the end of the first sentence that says something."""
    lines = rest.lstrip(" \t\r\n:=*_").split("\n")
    many = kind in ("set", "assignments") and all(map(_SETS.match, lines[:2]))
    line = (
        ", ".join(re.sub(r"^\s*[-*] ", "", line).strip(" .,;\r") for line in takewhile(_SETS.match, lines))
        if many
        else lines[0]
    )
    said = ""
    for part in _SENTENCE.split(line):
        said += (" " if said else "") + part
        if _SAYS.search(part):
            break
    return said.strip()
