"""Templates of arithmetic and algebra: expressions, equations, systems of two equations, inequalities."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from fractions import Fraction

from jmarl.envs.math.templates import MathProblem, Template, nonzero_integer, number_problem, polynomial

# ---- arithmetic

Expression = Fraction | tuple  # a number, or (operation, left expression, right expression)
_OPERATIONS = {"+": (1, operator.add), "-": (1, operator.sub), "×": (2, operator.mul), "÷": (2, operator.truediv)}


def evaluate_expression(expression: Expression) -> Fraction:
    """Return the exact value of an expression. A division by 0 raises ZeroDivisionError."""
    if isinstance(expression, Fraction):
        return expression
    operation, left, right = expression
    return _OPERATIONS[operation][1](evaluate_expression(left), evaluate_expression(right))


def format_expression(expression: Expression, outer_precedence: int = 0) -> str:
    """Write an expression with as few parentheses as its meaning allows.

    Args:
        expression: the expression.
        outer_precedence: precedence of the operation around it; an expression of lower precedence gets parentheses.
    """
    if isinstance(expression, Fraction):
        return str(expression) if expression.denominator == 1 else f"({expression})"
    operation, left, right = expression
    precedence = _OPERATIONS[operation][0]
    text = f"{format_expression(left, precedence)} {operation} {format_expression(right, precedence + 1)}"
    return f"({text})" if precedence < outer_precedence else text


def _draw_expression(rng: random.Random, num_operations: int, draw_number: Callable[[], Fraction]) -> Expression:
    if not num_operations:
        return draw_number()
    num_left = rng.randint(0, num_operations - 1)
    operation = rng.choice("+-×÷")
    left = _draw_expression(rng, num_left, draw_number)
    return operation, left, _draw_expression(rng, num_operations - 1 - num_left, draw_number)


def _draw_arithmetic(level: int, rng: random.Random) -> Expression | None:
    if level == 1:
        operation, a, b = rng.choice("+-×÷"), rng.randint(2, 99), rng.randint(2, 99)
        b = b % 11 + 2 if operation in "×÷" else b
        return operation, Fraction(a * b if operation == "÷" else a), Fraction(b)
    if level == 2 or rng.random() < 0.5:
        num_operations = rng.randint(2, 3) if level == 2 else rng.randint(4, 5)
        return _draw_expression(rng, num_operations, lambda: Fraction(rng.randint(2, 30)))
    expression = _draw_expression(rng, rng.randint(1, 2), lambda: Fraction(rng.randint(1, 12), rng.randint(2, 12)))
    return expression if "/" in format_expression(expression) else None  # a drawn fraction such as 12/6 is an integer


def arithmetic(level: int, rng: random.Random) -> MathProblem | None:
    """Draw an expression to evaluate.

    Level 1 has one operation, level 2 has two or three with an integer result, level 3 has four or five, or fractions.
    """
    expression = _draw_arithmetic(level, rng)
    if expression is None:
        return None
    try:
        result = evaluate_expression(expression)
    except ZeroDivisionError:
        return None
    if abs(result) > 5000 or result.denominator > (1 if level < 3 else 200):
        return None
    assert isinstance(expression, tuple)  # it has an operation
    operation, left, right = expression
    key = ""
    if isinstance(left, Fraction) and isinstance(right, Fraction) and operation in "+×":
        key = f"{operation} {' '.join(sorted((str(left), str(right))))}"  # 2 + 3 and 3 + 2 are one problem
    return number_problem(f"What is {format_expression(expression)}?", result, key)


# ---- equations


def linear(level: int, rng: random.Random) -> MathProblem | None:
    """Draw a linear equation: ax + b = c; ax + b = cx + d; a(x + b) + c(x + d) = e."""
    a, b, c = rng.randint(2, 15), nonzero_integer(rng, 30), nonzero_integer(rng, 15)
    d, e = nonzero_integer(rng, 40), nonzero_integer(rng, 60)
    if level == 1:
        x = Fraction(nonzero_integer(rng, 20))
        left, right = polynomial((a, "x"), (b, "")), str(a * x + b)
    elif level == 2:
        left, right, x = polynomial((a, "x"), (b, "")), polynomial((c, "x"), (d, "")), Fraction(d - b, a - c or 1)
    else:
        left = polynomial((a, f"({polynomial((1, 'x'), (b, ''))})"), (c, f"({polynomial((1, 'x'), (d, ''))})"))
        right, x = str(e), Fraction(e - a * b - c * d, a + c or 1)
    if x.denominator > 12 or (level == 2 and a == c) or (level == 3 and a == -c):
        return None
    return number_problem(f"Solve for x: {left} = {right}", x)


def _root_problem(equation: str, *roots: Fraction | str) -> MathProblem:
    return MathProblem(f"Solve for x: {equation}", ", ".join(map(str, roots)), "set")


def quadratic(level: int, rng: random.Random) -> MathProblem | None:
    """Draw a quadratic equation: x^2 + b = c; integer roots; rational roots, or roots with a square root."""
    p, q = nonzero_integer(rng, 15), nonzero_integer(rng, 15)
    if level == 1:
        root = rng.randint(2, 30)
        shift = nonzero_integer(rng, 60)
        equation = f"{polynomial((1, 'x^2'), (shift, ''))} = {root * root + shift}"
        return _root_problem(equation, Fraction(-root), Fraction(root))
    if level == 2:
        if p >= q:
            return None
        return _root_problem(f"{polynomial((1, 'x^2'), (-p - q, 'x'), (p * q, ''))} = 0", Fraction(p), Fraction(q))
    if rng.random() < 0.5:
        a, b = rng.randint(1, 5), rng.randint(2, 5)
        smaller, larger = sorted((Fraction(p, a), Fraction(q, b)))
        equation = f"{polynomial((a * b, 'x^2'), (-a * q - b * p, 'x'), (p * q, ''))} = 0"  # (ax - p)(bx - q) = 0
        return _root_problem(equation, smaller, larger) if smaller < larger else None
    radicand, factor = rng.randint(2, 15), rng.randint(1, 4)
    if any(radicand % (k * k) == 0 for k in (2, 3)):
        return None
    surd = (str(factor) if factor > 1 else "") + rf"\sqrt{{{radicand}}}"
    equation = f"{polynomial((1, 'x^2'), (-2 * p, 'x'), (p * p - factor * factor * radicand, ''))} = 0"
    return _root_problem(equation, f"{p} - {surd}", f"{p} + {surd}")


def system(level: int, rng: random.Random) -> MathProblem | None:
    """Draw two linear equations in x and y: a sum and a difference; small integer coefficients; fractions as solutions."""
    largest = 4 if level == 2 else 9
    x, y = (Fraction(nonzero_integer(rng, 25), 1 if level < 3 else rng.randint(1, 4)) for _ in "xy")
    a, b, c, d = (1, 1, 1, -1) if level == 1 else (nonzero_integer(rng, largest) for _ in range(4))
    if a * d == b * c:
        return None
    equations = []
    for m, n in ((a, b), (c, d)):
        scale = math.lcm((m * x).denominator, (n * y).denominator)
        equations.append(f"{polynomial((m * scale, 'x'), (n * scale, 'y'))} = {scale * (m * x + n * y)}")
    return MathProblem(f"Solve for x and y: {equations[0]} and {equations[1]}", f"x = {x}, y = {y}", "assignments")


# ---- inequalities

_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def inequality(level: int, rng: random.Random) -> MathProblem | None:
    """Draw an inequality: x on one side; x on both sides; x between two numbers, or a quadratic inequality."""
    sign, a, b = rng.choice(list(_MIRRORED)), rng.randint(2, 12), nonzero_integer(rng, 40)
    c, d = nonzero_integer(rng, 12), nonzero_integer(rng, 60)
    left = polynomial((a, "x"), (b, ""))
    if level == 1:
        x = nonzero_integer(rng, 25)
        return MathProblem(f"Solve for x: {left} {sign} {a * x + b}", f"x {sign} {x}", "interval")
    if level == 2:
        if a == c or (bound := Fraction(d - b, a - c)).denominator > 12:
            return None
        question = f"Solve for x: {left} {sign} {polynomial((c, 'x'), (d, ''))}"
        return MathProblem(question, f"x {sign if a > c else _MIRRORED[sign]} {bound}", "interval")
    p, q = sorted((nonzero_integer(rng, 15), nonzero_integer(rng, 15)))
    if p == q:
        return None
    if rng.random() < 0.5:
        lower_sign = rng.choice(("<", "<="))
        question = f"Solve for x: {a * p + b} {lower_sign} {left} < {a * q + b}"
        return MathProblem(question, f"{p} {lower_sign} x < {q}", "interval")
    question = f"Solve for x: {polynomial((1, 'x^2'), (-p - q, 'x'), (p * q, ''))} {sign} 0"
    if sign[0] == "<":
        return MathProblem(question, f"{p} {sign} x {sign} {q}", "interval")
    return MathProblem(question, f"x {_MIRRORED[sign]} {p} or x {sign} {q}", "interval")


ALGEBRA: dict[str, Template] = {"linear": linear, "quadratic": quadratic, "system": system, "inequality": inequality}
