"""What a message of an agent says, read and written: calls of tools, and an answer.

    <tool_call>{"name": "calculator", "parameters": {"expression": "2 * 21"}}</tool_call>
    <answer>42</answer>

Calls are read first; an answer is looked for in what is left, so that neither can be hidden in the other. Nothing else in a
message has a meaning: `<tool_result>` is text. A message is read up to `MAX_MESSAGE` characters, a call has at most `MAX_CALL`
and `MAX_BRACKETS` brackets, and of several answers the first counts. All of it takes time in proportion to the length.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_MESSAGE, MAX_CALL, MAX_BRACKETS, MAX_DIGITS = 20_000, 6000, 64, 400
OPEN, CLOSE = "<tool_call>", "</tool_call>"
ANSWER, END = "<answer>", "</answer>"
STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
FORM = 'write <tool_call>{"name": "...", "parameters": {...}}</tool_call>'


class Call(NamedTuple):
    """A call; problem: why it cannot be read, else empty."""

    name: str
    parameters: Any
    problem: str = ""


class Said(NamedTuple):
    calls: tuple[Call, ...]
    refused: int  # calls beyond the number that is allowed
    answer: str  # empty: none
    unclosed: bool  # the message ends within a call


def read(message: str, max_calls: int) -> Said:
    """Of one message. Calls beyond `max_calls` are counted, not read."""
    message = message[:MAX_MESSAGE]
    inside, rest, at = [], [], 0
    while (start := message.find(OPEN, at)) >= 0 and (end := message.find(CLOSE, start)) >= 0:
        rest.append(message[at:start])
        inside.append(message[start + len(OPEN) : end])
        at = end + len(CLOSE)
    rest.append(message[at:])
    calls = tuple(read_call(text) for text in inside[:max_calls])
    return Said(calls, len(inside) - len(calls), read_answer("\n".join(rest)), start >= 0)


def read_answer(text: str) -> str:
    start = text.find(ANSWER)
    end = text.find(END, start)
    return text[start + len(ANSWER) : end].rpartition(ANSWER)[2].strip() if 0 <= start < end else ""


def written(calls: Sequence[Mapping[str, Any]], answer: str) -> str:
    """A message of calls and an answer, if there is one."""
    lines = [f"{OPEN}{json.dumps(call, ensure_ascii=False)}{CLOSE}" for call in calls]
    return "\n".join([*lines, *([f"{ANSWER}{answer}{END}"] if answer else [])])


def notes_on(said: Said, silent: bool, max_calls: int) -> tuple[str, ...]:
    """What was wrong with the form of a message."""
    notes = []
    if said.unclosed:
        notes.append(f"The last message ended within a call: close it with {CLOSE}.")
    elif silent and not said.calls:
        notes.append(f"The last message had no call and no answer: write {OPEN} or {ANSWER}.")
    if said.refused:
        notes.append(f"{said.refused} more calls were not made: at most {max_calls} a message.")
    return tuple(notes)


def read_call(text: str) -> Call:
    text = text.strip()
    while text.startswith(OPEN):  # a tag too many
        text = text[len(OPEN) :].lstrip()
    try:
        return Call(*_checked(text))
    except ValueError as error:
        return Call("", {}, str(error))


def _checked(text: str) -> tuple[str, Any]:
    """Name and parameters; what is wrong is a ValueError."""
    if len(text) > MAX_CALL:
        raise ValueError(f"the call has {len(text)} characters: at most {MAX_CALL}")
    if len(re.findall(r"[\[{]", STRING.sub("", text))) > MAX_BRACKETS:
        raise ValueError(f"the call has more than {MAX_BRACKETS} brackets")
    try:
        call = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number, parse_int=_whole, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"the call is no JSON ({error.msg}, character {error.pos + 1}): {FORM}") from None
    if not isinstance(call, dict) or set(call) != {"name", "parameters"} or not isinstance(call["name"], str):
        raise ValueError(f'a call has "name", a text, and "parameters", and nothing else: {FORM}')
    return call["name"], call["parameters"]


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits: at most {MAX_DIGITS}")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {twice[:40]!r} stands twice in an object")
    return found
