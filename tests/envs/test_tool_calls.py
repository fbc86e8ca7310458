"""Messages of tool use: which calls and answers are parsed, and what is wrong with the others."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl.envs.formats.native_calls import MAX_CALL
from jmarl.envs.tools.function_calls import read_calls
from jmarl.envs.tools.tool_calls import MAX_CALLS, MAX_MESSAGE, parse_message


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


SCHEMAS = {"f": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
F = ("f", {"a": 1, "b": "2"}, "")
NATIVE = {
    "Qwen and Hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "2"}}\n</tool_call><|im_end|>',
    "arguments as a text": '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1, \\"b\\": \\"2\\"}"}</tool_call>',
    "wrapped": '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": "2"}}}</tool_call>',
    "Qwen3-Coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    "</tool_call>",
    "Qwen3-Coder without the first tag": "<function=f><parameter=a>1</parameter>\n<parameter=b>2</parameter></function>"
    "</tool_call>",
    "Llama 3.1": '<|python_tag|>{"name": "f", "parameters": {"a": 1, "b": "2"}}<|eom_id|>',
    "Llama 3.1 without a mark": '{"type": "function", "name": "f", "parameters": {"a": 1, "b": "2"}}<|eot_id|>',
    "Llama 3.1, functions": '<function=f>{"a": 1, "b": "2"}</function>',
    "Llama 3.2": '[f(a=1, b="2")]',
    "Llama 4": '<|python_start|>[f(a=1, b="2")]<|python_end|><|eot|>',
    "Mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1, "b": "2"}, "id": "abc"}]</s>',
    "JSON, then the end of a turn of Gemma": '{"name": "f", "arguments": {"a": 1, "b": "2"}}<end_of_turn>\n<eos>',
    "Mistral, later": '[TOOL_CALLS]f[ARGS]{"a": 1, "b": "2"}</s>',
}


@pytest.mark.parametrize("name", NATIVE)
def test_calls_in_the_forms_that_models_were_taught_are_read(name):
    message = parse_message(NATIVE[name], SCHEMAS)
    assert [tuple(call) for call in message.calls] == [F] and not message.unclosed
    assert read_calls(NATIVE[name], {"f": ["a", "b"]}, SCHEMAS) == [F[:2]]
    assert parse_message(NATIVE[name].split("<|e")[0] + "<answer>3</answer>", SCHEMAS).answer == "3"


@pytest.mark.parametrize("text", [
    '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 2}}', "[f(a=1), f(a=2)]",
    '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 2}}]',
    '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 2}',
    '{"name": "f", "parameters": {"a": 1}}\n{"name": "f", "parameters": {"a": 2}}',
    '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call><function=f>{"a": 2}</function>',
])  # fmt: skip
def test_several_calls_of_a_form_are_read_in_their_order(text):
    assert [tuple(call) for call in parse_message(text, SCHEMAS).calls] == [("f", {"a": 1}, ""), ("f", {"a": 2}, "")]


MALFORMED = {
    "two sets of arguments": ('<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}</tool_call>', "and"),
    "two texts of arguments": ('<tool_call>{"name": "f", "arguments": "{} {}"}</tool_call>', "text after it"),
    "another type": ('<tool_call>{"type": "code", "name": "f", "arguments": {}}</tool_call>', "nothing else"),
    "a parameter twice": ("<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", "twice"),
    "parameters in each other": ("<function=f><parameter=b><parameter=a>2</parameter></parameter></function>", "stand JSON or"),
    "JSON and parameters": ('<function=f>{"a": 1}<parameter=a>2</parameter></function>', "text after it"),
    "two functions in a call": ("<tool_call><function=f>{}</function><function=f>{}</function></tool_call>", "no JSON"),
    "a position": ("[f(1)]", "a name for every argument"),
    "a keyword twice": ("[f(a=1, a=2)]", "twice"),
    "an operation": ("[f(a=1 + 1)]", "1 + 1 is no value"),
    "a tuple": ("[f(a=(1, 2))]", "is no value"),
    "an unpacked object": ("[f(**{})]", "without **"),
    "infinity": ("[f(a=1e999)]", "too large"),
    "code": ("<|python_tag|>print(1)", "no calls in JSON after"),
    "an empty list": ("[TOOL_CALLS][]", "no calls in JSON after"),
    "a name twice": ('[TOOL_CALLS]f[ARGS]{"a": 1, "a": 2}', "twice"),
    "deep": ("[f(a=" + "[" * 80 + "]" * 80 + ")]", "more than 64 brackets"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_of_a_native_form_says_why(name):
    text, reason = MALFORMED[name]
    assert all(call.problem for call in parse_message(text, SCHEMAS).calls)
    assert reason in parse_message(text, SCHEMAS).calls[0].problem


@pytest.mark.parametrize("text", [
    'I call {"name": "f", "parameters": {"a": 1}}', '{"name": "f", "parameters": {"a": 1}} is what I call', '{"result": 42}',
    "[1, 2]", "```json\n{}\n```", "<function=f><parameter=a>1",
])  # fmt: skip
def test_prose_and_what_is_not_closed_are_no_calls(text):
    assert not [call for call in parse_message(text, SCHEMAS).calls if not call.problem]


def test_texts_of_parameters_are_converted_where_the_schema_allows_no_text():
    schema = {"properties": {"n": {"type": ["integer", "null"]}, "t": {"type": ["string", "integer"]}, "e": {"enum": ["1", 2]}}}
    text = "".join(
        f"<parameter={key}>{value}</parameter>" for key, value in (("n", "null"), ("t", "5"), ("e", "1"), ("x", "[3]"))
    )
    call = parse_message(f"<function=g>{text}</function>", {"g": schema}).calls[0]
    assert call.parameters == {"n": None, "t": "5", "e": "1", "x": [3]}


def test_many_marks_are_parsed_fast():
    start = time.process_time()
    for mark in ("<|python_tag|>", "[TOOL_CALLS]", "<function=f>", "[TOOL_CALLS]f[ARGS]{", '{"', "[f("):
        parse_message(mark * 1500)
    assert time.process_time() - start < 1
