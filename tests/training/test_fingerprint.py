"""Fingerprints of data and rewards: equal in every process, and different if data or reward differ."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import RewardProcessors, make_reward
from jmarl.training.files import fingerprint

SCRIPT = """
import json
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import RewardProcessors, make_reward
from jmarl.training.files import fingerprint
from tests.training.test_fingerprint import ITEMS, by_length, Judge
reward = make_reward([by_length, Judge(by_length)], num_agents=2, processors=RewardProcessors.scale(2.0))
env = RewardEnvironment(reward, [default_formatter] * 2)
print(json.dumps([fingerprint.of_data(ITEMS), fingerprint.of_reward(env)]))
"""
ITEMS = [{"prompt": "a", "tags": {"x", "y", "z"}, "counts": {(0, 0): 1, 2: None}, "image": object(), "array": np.arange(3)}]


def helper(text):
    return len(text)


def by_length(a, b):
    return [helper(x) - helper(y) for x, y in zip(a, b, strict=True)]


def by_letters(a, b, letter="e"):
    return [x.count(letter) for x in a]


class Judge:
    def __init__(self, rule):
        self.rule, self.calls = rule, 0

    def __call__(self, a, b):
        self.calls += 1
        return self.rule(a, b)

    def judge(self, a, b):
        return self.rule(a, b)


def reward_of(*functions, **options):
    """Return the fingerprint of a reward."""
    reward = make_reward(list(functions), num_agents=2, **options)
    return fingerprint.of_reward(RewardEnvironment(reward, [default_formatter] * 2))


def test_fingerprints_are_equal_in_every_process():
    root = Path(__file__).resolve().parents[2]
    seen = set()
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        seen.add(
            subprocess.run([sys.executable, "-c", SCRIPT], env=env, cwd=root, capture_output=True, text=True, check=True).stdout
        )
    assert len(seen) == 1 and json.loads(seen.pop())[0]["items"] == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (reward_of(by_length), reward_of(by_letters)),
        (reward_of(by_length, by_letters, weights=[1, 0]), reward_of(by_length, by_letters, weights=[0, 1])),
        (reward_of(by_length), reward_of(by_length, on_error="mask")),
        (reward_of(functools.partial(by_letters, letter="a")), reward_of(functools.partial(by_letters, letter="b"))),
        (reward_of(Judge(by_length)), reward_of(Judge(by_letters))),
        (reward_of(Judge(by_length).judge), reward_of(Judge(by_letters).judge)),
        (reward_of(Judge({"math": by_length}).judge), reward_of(Judge({"math": by_letters}).judge)),
        (reward_of(lambda a, b: 1.0), reward_of(lambda a, b: 2.0)),
        (
            reward_of(by_length, processors=RewardProcessors.scale(2.0)),
            reward_of(by_length, processors=RewardProcessors.scale(3.0)),
        ),
    ],
    ids=["function", "weights", "on_error", "partial", "object", "method", "dict", "lambda", "processor"],
)
def test_a_changed_reward_is_named(one, other):
    assert fingerprint.difference("reward", one, one) == "" and fingerprint.difference("reward", one, other)


def test_functions_of_the_same_file_count():
    """`by_length` calls `helper` within a comprehension."""
    assert any(name.endswith("test_fingerprint.helper") for name in reward_of(by_length))


def test_using_a_reward_changes_nothing():
    judge = Judge(by_length)
    before = reward_of(judge)
    judge(["a"], ["b"])
    judge.pool = by_letters  # made when it was first used
    assert fingerprint.difference("reward", before, reward_of(judge)) == ""


def test_data_differ_by_any_item_and_their_order():
    items = [{"prompt": "a"}, {"prompt": "b"}]
    assert fingerprint.of_data(items) == fingerprint.of_data([dict(item) for item in items])
    others = (items[::-1], [*items, {}], [{"prompt": "a"}, {"prompt": "c"}], [{"prompt": "a"}, {"prompt": "b", "answer": 1}])
    assert all(fingerprint.of_data(x) != fingerprint.of_data(items) for x in others)
