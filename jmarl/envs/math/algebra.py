"""Arithmetic and algebra for `math_problems`: expressions, equations, inequalities, systems.

Each function draws one problem of a difficulty (1, 2 or 3), or gives None where the numbers it drew do not make a good one.
"""

from __future__ import annotations

import math
import operator
import random
from fractions import Fraction
from typing import NamedTuple


class Made(NamedTuple):
    question: str
    answer: str  # in the standard form of math_answers
    kind: str = "number"
    unit: str = ""
    key: str = ""  # what the problem is, if that is less than its question


def made(question: str, answer: Fraction | int, key: str = "") -> Made:
    return Made(question, str(answer), key=key)


# ---- arithmetic

Tree = Fraction | tuple  # (sign, left, right)
_SIGNS = {"+": (1, operator.add), "-": (1, operator.sub), "×": (2, operator.mul), "÷": (2, operator.truediv)}


def value(tree: Tree) -> Fraction:
    return tree if isinstance(tree, Fraction) else _SIGNS[tree[0]][1](value(tree[1]), value(tree[2]))


def written(tree: Tree, above: int = 0) -> str:
    """With as few brackets as its meaning allows. above: how tightly the sign around it binds."""
    if isinstance(tree, Fraction):
        return str(tree) if tree.denominator == 1 else f"({tree})"
    rank = _SIGNS[tree[0]][0]
    text = f"{written(tree[1], rank)} {tree[0]} {written(tree[2], rank + 1)}"
    return f"({text})" if rank < above else text


def _tree(rng: random.Random, signs: int, leaf) -> Tree:
    if not signs:
        return leaf()
    left = rng.randint(0, signs - 1)
    return rng.choice("+-×÷"), _tree(rng, left, leaf), _tree(rng, signs - 1 - left, leaf)


def arithmetic(level: int, rng: random.Random) -> Made | None:
    """One sign; two or three and a whole result; four or five, or fractions."""
    if level == 1:
        sign, a, b = rng.choice("+-×÷"), rng.randint(2, 99), rng.randint(2, 99)
        b = b % 11 + 2 if sign in "×÷" else b
        tree: Tree = (sign, Fraction(a * b if sign == "÷" else a), Fraction(b))
    elif level == 2 or rng.random() < 0.5:
        signs = rng.randint(2, 3) if level == 2 else rng.randint(4, 5)
        tree = _tree(rng, signs, lambda: Fraction(rng.randint(2, 30)))
    else:
        tree = _tree(rng, rng.randint(1, 2), lambda: Fraction(rng.randint(1, 12), rng.randint(2, 12)))
        if "/" not in written(tree):  # 12/6 and the like are whole
            return None
    try:
        result = value(tree)
    except ZeroDivisionError:
        return None
    if abs(result) > 5000 or result.denominator > (1 if level < 3 else 200):
        return None
    assert isinstance(tree, tuple)  # it has a sign
    sign, left, right = tree
    one_sign = isinstance(left, Fraction) and isinstance(right, Fraction)
    key = f"{sign} {' '.join(sorted((str(left), str(right))))}" if one_sign and sign in "+×" else ""
    return made(f"What is {written(tree)}?", result, key)  # 2 + 3 and 3 + 2 are one problem


# ---- equations


def polynomial(*terms: tuple[int, str]) -> str:
    """3x - 5 of (3, "x"), (-5, "")."""
    out = ""
    for factor, letters in terms:
        size = "" if abs(factor) == 1 and letters else str(abs(factor))
        sign = ("-" if factor < 0 else "") if not out else (" - " if factor < 0 else " + ")
        out += f"{sign}{size}{letters}" if factor else ""
    return out or "0"


def _some(rng: random.Random, most: int, least: int = 1) -> int:
    """A whole number that is not 0, of either sign."""
    return rng.choice((-1, 1)) * rng.randint(least, most)


def linear(level: int, rng: random.Random) -> Made | None:
    a, b, c, d, e = rng.randint(2, 15), _some(rng, 30), _some(rng, 15), _some(rng, 40), _some(rng, 60)
    if level == 1:
        x = Fraction(_some(rng, 20))
        left, right = polynomial((a, "x"), (b, "")), str(a * x + b)
    elif level == 2:
        left, right, x = polynomial((a, "x"), (b, "")), polynomial((c, "x"), (d, "")), Fraction(d - b, a - c or 1)
    else:  # a (x + b) + c (x + d) = e
        left = polynomial((a, f"({polynomial((1, 'x'), (b, ''))})"), (c, f"({polynomial((1, 'x'), (d, ''))})"))
        right, x = str(e), Fraction(e - a * b - c * d, a + c or 1)
    if x.denominator > 12 or (level == 2 and a == c) or (level == 3 and a == -c):
        return None
    return made(f"Solve for x: {left} = {right}", x)


def _roots(question: str, *roots: Fraction | str) -> Made:
    return Made(question, ", ".join(map(str, roots)), "set")


def quadratic(level: int, rng: random.Random) -> Made | None:
    """x^2 = a; of whole roots; of rational roots, or roots with a square root."""
    p, q = _some(rng, 15), _some(rng, 15)
    if level == 1:
        a = rng.randint(2, 30)
        b = _some(rng, 60)
        return _roots(f"Solve for x: {polynomial((1, 'x^2'), (b, ''))} = {a * a + b}", Fraction(-a), Fraction(a))
    if level == 2:
        if p >= q:
            return None
        return _roots(f"Solve for x: {polynomial((1, 'x^2'), (-p - q, 'x'), (p * q, ''))} = 0", Fraction(p), Fraction(q))
    if rng.random() < 0.5:  # (a x - p) (b x - q)
        a, b = rng.randint(1, 5), rng.randint(2, 5)
        first, second = sorted((Fraction(p, a), Fraction(q, b)))
        equation = polynomial((a * b, "x^2"), (-a * q - b * p, "x"), (p * q, ""))
        return _roots(f"Solve for x: {equation} = 0", first, second) if first < second else None
    root, size = rng.randint(2, 15), rng.randint(1, 4)  # p ± size sqrt(root)
    if any(root % (k * k) == 0 for k in (2, 3)):
        return None
    surd = (str(size) if size > 1 else "") + rf"\sqrt{{{root}}}"
    equation = polynomial((1, "x^2"), (-2 * p, "x"), (p * p - size * size * root, ""))
    return _roots(f"Solve for x: {equation} = 0", f"{p} - {surd}", f"{p} + {surd}")


def system(level: int, rng: random.Random) -> Made | None:
    """A sum and a difference; small whole numbers; fractions."""
    most = 4 if level == 2 else 9
    x, y = (Fraction(_some(rng, 25), 1 if level < 3 else rng.randint(1, 4)) for _ in "xy")
    a, b, c, d = (1, 1, 1, -1) if level == 1 else (_some(rng, most) for _ in range(4))
    if a * d == b * c:
        return None
    equations = []
    for m, n in ((a, b), (c, d)):
        whole = math.lcm((m * x).denominator, (n * y).denominator)
        equations.append(f"{polynomial((m * whole, 'x'), (n * whole, 'y'))} = {whole * (m * x + n * y)}")
    return Made(f"Solve for x and y: {equations[0]} and {equations[1]}", f"x = {x}, y = {y}", "assignments")


# ---- inequalities

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def inequality(level: int, rng: random.Random) -> Made | None:
    """x on one side; on both; between two numbers, or of a square."""
    sign, a, b = rng.choice(list(_FLIPPED)), rng.randint(2, 12), _some(rng, 40)
    c, d = _some(rng, 12), _some(rng, 60)
    if level == 1:
        x = _some(rng, 25)
        return Made(f"Solve for x: {polynomial((a, 'x'), (b, ''))} {sign} {a * x + b}", f"x {sign} {x}", "interval")
    if level == 2:
        if a == c or (x := Fraction(d - b, a - c)).denominator > 12:
            return None
        question = f"Solve for x: {polynomial((a, 'x'), (b, ''))} {sign} {polynomial((c, 'x'), (d, ''))}"
        return Made(question, f"x {sign if a > c else _FLIPPED[sign]} {x}", "interval")
    p, q = sorted((_some(rng, 15), _some(rng, 15)))
    if p == q:
        return None
    if rng.random() < 0.5:
        other = rng.choice(("<", "<="))
        question = f"Solve for x: {a * p + b} {other} {polynomial((a, 'x'), (b, ''))} < {a * q + b}"
        return Made(question, f"{p} {other} x < {q}", "interval")
    question = f"Solve for x: {polynomial((1, 'x^2'), (-p - q, 'x'), (p * q, ''))} {sign} 0"
    if sign[0] == "<":
        return Made(question, f"{p} {sign} x {sign} {q}", "interval")
    return Made(question, f"x {_FLIPPED[sign]} {p} or x {sign} {q}", "interval")
