"""Parallel function calling: hand-computed terms of the reward, generated requests, and data files."""

from __future__ import annotations

import itertools
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.tools.function_calling import FunctionCalling, signature
from jmarl.envs.tools.function_calls import ATTAINABLE, CLAMP, WEIGHTS
from jmarl.envs.tools.function_requests import FUNCTIONS, draw, schema

RNG = np.random.default_rng(0)


def function(name, **types):
    properties = {argument: {"type": kind} for argument, kind in types.items()}
    return {"name": name, "parameters": {"properties": properties, "required": [*types]}}


TASK = {
    "user_prompt": "Do f of 1 and g of x.",
    "function": [function("f", a="integer"), function("g", b="string"), function("h", a="integer")],
    "ground_truth": [{"f": {"a": [1]}}, {"g": {"b": ["x"]}}],
}


def play(task, *messages, **options):
    """Return the step of an episode."""
    env = FunctionCalling(**options)
    state, _ = env.reset(task, RNG)
    return env.step(state, messages, RNG)


def solution(env, task):
    """Return the messages of the solver."""
    return env.solve(env.reset(task, RNG)[0])


# The reward

WRONG = "k(z=1)\nk(z=2)\nk(z=3)\nk(z=4)"
TERMS = ("parse", "names", "arguments", "count", "balance", "exact", "overlap", "lazy", "extra", "duplicate")
CASES = {  # messages, then the terms
    "right, shared out": ("f(a=1)", 'g(b="x")', 1, 1, 1, 1, 1, 1, 0, 0, 0, 0),
    "the other way round": ('g(b="x")', "f(a=1)", 1, 1, 1, 1, 1, 1, 0, 0, 0, 0),
    "both by one": ('f(a=1)\ng(b="x")', "", 1, 1, 1, 1, 0, 1, 0, 0.5, 0, 0),
    "both by both": ('f(a=1)\ng(b="x")', 'g(b="X")\nf(a=1.0)', 1, 1, 1, 1, 0, 1, 1, 0, 0, 1),
    "one by both": ("f(a=1)", "f(a=1)", 1, 2 / 3, 1 / 2, 1 / 2, 1, 0, 1 / 2, 0, 0, 1 / 2),
    "one twice by one": ("f(a=1)\nf(a=1)", 'g(b="x")', 1, 1, 1, 1, 1, 1, 0, 0, 0, 1 / 2),
    "nothing": ("", "", 0, 0, 0, 0, 0, 0, 0, 1, 0, 0),
    "prose": ("Hello!", "I would call f.", 0, 0, 0, 0, 0, 0, 0, 1, 0, 0),
    "half": ("f(a=1)", "", 1, 2 / 3, 1 / 2, 1 / 2, 1 / 2, 0, 0, 0.5, 0, 0),
    "a wrong argument": ("f(a=2)", 'g(b="x")', 1, 1, 1 / 2, 1, 1, 0, 0, 0, 0, 0),
    "an argument too much": ("f(a=1, z=1)", 'g(b="x")', 1, 1, 3 / 4, 1, 1, 0, 0, 0, 0, 0),
    "a wrong name": ("h(a=1)", 'g(b="x")', 1, 1 / 2, 1 / 2, 1, 1, 0, 0, 0, 0, 0),
    "one too much": ("f(a=1)\nh(a=1)", 'g(b="x")', 1, 4 / 5, 1, 1 / 2, 1 / 2, 0, 0, 0, 1 / 2, 0),
    "names in common as multisets": ("f(a=1)\nf(a=2)", 'g(b="x")', 1, 4 / 5, 1, 1 / 2, 1 / 2, 0, 0, 0, 1 / 2, 0),
    "the worst": (WRONG, WRONG, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_terms_of_the_reward_equal_those_computed_by_hand(name):
    first, second, *shares = CASES[name]
    step = play(TASK, first, second)
    expected = {term: WEIGHTS[term] * share for term, share in zip(TERMS, shares, strict=True)}
    assert {term: step.parts[term] for term in TERMS} == pytest.approx(expected)
    assert step.reward == pytest.approx(sum(expected.values())) and step.done
    assert step.info["solved"] == shares[TERMS.index("exact")]


def test_rewards_equal_those_computed_by_hand():
    rewards = {name: play(TASK, *CASES[name][:2]).reward for name in CASES}
    assert rewards["right, shared out"] == pytest.approx(1.10) == FunctionCalling().reward_range[1]
    assert rewards["the worst"] == pytest.approx(-0.25) == FunctionCalling().reward_range[0]
    assert rewards["nothing"] == pytest.approx(-0.15)
    assert rewards["both by one"] == pytest.approx(0.875)
    assert rewards["both by both"] == pytest.approx(0.70)
    assert rewards["a wrong argument"] == pytest.approx(0.725)


def test_the_clamp_has_no_effect():
    assert CLAMP == (-0.4, 1.2) and CLAMP[0] < ATTAINABLE[0] and ATTAINABLE[1] < CLAMP[1]
    assert ATTAINABLE[1] == pytest.approx(sum(weight for weight in WEIGHTS.values() if weight > 0))


def test_either_agent_may_have_the_odd_call():
    task = TASK | {"ground_truth": [*TASK["ground_truth"], {"h": {"a": [1]}}]}
    for texts in (("f(a=1)\nh(a=1)", 'g(b="x")'), ("h(a=1)", 'g(b="x")\nf(a=1)')):
        assert play(task, *texts).reward == pytest.approx(1.10)
    assert play(task, 'f(a=1)\nh(a=1)\ng(b="x")', "").parts["balance"] == pytest.approx(0.15 / 3)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rewards_stay_in_the_range_and_ignore_the_order_of_agents(data):
    call = st.builds("{}({}={})".format, st.sampled_from("fghk"), st.sampled_from("abz"), st.sampled_from(["1", "2", "'x'"]))
    texts = [data.draw(st.lists(call, max_size=9).map("\n".join)) for _ in range(2)]
    step = play(TASK, *texts)
    assert ATTAINABLE[0] - 1e-9 <= step.reward <= ATTAINABLE[1] + 1e-9
    assert play(TASK, *texts[::-1]).reward == pytest.approx(step.reward)
    assert (step.reward > 1.10 - 1e-9) == (
        step.info["solved"] and step.parts["balance"] == 0.15 and not step.parts["duplicate"]
    )


@pytest.mark.parametrize("text", [
    "f(a=1)\n" * 1_000_000,
    "[" * 100_000,
    "f(a=" + "[" * 3900 + "]" * 3900 + ")",
    "f(a=" + "-" * 7900 + "1)",
    "f" + ".f" * 3900 + "(a=1)",
    "f" + "()" * 3900,
    '{"name": "f", "arguments": {"a": ' + "[" * 3900 + "]" * 3900 + "}}",
    '{"a":' * 1500 + "1" + "}" * 1500,
    '{"name": "f", "arguments": {"a": ' + "9" * 7000 + "}}",
    '{"name": "f", "arguments": {"a": NaN, "b": Infinity, "c": 1e999}}',
    "f(a=" + "9" * 7000 + ")",
    "f(a='" + "\\" * 7000 + "')",
    'f(a=1e999, b="\ud800\x00")',
    "f(a='\x00')",
    ("f(a=1)" + ")" * 3 + "\n") * 1000,
    "(" * 4000 + ")" * 4000,
    "1. " * 2600,
    "f(a=lambda: 1)\n" * 500,
    " \t" * 4000,
    "Agent" + " " * 7900,
    "```" * 2600,
    "```\n(\n" * 1100,
    "`* \t" * 2000,
    ")\n" * 4000,
    '{"name": "f", "arguments": "' + "[" * 7900 + '"}',
])  # fmt: skip
def test_hostile_texts_are_scored_quickly(text):
    start = time.perf_counter()
    step = play(TASK, text, text)
    assert time.perf_counter() - start < 1 and math.isfinite(step.reward)
    json.dumps(FunctionCalling().render(step.state))


# Requests


@pytest.mark.parametrize("sharing", ["halves", "self_select"])
def test_the_solver_earns_the_maximum_on_every_request(sharing):
    env = FunctionCalling(sharing=sharing)
    tasks = [*env.tasks("train", 150), *env.tasks("eval", 50)]
    assert len(tasks) == 200 and {len(task["ground_truth"]) for task in tasks} == {2, 3, 4, 5}
    for task in tasks:
        step = play(task, *solution(env, task), sharing=sharing)
        assert step.reward == pytest.approx(1.10) and step.info["solved"] == 1


def test_requests_name_every_value_and_prompts_show_no_expected_call():
    env = FunctionCalling()
    for task in env.tasks("train", 100):
        _, prompts = env.reset(task, RNG)
        assert len(prompts[0]) < 1800 and prompts[0] != prompts[1]
        assert not any(line in prompt for prompt in prompts for text in solution(env, task) for line in text.splitlines())
        for call in task["ground_truth"]:
            for values in next(iter(call.values())).values():
                shown = {True: "on", False: "off"}[values[0]] if isinstance(values[0], bool) else str(values[0])
                assert "" in values or shown in task["user_prompt"] or values == [True]
        offered = [schema["name"] for schema in task["function"]]
        assert len(set(offered)) == len(offered) and {name for call in task["ground_truth"] for name in call} <= set(offered)


def test_values_fit_their_schemas():
    import random

    kinds = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}
    rng = random.Random(0)
    for count in range(1, 9):
        for call in itertools.chain.from_iterable(draw(rng, count)["ground_truth"] for _ in range(40)):
            for name, arguments in call.items():
                properties = schema(name)["parameters"]["properties"]
                assert arguments.keys() == properties.keys()
                for argument, values in arguments.items():
                    assert type(values[0]) is kinds[properties[argument]["type"]]
                    assert values[0] in properties[argument].get("enum", values)


def test_a_schema_is_shown_in_one_line():
    assert len(FUNCTIONS) == 18
    line = "get_weather(city: string, days: integer, unit: celsius|fahrenheit = celsius): weather forecast of a city"
    assert signature(schema("get_weather")) == line
    assert signature({"name": "now"}) == "now()"
    optional = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}, "required": None}}
    assert signature(optional) == "f(a: integer (may be left out))"


def test_rows_of_a_file_become_tasks(tmp_path):
    """Values of several types, arguments that may be left out, and unknown fields."""
    rows = [TASK | {"ground_truth": [{"f": {"a": [i, str(i), ""]}}, {"g": {"b": ["x"]}}], "id": i} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    env = FunctionCalling(tmp_path / "rows.jsonl")
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert len(train) == 8 and len(held_out) == 2 and "id" not in train[0]
    assert play(train[0], "f()", 'g(b="x")').reward == pytest.approx(1.10)
    assert play(train[0], *solution(env, train[0])).reward == pytest.approx(1.10)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"user_prompt": "x", "function": []}) + "\n")
    with pytest.raises(ValueError, match="no calls in ground_truth"):
        FunctionCalling(tmp_path / "bad.jsonl")


def test_render_shows_expected_and_actual_calls():
    env = FunctionCalling()
    step = play(TASK, "f(a=2)", "")
    assert env.render(step.state).splitlines() == [
        "Do f of 1 and g of x.",
        "wanted (values of which one is met):",
        '  f({"a": [1]})',
        '  g({"b": ["x"]})',
        "made:",
        '  f({"a": 2})',
    ]


@pytest.mark.parametrize(("change", "message"), [
    ({"user_prompt": " "}, "no text in user_prompt"),
    ({"user_prompt": None}, "no text in user_prompt"),
    ({"function": None}, "no list of functions"),
    ({"function": [{}]}, "no list of functions"),
    ({"ground_truth": []}, "no calls in ground_truth"),
    ({"ground_truth": [{"f": {}, "g": {}}]}, "no calls in ground_truth"),
    ({"ground_truth": [{"nobody": {}}]}, "not of one of its functions"),
    ({"ground_truth": [{"f": {"a": 1}}]}, "at least one value for each argument of 'f'"),
    ({"ground_truth": [{"f": {"a": []}}]}, "at least one value for each argument of 'f'"),
    ({"ground_truth": [{"f": 1}]}, "its arguments are no dict"),
])  # fmt: skip
def test_malformed_tasks_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        FunctionCalling().reset(TASK | change, RNG)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="sharing='all'"):
        FunctionCalling(sharing="all")
    with pytest.raises(ValueError, match="between 1 and 8"):
        FunctionCalling(calls=(0, 9))
