"""Parse and format messages of tool use: tool calls and an answer.

    <tool_call>{"name": "calculator", "parameters": {"expression": "2 * 21"}}</tool_call>
    <answer>42</answer>

Prompts ask for this form. Calls in the forms that models were taught (`formats/native_calls.py`) are read too: in `<tool_call>`
tags, as `<function=...>`, after `<|python_tag|>` (Llama 3) or `[TOOL_CALLS]` (Mistral), and without any mark, where the message
begins with the calls and has nothing else but an answer. Each part of a message is read once, as what its mark says.

Calls are parsed first, then the answer in the remaining text, so neither can be hidden inside the other. Everything else in a
message is ignored, also `<tool_result>`, so an agent cannot invent results. Of several answers the first counts. Messages and
calls have size limits; parsing takes time proportional to the length. Texts about what is wrong with a call are written for the
agent that made it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jmarl.envs.formats.native_calls import (
    FUNCTION_TAG,
    NameAndParameters,
    Schemas,
    call_of,
    decode_json,
    read_function_tag,
    read_json_call,
    read_python_calls,
)

MAX_MESSAGE = 20_000  # characters
MAX_CALLS = 8  # per message
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
ANSWER_START, ANSWER_END = "<answer>", "</answer>"
FUNCTION_START, FUNCTION_END, PYTHON_TAG, MISTRAL_MARK = "<function=", "</function>", "<|python_tag|>", "[TOOL_CALLS]"
SPECIAL_TOKENS = (CALL_START, CALL_END, ANSWER_START, ANSWER_END, PYTHON_TAG, MISTRAL_MARK, "[ARGS]", "[CALL_ID]")
_MARK = re.compile("|".join(map(re.escape, (CALL_START, FUNCTION_START, PYTHON_TAG, MISTRAL_MARK))))
# The end of calls that nothing closes.
_PART_END = re.compile(rf"{_MARK.pattern}|{ANSWER_START}|<\|[a-z_]{{1,30}}\|>|<(?:/s|eos|end_of_turn)>")
_NO_CALL = re.compile(r"(?:\s|<\|(?!python_tag)[a-z_]{1,30}\|>|<(?:/s|eos|end_of_turn)>)*")  # around calls without a mark
_BARE_CALLS = re.compile(r'\[?\s*\{\s*"|\[\s*[A-Za-z_][\w.]*\s*\(')
_MISTRAL_NAME = re.compile(r"([A-Za-z_][\w.-]{0,99})(?:\[CALL_ID\]\w{1,40})?(?:\[ARGS\])?\s*(?=\{)")
INSTRUCTIONS = (
    f"Write calls between {CALL_START} and {CALL_END}, at most {MAX_CALLS} a message, and read in the next turn "
    "what they return. When you know the answer, a number or a name, write only that between "
    f"{ANSWER_START} and {ANSWER_END}."
)


class ToolCall(NamedTuple):
    """A tool call. If it cannot be read, name is empty and problem says why; else problem is empty."""

    name: str
    parameters: Any
    problem: str = ""


class ParsedMessage(NamedTuple):
    """What a message contains."""

    calls: tuple[ToolCall, ...]
    num_refused: int  # calls beyond `MAX_CALLS`
    answer: str  # empty: none
    unclosed: bool  # the message ends inside a call


def parse_message(message: str, schemas: Schemas = {}) -> ParsedMessage:  # noqa: B006
    """Parse a message, up to `MAX_MESSAGE` characters and `MAX_CALLS` calls.

    schemas: of the parameters of the tools, by name; for calls that write every value as a text.
    """
    message = message[:MAX_MESSAGE]
    calls, other_texts, position = list[ToolCall](), list[str](), 0
    while mark := _MARK.search(message, position):
        new_calls, end = _calls_at(message, mark, schemas)
        if end is None:  # the message ends inside a call
            break
        other_texts.append(message[position : mark.start()])
        calls += new_calls
        position = end
    if not calls and mark is None:
        calls, position = _calls_without_mark(message)
    other_texts.append(message[position:])
    answer = parse_tool_answer("\n".join(other_texts))
    return ParsedMessage(tuple(calls[:MAX_CALLS]), max(0, len(calls) - MAX_CALLS), answer, unclosed=mark is not None)


def _calls_at(message: str, mark: re.Match[str], schemas: Schemas) -> tuple[list[ToolCall], int | None]:
    """Return the calls that follow a mark, and where they end; None if they are not closed."""
    if mark.group() in (CALL_START, FUNCTION_START):
        closing = CALL_END if mark.group() == CALL_START else FUNCTION_END
        if (end := message.find(closing, mark.start())) < 0:
            return [], None
        text = message[mark.start() : end + len(closing)]
        return [_parsed(lambda: _read_tagged(text.removesuffix(CALL_END), schemas))], end + len(closing)
    start = _NO_CALL.match(message, mark.end()).end()  # type: ignore[union-attr]
    calls, end = _calls_in_a_row(message, start, mistral=mark.group() == MISTRAL_MARK)
    if not calls or calls[-1].problem:
        part_end = _PART_END.search(message, mark.end())
        return calls or [ToolCall("", {}, f"there are no calls in JSON after {mark.group()}")], (
            part_end.start() if part_end else len(message)
        )
    return calls, end


def _read_tagged(text: str, schemas: Schemas) -> NameAndParameters:
    """Return name and parameters of a call in tags, of which `</tool_call>` was removed."""
    while text.startswith(CALL_START):  # models repeat the tag
        text = text[len(CALL_START) :].strip()
    if not text.startswith(FUNCTION_START):
        return read_json_call(text)
    if (function := FUNCTION_TAG.fullmatch(text)) is None:
        raise ValueError("write <function=name>, then the parameters, then </function>, and nothing else")
    return read_function_tag(function[1], function[2], schemas)


def _calls_without_mark(message: str) -> tuple[list[ToolCall], int]:
    """Return the calls that a message begins with, and where they end, if it has nothing else but an answer."""
    start = _NO_CALL.match(message).end()  # type: ignore[union-attr]
    if not _BARE_CALLS.match(message, start):
        return [], 0
    calls, end = _calls_in_a_row(message, start)
    if not calls or calls[-1].problem:
        return calls, 0
    rest = _NO_CALL.sub("", message[end:], count=1)
    return (calls, end) if not rest or rest.startswith(ANSWER_START) else ([], 0)


def _calls_in_a_row(message: str, start: int, mistral: bool = False) -> tuple[list[ToolCall], int]:
    """Return calls that follow each other, apart from blanks and semicolons, and where they end. The last one may have a
    problem."""
    calls, end = list[ToolCall](), start
    while end < len(message):
        position = re.compile(r"[\s;]*").match(message, end).end()  # type: ignore[union-attr]
        name = _MISTRAL_NAME.match(message, position) if mistral else None
        if message.startswith(MISTRAL_MARK, position) or not (name or message.startswith(("{", "["), position)):
            break
        try:
            if message[position] == "[" and not re.match(r"\[\s*\{", message[position : position + 100]):
                python = message[position:].partition(ANSWER_START)[0]
                python = python[: python.rindex("]") + 1] if "]" in python else python
                calls += [ToolCall(*call) for call in read_python_calls(python)]
                return calls, position + len(python)
            value, end = decode_json(message, name.end() if name else position)
            values = value if isinstance(value, list) else [value]
            calls += [ToolCall(*((name[1], entry) if name else call_of(entry))) for entry in values]
        except ValueError as error:
            return [*calls, ToolCall("", {}, str(error))], end
    return calls, end


def _parsed(read: Callable[[], NameAndParameters]) -> ToolCall:
    try:
        return ToolCall(*read())
    except ValueError as error:
        return ToolCall("", {}, str(error))


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
