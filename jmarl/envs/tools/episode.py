"""State of a tool-use episode, and how its calls and results are shown to agents.

What agents read is written from the parsed calls and the tools' results, never from the agents' own text. Results are indented
and stripped of control characters, so no result and no argument can look like another line of the prompt.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from jmarl.envs.tools.tool_calls import ToolCall
from jmarl.envs.tools.workspace import Calls

MAX_SHOWN_CALL, MAX_RESULT, MAX_HISTORY = 300, 800, 3000  # characters of one call, one result, and all of them


class Record(NamedTuple):
    """A call and its result, as they are shown."""

    call: str
    result: str


class ToolEpisode(NamedTuple):
    """State of an episode: plain data, so that it can be copied and pickled."""

    task: dict[str, Any]
    turn: int = 0  # steps so far
    records: tuple[Record, ...] = ()
    used_tools: tuple[str, ...] = ()  # needed tools that have succeeded
    gain: float = 0.0  # reward for needed tools so far
    penalty: float = 0.0  # reward for useless calls and empty messages so far; at most 0
    sandbox_calls: Calls = ()  # made in the workspace
    notes: tuple[str, ...] = ()  # on the form of the last message
    plan: str | None = None  # of a team's planner, for the caller to read


def format_task(state: ToolEpisode) -> str:
    """Return the question and the calls so far with their results."""
    return "\n".join([f"Question: {state.task['question']}", *format_history(state.records)])


def format_history(records: Sequence[Record]) -> list[str]:
    """Return lines of calls and results, newest last. The oldest are left out if all are longer than `MAX_HISTORY`."""
    entries, room = [], MAX_HISTORY
    for record in reversed(records):
        room -= len(record.call) + len(record.result)
        if room < 0:
            break
        entries.append(f"- {record.call}\n{indent(record.result)}")
    num_hidden = len(records) - len(entries)
    hidden = [f"({num_hidden} earlier calls are not shown)"] if num_hidden else []
    return hidden + entries[::-1]


def format_call(call: ToolCall) -> str:
    """Return a call in one line."""
    if call.problem:
        return "a call that cannot be read"
    text = clean(f"{call.name} {json.dumps(call.parameters, ensure_ascii=False)}")
    return cut(text.replace("\n", " "), MAX_SHOWN_CALL)  # the name of a call may be any text


def format_result(text: str) -> str:
    """Return a result, cleaned and cut."""
    return cut(clean(text), MAX_RESULT)


def indent(text: str) -> str:
    """Indent every line."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def clean(text: str) -> str:
    """Replace lone surrogates and invisible characters, such as control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def cut(text: str, max_characters: int) -> str:
    """Cut a long text and say how much is missing."""
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]} … ({len(text) - max_characters} more characters)"
