"""A number with a name or in a wrapping is its value; a relation with unknowns is refused as a right answer."""

from __future__ import annotations

import gzip
import json
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.math.answers import check_completion, read_gold

REFUSED = {
    "number": [
        "2x+4y=0", "x^2/4 + y^2/3 = 1", "AB=4,CD=5", "AB = 4 and CD = 5", "x=1 or x=2", "x = 1, y = 2", "x=4,y=4", "x^2 = 4",
        "x² = 4", "2x = 10", "10 = 2x", "x + 3 = 10", "xy = 6", "6 = xy", "ab = 12", "abc = 8", "x y = 6", "AB + CD = 9",
        "2AB = 8", "a^2 + b^2 = 25", "-x = 3", "x/2 = 3", r"\frac{x}{2} = 3", r"\sqrt{x} = 3", "|x| = 3", "x! = 6",
        "x^{-1} = 2", "f(x) = 3", "f(x)=x^2", "y = 2x + 1", "y = 2x", "y = 3t", "y = 3 t", "s = 5t^2", r"A = \pi r^2",
        "x = y = 3", "x = 2y = 6", "(x, y) = (1, 2)", "(x,y) = (2,2)", "x, y = 3", "x and y = 3", r"\sin x = 1", "sin x = 1",
        "log x = 2", r"2\theta = 60", r"\angle A = \angle B = 60", "x < 5", r"x \le 5", "1 < x < 5", r"x \ne 5",
        r"x \in [0,1]", r"x \in \{5\}", r"x \equiv 3 \pmod 7", "x mod 7 = 3",
        r"\begin{cases} x + y = 3 \\ x - y = 1 \end{cases}", r"x = 1 \\ y = 2", "x = 5 when y", "2x is 10",
        "AB is 4 and CD is 5", "2a", "3xy", "2ab", "4ac", "2k + 1", "3R^2", "5 t", "x", "x = y", r"\boxed{2x+4y=0}",
        r"\boxed{1} or \boxed{2}", "a ~ 5", r"x + y \approx 5",
    ],
    "set": ["AB = 4, CD = 5", "x^2 = 4", "2ab, 3", "xy = 6, 3", "2a, 3"],
    "interval": ["x^2 < 9", "AB < 5", "xy < 5", "2x < 4"],
    "assignments": ["x^2 = 4, y = 1", "x = y = 3", "2x = 4, y = 1", "AB = 4, CD = 5", "x + y = 3, x - y = 1"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in REFUSED.items() for text in texts])
def test_a_relation_with_unknowns_is_no_right_answer(kind, text):
    with pytest.raises(ValueError, match=f"cannot be read as a {kind}"):
        read_gold(text, kind)


NAMED = [
    "n=34", "n = 34", "34 = n", "x_1 = 34", "x_{10} = 34", "AB = 34", "34 = AB", r"\angle ABC = 34^\circ", r"\theta = 34",
    r"\overline{AB} = 34", "f(2) = 34", "P(A) = 34", "A' = 34", "area = 34", "The area of the circle = 34", "the sum S = 34",
    r"S_{\triangle ABC} = 34", "so a = 34", "x = 68/2 = 34", "30 + 4 = 34", r"\log_2 8 + 31 = 34", "n is 34", "n equals 34",
    "n is equal to 34", "The largest $n$ is 34.", "the number of ways is 34", "Answer: n is 34",
    "Final Answer: The largest $n$ is 34.", "x ≈ 34", r"\text{area} = 34",
]  # fmt: skip
WRAPPED = [
    "34", "34.", "$34$", "$$34$$", r"\(34\)", r"\[34\]", r"\boxed{34}", r"\boxed{34}.", r"$\boxed{34}$.", r"\boxed{n = 34}",
    r"\boxed{34 = n}", "**34**", "The answer is: **34**", "The answer is **34**.", "Answer: 34", "**Answer:** 34",
    "Final Answer: 34", "#### 34", "<answer>34</answer>", r"34\text{ cm}", r"34 \mathrm{cm}", r"\boxed{34\textnormal{ cm}}",
    r"34\mbox{ cm}", r"34\hbox{ cm}", r"34\textrm{ cm}", r"34\,\mathrm{cm}^2", r"34\,\unit{cm}", r"34\;\text{cm}",
    r"34~\text{cm}", r"\textbf{34}", r"\textup{34}", r"\mathbf{34}", r"\mathnormal{34}", "34 cm", "34cm^2", "34 m/s^2",
    "34 kg m^2/s^2", r"\$34", "$34", "34 dollars", r"34^\circ", "34°", "34\u2009cm", r"34\thinspace", "34 of the 34 apples",
    r"\boxed{\boxed{34}}", "3400%", r"3400\%", r"\ensuremath{34}", "34 m", "34 s",
]  # fmt: skip


@pytest.mark.parametrize("text", [*NAMED, *WRAPPED])
def test_a_number_with_a_name_or_in_a_wrapping_is_its_value(text):
    assert check_completion(text, "34").status == "correct"
    if text.count("boxed") < 2:
        assert read_gold(text, "number")[0][1][0].exact == 34


def test_pi_is_a_number_too():
    for text in (r"x = \pi", r"\pi", r"\boxed{\pi}", "π", "Answer: π", r"\boxed{x = \pi}"):
        assert check_completion(text, r"\pi").status == "correct"
    assert read_gold(r"x = \pi", "number") == read_gold(r"\boxed{\pi}", "number") == read_gold(r"\pi", "number")


def test_units_of_roots_are_ignored():
    for text in (r"3\sqrt{2} cm", r"3\sqrt{2}\text{ m}", r"\boxed{3\sqrt{2}\,\mathrm{m}}", r"d = 3\sqrt{2} m"):
        assert check_completion(text, r"3\sqrt{2}").status == "correct"
        assert check_completion(r"3\sqrt{2}", text).status == "correct"


def test_powers_of_ten_are_no_products_of_variables():
    for text in ("1.2x10^3", "1.2x10^{3}", "12e2", "1.2e+3", "12000e-1"):
        assert read_gold(text, "number") == read_gold("n = " + text, "number")
        assert check_completion(text, "1200").status == "correct"


def test_thousands_with_thin_spaces_are_one_number():
    for text in (r"1{,}234{,}500", r"1,\!234,\!500", r"1,\! 234,\! 500", r"1\,234\,500", "1\u2009234\u2009500"):
        assert read_gold(text, "number")[0][1][0].exact == 1_234_500


def test_the_last_side_of_an_equation_in_a_completion_is_read():
    for text in ("m + n = 34", "m + n = 27 + 7 = 34", r"\boxed{m+n = 34}", "n(n+1) = 34", "cost + tax = 30 + 4 = 34"):
        assert check_completion(text, "34").status == "correct"
    for text in (
        "Answer: AB = 4, CD = 34",
        r"\boxed{AB is 4, CD is 5}",
        r"\boxed{x = 3, y = 34}",
        r"\boxed{34x}",
        r"\boxed{34ab}",
        "y = 34x",
    ):
        assert check_completion(text, "34").status != "correct"


# ---- properties

letters = st.sampled_from("abckpqrtuvwxyz")
numbers = st.integers(1, 999).map(str)
terms = st.one_of(
    st.tuples(st.integers(2, 99), letters).map(lambda t: f"{t[0]}{t[1]}"),
    letters.map(lambda x: f"{x}^2"),
    letters.map(lambda x: rf"\sqrt{{{x}}}"),
    st.tuples(letters, numbers).map(lambda t: rf"\frac{{{t[0]}}}{{{t[1]}}}"),
    st.tuples(letters, letters).map(lambda t: f"{t[0]}({t[1]} + 1)"),
)
formulas = st.one_of(
    terms,
    st.tuples(terms, st.sampled_from([" + ", " - ", "+", "-"]), st.one_of(terms, letters, numbers)).map("".join),
    st.tuples(letters, st.sampled_from([" + ", "-", " * ", r" \cdot "]), st.one_of(terms, letters, numbers)).map("".join),
)
signs = st.sampled_from(["=", " = ", " < ", ">", r" \le ", r" \geq ", r" \neq ", r" \equiv ", " ≤ ", r" \approx "])
assignments = st.lists(
    st.tuples(st.sampled_from(["x", "n", "AB", "CD", r"\alpha", "x_1"]), numbers),
    min_size=2,
    max_size=3,
    unique_by=lambda t: t[0],
)
borders = st.sampled_from([", ", ",", " and ", " or ", "; ", r" \\ ", r",\quad "])
wrappings = st.sampled_from(["{}", "${}$", r"\boxed{{{}}}", r"\({}\)", "**{}**", "The answer is {}", "Answer: {}.", "{}."])


@settings(max_examples=150, deadline=None)
@given(formulas, signs, st.one_of(formulas, numbers, letters), st.booleans(), wrappings)
def test_any_relation_with_a_formula_on_a_side_is_refused(formula, sign, other, swapped, wrapping):
    relation = f"{other}{sign}{formula}" if swapped else f"{formula}{sign}{other}"
    with pytest.raises(ValueError, match="cannot be read as a number"):
        read_gold(wrapping.format(relation), "number")


@settings(max_examples=150, deadline=None)
@given(assignments, borders, wrappings)
def test_the_values_of_several_names_are_refused(values, border, wrapping):
    with pytest.raises(ValueError, match="cannot be read as a number"):
        read_gold(wrapping.format(border.join(f"{name} = {value}" for name, value in values)), "number")


values = st.one_of(
    st.integers(-999, 99_999).map(lambda n: (str(n), Fraction(n))),
    st.tuples(st.integers(1, 99), st.integers(2, 99)).map(lambda t: (rf"\frac{{{t[0]}}}{{{t[1]}}}", Fraction(*t))),
    st.tuples(st.integers(0, 99), st.integers(0, 99)).map(
        lambda t: (f"{t[0]}.{t[1]:02}", Fraction(t[0]) + Fraction(t[1], 100))
    ),
    st.integers(1, 999).map(lambda n: (rf"{n}\%", Fraction(n, 100))),
)
names = st.sampled_from(
    ["{}", "n = {}", "{} = n", "AB={}", r"\theta = {}", "the area = {}", "x_1 = {}", "n is {}", "f(2) = {}"]
)
units = st.sampled_from(
    ["", r"\text{ cm}", r"\textnormal{ cm}", r"\mbox{ apples}", r"\,\mathrm{m}^2", " cm^3", " apples", r"~\text{m/s}^2"]
)


@settings(max_examples=150, deadline=None)
@given(values, names, units, wrappings)
def test_a_value_in_any_wrapping_is_that_value(value, name, unit, wrapping):
    text, exact = value
    written = wrapping.format(name.format(text + unit * ("%" not in text)))
    assert read_gold(written, "number")[0][1][0].exact == exact
    assert check_completion(written, str(exact)).status == "correct"


def test_right_answers_of_data_sets_have_the_kind_and_value_of_math_verify(data_dir):
    import math_verify
    import sympy

    with gzip.open(data_dir / "gsm8k/main/train.jsonl.gz", "rt") as file:
        gsm8k = [json.loads(line)["answer"].rpartition("####")[2].strip() for line in file]
    with gzip.open(data_dir / "svamp/train.jsonl.gz", "rt") as file:
        svamp = [str(json.loads(line)["Answer"]) for line in file]
    rng = random.Random(0)
    for answer in (*rng.sample(gsm8k, 100), *rng.sample(svamp, 100)):
        parsed = math_verify.parse(f"${answer}$", parsing_timeout=None)[0]
        ((label, (value,)),) = read_gold(answer, "number")
        assert label == "" and parsed.is_number and sympy.nsimplify(parsed) == sympy.Rational(str(value.exact)), answer
