"""Convert between text and token ids: encode prompts, apply chat templates, find stop tokens, decode completions.

Host world, no jax. Only prompts are encoded: training uses the sampled tokens of a completion, which are never decoded and
encoded again. A prompt that does not fit raises an error, since a cut prompt is another task; callers that want it cut use
`cut_left`, or `cut_messages` for messages. Left out: padding (the sampler's buckets do it), and protection against special
tokens spelled out in a prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# Tokens that end a turn or a document in the families jmarl loads, whatever the tokenizer calls its end of sequence.
STOP_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")
MARKER = "\u241e"  # a character that no chat template writes


class ChatPrompt(str):
    """Chat messages as a prompt, encoded with the chat template whatever the setting `chat`.

    As a text, for logs, keys of dicts and critics, it is each message after its role: "[user] Hello".

    Args:
        messages: dicts with role and content.
    """

    messages: tuple[dict[str, str], ...]

    def __new__(cls, messages: Iterable[Mapping[str, Any]]) -> ChatPrompt:
        own = tuple({"role": m["role"], "content": m["content"]} for m in messages)
        prompt = super().__new__(cls, "\n".join(f"[{m['role']}] {m['content']}" for m in own))
        prompt.messages = own
        return prompt

    def __getnewargs__(self) -> tuple[Any]:  # pickled and copied with its messages
        return (self.messages,)


def as_prompt(value: Any) -> Any:
    """Return a list of chat messages (dicts with role and content) as a `ChatPrompt`, and any other value as it is.

    Raises ValueError for an empty list, and for messages without the two texts.
    """
    if not isinstance(value, list | tuple):
        return value
    if not value or not all(isinstance(m, Mapping) and _is_message(m) for m in value):
        raise ValueError(f"a prompt is a text or a list of messages, dicts with the texts role and content; got {value!r:.80}")
    return ChatPrompt(value)


def with_instruction(text: str, prompt: str) -> str:
    """Return a prompt after an instruction: its first message of role system in a `ChatPrompt`, else its first lines."""
    if isinstance(prompt, ChatPrompt):
        return ChatPrompt([{"role": "system", "content": text}, *prompt.messages])
    return f"{text}\n\n{prompt}"


def _is_message(message: Mapping) -> bool:
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def by_agent(texts: Iterable[str]) -> str:
    """Join one text per agent, a line each, as the input of a team's critic or reward model."""
    return "\n".join(f"[Agent {n}] {text}" for n, text in enumerate(texts))


def chat_messages(tokenizer: Any, messages: Sequence[Any]) -> str:
    """Apply the chat template to messages (dicts of role and content), up to the beginning of the assistant's answer."""
    if tokenizer.chat_template is None:
        raise ValueError(
            "this tokenizer has no chat template (a base model?): use chat=False and prompts that are texts, or set "
            "tokenizer.chat_template"
        )
    return tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True)


def chat_prompt(tokenizer: Any, text: str, system: str | None = None) -> str:
    """Apply the chat template to a user's message, up to the beginning of the assistant's answer."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return chat_messages(tokenizer, [*messages, {"role": "user", "content": text}])


def encodable(text: str) -> str:
    """Escape lone surrogates, which no tokenizer accepts, for example as \\ud800."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def prompt_text(tokenizer: Any, prompt: str, chat: bool = False, system: str | None = None) -> tuple[str, bool]:
    """Return the text to encode for a prompt, and whether the tokenizer should add special tokens.

    It should not if the text has them: from the chat template, or because it starts with the beginning-of-sequence token.
    """
    if isinstance(prompt, ChatPrompt):
        first = [] if system is None else [{"role": "system", "content": system}]
        return encodable(chat_messages(tokenizer, [*first, *prompt.messages])), False
    text = encodable(chat_prompt(tokenizer, prompt, system) if chat else prompt)
    return text, not (chat or (tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)))


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[Any],
    max_context: int,
    max_new_tokens: int = 0,
    chat: bool = False,
    system: str | None = None,
    named: str = "prompt {}",
) -> list[list[int]]:
    """Return the token ids of each prompt. Raises ValueError if one is empty or leaves no room for `max_new_tokens`.

    Args:
      prompts: texts, or lists of chat messages.
      chat: whether prompts are users' messages, to which the chat template is applied. Otherwise a prompt that starts with the
        beginning-of-sequence token, as a template may have written it, gets no second one.
      system: a system message before each prompt.
      named: the name of a prompt in errors, formatted with its number.
    """
    if isinstance(prompts, str):
        raise TypeError(f"prompts must be a list of strings, got one string: {prompts[:40]!r}")
    if system is not None and not chat:
        raise ValueError("system= needs chat=True: without a chat template there is no system message")
    rows = []
    for i, prompt in enumerate(prompts):
        prompt = as_prompt(prompt)
        text, special = prompt_text(tokenizer, prompt, chat, system)
        row = tokenizer.encode(text, add_special_tokens=special, verbose=False)
        if not row:
            raise ValueError(f"{named.format(i)} is empty: there is no token to continue from")
        if len(row) + max_new_tokens > max_context:
            raise ValueError(
                f"{named.format(i)} ({prompt[:40]!r}...) has {len(row)} tokens; with max_new_tokens={max_new_tokens} that is "
                f"{len(row) + max_new_tokens}, more than the context of {max_context}: shorten it, lower max_new_tokens, or "
                "set long_prompts='truncate_left'"
            )
        rows.append(row)
    return rows


def follow_ups(
    tokenizer: Any,
    histories: Sequence[Sequence[int]],
    texts: Sequence[Any],
    max_context: int,
    max_new_tokens: int = 0,
    chat: bool = False,
    named: str = "prompt {} of a later turn",
) -> list[list[int]]:
    """Append a new text to the tokens of each conversation (a prompt and its completion), which stay unchanged.

    With `chat` the text is the user's next message; a list of chat messages is always appended as messages. Raises ValueError
    as `encode_prompts` does.
    """
    rows = []
    for i, (history, text) in enumerate(zip(histories, texts, strict=True)):
        text = as_prompt(text)
        as_chat = chat or isinstance(text, ChatPrompt)
        added = encodable(chat_follow_up(tokenizer, text) if as_chat else text)
        new = tokenizer.encode(added, add_special_tokens=False, verbose=False)
        new = new[1:] if as_chat and new[:1] == list(history[-1:]) else new  # the completion already has the end of its message
        if not new:
            raise ValueError(f"{named.format(i)} is empty: there is no token to continue from")
        row = [*history, *new]
        if len(row) + max_new_tokens > max_context:
            raise ValueError(
                f"{named.format(i)} ({text[:40]!r}...) makes {len(row)} tokens with its history; with "
                f"max_new_tokens={max_new_tokens} that is {len(row) + max_new_tokens}, more than the context of {max_context}: "
                "use fewer or shorter turns, history=none, or long_prompts (truncate_left or drop)"
            )
        rows.append(row)
    return rows


def chat_follow_up(tokenizer: Any, text: str) -> str:
    """Return the chat template's text after an assistant's message to which the user answers `text`.

    It is the end of the assistant's message, the user's (or those of a `ChatPrompt`), and the beginning of the assistant's next
    message.
    """
    answer = text.messages if isinstance(text, ChatPrompt) else [{"role": "user", "content": text}]
    messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARKER}, *answer]
    return chat_messages(tokenizer, messages).partition(MARKER)[2]


def cut_left(tokenizer: Any, row: Sequence[int], max_tokens: int, chat: bool = False) -> list[int]:
    """Cut an encoded prompt on the left to `max_tokens`.

    A beginning-of-sequence token at the start stays. With `chat` the template's tokens before and after a user's message stay,
    and the message loses its first tokens; a conversation of several turns loses its oldest tokens, also within a message. With
    chat=False a template in the prompt is cut like other text.
    """
    before, after = template_ids(tokenizer) if chat else (list(row[:1]) if row[0] == tokenizer.bos_token_id else [], [])
    room = max_tokens - len(before) - len(after)
    if room < 1:
        template = f", of which the chat template takes {len(before) + len(after)}" if chat else ""
        raise ValueError(f"there is room for {max_tokens} tokens of a prompt{template}: lower max_new_tokens")
    return [*before, *row[len(before) : len(row) - len(after)][-room:], *after]


def cut_messages(tokenizer: Any, prompt: ChatPrompt, max_tokens: int) -> list[int]:
    """Encode messages in the chat template, without the characters at their beginning that leave no room for the others.

    The template stays whole, with the role of each message. The oldest messages lose their text first, then those of role
    system, then the last one. Raises ValueError if the template takes all `max_tokens`.
    """
    last = len(prompt.messages) - 1
    order = sorted(range(last + 1), key=lambda i: 2 if i == last else prompt.messages[i]["role"] == "system")

    def encoded(cut: int) -> list[int]:
        messages = [dict(message) for message in prompt.messages]
        for i in order:
            content = messages[i]["content"]
            messages[i]["content"], cut = content[cut:], max(cut - len(content), 0)
        text, special = prompt_text(tokenizer, ChatPrompt(messages))
        return tokenizer.encode(text, add_special_tokens=special, verbose=False)

    too_few, enough = 0, max(sum(len(message["content"]) for message in prompt.messages) - 1, 0)
    row = encoded(enough)
    if len(row) > max_tokens:
        raise ValueError(
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


def template_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids of the chat template before and after a user's message."""
    before, _, after = chat_prompt(tokenizer, MARKER).partition(MARKER)
    return tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in (before, after))


def stop_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return ids that end a completion: the end of sequence, then every `STOP_TOKENS` that is a special token."""
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids += [special[token] for token in STOP_TOKENS if token in special]
    return tuple(dict.fromkeys(ids))


def decode(
    tokenizer: Any, token_rows: Iterable[Sequence[int] | np.ndarray], skip: bool = True, shown: Collection[str] = ()
) -> list[str]:
    """Return the text of each row of token ids, with spaces unchanged.

    skip: leave out special tokens, except those that are `shown`.
    """
    rows = [[int(t) for t in row] for row in token_rows]
    if skip and shown:
        rows, skip = drop_special_tokens(tokenizer, rows, shown)
    return [tokenizer.decode(row, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for row in rows]


def drop_special_tokens(tokenizer: Any, rows: list[list[int]], shown: Collection[str]) -> tuple[list[list[int]], bool]:
    """Return rows without special tokens, except those that are `shown`, and False; the same rows and True if there are none to
    show, because decoding then skips them all."""
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    if not set(special.values()) & {*shown}:
        return rows, True
    skipped = {i for i, content in special.items() if content not in shown}
    return [[t for t in row if t not in skipped] for row in rows], False
