"""Code generation: hand-computed rewards for every level and edge case, prompts and feedback."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jmarl.envs.code.generation import CodeGeneration
from jmarl.envs.code.scoring import score_form, team_program
from jmarl.envs.rewards import RewardProcessors
from jmarl.sandbox import Limits

ITEM = {
    "task_id": "t/0",
    "prompt": "Add the squares of two numbers.",
    "entry_point": "squares",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 5\n"
    "    assert candidate(\n        3, 4\n    ) == (\n        25\n    )\n"
    "    assert candidate(0, 0) == 0\n    assert candidate(2, 2) == 8, 'four'",
}
AUX = "def aux(x):\n    return x * x\n"
MAIN = "def squares(a, b):\n    return aux(a) + aux(b)\n"
ALONE = "def squares(a, b):\n    return a * a + b * b\n"
FENCED = "Here it is:\n\n```python\n{code}```\n\nThis function adds."

FULL, NO_BONUS = (1.0, 0.5, 1.0, 1.5), (1.0, 0.5, 1.0, 0.0)  # of the parts below
# completion of the helper's agent, completion of the function's agent, then level 1, level 2, level 3, bonus
CASES = {
    "perfect": (AUX, MAIN, *FULL),
    "markdown around both": (FENCED.format(code=AUX), FENCED.format(code=MAIN), *FULL),
    "no function": (AUX, "def other(a, b):\n    return 1", 0.4, 0.0, 0.0, 0.0),
    "a function that returns nothing": (AUX, "def squares(a, b):\n    print(aux(a))", 0.4, 0.0, 0.0, 0.0),
    "an inner function that returns": (AUX, "def squares(a, b):\n    def f():\n        return 1\n    f()", 0.4, 0.0, 0.0, 0.0),
    "both empty": ("", "", 0.0, 0.0, 0.0, 0.0),
    "prose": ("I cannot.", "I cannot, sorry.", 0.0, 0.0, 0.0, 0.0),
    "no aux": ("", ALONE, 0.6, 0.5, 1.0, 0.0),
    "no aux, which is called": ("", MAIN, 0.6, 0.5, 0.0, 0.0),
    "aux that returns nothing": ("def aux(x):\n    x * x", ALONE, 0.6, 0.5, 1.0, 0.0),
    "aux unused": (AUX, ALONE, *NO_BONUS),
    "a wrapper": ("def aux(a, b):\n    return a * a + b * b", "def squares(a, b):\n    return aux(a, b)", 1.0, 0.5, 1.0, 0.5),
    "a wrapper by a variable": ("def aux(a, b):\n    return a * a + b * b",
     "def squares(a, b):\n    '''Doc.'''\n    c = aux(a, b)\n    return c", 1.0, 0.5, 1.0, 0.5),
    "a result ignored": (AUX, "def squares(a, b):\n    aux(a)\n    return a * a + b * b", 1.0, 0.5, 1.0, 1.0),
    "a result in a variable that is never read": (AUX, "def squares(a, b):\n    c = aux(a)\n    return a * a + b * b", 1.0, 0.5,
     1.0, 1.0),
    "one of two results used": (AUX, "def squares(a, b):\n    aux(b)\n    return aux(a) + b * b", *FULL),
    "a syntax error": (AUX, "def squares(a, b):\n    return aux(a +\n", 1.0, 0.0, 0.0, 0.0),
    "a syntax error in aux": ("def aux(x:\n    return x", ALONE, 1.0, 0.0, 0.0, 0.0),
    "three of four tests": (AUX, "def squares(a, b):\n    return aux(a) + aux(b) if a == b else 5 + aux(a) * 0", 1.0, 0.5, 0.75,
     1.5),
    "two of four tests": (AUX, "def squares(a, b):\n    return aux(a) * 5", 1.0, 0.5, 0.5, 1.5),
    "no test": (AUX, "def squares(a, b):\n    return aux(a) + 100", 1.0, 0.5, 0.0, 0.0),
    "two functions of one name": (AUX, "def squares(a, b):\n    return 0\n\n" + MAIN, *FULL),
    "two fences": (AUX, "```python\nimport math\n```\nand\n```python\n" + MAIN + "```", *FULL),
    "a fence that was cut off": (AUX, "```python\n" + MAIN, *FULL),
    "a fence of another language": (AUX, "```bash\nls\n```\n```py\n" + MAIN + "```", *FULL),
    "words after the code": (AUX, MAIN + "\nThis function calls aux twice.", *FULL),
    "words before the code": (AUX, "Sure! Here is the code:\n" + MAIN, *FULL),
    "aux replaced by the other agent": (AUX, "def aux(x):\n    return 0\n" + MAIN, *FULL),
    "the function written by the wrong agent": (AUX + "\n" + ALONE, "x = 1", 0.4, 0.0, 0.0, 0.0),
    "an endless loop": (AUX, "def squares(a, b):\n    while a == 3:\n        pass\n    return aux(a) + aux(b)", 1.0, 0.5, 0.25,
     1.5),
    "an early exit": (AUX, "import os\ndef squares(a, b):\n    os._exit(0)\n    return 5", 1.0, 0.5, 0.0, 0.0),
    "a call that is never reached": (AUX,
     "def squares(a, b):\n    if 0:\n        return aux(a) + 1\n    return a * a + b * b\n    return aux(b)", *NO_BONUS),
    "an aux of its own inside": (AUX, "def squares(a, b):\n    def aux(x):\n        return x * x\n    return aux(a) + aux(b)",
     *NO_BONUS),
    "an aux of its own beside": ("def aux(x):\n    return 'useless'",
     "if True:\n    def aux(x):\n        return x * x\n" + MAIN, *NO_BONUS),
    "an aux that is assigned": ("def aux(x):\n    return 0", "aux = lambda x: x * x\n" + MAIN, 1.0, 0.5, 0.25, 1.5),
    "deep sums and long numbers beside": (AUX, "y = 0x" + "f" * 4000 + "\nz = " + "1+" * 550 + "1\n" + AUX + MAIN, *FULL),
    "a constant before the function": (AUX, "Of course.\n\nTWO = 2\n\ndef squares(a, b):\n    return aux(a) + aux(b) + TWO - 2",
     *FULL),
    "words that look like code": (AUX, "from the problem we see it.\n" + MAIN + "Time complexity: T(n) = O(1).", *FULL),
    "a second fence with output": (AUX, f"```python\n{MAIN}```\nprints\n```\n5\n```\nas in\n```\n>>> squares(1, 2)\n5\n```",
     *FULL),
    "a fence that closes on the last line": (AUX, f"```python\n{MAIN.rstrip()}```", *FULL),
    "a fence in a list": (AUX, "1. So:\n\n   ```python\n   def squares(a, b):\n       return aux(a) + aux(b)\n   ```", *FULL),
    "other line ends": (AUX, f"```python\n{MAIN}```".replace("\n", "\r\n"), *FULL),
    "a wrong test of its own": (AUX, f"```python\n{MAIN}assert squares(1, 1) == 7\nprint(squares(2))\n```", *FULL),
    "annotations from the future": (AUX, "from __future__ import annotations\n" + MAIN, *FULL),
    "a lambda": (AUX, "squares = lambda a, b: a * a + b * b", *NO_BONUS),
    "equal to everything": ("class E:\n    def __eq__(self, o): return True\ndef aux():\n    return E()",
     "def squares(a, b):\n    return aux()", 1.0, 0.5, 0.0, 0.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def env():
    return CodeGeneration(2, limits=Limits(wall_s=1.5, cpu_s=2))


def play_turn(env, *texts, item=ITEM):
    """Return the answer to one joint action, and its score."""
    states, _ = env.reset([item], np.random.default_rng(0))
    answer = env.step(states, [[text] for text in texts], np.random.default_rng(0))
    return answer, answer.after[0].score


@pytest.fixture(scope="module")
def played(env):
    """The answer to the joint actions of all cases."""
    states, _ = env.reset([ITEM] * len(CASES), np.random.default_rng(0))
    texts = [[case[agent] for case in CASES.values()] for agent in range(2)]
    return env.step(states, texts, np.random.default_rng(0))


@pytest.mark.parametrize("name", CASES)
def test_rewards_equal_those_computed_by_hand(env, played, name):
    i, expected = list(CASES).index(name), CASES[name][2:]
    score = played.after[i].score
    assert list(score.parts.values()) == pytest.approx(expected), score
    assert played.result.total[i] == pytest.approx(sum(expected)) and played.result.rewards.shape == (len(CASES), 2)
    assert played.result.parts["level_3"][i] == pytest.approx(expected[2])
    assert env.reward_range[0] <= sum(expected) <= env.reward_range[1] == 4.0


def test_feedback_says_which_test_failed():
    test = "def check(f):\n    for x in (1, 10):\n        assert f(x, x) == 2\n    assert f(0, 0) == 2"
    item = ITEM | {"test": test}
    env = CodeGeneration(2, shown_tests=2)
    answer, _ = play_turn(env, AUX, "def squares(a, b):\n    return 2", item=item)
    text = env.observe(answer.after)[1][1][0]
    assert "- f(x, x) == 2: passes" in text and "- f(0, 0) == 2: passes" in text
    answer, _ = play_turn(env, AUX, "def squares(a, b):\n    return 2 if a < 9 else 1", item=item)
    text = env.observe(answer.after)[1][1][0]
    assert "- f(x, x) == 2: does not pass" in text and "- f(0, 0) == 2: passes" in text


def test_one_agent_earns_up_to_2_1_and_three_agents_up_to_4():
    one, three = CodeGeneration(1), CodeGeneration(3)
    assert play_turn(one, ALONE)[1].total == pytest.approx(2.1) == one.reward_range[1]
    helpers = "def aux_1(x):\n    return x * x\n", "def aux_2(x):\n    return x + x\n"
    function = "def squares(a, b):\n    return aux_1(a) + aux_1(b) + aux_2(0)"
    assert play_turn(three, *helpers, function)[1].total == pytest.approx(4.0)
    half = play_turn(three, helpers[0], "nothing", "def squares(a, b):\n    return aux_1(a) + aux_1(b)")[1]
    assert half.total == pytest.approx(0.2 + 0.6 + 0.5 + 1.0 + 1.5 / 2)


def test_shift_by_minus_4_moves_the_maximum_to_0():
    shifted = CodeGeneration(2, processor=RewardProcessors.shift(-4))
    assert play_turn(shifted, AUX, MAIN)[0].result.total[0] == pytest.approx(0.0)
    assert play_turn(shifted, AUX, ALONE)[0].result.total[0] == pytest.approx(-1.5)


def test_tests_that_do_not_run_mask_the_joint_action(env):
    item = ITEM | {"test": "import nothing_of_this_name\ndef check(candidate):\n    assert candidate(1, 2) == 5"}
    answer, score = play_turn(env, AUX, MAIN, item=item)
    assert answer.result.invalid.tolist() == [True] and math.isnan(answer.result.total[0]) and score.result.kind == "tests"
    assert math.isnan(answer.result.parts["level_3"][0])


def test_weak_tests_do_not_count_as_passed(env):
    """Two objects of the program are equal only by its own `__eq__`."""
    item = ITEM | {"test": "def check(f):\n    assert f(1, 2) == f(2, 1)\n    assert f(1, 1) is not None"}
    equal = "class E:\n    def __eq__(self, o): return True\n" + "def squares(a, b):\n    aux(a)\n    return E()"
    answer, score = play_turn(env, AUX, f"```python\n{equal}\n```", item=item)
    assert score.result.outcome == "weak" and "1 of 2 tests pass; 1 more held only because" in score.problems[0]
    assert score.parts["level_3"] == pytest.approx(0.5) and not score.solved and answer.result.measures["solved"] == [0.0]


@pytest.mark.parametrize("field", ["prompt", "entry_point", "test"])
def test_malformed_items_are_refused_by_reset(env, field):
    for value in (None, "", 3):
        with pytest.raises(ValueError, match=f"t/0.* {field}"):
            env.reset([ITEM | {field: value}], np.random.default_rng(0))
    with pytest.raises(ValueError, match="cannot be parsed as Python"):
        env.reset([ITEM | {"test": "assert ("}], np.random.default_rng(0))


@pytest.mark.parametrize("options, message", [
    (dict(num_agents=0), "num_agents=0"),
    (dict(feedback="loud"), "plain, passed, level_passed"),
    (dict(feedback="expert_edits"), "needs an expert"),
    (dict(expert=str), "expert has no effect"),
    (dict(feedback="plain", shown_tests=2), "shown_tests=2"),
])  # fmt: skip
def test_contradictory_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CodeGeneration(**options)


# Prompts


def second_prompts(env, *texts):
    """Return the prompts of the second turn [N]."""
    answer, _ = play_turn(env, *texts)
    return [prompts[0] for prompts in env.observe(answer.after)[1]]


def test_prompts_name_the_roles():
    _, prompts = CodeGeneration(2).reset([ITEM], np.random.default_rng(0))
    assert "function named aux" in prompts[0][0] and "function squares" in prompts[1][0] and "call aux" in prompts[1][0]
    _, prompts = CodeGeneration(3).reset([ITEM], np.random.default_rng(0))
    assert "aux_1 and aux_2" in prompts[2][0]
    _, prompts = CodeGeneration(1).reset([ITEM], np.random.default_rng(0))
    assert "aux" not in prompts[0][0]


def test_feedback_modes_show_more_and_more():
    wrong = "def squares(a, b):\n    return aux(a) + 7\n"
    plain = second_prompts(CodeGeneration(2, feedback="plain"), AUX, wrong)
    assert all(AUX.strip() in text and wrong.strip() in text and ITEM["prompt"] in text for text in plain)
    assert "does not pass all tests" in second_prompts(CodeGeneration(2, feedback="passed"), AUX, wrong)[0]
    assert "It passes all tests" in second_prompts(CodeGeneration(2, feedback="passed"), AUX, MAIN)[0]
    levels = second_prompts(CodeGeneration(2, feedback="level_passed"), AUX, wrong)[1]
    assert "form: passed\nsyntax: passed\ntests: not passed" in levels
    assert "0 of 4 tests pass" in second_prompts(CodeGeneration(2), AUX, wrong)[1]
    assert "squares is not defined or returns nothing" in second_prompts(CodeGeneration(2), AUX, "")[1]
    assert "no valid Python" in second_prompts(CodeGeneration(2), AUX, "def squares(a, b):\n    return (")[1]
    assert "all tests pass" in second_prompts(CodeGeneration(2), AUX, MAIN)[1]
    questions = []
    expert = CodeGeneration(2, feedback="expert_edits", expert=lambda prompt: questions.append(prompt) or "Use aux(b).")
    assert "Use aux(b)." in second_prompts(expert, AUX, wrong)[0] and wrong.strip() in questions[0]


@pytest.mark.parametrize("mode", ["plain", "passed", "level_passed", "level_feedback", "expert_edits"])
def test_hidden_tests_reach_no_prompt(mode):
    item = ITEM | {
        "test": "def check(candidate):\n    assert candidate(7919, 0) == 62710561\n    assert candidate(1, 0) == 7907"
    }
    questions = []
    expert = {"expert": lambda prompt: questions.append(prompt) or "none"} if mode == "expert_edits" else {}
    env = CodeGeneration(2, feedback=mode, **expert)
    for main in (MAIN, "def squares(a, b):\n    raise ValueError(a)", "def squares(a, b):\n    print(a)\n    return a"):
        answer, _ = play_turn(env, AUX, main, item=item)
        prompts = [*env.observe(answer.after)[1], *env.reset([item], None)[1]]
        texts = [text for column in prompts for text in column]
        assert not any(secret in text for text in texts + questions for secret in ("62710561", "7907", "7919"))


def test_level_feedback_shows_the_first_n_tests():
    text = second_prompts(CodeGeneration(2, shown_tests=2), AUX, "def squares(a, b):\n    return 5")[1]
    assert "- candidate(1, 2) == 5: passes" in text and "- candidate(3, 4) == 25: does not pass" in text
    assert "candidate(0, 0)" not in text


# Programs


def test_agents_cannot_replace_each_others_functions():
    program = team_program([AUX + "def squares(a, b):\n    return 1", MAIN + "def aux(x):\n    return 2"], ITEM)
    assert program.count("def aux") == program.count("def squares") == 1 and "x * x" in program


def test_empty_code_scores_zero_without_running():
    form = score_form(["", ""], ITEM)
    assert form.problems[0].startswith("aux")
    assert CodeGeneration(2).score(["", ""], ITEM, form, None).total == 0
