"""Read chat messages that data sets, environments and formatters give: whole, or an error (host code, no jax).

A message is a dict with the texts `role` and `content`, or `from` and `value` as ShareGPT names them. Roles are system, user
and assistant; what MRLM calls environment is a user. Refused, because a prompt would silently lack it: tool calls and their
results, reasoning beside the content, names, weights, and content that is a list of parts (images). Fields without a value
(None, empty) are ignored: `datasets` adds them to all messages of a column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
MRLM_ROLES = {"environment": "user"}  # which chat templates do not know
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # columns of data that is not only text
NAME = re.compile(r"[A-Za-z0-9_-]+")  # what a role must be: chat templates write it among their control tokens
NOTES = ("metadata",)  # of MRLM's messages: no chat template reads it
FIXED = ("role", "type", "id", "tool_call_id")  # fields that stay as they are, where they are names
Message = Mapping[str, Any]
KEY = "the name of a field"
Change = Callable[[str, str], str]  # of a text in a field


def check_role(role: Any) -> str:
    """Return a role. Raises ValueError unless it is a `NAME`."""
    if not isinstance(role, str) or not NAME.fullmatch(role):
        raise ValueError(f"a message has the role {role!r:.80}: a role is a name of letters, digits, _ and -; give user")
    return str(role)


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of dicts, as chat messages are."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(m, Mapping) for m in value)


def is_empty(value: Any) -> bool:
    """Return whether a field has no value: None, or an empty text, list or dict."""
    return value is None or (isinstance(value, str | Sequence | Mapping) and not len(value))


def read_messages(value: Any, place: str = "a prompt") -> tuple[dict[str, str], ...]:
    """Return a list of messages as dicts with the texts role and content. Raises ValueError for anything else.

    place: what errors call the list.
    """
    if not is_chat(value) or not value:
        raise ValueError(f"{place} is a text or a list of messages, dicts with the texts role and content; got {value!r:.80}")
    return tuple(_read_message(message, f"message {i} of {place}") for i, message in enumerate(value))


def read_prompt(value: Any, place: str = "a prompt") -> tuple[dict[str, str], ...]:
    """Return the messages of a prompt. Raises ValueError as `read_messages`, and if the assistant wrote the last one."""
    messages = read_messages(value, place)
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{place} ends with a message of the assistant, which would have to answer itself: end it with a message of the "
            "user, or put the last message into the completion"
        )
    return messages


def _read_message(message: Mapping, place: str) -> dict[str, str]:
    """Return one message with role and content. place: what errors call it."""
    names = ("from", "value") if "role" not in message and "from" in message else ("role", "content")
    unread = [name for name, value in message.items() if name not in (*names, *NOTES) and not is_empty(value)]
    if unread:
        raise ValueError(
            f"{place} has {', '.join(map(str, unread))}, which jmarl does not read: a message has a role and a content. Write "
            "what the agent should read or say into the content, or leave the row out"
        )
    role, content = (message.get(name) for name in names)
    if not isinstance(role, str) or not isinstance(content, str):
        parts = ", not a list of parts (images are not supported)" if isinstance(content, list | tuple) else ""
        raise ValueError(
            f"{place} is not as it should be: a prompt is a text or a list of messages, dicts with the texts role and content"
            f"{parts}; got {dict(message)!r:.80}"
        )
    known = (SHAREGPT_ROLES if names[0] == "from" else MRLM_ROLES).get(role, role)
    if known not in ROLES:
        raise ValueError(
            f"{place} has the role {role!r}: allowed are {', '.join(ROLES)}. Most chat templates drop other roles; write tool "
            "calls and their results as text of the assistant and the user, or leave the row out"
        )
    return {"role": known, "content": content}


class ChatPrompt(str):
    """Chat messages as a prompt, encoded with the chat template whatever the setting `chat`.

    As a text, for logs, keys of dicts and critics, it is each message after its role: "[user] Hello".

    Args:
        messages: dicts with role and content. Raises ValueError for a role that is not a name, see `check_role`.
    """

    messages: tuple[dict[str, str], ...]

    def __new__(cls, messages: Iterable[Message]) -> ChatPrompt:
        own = tuple({"role": check_role(m["role"]), "content": m["content"]} for m in messages)
        prompt = super().__new__(cls, "\n".join(f"[{m['role']}] {m['content']}" for m in own))
        prompt.messages = own
        return prompt

    def __getnewargs__(self) -> tuple[Any]:  # pickled and copied with its messages
        return (self.messages,)


def as_prompt(value: Any) -> Any:
    """Return a list of chat messages (dicts with role and content) as a `ChatPrompt`, and any other value as it is.

    Raises ValueError for an empty list, and for messages that are not read whole; see `read_messages`.
    """
    return ChatPrompt(read_prompt(value)) if isinstance(value, list | tuple) else value


def messages_of(prompt: str) -> Sequence[Message]:
    """Return the messages of a prompt; a text is one of the user."""
    return prompt.messages if isinstance(prompt, ChatPrompt) else [{"role": "user", "content": prompt}]


def each_text(value: Any, change: Change, field: str = "") -> Any:
    """Return messages, or a value in them, with another text for each one, also for the names of fields.

    Roles, types and ids stay. change: gets a text and the field that it is in, `KEY` for the name of one. field: of the value.
    """
    if isinstance(value, str):
        return value if field in FIXED and NAME.fullmatch(value) else change(value, field)
    if isinstance(value, Mapping):
        result, number = dict[str, Any](), 0
        for name, part in value.items():
            changed = new = change(name, KEY)
            while changed in result:  # the number never falls, so that many equal names take linear time
                number += 1
                changed = f"{new}x{number}"
            result[changed] = each_text(part, change, name)
        return result
    return [each_text(x, change, field) for x in value] if isinstance(value, list | tuple) else value


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Put the texts of role system at the beginning of the next message of the user."""
    result, instructions = list[Message](), list[str]()
    for message in messages:
        if message["role"] == "system":
            instructions.append(message["content"])
        elif message["role"] == "user" and instructions:
            result.append({**message, "content": "\n\n".join([*instructions, message["content"]])})
            instructions = []
        else:
            result.append(message)
    return [*result, {"role": "user", "content": "\n\n".join(instructions)}] if instructions else result


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Join neighboring messages of one role, of the user or the assistant."""
    result = list[Message]()
    for message in messages:
        bare = all(m.keys() <= {"role", "content"} for m in (message, *result[-1:]))  # without calls
        if result and message["role"] == result[-1]["role"] and message["role"] in ("user", "assistant") and bare:
            result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n\n{message['content']}"}
        else:
            result.append(message)
    return result


FORMS = (list, _without_system, _merged, lambda messages: _merged(_without_system(messages)))  # of messages, that say the same
