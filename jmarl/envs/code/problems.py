"""Programming problems made from templates: any number of them, with tests, nothing downloaded.

A problem is a core (26 templates over lists of numbers, numbers and texts, each with two constants) and at difficulty 2 something
that is done before it, at 3 also something after it. Constants are drawn from ranges that give every template at least 1,000
distinct problems at every difficulty. Tests are what the reference returns on inputs that the prompt does not show; the prompt
shows one other example. Problems are split by what they are (a hash of template, difficulty and constants): none of `eval` is
ever in `train`, whatever the seeds.

`generate` gives problems to solve, `generate_repairs` broken programs to mend, with what they return where they are wrong.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

SPLITS = ("train", "eval")
EVAL_SHARE = 0.2
TESTS = 6


class Template(NamedTuple):
    """A core: what goes in and out (numbers, number, text), in words and as an expression of x, a and b."""

    takes: str
    gives: str
    words: str
    code: str
    a: tuple[int, int]
    b: tuple[int, int]


_WIDE, _SMALL = (2, 60), (1, 60)
TEMPLATES = {
    "weighted_sum": Template("numbers", "number", "the sum of {a} * v + {b} over all numbers v", "sum({a} * v + {b} for v in x)", _WIDE, _SMALL),
    "remainders": Template("numbers", "number", "how many numbers leave remainder {b} modulo {a}", "sum(v % {a} == {b} for v in x)", (60, 99), (0, 59)),
    "farthest": Template("numbers", "number", "the largest distance of a number to {a}, plus {b} (just {b} if there is none)", "max((abs(v - {a}) for v in x), default=0) + {b}", _WIDE, _SMALL),
    "nearest": Template("numbers", "number", "the smallest distance of a number to {a}, times {b} (0 if there is none)", "min((abs(v - {a}) for v in x), default=0) * {b}", _WIDE, _SMALL),
    "above": Template("numbers", "number", "the sum of all numbers above {a}, minus {b}", "sum(v for v in x if v > {a}) - {b}", _WIDE, _SMALL),
    "alternating": Template("numbers", "number", "{a} times the alternating sum (first minus second plus third and so on), plus {b}", "{a} * (sum(x[::2]) - sum(x[1::2])) + {b}", _WIDE, _SMALL),
    "first_above": Template("numbers", "number", "the index of the first number above {a}, or -{b} if there is none", "next((i for i, v in enumerate(x) if v > {a}), -{b})", _WIDE, _SMALL),
    "jumps": Template("numbers", "number", "how many neighbours differ by at least {a}, plus {b}", "sum(abs(v - w) >= {a} for v, w in zip(x, x[1:])) + {b}", _WIDE, _SMALL),
    "spread": Template("numbers", "number", "{a} times the difference between largest and smallest number (0 for none), plus {b}", "{a} * (max(x, default=0) - min(x, default=0)) + {b}", _WIDE, _SMALL),
    "distinct": Template("numbers", "number", "{a} times the count of distinct numbers, plus {b}", "{a} * len(set(x)) + {b}", _WIDE, _SMALL),
    "scale": Template("numbers", "numbers", "every number times {a}, plus {b}", "[{a} * v + {b} for v in x]", _WIDE, _SMALL),
    "clip": Template("numbers", "numbers", "every number clipped to between {b} and {b} + {a}", "[min(max(v, {b}), {b} + {a}) for v in x]", _WIDE, _SMALL),
    "within": Template("numbers", "numbers", "the numbers from {b} to {b} + {a}, both included, in their order", "[v for v in x if {b} <= v <= {b} + {a}]", _WIDE, _SMALL),
    "running": Template("numbers", "numbers", "the running sums, each plus {a}, modulo {b}", "[(sum(x[: i + 1]) + {a}) % {b} for i in range(len(x))]", _WIDE, (5, 60)),
    "replace": Template("numbers", "numbers", "the numbers with every one below {b} replaced by {a}", "[{a} if v < {b} else v for v in x]", _WIDE, _SMALL),
    "by_remainder": Template("numbers", "numbers", "the numbers sorted by remainder modulo {a}, equal ones by size, each plus {b}", "[v + {b} for v in sorted(x, key=lambda v: (v % {a}, v))]", _WIDE, _SMALL),
    "differences": Template("numbers", "numbers", "the differences of neighbours (right minus left), each times {a}, minus {b}", "[{a} * (w - v) - {b} for v, w in zip(x, x[1:])]", _WIDE, _SMALL),
    "parabola": Template("number", "number", "{a} * x * x - {b} * x", "{a} * x * x - {b} * x", _WIDE, _SMALL),
    "multiples": Template("number", "number", "how many positive multiples of {a} are at most x, plus {b}", "max(x, 0) // {a} + {b}", _WIDE, _SMALL),
    "digits": Template("number", "number", "{a} times the sum of the decimal digits of x without its sign, plus {b}", "{a} * sum(map(int, str(abs(x)))) + {b}", _WIDE, _SMALL),
    "steps": Template("number", "number", "the remainder of x * x modulo {a}, if it is even, else {b}", "x * x % {a} if x * x % {a} % 2 == 0 else {b}", _WIDE, _SMALL),
    "bounce": Template("number", "number", "the distance of x to the nearest of {a} and -{b}", "min(abs(x - {a}), abs(x + {b}))", _WIDE, _SMALL),
    "shift": Template("text", "text", "the number {b} and a colon, then the text with every small letter moved {a} places on in the alphabet (z is followed by a)", "'{b}:' + ''.join(chr((ord(c) - 97 + {a}) % 26 + 97) if 'a' <= c <= 'z' else c for c in x)", (1, 25), (1, 99)),
    "codes": Template("text", "number", "{a} times the count of vowels (a, e, i, o, u), plus {b}", "{a} * sum(c in 'aeiou' for c in x) + {b}", _WIDE, _SMALL),
    "pad": Template("text", "text", "the text with dots added at its end until it has {a} characters, then the number {b}", "x.ljust({a}, '.') + '{b}'", (5, 60), (1, 60)),
    "lengths": Template("text", "numbers", "the length of each word (words are separated by spaces), times {a}, plus {b}", "[{a} * len(w) + {b} for w in x.split()]", _WIDE, _SMALL),
}  # fmt: skip

# What is done before the core, and after it: words and a line of code, with a constant c or d.
BEFORE = {
    "numbers": ("Leave out the numbers that are divisible by {c} first.", "x = [v for v in x if v % {c}]"),
    "number": ("Add {c} to x first.", "x = x + {c}"),
    "text": ("Use the text only up to its first {c} characters.", "x = x[:{c}]"),
}
AFTER = {
    "numbers": ("At the end, keep only the first {d} of them, in reverse order.", "y = y[:{d}][::-1]"),
    "number": ("If that is odd, subtract {d} from it.", "y = y - {d} if y % 2 else y"),
    "text": ("At the end, put {d} exclamation marks behind it.", "y = y + '!' * {d}"),
}
ARGUMENT = {"numbers": "a list of whole numbers", "number": "a whole number", "text": "a text"}
BREAKS = (
    (" + ", " - "),
    (" * ", " + "),
    (">", "<"),
    ("max", "min"),
    ("% ", "// "),
    ("[1:]", "[2:]"),
    (" - ", " + "),
    ("==", "!="),
)


class Problem(NamedTuple):
    """What makes a problem itself; everything else follows."""

    template: str
    difficulty: int
    constants: tuple[int, int, int, int]  # a, b, c, d

    @property
    def split(self) -> str:
        share = zlib.crc32(repr(tuple(self)).encode()) / (1 << 32)
        return "eval" if share < EVAL_SHARE else "train"

    @property
    def entry_point(self) -> str:
        return f"{self.template}_{zlib.crc32(repr(tuple(self)).encode()) % 1000}"

    def text(self) -> str:
        """What is asked, in words."""
        core, names = TEMPLATES[self.template], dict(zip("abcd", self.constants, strict=True))
        lines = [f"Write {self.entry_point}(x), where x is {ARGUMENT[core.takes]}. It returns {core.words}."]
        lines += [BEFORE[core.takes][0]] * (self.difficulty > 1) + [AFTER[core.gives][0]] * (self.difficulty > 2)
        return " ".join(lines).format(**names)

    def solution(self) -> str:
        """The reference."""
        core, names = TEMPLATES[self.template], dict(zip("abcd", self.constants, strict=True))
        lines = [BEFORE[core.takes][1]] * (self.difficulty > 1) + [f"y = {core.code}"]
        lines += [AFTER[core.gives][1]] * (self.difficulty > 2) + ["return y"]
        return "\n    ".join([f"def {self.entry_point}(x):", *lines]).format(**names) + "\n"


def draw(rng: random.Random, difficulty: int) -> Problem:
    """A problem of any split."""
    name = rng.choice(sorted(TEMPLATES))
    core = TEMPLATES[name]
    constants = (rng.randint(*core.a), rng.randint(*core.b), rng.randint(2, 9), rng.randint(2, 9))
    used = 2 + (difficulty > 1) + (difficulty > 2)
    return Problem(name, difficulty, (*constants[:used], *(0,) * (4 - used)))  # type: ignore[arg-type]


class CodeProblemGenerator:
    """Problems as tasks. difficulty_range: from and to, both included."""

    def __init__(self, difficulty_range: tuple[int, int] = (1, 3)):
        self.difficulty_range = check_range(difficulty_range)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return generate(count, split=split, seed=seed, difficulty=self.difficulty_range)


def check_range(difficulty: tuple[int, int]) -> tuple[int, int]:
    low, high = difficulty
    if not 1 <= low <= high <= 3:
        raise ValueError(f"difficulty={difficulty}: give from and to, between 1 and 3")
    return low, high


def generate(count: int, *, split: str = "train", seed: int = 0, difficulty: tuple[int, int] = (1, 3)) -> list[dict]:
    """Distinct problems as items of `code_generation`; difficulty: from and to, both included."""
    return [_item(problem, rng, problem.text()) for problem, rng in _draws(count, split, seed, difficulty)]


def generate_repairs(count: int, *, split: str = "train", seed: int = 0, difficulty: tuple[int, int] = (1, 3)) -> list[dict]:
    """Distinct broken programs as items: the prompt has the program and where it goes wrong, though not what would be right."""
    out = []
    for problem, rng in _draws(4 * count, split, seed, difficulty):
        if len(out) < count and (found := _broken(problem, rng)) is not None:
            program, shown = found
            text = f"{problem.text()}\n\nThis program is wrong:\n\n{program}\n{shown}\n\nMend it."
            out.append(_item(problem, rng, text) | {"broken": program})
    if len(out) < count:
        raise ValueError(f"{len(out)} of {count} broken programs could be made: ask for fewer, or for more difficulties")
    return out


def _draws(count: int, split: str, seed: int, difficulty: tuple[int, int]) -> list[tuple[Problem, random.Random]]:
    """Distinct problems of a split, each with random numbers of its own."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: choose {' or '.join(SPLITS)}")
    low, high = check_range(difficulty)
    rng, found = random.Random(f"{seed} {split} {difficulty}"), dict[Problem, random.Random]()
    for _ in range(100 * count + 1000):
        if len(found) == count:
            return list(found.items())
        problem = draw(rng, rng.randint(low, high))
        if problem.split == split and problem not in found:
            found[problem] = random.Random(f"{seed} {problem}")
    raise ValueError(f"{count} distinct problems could not be drawn, only {len(found)}: ask for fewer")


def _input(takes: str, rng: random.Random) -> Any:
    if takes == "numbers":
        return [rng.randint(-20, 120) for _ in range(rng.randint(0, 9))]
    if takes == "number":
        return rng.randint(-50, 200)
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 7))) for _ in range(rng.randint(1, 5)))


def _function(program: str, name: str) -> Callable[[Any], Any]:
    """A program that these templates made, run here: it is this module's own."""
    names: dict[str, Any] = {}
    exec(program, names)
    return names[name]


def _item(problem: Problem, rng: random.Random, text: str) -> dict:
    takes, name = TEMPLATES[problem.template].takes, problem.entry_point
    reference = _function(problem.solution(), name)
    inputs: list[Any] = []
    while len(inputs) < TESTS + 1:
        if (x := _input(takes, rng)) not in inputs:
            inputs.append(x)
    example, *hidden = inputs
    asserts = "".join(f"    assert candidate({x!r}) == {reference(x)!r}\n" for x in hidden)
    return {
        "task_id": f"{problem.template}/{problem.difficulty}/{'-'.join(map(str, problem.constants))}",
        "prompt": f"{text}\n\nExample: {name}({example!r}) == {reference(example)!r}",
        "entry_point": name,
        "test": f"def check(candidate):\n{asserts}",
        "difficulty": problem.difficulty,
        "solution": problem.solution(),
    }


def _broken(problem: Problem, rng: random.Random) -> tuple[str, str] | None:
    """The reference with one thing changed, and a call where that shows; None if nothing was found."""
    takes, name, solution = TEMPLATES[problem.template].takes, problem.entry_point, problem.solution()
    head, _, body = solution.partition("\n")
    for old, new in rng.sample(BREAKS, len(BREAKS)):
        program = f"{head}\n{body.replace(old, new, 1)}"
        if program == solution:
            continue
        for _ in range(20):
            x = _input(takes, rng)
            try:
                got = repr(_function(program, name)(x))
            except Exception as error:
                return program, f"{name}({x!r}) raises {type(error).__name__}: {error}"
            if got != repr(_function(solution, name)(x)):
                return program, f"{name}({x!r}) returns {got}, which is wrong"
    return None
