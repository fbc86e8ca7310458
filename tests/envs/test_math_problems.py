"""Made problems: how many there are, that splits do not meet, and that every answer is right, found out in another way."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from fractions import Fraction

import pytest

from jmarl.envs.math.answers import check
from jmarl.envs.math.problems import TOPICS, MathProblemGenerator, split_of
from jmarl.envs.math.words import NAMES, STORIES

MANY = 1500
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
RELATIONS = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "=": operator.eq}


def value(text, **names):
    """Of an expression as problems write them, by Python's grammar."""
    text = re.sub(r"(?<=[0-9x-z)])\s*(?=[(x-z])", "*", text.replace("×", "*").replace("÷", "/").replace("^", "**"))

    def of(node):
        if isinstance(node, ast.BinOp):
            right = of(node.right)
            return OPERATORS[type(node.op)](of(node.left), int(right) if isinstance(node.op, ast.Pow) else right)
        if isinstance(node, ast.UnaryOp):
            return -of(node.operand)
        return Fraction(node.value) if isinstance(node, ast.Constant) else names[node.id]

    return of(ast.parse(text.strip(), mode="eval").body)


def holds(text, **names):
    """A chain of relations."""
    parts = re.split(r"(<=|>=|<|>|=)", text)
    each = [value(part, **names) for part in parts[::2]]
    return all(RELATIONS[sign](a, b) for a, sign, b in zip(each, parts[1::2], each[1:], strict=False))


@pytest.fixture(scope="module")
def made():
    """By difficulty and split."""
    return {
        (level, split): MathProblemGenerator((level, level)).tasks(split, MANY, seed=level)
        for level in (1, 2, 3)
        for split in ("train", "eval")
    }


@pytest.fixture(scope="module")
def of_template(made):
    """Tasks by the name of their template."""
    found = {}
    for tasks in made.values():
        for task in tasks:
            found.setdefault(task["id"].partition("/")[0], []).append(task)
    assert set(found) == {name for templates in TOPICS.values() for name in templates}
    return found


def test_a_thousand_distinct_tasks_at_every_difficulty_apart_in_splits(made):
    ids = {key: {task["id"] for task in tasks} for key, tasks in made.items()}
    questions = {key: {task["question"] for task in tasks} for key, tasks in made.items()}
    for level in (1, 2, 3):
        assert min(len(ids[level, "train"]), len(ids[level, "eval"]), len(questions[level, "train"])) == MANY >= 1000
        assert {task["difficulty"] for task in made[level, "train"]} == {level}
    everything = {split: set().union(*(of for (_, s), of in questions.items() if s == split)) for split in ("train", "eval")}
    assert not everything["train"] & everything["eval"]
    assert all(split_of(task_id) == split for (_, split), of in ids.items() for task_id in of)


def test_no_question_is_in_both_splits_whatever_its_difficulty():
    """x^2 - 1 = 0 may be drawn at two of them."""
    found = {"train": {}, "eval": {}}
    for level in (1, 2, 3):
        for split, questions in found.items():
            tasks = MathProblemGenerator((level, level), ["algebra", "arithmetic"]).tasks(split, 5000, seed=7)
            questions.update({task["question"]: task for task in tasks})
    assert min(map(len, found.values())) > 10_000 and not found["train"].keys() & found["eval"].keys()


def test_fractions_are_there_where_a_level_of_three_has_few_signs(of_template):
    asked = [task["question"] for task in of_template["arithmetic"] if task["difficulty"] == 3]
    assert all("/" in text or len(re.findall(r" [-+×÷] ", text)) >= 4 for text in asked)


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_every_topic_alone_has_a_thousand(topic, level):
    generator = MathProblemGenerator((level, level), [topic])
    assert len(generator.tasks("train", 1000)) == 1000 and {task["topic"] for task in generator.tasks("eval", 50)} == {topic}


def test_seeds_and_shares():
    generator = MathProblemGenerator()
    assert generator.tasks("train", 50, seed=1) == generator.tasks("train", 50, seed=1) != generator.tasks("train", 50, seed=2)
    tasks = generator.tasks("train", 900)
    assert set(Counter(task["difficulty"] for task in tasks)) == {1, 2, 3}
    assert all(count > 90 for count in Counter(task["topic"] for task in tasks).values())
    few = MathProblemGenerator((1, 1), ["arithmetic"]).tasks("eval", 10**4)
    assert 1000 < len(few) < 10**4  # all that there are


def test_names_and_the_order_of_a_sum_make_no_new_problem(made):
    """A story with other names, or 3 + 2 after 2 + 3, could be in both splits otherwise."""
    for tasks in made.values():
        for task in tasks:
            assert not any(name in task["id"] for name in NAMES)
        sums = [task["question"] for task in tasks if re.fullmatch(r"What is \d+ [+×] \d+\?", task["question"])]
        pairs = [tuple(sorted(re.findall(r"\d+|[+×]", text))) for text in sums]
        assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(difficulty_range=(0, 3)), "between 1 and 3"),
        (dict(difficulty_range=(3, 2)), "between 1 and 3"),
        (dict(topics=["geometry"]), "choose arithmetic, algebra, word, multi_step"),
        (dict(topics=[]), "choose arithmetic"),
    ],
)
def test_refuses_what_it_cannot_make(options, message):
    with pytest.raises(ValueError, match=message):
        MathProblemGenerator(**options)
    with pytest.raises(ValueError, match="train or eval"):
        MathProblemGenerator().tasks("test")


def test_the_answer_answers_and_its_neighbours_do_not(made):
    for tasks in made.values():
        for task in tasks:
            how = dict(kind=task["kind"], unit=task["unit"], lowest_terms=task["lowest_terms"])
            assert check(f"Answer: {task['answer']}", task["answer"], **how).status == "correct"
            assert check(task["question"], task["answer"], **how).status != "correct" or task["kind"] == "number"
            if task["kind"] == "number":
                off = [Fraction(task["answer"]) + 1, Fraction(task["answer"]) * 10 or 1, -Fraction(task["answer"]) or 1]
                assert all(check(f"Answer: {x}", task["answer"], **how).status == "wrong" for x in off)


# ---- every answer, found out in another way


def test_arithmetic_by_the_grammar_of_python(of_template):
    for task in of_template["arithmetic"]:
        asked = re.fullmatch(r"What is (.+)\?", task["question"])[1]
        assert value(asked) == Fraction(task["answer"])
        assert check(f"Answer: {asked}", task["answer"], lowest_terms=True).status != "correct"


def asked_for_x(task):
    return re.fullmatch(r"Solve for x(?: and y)?: (.+)", task["question"])[1]


def test_linear_equations_by_substitution(of_template):
    for task in of_template["linear"]:
        left, right = asked_for_x(task).split(" = ")
        assert value(left, x=Fraction(task["answer"])) == value(right, x=Fraction(task["answer"]))
        slope = [value(left, x=Fraction(x)) - value(right, x=Fraction(x)) for x in (0, 1)]
        assert slope[0] != slope[1]  # one solution only


def test_quadratic_equations_by_substitution(of_template):
    surds = 0
    for task in of_template["quadratic"]:
        left, right = asked_for_x(task).split(" = ")
        roots = task["answer"].split(", ")
        assert len(roots) == len(set(roots)) == 2
        for root in roots:
            if "sqrt" in root:
                p, sign, size, under = re.fullmatch(r"(-?\d+) ([-+]) (\d*)\\sqrt\{(\d+)\}", root).groups()
                x = int(p) + (1 if sign == "+" else -1) * int(size or 1) * math.sqrt(int(under))
                assert abs(float(value(left, x=x)) - float(value(right))) < 1e-9
                surds += 1
            else:
                assert value(left, x=Fraction(root)) == value(right)
    assert surds > 50


def test_systems_by_substitution(of_template):
    for task in of_template["system"]:
        equations = asked_for_x(task).split(" and ")
        x, y = (Fraction(part.partition(" = ")[2]) for part in task["answer"].split(", "))
        rows = []
        for equation in equations:
            left, right = equation.split(" = ")
            assert value(left, x=x, y=y) == value(right)
            rows.append([value(left, x=Fraction(a), y=Fraction(1 - a)) for a in (1, 0)])
        assert rows[0][0] * rows[1][1] != rows[0][1] * rows[1][0]  # one solution only


def test_inequalities_at_points(of_template):
    """Around every end, and far away."""
    for task in of_template["inequality"]:
        ends = [Fraction(end) for end in re.findall(r"-?\d+(?:/\d+)?", task["answer"])]
        points = [end + shift for end in ends for shift in (0, Fraction(1, 1000), -Fraction(1, 1000), 7, -7)] + [
            -(10**6),
            10**6,
        ]
        for x in map(Fraction, points):
            inside = any(holds(part, x=x) for part in task["answer"].split(" or "))
            assert holds(asked_for_x(task), x=x) == inside, (task, x)


# What is asked for in each story, from the numbers a, b, c, … of its text.
EXPECTED = {
    "gift": ("a + b", "a + b - c", "(a + b - c) / d"),
    "lost": ("a - b", "a - b + c * d", "(a - b + c * d) / (1 + e)"),
    "crates": ("a * b", "a * b - c", "d * (a * b - c)"),
    "sharing": ("a / b", "c + a / b", "c - d + a / b"),
    "pens": ("a * b", "a * b + c * d", "e - (a * b + c * d)"),
    "train": ("a * b", "a * b + c * d", "e - (a * b + c * d)"),
    "book": ("a - b", "(a - b) / c", "d * (a - b) / c"),
    "garden": ("a * b", "a * b - c", "d * (a * b - c)"),
    "fence": ("a + b + a + b", "a + b + a + b - c", "d * (a + b + a + b - c)"),
    "sale": ("a - a * b / 100", "c * (a - a * b / 100)", "d + c * (a - a * b / 100)"),
    "ages": ("a + b", "a + (a + b) + (a + b + c)", "(a + d) + (a + b + d) + (a + b + c + d)"),
    "saving": ("a * b", "a * b + c", "a * b + c - d"),
    "legs": ("a + a + 4 * b", "a + a + 4 * (b + c)", "2 * (a - d) + 4 * (b + c)"),
    "bus": ("a - b + c", "a - b + c + d", "e * (a - b + c + d)"),
    "cakes": ("a * b", "a * b / c", "d * (a * b / c)"),
    "painters": ("a * b", "a * b * c", "d + a * b * c"),
    "hall": ("a * b", "a * b - c", "a * b - (c + d * e)"),
    "tank": ("a + b * c", "a - d + b * c", "(a - d + b * c) / e"),
    "red": ("a / b", "a / b - c", "a / b + d - c"),
    "tickets": ("c * a + d * b", "c * a + d * b - e", "(c * a + d * b - e) / f"),
    "weather": ("a + b", "a + b - c", "a + b + d - c"),
    "games": ("(a + b + c) / 3", "a + b + c + d", "(a + b + c + d) + (a + b + c + d - e)"),
    "orchard": ("a * b + c", "a * b + c - d", "e * (a * b + c - d)"),
    "school": ("a * b / 100", "a * b / 100 - c", "(a * b / 100 - c) / d"),
    "share": ("100 * b / a", "100 * (b - c) / a", "100 * (a - (c + d)) / a"),
}


def test_stories_from_the_numbers_of_their_texts(of_template):
    assert set(EXPECTED) == set(STORIES) and len(STORIES) >= 20
    for name, formulas in EXPECTED.items():
        assert {task["difficulty"] for task in of_template[name]} == {1, 2, 3}
        for task in of_template[name]:
            numbers = [Fraction(n) for n in re.findall(r"\d+", task["question"].rpartition(". ")[0])]
            letters = dict(zip("abcdef", numbers, strict=False))
            formula = compile(formulas[task["difficulty"] - 1], name, "eval")
            assert set(formula.co_names) <= set(letters)
            answer = eval(formula, {}, letters)
            assert answer == Fraction(task["answer"]) > 0
            assert answer.denominator == 1 or (name in ("sale", "share") and (10 * answer).denominator == 1)
            assert name != "share" or (answer <= 100 and task["unit"] == "%")


def test_stories_are_sensible_texts(of_template):
    for name in STORIES:
        for task in of_template[name]:
            text = task["question"]
            assert text.endswith("?") and "{" not in text and "  " not in text and len(text) < 400
            told = text.rpartition(". ")[0]
            used = set("".join(EXPECTED[name][: task["difficulty"]])) & set("abcdef")
            assert len(re.findall(r"\d+", told)) == len(used)
            named = [word for word in re.findall(r"[A-Z][a-z]+", text) if word in NAMES]
            assert len(set(named)) <= 3


def test_stories_mean_what_is_asked(of_template):
    for name, said in {
        "orchard": "Each tree that still stands bears",
        "tank": "The water that is left fills buckets",
        "school": "Those who come are spread",
    }.items():
        assert all(said in task["question"] for task in of_template[name] if task["difficulty"] == 3)
    assert not any("and 1 others" in task["question"] for task in of_template["lost"])


def test_chains_step_by_step(of_template):
    words = {"Add": "+", "Subtract": "-", "Multiply by": "*", "Divide by": "/"}
    for task in of_template["chain"]:
        x = Fraction(re.match(r"Start with (\d+)\.", task["question"])[1])
        for word, n in re.findall(r"(Add|Subtract|Multiply by|Divide by) (\d+)\.", task["question"]):
            x = value(f"x {words[word]} {n}", x=x)
        assert x == Fraction(task["answer"])


def test_numbers_thought_of_lead_to_the_result(of_template):
    for task in of_template["thought_of"]:
        x = int(task["answer"])
        for word, n in re.findall(r"I (multiply by|add|subtract) (\d+)", task["question"]):
            x = {"multiply by": x * int(n), "add": x + int(n), "subtract": x - int(n)}[word]
        assert f"The result is {x}." in task["question"]


def test_sequences_term_by_term(of_template):
    for task in of_template["sequence"]:
        n = [int(number) for number in re.findall(r"\d+", task["question"])]
        if task["difficulty"] == 3:
            i, at_i, j, at_j, k = n
            terms = {t: Fraction(at_j - at_i, j - i) * (t - i) + at_i for t in range(1, 60)}
            assert terms[k] == int(task["answer"])
            continue
        a, b, c, k = n
        terms = [a, b, c]
        while len(terms) < k:
            terms.append(2 * terms[-1] - terms[-2])
        assert int(task["answer"]) == (terms[k - 1] if task["difficulty"] == 1 else sum(terms[:k]))


def test_functions_in_functions(of_template):
    for task in of_template["functions"]:
        rules = dict(re.findall(r"([fg])\(x\) = ([^.]+?)(?= and|\.)", task["question"]))

        def call(name, x, rules=rules):
            return value(rules[name], x=x)

        asked = re.search(r"What is (.+)\?", task["question"])[1]
        total = Fraction(0)
        for sign, names, x in re.findall(r"([-+]?) ?((?:[fg]\()+)(\d+)\)+", asked):
            result = Fraction(x)
            for name in reversed(re.findall("[fg]", names)):
                result = call(name, result)
            total += -result if sign == "-" else result
        assert total == Fraction(task["answer"])


def test_percentages_one_after_the_other(of_template):
    for task in of_template["percentages"]:
        if one := re.fullmatch(r"What is (\d+)% of (\d+)\?", task["question"]):
            assert Fraction(task["answer"]) == Fraction(int(one[1]) * int(one[2]), 100)
            continue
        price = Fraction(re.search(r"is (\d+) dollars", task["question"])[1])
        for way, p in re.findall(r"(raised|lowered) by (\d+)%", task["question"]):
            price += price * int(p) / 100 * (1 if way == "raised" else -1)
        assert price == Fraction(task["answer"])


def test_divisors_by_trying(of_template):
    for task in of_template["divisors"]:
        n = [int(number) for number in re.findall(r"\d+", task["question"])]
        if task["difficulty"] == 1:
            found = max(k for k in range(1, 500) if n[0] % k == n[1] % k == 0)
        elif task["difficulty"] == 2:
            found = next(k for k in range(1, 4000) if k % n[0] == k % n[1] == 0)
        else:
            found = (n[0] * n[1] + n[2]) - (n[0] * n[1] + n[2]) // n[3] * n[3]
        assert found == int(task["answer"])
