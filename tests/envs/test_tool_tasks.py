"""Tasks of tool use: comparison of answers, splits, and that the tools find the answers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from jmarl.envs.tools.answers import is_correct
from jmarl.envs.tools.registry import Tool, ToolRegistry
from jmarl.envs.tools.tasks import MAKERS, TOOLS_NEEDED, generate_tasks, kinds_for, split_of
from jmarl.envs.tools.tool_calls import format_message
from jmarl.envs.tools.tool_use import ToolSandbox, ToolUse

RNG = np.random.default_rng(0)

# Answers

ANSWERS = {
    "42": (["42", " 42 ", "42.", "42.0", "+42", "042"],
     ["41", "42 43", "42, 43", "4 2", "forty-two", "42 or 41", "-42", "42e0", "0x2a", "٤٢", "", "nan", "inf"]),
    "1234567.5": (["1,234,567.5", "1234567.50"], ["1,23,4567.5", "1234567", "1.234.567,5"]),
    "East Rusk": (["east rusk", "East  Rusk.", "the East Rusk", "EAST\nRUSK"],
     ["East", "Rusk", "East Rusk, West Rusk", "East Rusk or Pell", "in East Rusk"]),
    "-3": (["-3", "-3.0"], ["3", "−3 3"]),
}  # fmt: skip


@pytest.mark.parametrize("expected", ANSWERS)
def test_right_answers_are_correct_and_wrong_ones_are_not(expected):
    right, wrong = ANSWERS[expected]
    assert all(is_correct(text, expected) for text in right)
    assert not any(is_correct(text, expected) for text in wrong)


@pytest.mark.parametrize("answer", [
    "1234 metres", "1,234 Metres.", "$1234", "**1234**", "'1234'", '"1234."', "**1234 metres**", "`1234`", "_1234_", "€1,234.0",
])  # fmt: skip
def test_answers_may_have_units_and_decoration(answer):
    assert is_correct(answer, "1234", question="How many metres high is the hill?")
    assert not is_correct(answer, "1235", question="How many metres high is the hill?")


def test_a_list_of_answers_is_never_correct():
    for text in (
        "1234 or",
        "1234 1235 metres",
        "1234 metres 1235",
        "1234 feet",
        "1234, 1235",
        "**1234** **1235**",
        "$ $1234",
        "5*1234",
    ):
        assert not is_correct(text, "1234", question="How many metres high is the hill?"), text
    assert not is_correct("1234 metres", "1234", question="What is the sum?") and not is_correct("1234 metres", "1234")
    assert (
        is_correct("−3", "-3")
        and is_correct("-$3", "-3")
        and is_correct("'Amble'", "Amble")
        and is_correct("**the Amble.**", "Amble")
    )
    assert not is_correct("'Amble' 'Pell'", "Amble")


def test_rounded_answers_have_a_tolerance():
    assert is_correct("2.67", "2.67", 0.0051) and is_correct("2.6667", "2.67", 0.0051) and is_correct("2.665", "2.67", 0.0051)
    assert (
        not is_correct("2.68", "2.67", 0.0051)
        and not is_correct("2.6", "2.67", 0.0051)
        and not is_correct("2.67000001", "2.67")
    )
    assert not is_correct("9" * 100_000, "9" * 300) and not is_correct(" ".join(map(str, range(100))), "42")


# Tasks


def test_every_kind_is_generated_and_splits_are_disjoint():
    tasks = {split: generate_tasks(list(MAKERS), split, 270, seed=3) for split in ("train", "eval")}
    for split, in_split in tasks.items():
        assert [task["kind"] for task in in_split[:9]] == list(MAKERS) and len(in_split) == 270
        assert {split_of(task) for task in in_split} == {split}
        assert len({json.dumps([task["question"], task.get("files")]) for task in in_split}) == 270
    questions = [{json.dumps([t["question"], t.get("files")]) for t in tasks[split]} for split in tasks]
    assert not questions[0] & questions[1]
    assert (
        generate_tasks(["lookup"], "train", 5, 1)
        == generate_tasks(["lookup"], "train", 5, 1)
        != generate_tasks(["lookup"], "train", 5, 2)
    )


def test_an_exhausted_kind_gives_fewer_tasks():
    """The corpus has 2,240 questions, a fifth of them held out; other kinds continue when one is exhausted."""
    lookups = generate_tasks(["lookup"], "eval", 10_000, 0)
    assert 400 < len(lookups) < 500
    mixed = generate_tasks(["arithmetic", "lookup"], "eval", 1200, 0)
    assert len(mixed) == 1200 and sum(task["kind"] == "lookup" for task in mixed) <= len(lookups) + 48


def test_tools_decide_which_kinds_are_possible():
    assert kinds_for(["calculator"]) == ["arithmetic"] and kinds_for(MAKERS) == []
    assert ToolUse().kinds == ("arithmetic", "lookup", "two_hops", "lookup_difference", "lookup_product")
    assert ToolSandbox().kinds == tuple(MAKERS) == tuple(TOOLS_NEEDED)
    assert {t["kind"] for t in ToolUse(kinds=["lookup"]).tasks(count=9)} == {"lookup"}
    own = ToolUse(ToolRegistry([Tool("t", "", {"type": "object"}, lambda: "", {})]))
    with pytest.raises(ValueError, match="no generated task can be solved with t alone"):
        own.tasks()
    with pytest.raises(ValueError, match="kinds file cannot be solved with these tools: choose some of arithmetic, lookup"):
        ToolUse(kinds=["file"])
    with pytest.raises(ValueError, match="choose train or eval"):
        own.tasks("test") if own.kinds else generate_tasks(["lookup"], "test", 1, 0)


def play_solution(env, task):
    """Make the calls that the task names and answer with the last result; return the sum of rewards and the last step."""
    state, prompts = env.reset(task, RNG)
    total, text = 0.0, ""
    for calls in task["calls"]:
        for one in calls:  # numbers in an expression must be in the prompt: in the question or in a result
            if one["name"] == "calculator" and len(task["calls"]) > 1:
                numbers = "".join(c if c.isdigit() else " " for c in one["parameters"]["expression"]).split()
                assert all(number in prompts[0] for number in numbers)
        step = env.step(state, [format_message(calls, "")], RNG)
        assert step.info["num_failed"] == 0 and not step.done, step.observations
        state, prompts, total = step.state, step.observations, total + step.reward
        text = "\n".join(record.result for record in state.records[-len(calls) :])
    answer = task["answer"]
    if task.get("tolerance"):
        answer = text  # the calculator's twelve digits
    assert answer in text
    step = env.step(state, [f"<answer>{answer}</answer>"], RNG)
    return total + step.reward, step


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if TOOLS_NEEDED[kind] <= {"calculator", "web_search"}])
def test_calculator_and_search_find_the_answers(kind):
    """The solution earns the maximum of an episode in which the tools are used before answering."""
    env = ToolUse(kinds=[kind])
    for task in [*env.tasks("train", 60), *env.tasks("eval", 20)]:
        total, step = play_solution(env, task)
        assert step.info["solved"] == 1 and step.done
        assert total == pytest.approx(0.3 * len(task["tools"]) + 0.8 + 0.2 * (1 - len(task["calls"]) / 4))


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if not TOOLS_NEEDED[kind] <= {"calculator", "web_search"}])
def test_python_and_files_find_the_answers(kind, needs_sandbox):
    env = ToolSandbox(kinds=[kind])
    for task in env.tasks("train", 6):
        total, step = play_solution(env, task)
        assert step.info["solved"] == 1
        assert total == pytest.approx(0.3 * len(task["tools"]) + 0.8 + 0.2 * (1 - len(task["calls"]) / 4))


def test_answers_of_arithmetic_equal_those_of_python():
    """The answers come from the calculator."""
    for task in generate_tasks(["arithmetic"], "train", 200, 5):
        expression = task["calls"][0][0]["parameters"]["expression"].replace("^", "**")
        value = eval(expression, {"sqrt": math.sqrt, "comb": math.comb})
        assert task["answer"] == (f"{value:.2f}" if task["tolerance"] else str(value))
