"""The calculator: values, refusals, limits, and comparison with Python on random expressions."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.tools.calculator import CONSTANTS, FUNCTIONS, calculate
from jmarl.envs.tools.registry import ToolError

VALUES = {
    "(3 + 4) * 2^5": "224", "2^3^2": "512", "-2^2": "-4", "2**-1": "0.5", "10/4": "2.5", "10/5": "2", "7//2": "3", "7 % 3": "1",
    "-7 % 3": "2", "((((((((1))))))))": "1", "1/3": "0.333333333333", "sqrt(144)": "12", "sqrt(2)": "1.41421356237",
    "log(100, 10)": "2", "ln(e)": "1", "sin(0)": "0", "max(1, 2.5, 2)": "2.5", "min(3, 2)": "2", "round(2.567, 2)": "2.57",
    "round(2.5)": "2", "abs(-3)": "3", "factorial(5)": "120", "comb(5, 2)": "10", "gcd(12, 18)": "6", "lcm(4, 6)": "12",
    "floor(-2.5)": "-3", "ceil(2.1)": "3", "2 × 3 ÷ 4 − 1": "0.5", " 1\n+ 1 ": "2", "1e3": "1000", "-0.0": "0", "0^0": "1",
    "(-2)^3": "-8", "2^1000 - 2^1000": "0", "123456789 * 987654321": "121932631112635269", "round(pi, 4)": "3.1416",
    ".5 + 1.": "1.5", "abs(-2^900) % 10": "6",
}  # fmt: skip
REFUSED = {
    "9**9**9": "too large", "9^9^9^9": "too large", "2^1025": "too large", "2^1024": "too large", "10^400": "too large",
    "2.0^2000": "too large", "(2^1000)*(2^1000)": "too large", "factorial(171)": "from 0 to 170",
    "factorial(10^9)": "from 0 to 170", "factorial(2.5)": "whole", "comb(10^9, 5*10^8)": "from 0 to 1000",
    "comb(5, -1)": "from 0", "round(5, -10^9)": "digits", "round(5, 0.5)": "digits", "1e999": "too large",
    "exp(1000)": "too large", "exp(exp(exp(9)))": "too large", "2^1000 + 0.5 + exp(709) * 10^5": "too large",
    "1/0": "division by zero", "0^-1": "division by zero", "5 % 0": "division by zero", "log(0)": "no value",
    "sqrt(-1)": "no value", "asin(2)": "no value", "(-8)^(1/3)": "not whole", "gcd(1.5, 2)": "integer",
    "lcm(2^600+1, 2^600-1)": "too large", "": "cannot read", "2 +": "cannot read", "(" * 150 + "1" + ")" * 150: "at most 300",
    "-" * 100 + "1": "nested more than 40", "1+" * 120 + "1": "nested more than 40", "1" * 301: "at most 300",
    "9" * 5000: "at most 300", "1,000": "write 1000", "[1]": "does not belong", "2pi": "2 [*] pi", "0x10": "operator",
    "1_000": "operator", "1if 1else 2": "operator", "1 if 1 else 2": "only numbers", "x": "no constant",
    "foo(1)": "is no function", "sqrt()": "takes 1 arguments, not 0", "max(1)": "takes 2 to 100",
    "sqrt(x=1)": "does not belong", "1 < 2": "does not belong", "__import__('os')": "does not belong",
    "().__class__": "only numbers", "True": "no constant|only numbers", "a.b(1)": "only numbers", "max(*e)": "only numbers",
    "2 ** 3j": "operator", "1 and 2": "only numbers", "\x00": "does not belong", "\ud800": "does not belong",
    "١": "does not belong", "lambda": "cannot read",
}  # fmt: skip


@pytest.mark.parametrize("expression", VALUES)
def test_expressions_have_their_values(expression):
    assert calculate(expression) == VALUES[expression]


@pytest.mark.parametrize("expression", REFUSED, ids=lambda text: repr(text)[:30])
def test_bad_expressions_are_refused_quickly(expression):
    start = time.process_time()
    with pytest.raises(ToolError, match=REFUSED[expression]) as error:
        calculate(expression)
    assert time.process_time() - start < 0.2 and len(str(error.value)) < 400


def test_every_function_and_constant_has_a_value():
    for name, function in FUNCTIONS.items():
        arguments = ", ".join(["1"] * function.min_arguments)
        assert math.isfinite(float(calculate(f"{name}({arguments})" if name != "log" else "log(2)")))
    assert [float(calculate(name)) for name in CONSTANTS] == pytest.approx([math.pi, math.e, math.tau])


integer_expressions = st.recursive(
    st.integers(0, 10**6).map(str),
    lambda x: st.one_of(
        st.tuples(x, st.sampled_from(["+", "-", "*", "//", "%"]), x).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        x.map(lambda a: f"(-{a})"),
        st.tuples(x, st.integers(0, 3)).map(lambda t: f"({t[0]})^{t[1]}"),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(integer_expressions)
def test_integers_equal_those_of_python(expression):
    try:
        expected = str(eval(expression.replace("^", "**")))
    except ZeroDivisionError:
        expected = "division by zero"
    try:
        result = calculate(expression)
    except ToolError as error:
        result = str(error)
    assert result == expected or "too large" in result or "at most 300" in result


fraction_expressions = st.recursive(
    st.integers(1, 999).map(lambda n: (str(n), Fraction(n))),
    lambda x: st.one_of(
        st.tuples(x, x).map(lambda t: (f"({t[0][0]} + {t[1][0]})", t[0][1] + t[1][1])),
        st.tuples(x, x).map(lambda t: (f"({t[0][0]} * {t[1][0]})", t[0][1] * t[1][1])),
        st.tuples(x, x).map(lambda t: (f"({t[0][0]} / {t[1][0]})", t[0][1] / t[1][1])),
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=150)
@given(fraction_expressions)
def test_fractions_are_exact_to_eleven_digits(case):
    expression, expected = case
    result = calculate(expression)
    assert float(Fraction(result)) == pytest.approx(float(expected), rel=1e-11)
    if expected.denominator == 1 and "/" not in expression:
        assert result == str(expected)


@settings(deadline=None, max_examples=150)
@given(st.one_of(st.text(max_size=60), st.text("0123456789.+-*/%^(), esqrtlogabmpi", max_size=60)))
def test_any_text_has_a_finite_value_or_is_refused(text):
    try:
        assert math.isfinite(float(calculate(text)))
    except ToolError as error:
        assert str(error)
