"""Generated programming problems: their number, correctness and splits; MRLM's simple reward."""

from __future__ import annotations

import numpy as np
import pytest

from jmarl.envs import make
from jmarl.envs.code.execution import CodeExecution
from jmarl.envs.code.generation import CodeGeneration
from jmarl.envs.code.problems import CodeProblem, generate_problems, generate_repairs
from jmarl.envs.code.scoring import item_tests
from jmarl.envs.code.templates import TEMPLATES
from jmarl.sandbox import Limits, default_sandbox

MANY = 400


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_every_template_has_a_thousand_problems_at_every_difficulty(name, difficulty):
    """Distinct texts and distinct programs, counted."""
    core = TEMPLATES[name]
    pairs = [(a, b) for a in range(core.a_range[0], core.a_range[1] + 1) for b in range(core.b_range[0], core.b_range[1] + 1)]
    c, d = {1: (0, 0), 2: (3, 0), 3: (3, 4)}[difficulty]
    problems = [CodeProblem(name, difficulty, (a, b, c, d)) for a, b in pairs]
    texts = {problem.text().partition(" returns ")[2] for problem in problems}
    programs = {problem.solution().partition("\n")[2] for problem in problems}
    assert len(TEMPLATES) >= 20 and min(len(texts), len(programs)) >= 1000
    assert {problem.split for problem in problems} == {"train", "eval"}


def test_splits_are_disjoint():
    seen = {
        split: {i["task_id"] for seed in range(3) for i in generate_problems(MANY, split=split, seed=seed)}
        for split in ("train", "eval")
    }
    assert not seen["train"] & seen["eval"] and len(seen["train"]) > 2 * MANY
    repairs = {i["task_id"] for i in generate_repairs(50, split="eval")}
    assert not repairs & seen["train"]


def test_the_same_seed_gives_the_same_problems():
    assert generate_problems(20, seed=4) == generate_problems(20, seed=4) != generate_problems(20, seed=5)
    assert len({item["task_id"] for item in generate_problems(MANY)}) == MANY
    assert {item["difficulty"] for item in generate_problems(50, difficulty=(2, 2))} == {2}


def test_reference_solutions_pass_and_examples_are_not_hidden_tests():
    items = generate_problems(80)
    results = default_sandbox().run_many([item["solution"] for item in items], [item_tests(item) for item in items])
    assert [r.outcome for r in results] == ["passed"] * len(items) and {r.total for r in results} == {6}
    for item in items:
        hidden = [line.partition("candidate")[2] for line in item["test"].splitlines() if "assert" in line]
        assert len(set(hidden)) == 6 and not any(item["entry_point"] + line in item["prompt"] for line in hidden)


def test_broken_programs_fail_and_their_solutions_pass():
    items = generate_repairs(40)
    tests = [item_tests(item) for item in items]
    wrong = default_sandbox().run_many([item["broken"] for item in items], tests, Limits(wall_s=2))
    assert sum(r.outcome != "passed" for r in wrong) >= 0.9 * len(items)  # the others are wrong only on the input in the prompt
    right = default_sandbox().run_many([item["solution"] for item in items], tests)
    assert [r.outcome for r in right] == ["passed"] * len(items)
    assert all(
        item["broken"] in item["prompt"] and ("which is wrong" in item["prompt"] or "raises" in item["prompt"])
        for item in items
    )


def test_prompts_are_formatted():
    text = generate_problems(1, seed=1, difficulty=(3, 3))[0]["prompt"]
    assert text.startswith("Write ") and "returns" in text and "Example: " in text and "{" not in text.partition("Example")[0]


@pytest.mark.parametrize("options, message", [
    (dict(split="test"), "train or eval"),
    (dict(difficulty=(0, 3)), "between 1 and 3"),
    (dict(difficulty=(3, 1)), "between 1 and 3"),
])  # fmt: skip
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        generate_problems(1, **options)


ITEM = {
    "prompt": "Half of an even number.",
    "entry_point": "half",
    "test": "def check(candidate):\n    assert candidate(2) == 1\n    assert candidate(0) == 0\n"
    "    assert candidate(8) == 4\n    assert candidate(-4) == -2",
}
REWARDS = {
    "right": ("def half(x):\n    return x // 2", 1 + 1),
    "right in markdown": ("```python\ndef half(x):\n    return x // 2\n```", 1 + 1),
    "half of the tests": ("def half(x):\n    return x // 2 if x < 1 else 7", 0.5),
    "three, and one raises": ("def half(x):\n    return 8 // x * 0 + x // 2", 0.75 - 0.5),
    "an assertion of its own": ("def half(x):\n    assert x == 2\n    return x // 2", 0.25 - 0.5),
    "all raise": ("def half(x):\n    raise ValueError", -0.5),
    "no function": ("x = 1", -0.5),
    "a syntax error": ("def half(x) return 1", -0.5),
    "empty": ("", -0.5),
    "an endless loop after two": ("def half(x):\n    while x == 8: pass\n    return x // 2", 0.5 - 0.5),
    "an early exit": ("import os\ndef half(x):\n    os._exit(0)\n    return 1", -0.5),
    "an object equal to everything": ("class E:\n    def __eq__(s, o): return True\ndef half(x):\n    return E()", 0.0),
}


@pytest.fixture(scope="module")
def played():
    """An environment, and its answer to all texts."""
    env = CodeExecution(limits=Limits(wall_s=1, cpu_s=2))
    states, prompts = env.reset([ITEM] * len(REWARDS), np.random.default_rng(0))
    assert len(prompts) == 1
    return env, env.step(states, [[text for text, _ in REWARDS.values()]], np.random.default_rng(0)).result


@pytest.mark.parametrize("name", REWARDS)
def test_mrlm_rewards_equal_those_computed_by_hand(played, name):
    (env, result), i, (_, expected) = played, list(REWARDS).index(name), REWARDS[name]
    assert result.total[i] == pytest.approx(expected)
    unreadable = name in ("no function", "a syntax error", "empty", "all raise")  # the last one returns nothing
    penalties = [result.parts[part][i] for part in ("syntax_error", "runtime_error")]
    errs = unreadable or "raise" in name or name.startswith(("an assertion", "an endless", "an early"))
    assert penalties == ([-0.5, 0] if unreadable else [0, -0.5 * errs])  # syntax apart from what the tests say
    assert env.reward_range == (-0.5, 2.0) and result.measures["solved"][i] == float(expected == 2)


def test_a_helper_with_a_wrapper_earns_the_maximum_without_the_bonus_for_more():
    """Code execution gives 2, code generation 3 of 4: it pays 1.0 less for a mere wrapper."""
    items = generate_problems(10)
    texts = [
        [item["solution"].replace(f"def {item['entry_point']}", "def aux") for item in items],
        [f"def {item['entry_point']}(x):\n    return aux(x)" for item in items],
    ]
    for env, best in ((CodeExecution(2), 2.0), (CodeGeneration(2), 3.0)):
        states, _ = env.reset(items, np.random.default_rng(0))
        assert env.step(states, texts, np.random.default_rng(0)).result.total == pytest.approx(best)


def test_make_knows_the_names_of_mrlm():
    assert type(make("tool")) is type(make("tools"))
    assert make("code", difficulty_range=(1, 1), max_turns=3).max_turns == 3
    with pytest.raises(ValueError, match="unknown environment 'cod': did you mean 'code'"):
        make("cod")
