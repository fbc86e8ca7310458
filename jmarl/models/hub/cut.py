"""Cut prompts that are too long on the left, inside the chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jmarl.config import Chat, as_chat
from jmarl.models.hub.messages import ChatPrompt, as_prompt
from jmarl.models.hub.special_tokens import encode_text
from jmarl.models.hub.template import MARKER, render
from jmarl.models.hub.tokenize import encode_prompt, known_ends, without_end


class NoRoom(ValueError):
    """There is no room for a token of a prompt."""


def cut_prompt(
    tokenizer: Any,
    row: list[int],
    prompt: Any,
    room: int,
    chat: Chat,
    stop: Collection[int] | None = None,
    whole: bool = True,
) -> list[int]:
    """Return an encoded prompt, cut on the left to `room` tokens if it is longer. Raises NoRoom if none of it fits.

    whole: the row is the prompt; False: it is a conversation that ends with it.
    """
    if len(row) <= room:
        return row
    if not isinstance(prompt := as_prompt(prompt), ChatPrompt):
        return cut_left(tokenizer, row, room, chat, stop)
    if whole:
        return cut_messages(tokenizer, prompt, room, chat, stop)
    return cut_left(tokenizer, row, room, dataclasses.replace(chat, on=True), stop)


def cut_left(
    tokenizer: Any, row: Sequence[int], max_tokens: int, chat: bool | Chat = False, stop: Collection[int] | None = None
) -> list[int]:
    """Cut an encoded prompt on the left to `max_tokens`.

    A beginning-of-sequence token at the start stays. With `chat` the template's tokens before and after a user's message stay,
    and the message loses its first tokens; a conversation of several turns loses its oldest tokens, also within a message. With
    chat=False a template in the prompt is cut like other text. stop: as for `encode_prompt`.
    """
    before, after = [], []
    if chat:
        before, after = template_ids(tokenizer, chat, stop)
    elif row[0] == tokenizer.bos_token_id:
        before = list(row[:1])
    room = max_tokens - len(before) - len(after)
    if room < 1:
        template = f", of which the chat template takes {len(before) + len(after)}" if chat else ""
        raise NoRoom(f"there is room for {max_tokens} tokens of a prompt{template}: lower max_new_tokens")
    return [*before, *row[len(before) : len(row) - len(after)][-room:], *after]


def cut_messages(
    tokenizer: Any, prompt: ChatPrompt, max_tokens: int, chat: bool | Chat = True, stop: Collection[int] | None = None
) -> list[int]:
    """Encode messages in the chat template, without the characters at their beginning that leave no room for the others.

    The template stays whole, with the role of each message. The oldest messages lose their text first, then those of role
    system, then the last one. Raises NoRoom if the template takes all `max_tokens`. stop: as for `encode_prompt`.
    """
    last = len(prompt.messages) - 1
    order = sorted(range(last + 1), key=lambda i: 2 if i == last else prompt.messages[i]["role"] == "system")

    def encoded(cut: int) -> list[int]:
        messages = [dict(message) for message in prompt.messages]
        for i in order:
            content = messages[i]["content"]
            messages[i]["content"], cut = content[cut:], max(cut - len(content), 0)
        return encode_prompt(tokenizer, ChatPrompt(messages), chat, stop=stop)

    too_few, enough = 0, max(sum(len(message["content"]) for message in prompt.messages) - 1, 0)
    row = encoded(enough)
    if len(row) > max_tokens:
        raise NoRoom(
            f"there is room for {max_tokens} tokens of a prompt, and the chat template of its {last + 1} messages takes "
            f"{len(row) - 1}: lower max_new_tokens, or give fewer messages"
        )
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if len(shorter := encoded(middle)) <= max_tokens:
            enough, row = middle, shorter
        else:
            too_few = middle
    return row


def template_ids(tokenizer: Any, chat: bool | Chat = True, stop: Collection[int] | None = None) -> tuple[list[int], list[int]]:
    """Return the token ids of the chat template before and after a user's message. stop: as for `encode_prompt`."""
    before, _, after = render(tokenizer, [{"role": "user", "content": MARKER}], as_chat(chat)).partition(MARKER)
    ids = without_end(encode_text(tokenizer, after), known_ends(tokenizer) if stop is None else stop)
    return encode_text(tokenizer, before), ids
