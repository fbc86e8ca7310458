"""A calculator: arithmetic on the syntax tree, bounded in every direction, nothing evaluated by Python.

Numbers, `+ - * / // %`, `^` or `**` for powers, parentheses, the constants pi, e and tau, and the functions of `FUNCTIONS`.
Whole numbers are exact up to 2^1024 in size, others are floats and finite. Whatever is too long, too deep or too large is
refused before it is computed. × ÷ − may be written too.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jmarl.envs.tools.registry import Tool, ToolError

MAX_LENGTH, MAX_DEPTH, MAX_BITS = 300, 40, 1024
MAX_FACTORIAL, MAX_CHOICE, MAX_DIGITS = 170, 1000, 15
Number = int | float

WRITTEN = str.maketrans({"^": "**", "×": "*", "·": "*", "÷": "/", "−": "-", "\n": " ", "\t": " ", "\r": " "})
FOREIGN = re.compile(r"[^0-9A-Za-z_.+\-*/%(), ]")
GLUED = re.compile(
    r"(?<![\w.])(?=\.?[0-9])[0-9.]++(?:[eE][-+]?[0-9]++)?+[A-Za-z_]"
)  # 2pi, 0x1f, 1_000: Python would warn of some


class Function(NamedTuple):
    """A function, and how many arguments it takes."""

    apply: Callable[..., Number]
    least: int = 1
    most: int = 1


def power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if abs(base) > 1 and (abs(base).bit_length() - 1) * exponent > MAX_BITS:
            raise ToolError(f"the power is too large: whole numbers go up to 2^{MAX_BITS}")
        return base**exponent
    if base < 0 and exponent != int(exponent):
        raise ToolError("a negative number has no power that is not whole")
    return float(base) ** exponent


def divide(a: Number, b: Number) -> Number:
    return a // b if isinstance(a, int) and isinstance(b, int) and b and a % b == 0 else a / b


def root(x: Number) -> Number:
    if isinstance(x, int) and x >= 0 and math.isqrt(x) ** 2 == x:
        return math.isqrt(x)
    return math.sqrt(x)


def absolute(x: Number) -> Number:
    return -x if x < 0 else x


def rounded(x: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > MAX_DIGITS:
        raise ToolError(f"round takes from -{MAX_DIGITS} to {MAX_DIGITS} digits")
    return round(x, digits) if digits else round(x)


def whole(x: Number, name: str, most: int) -> int:
    if x != int(x) or not 0 <= x <= most:
        raise ToolError(f"{name} takes whole numbers from 0 to {most}")
    return int(x)


def factorial(n: Number) -> int:
    return math.factorial(whole(n, "factorial", MAX_FACTORIAL))


def choices(n: Number, k: Number) -> int:
    return math.comb(whole(n, "comb", MAX_CHOICE), whole(k, "comb", MAX_CHOICE))


MANY = 100
FUNCTIONS = {
    "sqrt": Function(root), "exp": Function(math.exp), "log": Function(math.log, 1, 2), "ln": Function(math.log),
    "log2": Function(math.log2), "log10": Function(math.log10), "sin": Function(math.sin), "cos": Function(math.cos),
    "tan": Function(math.tan), "asin": Function(math.asin), "acos": Function(math.acos), "atan": Function(math.atan),
    "degrees": Function(math.degrees), "radians": Function(math.radians), "abs": Function(absolute),
    "floor": Function(math.floor), "ceil": Function(math.ceil), "round": Function(rounded, 1, 2),
    "min": Function(min, 2, MANY), "max": Function(max, 2, MANY), "gcd": Function(math.gcd, 2, MANY),
    "lcm": Function(math.lcm, 2, MANY), "factorial": Function(factorial), "comb": Function(choices, 2, 2),
}  # fmt: skip
CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: divide, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: power, ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip


def calculate(expression: str) -> str:
    """The value of an expression as a text; what is wrong with it is a `ToolError`."""
    try:
        return shown(value_of(parsed(expression)))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    except TypeError as error:  # of gcd and lcm, which take whole numbers
        raise ToolError(str(error)) from None
    except ToolError:
        raise
    except ValueError:  # of functions of math
        raise ToolError("a function has no value there, such as sqrt(-1) or log(0)") from None


def parsed(expression: str) -> ast.expr:
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters: at most {MAX_LENGTH}")
    text = expression.translate(WRITTEN).strip()
    if found := FOREIGN.search(text):
        raise ToolError(f"{found[0]!r} does not belong in an expression: use numbers, + - * / // % ^ ( ) and functions")
    if found := GLUED.search(text):
        raise ToolError(f"{found[0]!r}: write an operator between a number and a name, as in 2 * pi")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"cannot read {expression!r:.80}: write an expression such as (3 + 4) * 2^5") from None


def value_of(node: ast.expr, depth: int = 0) -> Number:
    if depth > MAX_DEPTH:
        raise ToolError(f"the expression is nested more than {MAX_DEPTH} deep")
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return bounded(node.value)
    if isinstance(node, ast.Name):
        if node.id not in CONSTANTS:
            raise ToolError(f"{node.id!r:.40} is no constant: there are {', '.join(CONSTANTS)}")
        return CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return bounded(OPERATORS[type(node.op)](value_of(node.operand, depth + 1)))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return bounded(OPERATORS[type(node.op)](value_of(node.left, depth + 1), value_of(node.right, depth + 1)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return call(node.func.id, [value_of(argument, depth + 1) for argument in node.args])
    if isinstance(node, ast.Tuple):
        raise ToolError("commas are for arguments of functions: write 1000, not 1,000")
    raise ToolError("only numbers, operators and functions are allowed")


def call(name: str, arguments: list[Number]) -> Number:
    if name not in FUNCTIONS:
        raise ToolError(f"{name!r:.40} is no function: there are {', '.join(FUNCTIONS)}")
    function = FUNCTIONS[name]
    if not function.least <= len(arguments) <= function.most:
        allowed = f"{function.least}" if function.least == function.most else f"{function.least} to {function.most}"
        raise ToolError(f"{name} takes {allowed} arguments, not {len(arguments)}")
    return bounded(function.apply(*arguments))


def bounded(x: Number) -> Number:
    if isinstance(x, int) and x.bit_length() <= MAX_BITS or isinstance(x, float) and math.isfinite(x):
        return x
    raise ToolError(f"the result is too large: numbers go up to 2^{MAX_BITS}")


def shown(x: Number) -> str:
    """Whole numbers in full, others with 12 digits."""
    return str(x) if isinstance(x, int) else f"{x + 0.0:.12g}"


CALCULATOR = Tool(
    "calculator",
    "works out an expression of + - * / % ^ and functions such as sqrt, log, min, max, round, comb",
    {
        "type": "object",
        "properties": {"expression": {"type": "string", "minLength": 1}},
        "required": ["expression"],
        "additionalProperties": False,
    },
    calculate,
    {"expression": "(3 + 4) * 2^5"},
    question="What is 2 to the power of 5, times the sum of 3 and 4?",
    answer="224",
)
