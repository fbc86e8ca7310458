"""Stop texts: an automaton that reads the tokens of a row and finds the texts that end it.

Its states are the beginnings of stop texts, in bytes; the state of a row is the longest one that its text ends with (Aho and
Corasick, 1975). A token moves it by all of its bytes at once, so the decode loop looks up one number per row: a text may begin
and end inside of tokens, and a character may be spread over several.

A special token counts where a stop text spells it, and is nothing otherwise, as in the text of a completion.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jmarl.models.hub.tokenize import decode
from jmarl.team import StackSpec
from jmarl.types import Vocabulary

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a token of SentencePiece that is one byte


def vocabulary(spec: StackSpec, stop_texts: Sequence[str]) -> Vocabulary:
    """Return what the sampler of a stack knows of its tokens. stop_texts: texts that end a completion."""
    return Vocabulary(spec.allowed, stop_table(spec.tokenizer, spec.config.vocab_size, tuple(stop_texts)))


@functools.lru_cache(maxsize=16)
def stop_table(tokenizer: Any, vocab_size: int, texts: tuple[str, ...]) -> Int[np.ndarray, "state {vocab_size}"] | None:
    """Return the state after each token, by the state before it. Rows begin in state 0; in the last one a text is complete.

    Args:
        tokenizer: a fast tokenizer.
        vocab_size: ids of the model, of which some may have no token.
        texts: the stop texts. Without any, returns None.

    Raises:
        ValueError: if the tokenizer writes texts in a way in which they cannot be followed byte by byte.
    """
    if not texts:
        return None
    tokens = token_bytes(tokenizer, vocab_size)
    check_bytes(tokenizer, tokens, texts)
    added = tokenizer.added_tokens_decoder.items()
    silent = [i for i, x in added if x.special and i < vocab_size and not any(x.content in text for text in texts)]
    for i in silent:
        tokens[i] = b""
    return over_tokens(automaton([text.encode() for text in texts]), tokens)


def automaton(texts: Sequence[bytes]) -> Int[np.ndarray, "state 256"]:
    """Return the state after each byte. The last state is never left."""
    beginnings = sorted({text[:size] for text in texts for size in range(len(text))}, key=len)
    number = {beginning: i for i, beginning in enumerate(beginnings)}
    table = np.zeros((len(beginnings) + 1, 256), np.int16)
    table[-1] = len(beginnings)
    for i, beginning in enumerate(beginnings):
        for byte in {*b"".join(texts)}:
            read = beginning + bytes([byte])
            ends = (number[read[k:]] for k in range(len(read) + 1) if read[k:] in number)
            table[i, byte] = len(beginnings) if read.endswith(tuple(texts)) else next(ends)
    return table


def over_tokens(table: Int[np.ndarray, "state 256"], tokens: Sequence[bytes]) -> Int[np.ndarray, "state token"]:
    """Return the state after all bytes of each token."""
    lengths = np.array([len(token) for token in tokens])
    spelled, starts = np.frombuffer(b"".join(tokens), np.uint8), np.cumsum(lengths) - lengths
    after = np.repeat(np.arange(len(table), dtype=np.int16)[:, None], len(tokens), 1)
    for place in range(lengths.max(initial=0)):
        (longer,) = np.nonzero(lengths > place)
        after[:, longer] = table[after[:, longer], spelled[starts[longer] + place]]
    return after


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """Return what each token adds to a text. Ids without a token add nothing."""
    added, decoder = tokenizer.added_tokens_decoder, tokenizer.backend_tokenizer.decoder
    alphabet = byte_alphabet() if "ByteLevel" in repr(decoder) else None
    tokens = [b""] * vocab_size
    for piece, i in tokenizer.get_vocab().items():
        if i >= vocab_size:
            continue
        if i in added:
            tokens[i] = added[i].content.encode()
        elif alphabet and all(character in alphabet for character in piece):
            tokens[i] = bytes(alphabet[character] for character in piece)
        elif byte := BYTE.fullmatch(piece):
            tokens[i] = bytes.fromhex(byte[1])
        elif decoder is None:
            tokens[i] = f" {piece}".encode()
        else:
            tokens[i] = decoder.decode(["a", piece])[1:].encode()
    return tokens


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in which byte-level tokenizers write: printable bytes are themselves, the others follow
    each other from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


def check_bytes(tokenizer: Any, tokens: Sequence[bytes], texts: Sequence[str]) -> None:
    """Raise a ValueError unless the bytes of the tokens of each text are those of the text that they are decoded to."""
    for text in texts:
        ids = tokenizer.encode(f"a {text} b", add_special_tokens=False)
        written, spelled = decode(tokenizer, [ids], skip=False)[0], b"".join(tokens[i] for i in ids).decode(errors="replace")
        if written.lstrip() != spelled.lstrip():
            raise ValueError(
                f"stop={text!r} cannot be found in the tokens of this tokenizer: it writes {written!r:.80}, whose tokens are "
                f"{spelled!r:.80} one by one; use a tokenizer whose tokens are parts of the text, or end tokens only"
            )
