"""Find, parse and compare answers: each kind in many forms, near misses, and all answers of GSM8K and SVAMP."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from jmarl.envs.math.answers import check_answer, check_completion, find_answer, read_gold
from jmarl.envs.math.data import load_tasks


def assert_all(
    status: str, answers: Sequence[str], gold: str, kind: str = "number", unit: str = "", lowest_terms: bool = False
) -> None:
    statuses = {text: check_completion(text, gold, kind, unit, lowest_terms).status for text in answers}
    assert statuses == dict.fromkeys(answers, status)


# ---- numbers

EQUIVALENT_FORMS = {
    "1234": (
        "1234", "1,234", "+1234", "1234.0", "1,234.00", "1234/1", "2468/2", r"\frac{1234}{1}", r"\frac{2468}{2}", "1.234e3",
        "1.234 × 10^3",
        r"1.234 \times 10^{3}", "12.34 x 10^2", "1.234 thousand", "123400%", r"123400\%", r"\boxed{1234}",
        r"$\boxed{1{,}234}$", r"1\,234",
        "#### 1,234", "The answer is 1,234.", "Answer: $1,234", "Answer: **1234** apples", "**Answer:** 1234", "Answer:\n1234",
        "<answer>1234</answer>", "1234 km/h", "1234 cm^2", r"1234 \text{ km}", "x = 1234", "Answer: 600 + 634 = 1234", "(1234)",
        r"\[ 1234 \]", "1234!", "The final answer is: \\boxed{1234}. Is this answer right? I think the answer is right.",
        "So 1000+234 = 1234 apples.\nI am sure.", "Answer: 1234 (that is, 1,234)", "She has 5 bags, so in all 1234",
    ),
    "0.05": ("5%", "0.05", ".05", "1/20", r"\frac{1}{20}", r"\frac1{20}", "5e-2", r"5 \times 10^{-2}", "5 percent",
    "5 per cent", "0.050"),
    "-3/2": ("-3/2", "-1.5", r"-\frac{3}{2}", "-1 1/2", r"-1\frac{1}{2}", r"-\frac32", r"\frac{-3}{2}", "−1.5", "- 3/2",
    "x = -3/2", "-$1.50",
             "(-1.5)", "-150%"),
    r"3\sqrt{2}": (r"3\sqrt{2}", "3√2", "3 sqrt(2)", r"\sqrt{18}", r"6/\sqrt{2}", r"\sqrt2*3", r"\boxed{3\sqrt{2}}",
    r"Answer: 3\sqrt{2} cm"),
    r"\frac{\pi}{4}": (r"\pi/4", "π/4", "pi/4", r"\frac{\pi}{4}", r"\frac14\pi"),
}  # fmt: skip


@pytest.mark.parametrize("gold", EQUIVALENT_FORMS)
def test_equivalent_forms_of_a_number_are_correct(gold):
    assert_all("correct", EQUIVALENT_FORMS[gold], gold)


def test_near_misses_are_wrong():
    assert_all(
        "wrong", ["1233", "1235", "-1234", "123", "234", "12340", "123.4", "1234%", "1234 million", "1.234", "2468"], "1234"
    )
    assert_all("wrong", ["0.33", "0.3333333333", "33%", "3", "-1/3", "1/30"], "1/3")
    assert_all("wrong", ["4.2426406871", r"3\sqrt{3}", r"-3\sqrt{2}", r"2\sqrt{3}", "3", "18"], r"3\sqrt{2}")


def test_a_text_with_no_number_or_with_several_is_unparsable():
    no_number = [
        "",
        "forty-two",
        "Answer: ",
        "Answer: x",
        "x42",
        "42x",
        "Answer: not 42",
        "1/0",
        "42e99999",
        "9" * 50,
        "1,2345",
        "42 and a half",
    ]
    assert_all("unparsable", no_number, "42")
    assert_all("unparsable", [r"\boxed{42}, so \boxed{}", r"\boxed{42} then \boxed{", r"\boxed{42} \boxed{\text{no}}"], "42")
    assert_all(
        "unparsable",
        ["Answer: 41 or 42", "Answer: 1 2 3 42", "Answer: between 1 and 42", "#### 42, 43", r"\boxed{41, 42}"],
        "42",
    )
    assert check_completion("41, 42 and 43", "42").status == "wrong"  # without a mark the last number counts
    assert (
        check_completion(r"\boxed{42} \boxed{43}", "42").status == "wrong"
        and check_completion(r"\boxed{43} \boxed{42}", "42").status == "correct"
    )


def test_a_value_must_be_computed():
    """Otherwise a question could be answered by repeating it."""
    assert_all("wrong", ["600+634", "Answer: 1200 + 34", r"\sqrt{1522756}", "1234^1", r"617 \cdot 2"], "1234")
    assert all(
        check_completion(text, "49").status != "correct"
        for text in ("7*7", "7 × 7", "7 x 7", "7 times 7", "7(7)", "98 ÷ 2", "7^2")
    )
    assert all(
        check_completion(text, "7").status != "correct" for text in ("7*7", "7 × 7", "7(7)", "7-7", "7 - 7", "x-7", "sum-7")
    )
    assert_all("wrong", ["6/8", r"\frac{6}{8}", "84/2"], "3/4", lowest_terms=True)
    assert_all("correct", ["3/4", "0.75", "75%"], "3/4", lowest_terms=True)
    assert (
        check_completion("6/8", "3/4").status == "correct"
        and check_completion("1 2/4", "3/2", lowest_terms=True).status == "wrong"
    )


def test_units_in_latex_and_words_after_a_number_are_ignored():
    assert_all("correct", [r"\[\boxed{24 \text{ m}^2}\]", r"\boxed{24 \, \text{cm}^2}", r"\boxed{24 \text{ cm}^{2}}",
                           r"\boxed{24 \quad \text{m}²}", r"\boxed{24 \mathrm{~m}^2}", r"\boxed{24\,\mathrm{m}^2}",
                           r"\boxed{24\ \text{dollars}}", "Answer: 24 times", "#### 24 times", r"\boxed{24 \text{ times}}",
                           "24 times a day", "Answer: 24 more than Tom", "Answer: 24 double rooms"], "24")  # fmt: skip
    assert_all("unparsable", [r"\boxed{24 \text{times} 2}", "Answer: 24 plus 1", "Answer: 24 plus one"], "24")


NOTATIONS = [
    ("number", "22", ["22 ✅", "<b>22</b>", "Answer: <b>22</b>",
                      "Answer: 22<|im_end|>", "22</s>", "22<end_of_turn>", r"\underline{22}", "Answer: 22 🎉",
                      "Answer: The sum of the first 10 terms is 22.", "Answer: Out of 50, what is left is 22", "Answer: ≈ 22"]),
    ("number", "-7", ["Answer: minus 7", "negative 7", "The answer is negative 7.", "Answer: ‐7", "Answer: ‑7", "－7", "-(7)"]),
    ("number", "5/2", ["2½", "2 ½", "Answer: 2½ cups", "5⁄2", "2 1⁄2"]),
    ("number", "1/3", ["⅓", "Answer: ⅓.", "1/3 ≈ 0.33", r"\boxed{\frac{1}{3} \approx 0.33}", "x = 1/3 ≈ 0.333"]),
    ("number", "-3/4", [r"\frac{3}{-4}", "-(3/4)", "3/-4", "-¾", "Answer: x = -(3/4)", "x = 3/-4"]),
    ("number", "3/4", [r"\frac{-3}{-4}", r"-\frac{3}{-4}", "-3/-4", "¾"]),
    ("number", r"3\sqrt{2}", [r"3\sqrt{2} ≈ 4.24"]),
    ("set", "2, 3", ["Answer:\nx = 2\nx = 3", "Answer: x = 2\nx = 3", r"x = 2, \quad x = 3"]),
    ("assignments", "x = 2, y = 3", ["Answer:\nx = 2\ny = 3", "**Answer:**\n- x = 2\n- y = 3\nDone.", r"x = 2, \quad y = 3",
                                     "Answer:\n$x = 2$\n$y = 3$", "Answer: x = 2, y = 3\nGood."]),
    ("interval", "x > -3", ["x > negative 3", "x > minus 3"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "gold", "right"), NOTATIONS)
def test_notations_that_people_use_are_read(kind, gold, right):
    assert_all("correct", right, gold, kind)


@pytest.mark.parametrize(("gold", "texts"), [
    ("22", ["22 ❌", "29 minus 7", "Answer: 5 if x is 22", "Answer: 21 ≈ 22", "2<sup>2</sup>2", "Answer: 15-(-7)",
            "Answer: 41 or 22"]),
    ("53/4", ["5-3/-4", "5 -3/-4"]), ("5/2", ["2-½"]), ("7", ["Answer: 14-(7)", "Answer: minus 7"]),
    ("-7", ["Answer: 14-(7)", "Answer: 14 minus 7", "-7 apples minus 7", "Answer: 2 -(7)"]), ("-49", ["-(7)^2"]),
])  # fmt: skip
def test_a_text_that_only_contains_the_answer_is_not_correct(gold, texts):
    assert all(check_completion(text, gold).status != "correct" for text in texts)
    lines = "Answer:\nx = 2\ny = "
    assert [check_completion(lines + y, "x = 2, y = 3", "assignments").status for y in ("4", "3\ny = 4")] == [
        "wrong",
        "unparsable",
    ]


def test_words_that_change_a_number_make_it_unparsable():
    changed = ["it isn't 22", "It can’t be 22", "it is not 22", "x cannot be 22", "never 22", "Answer: anything but 22",
              "everything except 22", "Answer: other than 22", "Answer: half of 22", "double 22", "less than 22",
              "Answer: more than 22", "the square root of 22", "Answer: log 22", "two times 22"]  # fmt: skip
    assert_all("unparsable", [*changed, "Answer: 22 dozen", "Answer: 22 lakh", "22 crore", "22 is wrong"], "22")
    right = ["It is not 21 but 22", "It isn't hard: 22", "It wasn't 21. It is 22", "Tom has 5 less, so it is 22"]
    assert_all("correct", right, "22")
    assert_all("unparsable", ["x cannot be < 5", "x < 5 is false", "x isn't < 5", "never x < 5"], "x < 5", "interval")


def test_the_unit_of_the_task_decides_what_percent_means():
    assert_all("correct", ["25", "25%", "25 percent", r"25\%", "Answer: 25 % of them"], "25", unit="%")
    assert_all("wrong", ["0.25", "1/4", "2500%", "25.5%"], "25", unit="%")
    assert_all("wrong", ["25%", "25 percent"], "25")
    assert_all("correct", ["25%", "0.25"], "1/4")


def test_find_answer_prefers_a_box_to_the_last_answer_line():
    assert find_answer(r"We get \boxed{\frac{1}{2}} of it, 7 in all") == r"\frac{1}{2}"
    assert find_answer("Answer: 5\nno, wait.\nAnswer: 6") == "6"
    assert find_answer("Answer: 5 is wrong. \\boxed{6}") == "6"
    assert find_answer("The answer is 3.5. There were 8.") == "3.5."
    assert find_answer("8 and then 9\nthat is all") == "9"
    assert find_answer("x = 1\nx > 2 holds\nthat is all", "interval") == "x > 2 holds"
    assert find_answer("nothing") == "" and find_answer("\\boxed{7") == "7" and find_answer("\\boxed{7\nand so 8") == "7"
    assert check_completion("Answer: 42" + " " * 10_000, "42").status == "unparsable"  # beyond the characters that are searched


# ---- sets, intervals, assignments

KIND_CASES = [  # kind, right answer; then texts that are correct, wrong, unparsable
    ("set", "2, 3",
     ["2, 3", "3, 2", "x = 2 or x = 3", "x=3, x=2", "{2, 3}", r"\{2,3\}", "$x = 2$ and $x = 3$", "x_1 = 2, x_2 = 3",
      r"x \in \{2, 3\}", "2.0, 6/2",
      "Answer: the solutions are 2 and 3.", r"\boxed{2, 3}", "2, 3, 3"],
     ["2", "3", "2, 3, 4", "2, -3", "-2, -3", r"\sqrt{4}, 3", "1, 2, 3, 4, 5"],
     ["(2, 3)", "2 < x < 3", "x = 2, y = 3", "x", "2 3", "", "x^2 - 5x + 6 = 0", "no solution", "not 2, 3", "2 million, 3"]),
    ("set", "-3, 3", ["±3", r"x = \pm 3", "3, -3"], ["3", "-3", "±4"], ["± 3 ± 4"]),
    ("set", r"3 - \sqrt{2}, 3 + \sqrt{2}",
     ["3 ± √2", r"x = 3 + sqrt(2) or x = 3 - sqrt(2)", r"\frac{6 \pm \sqrt{8}}{2}", "(6 ± √8)/2"], ["3 + √2", "3 ± √3",
      "4.41, 1.59"], ["√"]),
    ("assignments", "x = 2, y = -3",
     ["x = 2, y = -3", "y=-3, x=2", "(2, -3)", "(x, y) = (2, -3)", "(y, x) = (-3, 2)", "x=2 and y=−3", "x = 4/2 = 2; y = -3"],
     ["(-3, 2)", "x = 2", "x = 2, y = 3", "x = -3, y = 2", "x = 2, y = -3, z = 1", "a = 2, b = -3"],
     ["2, -3", "x = 2, x = 3, y = -3", "x + y = -1, x - y = 5", "(2, -3, 1)", "2 = x, y = -3", "x = y"]),
    ("interval", "x > 3",
     ["x > 3", "3 < x", r"(3, \infty)", "(3, ∞)", r"x \in (3,\infty)", "x∈(3,+∞)", "(3, oo)", "x > 3.0", r"x \gt 3",
      "x > 3 or x > 5"],
     ["x >= 3", "x < 3", r"[3, \infty)", "x > 4", "x > -3", "3 > x", "x < 3 or x > 3", "(3, 4)"],
     ["2x > 6", "x + 1 > 4", "3", "x > 3, x > 2", "1 < x > 3", "x = 3", "x >", r"(\infty, 3)", "x > y"]),
    ("interval", "x < 2 or x >= 5",
     ["x ≥ 5 or x < 2", r"(-\infty, 2) \cup [5, \infty)", "(-oo,2)U[5,oo)", "2 > x or 5 <= x"], ["x <= 2 or x >= 5", "x < 2",
      "x < 5"],
     ["x < 2 and x >= 5", "x < 2, x >= 5"]),
    ("interval", "-1 <= x < 4",
     ["[-1, 4)", "x >= -1 and x < 4", "4 > x >= -1", r"-1 \leq x < 4", "[-1, 2) or [1, 4)", "[-1, 2) or [2, 4)"],
     ["[-1, 4]", "(-1, 4)", "[-1, 2) or (2, 4)", "-1 <= x < 5"], ["[-1; 4)", "-1 <= x > 4"]),
    ("interval", r"-\sqrt{2} < x < \sqrt{2}", [r"(-\sqrt{2}, √2)"], [r"[-\sqrt{2}, \sqrt{2}]", "-1.41 < x < 1.41"],
     [r"\sqrt{2}"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "gold", "right", "wrong", "unparsable"), KIND_CASES)
def test_sets_intervals_and_assignments_are_compared_by_value(kind, gold, right, wrong, unparsable):
    assert_all("correct", right, gold, kind)
    assert_all("wrong", wrong, gold, kind)
    assert_all("unparsable", unparsable, gold, kind)


@pytest.mark.parametrize(("answer", "kind", "message"), [
    ("about", "number", "cannot be read as a number"),
    ("1, 2", "number", "cannot be read as a number"),
    (r"\sqrt{49}", "number", "is rational"),
    ("x > y", "interval", "cannot be read as a interval"),
    ("2", "text", "choose number, set, interval, assignments"),
])  # fmt: skip
def test_a_right_answer_that_cannot_be_read_is_refused(answer, kind, message):
    with pytest.raises(ValueError, match=message):
        read_gold(answer, kind)


def test_feedback_does_not_depend_on_the_right_answer():
    """So it does not tell how close an answer is."""
    for text in ("41", "-42", "6/8", "1 2 3", "", "41 + 1", "Answer: 41 or 43", "4.2"):
        golds = ("43", "1000", "1/2", "40.5", "-7")
        assert len({check_answer(text, gold, lowest_terms=True).feedback for gold in golds}) == 1


# ---- all answers of the data sets


def forms(gold: Fraction) -> list[str]:
    """Return 14 texts that give an integer as the answer."""
    n, digits = str(gold), str(abs(gold))
    exponent, mantissa = len(digits) - 1, ("-" if gold < 0 else "") + f"{digits[0]}.{digits[1:] or 0}"
    return [
        n, f"{int(gold):,}", f"{n}.0", f"{n}/1", rf"\frac{{{n}}}{{1}}", f"{gold * 100}%", rf"Thus \boxed{{{n}}} is it.",
        f"#### {int(gold):,}",
        f"{n} apples", f"$ {n}".replace("$ -", "-$"), f"{mantissa}e{exponent}", rf"{mantissa} \times 10^{{{exponent}}}",
        f"The answer is {n}.",
        f"We have 3 bags.\n**Answer:** {n} km/h",
    ]  # fmt: skip


def near_misses(gold: Fraction) -> list[str]:
    digits = str(abs(gold))
    values = [gold + 1, gold - 1, gold * 10, gold + Fraction(1, 10), gold / 10 if gold else gold + 5]
    values += [-gold] if gold else []
    values += [Fraction(digits[1:])] if len(digits) > 1 else []
    return [str(x) for x in values if x != gold]


@pytest.mark.long
@pytest.mark.parametrize(("name", "file", "rows"), [
    pytest.param("gsm8k", "gsm8k/main/train.jsonl.gz", 5206, marks=pytest.mark.nightly),
    ("gsm8k", "gsm8k/main/test.jsonl.gz", 936), ("svamp", "svamp/train.jsonl.gz", 705),
])  # fmt: skip
def test_all_answers_of_a_data_set_are_read_in_many_forms(data_dir, name, file, rows):
    tasks = load_tasks(name, data_dir / file)
    assert len(tasks) == rows
    golds = {(task["answer"], task["unit"]) for task in tasks}
    for answer, unit in golds:
        gold = Fraction(answer)
        texts = [form for form in forms(gold) if unit != "%" or not form.endswith("%")]
        assert len(texts) >= 10 and len(set(texts)) == len(texts) - (abs(gold) < 1000)
        assert_all("correct", texts, answer, unit=unit)
        assert_all("wrong", near_misses(gold), answer, unit=unit)


def test_plain_numbers_are_compared_as_by_math_verify(data_dir):
    import math_verify

    extraction = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
    tasks = random.Random(0).sample(load_tasks("gsm8k", data_dir / "gsm8k/main/test.jsonl.gz"), 40)
    for task in tasks:
        gold = math_verify.parse(rf"\boxed{{{task['answer']}}}", extraction, parsing_timeout=None)
        for text in (*forms(Fraction(task["answer"]))[1:5], *near_misses(Fraction(task["answer"]))[:3]):
            parsed = math_verify.parse(rf"\boxed{{{text}}}", extraction, parsing_timeout=None)
            assert math_verify.verify(gold, parsed, timeout_seconds=None) == (
                check_completion(text, task["answer"]).status == "correct"
            ), text


# What models write around and for an answer, beside the tables above.
WRITTEN = {
    "42": [
        "The answer is 42.", "**42**", "The final answer is **42**.", "#### 42", "\\boxed{\\boxed{42}}",
        "\\boxed{41} no wait \\boxed{42}", "The answer is 42. Does that help?",
        "The answer is 42. Do you have 3 other questions?", "\\(\\boxed{42}\\)", "\\[x = \\boxed{42}\\]", "$$\\boxed{42}$$",
        "\\boxed{x=42}", "\\boxed{42}.", "Therefore, the answer is $\\boxed{42}$ apples.", "<answer>42</answer>",
        "<answer>\n42\n</answer>", "Final Answer: 42", "**Final Answer:** 42", "**Answer:** $42$", "The answer is: 42",
        "The answer is **42**.", "\\boxed{\\textbf{42}}", "\\boxed{\\mathbf{42}}", "\\boxed{42\\,\\text{km/h}}",
        "\\boxed{42 \\text{ km/h}}", "\\boxed{\\$42}", "\\boxed{\\$42.00}", "\\fbox{42}", "\\framebox{42}",
        "\\boxed{\\textit{42}}", "\\boxed{\\boldsymbol{42}}", "\\boxed{\\num{42}}", "\\boxed{42\\operatorname{cm}}",
        "\\boxed{84 \\over 2}", "\\boxed{{84 \\over 2}}", "\\boxed 42", "The answer is 42 apples.",
        "Therefore she has 42 apples left.", "She has 3 + 39 = 42 apples.", "The answer is forty-two (42).", "42", "42.",
        "42.0", "+42", "Answer: 042", "\\boxed{ 42 }", "\\boxed{\\ 42}", "The answer is \\(42\\).", "The answer is \\[42\\]",
        "Answer = 42", "the answer would be 42", "So the answer should be 42.", "The result is 42.", "The value of x is 42.",
        "Hence, $x = 42$.", "I got 42", "the correct answer is (42)", "The answer is $\\displaystyle 42$", "**Answer**: 42",
        "### Answer\n42", "The answer is\n\n42", "The answer is:\n\n$$42$$",
        "The answer is: \\begin{align} x &= 42 \\end{align}", "Answer: 4.2×10¹", "Answer: 4.2E1", "Answer: 84/2",
        "The answer is 42</s>", "The answer is 42<|im_end|>", "My answer: forty-two, i.e. 42", "Answer: ~42",
        "Answer: 42 (exact)", "Answer: 42,", "Answer: '42'", 'Answer: "42"', "Answer: `42`", "Answer: 42!",
        "The answer is 42 because 6 * 7 = 42.", "The answer is 42, since 6*7 = 42.", "Answer: €42", "Answer: 42 €",
        "\\boxed{\\text{42}}", "\\boxed{42 \\text{ or } 42.0}", "\\boxed{\\frac{84}{2}}", "\\boxed{{42}}",
        "\\boxed{42}\\n\\nLet me know if you have 2 questions", "The answer is 42.\n\nLet me double check: 6*7 = 42. ✓",
        "\\boxed{\\,42\\,}", "\\boxed{\\mathrm{42}}", "\\boxed{4.2 \\times 10^{1}}",
    ],
    "1/2": [
        "\\boxed{\\frac12}", "\\boxed{\\dfrac{1}{2}}", "\\boxed{\\tfrac12}", "\\boxed{\\cfrac{1}{2}}", "\\boxed{50\\%}",
        "Answer: ½", "$\\boxed{\\left(\\frac{1}{2}\\right)}$", "\\boxed{\\frac 1 2}", "\\boxed{\\frac1{2}}",
        "\\boxed{{\\frac{1}{2}}}",
    ],
    "1000": [
        "$\\boxed{1{,}000}$", "The answer is $1{,}000$.", "#### $1,000", "\\boxed{1\\ 000}", "\\boxed{1\\,000}",
        "\\boxed{1\\;000}", "Answer: 1'000", "Answer: 1_000",
    ],
    "5": ["\\boxed{5\\text{ cm}}", "\\boxed{5~\\mathrm{cm}^2}"],
    "3": ["So x = 3.", "x = 3"],
    "1234.5": ["The total is 1,234.5 dollars"],
    "-42": ["The answer is −42"],
    "3/2": ["Answer: 1 1/2", "Answer: 1½"],
    "1500": ["Answer: 1.5e3", "Answer: $1.5\\times10^{3}$", "Answer: $1.5 \\times 10^3$"],
    "-3/4": ["\\boxed{-\\frac{3}{4}}", "\\boxed{\\frac{-3}{4}}"],
    "3/4": ["\\boxed{3/4}", "\\boxed{0.75}"],
    "2\\sqrt{3}": ["\\boxed{2\\sqrt{3}}", "\\boxed{2 \\cdot \\sqrt3}"],
    "\\frac{\\sqrt{2}}{2}": ["\\boxed{\\frac{\\sqrt{2}}{2}}", "\\boxed{\\frac{1}{\\sqrt{2}}}"],
    "90": ["\\boxed{90^\\circ}", "\\boxed{90^{\\circ}}", "\\boxed{90°}"],
    "1234": ["The answer is 1\\,234"],
    "0.12": ["The answer is 12 %."],
    "7/2": ["\\boxed{3\\frac{1}{2}}", "\\boxed{3\\tfrac12}"],
    "-1/2": ["The answer is −½"],
}  # fmt: skip
NOT_WRITTEN = {
    "42": [
        "The answer is not 42.", "The answer is 43.", "\\boxed{42} no wait \\boxed{41}", "42 or 43", "The answer is 42 or 43.",
        "\\boxed{42, 43}", "no answer", "I don't know, maybe 42 or 24", "\\boxed{420}", "\\boxed{4.2}", "\\boxed{-42}", "42%",
        "\\boxed{42\\%}", "\\boxed{4 2}", "Answer: 4 2", "\\boxed{}", "\\boxed{x}", "\\boxed{42x}", "\\boxed{42^2}",
        "\\boxed{42 \\over 2}", "\\boxed{\\sqrt{42}}", "\\boxed{2 \\cdot 21}", "6 * 7", "The answer is 42 dozen",
        "The answer is between 40 and 42", "The answer is more than 42", "It can't be 42",
        "The answer is 42. The answer is 43.", "#### 42 43", "\\boxed{42}\\boxed{43}", "-(-42) is not 42", "Answer: 42i",
        "Answer: 42 000", "Answer: $42 million", "Answer: 42k", "Answer: ≠ 42", "Answer: > 42", "\\boxed{\\neq 42}",
        "\\boxed{\\geq 42}", "Answer: at least 42", "Answer: ±42", "\\boxed{\\pm 42}", "Answer: |42|", "Answer: 42..43",
        "Answer: 42-43", "Answer: 42–43", "Answer: 42:1", "Answer: 42 = 43", "The answer is 43 instead of 42",
        "The answer is 42. Wait, no, it is 43.", "The answer is 42? No, 43", "42 is wrong", "The answer is 42? No, 43",
    ],
    "1/2": ["\\boxed{\\frac{1}{3}}", "Answer: 1/2/3", "\\boxed{\\frac{1}{2}} or \\boxed{1/3}", "Answer: 1:2"],
    "1/3": ["0.33"],
    "12": ["\\boxed{1,2}"],
    "1234": ["1.234"],
    "1 2/1": ["Answer: 12"],
    "43": ["Is the answer 42?", "The answer is 42, not 43"],
    "103": ["Answer: 10^3"],
    "13": ["Answer: 1e3"],
    "25": ["Answer: 2^5"],
    "4": ["Answer: x = 3, y = 4", "Answer: x = 3 or x = 4"],
    "1000": ["Answer: 1.000", "Answer: 10³"],
    "100": ["Answer: 1,00"],
    "10000": ["Answer: 1,0000"],
    "31/2": ["Answer: 3 1/2", "\\boxed{3\\frac12}"],
    "7/2": ["Answer: 31/2"],
    "7": ["The answer is 7² = 49"],
    "5": ["Answer: 5²", "Answer: 5^2 cm"],
    "52": ["Answer: 5²"],
    "10": ["Answer: 10³"],
    "0.5": ["Answer: 0.5.5"],
}  # fmt: skip


@pytest.mark.parametrize(("answer", "completion"), [(answer, text) for answer, texts in WRITTEN.items() for text in texts])
def test_answers_in_sentences_and_variants_of_tex_are_read(answer, completion):
    assert check_completion(completion, answer).status == "correct"


@pytest.mark.parametrize(("answer", "completion"), [(answer, text) for answer, texts in NOT_WRITTEN.items() for text in texts])
def test_no_other_value_is_accepted(answer, completion):
    assert check_completion(completion, answer).status != "correct"


@pytest.mark.parametrize("completion", [
    "#### 18\n\nWait, 3 eggs are eaten, but that is already counted.", "**Answer:** 18\n\nSorry, 1 more remark: check it.",
    "\\boxed{18}. Actually, 9 eggs times 2 dollars is 18.",
    "The answer is 18. No, 5 of them are not red, but that does not matter.", "The answer is 42? No, 18 dollars.",
])  # fmt: skip
def test_only_a_short_correction_replaces_an_answer(completion):
    assert check_completion(completion, "18").status == "correct"
