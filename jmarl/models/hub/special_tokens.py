"""Find the control tokens of a tokenizer, and encode texts in which only some spellings of them are tokens.

Control tokens are a tokenizer's special tokens, and added tokens that its chat template writes. Those that the template is seen
to write or read inside an assistant's own message alone, such as <think> and <tool_call>, are a model's own words; all others
are of turns. A text in which all control tokens may stand is encoded as the tokenizer does. Otherwise a copy of the tokenizer
encodes it, in which control tokens have secret names and everything else is text.

Some tokenizers have special tokens without a row in their model's embeddings: that of Gemma 3 1B, which reads no images, has
one for images. They are taken out of the tokenizer (`tokenizer_for`), so that their spelling is text as any other.
"""

import functools
import itertools
import json
import re
import secrets
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.models.config import ModelConfig
from jmarl.models.hub.weight_files import read_fields, write_json

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
MESSAGE_ROLES = ("system", "user", "tool", "developer", "function", "environment")  # probed besides those a template names
ANY_ROLE, CONTENT = "1029384756", "5647382910"  # which no template names
CALL: dict[str, Any] = {"type": "function", "id": "012345678", "function": {"name": "probe", "arguments": {"a": "-"}}}
TOOL = {"name": "probe", "description": "-", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOLS = ({"type": "function", "function": TOOL},)
THOUGHTS = dict.fromkeys(("reasoning_content", "reasoning", "thinking", "tool_plan"), "-")
WITH_TOOLS: list[dict[str, Any]] = [{}, {"tools": [*TOOLS]}]
CALLS = [CALL, CALL | {"function": {"name": "probe", "arguments": '{"a": "-"}'}}]  # templates want a dict or its JSON
SAID = [
    {"role": "assistant"} | more
    for more in (
        THOUGHTS,
        *({"tool_calls": [c], "content": x} | t for c in CALLS for x in (CONTENT, "", None) for t in ({}, THOUGHTS)),
    )
]


class SpecialTokens(NamedTuple):
    """The control tokens of a tokenizer."""

    ids: Mapping[str, int]
    of_turns: frozenset[str]  # those that an assistant's message must not write either
    numbers: frozenset[int]  # the ids, without that of unknown characters
    turn_numbers: frozenset[int]  # those of turns
    unknown: str  # the token of unknown characters, if it is one of them
    letters: re.Pattern[str]  # letters, digits, what is not ASCII, and the characters of tokens that have none of these
    inner: re.Pattern[str]  # the inside of a text without their characters
    essential: frozenset[str]  # characters of which each token has one: its first that is neither letter nor digit
    heads: frozenset[str]  # proper beginnings of the tokens
    tails: frozenset[str]  # proper ends
    longest: int
    words: frozenset[str]  # letters of the tokens' names, from which a template may make one, see `letters_of`

    @property
    def own(self) -> frozenset[str]:
        """Those that an assistant's message may write."""
        return frozenset(self.ids) - self.of_turns


def letters_of(name: str) -> str:
    """Return a name as it is compared with `SpecialTokens.words`: a template may write other cases, and _ for -."""
    return re.sub(r"[\W_]", "", name.lower())


class Span(NamedTuple):
    """A control token in a text."""

    start: int
    end: int
    id: int


def encodable(text: str) -> str:
    """Escape lone surrogates, which no tokenizer accepts, for example as \\ud800."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def special_tokens(tokenizer: Any) -> SpecialTokens:
    """Return the control tokens of a tokenizer with its chat template."""
    return _special_tokens(tokenizer, str(tokenizer.chat_template or ""), len(tokenizer))


@functools.lru_cache(maxsize=64)
def _special_tokens(tokenizer: Any, template: str, size: int) -> SpecialTokens:
    tokens = [(i, str(token), token.special) for i, token in tokenizer.added_tokens_decoder.items()]
    added = {text: i for i, text, _ in tokens if text.strip()}  # blanks are no control tokens
    special = {text for _, text, special in tokens if special}
    written = _written(tokenizer, template, added.keys() - special) if template else set()
    turns = frozenset(special | (written - _own(tokenizer, written, special) if written else set()))
    ids = {text: i for text, i in added.items() if text in special | written}
    numbers = frozenset(ids.values()) - {tokenizer.unk_token_id}
    turn_numbers = numbers.intersection(ids[text] for text in turns if text in ids)
    letter, sign = r"(?:[A-Za-z0-9]|[^\x00-\x7f\s])", r"""[^\w\s"\\]"""
    bare = {x for text in ids if not re.search(letter, text) for x in text if not x.isspace()}
    letters = re.compile(f"(?:{'|'.join([letter, *map(re.escape, sorted(bare))])})+")
    outside = f"[^\0{re.escape(''.join({x for text in ids for x in text if not x.isspace()}))}]"
    inner = re.compile(f"(?<={outside}){outside}+(?={outside})" if ids else r"(?!)")
    essential = frozenset((re.findall(sign, text) or text.split() or [" "])[0][0] for text in ids)
    heads = frozenset(text[:i] for text in ids for i in range(1, len(text)))
    tails = frozenset(text[i:] for text in ids for i in range(1, len(text)))
    longest, of_turns = max(map(len, ids), default=0), turns.intersection(ids)
    unknown = tokenizer.unk_token if tokenizer.unk_token in ids else ""
    words = frozenset(letters_of(word) for text in ids for word in re.findall(r"[\w-]+", text))
    return SpecialTokens(ids, of_turns, numbers, turn_numbers, unknown, letters, inner, essential, heads, tails, longest, words)


class _Probe:
    """A chat template that is applied to short conversations, of which those that it refuses are empty."""

    def __init__(self, tokenizer: Any, added: set[str]):
        self.tokenizer, self.added = tokenizer, added

    def text(self, *messages: Any, prompt: bool = False, **more: Any) -> str:
        """Return the text of messages; a role in place of one has the content `CONTENT`."""
        conversation = [{"content": CONTENT, **({"role": m} if isinstance(m, str) else m)} for m in messages]
        try:
            return self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompt, **more)
        except Exception:  # a template for other conversations, or a broken one
            return ""

    def tokens(self, *texts: str) -> set[str]:
        """Return the added tokens in texts."""
        return {token for token in self.added if any(token in text for text in texts)}


def _written(tokenizer: Any, template: str, added: set[str]) -> set[str]:
    """Return the added tokens that a chat template spells, or puts together from the name of a role, and what opens or closes
    something with one of them.

    Roles are those of `MESSAGE_ROLES`, the words in the template's quotes, and any other that completes a token.
    """
    probe, roles = _Probe(tokenizer, added), {*MESSAGE_ROLES, *re.findall(r"""['"]([A-Za-z0-9_-]{2,32})['"]""", template)}
    talks = [
        talk
        for role in (*roles, ANY_ROLE)
        for talk in ((role, "user", "assistant", "user"), ("user", "assistant", role, "user"))
    ]
    texts = [probe.text(*talk) for talk in talks]
    with_any = "\0".join(text for text in texts if ANY_ROLE in text)
    named = {t for t in added if any(t.replace(word, ANY_ROLE) in with_any for word in re.findall(r"[\w-]+", t))}
    written = named | probe.tokens(template, *texts)
    names = set(map(_name, written))
    return {token for token in added if _name(token) in names}


def _own(tokenizer: Any, added: set[str], special: set[str]) -> set[str]:
    """Return the added tokens that an assistant's message may write: all others may be of turns.

    Those are its own that a template writes around an answer, in calls and thoughts, or reads in one, and what opens or closes
    something with one of them. What stands around the text of a user, a tool or the system is none of them.
    """
    probe = _Probe(tokenizer, added)
    called, around = _in_calls(probe)
    own = _around_answers(probe) | called | {token for token in added if _reads(probe, token)}
    names, of_others = set(map(_name, own)), set(map(_name, around | _around_users(probe, special)))
    return {token for token in added if _name(token) in names - of_others}


def _around_answers(probe: _Probe) -> set[str]:
    """Return the tokens that a template writes after an answer and in no generation prompt, those that it writes before answers
    but not before all of them and in all generation prompts, and those that open and close something there."""
    asked, end, answered = _user_and_end(probe)
    prompts = [probe.text("user", prompt=True).rpartition(CONTENT)[2]]
    for switch, value in itertools.product(("enable_thinking", "thinking"), (True, False)):
        prompts.append(probe.text("user", prompt=True, **{switch: value}).rpartition(CONTENT)[2])
    headers = [text.split(CONTENT)[1] for text in answered if text.count(CONTENT) > 1]
    begins = [probe.tokens(text) for text in (*headers, *(prompt for prompt in prompts if prompt != asked))]
    own = (probe.tokens(end) - probe.tokens(*prompts)).union(*begins) - set.intersection(*begins, probe.added)
    return own | {token for row in begins for token in row if any(_name(x) == _name(token) and x != token for x in row)}


def _around_users(probe: _Probe, special: set[str]) -> set[str]:
    """Return the tokens after and before a user's text, and those nearest to the system's."""
    asked, end, answered = _user_and_end(probe)
    before = answered[1].rpartition(CONTENT)[0].rpartition(CONTENT)[2]  # the second text of the user
    around = probe.tokens(before.removeprefix(end)) - (set() if before.startswith(end) else probe.tokens(end))
    before, _, after = probe.text("system", "user").partition(CONTENT)
    nearest = re.compile(any_of({*probe.added, *filter(str.strip, special)}))
    return around | probe.tokens(asked, *nearest.findall(before)[-1:], *nearest.findall(after)[:1])


def _user_and_end(probe: _Probe) -> tuple[str, str, tuple[str, str]]:
    """Return what a template writes after the text of a user, what after an answer, and the conversations with an answer: one
    that ends with it, and one that goes on."""
    answered = probe.text("user", "assistant"), probe.text("user", "assistant", "user")
    return probe.text("user").rpartition(CONTENT)[2], answered[0].rpartition(CONTENT)[2], answered


def _in_calls(probe: _Probe) -> tuple[set[str], set[str]]:
    """Return the tokens that a template writes for an assistant's calls and thoughts alone, and those around a tool's text."""
    own, around = set[str](), set[str]()
    tool = {"role": "tool", "tool_call_id": CALL["id"], "name": "probe", "content": ANY_ROLE}
    for tools, said in itertools.product(WITH_TOOLS, SAID):
        without = probe.tokens(probe.text("user", "assistant", **tools).partition(CONTENT)[2])
        called = probe.text("user", said, **tools)
        own |= probe.tokens(called.partition(CONTENT)[2]) - without
        before, _, after = probe.text("user", said, tool, **tools).partition(ANY_ROLE)
        if called and before.startswith(called.rstrip()):
            around |= probe.tokens(before[len(called.rstrip()) :], after)
    return own, around


def _reads(probe: _Probe, token: str) -> bool:
    """Return whether a template changes an assistant's text because of a token in it, and no text of a user."""

    def stays(role: str, text: str, *later: str) -> bool:
        return text in probe.text("user", {"role": role, "content": text}, *later)

    text, other = f"a{token}b", f"a{ANY_ROLE}b"
    changed = any(
        stays("assistant", other, *later) and not stays("assistant", text, *later)
        for later in ((), ("user",), ("user", "assistant"))
    )
    return changed and stays("user", text)


def _name(token: str) -> str:
    """Return what a token opens or closes: `think` for <think> and </think>."""
    return re.sub(r"begin|start|end|[^a-z]", "", token.lower()) or token


def spelled(tokenizer: Any, text: str) -> frozenset[str]:
    """Return the control tokens that a text spells."""
    tokens = special_tokens(tokenizer).ids
    return frozenset(match[1] for match in _finder(frozenset(tokens)).finditer(text)) if tokens else frozenset()


@functools.lru_cache(maxsize=64)
def _finder(tokens: frozenset[str]) -> re.Pattern[str]:
    """Return an expression that matches where a token begins, also inside another."""
    first = "".join(sorted({re.escape(token[0]) for token in tokens}))
    return re.compile(f"(?=[{first}])(?=({any_of(tokens)}))")


def any_of(tokens: Collection[str]) -> str:
    """Return an expression that matches the longest of some texts."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))


# --- encoding ----------------------------------------------------------------------------------------------------------


def control_ids(tokenizer: Any, ids: Iterable[int]) -> list[int]:
    """Return the control tokens among token ids, in order."""
    numbers = special_tokens(tokenizer).numbers
    return [i for i in ids if i in numbers]


def control_spans(tokenizer: Any, text: str) -> list[Span]:
    """Return where a text spells control tokens, as its tokenizer reads it."""
    tokens = special_tokens(tokenizer)
    numbers, unknown = tokens.numbers | {tokens.ids.get(tokens.unknown)}, tokenizer.unk_token_id
    encoded: Any = tokenizer(text, add_special_tokens=False, verbose=False)
    places: list[Any] = [(encoded.token_to_chars(n), i) for n, i in enumerate(encoded["input_ids"]) if i in numbers]
    spans = [Span(place.start, place.end, i) for place, i in places if place is not None]
    return [x for x in spans if x.id != unknown or text[x.start : x.end].strip() == tokens.unknown]


def encode_text(tokenizer: Any, text: str, allowed: Collection[str] | None = None) -> list[int]:
    """Return the token ids of a text in which only some control tokens are tokens, and other spellings are text.

    allowed: these; None: all that it spells.
    """
    return encode_texts(tokenizer, [text], [allowed])[0]


def encode_texts(tokenizer: Any, texts: Sequence[str], allowed: Sequence[Collection[str] | None]) -> list[list[int]]:
    """Return what `encode_text` returns for each text. Half of its time is that of a call, and these are one."""
    texts, options = [*map(encodable, texts)], dict(add_special_tokens=False, verbose=False)
    if len(texts) > 1 and is_of_library(tokenizer):
        rows = tokenizer(texts, **options, return_attention_mask=False, return_token_type_ids=False)["input_ids"]
    else:
        rows = [tokenizer.encode(text, **options) for text in texts]
    return [
        ids if own is None else _only(tokenizer, text, ids, own) for text, ids, own in zip(texts, rows, allowed, strict=True)
    ]


def is_of_library(tokenizer: Any) -> bool:
    """Return whether a tokenizer encodes and decodes several texts in one call as one after the other: with the methods of
    transformers' fast tokenizers, none of them its own."""
    from transformers import PreTrainedTokenizerFast

    kind, names = type(tokenizer), ("__call__", "encode", "decode", "_encode_plus", "_decode")
    plain = all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, name) for name in names)
    return plain and vars(tokenizer).keys().isdisjoint(names)


def _only(tokenizer: Any, text: str, ids: list[int], allowed: Collection[str]) -> list[int]:
    """Return the token ids of a text whose own are `ids`, in which no other control tokens are tokens."""
    tokens = special_tokens(tokenizer)
    numbers = {tokens.ids[token] for token in allowed if token in tokens.ids}
    if numbers.issuperset(control_ids(tokenizer, ids)) and (tokens.unknown in {*allowed, ""} or tokens.unknown not in text):
        return ids
    return encode_spans(tokenizer, text, [span for span in control_spans(tokenizer, text) if span.id in numbers])


def encode_spans(tokenizer: Any, text: str, spans: Sequence[Span]) -> list[int]:
    """Return the token ids of a text in which only the spans are control tokens."""
    return _copy_of(tokenizer, str(tokenizer.chat_template or ""), len(tokenizer)).encode(text, spans)


@functools.lru_cache(maxsize=16)
def _copy_of(tokenizer: Any, template: str, size: int) -> "_Copy":
    return _Copy(tokenizer)


class _Copy:
    """A copy of a tokenizer in which control tokens are text, and a secret name of each is the token."""

    def __init__(self, tokenizer: Any):
        from tokenizers import AddedToken, Tokenizer

        ids = special_tokens(tokenizer).ids
        tree = json.loads(tokenizer.backend_tokenizer.to_str())
        for token in tree["added_tokens"]:
            token["special"] = token["content"] in ids
        self.backend = Tokenizer.from_str(json.dumps(tree))
        self.backend.no_padding()
        self.backend.no_truncation()
        self.backend.encode_special_tokens = True  # encode their spelling as text
        prefix = secrets.token_hex(16)  # which no text spells
        self.names = {i: f"{prefix}_{i}_" for i in ids.values()}
        self.backend.add_tokens([AddedToken(name, normalized=False) for name in self.names.values()])
        self.of_names = {self.backend.token_to_id(name): i for i, name in self.names.items()}
        self.text_of = {i: text for text, i in ids.items() if text != tokenizer.unk_token}

    def encode(self, text: str, spans: Sequence[Span]) -> list[int]:
        """Return the token ids of a text, see `encode_spans`."""
        parts, end = [], 0
        for span in spans:
            parts += [text[end : span.start], self.names[span.id]]
            end = span.end
        ids = self.backend.encode("".join([*parts, text[end:]]), add_special_tokens=False).ids
        return [i for token in ids for i in self._written(token)]

    def _written(self, token: int) -> list[int]:
        """Return the ids for a token of the copy. The model may have a control token among its words: its letters then."""
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
            write_json(path, _without(read_fields(path), tokens))
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
