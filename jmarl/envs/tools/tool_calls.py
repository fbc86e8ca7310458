"""Parse and format messages of tool use: tool calls and an answer.

    <tool_call>{"name": "calculator", "parameters": {"expression": "2 * 21"}}</tool_call>
    <answer>42</answer>

Calls are parsed first, then the answer in the remaining text, so neither can be hidden inside the other. Everything else in a
message is ignored, also `<tool_result>`, so an agent cannot invent results. Of several answers the first counts. Messages and
calls have size limits; parsing takes time proportional to the length. Texts about what is wrong with a call are written for the
agent that made it.

Left out: other formats of calls. `function_calls.py` reads those, for an environment in which functions are not run.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_MESSAGE, MAX_CALL = 20_000, 6000  # characters
MAX_CALLS = 8  # per message
MAX_BRACKETS = 64  # opening brackets of a call
MAX_DIGITS = 400  # of an integer
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
ANSWER_START, ANSWER_END = "<answer>", "</answer>"
JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
INSTRUCTIONS = (
    f"Write calls between {CALL_START} and {CALL_END}, at most {MAX_CALLS} a message, and read in the next turn "
    "what they return. When you know the answer, a number or a name, write only that between "
    f"{ANSWER_START} and {ANSWER_END}."
)
FORMAT_HINT = 'write <tool_call>{"name": "...", "parameters": {...}}</tool_call>'


class ToolCall(NamedTuple):
    """A tool call. If it cannot be read, name is empty and problem says why; else problem is empty."""

    name: str
    parameters: Any
    problem: str = ""


class ParsedMessage(NamedTuple):
    """What a message contains."""

    calls: tuple[ToolCall, ...]
    num_refused: int  # calls beyond `MAX_CALLS`; they are not parsed
    answer: str  # empty: none
    unclosed: bool  # the message ends inside a call


def parse_message(message: str) -> ParsedMessage:
    """Parse a message, up to `MAX_MESSAGE` characters and `MAX_CALLS` calls."""
    message = message[:MAX_MESSAGE]
    call_texts, other_texts, position = [], [], 0
    while (start := message.find(CALL_START, position)) >= 0 and (end := message.find(CALL_END, start)) >= 0:
        other_texts.append(message[position:start])
        call_texts.append(message[start + len(CALL_START) : end])
        position = end + len(CALL_END)
    other_texts.append(message[position:])
    calls = tuple(parse_call(text) for text in call_texts[:MAX_CALLS])
    answer = parse_tool_answer("\n".join(other_texts))
    return ParsedMessage(calls, len(call_texts) - len(calls), answer, unclosed=start >= 0)


def parse_tool_answer(text: str) -> str:
    """Return the first answer in a text; empty if there is none."""
    start = text.find(ANSWER_START)
    end = text.find(ANSWER_END, start)
    if not 0 <= start < end:
        return ""
    return text[start + len(ANSWER_START) : end].rpartition(ANSWER_START)[2].strip()


def format_message(calls: Sequence[Mapping[str, Any]], answer: str) -> str:
    """Return a message of calls and, unless it is empty, an answer."""
    lines = [f"{CALL_START}{json.dumps(call, ensure_ascii=False)}{CALL_END}" for call in calls]
    if answer:
        lines.append(f"{ANSWER_START}{answer}{ANSWER_END}")
    return "\n".join(lines)


def format_notes(message: ParsedMessage, has_content: bool) -> tuple[str, ...]:
    """Return what the agent reads about the form of its message. has_content: it has an answer or a call that can be read."""
    notes = []
    if message.unclosed:
        notes.append(f"The last message ended within a call: close it with {CALL_END}.")
    elif not has_content and not message.calls:
        notes.append(f"The last message had no call and no answer: write {CALL_START} or {ANSWER_START}.")
    if message.num_refused:
        notes.append(f"{message.num_refused} more calls were not made: at most {MAX_CALLS} a message.")
    return tuple(notes)


def parse_call(text: str) -> ToolCall:
    """Parse the text between the tags of a call."""
    text = text.strip()
    while text.startswith(CALL_START):  # models repeat the tag
        text = text[len(CALL_START) :].lstrip()
    try:
        return ToolCall(*_parse_json_call(text))
    except ValueError as error:
        return ToolCall("", {}, str(error))


def _parse_json_call(text: str) -> tuple[str, Any]:
    """Return name and parameters; raise ValueError if the text is no call."""
    if len(text) > MAX_CALL:
        raise ValueError(f"the call has {len(text)} characters: at most {MAX_CALL}")
    if len(re.findall(r"[\[{]", JSON_STRING.sub("", text))) > MAX_BRACKETS:
        raise ValueError(f"the call has more than {MAX_BRACKETS} brackets")
    try:
        call = json.loads(
            text,
            object_pairs_hook=_unique_names,
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
            parse_float=_parse_finite,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"the call is no JSON ({error.msg}, character {error.pos + 1}): {FORMAT_HINT}") from None
    if not isinstance(call, dict) or set(call) != {"name", "parameters"} or not isinstance(call["name"], str):
        raise ValueError(f'a call has "name", a text, and "parameters", and nothing else: {FORMAT_HINT}')
    return call["name"], call["parameters"]


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")  # NaN, Infinity


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits: at most {MAX_DIGITS}")
    return int(text)


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        repeated, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {repeated[:40]!r} stands twice in an object")
    return fields
