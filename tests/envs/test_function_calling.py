"""Calls that a team makes together: how they are read, each term of the reward by a case worked by hand, requests, data."""

from __future__ import annotations

import itertools
import json
import math
import time
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.tools.function_calling import FunctionCalling, signature
from jmarl.envs.tools.function_calls import CLAMP, REACHED, WEIGHTS, Call, Wanted, canonical, read_calls, score, similarity
from jmarl.envs.tools.function_requests import FUNCTIONS, draw, schema

RNG = np.random.default_rng(0)
ORDER = {"f": ["a", "b"], "math.gcd": ["x", "y"]}
F, G = Call("f", {"a": 1}), Call("g", {"b": "x"})


def function(name, **types):
    return {"name": name, "parameters": {"properties": {of: {"type": t} for of, t in types.items()}, "required": [*types]}}


TASK = {
    "user_prompt": "Do f of 1 and g of x.",
    "function": [function("f", a="integer"), function("g", b="string"), function("h", a="integer")],
    "ground_truth": [{"f": {"a": [1]}}, {"g": {"b": ["x"]}}],
}


def once(task, *messages, **options):
    env = FunctionCalling(**options)
    state, _ = env.reset(task, RNG)
    return env.step(state, messages, RNG)


def best(env, task):
    return env.solve(env.reset(task, RNG)[0])


# Reading

F_JSON, G_JSON = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {"b": "x"}}'
READ = {
    "python": ('f(a=1)\ng(b="x")', [F, G]),
    "a python list": ('[f(a=1), g(b="x")]', [F, G]),
    "a list over several lines": ('[\n  f(a=1),\n  g(b="x"),\n]', [F, G]),
    "semicolons": ('f(a=1); g(b="x");', [F, G]),
    "by position": ("f(1, 2)", [Call("f", {"a": 1, "b": 2})]),
    "a dotted name": ("math.gcd(x=4, y=6)", [Call("math.gcd", {"x": 4, "y": 6})]),
    "marks of a list": ('1. f(a=1)\n- g(b="x")', [F, G]),
    "a fence": ('```python\nf(a=1)\ng(b="x")\n```', [F, G]),
    "fences in a line": ("```f(a=1)```", [F]),
    "prose around": ('Sure! Here they are:\nf(a=1)\ng(b="x")\nDone.', [F, G]),
    "json": ('[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "x"}}]', [F, G]),
    "one json object": ('{"name": "f", "parameters": {"a": 1}}', [F]),
    "json lines": ('{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {"b": "x"}},', [F, G]),
    "json in prose": ('I call:\n[{"name": "f",\n "arguments": {"a": 1}}]\nThat is all.', [F]),
    "tags": (f"<tool_call>{F_JSON}</tool_call>\n<tool_call>\n{G_JSON}\n</tool_call>", [F, G]),
    "words of json in python": ("f(a=true, b=null)", [Call("f", {"a": True, "b": None})]),
    "a list and an object as values": ('f(a=[1, -2.5], b={"k": "v"})', [Call("f", {"a": [1, -2.5], "b": {"k": "v"}})]),
    "backticks": ('`f(a=1)`\n`g(b="x")`', [F, G]),
    "bold": ('**f(a=1)**\n- **g(b="x")**', [F, G]),
    "comments": ('f(a=1)  # the first\ng(b="x")  # the second (of two)', [F, G]),
    "a comment in a line": ("f(a=1)  # the first", [F]),
    "one marked line": ("- f(a=1)", [F]),
    "a numbered line": ("1. f(a=1)", [F]),
    "a name before": ('Agent 1: f(a=1)\n**Agent 2:** `g(b="x")`', [F, G]),
    "arguments in a text": ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [F]),
    "on the wire": ('[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]', [F]),
    "arguments in a bad text": ('[{"name": "f", "arguments": "{"}, {"name": "f", "arguments": "{\\"a\\": 1}"}]', [F]),
    "prose and a fence": ('I shall call [one] function:\n\n```tool_code\nf(\n  a=1,\n)\n```\nThat is all.', [F]),
    "a fence and a line": ('First:\n```python\nf(\n  a=1,\n)\n```\nand\ng(b="x")', [F, G]),
    "an asterisk in a text": ('g(b="**x**")', [Call("g", {"b": "**x**"})]),
    "no arguments": ("now()", [Call("now", {})]),
    "an unknown function": ("k(z=1)", [Call("k", {"z": 1})]),
    "one bad line": ('f(a=1\ng(b="x")', [G]),
    "empty": ("", []),
    "an empty list": ("[]", []),
    "prose": ("I cannot do that (sorry)", []),
    "a name": ("f", []),
    "an expression": ("f(a=1+1)", []),
    "code": ('f(a=__import__("os").getcwd())', []),
    "a set, bytes, a complex number": ("f(a={1})\nf(a=b'1')\nf(a=1j)\nf(a=...)", []),
    "too many by position": ("f(1, 2, 3)", []),
    "stars": ("f(*[1])\nf(**{'a': 1})", []),
    "an unnamed function": ("(lambda: 1)(a=1)\nf()(a=1)\n'f'(a=1)", [Call("f", {})][:0]),
    "json without a name": ('[{"function": "f"}, 3, null, [[["x"]]]]', []),
    "json arguments that are none": ('{"name": "f", "arguments": [1]}', []),
    "a huge number": (f"f(a={'9' * 60})\nf(a=0x{'f' * 7000})", []),
    "a deep value": ("f(a=" + "[" * 20 + "]" * 20 + ")", []),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_calls_are_read(name):
    text, expected = READ[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_calls(text, ORDER) == expected


def test_escapes_in_texts_warn_nobody():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_calls(r'f(a="\d")', ORDER) == [Call("f", {"a": r"\d"})]


def test_the_first_calls_are_read_and_no_more():
    assert [call.arguments["a"] for call in read_calls("\n".join(f"f(a={i})" for i in range(99)), ORDER)] == list(range(32))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (3, 3.0, True),
        (True, 1, False),
        (False, 0, False),
        (None, False, False),
        ("3", 3, False),
        ("New  york ", "new York", True),
        ("Straße", "STRASSE", True),
        ([1, "A"], [1.0, "a"], True),
        ([1, 2], [2, 1], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({}, [], False),
        (math.nan, math.nan, True),
        (math.inf, -math.inf, False),
        (2**100, 2.0**100, True),
    ],
)
def test_which_values_are_the_same(one, other, same):
    assert (canonical(one) == canonical(other)) is same


@pytest.mark.parametrize(
    ("arguments", "wanted", "share"),
    [
        ({"a": 1}, {"a": [1]}, 1),
        ({"a": 2}, {"a": [1]}, 0),
        ({"a": 2}, {"a": [1, 2]}, 1),
        ({"a": 1, "z": 1}, {"a": [1]}, 1 / 2),
        ({"a": 1}, {"a": [1], "b": [1]}, 1 / 2),
        ({"a": 1}, {"a": [1], "b": [5, ""]}, 1),
        ({"a": 1, "b": 5}, {"a": [1], "b": [5, ""]}, 1),
        ({"a": 1, "b": 6}, {"a": [1], "b": [5, ""]}, 1 / 2),
        ({}, {}, 1),
        ({"z": 1}, {}, 0),
        ({}, {"a": [1], "b": [2]}, 0),
    ],
)
def test_similarity_of_two_calls(arguments, wanted, share):
    assert similarity(Call("f", arguments), Wanted("f", wanted)) == pytest.approx(share)
    assert similarity(Call("g", arguments), Wanted("f", wanted)) == 0


def test_the_best_pairing_is_not_the_first_one():
    """The first call is two thirds like either; taken for the first, it leaves nothing for the second."""
    wanted = [Wanted("f", {"a": [1], "b": [1], "c": [1]}), Wanted("f", {"a": [1], "b": [2], "c": [2]})]
    made = [Call("f", {"a": 1, "b": 1, "c": 2}), Call("f", {"a": 3, "b": 1, "c": 1})]
    assert score([made, []], wanted)[0]["arguments"] == pytest.approx(2 / 3)


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
def test_the_terms_of_the_reward(name):
    first, second, *shares = CASES[name]
    step = once(TASK, first, second)
    expected = {term: WEIGHTS[term] * share for term, share in zip(TERMS, shares, strict=True)}
    assert {term: step.info[term] for term in TERMS} == pytest.approx(expected)
    assert step.reward == pytest.approx(sum(expected.values())) and step.done
    assert step.info["solved"] == shares[TERMS.index("exact")]


def test_some_rewards_in_numbers():
    rewards = {name: once(TASK, *CASES[name][:2]).reward for name in CASES}
    assert rewards["right, shared out"] == pytest.approx(1.10) == FunctionCalling().reward_range[1]
    assert rewards["the worst"] == pytest.approx(-0.25) == FunctionCalling().reward_range[0]
    assert rewards["nothing"] == pytest.approx(-0.15)
    assert rewards["both by one"] == pytest.approx(0.875)
    assert rewards["both by both"] == pytest.approx(0.70)
    assert rewards["a wrong argument"] == pytest.approx(0.725)


def test_the_clamp_is_never_felt():
    assert CLAMP == (-0.4, 1.2) and CLAMP[0] < REACHED[0] and REACHED[1] < CLAMP[1]
    assert REACHED[1] == pytest.approx(sum(weight for weight in WEIGHTS.values() if weight > 0))


def test_either_agent_may_have_the_odd_call():
    task = TASK | {"ground_truth": [*TASK["ground_truth"], {"h": {"a": [1]}}]}
    for texts in (("f(a=1)\nh(a=1)", 'g(b="x")'), ("h(a=1)", 'g(b="x")\nf(a=1)')):
        assert once(task, *texts).reward == pytest.approx(1.10)
    assert once(task, 'f(a=1)\nh(a=1)\ng(b="x")', "").info["balance"] == pytest.approx(0.15 / 3)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_calls_leave_the_range_and_the_order_of_agents_is_nothing(data):
    call = st.builds("{}({}={})".format, st.sampled_from("fghk"), st.sampled_from("abz"), st.sampled_from(["1", "2", "'x'"]))
    texts = [data.draw(st.lists(call, max_size=9).map("\n".join)) for _ in range(2)]
    step = once(TASK, *texts)
    assert REACHED[0] - 1e-9 <= step.reward <= REACHED[1] + 1e-9
    assert once(TASK, *texts[::-1]).reward == pytest.approx(step.reward)
    assert (step.reward > 1.10 - 1e-9) == (step.info["solved"] and step.info["balance"] == 0.15 and not step.info["duplicate"])


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_hostile_texts_take_no_time(text):
    start = time.perf_counter()
    step = once(TASK, text, text)
    assert time.perf_counter() - start < 1 and math.isfinite(step.reward)
    json.dumps(FunctionCalling().render(step.state))


# Requests


@pytest.mark.parametrize("sharing", ["halves", "self_select"])
def test_the_best_can_be_had_of_every_request(sharing):
    env = FunctionCalling(sharing=sharing)
    tasks = [*env.tasks("train", 150), *env.tasks("eval", 50)]
    assert len(tasks) == 200 and {len(task["ground_truth"]) for task in tasks} == {2, 3, 4, 5}
    for task in tasks:
        step = once(task, *best(env, task), sharing=sharing)
        assert step.reward == pytest.approx(1.10) and step.info["solved"] == 1


def test_requests_name_every_value_and_prompts_show_no_call():
    env = FunctionCalling()
    for task in env.tasks("train", 100):
        _, prompts = env.reset(task, RNG)
        assert len(prompts[0]) < 1800 and prompts[0] != prompts[1]
        assert not any(line in prompt for prompt in prompts for text in best(env, task) for line in text.splitlines())
        for call in task["ground_truth"]:
            for values in next(iter(call.values())).values():
                shown = {True: "on", False: "off"}[values[0]] if isinstance(values[0], bool) else str(values[0])
                assert "" in values or shown in task["user_prompt"] or values == [True]
        offered = [of["name"] for of in task["function"]]
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


def test_a_schema_in_one_line():
    assert len(FUNCTIONS) == 18
    line = "get_weather(city: string, days: integer, unit: celsius|fahrenheit = celsius): weather forecast of a city"
    assert signature(schema("get_weather")) == line
    assert signature({"name": "now"}) == "now()"
    optional = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}, "required": None}}
    assert signature(optional) == "f(a: integer (may be left out))"


def test_rows_of_a_file(tmp_path):
    """Values of several types, arguments that may be left out, and fields that nobody reads."""
    rows = [TASK | {"ground_truth": [{"f": {"a": [i, str(i), ""]}}, {"g": {"b": ["x"]}}], "id": i} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    env = FunctionCalling(tmp_path / "rows.jsonl")
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert len(train) == 8 and len(held_out) == 2 and "id" not in train[0]
    assert once(train[0], "f()", 'g(b="x")').reward == pytest.approx(1.10)
    assert once(train[0], *best(env, train[0])).reward == pytest.approx(1.10)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"user_prompt": "x", "function": []}) + "\n")
    with pytest.raises(ValueError, match="no calls in ground_truth"):
        FunctionCalling(tmp_path / "bad.jsonl")


def test_a_picture_of_what_was_wanted_and_made():
    env = FunctionCalling()
    step = once(TASK, "f(a=2)", "")
    assert env.render(step.state).splitlines() == [
        "Do f of 1 and g of x.",
        "wanted (values of which one is met):",
        '  f({"a": [1]})',
        '  g({"b": ["x"]})',
        "made:",
        '  f({"a": 2})',
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user_prompt": " "}, "no text in user_prompt"),
        ({"user_prompt": None}, "no text in user_prompt"),
        ({"function": None}, "no list of functions"),
        ({"function": [{}]}, "no list of functions"),
        ({"ground_truth": []}, "no calls in ground_truth"),
        ({"ground_truth": [{"f": {}, "g": {}}]}, "no calls in ground_truth"),
        ({"ground_truth": [{"nobody": {}}]}, "of no function it has"),
        ({"ground_truth": [{"f": {"a": 1}}]}, "values of 'f' are no lists"),
        ({"ground_truth": [{"f": {"a": []}}]}, "no lists of at least one"),
        ({"ground_truth": [{"f": 1}]}, "no arguments by name"),
    ],
)
def test_malformed_tasks_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        FunctionCalling().reset(TASK | change, RNG)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="sharing='all'"):
        FunctionCalling(sharing="all")
    with pytest.raises(ValueError, match="between 1 and 8"):
        FunctionCalling(calls=(0, 9))
