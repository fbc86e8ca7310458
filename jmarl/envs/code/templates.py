"""The templates of generated programming problems: what a program computes, in words and as a Python expression.

Only data; `problems.py` turns them into items. A problem is a core template; at difficulty 2 a step before it, at difficulty 3
also a step after it. The texts are formatted with the problem's constants a and b (core), c (before) and d (after). The ranges
of a and b give every template at least 1,000 distinct problems at every difficulty.
"""

from typing import Literal, NamedTuple

Kind = Literal["numbers", "number", "text"]


class Template(NamedTuple):
    """What a program computes from its input x, in words and as an expression of x, a and b."""

    input_kind: Kind
    output_kind: Kind
    words: str
    code: str
    a_range: tuple[int, int] = (2, 60)  # of the constants a and b, both ends included
    b_range: tuple[int, int] = (1, 60)


class ExtraStep(NamedTuple):
    """A step before or after the core, in words and as a line of code."""

    words: str
    code: str


TEMPLATES: dict[str, Template] = {
    "weighted_sum": Template(
        "numbers", "number", "the sum of {a} * v + {b} over all numbers v", "sum({a} * v + {b} for v in x)"
    ),
    "remainders": Template(
        "numbers",
        "number",
        "how many numbers leave remainder {b} modulo {a}",
        "sum(v % {a} == {b} for v in x)",
        a_range=(60, 99),
        b_range=(0, 59),
    ),
    "farthest": Template(
        "numbers",
        "number",
        "the largest distance of a number to {a}, plus {b} (just {b} if there is none)",
        "max((abs(v - {a}) for v in x), default=0) + {b}",
    ),
    "nearest": Template(
        "numbers",
        "number",
        "the smallest distance of a number to {a}, times {b} (0 if there is none)",
        "min((abs(v - {a}) for v in x), default=0) * {b}",
    ),
    "above": Template("numbers", "number", "the sum of all numbers above {a}, minus {b}", "sum(v for v in x if v > {a}) - {b}"),
    "alternating": Template(
        "numbers",
        "number",
        "{a} times the alternating sum (first minus second plus third and so on), plus {b}",
        "{a} * (sum(x[::2]) - sum(x[1::2])) + {b}",
    ),
    "first_above": Template(
        "numbers",
        "number",
        "the index of the first number above {a}, or -{b} if there is none",
        "next((i for i, v in enumerate(x) if v > {a}), -{b})",
    ),
    "jumps": Template(
        "numbers",
        "number",
        "how many neighbours differ by at least {a}, plus {b}",
        "sum(abs(v - w) >= {a} for v, w in zip(x, x[1:])) + {b}",
    ),
    "spread": Template(
        "numbers",
        "number",
        "{a} times the difference between largest and smallest number (0 for none), plus {b}",
        "{a} * (max(x, default=0) - min(x, default=0)) + {b}",
    ),
    "distinct": Template("numbers", "number", "{a} times the count of distinct numbers, plus {b}", "{a} * len(set(x)) + {b}"),
    "scale": Template("numbers", "numbers", "every number times {a}, plus {b}", "[{a} * v + {b} for v in x]"),
    "clip": Template(
        "numbers", "numbers", "every number clipped to between {b} and {b} + {a}", "[min(max(v, {b}), {b} + {a}) for v in x]"
    ),
    "within": Template(
        "numbers",
        "numbers",
        "the numbers from {b} to {b} + {a}, both included, in their order",
        "[v for v in x if {b} <= v <= {b} + {a}]",
    ),
    "running": Template(
        "numbers",
        "numbers",
        "the running sums, each plus {a}, modulo {b}",
        "[(sum(x[: i + 1]) + {a}) % {b} for i in range(len(x))]",
        b_range=(5, 60),
    ),
    "replace": Template(
        "numbers", "numbers", "the numbers with every one below {b} replaced by {a}", "[{a} if v < {b} else v for v in x]"
    ),
    "by_remainder": Template(
        "numbers",
        "numbers",
        "the numbers sorted by remainder modulo {a}, equal ones by size, each plus {b}",
        "[v + {b} for v in sorted(x, key=lambda v: (v % {a}, v))]",
    ),
    "differences": Template(
        "numbers",
        "numbers",
        "the differences of neighbours (right minus left), each times {a}, minus {b}",
        "[{a} * (w - v) - {b} for v, w in zip(x, x[1:])]",
    ),
    "parabola": Template("number", "number", "{a} * x * x - {b} * x", "{a} * x * x - {b} * x"),
    "multiples": Template(
        "number", "number", "how many positive multiples of {a} are at most x, plus {b}", "max(x, 0) // {a} + {b}"
    ),
    "digits": Template(
        "number",
        "number",
        "{a} times the sum of the decimal digits of x without its sign, plus {b}",
        "{a} * sum(map(int, str(abs(x)))) + {b}",
    ),
    "steps": Template(
        "number",
        "number",
        "the remainder of x * x modulo {a}, if it is even, else {b}",
        "x * x % {a} if x * x % {a} % 2 == 0 else {b}",
    ),
    "bounce": Template(
        "number", "number", "the distance of x to the nearest of {a} and -{b}", "min(abs(x - {a}), abs(x + {b}))"
    ),
    "shift": Template(
        "text",
        "text",
        "the number {b} and a colon, then the text with every small letter moved {a} places on in the alphabet "
        "(z is followed by a)",
        "'{b}:' + ''.join(chr((ord(c) - 97 + {a}) % 26 + 97) if 'a' <= c <= 'z' else c for c in x)",
        a_range=(1, 25),
        b_range=(1, 99),
    ),
    "codes": Template(
        "text", "number", "{a} times the count of vowels (a, e, i, o, u), plus {b}", "{a} * sum(c in 'aeiou' for c in x) + {b}"
    ),
    "pad": Template(
        "text",
        "text",
        "the text with dots added at its end until it has {a} characters, then the number {b}",
        "x.ljust({a}, '.') + '{b}'",
        a_range=(5, 60),
    ),
    "lengths": Template(
        "text",
        "numbers",
        "the length of each word (words are separated by spaces), times {a}, plus {b}",
        "[{a} * len(w) + {b} for w in x.split()]",
    ),
}

BEFORE: dict[Kind, ExtraStep] = {  # by the kind of the input
    "numbers": ExtraStep("Leave out the numbers that are divisible by {c} first.", "x = [v for v in x if v % {c}]"),
    "number": ExtraStep("Add {c} to x first.", "x = x + {c}"),
    "text": ExtraStep("Use the text only up to its first {c} characters.", "x = x[:{c}]"),
}
AFTER: dict[Kind, ExtraStep] = {  # by the kind of the output
    "numbers": ExtraStep("At the end, keep only the first {d} of them, in reverse order.", "y = y[:{d}][::-1]"),
    "number": ExtraStep("If that is odd, subtract {d} from it.", "y = y - {d} if y % 2 else y"),
    "text": ExtraStep("At the end, put {d} exclamation marks behind it.", "y = y + '!' * {d}"),
}
ARGUMENT: dict[Kind, str] = {"numbers": "a list of whole numbers", "number": "a whole number", "text": "a text"}
BUGS = (  # text to replace in a right program, and what to replace it with
    (" + ", " - "),
    (" * ", " + "),
    (">", "<"),
    ("max", "min"),
    ("% ", "// "),
    ("[1:]", "[2:]"),
    (" - ", " + "),
    ("==", "!="),
)
