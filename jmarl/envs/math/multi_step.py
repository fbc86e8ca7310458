"""Templates of problems with several steps: chains of operations, sequences, composed functions, percentages, divisors."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from jmarl.envs.math.templates import MathProblem, Template, nonzero_integer, number_problem, polynomial


def chain(level: int, rng: random.Random) -> MathProblem | None:
    """Draw 2, 3 or 5 operations that are applied to a number one after the other."""
    x = Fraction(rng.randint(2, 40))
    sentences = [f"Start with {x}."]
    for _ in range((2, 3, 5)[level - 1]):
        operation, n = rng.choice(("Add", "Subtract", "Multiply by", "Divide by")), rng.randint(2, 12)
        x = {"Add": x + n, "Subtract": x - n, "Multiply by": x * n, "Divide by": x / n}[operation]
        if x.denominator > 1 or not 0 < x < 5000:
            return None
        sentences.append(f"{operation} {n}.")
    return number_problem(" ".join([*sentences, "What is the result?"]), x)


def thought_of(level: int, rng: random.Random) -> MathProblem | None:
    """Draw operations and their result; the answer is the number that they began with."""
    start = result = rng.randint(2, 60)
    sentences = ["I think of a number."]
    for operation in ("multiply", "add", "multiply", "subtract")[: level + 1]:
        n = rng.randint(2, 12)
        result = {"multiply": result * n, "add": result + n, "subtract": result - n}[operation]
        sentences.append({"multiply": f"I multiply by {n}.", "add": f"I add {n}.", "subtract": f"I subtract {n}."}[operation])
    return number_problem(" ".join([*sentences, f"The result is {result}. Which number did I think of?"]), start)


def sequence(level: int, rng: random.Random) -> MathProblem | None:
    """Draw an arithmetic sequence and ask for a term; for a sum; for a term given two others."""
    first, difference, n = rng.randint(1, 50), rng.randint(2, 15), rng.randint(8, 40)

    def term(index: int) -> int:  # counted from 1
        return first + (index - 1) * difference

    opening = f"A sequence begins with {term(1)}, {term(2)}, {term(3)} and goes on with the same difference."
    if level == 1:
        return number_problem(f"{opening} What is its term number {n}?", term(n))
    if level == 2:
        return number_problem(f"{opening} What is the sum of its first {n} terms?", n * (first + term(n)) // 2)
    i, j = sorted(rng.sample(range(2, 20), 2))
    known = f"term number {i} is {term(i)} and term number {j} is {term(j)}"
    return number_problem(
        f"In a sequence with one and the same difference, {known}. What is term number {n + 12}?", term(n + 12)
    )


def functions(level: int, rng: random.Random) -> MathProblem | None:
    """Draw f(x) = ax + b and g(x) = cx^2 - d, and ask for f(x); f(f(x)); f(g(x)) - g(f(x))."""
    a, b, c, d = rng.randint(2, 9), nonzero_integer(rng, 20), rng.randint(2, 9), rng.randint(1, 20)
    x = rng.randint(2, 20)
    definition = f"Let f(x) = {polynomial((a, 'x'), (b, ''))}"
    if level == 1:
        return number_problem(f"{definition}. What is f({x})?", a * x + b)
    if level == 2:
        return number_problem(f"{definition}. What is f(f({x}))?", a * (a * x + b) + b)
    definition += f" and g(x) = {polynomial((c, 'x^2'), (-d, ''))}"
    f_of_g, g_of_f = a * (c * x * x - d) + b, c * (a * x + b) ** 2 - d
    return number_problem(f"{definition}. What is f(g({x})) - g(f({x}))?", f_of_g - g_of_f)


def percentages(level: int, rng: random.Random) -> MathProblem | None:
    """Draw one percentage of a number, or two or three changes of a price whose result has at most two decimals."""
    start = price = Fraction(rng.randint(2, 100) * 10)
    if level == 1:
        percent = rng.randint(1, 99)
        return number_problem(f"What is {percent}% of {start}?", start * percent / 100)
    sentences = [f"A price is {start} dollars."]
    for i in range(level):
        percent, raised = rng.randint(1, 12) * 5, rng.random() < 0.5
        price *= Fraction(100 + percent if raised else 100 - percent, 100)
        sentences.append(f"{'Then it' if i else 'It'} is {'raised' if raised else 'lowered'} by {percent}%.")
    if (price * 100).denominator != 1:
        return None
    return number_problem(" ".join([*sentences, "How many dollars is the price in the end?"]), price)


def divisors(level: int, rng: random.Random) -> MathProblem | None:
    """Ask for a greatest common divisor; for a least common multiple; for a remainder."""
    if level == 1:
        k = rng.randint(2, 20)
        a, b = sorted((k * rng.randint(2, 20), k * rng.randint(2, 20)))
        return number_problem(f"What is the greatest common divisor of {a} and {b}?", math.gcd(a, b)) if a < b else None
    if level == 2:
        a, b = sorted((rng.randint(4, 60), rng.randint(4, 60)))
        return number_problem(f"What is the least common multiple of {a} and {b}?", math.lcm(a, b)) if a < b else None
    a, b, c, d = rng.randint(10, 99), rng.randint(10, 99), rng.randint(10, 99), rng.randint(7, 40)
    return number_problem(f"What is the remainder when {a} × {b} + {c} is divided by {d}?", (a * b + c) % d)


MULTI_STEP: dict[str, Template] = {
    "chain": chain,
    "thought_of": thought_of,
    "sequence": sequence,
    "functions": functions,
    "percentages": percentages,
    "divisors": divisors,
}
