"""Encode text so that only a chat template, or the user, writes special tokens: what a message contains is text.

The special tokens in a message's content are protected before the template is applied: a stand-in replaces one character of
each, so that the tokens in the template's text are those of the template alone. A text without such a spelling is encoded as
the tokenizer does. Otherwise a copy of the tokenizer encodes it, in which the tokens of the template have secret names and the
others are text.

Special are a tokenizer's special tokens, and added tokens that its chat template writes. An assistant's message may spell those
of the latter that do not begin or end messages, such as <think> and <tool_call>: these are a model's own words.

Some tokenizers have special tokens without a row in their model's embeddings: that of Gemma 3 1B, which reads no images, has
one for images. They are taken out of the tokenizer (`tokenizer_for`), so that their spelling is text as any other.
"""

import functools
import json
import re
import secrets
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.models.config import ModelConfig
from jmarl.models.hub.weight_files import read_json, write_json

STAND_INS = range(0xF0000, 0x10FFFE)  # characters for private use
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
Message = Mapping[str, Any]


class SpecialTokens(NamedTuple):
    """The tokens of a tokenizer that contents must not write."""

    ids: Mapping[str, int]
    of_turns: frozenset[str]  # those that an assistant's message must not write either
    heads: frozenset[str]  # proper beginnings of them
    tails: frozenset[str]  # proper ends
    longest: int

    def without(self, allowed: Collection[str]) -> "SpecialTokens":
        """Return all but some of them."""
        return _tokens({text: i for text, i in self.ids.items() if text not in allowed}, self.of_turns)


class Protected(NamedTuple):
    """A text with stand-ins for some characters."""

    text: str
    characters: Mapping[str, str] = {}  # stand-in -> character
    spells: bool = False  # whether it spells a special token that is text

    @property
    def plain(self) -> str:
        """The text without stand-ins. Lone surrogates are escaped."""
        return encodable(self.restore(self.text))

    def restore(self, text: str) -> str:
        """Return a text with the characters in place of their stand-ins."""
        return text.translate({ord(stand_in): x for stand_in, x in self.characters.items()}) if self.characters else text


def encodable(text: str) -> str:
    """Escape lone surrogates, which no tokenizer accepts, for example as \\ud800."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def special_tokens(tokenizer: Any) -> "SpecialTokens":
    """Return the tokens that contents of messages must not write."""
    return _special_tokens(tokenizer, str(tokenizer.chat_template or ""), len(tokenizer))


@functools.lru_cache(maxsize=64)
def _special_tokens(tokenizer: Any, template: str, size: int) -> "SpecialTokens":
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if str(token)}
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    written = "" if not template else _plain_conversation(tokenizer)
    turns = frozenset(text for text in added if text in special or text in written)
    return _tokens({text: i for text, i in added.items() if text in turns or text in template}, turns)


def _plain_conversation(tokenizer: Any) -> str:
    messages = [{"role": role, "content": "-"} for role in ("user", "assistant", "user")]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template for other conversations, or a broken one: only the tokenizer says what is special
        return ""


def _tokens(ids: Mapping[str, int], of_turns: frozenset[str]) -> "SpecialTokens":
    heads = frozenset(text[:i] for text in ids for i in range(1, len(text)))
    tails = frozenset(text[i:] for text in ids for i in range(1, len(text)))
    return SpecialTokens(ids, of_turns.intersection(ids), heads, tails, max(map(len, ids), default=0))


def spelled(tokenizer: Any, text: str) -> frozenset[str]:
    """Return the special tokens that a text spells."""
    tokens = special_tokens(tokenizer).ids
    return frozenset(match[1] for match in _finder(frozenset(tokens)).finditer(text)) if tokens else frozenset()


# --- contents ----------------------------------------------------------------------------------------------------------


def protect_messages(tokenizer: Any, messages: list[Message]) -> tuple[list[Message], Protected]:
    """Return messages whose texts write no special token, alone or together with what stands beside them.

    Also returns a `Protected` without text, which knows the stand-ins.
    """
    tokens = special_tokens(tokenizer)
    own = tokens.without(tokens.ids.keys() - tokens.of_turns)
    stand_ins = StandIns("".join(_texts(messages)))

    def protect(value: Any, tokens: SpecialTokens, key: str = "") -> Any:
        if isinstance(value, str):
            return stand_ins.protect(value, tokens, joins=key in ("content", "text"))
        if isinstance(value, Mapping):
            return {key: protect(x, tokens, key) for key, x in value.items()}
        return [protect(x, tokens, key) for x in value] if isinstance(value, list | tuple) else value

    result = [protect(message, own if message["role"] == "assistant" else tokens) for message in messages]
    return result, Protected("", stand_ins.characters, stand_ins.spells)


def protect_text(tokenizer: Any, text: str, allowed: Collection[str] = (), own: bool = False) -> Protected:
    """Return a text that writes no special tokens but the allowed ones.

    own: it is an assistant's message, which may write tokens that do not begin or end messages.
    """
    tokens, stand_ins = special_tokens(tokenizer), StandIns(text)
    allowed = {*allowed, *(tokens.ids.keys() - tokens.of_turns)} if own else allowed
    protected = stand_ins.protect(text, tokens.without(allowed) if allowed else tokens, joins=False)
    return Protected(protected, stand_ins.characters, stand_ins.spells)


class StandIns:
    """Stand-ins for the characters of some texts, none of which they contain. texts: all of them, one after the other."""

    def __init__(self, texts: str):
        self.free: Iterator[str] = (chr(i) for i in STAND_INS if chr(i) not in texts)
        self.by_character: dict[str, str] = {}
        self.spells = False

    @property
    def characters(self) -> dict[str, str]:
        """stand-in -> character."""
        return {stand_in: character for character, stand_in in self.by_character.items()}

    def protect(self, text: str, tokens: SpecialTokens, joins: bool) -> str:
        """Return a text with stand-ins for the first character of each special token.

        joins: also of parts of one at its ends, which text beside it could complete.
        """
        starts = {match.start() for match in _finder(frozenset(tokens.ids)).finditer(text)} if tokens.ids else set()
        self.spells |= bool(starts)
        if joins and (core := text.strip()):
            first = text.index(core)
            sizes = range(1, min(len(core), tokens.longest) + 1)
            inside = len(core) < tokens.longest and any(core in token for token in tokens.ids)
            if inside or any(core[:size] in tokens.tails for size in sizes):
                starts.add(first)
            starts |= {first + len(core) - size for size in sizes if core[-size:] in tokens.heads}
        characters = list(text)
        for i in starts:
            if characters[i] not in self.by_character:
                self.by_character[characters[i]] = next(self.free)
            characters[i] = self.by_character[characters[i]]
        return "".join(characters)


@functools.lru_cache(maxsize=64)
def _finder(tokens: frozenset[str]) -> re.Pattern[str]:
    """Return an expression that matches where a token begins, also inside another."""
    first = "".join(sorted({re.escape(token[0]) for token in tokens}))
    return re.compile(f"(?=[{first}])(?=({_any_of(tokens)}))")


def _any_of(tokens: Collection[str]) -> str:
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))


@functools.lru_cache(maxsize=64)
def _scanner(tokens: frozenset[str]) -> re.Pattern[str]:
    """Return an expression that matches the tokens in a text, the longest at each place."""
    return re.compile(_any_of(tokens))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


# --- encoding ----------------------------------------------------------------------------------------------------------


def encode_protected(tokenizer: Any, protected: Protected) -> list[int]:
    """Return the token ids of a text: special tokens where it spells one without stand-ins, and text everywhere else."""
    tokens = special_tokens(tokenizer)
    ids = tokenizer.encode(protected.plain, add_special_tokens=False, verbose=False)
    if not tokens.ids:
        return ids
    numbers = {*tokens.ids.values()} - {tokenizer.unk_token_id}
    meant = [tokens.ids[x] for x in _scanner(frozenset(tokens.ids)).findall(protected.text)]
    if not protected.spells and [i for i in ids if i in numbers] == [i for i in meant if i in numbers]:
        return ids
    return _copy_of(tokenizer, str(tokenizer.chat_template or ""), len(tokenizer)).encode(protected)


@functools.lru_cache(maxsize=16)
def _copy_of(tokenizer: Any, template: str, size: int) -> "_Copy":
    return _Copy(tokenizer)


class _Copy:
    """A copy of a tokenizer in which special tokens are text, and a secret name of each is the token."""

    def __init__(self, tokenizer: Any):
        from tokenizers import AddedToken, Tokenizer

        self.ids = special_tokens(tokenizer).ids
        tree = json.loads(tokenizer.backend_tokenizer.to_str())
        added = {token["content"]: token for token in tree["added_tokens"]}
        for text, token in added.items():
            token["special"] = text in self.ids
        self.backend = Tokenizer.from_str(json.dumps(tree))
        self.backend.no_padding()
        self.backend.no_truncation()
        self.backend.encode_special_tokens = True  # encode their spelling as text
        prefix = secrets.token_hex(16)  # which no text spells
        self.names = {text: f"{prefix}_{i}_" for i, text in enumerate(self.ids)}
        flags = ("lstrip", "rstrip")
        self.backend.add_tokens(
            [AddedToken(name, normalized=False, **{x: added[text][x] for x in flags}) for text, name in self.names.items()]
        )
        self.of_names = {self.backend.token_to_id(name): self.ids[text] for text, name in self.names.items()}
        self.text_of = {i: text for text, i in self.ids.items() if text != tokenizer.unk_token}

    def encode(self, protected: Protected) -> list[int]:
        """Return the token ids of a text, see `encode_protected`."""
        named = _scanner(frozenset(self.ids)).sub(lambda match: self.names[match[0]], protected.text)
        ids = self.backend.encode(encodable(protected.restore(named)), add_special_tokens=False).ids
        return [i for token in ids for i in self._written(token)]

    def _written(self, token: int) -> list[int]:
        """Return the ids for a token of the copy. The model may have a special token among its words: its letters then."""
        if token in self.of_names:
            return [self.of_names[token]]
        if token not in self.text_of:
            return [token]
        letters = [piece.id for letter in self.text_of[token] for piece in self.backend.model.tokenize(letter)]
        return [i for i in letters if i not in self.text_of]


# --- tokens that the model does not have -------------------------------------------------------------------------------


def tokenizer_for(config: ModelConfig, tokenizer: Any, where: str) -> Any:
    """Return the tokenizer, without the special tokens that the model does not have.

    Raises ValueError if it needs one of them, or has other tokens that the model does not have. where: begins the message."""
    beyond = check_vocabulary(config, tokenizer, where)
    return without_tokens(tokenizer, beyond) if beyond else tokenizer


def check_vocabulary(config: ModelConfig, tokenizer: Any, where: str) -> set[str]:
    """Return the special tokens that the model does not have. Raises ValueError as `tokenizer_for`."""
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    beyond = {token: i for token, i in vocabulary.items() if i >= config.vocab_size}
    roles, template = {getattr(tokenizer, role) for role in ROLES}, str(tokenizer.chat_template or "")
    if any(i not in added or not added[i].special or token in roles or token in template for token, i in beyond.items()):
        size = max(vocabulary.values()) + 1
        raise ValueError(f"{where}: the tokenizer has {size} tokens but the model's vocabulary only {config.vocab_size}")
    return {*beyond}


def without_tokens(tokenizer: Any, tokens: Collection[str]) -> Any:
    """Return a copy of a tokenizer that does not have some special tokens, whatever its files call them."""
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        for path in Path(directory).glob("*.json"):
            write_json(path, _without(read_json(path), tokens))
        return PreTrainedTokenizerFast.from_pretrained(directory)


def _without(value: Any, tokens: Collection[str]) -> Any:
    """Return a JSON value without the tokens: keys, texts, dicts whose content is one, and pairs of one and its score."""

    def is_one(x: Any) -> bool:
        if isinstance(x, list) and len(x) == 2:
            return is_one(x[0]) and isinstance(x[1], float)
        return is_one(x.get("content")) if isinstance(x, dict) else isinstance(x, str) and x in tokens

    if isinstance(value, dict):
        return {key: _without(x, tokens) for key, x in value.items() if key not in tokens and not is_one(x)}
    return [_without(x, tokens) for x in value if not is_one(x)] if isinstance(value, list) else value
