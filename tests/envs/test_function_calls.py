"""Function calls in texts: formats, equality of values, similarity and pairing of calls."""

from __future__ import annotations

import math
import warnings

import pytest

from jmarl.envs.tools.function_calls import ExpectedCall, FunctionCall, canonical, read_calls, score, similarity

ORDER = {"f": ["a", "b"], "math.gcd": ["x", "y"]}
F, G = FunctionCall("f", {"a": 1}), FunctionCall("g", {"b": "x"})
F_JSON, G_JSON = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {"b": "x"}}'
READ = {
    "python": ('f(a=1)\ng(b="x")', [F, G]),
    "a python list": ('[f(a=1), g(b="x")]', [F, G]),
    "a list over several lines": ('[\n  f(a=1),\n  g(b="x"),\n]', [F, G]),
    "semicolons": ('f(a=1); g(b="x");', [F, G]),
    "by position": ("f(1, 2)", [FunctionCall("f", {"a": 1, "b": 2})]),
    "a dotted name": ("math.gcd(x=4, y=6)", [FunctionCall("math.gcd", {"x": 4, "y": 6})]),
    "marks of a list": ('1. f(a=1)\n- g(b="x")', [F, G]),
    "a fence": ('```python\nf(a=1)\ng(b="x")\n```', [F, G]),
    "fences in a line": ("```f(a=1)```", [F]),
    "prose around": ('Sure! Here they are:\nf(a=1)\ng(b="x")\nDone.', [F, G]),
    "json": ('[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "x"}}]', [F, G]),
    "one json object": ('{"name": "f", "parameters": {"a": 1}}', [F]),
    "json lines": ('{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {"b": "x"}},', [F, G]),
    "json in prose": ('I call:\n[{"name": "f",\n "arguments": {"a": 1}}]\nThat is all.', [F]),
    "tags": (f"<tool_call>{F_JSON}</tool_call>\n<tool_call>\n{G_JSON}\n</tool_call>", [F, G]),
    "words of json in python": ("f(a=true, b=null)", [FunctionCall("f", {"a": True, "b": None})]),
    "a list and an object as values": ('f(a=[1, -2.5], b={"k": "v"})', [FunctionCall("f", {"a": [1, -2.5], "b": {"k": "v"}})]),
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
    "an asterisk in a text": ('g(b="**x**")', [FunctionCall("g", {"b": "**x**"})]),
    "no arguments": ("now()", [FunctionCall("now", {})]),
    "an unknown function": ("k(z=1)", [FunctionCall("k", {"z": 1})]),
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
    "an unnamed function": ("(lambda: 1)(a=1)\nf()(a=1)\n'f'(a=1)", [FunctionCall("f", {})][:0]),
    "json without a name": ('[{"function": "f"}, 3, null, [[["x"]]]]', []),
    "json arguments that are none": ('{"name": "f", "arguments": [1]}', []),
    "a huge number": (f"f(a={'9' * 60})\nf(a=0x{'f' * 7000})", []),
    "a deep value": ("f(a=" + "[" * 20 + "]" * 20 + ")", []),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_calls_are_parsed(name):
    text, expected = READ[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_calls(text, ORDER) == expected


def test_escapes_in_strings_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_calls(r'f(a="\d")', ORDER) == [FunctionCall("f", {"a": r"\d"})]


def test_only_the_first_32_calls_are_read():
    assert [call.arguments["a"] for call in read_calls("\n".join(f"f(a={i})" for i in range(99)), ORDER)] == list(range(32))


@pytest.mark.parametrize(("one", "other", "same"), [
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
])  # fmt: skip
def test_values_are_equal_if_their_canonical_forms_are(one, other, same):
    assert (canonical(one) == canonical(other)) is same


@pytest.mark.parametrize(("arguments", "allowed", "share"), [
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
])  # fmt: skip
def test_similarity_is_the_share_of_matching_arguments(arguments, allowed, share):
    assert similarity(FunctionCall("f", arguments), ExpectedCall("f", allowed)) == pytest.approx(share)
    assert similarity(FunctionCall("g", arguments), ExpectedCall("f", allowed)) == 0


def test_calls_are_paired_for_the_greatest_sum_of_similarities():
    """A greedy pairing would give less: the first call is two thirds similar to both expected calls."""
    expected = [ExpectedCall("f", {"a": [1], "b": [1], "c": [1]}), ExpectedCall("f", {"a": [1], "b": [2], "c": [2]})]
    calls = [FunctionCall("f", {"a": 1, "b": 1, "c": 2}), FunctionCall("f", {"a": 3, "b": 1, "c": 1})]
    assert score([calls, []], expected)[0]["arguments"] == pytest.approx(2 / 3)
