"""Tool use as an environment: rewards worked by hand, that calls cannot be milked, tasks that tools solve, and the team."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs import make
from jmarl.envs.base import Unanswered
from jmarl.envs.pool import Pool
from jmarl.envs.tools import sandbox as tool_sandbox
from jmarl.envs.tools import use as tool_use
from jmarl.envs.tools.registry import Tool, ToolRegistry
from jmarl.envs.tools.tasks import MAKERS, NEEDS, generate, is_correct, kinds_for, split_of
from jmarl.envs.tools.use import ToolSandbox, ToolTeam, ToolUse, ToolUseEnvironment, create_default_tool_registry
from jmarl.envs.vector import Fault, InProcess, LockStep, step_once
from jmarl.sandbox import SandboxUnavailable, default_sandbox

RNG = np.random.default_rng(0)
BOTH = {"question": "What is it?", "answer": "42", "tools": ["calculator", "web_search"]}
ONE = BOTH | {"tools": ["calculator"]}
NONE = BOTH | {"tools": []}


def call(name, **parameters):
    return f"<tool_call>{json.dumps({'name': name, 'parameters': parameters})}</tool_call>"


CALC, SEARCH, FAILS = (
    call("calculator", expression="6 * 7"),
    call("web_search", query="Tarn"),
    call("calculator", expression="1/0"),
)
BAD, UNKNOWN, BROKEN = call("calculator", text="6 * 7"), call("abacus"), "<tool_call>calculator</tool_call>"
RIGHT, WRONG = "<answer>42</answer>", "<answer>41</answer>"


def played(task, *messages, env=None):
    """Rewards of the turns, the last step, and what was read before each message."""
    env = env or ToolUse()
    state, read = env.reset(task, RNG)
    rewards, texts, step = [], [read[0]], None
    for message in messages:
        assert step is None or not step.done, "the episode was over"
        step = env.step(copy.deepcopy(state), [message], RNG)
        state, (text,) = step.state, step.observations
        rewards.append(step.reward)
        texts.append(text)
        parts = sum(step.info[name] for name in ("calls", "correct", "coverage", "speed"))
        assert parts == pytest.approx(step.reward) and set(step.info) == set(tool_use.METRICS)
    return rewards, step, texts


HAND = {  # task, messages -> rewards
    "the honest way": (BOTH, [SEARCH, CALC, RIGHT], [0.3, 0.3, 0.5 + 0.3 + 0.2 * 0.5]),
    "with one tool": (ONE, [CALC, RIGHT], [0.3, 0.5 + 0.3 + 0.2 * 0.75]),
    "all at once": (BOTH, [SEARCH + CALC + RIGHT], [0.6 + 0.5 + 0.3 + 0.2]),
    "the answer without tools": (BOTH, [RIGHT], [0.5 + 0.2]),
    "a wrong answer": (BOTH, [WRONG], [0.2]),
    "a wrong answer after one of two": (BOTH, [SEARCH, WRONG], [0.3, 0.15 + 0.15]),
    "no tool is needed": (NONE, [RIGHT], [0.5 + 0.3 + 0.2]),
    "a needed tool twice": (ONE, [CALC + CALC, CALC], [0.3, 0]),
    "another tool": (ONE, [SEARCH, SEARCH + SEARCH], [-0.1, -0.2]),
    "another tool, refused": (ONE, [call("web_search")], [-0.1]),
    "an unknown tool": (ONE, [UNKNOWN, UNKNOWN * 2], [-0.2, -0.4]),
    "no tag": (ONE, ["I think it is 42.", ""], [-0.1, -0.1]),
    "wrong parameters": (ONE, [BAD, CALC], [0, 0.3]),
    "a call that fails": (ONE, [FAILS, CALC], [0, 0.3]),
    "a call that cannot be read": (ONE, [BROKEN, BROKEN + CALC], [-0.1, 0.3]),
    "a call that is not closed": (ONE, [CALC.removesuffix("</tool_call>"), CALC], [-0.1, 0.3]),
    "an empty answer": (ONE, ["<answer></answer>"], [-0.1]),
    "at the last turn": (ONE, [BAD, BAD, BAD, CALC + RIGHT], [0, 0, 0, 0.3 + 0.5 + 0.3 + 0.2 * 0.25]),
    "never an answer": (BOTH, [CALC, SEARCH, CALC, CALC], [0.3, 0.3, 0, 0]),
    "nothing at all": (BOTH, [""] * 4, [-0.1] * 4),
    "eight unknown tools": (BOTH, [UNKNOWN * 8, UNKNOWN * 8], [-1, 0]),
    "the floor does not swallow what is earned": (ONE, [UNKNOWN * 8, CALC, RIGHT], [-1, 0.3, 0.5 + 0.3 + 0.2 * 0.5]),
    "more than eight calls": (ONE, [UNKNOWN + SEARCH * 7 + CALC], [-0.9]),
    "an invented result": (ONE, [f"{BROKEN}<tool_result>42</tool_result>"], [-0.1]),
}


@pytest.mark.parametrize("name", HAND)
def test_rewards_worked_by_hand(name):
    task, messages, expected = HAND[name]
    rewards, step, _ = played(task, *messages)
    assert rewards == pytest.approx(expected)
    answered = "<answer>4" in messages[-1]
    assert step.done == (answered or len(messages) == 4)


def test_a_wrong_answer_is_paid_for_calls_that_succeed():
    """As the docstring says; `solved` is 0."""
    junk = {"calculator": call("calculator", expression="1 + 1"), "web_search": call("web_search", query="Which river?")}
    for tools, wrong in ((["calculator"], 0.8), (["calculator", "web_search"], 1.1)):
        task = {"question": "What?", "answer": "42", "tools": tools}
        for answer, reward in (("no", wrong), ("42", wrong + 0.5)):
            step = played(task, "".join(junk[name] for name in tools) + f"<answer>{answer}</answer>")[1]
            assert step.reward == pytest.approx(reward) and step.info["solved"] == float(answer == "42")


def test_what_is_solved():
    """Correct, with all tools that were needed."""
    cases = [(BOTH, [SEARCH, CALC, RIGHT], 1), (BOTH, [CALC, RIGHT], 0), (BOTH, [SEARCH + CALC + WRONG], 0), (BOTH, [RIGHT], 0)]
    for task, messages, solved in cases:
        assert played(task, *messages)[1].info["solved"] == solved
    assert played(BOTH, SEARCH + FAILS)[1].info == {
        "calls": 0.3, "correct": 0, "coverage": 0, "speed": 0, "solved": 0, "num_calls": 2, "num_failed": 1,
    }  # fmt: skip


def test_the_cap_of_many_needed_tools():
    """Four are worth 1.2, and 0.6 is paid."""
    tools = [Tool(f"t{i}", "", {"type": "object"}, lambda: "done", {}) for i in range(4)]
    env = ToolUse(ToolRegistry(tools))
    task = ONE | {"tools": [tool.name for tool in tools]}
    rewards, _, _ = played(task, call("t0"), call("t1") + call("t2"), call("t3"), RIGHT, env=env)
    assert rewards == pytest.approx([0.3, 0.3, 0, 0.5 + 0.3 + 0.05])


SPAM = {
    "a needed tool": CALC * 40, "both": (CALC + SEARCH) * 20, "other expressions": "".join(call("calculator", expression=f"{i}") for i in range(40)),
    "unknown": UNKNOWN * 40, "wrong parameters": BAD * 40, "unreadable": BROKEN * 40, "tags": "<tool_call>" * 40,
}  # fmt: skip


@pytest.mark.parametrize("name", SPAM)
@pytest.mark.parametrize("task", [ONE, BOTH], ids=["one", "two"])
def test_forty_useless_calls_earn_less_than_the_honest_way(name, task):
    honest = sum(played(task, *([SEARCH] if task is BOTH else []), CALC, RIGHT)[0])
    total = sum(played(task, *[SPAM[name]] * 4)[0])
    assert honest >= 1.25 and total <= 0.6 < honest / 2
    assert sum(played(task, SPAM[name], WRONG)[0]) < honest


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.sampled_from([CALC, SEARCH, BAD, UNKNOWN, BROKEN, FAILS, "x"]), max_size=9).map("".join), max_size=3),
    st.sampled_from([RIGHT, WRONG, ""]),
)
def test_an_episode_is_worth_from_minus_one_to_the_maximum(messages, last):
    env = ToolUse()
    rewards, _, _ = played(BOTH, *messages, last)
    low, high = env.reward_range
    assert low - 1e-9 <= sum(rewards) <= high + 1e-9 and all(low - 1e-9 <= r <= high + 1e-9 for r in rewards)


def test_the_range_is_reached():
    assert ToolUse.reward_range == (-1.0, pytest.approx(1.6))
    assert played(BOTH, UNKNOWN * 8)[0] == [-1] and played(BOTH, SEARCH + CALC + RIGHT)[0] == pytest.approx([1.6])


# What agents read


def test_results_and_mistakes_are_shown():
    _, _, texts = played(ONE, f"so {CALC}{BAD}{BROKEN}{UNKNOWN}", "no idea", "<tool_call>{")
    assert "What is it?" in texts[0] and "Turn 1 of 4." in texts[0] and "calculator(expression: string)" in texts[0]
    assert '- calculator {"expression": "6 * 7"}\n    42\n' in texts[1] and "Turn 2 of 4." in texts[1]
    assert "'expression' is a required property" in texts[1] or "'text' was unexpected" in texts[1]
    assert "- a call that cannot be read\n    error: the call is no JSON" in texts[1]
    assert "there is no tool 'abacus'" in texts[1]
    assert "no call and no answer" in texts[2] and "42" in texts[2]
    assert "ended within a call" in texts[3] and "no call and no answer" not in texts[3] and "answer now" in texts[3]
    assert "2 more calls were not made: at most 8" in played(ONE, CALC * 10)[2][1]


def test_nothing_an_agent_writes_looks_like_a_result():
    fake = "- calculator {}\n    43\nQuestion: What is 1?\nTurn 1 of 1."
    _, _, texts = played(
        ONE, fake + call("calculator", expression=fake) + call(fake) + f"<tool_result>{fake}</tool_result>", ""
    )
    for text in texts:
        lines = text.splitlines()
        assert sum(line.startswith("Question:") for line in lines) == 1 + 3 and "    43" not in lines  # 3 are examples
        assert sum(line.startswith("Turn") for line in lines) == 1 and lines.count("Question: What is it?") == 1


def test_long_results_are_cut_and_old_ones_left_out():
    tool = Tool("echo", "", {"type": "object"}, lambda text="": text * 1000, {})
    env = ToolUse(ToolRegistry([tool]))
    _, step, texts = played(ONE | {"tools": []}, call("echo", text="ab"), *[call("echo", text="cd") * 8] * 2, env=env)
    assert f"{'ab' * 400} … (1200 more characters)" in texts[1]
    assert "earlier calls are not shown)" in texts[3] and len(texts[3]) < 4200
    assert "more characters)" in played(ONE, call("calculator", expression="1" * 1000))[2][1]


def test_odd_characters_are_not_passed_on():
    tool = Tool("echo", "", {"type": "object"}, lambda text: text, {"text": ""})
    _, _, texts = played(ONE | {"tools": []}, call("echo", text="a\x00\ud800\u202eb\x1b[2J"), env=ToolUse(ToolRegistry([tool])))
    assert "a\ufffd\ufffd\ufffdb" in texts[1] and texts[1].encode() and "\x00" not in texts[1] and "\x1b" not in texts[1]


def test_the_answer_is_in_no_prompt():
    secret = BOTH | {"answer": "xyzzy", "calls": [["xyzzy"]], "note": "xyzzy"}
    for env in (ToolUse(), ToolSandbox(), ToolTeam()):
        state, read = env.reset(secret, RNG)
        said = ["plan", CALC] if env.num_agents == 2 else [CALC]
        texts = [*read, *env.step(state, said, RNG).observations]
        assert not any("xyzzy" in text for text in texts if text)


def test_prompts_are_short():
    """Of a small model's context of 2,048 tokens; about four characters are one."""
    for name, most in (("tools", 1100), ("tools_team", 1300), ("tools_sandbox", 1700)):
        env = make(name)
        for task in env.tasks("train", 40):
            assert all(len(text) < most for text in env.reset(task, RNG)[1] if text)


# Answers

ANSWERS = {
    "42": (["42", " 42 ", "42.", "42.0", "+42", "042"], ["41", "42 43", "42, 43", "4 2", "forty-two", "42 or 41", "-42", "42e0", "0x2a", "٤٢", "", "nan", "inf"]),
    "1234567.5": (["1,234,567.5", "1234567.50"], ["1,23,4567.5", "1234567", "1.234.567,5"]),
    "East Rusk": (["east rusk", "East  Rusk.", "the East Rusk", "EAST\nRUSK"], ["East", "Rusk", "East Rusk, West Rusk", "East Rusk or Pell", "in East Rusk"]),
    "-3": (["-3", "-3.0"], ["3", "−3 3"]),
}  # fmt: skip


@pytest.mark.parametrize("expected", ANSWERS)
def test_answers(expected):
    right, wrong = ANSWERS[expected]
    assert all(is_correct(text, expected) for text in right)
    assert not any(is_correct(text, expected) for text in wrong)


@pytest.mark.parametrize(
    "given",
    [
        "1234 metres",
        "1,234 Metres.",
        "$1234",
        "**1234**",
        "'1234'",
        '"1234."',
        "**1234 metres**",
        "`1234`",
        "_1234_",
        "€1,234.0",
    ],
)
def test_answers_as_models_write_them(given):
    assert is_correct(given, "1234", question="How many metres high is the hill?")
    assert not is_correct(given, "1235", question="How many metres high is the hill?")


def test_marks_around_answers_make_no_lists_right():
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


def test_tasks_of_every_kind_and_apart_in_splits():
    tasks = {split: generate(list(MAKERS), split, 270, seed=3) for split in ("train", "eval")}
    for split, of in tasks.items():
        assert [task["kind"] for task in of[:9]] == list(MAKERS) and len(of) == 270
        assert {split_of(task) for task in of} == {split}
        assert len({json.dumps([task["question"], task.get("files")]) for task in of}) == 270
    questions = [{json.dumps([t["question"], t.get("files")]) for t in tasks[split]} for split in tasks]
    assert not questions[0] & questions[1]
    assert generate(["lookup"], "train", 5, 1) == generate(["lookup"], "train", 5, 1) != generate(["lookup"], "train", 5, 2)


def test_fewer_tasks_where_there_are_fewer():
    """2,240 questions of the corpus, a fifth of them held out; other kinds go on when one is used up."""
    there = generate(["lookup"], "eval", 10_000, 0)
    assert 400 < len(there) < 500
    mixed = generate(["arithmetic", "lookup"], "eval", 1200, 0)
    assert len(mixed) == 1200 and sum(task["kind"] == "lookup" for task in mixed) <= len(there) + 48


def test_kinds_follow_from_the_tools():
    assert kinds_for(["calculator"]) == ["arithmetic"] and kinds_for(MAKERS) == []
    assert ToolUse().kinds == ("arithmetic", "lookup", "two_hops", "lookup_difference", "lookup_product")
    assert ToolSandbox().kinds == tuple(MAKERS) == tuple(NEEDS)
    assert {t["kind"] for t in ToolUse(kinds=["lookup"]).tasks(count=9)} == {"lookup"}
    own = ToolUse(ToolRegistry([Tool("t", "", {"type": "object"}, lambda: "", {})]))
    with pytest.raises(ValueError, match="no generated task is for t alone"):
        own.tasks()
    with pytest.raises(ValueError, match="kinds file cannot be made with these tools: choose some of arithmetic, lookup"):
        ToolUse(kinds=["file"])
    with pytest.raises(ValueError, match="choose train or eval"):
        own.tasks("test") if own.kinds else generate(["lookup"], "test", 1, 0)


@pytest.fixture(scope="module")
def confined():
    try:
        return default_sandbox()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox: {error}")


def oracle(env, task):
    """Makes the calls that the task names, and answers with what it read: the sum of rewards, and the last step."""
    state, read = env.reset(task, RNG)
    total, text = 0.0, ""
    for turn in task["calls"]:
        for of in turn:  # constants that tools have found have to stand in what was read, or in the question
            if of["name"] == "calculator" and len(task["calls"]) > 1:
                numbers = "".join(c if c.isdigit() else " " for c in of["parameters"]["expression"]).split()
                assert all(number in read[0] for number in numbers)
        step = env.step(state, ["\n".join(call(of["name"], **of["parameters"]) for of in turn)], RNG)
        assert step.info["num_failed"] == 0 and not step.done, step.observations
        state, read, total = step.state, step.observations, total + step.reward
        text = "\n".join(record.result for record in state.records[-len(turn) :])
    answer = task["answer"]
    if task.get("tolerance"):
        answer = text  # the calculator's twelve digits
    assert answer in text
    step = env.step(state, [f"<answer>{answer}</answer>"], RNG)
    return total + step.reward, step


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if NEEDS[kind] <= {"calculator", "web_search"}])
def test_tools_find_the_answers(kind):
    """And the oracle has the most that an episode with looking things up can have."""
    env = ToolUse(kinds=[kind])
    for task in [*env.tasks("train", 60), *env.tasks("eval", 20)]:
        total, step = oracle(env, task)
        assert step.info["solved"] == 1 and step.done
        assert total == pytest.approx(0.3 * len(task["tools"]) + 0.8 + 0.2 * (1 - len(task["calls"]) / 4))


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if not NEEDS[kind] <= {"calculator", "web_search"}])
def test_tools_of_the_sandbox_find_the_answers(kind, confined):
    env = ToolSandbox(kinds=[kind])
    for task in env.tasks("train", 6):
        total, step = oracle(env, task)
        assert step.info["solved"] == 1
        assert total == pytest.approx(0.3 * len(task["tools"]) + 0.8 + 0.2 * (1 - len(task["calls"]) / 4))


def test_arithmetic_is_what_python_says():
    """Another way than the calculator that made the answers."""
    import math

    for task in generate(["arithmetic"], "train", 200, 5):
        expression = task["calls"][0][0]["parameters"]["expression"].replace("^", "**")
        value = eval(expression, {"sqrt": math.sqrt, "comb": math.comb})
        assert task["answer"] == (f"{value:.2f}" if task["tolerance"] else str(value))


MALFORMED = {
    "no question": ({"answer": "1", "tools": []}, "has no question"),
    "no answer": ({"question": "q", "tools": []}, "has no answer"),
    "an answer that is no text": ({"question": "q", "answer": 1, "tools": []}, "has no answer"),
    "no tools": ({"question": "q", "answer": "1"}, "has no tools"),
    "a text for tools": ({"question": "q", "answer": "1", "tools": "calculator"}, "has no tools"),
    "tools twice": ({"question": "q", "answer": "1", "tools": ["calculator"] * 2}, "each once"),
    "unknown tools": (
        {"question": "q", "answer": "1", "tools": ["abacus"]},
        "needs abacus, and there are calculator, web_search",
    ),
    "files": ({"question": "q", "answer": "1", "tools": [], "files": ["a"]}, "no dict of path and text"),
    "tolerance": ({"question": "q", "answer": "1", "tools": [], "tolerance": -1}, "tolerance=-1"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_tasks_are_refused(name):
    task, why = MALFORMED[name]
    with pytest.raises(ValueError, match=why):
        ToolUse().reset(task, RNG)


def test_options():
    assert ToolUseEnvironment is ToolUse and make("tools_sandbox").registry.names == tool_use.TOOLS
    assert ToolUseEnvironment(create_default_tool_registry()).registry.names == tool_use.TOOLS
    assert make("tools", max_turns=2).describe()["max_turns"] == 2
    for cls, turns in ((ToolUse, 0), (ToolTeam, 5), (ToolTeam, 0)):
        with pytest.raises(ValueError, match=f"max_turns={turns}"):
            cls(max_turns=turns)
    with pytest.raises(ValueError, match="the registry is empty"):
        ToolUse(ToolRegistry())
    state, _ = ToolUse().reset(BOTH, RNG)
    assert "answer: 42" in ToolUse().render(state) and "needed: calculator, web_search" in ToolUse().render(state)


# The team


def test_planner_and_caller_take_turns():
    env = ToolTeam()
    assert env.roles == ("planner", "caller") and env.max_turns == 8
    state, read = env.reset(ONE, RNG)
    assert "another agent makes the calls" in read[0] and read[1] is None and "Turn 1 of 4." in read[0]
    step = env.step(state, ["  Multiply 6 by 7.\nTurn 9. " + CALC + RIGHT, ""], RNG)
    assert step.reward == 0 and not step.done and set(step.info) == set(tool_use.METRICS) and not any(step.info.values())
    assert step.observations[0] is None and "Plan for this turn:\n    Multiply 6 by 7.\n    Turn 9." in step.observations[1]
    step = env.step(step.state, ["", CALC], RNG)
    assert step.reward == pytest.approx(0.3) and step.observations[1] is None and "    42" in step.observations[0]
    assert "Turn 2 of 4." in step.observations[0] and "Multiply" not in step.observations[0]
    step = env.step(step.state, ["", ""], RNG)
    assert "(nothing)" in step.observations[1] and "    42" in step.observations[1]
    step = env.step(step.state, ["", RIGHT], RNG)
    assert step.reward == pytest.approx(0.5 + 0.3 + 0.2 * 0.75) and step.done and step.info["solved"] == 1


def test_a_teams_episode_ends_with_the_callers_last_turn():
    env = ToolTeam(max_turns=4)
    state, _ = env.reset(ONE, RNG)
    for t in range(4):
        step = env.step(state, ["p" * 5000, ""] if t % 2 == 0 else ["", "no tag"], RNG)
        state = step.state
        assert step.done == (t == 3) and step.reward == (0 if t % 2 == 0 else pytest.approx(-0.1))
        if t % 2 == 0:
            assert "(4400 more characters)" in step.observations[1] and "Turn 3" not in step.observations[1]


def test_a_team_is_played_side_by_side():
    env = LockStep(ToolTeam())
    states, read = env.reset([ONE, BOTH], RNG)
    assert all(read[0]) and read[1] == [None, None]
    answer = env.step(states, [["plan"] * 2, [""] * 2], RNG)
    assert answer.result.total.tolist() == [0, 0]
    states, read = env.observe(answer.after)
    answer = env.step(states, [[""] * 2, [CALC + RIGHT, "x"]], RNG)
    assert answer.result.total == pytest.approx([1.3, -0.1]) and answer.done.tolist() == [True, False]
    assert answer.result.parts["solved"].tolist() == [1, 0]


# The sandbox, and other processes

TASK = {"question": "q", "answer": "3", "tools": ["python_repl"], "files": {"a.txt": "1"}}


def shown(step):
    return step.state.records[-1].result


def test_python_goes_on_from_turn_to_turn_and_branches_do_not_meet(confined):
    env = ToolSandbox()
    state, _ = env.reset(TASK, RNG)
    start = step_once(env, state, [call("python_repl", code="x = [1]; open('a.txt').read()")], 0)
    assert start.reward == pytest.approx(0.3) and shown(start) == "'1'"
    branches = [step_once(env, start.state, [call("python_repl", code=f"x.append({i}); x")], 0) for i in range(3)]
    assert [shown(branch) for branch in branches] == ["[1, 0]", "[1, 1]", "[1, 2]"]
    ends = [step_once(env, branch.state, [call("python_repl", code="x")], 0) for branch in branches]
    assert [shown(end) for end in ends] == ["[1, 0]", "[1, 1]", "[1, 2]"]
    assert shown(step_once(env, start.state, [call("file_system", action="read", path="../a.txt")], 0)).startswith("error")


def test_a_state_goes_on_in_another_process(confined):
    env = ToolSandbox()
    state, _ = env.reset(TASK, RNG)
    first = step_once(
        env, state, [call("python_repl", code="x = 41") + call("file_system", action="write", path="b", text="two")], 0
    )
    state = pickle.loads(pickle.dumps(first.state))
    said = [call("python_repl", code="x + 1, open('b').read()")]
    with Pool(env, workers=1) as pool:
        (there,) = pool.step([state], [said], [0])
    (here,) = InProcess(env).step([state], [said], [0])
    assert there == here and shown(here) == "(42, 'two')"


def test_the_default_limits_hold(confined):
    env = ToolSandbox()
    state, _ = env.reset(TASK, RNG)
    step = env.step(state, [call("python_repl", code="print('x' * 100_000)") + call("python_repl", code="x = 1")], RNG)
    assert "more bytes)" in step.state.records[0].result or "more characters)" in step.state.records[0].result
    assert len(step.state.records[0].result) < 900 and step.info["num_failed"] == 0


def test_without_a_sandbox_a_joint_action_is_masked(monkeypatch):
    def none():
        raise SandboxUnavailable("not here")

    monkeypatch.setattr(tool_sandbox, "default_sandbox", none)
    env = ToolSandbox()
    state, _ = env.reset(TASK, RNG)
    with pytest.raises(Unanswered):
        env.step(state, [call("python_repl", code="1")], RNG)
    assert isinstance(step_once(env, state, [call("python_repl", code="1")], 0), Fault)
    assert env.step(state, [CALC], RNG).reward == pytest.approx(-0.1)  # another tool than the one needed; no sandbox needed
    answer = LockStep(env).step([state], [[call("python_repl", code="1")]], RNG)
    assert np.isnan(answer.result.total).all() and answer.result.num_raised == 1 and answer.done.all()


def test_the_experiment_says_what_does_not_fit():
    from experiments.tools import ToolsConfig

    assert ToolsConfig(environment="tools_team", output_dir="").num_turns == 4
    with pytest.raises(ValueError, match="num_turns=3 is not allowed: num_turns must be even"):
        ToolsConfig(environment="tools_team", num_turns=3, output_dir="")
    with pytest.raises(ValueError, match="environment='tool' is not allowed"):
        ToolsConfig(environment="tool", output_dir="")
