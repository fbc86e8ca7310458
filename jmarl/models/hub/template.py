"""Apply chat templates to messages, whatever roles and orders a template refuses, and with a clock that stands still.

A template that refuses or leaves out the role system gets the instruction in the first user message; one that wants user and
assistant in turn gets neighbors of one role as one message. What it refuses otherwise is an error. Contents are protected
(`special_tokens`), so that they write no special tokens. Left out: templates of the tokenizer's own by name (tool_use).
"""

from __future__ import annotations

import datetime
import functools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import TemplateError

from jmarl.config import Chat
from jmarl.models.hub.special_tokens import Message, Protected, protect_messages

MARKER = "\u241e"  # a character that no chat template writes


class TemplateRefusal(ValueError):
    """A chat template refuses messages."""


def render(tokenizer: Any, messages: Sequence[Message], chat: Chat, add_generation_prompt: bool = True) -> Protected:
    """Apply the chat template to messages, up to the beginning of the assistant's answer.

    Raises ValueError if there is no template, and TemplateRefusal if it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "this tokenizer has no chat template (a base model?): use chat=False and prompts that are texts, or set "
            "tokenizer.chat_template"
        )
    first_error, left_out = None, ""
    protected, stand_ins = protect_messages(tokenizer, [*messages])
    for variant in _variants(protected):
        try:
            text = _apply(tokenizer, variant, chat, add_generation_prompt)
        except TemplateError as error:
            first_error = first_error or error
            continue
        left_out = _left_out(tokenizer, str(tokenizer.chat_template), tuple(message["role"] for message in variant), chat)
        if not left_out:
            return stand_ins._replace(text=text)
    roles = ", ".join(message["role"] for message in messages)
    raise TemplateRefusal(
        f"the chat template refuses messages of the roles {roles} ({first_error or f'it leaves out the role {left_out}'}): "
        "change the prompt (formatters, roles, system prompts), use prompts that are texts and chat=False, or set "
        "tokenizer.chat_template"
    ) from first_error


@functools.lru_cache(maxsize=256)
def _left_out(tokenizer: Any, template: str, roles: tuple[str, ...], chat: Chat) -> str:
    """Return a role of which the template leaves out a message, user or system; empty if it writes them all."""
    messages = [{"role": role, "content": f"{MARKER}{i}{MARKER}"} for i, role in enumerate(roles)]
    try:
        text = _apply(tokenizer, messages, chat, True)
    except TemplateError:  # a template that reads what messages say
        return ""
    return next((m["role"] for m in messages if m["role"] != "assistant" and m["content"] not in text), "")


def refuses_system(tokenizer: Any, chat: Chat) -> bool:
    """Return whether a template refuses the role system, or writes nothing of it."""
    messages = [{"role": "system", "content": MARKER}, {"role": "user", "content": "-"}]
    try:
        return MARKER not in _apply(tokenizer, messages, chat, True)
    except TemplateError:
        return True


def answer_start(tokenizer: Any, chat: Chat) -> str:
    """Return the white space that the template writes before an assistant's text, and a model writes in its completion."""
    return _answer_start(tokenizer, str(tokenizer.chat_template), chat)


@functools.lru_cache(maxsize=64)
def _answer_start(tokenizer: Any, template: str, chat: Chat) -> str:
    user = {"role": "user", "content": "-"}
    answered = render(tokenizer, [user, {"role": "assistant", "content": MARKER}], chat, False).plain.partition(MARKER)[0]
    asked = render(tokenizer, [user], chat).plain
    start = answered.removeprefix(asked)
    return start if answered.startswith(asked) and not start.strip() else ""


def after_opening(tokenizer: Any, text: str, chat: Chat) -> str:
    """Return an assistant's text without what the generation prompt has written of it already, such as <think>.

    Blanks around it may differ. The text is unchanged if it begins otherwise.
    """
    opening = _opening(tokenizer, str(tokenizer.chat_template), chat)
    words = r"\s*".join(map(re.escape, opening.split()))
    repeated = re.match(rf"\s*{words}(?!(?<=\w)\w)", text) if words else None
    if repeated is None:
        return text
    rest = text[repeated.end() :]
    return rest[len(os.path.commonprefix([opening[len(opening.rstrip()) :], rest])) :]


@functools.lru_cache(maxsize=64)
def _opening(tokenizer: Any, template: str, chat: Chat) -> str:
    """Return what the generation prompt writes after the assistant's header: where a template writes it before every answer,
    from the first token behind the special ones, as <think> is one."""
    user, answer = {"role": "user", "content": "-"}, {"role": "assistant", "content": MARKER}
    asked = render(tokenizer, [user], chat).plain
    answered = (render(tokenizer, [user, answer, *later], chat, False).plain for later in ([], [user]))
    headers = [text.partition(MARKER)[0] for text in answered if MARKER in text]
    if opening := max((asked.removeprefix(x) for x in headers if asked.startswith(x)), key=len, default=""):
        return opening
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.content in asked]
    start = max((asked.rfind(token.content) + len(token.content) for token in tokens if token.special), default=0)
    words = [asked.find(token.content, start) for token in tokens if not token.special]
    return asked[min((i for i in words if i >= 0), default=len(asked)) :]


def _apply(tokenizer: Any, messages: Sequence[Message], chat: Chat, add_generation_prompt: bool) -> str:
    """Apply the template. Raises TemplateError, also for what its expressions raise."""
    try:
        template = tokenizer.get_chat_template(tools=chat.template_kwargs.get("tools"))
        if chat.date is not None and "strftime_now" in template:
            template = _with_clock(template, chat.date)
        return tokenizer.apply_chat_template(
            [*messages],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **chat.template_kwargs,
        )
    except TemplateError:
        raise
    except Exception as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from error


def _with_clock(template: str, date: datetime.date) -> str:
    """Return a template in which strftime_now writes the beginning of a day. transformers passes no functions to templates."""
    time = datetime.datetime.combine(date, datetime.time())
    codes = [*(f"%{x}" for x in "aAbBcdDeFGHhIjmMpRSTuUVwWxXyYZz"), *(f"%-{x}" for x in "dmHIMSjyUW"), "%%"]
    replaced = "".join(f"|replace({code!r}, {time.strftime(code)!r})" for code in codes)
    first_line = re.sub(r"^[ \t]+(?={%(?!\+))", "", template)  # blanks that Jinja would remove at the beginning of a line
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}{{{{ '' }}}}{first_line}"


def _variants(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield messages that say the same, from those given to those that most templates accept."""
    yield [*messages]
    without_system = _without_system(messages)
    if without_system != [*messages]:
        yield without_system
    for variant in ([*messages], without_system):
        if (merged := _merged(variant)) != variant:
            yield merged


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
        if result and message["role"] == result[-1]["role"] and message["role"] in ("user", "assistant"):
            result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n\n{message['content']}"}
        else:
            result.append(message)
    return result
