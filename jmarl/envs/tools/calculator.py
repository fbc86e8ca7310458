"""A calculator for arithmetic expressions, evaluated on the syntax tree and bounded in every direction.

It knows numbers, `+ - * / // %`, `^` or `**` for powers, parentheses, the constants pi, e and tau, and the functions in
`FUNCTIONS`. × ÷ − are read as * / -. Integers are exact up to 2^1024 in absolute value; all other numbers are finite floats.
Nothing is passed to `eval`. An expression that is too long or too deep, or a number that would be too large, is refused before
it is computed. Error messages are written for the agent that made the call.

Left out: variables, comparisons, lists, complex numbers and units.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jmarl.envs.tools.registry import Tool, ToolError

MAX_LENGTH, MAX_DEPTH = 300, 40  # characters; levels of nesting
MAX_BITS = 1024  # of integers
MAX_FACTORIAL, MAX_CHOICE, MAX_DIGITS = 170, 1000, 15  # arguments of factorial, comb and round
MAX_ARGUMENTS = 100
Number = int | float

SYMBOLS = str.maketrans({"^": "**", "×": "*", "·": "*", "÷": "/", "−": "-", "\n": " ", "\t": " ", "\r": " "})
FORBIDDEN_CHARACTER = re.compile(r"[^0-9A-Za-z_.+\-*/%(), ]")
NUMBER_THEN_NAME = re.compile(  # 2pi, 0x1f, 1_000: Python accepts some of these and warns of others
    r"(?<![\w.])(?=\.?[0-9])[0-9.]++(?:[eE][-+]?[0-9]++)?+[A-Za-z_]"
)


class MathFunction(NamedTuple):
    """A function and the number of its arguments."""

    apply: Callable[..., Number]
    min_arguments: int = 1
    max_arguments: int = 1


def power(base: Number, exponent: Number) -> Number:
    """Return base^exponent: exact for integers with an exponent of at least 0, which are checked for size first."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if abs(base) > 1 and (abs(base).bit_length() - 1) * exponent > MAX_BITS:
            raise ToolError(f"the power is too large: whole numbers go up to 2^{MAX_BITS}")
        return base**exponent
    if base < 0 and exponent != int(exponent):
        raise ToolError("a negative number has no power that is not whole")
    return float(base) ** exponent


def divide_numbers(a: Number, b: Number) -> Number:
    """Return a / b: an integer if it is whole."""
    return a // b if isinstance(a, int) and isinstance(b, int) and b and a % b == 0 else a / b


def square_root(x: Number) -> Number:
    """Return the square root: an integer if it is whole."""
    if isinstance(x, int) and x >= 0 and math.isqrt(x) ** 2 == x:
        return math.isqrt(x)
    return math.sqrt(x)


def absolute(x: Number) -> Number:
    """Return |x|."""
    return -x if x < 0 else x


def round_number(x: Number, digits: Number = 0) -> Number:
    """Return x rounded to some digits after the point; negative digits round to tens, hundreds, ..."""
    if not isinstance(digits, int) or abs(digits) > MAX_DIGITS:
        raise ToolError(f"round takes from -{MAX_DIGITS} to {MAX_DIGITS} digits")
    return round(x, digits) if digits else round(x)


def factorial(n: Number) -> int:
    """Return n!."""
    return math.factorial(_integer(n, "factorial", MAX_FACTORIAL))


def binomial(n: Number, k: Number) -> int:
    """Return the number of ways to choose k of n."""
    return math.comb(_integer(n, "comb", MAX_CHOICE), _integer(k, "comb", MAX_CHOICE))


def _integer(x: Number, function: str, maximum: int) -> int:
    if x != int(x) or not 0 <= x <= maximum:
        raise ToolError(f"{function} takes whole numbers from 0 to {maximum}")
    return int(x)


FUNCTIONS = {
    "sqrt": MathFunction(square_root),
    "exp": MathFunction(math.exp),
    "log": MathFunction(math.log, 1, 2),
    "ln": MathFunction(math.log),
    "log2": MathFunction(math.log2),
    "log10": MathFunction(math.log10),
    "sin": MathFunction(math.sin),
    "cos": MathFunction(math.cos),
    "tan": MathFunction(math.tan),
    "asin": MathFunction(math.asin),
    "acos": MathFunction(math.acos),
    "atan": MathFunction(math.atan),
    "degrees": MathFunction(math.degrees),
    "radians": MathFunction(math.radians),
    "abs": MathFunction(absolute),
    "floor": MathFunction(math.floor),
    "ceil": MathFunction(math.ceil),
    "round": MathFunction(round_number, 1, 2),
    "min": MathFunction(min, 2, MAX_ARGUMENTS),
    "max": MathFunction(max, 2, MAX_ARGUMENTS),
    "gcd": MathFunction(math.gcd, 2, MAX_ARGUMENTS),
    "lcm": MathFunction(math.lcm, 2, MAX_ARGUMENTS),
    "factorial": MathFunction(factorial),
    "comb": MathFunction(binomial, 2, 2),
}
CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: divide_numbers,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Return the value of an expression as text; raise ToolError if it has none."""
    try:
        return format_number(evaluate_node(parse_expression(expression)))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    except TypeError as error:  # gcd and lcm take integers
        raise ToolError(str(error)) from None
    except ToolError:
        raise
    except ValueError:  # from functions of `math`
        raise ToolError("a function has no value there, such as sqrt(-1) or log(0)") from None


def parse_expression(expression: str) -> ast.expr:
    """Return the syntax tree of an expression."""
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters: at most {MAX_LENGTH}")
    text = expression.translate(SYMBOLS).strip()
    if match := FORBIDDEN_CHARACTER.search(text):
        raise ToolError(f"{match[0]!r} does not belong in an expression: use numbers, + - * / // % ^ ( ) and functions")
    if match := NUMBER_THEN_NAME.search(text):
        raise ToolError(f"{match[0]!r}: write an operator between a number and a name, as in 2 * pi")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"cannot read {expression!r:.80}: write an expression such as (3 + 4) * 2^5") from None


def evaluate_node(node: ast.expr, depth: int = 0) -> Number:
    """Return the value of a syntax tree; every intermediate result is checked for size."""
    if depth > MAX_DEPTH:
        raise ToolError(f"the expression is nested more than {MAX_DEPTH} deep")
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return check_size(node.value)
    if isinstance(node, ast.Name):
        if node.id not in CONSTANTS:
            raise ToolError(f"{node.id!r:.40} is no constant: there are {', '.join(CONSTANTS)}")
        return CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return check_size(OPERATORS[type(node.op)](evaluate_node(node.operand, depth + 1)))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = evaluate_node(node.left, depth + 1), evaluate_node(node.right, depth + 1)
        return check_size(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return call_function(node.func.id, [evaluate_node(argument, depth + 1) for argument in node.args])
    if isinstance(node, ast.Tuple):
        raise ToolError("commas are for arguments of functions: write 1000, not 1,000")
    raise ToolError("only numbers, operators and functions are allowed")


def call_function(name: str, arguments: list[Number]) -> Number:
    """Return the value of a function in `FUNCTIONS`."""
    if name not in FUNCTIONS:
        raise ToolError(f"{name!r:.40} is no function: there are {', '.join(FUNCTIONS)}")
    function = FUNCTIONS[name]
    low, high = function.min_arguments, function.max_arguments
    if not low <= len(arguments) <= high:
        allowed = f"{low}" if low == high else f"{low} to {high}"
        raise ToolError(f"{name} takes {allowed} arguments, not {len(arguments)}")
    return check_size(function.apply(*arguments))


def check_size(x: Number) -> Number:
    """Return x; raise ToolError if it is not finite or too large."""
    if isinstance(x, int) and x.bit_length() <= MAX_BITS or isinstance(x, float) and math.isfinite(x):
        return x
    raise ToolError(f"the result is too large: numbers go up to 2^{MAX_BITS}")


def format_number(x: Number) -> str:
    """Return an integer in full, a float with 12 significant digits."""
    return str(x) if isinstance(x, int) else f"{x + 0.0:.12g}"  # + 0.0 turns -0.0 into 0


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
