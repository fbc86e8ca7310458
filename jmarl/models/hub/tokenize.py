"""Convert between text and token ids: encode prompts, find stop tokens, decode completions.

Host world, no jax. Only prompts are encoded: training uses the sampled tokens of a completion, which are never decoded and
encoded again. A prompt that does not fit raises an error, since a cut prompt is another task; callers that want it cut use
`cut`. `template` applies chat templates, and `special_tokens` encodes texts.
Text becomes tokens and text again without a change, unless the tokenizer normalizes it (NFC, lower case) or has no token for a
character. Left out: padding (the sampler's buckets do it).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jmarl.config import Chat, as_chat
from jmarl.models.hub.messages import ChatPrompt, as_prompt, messages_of
from jmarl.models.hub.special_tokens import control_ids, encode_text, encode_texts, is_of_library, special_tokens
from jmarl.models.hub.template import (
    TemplateRefusal,
    after_opening,
    answer_ends,
    answer_start,
    encode_messages,
    generation_prompt,
    render,
)

# Tokens that end a turn or a document in the families jmarl loads, whatever the tokenizer calls its end of sequence.
STOP_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")
BLANK = "\u2581"  # how SentencePiece writes a blank


def by_agent(texts: Iterable[str]) -> str:
    """Join one text per agent, a line each, as the input of a team's critic or reward model."""
    return "\n".join(f"[Agent {n}] {text}" for n, text in enumerate(texts))


def chat_prompt(tokenizer: Any, text: str, system: str | None = None) -> str:
    """Apply the chat template to a user's message, up to the beginning of the assistant's answer."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return render(tokenizer, [*messages, {"role": "user", "content": text}], Chat(True))


def encode_prompt(
    tokenizer: Any,
    prompt: Any,
    chat: bool | Chat = False,
    system: str | None = None,
    special: Collection[str] | None = None,
    stop: Collection[int] | None = None,
) -> list[int]:
    """Return the token ids of a prompt of any length.

    It begins with what the tokenizer puts before a text (the beginning of sequence), unless a template or the prompt itself
    does that, and never ends with a token that ends completions.

    stop: the tokens that end completions; None: those that the tokenizer knows.
    """
    prompt = as_prompt(prompt)
    chat = as_chat(chat)
    if chat or isinstance(prompt, ChatPrompt):
        first = [] if system is None else [{"role": "system", "content": system}]
        row = encode_messages(tokenizer, [*first, *messages_of(prompt)], chat)
    else:
        row = _with_start(tokenizer, encode_text(tokenizer, prompt, special), text_start(tokenizer))
    return without_end(
        row, known_ends(tokenizer) if stop is None else stop, least=1
    )  # a first token may be the beginning of every text


def _with_start(tokenizer: Any, row: list[int], start: Sequence[int]) -> list[int]:
    """Return the token ids of a text after what the tokenizer puts before it, unless the text does that itself."""
    return row if tokenizer.bos_token_id is not None and row[:1] == [tokenizer.bos_token_id] else [*start, *row]


def text_start(tokenizer: Any) -> list[int]:
    """Return the token ids that the tokenizer puts before a text."""
    ids, text = (tokenizer.encode("a", add_special_tokens=added, verbose=False) for added in (True, False))
    size = len(ids) - len(text)
    return next((ids[:i] for i in range(size + 1) if ids[i : i + len(text)] == text), [])


def without_end(row: list[int], stop: Collection[int], least: int = 0) -> list[int]:
    """Return token ids without those at their end that end completions. least: how many tokens stay."""
    size = len(row)
    while size > least and row[size - 1] in stop:
        size -= 1
    return row[:size]


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[Any],
    max_context: int,
    max_new_tokens: int = 0,
    chat: bool | Chat = False,
    system: str | None = None,
    named: str = "prompt {}",
    special: Sequence[Collection[str]] | None = None,
    stop: Collection[int] | None = None,
) -> list[list[int]]:
    """Return the token ids of each prompt. Raises ValueError if one is empty or leaves no room for `max_new_tokens`.

    Args:
      prompts: texts, or lists of chat messages. What messages contain is text, whatever special tokens it spells.
      chat: whether prompts are users' messages, to which the chat template is applied. Otherwise a prompt that starts with the
        beginning-of-sequence token, as a template may have written it, gets no second one.
      system: a system message before each prompt.
      named: the name of a prompt in errors, formatted with its number.
      special: the special tokens that each prompt may write if it has no template; None: all that it spells.
      stop: the tokens that end completions; None: those that the tokenizer knows.
    """
    if isinstance(prompts, str):
        raise TypeError(f"prompts must be a list of strings, got one string: {prompts[:40]!r}")
    if system is not None and not chat:
        raise ValueError("system= needs chat=True: without a chat template there is no system message")
    prompts, rows = [*map(as_prompt, prompts)], []
    plain = [] if chat else [i for i, prompt in enumerate(prompts) if not isinstance(prompt, ChatPrompt)]
    allowed, start = [None if special is None else special[i] for i in plain], text_start(tokenizer) if plain else []
    encoded = dict(zip(plain, encode_texts(tokenizer, [prompts[i] for i in plain], allowed), strict=True))
    ends = known_ends(tokenizer) if stop is None else stop
    for i, prompt in enumerate(prompts):
        if i in encoded:
            row = without_end(_with_start(tokenizer, encoded[i], start), ends, least=1)
        else:
            with naming(named.format(i)):
                row = encode_prompt(tokenizer, prompt, chat, system, None if special is None else special[i], stop)
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


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of a prompt before the errors of its chat template."""
    try:
        yield
    except TemplateRefusal as error:
        raise ValueError(f"{name}: {error}") from error.__cause__


def follow_ups(
    tokenizer: Any,
    histories: Sequence[Sequence[int]],
    texts: Sequence[Any],
    max_context: int,
    max_new_tokens: int = 0,
    chat: bool | Chat = False,
    named: str = "prompt {} of a later turn",
    special: Sequence[Collection[str]] | None = None,
    stop: Collection[int] | None = None,
) -> list[list[int]]:
    """Append a new text to the tokens of each conversation (a prompt and its completion), which stay unchanged.

    With `chat` the text is the user's next message; a list of chat messages is always appended as messages. Raises ValueError
    as `encode_prompts` does, and has its arguments.
    """
    rows = []
    for i, (history, text) in enumerate(zip(histories, map(as_prompt, texts), strict=True)):
        with naming(named.format(i)):
            new = encode_follow_up(tokenizer, text, history[-1:], chat, None if special is None else special[i], stop)
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


def encode_follow_up(
    tokenizer: Any,
    text: Any,
    last: Sequence[int],
    chat: bool | Chat = False,
    special: Collection[str] | None = None,
    stop: Collection[int] | None = None,
) -> list[int]:
    """Return the token ids of the text that follows a completion: with `chat`, or for chat messages, in the template.

    last: the last token of the completion. If it ends completions, the end of the message is not written a second time. The
        token with which the next message begins is, whatever ended the completion (GLM ends them with those tokens).
    stop: the tokens that end completions; None: those that the tokenizer knows.
    """
    text, stop, chat = as_prompt(text), known_ends(tokenizer) if stop is None else stop, as_chat(chat)
    if not (chat or isinstance(text, ChatPrompt)):
        return without_end(encode_continuation(tokenizer, text, special), stop)
    new = encode_messages(tokenizer, messages_of(text), chat, follows=True)
    if {*last} & {*stop}:
        new = _after_end(tokenizer, chat, new, {*last}, {*stop})
    elif new[:1] == [*last]:
        new = new[1:]
    return without_end(new, stop)


def _after_end(tokenizer: Any, chat: Chat, new: list[int], last: set[int], stop: set[int]) -> list[int]:
    """Return what a template writes after a message whose end is written: without what it writes after every answer, up to the
    first token of that which is in `stop`, else the first control token; or without the end `last` after blanks."""
    for ends in _answer_ends(tokenizer, str(tokenizer.chat_template), chat):
        same = os.path.commonprefix([new, ends])
        for ids in (stop, special_tokens(tokenizer).numbers):
            if size := next((i + 1 for i, token in enumerate(same) if token in ids), 0):
                return new[size:]
    end = next((i for i, token in enumerate(new) if token in stop), len(new))
    again = last & {*new[end : end + 1]} and not _decode(tokenizer, new[:end], skip=False).strip()
    return new[end + 1 :] if again else new


@functools.lru_cache(maxsize=64)
def _answer_ends(tokenizer: Any, template: str, chat: Chat) -> list[list[int]]:
    """Return the token ids after an answer that nothing follows, and those after it whatever follows, without the control token
    with which headers begin, that of the generation prompt."""
    last, later = answer_ends(tokenizer, chat)
    prompt = control_ids(tokenizer, encode_text(tokenizer, generation_prompt(tokenizer, chat)))
    always = [*os.path.commonprefix([encode_text(tokenizer, text) for text in later])] if prompt and len(later) > 1 else []
    size = always.index(prompt[0]) if prompt and prompt[0] in always else len(always)
    return [encode_text(tokenizer, last), always[:size]]


# --- completions -------------------------------------------------------------------------------------------------------


def stop_ids(tokenizer: Any, others: Iterable[int] = ()) -> tuple[int, ...]:
    """Return ids that end a completion, see `known_ends`. Raises ValueError if there is none."""
    ids = known_ends(tokenizer, others)
    if not ids:
        raise ValueError(
            "no token ends a completion: the tokenizer has no eos_token, and generation_config.json and config.json have no "
            'eos_token_id that is a token; set tokenizer.eos_token, such as tokenizer.eos_token = "</s>"'
        )
    return ids


def known_ends(tokenizer: Any, others: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the end of sequence, the others that have a token, then every `STOP_TOKENS` that is a special token.

    others: end tokens of the model's own files.
    """
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids += [i for i in others if tokenizer.convert_ids_to_tokens(i) is not None]
    ids += [special[token] for token in STOP_TOKENS if token in special]
    return tuple(dict.fromkeys(ids))


def encode_answer(tokenizer: Any, text: str, chat: bool | Chat = False, special: Collection[str] | None = None) -> list[int]:
    """Return the token ids of a text that follows a prompt as its completion, without the token that ends it.

    With `chat` it is text as a message of the assistant is, without what the generation prompt has written of it (<think>).
    special: the special tokens that it may write without a chat; None: all that it spells.
    """
    if not chat:
        return encode_continuation(tokenizer, text, special)
    text = after_opening(tokenizer, text, as_chat(chat))
    start = answer_start(tokenizer, as_chat(chat))
    return encode_continuation(tokenizer, text if text.startswith(start) else start + text, special_tokens(tokenizer).own)


def encode_completion(
    tokenizer: Any,
    text: str,
    end: int,
    chat: bool | Chat = False,
    special: Collection[str] | None = None,
    stop: Collection[int] = (),
) -> list[int]:
    """Return the token ids of a completion and `end` after them: once, also if the text of a data set ends with it.

    Other arguments as for `encode_answer`.
    stop: other tokens that end completions. Without a chat, a text that ends with one of them keeps it in place of `end`.
    """
    text_end = text.rstrip()
    for token in (end, *stop) if special is None else ():
        ending = tokenizer.convert_ids_to_tokens(token)
        if text_end.endswith(ending):
            return [*encode_answer(tokenizer, text_end.removesuffix(ending), chat, special), end if chat else token]
    return [*encode_answer(tokenizer, text, chat, special), end]


def message_end(tokenizer: Any, chat: bool | Chat) -> int | None:
    """Return the first token that the chat template writes after an assistant's message."""
    return _message_end(tokenizer, str(tokenizer.chat_template), as_chat(chat))


@functools.lru_cache(maxsize=64)
def _message_end(tokenizer: Any, template: str, chat: Chat) -> int | None:
    return next(iter(encode_messages(tokenizer, messages_of("-"), chat, follows=True)), None)


def encode_continuation(tokenizer: Any, text: str, special: Collection[str] | None = None) -> list[int]:
    """Return the token ids of a text that follows another one, without the blank that SentencePiece puts before a text.

    special: the special tokens that it may write; None: all that it spells.
    """
    if _adds_blank(tokenizer):
        for anchor in ("\n", ".", "a"):
            head = tokenizer.encode(anchor, add_special_tokens=False)
            ids = encode_text(tokenizer, anchor + text, special)
            if ids[: len(head)] == head:
                return ids[len(head) :]
    return encode_text(tokenizer, text, special)


@functools.lru_cache(maxsize=64)
def _adds_blank(tokenizer: Any) -> bool:
    """Return whether a text gets a blank before it: by SentencePiece, or byte-level with add_prefix_space."""
    first = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))[:1]
    return bool(first) and first[0].startswith((BLANK, "\u0120"))


@functools.lru_cache(maxsize=64)
def _strips_blank(tokenizer: Any) -> bool:
    """Return whether decoding takes the blank before the first token away."""
    ids = tokenizer.encode("a a", add_special_tokens=False)
    words = "".join(tokenizer.convert_ids_to_tokens(ids))
    parts = ("".join(_decode(tokenizer, part) for part in (ids[:i], ids[i:])) for i in range(1, len(ids)))
    return BLANK in words and any(text != _decode(tokenizer, ids) for text in parts)


def _decode(tokenizer: Any, row: Sequence[int], skip: bool = True) -> str:
    return tokenizer.decode(row, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def decode(
    tokenizer: Any, token_rows: Iterable[Sequence[int] | np.ndarray], skip: bool = True, shown: Collection[str] = ()
) -> list[str]:
    """Return the text of each row of token ids, with spaces unchanged.

    A row continues a text, as a completion does, so a blank at its beginning stays, unless it begins with a special token.
    skip: leave out special tokens, except those that are `shown`.
    """
    rows = [[*map(int, row)] for row in token_rows]
    if skip and shown:
        rows, skip = drop_special_tokens(tokenizer, rows, shown)
    if not _strips_blank(tokenizer):
        return _decode_rows(tokenizer, rows, skip)
    before, special = tokenizer.encode("a", add_special_tokens=False), {*tokenizer.all_special_ids}
    size, whole = len(_decode(tokenizer, before)), [not row or row[0] in special for row in rows]
    texts = _decode_rows(tokenizer, [row if own else [*before, *row] for row, own in zip(rows, whole, strict=True)], skip)
    return [text if own else text[size:] for text, own in zip(texts, whole, strict=True)]


def _decode_rows(tokenizer: Any, rows: Sequence[Sequence[int]], skip: bool) -> list[str]:
    """Return what `_decode` returns for each row, in one call where the tokenizer can."""
    if is_of_library(tokenizer):
        return tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=skip)
    return [_decode(tokenizer, row, skip) for row in rows]


def drop_special_tokens(tokenizer: Any, rows: list[list[int]], shown: Collection[str]) -> tuple[list[list[int]], bool]:
    """Return rows without special tokens, except those that are `shown`, and False; the same rows and True if there are none to
    show, because decoding then skips them all."""
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    if not set(special.values()) & {*shown}:
        return rows, True
    skipped = {i for i, content in special.items() if content not in shown}
    return [[t for t in row if t not in skipped] for row in rows], False
