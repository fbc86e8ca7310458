"""Numbers with roots and operations: values, exact comparison, and hostile texts, which neither raise nor take long."""

from __future__ import annotations

import builtins
import math
import random
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.math.answers import check_completion
from jmarl.envs.math.expressions import approximate_value
from jmarl.envs.math.numbers import find_numbers

PIECES = [
    "9**9**9**9", "9^9^9", "9!!!!!", "(" * 40, r"\sqrt{", r"\frac{1}{", r"\boxed{", "}", "{", "####", "answer is ", "Answer:",
    "1,", "1.", "-", "+", " ",
    "\n", "9" * 30, "e9", "%", "±", "x", "=", "<", ">=", r"\cup", r"\infty", " or ", " and ", "[", ")", "π", "^{9}", "½",
    "\ud800", "\0", "٣", "１",
    r"\text{", "$", "10^",
    "≈", " is ", "-(", "/-", "<b", "<|", "isn't ", "times ",
    "but ", "x =\n", "minus ", r"\frac{-1}{-", "\\", "million", r"\pm", "'", "__import__('os')",
]  # fmt: skip
KINDS = [
    ("number", "42"),
    ("set", "2, 3"),
    ("interval", "x < 2 or x > 5"),
    ("assignments", "x = 1, y = 2"),
    ("number", r"\sqrt{2}"),
]


@pytest.fixture(scope="module")
def sympy_loaded():
    """Import sympy before times are measured."""
    for text in (r"\sqrt{8}/2", r"\sqrt{2}+0*(1-\pi)^{2}", r"\frac{2}{\sqrt{2}}"):
        assert check_completion(text, r"\sqrt{2}").status == "correct"


def seconds(text: str, gold: str, kind: str) -> float:
    """Return the CPU time of a check in this thread, which other processes do not lengthen."""
    start = time.thread_time()
    assert check_completion(text, gold, kind).status in ("correct", "wrong", "unparsable")
    return time.thread_time() - start


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=300), st.lists(st.sampled_from(PIECES), max_size=60).map("".join)), st.sampled_from(KINDS))
def test_no_text_raises_or_takes_long(sympy_loaded, text, kind):
    assert seconds(text, kind[1], kind[0]) < 0.2


@pytest.mark.parametrize(
    "piece", [*PIECES, "1 ", "1,111", "1, ", "x = 1 ", "answer ", "answers are ", "a ", r"\frac{1}{2} ", "1/2 "]
)
def test_no_repeated_text_takes_long(sympy_loaded, piece):
    """A check that is quadratic in the length takes many seconds."""
    for count in (30, 300, 100_000 // len(piece)):
        for kind, gold in KINDS:
            assert seconds(piece * count, gold, kind) < 0.5
            assert seconds("Answer: " + piece * count, gold, kind) < 0.5


def random_expression(rng: random.Random, depth: int) -> str:
    if not depth:
        return rng.choice(["2", "3", "0.5", "7", str(rng.randint(0, 10**9 - 1)), r"\pi", "0"])
    a, b = random_expression(rng, depth - 1), random_expression(rng, depth - 1)
    return rng.choice(
        [rf"\sqrt{{{a}}}", rf"\frac{{{a}}}{{{b}}}", f"({a})^{{9}}", f"({a})^{{-9}}", f"({a}*{b})", f"({a}-{b})", f"({a}+{b})"]
    )


def test_expressions_that_reach_sympy_are_checked_quickly(sympy_loaded):
    """Half of the texts are close to the right answer, so that sympy has to decide."""
    rng, longest, correct = random.Random(0), 0.0, 0
    for _ in range(150):
        for text in (random_expression(rng, 3), rf"\sqrt{{2}}+0*{random_expression(rng, 2)}"):
            longest = max(longest, seconds(text, r"\sqrt{2}", "number"))
            correct += check_completion(text, r"\sqrt{2}").status == "correct"
    assert longest < 1.0 and correct > 50


def test_expressions_have_their_usual_values():
    for text, expected in {
        "2+3*4": 14, "-2^2": -4, "2(3+1)": 8, r"\frac{1}{2}+\frac{1}{4}": 0.75, r"2\pi": 2 * math.pi, "8/4/2": 1,
        r"\sqrt{16}^2": 16, "2^{-1}": 0.5,
        "--3": 3, "3-2-1": 0, r"6\div2": 3,
    }.items():  # fmt: skip
        assert math.isclose(approximate_value(text), expected)
    assert all(
        math.isnan(approximate_value(text))
        for text in ("", "1/0", r"\sqrt{-1}", "2^9^9", "2**3", "1 2", "(1", "1)", "x", "9" * 12, r"\frac{1}", "2^{99}")
    )


def test_find_numbers_returns_all_numbers_of_a_text():
    assert find_numbers("3 apples, 1/2 pear, 1,000 and 1/0") == {3, Fraction(1, 2), 1000}


def test_nothing_is_evaluated_as_code(monkeypatch):
    def refuse(*_):
        raise AssertionError("eval was called")

    monkeypatch.setattr(builtins, "eval", refuse)
    for text in ("2+3", r"5\sqrt{5}/5", "__import__('os').getpid()", "x = 1 or x = 2"):
        check_completion(text, r"\sqrt{5}")
        check_completion(text, "1, 2", "set")
    assert check_completion(r"\sqrt{45}/3", r"\sqrt{5}").status == "correct"


def test_threads_get_the_same_answers(sympy_loaded):
    texts, statuses = [rf"\sqrt{{{2 * k * k}}}/{k}" for k in range(2, 12)], []

    def check_all():
        statuses.append([check_completion(text, r"\sqrt{2}").status for text in texts])

    threads = [threading.Thread(target=check_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [["correct"] * len(texts)] * 4
