"""Errors of the user's code keep their type and say where they were raised, in which call, on which item."""

from __future__ import annotations

import asyncio
import functools
import time

import numpy as np
import pytest

from jmarl.cli.main import sentence_of
from jmarl.envs import import_object
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.calls.user_code import definition_of, named, notes_of, place_of
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import RewardError, make_reward
from jmarl.envs.vector import LockStep

ITEMS = [{"prompt": "Oslo", "city": "o"}, {"prompt": "Rome"}]
RNG = np.random.default_rng(0)


def place(function, offset: int, name: str = "") -> str:
    """Where line `offset` of a function is."""
    code = function.__code__
    return f"tests/envs/test_user_code.py, line {code.co_firstlineno + offset}, in {name or function.__name__}"


def write_city(item):
    return "In " + item["city"]


def go_on(prompt, agent_completions, **rest):
    return [item["town"] for item in [{}]]


async def late_city(item):
    await asyncio.sleep(0)
    return item["city"]


def misspelled(texts, batch_items):
    return [float(item["citty"] in text) for text, item in zip(texts, batch_items, strict=True)]


def slow(texts):
    time.sleep(5)


class Doors(TextEnvironment):
    def tasks(self, split="train", count=100, seed=0):
        return [{"door": i} for i in range(count)]

    def reset(self, task, rng):
        return {"door": task["door"]}, ["Open the door"]

    def step(self, state, messages, rng):
        if messages[0] == "list":
            return [1.0]
        if messages[0] == "nothing":
            return Step(state, [None], None, True)
        assert state["door"] != 1
        return Step(state, [None], 1.0, True)


def caught(call, kind=Exception):
    with pytest.raises(kind) as error:
        call()
    return error.value


@pytest.mark.parametrize("formatter", [write_city, late_city, functools.partial(write_city)])
def test_a_formatter_keeps_its_error_and_names_its_line_and_the_item(formatter):
    env = RewardEnvironment(lambda a, b: [0.0] * len(a), [default_formatter, formatter])
    error = caught(lambda: env.first_prompts(ITEMS), KeyError)
    function = getattr(formatter, "func", formatter)
    line = place(function, 2 if function is late_city else 1)
    assert notes_of(error) == [f"in {line}", "the formatter of agent 1", "item 1, {'prompt': 'Rome'}"]
    sentence = f"KeyError: 'city', in {line} (the formatter of agent 1; item 1, {{'prompt': 'Rome'}})"
    assert sentence_of(error, verbose=True) == sentence
    assert sentence_of(error, verbose=False) == f"{sentence}; -v shows the traceback"


class Counted:
    """A value that counts how often its text is written."""

    texts = 0

    def __repr__(self):
        Counted.texts += 1
        return "counted"


def test_the_text_of_an_item_is_written_only_for_an_error():
    """A run reads each item of its data once with every formatter, and each joint action has a state."""
    item, seen = {"prompt": "Oslo", "value": Counted()}, Counted.texts
    env = RewardEnvironment(lambda a: [0.0] * len(a), [default_formatter], lambda **_: ["x"])
    states, _ = env.reset([item], RNG)
    env.observe(env.step(states, [["x"]], RNG).after)
    doors = LockStep(Doors(), num_agents=1)
    doors.step([{"door": 0, "value": Counted()}], [["x"]], RNG)
    assert Counted.texts == seen
    with pytest.raises(KeyError):
        RewardEnvironment(lambda a: [0.0] * len(a), [write_city]).reset([item], RNG)
    assert Counted.texts > seen


def test_a_transition_names_its_line_and_the_item():
    env = RewardEnvironment(lambda a: [0.0] * len(a), default_formatter, go_on).for_agents(1)
    states, _ = env.reset(ITEMS[:1], RNG)
    error = caught(lambda: env.observe(env.step(states, [["x"]], RNG).after), KeyError)
    assert f"KeyError: 'town', in {place(go_on, 1)} (the transition; item {{'prompt': 'Oslo', 'city': 'o'}})" in sentence_of(
        error, False
    )


@pytest.mark.parametrize(
    ("reward", "raised", "line"),
    [(misspelled, "KeyError: 'citty'", place(misspelled, 1)), (slow, "TimeoutError: it did not return", place(slow, 1))],
)
def test_a_reward_names_its_line_and_its_items(reward, raised, line):
    score = make_reward(reward, num_agents=1, timeout=0.1)
    error = caught(lambda: score([["a", "b", "c"]], ["p"] * 3, [ITEMS[0], *ITEMS], RNG), RewardError)
    assert f"reward {reward.__name__!r} raised {raised}" in str(error)
    assert f"in {line}, on item {{'prompt': 'Oslo', 'city': 'o'}} and 1 more" in str(error)


def test_values_that_are_refused_name_the_definition_of_the_reward():
    first = misspelled.__code__.co_firstlineno
    for wrong, kind in ((lambda texts: [1.0], "1 values for 2"), (lambda texts: [None, 1.0], None)):
        score = make_reward(wrong, num_agents=1)
        line = f"; it is defined in tests/envs/test_user_code.py, line {wrong.__code__.co_firstlineno}"
        assert wrong.__code__.co_firstlineno > first
        if kind:
            assert line in str(caught(lambda score=score: score([["a", "b"]], ["p"] * 2, ITEMS, RNG), ValueError))
        else:
            assert score([["a", "b"]], ["p"] * 2, ITEMS, RNG).faults[0].endswith(line)


def test_an_environment_names_its_line_its_state_and_what_it_returned():
    env = LockStep(Doors())
    states, _ = env.reset(env.tasks(count=2), RNG)
    error = caught(lambda: env.step(states, [["a", "b"]], RNG), AssertionError)
    assert sentence_of(error, True) == (
        f"AssertionError: assert 1 != 1, in {place(Doors.step, 5)} (Doors.step, messages ['b'], state {{'door': 1}})"
    )
    error = caught(lambda: env.step(states[:1], [["list"]], RNG), TypeError)
    assert f"defined in {place(Doors.step, 0).rpartition(',')[0]}" in sentence_of(error, True)
    error = caught(lambda: env.step(states[:1], [["nothing"]], RNG), ValueError)
    assert f"defined in {place(Doors.step, 0).rpartition(',')[0]}" in sentence_of(error, True)
    error = caught(lambda: env.reset([{}], RNG), KeyError)
    assert f"KeyError: 'door', in {place(Doors.reset, 1)} (Doors.reset, task {{}})" in sentence_of(error, True)


def test_errors_without_a_message_have_their_type_and_groups_their_first_error():
    assert named(IndexError()) == "IndexError without a message" and named(KeyError("a")) == "KeyError: 'a'"
    assert named(ExceptionGroup("several", [KeyError("a"), IndexError()])) == "KeyError: 'a'"

    async def several(item):
        async with asyncio.TaskGroup() as group:
            group.create_task(late_city(item))

    env = RewardEnvironment(lambda a: [0.0] * len(a), [several])
    error = caught(lambda: env.first_prompts([{}]), ExceptionGroup)
    assert sentence_of(error, True).startswith(f"KeyError: 'city', in {place(late_city, 2)} (the formatter of agent 0; item 0")


def test_what_jmarl_and_libraries_raise_is_not_of_the_user():
    assert definition_of(len) == definition_of(make_reward) == definition_of(None) == ""
    error = caught(lambda: make_reward([], num_agents=1), ValueError)
    assert place_of(error) and place_of(error.with_traceback(error.__traceback__.tb_next.tb_next)) == ""
    assert sentence_of(error, verbose=False) == str(error)


@pytest.mark.parametrize(("text", "message"), [
    ("def f(x)\n    return x", r"SyntaxError: expected ':', in broken_\d.py, line 1"),
    ("import numpy\nimport numpyy", r"ModuleNotFoundError: No module named 'numpyy', in broken_\d.py, line 2"),
    ("\n\nx = y", r"NameError: name 'y' is not defined, in broken_\d.py, line 3"),
    ("raise SystemExit('usage')", r"SystemExit: usage, in broken_\d.py, line 1"),
])  # fmt: skip
def test_a_module_that_cannot_be_imported_names_its_line(text, message, tmp_path, monkeypatch):
    name = f"broken_{len(text) % 10}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=message):
        import_object(f"{name}:f")
