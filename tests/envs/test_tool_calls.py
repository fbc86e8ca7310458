"""Messages of tool use: which calls and answers are parsed, and what is wrong with the others."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.tools.tool_calls import MAX_CALL, MAX_CALLS, MAX_MESSAGE, parse_message


def call_text(name="calculator", **parameters):
    return f"<tool_call>{json.dumps({'name': name, 'parameters': parameters})}</tool_call>"


def test_several_calls_and_an_answer_are_parsed():
    message = parse_message(f"first {call_text(expression='1')} then {call_text('other', a=[1])}\n<answer> 42 </answer>")
    assert [tuple(call) for call in message.calls] == [("calculator", {"expression": "1"}, ""), ("other", {"a": [1]}, "")]
    assert message[1:] == (0, "42", False)
    many = parse_message(call_text(expression="1") * 11)
    assert many.num_refused == 3 and len(many.calls) == MAX_CALLS
    assert parse_message('<tool_call>\n{"parameters": {}, "name": "x"}\n</tool_call>').calls == (("x", {}, ""),)


PROBLEMS = {
    "nothing": ("", "no JSON"),
    "words": ("calculator 1 + 1", "no JSON"),
    "Python": ("{'name': 'x', 'parameters': {}}", "no JSON"),
    "a list": ("[]", "nothing else"),
    "no name": ('{"parameters": {}}', "nothing else"),
    "no parameters": ('{"name": "x"}', "nothing else"),
    "another field": ('{"name": "x", "parameters": {}, "result": "42"}', "nothing else"),
    "a name that is no text": ('{"name": ["x"], "parameters": {}}', "nothing else"),
    "NaN": ('{"name": "x", "parameters": {"a": NaN}}', "NaN is no number"),
    "Infinity": ('{"name": "x", "parameters": {"a": -Infinity}}', "-Infinity is no number"),
    "a large float": ('{"name": "x", "parameters": {"a": 1e999}}', "too large"),
    "a long number": ('{"name": "x", "parameters": {"a": ' + "9" * 5000 + "}}", "5000 digits"),
    "a name twice": ('{"name": "x", "name": "y", "parameters": {}}', "'name' stands twice"),
    "a parameter twice": ('{"name": "x", "parameters": {"a": 1, "a": 2}}', "'a' stands twice"),
    "3000 deep": ('{"a":' * 3000 + "1" + "}" * 3000, "at most"),
    "1000 deep": ("[" * 1000 + "]" * 1000, "more than 64 brackets"),
    "brackets in no string": ('"\\"' + "[" * 70, "no JSON"),
    "long": ('{"name": "x", "parameters": {"a": "' + "b" * MAX_CALL + '"}}', "at most 6000"),
    "two objects": ('{"name": "x", "parameters": {}} {}', "no JSON"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_an_unreadable_call_says_why(name):
    text, reason = PROBLEMS[name]
    message = parse_message(f"<tool_call>{text}</tool_call><answer>1</answer>")
    assert reason in message.calls[0].problem and len(message.calls[0].problem) < 300 and message.answer == "1"


def test_brackets_in_strings_are_not_counted():
    code = "x = [[[" + "[]," * 200 + "]]]\n" + '"\\\\" + "\\""'
    assert parse_message(call_text("python_repl", code=code)).calls[0].parameters == {"code": code}


NESTED = {
    "a call in a call": ("<tool_call><tool_call>{}</tool_call></tool_call>", 1, "", False),
    "a good call in a call": (f"<tool_call>{call_text(expression='1')}</tool_call>", 1, "", False),
    "an answer in a call": (call_text(expression="<answer>1</answer>"), 1, "", False),
    "a call in an answer": (f"<answer>{call_text(expression='1')}</answer>", 1, "", False),
    "an answer in an answer": ("<answer><answer>1</answer></answer>", 0, "1", False),
    "two answers": ("<answer>1</answer><answer>2</answer>", 0, "1", False),
    "an answer that is not closed": ("<answer>1", 0, "", False),
    "closed before it is opened": ("</answer>1<answer>", 0, "", False),
    "empty": ("<answer> \n </answer>", 0, "", False),
    "a call that is not closed": ('<tool_call>{"name": "x"', 0, "", True),
    "an answer after a call that is not closed": ("<tool_call>{} <answer>5</answer>", 0, "5", True),
    "many": ("<answer>" * 2000, 0, "", False),
    "many calls": ("<tool_call>" * 1800, 0, "", True),
    "a result of its own": ("<tool_result>42</tool_result>", 0, "", False),
    "beyond the end": ("x" * MAX_MESSAGE + "<answer>1</answer>", 0, "", False),
}


@pytest.mark.parametrize("name", NESTED)
def test_tags_in_tags_are_parsed(name):
    text, calls, answer, unclosed = NESTED[name]
    message = parse_message(text)
    assert (len(message.calls), message.answer, message.unclosed) == (calls, answer, unclosed)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "<answer>", "</answer>", "{", "}", '"', "\\", "[", "name", ":", "1"])
    )
)
def test_any_order_of_tags_can_be_parsed(parts):
    message = parse_message("".join(parts))
    assert len(message.calls) <= MAX_CALLS and all(not call.name or not call.problem for call in message.calls)


@pytest.mark.parametrize(
    "text", ["[" * 9000, '"' * 9000, '"\\' * 4000, "\\" * 9000, '{"a":' * 1500, '{"a":1,' + '"a":1,' * 990 + '"b":1}']
)
def test_parsing_hostile_texts_is_fast(text):
    start = time.process_time()
    for _ in range(5):
        parse_message(f"<tool_call>{text}</tool_call>")
        parse_message(f"<tool_call>{text[:MAX_CALL]}</tool_call>")
    assert time.process_time() - start < 0.2
