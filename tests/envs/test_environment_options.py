"""Options that all environments have, and the environment `code` of YAML files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jmarl.envs import make
from jmarl.sandbox import Sandbox, SandboxUnavailable

RNG = np.random.default_rng(0)
CODE = "jmarl.envs.code.by_name:Code"


def rewards(env, tasks, texts):
    states, _ = env.reset(tasks, RNG)
    return env.step(states, [texts], RNG)


def test_rewards_are_scaled_shifted_and_clipped():
    env = make("math", reward_scale=2.0, reward_bias=-0.5, reward_clip=1.2, difficulty_range=[1, 1])
    tasks = env.tasks("train", 3)
    answers = [f"Answer: {tasks[0]['answer']}", "Answer: -12345678", "?"]
    np.testing.assert_allclose(rewards(env, tasks, answers).result.total, [1.2, -0.5, -1.1])  # of 1, 0 and -0.3
    assert env.describe()["reward_scale"] == 2.0 and env.max_turns == 1
    low = make("math", reward_clip=[0.2, 0.4])
    np.testing.assert_allclose(rewards(low, tasks, answers).result.total, [0.4, 0.2, 0.2])
    assert type(make("math")).__name__ == "MathReasoning"


def test_problems_are_the_tasks_of_both_splits(tmp_path):
    rows = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(10)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for problems in (rows, str(tmp_path / "own.jsonl")):
        env = make("math", problems=problems)
        train, held_out = env.tasks("train", 100), env.tasks("eval", 100)
        assert sorted(int(task["answer"]) for task in train + held_out) == list(range(1, 11)) and len(held_out) == 2
        assert env.tasks("train", 3, seed=1) == env.tasks("train", 100, seed=1)[:3]
    assert rewards(env, train[:1], [f"Answer: {train[0]['answer']}"]).result.total == 1.0


def test_timeouts_are_limits_of_programs():
    assert make("tools", timeout=3.5).limits == make("tools").limits.__class__(
        wall_s=3.5, cpu_s=4, memory_mb=256, processes=16, file_mb=4, output_kb=4
    )


@pytest.mark.parametrize(("name", "options", "message"), [
    ("math", dict(timeout=3), "unexpected keyword argument 'timeout'; its options are generator"),
    ("math", dict(dificulty_range=[1, 2]), "did you mean 'difficulty_range'"),
    ("math", dict(reward_scal=2), "did you mean 'reward_scale'"),
    ("math", dict(reward_scale="x"), "reward_scale='x' is not allowed: give a number"),
    ("math", dict(reward_clip=[1, 0]), "min_val <= max_val"),
    ("math", dict(problems=[]), "problems is a list of dicts"),
    ("math", dict(problems="none.json"), "none.json does not exist in the working directory .*; give a file "),
])  # fmt: skip
def test_options_without_use_are_refused(name, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make(name, **options)


def test_code_ends_when_solved_or_out_of_attempts():
    try:
        Sandbox().close()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    env = make(CODE, max_turns=2, difficulty_range=[1, 1], reward_scale=0.5, timeout=4)
    assert env.limits.wall_s == 4 and env.roles == ("main",)
    tasks = env.tasks("train", 2)
    states, _ = env.reset(tasks, RNG)
    first = env.step(states, [[tasks[0]["solution"], "def"]], RNG)
    np.testing.assert_allclose(first.result.total, [1.0, -0.25])
    assert first.done.tolist() == [True, False]
    assert env.step(env.observe(first.after)[0], [["def", "def"]], RNG).done.tolist() == [True, True]
    with pytest.raises(ValueError, match="three sources of tasks"):
        make(CODE, difficulty_range=[1, 1], data="mbpp")
