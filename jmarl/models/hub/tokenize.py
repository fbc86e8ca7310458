"""Between text and token ids: encoding prompts, chat templates, stop tokens, decoding completions.

Host world, no jax. Only prompts are encoded: a sampled completion stays the tokens it was sampled as and is never decoded
and encoded again for training. A prompt that does not fit is an error, since a cut prompt is another task; `cut_left` cuts
where that is asked for. Left out: padding (the sampler's buckets do it), and guarding against special tokens spelled out in a
prompt's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# Tokens that end a turn or a document in the families jmarl loads, whatever the tokenizer calls its end of sequence.
STOP_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")


def by_agent(texts: Iterable[str]) -> str:
    """What is of each agent as one text, a line each: what a team's critic or reward model reads."""
    return "\n".join(f"[Agent {n}] {text}" for n, text in enumerate(texts))


def chat_messages(tokenizer: Any, messages: Sequence[Any]) -> str:
    """Messages (dicts of role and content) in the tokenizer's chat template, up to where the assistant begins to write."""
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template (a base model?): use chat=False, or set tokenizer.chat_template")
    return tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True)


def chat_prompt(tokenizer: Any, text: str, system: str | None = None) -> str:
    """The text as a user's message in the tokenizer's chat template, up to where the assistant begins to write."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return chat_messages(tokenizer, [*messages, {"role": "user", "content": text}])


def encodable(text: str) -> str:
    """A text in which a lone surrogate, which no tokenizer takes, is written out, as \\ud800."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def prompt_text(tokenizer: Any, prompt: str, chat: bool = False, system: str | None = None) -> tuple[str, bool]:
    """What is encoded of a prompt, and whether the tokenizer adds its special tokens: not to a text that has them already,
    from the chat template or because it starts with the beginning-of-sequence token."""
    text = encodable(chat_prompt(tokenizer, prompt, system) if chat else prompt)
    return text, not (chat or (tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)))


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[str],
    max_context: int,
    max_new_tokens: int = 0,
    chat: bool = False,
    system: str | None = None,
    named: str = "prompt {}",
) -> list[list[int]]:
    """Token ids of each prompt; raises before anything runs if one is empty or leaves no room for `max_new_tokens`.

    With `chat` every prompt is a user's message (after `system`, if given). A prompt that already starts with the
    tokenizer's beginning-of-sequence token, as a chat template may have written it, gets no second one. named: what errors call
    a prompt, by its number.
    """
    if isinstance(prompts, str):
        raise TypeError(f"prompts must be a list of strings, got one string: {prompts[:40]!r}")
    if system is not None and not chat:
        raise ValueError("system= needs chat=True: without a chat template there is no system message")
    rows = []
    for i, prompt in enumerate(prompts):
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
    said: Sequence[Sequence[int]],
    texts: Sequence[str],
    max_context: int,
    max_new_tokens: int = 0,
    chat: bool = False,
    named: str = "prompt {} of a later turn",
) -> list[list[int]]:
    """Token ids of conversations that go on: the tokens said so far (a prompt and its completion) stay as they are, behind them
    a new text, with `chat` as the next message of the user. Raises as `encode_prompts` does."""
    rows = []
    for i, (before, text) in enumerate(zip(said, texts, strict=True)):
        text = encodable(text)
        new = tokenizer.encode(chat_follow_up(tokenizer, text) if chat else text, add_special_tokens=False, verbose=False)
        new = new[1:] if chat and new[:1] == list(before[-1:]) else new  # the completion has ended its message itself
        if not new:
            raise ValueError(f"{named.format(i)} is empty: there is no token to continue from")
        row = [*before, *new]
        if len(row) + max_new_tokens > max_context:
            raise ValueError(
                f"{named.format(i)} ({text[:40]!r}...) makes {len(row)} tokens with its history; with "
                f"max_new_tokens={max_new_tokens} that is {len(row) + max_new_tokens}, more than the context of {max_context}: "
                "use fewer or shorter turns, history=none, or long_prompts (truncate_left or drop)"
            )
        rows.append(row)
    return rows


def chat_follow_up(tokenizer: Any, text: str) -> str:
    """What the chat template writes after an assistant's message when the user answers with `text`: the end of that message,
    the user's, and the beginning of the assistant's next one."""
    chat_prompt(tokenizer, text)  # raises without a template
    marker = "\u241e"  # a sign that no template writes
    messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": marker}, {"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return rendered.partition(marker)[2]


def cut_left(tokenizer: Any, row: Sequence[int], max_tokens: int, chat: bool = False) -> list[int]:
    """The last tokens of an encoded prompt, `max_tokens` with what stays in front of them.

    In front stays the beginning-of-sequence token, if the prompt starts with it. With `chat` the template stays whole: what it
    writes before and behind a user's message is kept, and the message loses its first tokens; of a conversation of several
    turns the oldest tokens go, wherever in a message that is. A template that is part of the prompt's text (chat=False) is text
    and is cut with it.
    """
    before, behind = template_ids(tokenizer) if chat else (list(row[:1]) if row[0] == tokenizer.bos_token_id else [], [])
    left = max_tokens - len(before) - len(behind)
    if left < 1:
        around = f", of which the chat template takes {len(before) + len(behind)}" if chat else ""
        raise ValueError(f"there is room for {max_tokens} tokens of a prompt{around}: lower max_new_tokens")
    return [*before, *row[len(before) : len(row) - len(behind)][-left:], *behind]


def template_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids that the chat template writes before and behind the message of a user."""
    marker = "\u241e"  # a sign that no template writes
    before, _, behind = chat_prompt(tokenizer, marker).partition(marker)
    return tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in (before, behind))


def stop_ids(tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a completion: the end of sequence first, then every known end of turn among the special tokens."""
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids += [special[token] for token in STOP_TOKENS if token in special]
    return tuple(dict.fromkeys(ids))


def decode(tokenizer: Any, token_rows: Iterable[Sequence[int]]) -> list[str]:
    """Text of each row of token ids, without special tokens and without tidying spaces."""
    rows = [[int(t) for t in row] for row in token_rows]
    return [tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in rows]
