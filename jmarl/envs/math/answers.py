r"""Check whether an answer is right: find it in a completion, parse it as the kind that is asked for, compare it exactly.

The answer stands after the last mark that is followed by a digit or infinity. Marks are `\boxed{…}`, `####`, `<answer>`, and
`answer is`, `answer:` or `answer =`. After `\boxed` the answer is the content of the braces. After another mark it is the rest
of the line (of the next line if that is empty; for sets and assignments all consecutive lines that begin with a variable and
an equals sign), up to the end of the sentence. Without a mark it is the last line with a number, if the line can be read as one
number, else the last number in it; for other kinds it is the last line with a digit. Only the last `MAX_COMPLETION_TAIL`
characters are searched, and an answer has at most `MAX_ANSWER_LENGTH`.

Kinds, with an answer in its standard form, and what else is read as the same:

    number        "42", "-3/4", "3\sqrt{2}"   1,234  6/8  1 1/2  \frac{3}{4}  1.5e3  1.5 \times 10^3  $5  x = 5
    set           "2, 3"                      {3, 2}  x = 2 or x = 3  2 and 3  3 \pm \sqrt{2}
    interval      "x < 2 or x >= 5"           5 <= x or 2 > x  (-oo, 2) \cup [5, oo)  x \in [1, 2)  1 <= x and x < 2
    assignments   "x = 2, y = 3"              y = 3 and x = 2  (x, y) = (2, 3)  (2, 3)

A name of the number may stand before or after it ("n = 34", "n is 34", "34 = n"). As the right answer of a task, an equation or
formula with unknowns (2x + 4y = 0, y = 3t, x = 1 and y = 2) is refused; in a completion the last side of one is read, because
"m + n = 27 + 7 = 34" answers the question.

Words and units around a number are ignored ("42 apples"), except words that change it ("not 42", "two dozen"); then it cannot
be read. Percent: 5% is 0.05. If the task's unit is "%", 5 and 5% are both 5, and 0.05 is wrong. Numbers must be exactly equal:
0.33 is not 1/3. The value must be computed, so that a question is not answered by repeating it: if the right answer is
rational, 12 + 7 and \sqrt{49} are wrong, and with `lowest_terms` 6/8 is wrong too.

A verdict is `correct`, `wrong`, or `unparsable` (no answer of the kind can be read). Several numbers where one is asked for
("41 or 42", "1 2 3"), values of several names ("AB = 4, CD = 5") and multiples of a variable ("2a") are unparsable; of several
boxed answers the last one counts, and an answer that is taken back ("Wait, no, it is 43") does not. The feedback of a verdict
depends only on the text of the answer, never on the right answer.

Rational numbers are compared as fractions; roots and pi by math-verify (see `expressions.py`). Its own parsing of sets and
intervals is not used: it accepts (3, 2) for x = 2, y = 3, the interval from 2 to 3 for the set {2, 3}, and 9% for 9.
Left out, because no task needs them: variables in answers, functions other than the square root, numbers in words, recurring
decimals, complex numbers, the empty set, thousands commas in sets, checking of units, and checking of the variable's name in
sets and intervals.
"""

from __future__ import annotations

import functools
import re
from itertools import takewhile
from typing import NamedTuple

from jmarl.envs.math.answer_kinds import MAX_ANSWER_LENGTH, ParsedAnswer, parse_answer, same_answer
from jmarl.envs.math.expressions import is_rational
from jmarl.envs.math.numbers import CHANGING_WORDS, NUMERAL, Unreadable, is_equation, normalize, parse_number

MAX_COMPLETION_TAIL = 4000  # characters at the end of a completion that are searched

# Read by the agents.
WRONG = "That is not the right answer."
NOT_WORKED_OUT = "That is not the right answer, or it is not worked out (a fraction goes in lowest terms)."
FORMS = {
    "number": 'a line "Answer: ..." with one number (if it is a fraction, in lowest terms)',
    "set": 'a line "Answer: x = ... or x = ..." with all solutions',
    "interval": 'a line like "Answer: x < ...", "Answer: ... <= x < ..." or "Answer: x < ... or x >= ..."',
    "assignments": 'a line "Answer: x = ..., y = ..."',
}
UNREADABLE = {kind: f"No answer could be read (or several, where one is asked for): end with {FORMS[kind]}." for kind in FORMS}

KINDS = tuple(FORMS)


class AnswerCheck(NamedTuple):
    """The result of a check."""

    status: str  # correct, wrong or unparsable
    feedback: str  # depends on the text that was read, not on the right answer


def check_completion(
    completion: str, answer: str, kind: str = "number", unit: str = "", lowest_terms: bool = False
) -> AnswerCheck:
    """Find the answer in a completion and compare it with the right one.

    Args:
        completion: what an agent wrote.
        answer: the right answer, in its standard form.
        kind: number, set, interval or assignments.
        unit: "%" if 5% means 5, not 0.05; any other unit is ignored.
        lowest_terms: whether an answer that is a fraction must be in lowest terms.
    """
    return check_answer(find_answer(completion, kind), answer, kind, unit, lowest_terms)


def check_answer(text: str, answer: str, kind: str = "number", unit: str = "", lowest_terms: bool = False) -> AnswerCheck:
    """Compare an answer that stands alone with the right one; arguments as in `check_completion`."""
    gold = read_gold(answer, kind, unit)
    try:
        parsed = parse_answer(text, kind, unit, tuple(variable for variable, _ in gold))
    except Unreadable:
        return AnswerCheck("unparsable", UNREADABLE[kind])
    values = [value for _, numbers in parsed for value in numbers]
    gold_is_rational = all(value.exact is not None for _, numbers in gold for value in numbers)
    worked_out = not gold_is_rational or all(
        value.exact is not None and (value.reduced or not lowest_terms) for value in values
    )
    if worked_out and same_answer(gold, parsed):
        return AnswerCheck("correct", "")
    return AnswerCheck("wrong", WRONG if all(value.reduced for value in values) else NOT_WORKED_OUT)


@functools.lru_cache(maxsize=4096)
def read_gold(answer: str, kind: str, unit: str = "") -> ParsedAnswer:
    """Parse the right answer of a task. It may stand in a box or after another mark, as in a completion.

    Raises:
        ValueError: the kind is unknown, the answer cannot be read, it is an equation where a number is asked for, or it is a
            rational number written as an expression.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: choose {', '.join(KINDS)}")
    one_mark = _MARK.search(answer) and len(_BOX.findall(answer)) < 2
    text = find_answer(answer, kind) if one_mark else answer
    try:
        gold = parse_answer(text, kind, unit)
        if kind == "number" and is_equation(normalize(text)):
            raise Unreadable("an equation or a formula with unknowns; a number, or one name and its value, is read")
    except Unreadable as error:
        raise ValueError(f"answer={answer!r:.80} cannot be read as a {kind} ({error}): see jmarl.envs.math.answers") from None
    for value in (value for _, numbers in gold for value in numbers):
        if value.exact is None and is_rational(value.latex):
            raise ValueError(f"answer={answer!r:.80} has {value.latex}, which is rational: write it as a number or fraction")
    return gold


# ---- finding the answer

_BOX = re.compile(r"\\(?:boxed|f(?:rame)?box)\s{0,3}\{")
_MARK = re.compile(rf"{_BOX.pattern}|####|<answer>|\banswers?\b[a-z *_]{{0,40}}?(?:\b(?:is|are)\b|[:=])", re.I)
_HAS_NUMBER = re.compile(r"[0-9∞½¼¾⅓⅔]|\\infty|\binf|\boo\b|^[\W_]*(?:[a-z] ?= ?)?(?:\\?pi|π)[\W_]*$", re.I)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
# Words before a number that replace an answer: "Wait, no, it is 43".
_TAKEN_BACK = r"\b(?:wait|oops|sorry|no|actually|correction)[,.:;!]"
_FILLER = (
    r"wait|oops|sorry|no|actually|but|i|mean|meant|the|right|correct|should|must|was|really|made|a|mistake|an|error|it|that|"
    r"answer|result|value|is|be|correction"
)
_CORRECTION = re.compile(
    rf"{_TAKEN_BACK}(?:[\s$*(,.:;!]|\\[(\[]|\b(?:{_FILLER})\b|['’]s)*(?=[-−]?[0-9]|\\(?:frac|sqrt|boxed))", re.I
)
MAX_CORRECTION_WORDS = 3  # of the corrected answer: "43 dollars"
_ASSIGNMENT = re.compile(r"[ \t]{0,8}(?:[-*] |[$*]{1,2}|\\\()?[a-z](?:_\{?[0-9]\}?)? ?=")
_CLAUSE_END = re.compile(r"[.,;:!?]\s")


def find_answer(completion: str, kind: str = "number") -> str:
    """Return the part of a completion that is its answer; "" if there is none."""
    text = completion[-MAX_COMPLETION_TAIL:]
    for mark in reversed(list(_MARK.finditer(text))):
        after_mark = text[mark.end() : mark.end() + 2 * MAX_ANSWER_LENGTH]
        if mark.group().endswith("{"):
            answer = _until_closing_brace(after_mark)
        else:
            answer = _first_sentence(after_mark.partition("</")[0], kind)
        if _HAS_NUMBER.search(answer):
            corrections = list(_CORRECTION.finditer(text, mark.end())) if kind == "number" else []
            tails = [_first_sentence(text[match.end() :][: 2 * MAX_ANSWER_LENGTH]) for match in corrections]
            short = [tail for tail in tails if len(tail.split()) <= MAX_CORRECTION_WORDS]  # longer ones only go on
            return short[-1] if short else answer
        if mark.group().endswith("{"):  # an empty box is no answer, whatever an earlier one has
            return ""
    lines = [line for line in reversed(text.splitlines()) if _HAS_NUMBER.search(line)]
    if kind != "number":
        return lines[0].strip() if lines else ""
    return next(filter(None, map(_last_number, lines)), "")


def _last_number(line: str) -> str:
    """Return the line if it can be read as one number, else the line from the beginning of its last number on."""
    line = normalize(line)
    try:
        if len(line) <= MAX_ANSWER_LENGTH and parse_number(line):
            return line
    except Unreadable:
        pass
    matches = list(NUMERAL.finditer(line))
    if not matches:
        return ""
    start = matches[-1].start()
    clause = _CLAUSE_END.split(line[matches[-2].end() if len(matches) > 1 else 0 : start])[-1]
    negated = CHANGING_WORDS.search(re.sub(r"^ ?but\b", "", clause) + "#")  # "it isn't 22"; but "not 21 but 22" is fine
    return line[:MAX_ANSWER_LENGTH] if negated else _first_sentence(line[start : start + 2 * MAX_ANSWER_LENGTH])


def _until_closing_brace(text: str) -> str:
    """Return the text up to the brace that closes, or up to the end of the line if none does."""
    depth = 1
    for i, c in enumerate(text):
        depth += (c == "{") - (c == "}")
        if not depth:
            return text[:i]
    return text.partition("\n")[0]


def _first_sentence(text: str, kind: str = "number") -> str:
    """Return the first line that is not empty, up to the end of its first sentence with a number.

    The first lines are joined if a set or assignments are written as one assignment a line.
    """
    lines = text.lstrip(" \t\r\n:=*_").split("\n")
    line = lines[0]
    if kind in ("set", "assignments") and all(map(_ASSIGNMENT.match, lines[:2])):
        assignments = takewhile(_ASSIGNMENT.match, lines)
        line = ", ".join(re.sub(r"^\s*[-*] ", "", assignment).strip(" .,;\r") for assignment in assignments)
    sentences = []
    for sentence in _SENTENCE_END.split(line):
        sentences.append(sentence)
        if _HAS_NUMBER.search(sentence):
            break
    return " ".join(sentences).strip()
