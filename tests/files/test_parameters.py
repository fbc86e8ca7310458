"""Parameters of rewards and environments are in the fingerprint of a run, wherever they are kept; counters are not."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
import types
import uuid
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.envs.vector import vectorize
from jmarl.files.identity import fingerprint


class Judge:
    """A reward is its method. It counts its calls, and has what only this process knows."""

    threshold = 3

    def __init__(self, threshold, name="a"):
        self.threshold, self.name = threshold, name
        self.calls, self.started, self.key, self.lock = 0, time.time(), uuid.uuid4(), threading.Lock()
        self.file, self.rest, self.seen = sys.stdout, iter(name), []

    def score(self, texts):
        self.calls += 1
        self.seen.append(texts[0])
        return [float(len(text) > self.threshold) for text in texts]

    def run(self):
        print(self.name)


class Called:
    def __init__(self, size):
        self.size, self.calls, self.counts = size, 0, {}

    def __call__(self, texts):
        self.calls += 1
        self.counts[len(texts)] = self.calls
        return [float(len(text) > self.size) for text in texts]


class Checked:
    """Its attribute is set by a property."""

    def __init__(self, size):
        self.size = size

    @property
    def size(self):
        return self._size

    @size.setter
    def size(self, value):
        self._size = value

    def score(self, texts):
        return [float(self.size)] * len(texts)


class Doubled:
    def __init__(self, size, **others):
        self.size = 2 * size
        self.__dict__.update(others)

    def score(self, texts):
        return [float(self.size)] * len(texts)


@dataclasses.dataclass
class Settings:
    size: int = 1
    resume: bool = False  # no code of a reward reads it


@dataclasses.dataclass(frozen=True)
class Nested:
    settings: Settings


class Slots:
    __slots__ = ("size",)

    def __init__(self, size):
        self.size = size


class Pair(collections.namedtuple("Pair", "size other")):
    pass


class Color(enum.Enum):
    RED, BLUE = "red", "blue"


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class World(TextEnvironment):
    def __init__(self, settings, turns=1):
        self.settings, self.turns = settings, turns

    def reset(self, task, rng):
        return 0, [task["prompt"]]

    def step(self, state, messages, rng):
        return Step(state, [None], float(self.settings.size), True)


def plain(texts, size=1, options=None):
    return [float(size)] * len(texts)


def holding(value):
    def reward(texts):
        return [float(bool(value))] * len(texts)

    return reward


def reading(settings):
    def reward(texts):
        return [float(settings.size)] * len(texts)

    return reward


def nested(settings):
    def reward(texts):
        return [float(settings.settings.size)] * len(texts)

    return reward


def with_attribute(size):
    def reward(texts):
        return [float(reward.size)] * len(texts)

    reward.size = size
    return reward


def with_default(size):
    def reward(texts, settings=Settings(size)):  # noqa: B008
        return [float(settings.size)] * len(texts)

    return reward


def counting():
    calls = 0

    def reward(texts):
        nonlocal calls
        calls += 1
        return [1.0] * len(texts)

    return reward


def counting_elsewhere(settings):
    """Counts by another function, and in an object of another class."""
    calls, target = 0, 5

    def count():
        nonlocal calls
        calls += 1
        settings.size += 1

    def reward(texts):
        count()
        return [float(calls - target)] * len(texts)

    return reward


GLOBAL = Doubled(1)


def reading_a_global(texts):
    return GLOBAL.score(texts)


def set_global(size):
    GLOBAL.size = size
    return reading_a_global


def set_class(size):
    class Local(Settings):
        pass

    Local.size = size
    return lambda texts: [float(Local.size)] * len(texts)


def of_itself(size):
    value = Doubled(size)
    value.me = [value]
    value.me.append(value.me)
    return value.score


def writes(settings):
    def formatter(item):
        return f"{settings.size} {item['prompt']}"

    return formatter


def of(reward, formatter=default_formatter):
    return fingerprint.of_reward(RewardEnvironment(make_reward(reward, num_agents=1), [formatter]))


KINDS = {
    "bound method": lambda n: of(Judge(n).score),
    "method of a closure": lambda n: of(holding(Judge(n).score)),
    "object that is called": lambda n: of(Called(n)),
    "property": lambda n: of(Checked(n).score),
    "derived": lambda n: of(Doubled(n).score),
    "dataclass": lambda n: of(reading(Settings(n))),
    "nested dataclass": lambda n: of(nested(Nested(Settings(n)))),
    "slots": lambda n: of(reading(Slots(n))),
    "namespace": lambda n: of(reading(types.SimpleNamespace(size=n, resume=n))),
    "arguments": lambda n: of(reading(argparse.Namespace(size=n))),
    "named tuple": lambda n: of(holding(Pair(n, 1))),
    "enum": lambda n: of(holding([*Color][n - 1])),
    "whole enum": lambda n: of(holding(Level(n))),
    "whole number": lambda n: of(holding(n)),
    "none": lambda n: of(holding(None if n == 1 else n)),
    "set": lambda n: of(holding({n, 5, frozenset({"a", "b", "c"})})),
    "dict of objects": lambda n: of(holding({"a": Settings(n), "b": reading(Settings(n))})),
    "array": lambda n: of(holding(np.arange(n))),
    "device array": lambda n: of(holding(jnp.arange(n))),
    "pattern": lambda n: of(holding(re.compile(str(n)).search)),
    "path": lambda n: of(holding(Path(str(n)))),
    "partial": lambda n: of(functools.partial(plain, size=n)),
    "partial of an object": lambda n: of(functools.partial(plain, options=np.array([n]))),
    "default": lambda n: of(lambda texts, size=n: [float(size)]),
    "default object": lambda n: of(with_default(n)),
    "attribute of a function": lambda n: of(with_attribute(n)),
    "attribute of a class": lambda n: of(set_class(n)),
    "global object": lambda n: of(set_global(n)),
    "cycle": lambda n: of(of_itself(n)),
    "formatter": lambda n: of(plain, writes(Settings(n))),
    "environment": lambda n: fingerprint.of_reward(vectorize(World(Settings(n)))),
}  # fmt: skip
SCRIPT = "import json; from tests.files.test_parameters import KINDS; print(json.dumps([make(1) for make in KINDS.values()]))"


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_parameter_is_a_difference_and_an_equal_one_is_none(kind):
    one, again, other = (KINDS[kind](n) for n in (1, 1, 2))
    assert fingerprint.difference("reward", one, again) == "" and fingerprint.doubts(one, other) == []
    assert "(changed)" in fingerprint.difference("reward", one, other)


@pytest.mark.long
def test_parameters_have_the_same_digests_in_every_process(capsys):
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONHASHSEED": str(1 + (os.environ.get("PYTHONHASHSEED") == "1")), "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, cwd=root, capture_output=True, text=True, check=True)
    exec(SCRIPT, {})
    assert capsys.readouterr().out == done.stdout and len(json.loads(done.stdout)) == len(KINDS)


def test_what_code_writes_is_no_parameter():
    """Counters and lists of objects, closures and settings, also those that another function counts."""
    rewards = [Judge(1).score, Called(1), counting(), counting_elsewhere(Settings())]
    before = [of(reward) for reward in rewards]
    for reward in rewards:
        reward(["a"])
    assert [fingerprint.difference("reward", old, of(reward)) for old, reward in zip(before, rewards, strict=True)] == [""] * 4


def test_attributes_that_no_code_of_a_reward_reads_are_no_difference():
    """Settings of a whole run say whether it resumes, too."""
    for one, other in (
        (of(reading(Settings(1, resume=False))), of(reading(Settings(1, resume=True)))),
        (of(Judge(1, "a").score), of(Judge(1, "b").score)),
    ):
        assert fingerprint.difference("reward", one, other) == ""


def test_a_whole_number_of_code_without_source_is_in_doubt():
    """Code that is not seen may count with it; one that code writes is a counter there, too. Other numbers are compared."""
    code = """
def near(target):
    return lambda texts: [float(target)] * len(texts)
def counting(calls):
    def reward(texts):
        nonlocal calls
        calls += 1
        return [float(calls)]
    return reward
"""
    scope = {"__name__": "__main__"}
    exec(code, scope)
    one, other, float_ = (of(scope["near"](x)) for x in (50, 500, 50.5))
    assert fingerprint.difference("reward", one, other) == ""
    assert fingerprint.doubts(one, other) == ["target of __main__.near.<locals>.<lambda>"]
    assert "target" in fingerprint.difference("reward", float_, of(scope["near"](51.5)))
    assert fingerprint.doubts(of(scope["counting"](1)), of(scope["counting"](2))) == []


def test_a_fingerprint_of_an_earlier_version_is_compared_as_far_as_it_goes():
    """It had neither whole numbers nor what is behind attributes: a reward that differs there resumes, and an equal one."""
    names = {f"{__name__}.Settings", f"{__name__}.Settings(size=)"}
    one, other = of(reading(Settings(1))), of(reading(Settings(2)))
    earlier = {key: digest for key, digest in one.items() if key not in names}
    assert earlier != one and fingerprint.difference("reward", earlier, other) == ""
    assert fingerprint.difference("reward", earlier, of(holding(Settings(1))))
