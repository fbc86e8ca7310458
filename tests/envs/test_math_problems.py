"""Generated problems: their number, disjoint splits, and every answer recomputed from the text of its question."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from fractions import Fraction

import pytest

from jmarl.envs.data import split_of
from jmarl.envs.math.answers import check_completion
from jmarl.envs.math.problems import TOPICS, MathProblemGenerator
from jmarl.envs.math.word_problems import NAMES, STORIES
from tests.matrix import product

NUM_TASKS = 1000
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
RELATIONS = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "=": operator.eq}


def evaluate(text: str, **variables: Fraction | float) -> Fraction:
    """Return the value of an expression in the notation of the problems, by Python's grammar."""
    text = re.sub(r"(?<=[0-9x-z)])\s*(?=[(x-z])", "*", text.replace("×", "*").replace("÷", "/").replace("^", "**"))

    def visit(node: ast.AST):
        if isinstance(node, ast.BinOp):
            right = visit(node.right)
            return OPERATORS[type(node.op)](visit(node.left), int(right) if isinstance(node.op, ast.Pow) else right)
        if isinstance(node, ast.UnaryOp):
            return -visit(node.operand)
        return Fraction(node.value) if isinstance(node, ast.Constant) else variables[node.id]

    return visit(ast.parse(text.strip(), mode="eval").body)


def holds(text: str, **variables: Fraction) -> bool:
    """Return whether a chain of relations is true."""
    parts = re.split(r"(<=|>=|<|>|=)", text)
    values = [evaluate(part, **variables) for part in parts[::2]]
    return all(RELATIONS[sign](a, b) for a, sign, b in zip(values, parts[1::2], values[1:], strict=False))


@pytest.fixture(scope="module")
def generated():
    """Tasks by difficulty and split."""
    return {
        (level, split): MathProblemGenerator((level, level)).tasks(split, NUM_TASKS, seed=level)
        for level in (1, 2, 3)
        for split in ("train", "eval")
    }


@pytest.fixture(scope="module")
def by_template(generated):
    """Tasks by the name of their template."""
    tasks_by_name = {}
    for tasks in generated.values():
        for task in tasks:
            tasks_by_name.setdefault(task["id"].partition("/")[0], []).append(task)
    assert set(tasks_by_name) == {name for templates in TOPICS.values() for name in templates}
    return tasks_by_name


def test_every_difficulty_has_a_thousand_distinct_tasks_and_splits_are_disjoint(generated):
    ids = {key: {task["id"] for task in tasks} for key, tasks in generated.items()}
    questions = {key: {task["question"] for task in tasks} for key, tasks in generated.items()}
    for level in (1, 2, 3):
        assert min(len(ids[level, "train"]), len(ids[level, "eval"]), len(questions[level, "train"])) == NUM_TASKS
        assert {task["difficulty"] for task in generated[level, "train"]} == {level}
    by_split = {
        split: set().union(*(texts for (_, s), texts in questions.items() if s == split)) for split in ("train", "eval")
    }
    assert not by_split["train"] & by_split["eval"]
    assert all(split_of(task_id) == split for (_, split), task_ids in ids.items() for task_id in task_ids)


@pytest.mark.long
def test_no_question_is_in_both_splits_whatever_its_difficulty():
    """x^2 - 1 = 0 may be drawn at two difficulties."""
    by_split = {"train": {}, "eval": {}}
    for level in (1, 2, 3):
        for split, questions in by_split.items():
            tasks = MathProblemGenerator((level, level), ["algebra", "arithmetic"]).tasks(split, 2500, seed=7)
            questions.update({task["question"]: task for task in tasks})
    assert min(map(len, by_split.values())) > 5_000 and not by_split["train"].keys() & by_split["eval"].keys()


def test_expressions_of_level_three_have_fractions_or_many_operations(by_template):
    questions = [task["question"] for task in by_template["arithmetic"] if task["difficulty"] == 3]
    assert all("/" in text or len(re.findall(r" [-+×÷] ", text)) >= 4 for text in questions)


@pytest.mark.parametrize("topic, level", product(list(TOPICS), [1, 2, 3]))
def test_every_topic_alone_has_a_thousand_tasks(topic, level):
    generator = MathProblemGenerator((level, level), [topic])
    assert len(generator.tasks("train", 1000)) == 1000 and {task["topic"] for task in generator.tasks("eval", 50)} == {topic}


def test_equal_seeds_give_equal_tasks_and_topics_are_mixed():
    generator = MathProblemGenerator()
    assert generator.tasks("train", 50, seed=1) == generator.tasks("train", 50, seed=1) != generator.tasks("train", 50, seed=2)
    tasks = generator.tasks("train", 900)
    assert set(Counter(task["difficulty"] for task in tasks)) == {1, 2, 3}
    assert all(count > 90 for count in Counter(task["topic"] for task in tasks).values())
    few = MathProblemGenerator((1, 1), ["arithmetic"]).tasks("eval", 10**4)
    assert 1000 < len(few) < 10**4  # fewer than asked for: there are no more


def test_names_and_the_order_of_a_sum_make_no_new_problem(generated):
    """Otherwise a story with other names, or 3 + 2 after 2 + 3, could be in both splits."""
    for tasks in generated.values():
        for task in tasks:
            assert not any(name in task["id"] for name in NAMES)
        sums = [task["question"] for task in tasks if re.fullmatch(r"What is \d+ [+×] \d+\?", task["question"])]
        pairs = [tuple(sorted(re.findall(r"\d+|[+×]", text))) for text in sums]
        assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize(("options", "message"), [
    (dict(difficulty_range=(0, 3)), "between 1 and 3"),
    (dict(difficulty_range=(3, 2)), "between 1 and 3"),
    (dict(topics=["geometry"]), "choose arithmetic, algebra, word, multi_step"),
    (dict(topics=[]), "choose arithmetic"),
])  # fmt: skip
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MathProblemGenerator(**options)
    with pytest.raises(ValueError, match="train or eval"):
        MathProblemGenerator().tasks("test")


@pytest.mark.long
def test_the_answer_of_a_task_is_correct_and_close_ones_are_wrong(generated):
    """Of every third task."""
    for tasks in generated.values():
        for task in tasks[::3]:
            form = dict(kind=task["kind"], unit=task["unit"], lowest_terms=task["lowest_terms"])
            assert check_completion(f"Answer: {task['answer']}", task["answer"], **form).status == "correct"
            assert check_completion(task["question"], task["answer"], **form).status != "correct" or task["kind"] == "number"
            if task["kind"] == "number":
                wrong = [Fraction(task["answer"]) + 1, Fraction(task["answer"]) * 10 or 1, -Fraction(task["answer"]) or 1]
                assert all(check_completion(f"Answer: {x}", task["answer"], **form).status == "wrong" for x in wrong)


# ---- every answer, recomputed from the question


def test_expressions_have_the_value_that_python_gives_them(by_template):
    for task in by_template["arithmetic"]:
        expression = re.fullmatch(r"What is (.+)\?", task["question"])[1]
        assert evaluate(expression) == Fraction(task["answer"])
        assert check_completion(f"Answer: {expression}", task["answer"], lowest_terms=True).status != "correct"


def equation_of(task: dict) -> str:
    return re.fullmatch(r"Solve for x(?: and y)?: (.+)", task["question"])[1]


def test_answers_solve_linear_equations(by_template):
    for task in by_template["linear"]:
        left, right = equation_of(task).split(" = ")
        assert evaluate(left, x=Fraction(task["answer"])) == evaluate(right, x=Fraction(task["answer"]))
        slope = [evaluate(left, x=Fraction(x)) - evaluate(right, x=Fraction(x)) for x in (0, 1)]
        assert slope[0] != slope[1]  # one solution only


def test_answers_solve_quadratic_equations(by_template):
    surds = 0
    for task in by_template["quadratic"]:
        left, right = equation_of(task).split(" = ")
        roots = task["answer"].split(", ")
        assert len(roots) == len(set(roots)) == 2
        for root in roots:
            if "sqrt" in root:
                p, sign, size, under = re.fullmatch(r"(-?\d+) ([-+]) (\d*)\\sqrt\{(\d+)\}", root).groups()
                x = int(p) + (1 if sign == "+" else -1) * int(size or 1) * math.sqrt(int(under))
                assert abs(float(evaluate(left, x=x)) - float(evaluate(right))) < 1e-9
                surds += 1
            else:
                assert evaluate(left, x=Fraction(root)) == evaluate(right)
    assert surds > 50


def test_answers_solve_systems(by_template):
    for task in by_template["system"]:
        equations = equation_of(task).split(" and ")
        x, y = (Fraction(part.partition(" = ")[2]) for part in task["answer"].split(", "))
        rows = []
        for equation in equations:
            left, right = equation.split(" = ")
            assert evaluate(left, x=x, y=y) == evaluate(right)
            rows.append([evaluate(left, x=Fraction(a), y=Fraction(1 - a)) for a in (1, 0)])
        assert rows[0][0] * rows[1][1] != rows[0][1] * rows[1][0]  # one solution only


def test_answers_hold_exactly_where_inequalities_hold(by_template):
    """At points around every end, and far away."""
    for task in by_template["inequality"]:
        ends = [Fraction(end) for end in re.findall(r"-?\d+(?:/\d+)?", task["answer"])]
        points = [end + shift for end in ends for shift in (0, Fraction(1, 1000), -Fraction(1, 1000), 7, -7)] + [
            -(10**6),
            10**6,
        ]
        for x in map(Fraction, points):
            inside = any(holds(part, x=x) for part in task["answer"].split(" or "))
            assert holds(equation_of(task), x=x) == inside, (task, x)


# The answer of a story at every difficulty, in the numbers a, b, c, … of its text.
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


def test_answers_of_stories_follow_from_the_numbers_in_their_texts(by_template):
    assert set(EXPECTED) == set(STORIES) and len(STORIES) >= 20
    for name, formulas in EXPECTED.items():
        assert {task["difficulty"] for task in by_template[name]} == {1, 2, 3}
        for task in by_template[name]:
            numbers = [Fraction(n) for n in re.findall(r"\d+", task["question"].rpartition(". ")[0])]
            letters = dict(zip("abcdef", numbers, strict=False))
            formula = compile(formulas[task["difficulty"] - 1], name, "eval")
            assert set(formula.co_names) <= set(letters)
            answer = eval(formula, {}, letters)
            assert answer == Fraction(task["answer"]) > 0
            assert answer.denominator == 1 or (name in ("sale", "share") and (10 * answer).denominator == 1)
            assert name != "share" or (answer <= 100 and task["unit"] == "%")


def test_stories_are_complete_texts(by_template):
    for name in STORIES:
        for task in by_template[name]:
            text = task["question"]
            assert text.endswith("?") and "{" not in text and "  " not in text and len(text) < 400
            statement = text.rpartition(". ")[0]
            used = set("".join(EXPECTED[name][: task["difficulty"]])) & set("abcdef")
            assert len(re.findall(r"\d+", statement)) == len(used)
            names = [word for word in re.findall(r"[A-Z][a-z]+", text) if word in NAMES]
            assert len(set(names)) <= 3


def test_ambiguous_stories_are_spelled_out(by_template):
    for name, sentence in {
        "orchard": "Each tree that still stands bears",
        "tank": "The water that is left fills buckets",
        "school": "Those who come are spread",
    }.items():
        assert all(sentence in task["question"] for task in by_template[name] if task["difficulty"] == 3)
    assert not any("and 1 others" in task["question"] for task in by_template["lost"])


def test_answers_of_chains_follow_step_by_step(by_template):
    words = {"Add": "+", "Subtract": "-", "Multiply by": "*", "Divide by": "/"}
    for task in by_template["chain"]:
        x = Fraction(re.match(r"Start with (\d+)\.", task["question"])[1])
        for word, n in re.findall(r"(Add|Subtract|Multiply by|Divide by) (\d+)\.", task["question"]):
            x = evaluate(f"x {words[word]} {n}", x=x)
        assert x == Fraction(task["answer"])


def test_numbers_thought_of_lead_to_the_result(by_template):
    for task in by_template["thought_of"]:
        x = int(task["answer"])
        for word, n in re.findall(r"I (multiply by|add|subtract) (\d+)", task["question"]):
            x = {"multiply by": x * int(n), "add": x + int(n), "subtract": x - int(n)}[word]
        assert f"The result is {x}." in task["question"]


def test_answers_of_sequences_follow_term_by_term(by_template):
    for task in by_template["sequence"]:
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


def test_answers_of_functions_are_their_values(by_template):
    for task in by_template["functions"]:
        rules = dict(re.findall(r"([fg])\(x\) = ([^.]+?)(?= and|\.)", task["question"]))

        def call(name, x, rules=rules):
            return evaluate(rules[name], x=x)

        expression = re.search(r"What is (.+)\?", task["question"])[1]
        total = Fraction(0)
        for sign, names, x in re.findall(r"([-+]?) ?((?:[fg]\()+)(\d+)\)+", expression):
            result = Fraction(x)
            for name in reversed(re.findall("[fg]", names)):
                result = call(name, result)
            total += -result if sign == "-" else result
        assert total == Fraction(task["answer"])


def test_answers_of_percentages_follow_step_by_step(by_template):
    for task in by_template["percentages"]:
        if single := re.fullmatch(r"What is (\d+)% of (\d+)\?", task["question"]):
            assert Fraction(task["answer"]) == Fraction(int(single[1]) * int(single[2]), 100)
            continue
        price = Fraction(re.search(r"is (\d+) dollars", task["question"])[1])
        for direction, percent in re.findall(r"(raised|lowered) by (\d+)%", task["question"]):
            price += price * int(percent) / 100 * (1 if direction == "raised" else -1)
        assert price == Fraction(task["answer"])


def test_answers_of_divisors_by_exhaustive_search(by_template):
    for task in by_template["divisors"]:
        n = [int(number) for number in re.findall(r"\d+", task["question"])]
        if task["difficulty"] == 1:
            expected = max(k for k in range(1, 500) if n[0] % k == n[1] % k == 0)
        elif task["difficulty"] == 2:
            expected = next(k for k in range(1, 4000) if k % n[0] == k % n[1] == 0)
        else:
            expected = (n[0] * n[1] + n[2]) - (n[0] * n[1] + n[2]) // n[3] * n[3]
        assert expected == int(task["answer"])
