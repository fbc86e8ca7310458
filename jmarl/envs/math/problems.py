"""Mathematical problems made from templates: any number of them, with exact answers, nothing downloaded.

Topics: `arithmetic`, `algebra` (linear and quadratic equations, inequalities, systems), `word` (25 stories, `math_words`) and
`multi_step` (chains of operations, numbers thought of, sequences, functions in functions, percentages one after the other,
divisors). Difficulty 1 is one or two steps, 2 and 3 have more of them and larger numbers, fractions and roots.

Each task is drawn from the seed, and split by what it is, whatever its difficulty: its question, or of a story its template and
numbers (names make no new problem). None of `eval` is ever in `train`, whatever the seeds. A task has

    question, answer, kind, unit    see `math_answers`; answer in its standard form
    lowest_terms                    true: an answer that is a fraction has to be in lowest terms
    id, topic, difficulty
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

from jmarl.envs.data import check_split, split_of
from jmarl.envs.math import algebra as math_algebra
from jmarl.envs.math import words as math_words
from jmarl.envs.math.algebra import Made, made, polynomial

IN_VAIN = 5000  # draws without a new task, after which there are no more


# ---- several steps


def chain(level: int, rng: random.Random) -> Made | None:
    """What is done to a number, one thing after the other: 2, 3 or 5 things."""
    x = Fraction(rng.randint(2, 40))
    steps = [f"Start with {x}."]
    for _ in range((2, 3, 5)[level - 1]):
        operation, n = rng.choice(("Add", "Subtract", "Multiply by", "Divide by")), rng.randint(2, 12)
        x = {"Add": x + n, "Subtract": x - n, "Multiply by": x * n, "Divide by": x / n}[operation]
        if x.denominator > 1 or not 0 < x < 5000:
            return None
        steps.append(f"{operation} {n}.")
    return made(" ".join([*steps, "What is the result?"]), x)


def thought_of(level: int, rng: random.Random) -> Made | None:
    """A number found from what became of it."""
    x = y = rng.randint(2, 60)
    told = ["I think of a number."]
    for operation in ("multiply", "add", "multiply", "subtract")[: level + 1]:
        n = rng.randint(2, 12)
        y = {"multiply": y * n, "add": y + n, "subtract": y - n}[operation]
        told.append({"multiply": f"I multiply by {n}.", "add": f"I add {n}.", "subtract": f"I subtract {n}."}[operation])
    return made(" ".join([*told, f"The result is {y}. Which number did I think of?"]), x)


def sequence(level: int, rng: random.Random) -> Made | None:
    """A term, a sum, or a term from two others."""
    a, d, n = rng.randint(1, 50), rng.randint(2, 15), rng.randint(8, 40)
    begins = f"A sequence begins with {a}, {a + d}, {a + 2 * d} and goes on with the same difference."
    if level == 1:
        return made(f"{begins} What is its term number {n}?", a + (n - 1) * d)
    if level == 2:
        return made(f"{begins} What is the sum of its first {n} terms?", n * a + d * n * (n - 1) // 2)
    i, j = sorted(rng.sample(range(2, 20), 2))
    known = f"term number {i} is {a + (i - 1) * d} and term number {j} is {a + (j - 1) * d}"
    return made(f"In a sequence with one and the same difference, {known}. What is term number {n + 12}?", a + (n + 11) * d)


def functions(level: int, rng: random.Random) -> Made | None:
    """f(x), f(f(x)), f(g(x)) - g(f(x))."""
    a, b, c, d, x = (
        rng.randint(2, 9),
        rng.choice((-1, 1)) * rng.randint(1, 20),
        rng.randint(2, 9),
        rng.randint(1, 20),
        rng.randint(2, 20),
    )
    told = f"Let f(x) = {polynomial((a, 'x'), (b, ''))}"
    if level == 1:
        return made(f"{told}. What is f({x})?", a * x + b)
    if level == 2:
        return made(f"{told}. What is f(f({x}))?", a * (a * x + b) + b)
    told += f" and g(x) = {polynomial((c, 'x^2'), (-d, ''))}"
    return made(f"{told}. What is f(g({x})) - g(f({x}))?", a * (c * x * x - d) + b - c * (a * x + b) ** 2 + d)


def percentages(level: int, rng: random.Random) -> Made | None:
    """One, two or three of them; a result with at most two decimals."""
    start = x = Fraction(rng.randint(2, 100) * 10)
    if level == 1:
        p = rng.randint(1, 99)
        return made(f"What is {p}% of {start}?", start * p / 100)
    told = [f"A price is {start} dollars."]
    for i in range(level):
        p, up = rng.randint(1, 12) * 5, rng.random() < 0.5
        x *= Fraction(100 + p if up else 100 - p, 100)
        told.append(f"{'Then it' if i else 'It'} is {'raised' if up else 'lowered'} by {p}%.")
    return made(" ".join([*told, "How many dollars is the price in the end?"]), x) if (x * 100).denominator == 1 else None


def divisors(level: int, rng: random.Random) -> Made | None:
    if level == 1:
        k = rng.randint(2, 20)
        a, b = sorted((k * rng.randint(2, 20), k * rng.randint(2, 20)))
        return made(f"What is the greatest common divisor of {a} and {b}?", math.gcd(a, b)) if a < b else None
    if level == 2:
        a, b = sorted((rng.randint(4, 60), rng.randint(4, 60)))
        return made(f"What is the least common multiple of {a} and {b}?", math.lcm(a, b)) if a < b else None
    a, b, c, d = rng.randint(10, 99), rng.randint(10, 99), rng.randint(10, 99), rng.randint(7, 40)
    return made(f"What is the remainder when {a} × {b} + {c} is divided by {d}?", (a * b + c) % d)


# ---- all of them


def story(name: str, level: int, rng: random.Random) -> Made:
    numbers = math_words.draw(name, level, rng)
    question, answer = math_words.tell(name, level, numbers)
    return Made(question, str(answer), unit=math_words.STORIES[name].unit, key=" ".join(map(str, numbers)))


Template = Callable[[int, random.Random], Made | None]
TOPICS: dict[str, dict[str, Template]] = {
    "arithmetic": {"arithmetic": math_algebra.arithmetic},
    "algebra": {name: getattr(math_algebra, name) for name in ("linear", "quadratic", "system", "inequality")},
    "word": {name: partial(story, name) for name in math_words.STORIES},
    "multi_step": {f.__name__: f for f in (chain, thought_of, sequence, functions, percentages, divisors)},
}


class MathProblemGenerator:
    """Draws tasks. difficulty_range: from and to, both included; topics: of `TOPICS`, each as often as the others."""

    def __init__(self, difficulty_range: tuple[int, int] = (1, 3), topics: Sequence[str] = tuple(TOPICS)):
        low, high = difficulty_range
        if not 1 <= low <= high <= 3:
            raise ValueError(f"difficulty_range={difficulty_range}: give from and to, between 1 and 3")
        if not topics or set(topics) - TOPICS.keys():
            raise ValueError(f"topics={tuple(topics)}: choose {', '.join(TOPICS)}")
        self.difficulty_range, self.topics = (low, high), tuple(topics)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Distinct tasks, the same for the same seed; fewer if so many cannot be found."""
        check_split(split)
        rng, found = random.Random(f"{seed} {split} {self.difficulty_range} {self.topics}"), dict[str, dict]()
        in_vain = 0
        while len(found) < count and in_vain < IN_VAIN:
            task, in_vain = self._draw(rng), in_vain + 1
            if task and split_of(task["id"]) == split and task["id"] not in found:
                found[task["id"]], in_vain = task, 0
        return list(found.values())

    def _draw(self, rng: random.Random) -> dict | None:
        """A task of either split, or None."""
        level, topic = rng.randint(*self.difficulty_range), rng.choice(self.topics)
        name = rng.choice(sorted(TOPICS[topic]))
        found = TOPICS[topic][name](level, rng)
        if found is None:
            return None
        return {
            "id": f"{name}/{found.key or found.question}",
            "question": found.question,
            "answer": found.answer,
            "kind": found.kind,
            "unit": found.unit,
            "lowest_terms": True,
            "topic": topic,
            "difficulty": level,
        }

    def describe(self) -> dict:
        return {"difficulty_range": list(self.difficulty_range), "topics": list(self.topics)}
