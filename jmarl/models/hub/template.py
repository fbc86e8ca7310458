"""Apply chat templates to messages, whatever roles and orders a template refuses, and with a clock that stands still.

A template that refuses or leaves out the role system gets the instruction in the first user message; one that wants user and
assistant in turn gets neighbors of one role as one message. What it refuses otherwise is an error.

What messages and tools say is text. Whatever a template does to it, the control tokens of a conversation, in order, are those
of the same conversation with neutral contents, in which all letters and digits of a text are one rare letter, another in each
text: `encode_messages` compares the token ids of both. Where they differ, a template gets stand-ins for characters of the
contents, which it can neither edit nor complete. An assistant's message may write tokens of its own (`SpecialTokens.own`). Left
out: templates of the tokenizer's own by name (tool_use), and templates whose turns are plain text, which contents may write too
(`plain_turns`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import re
import secrets
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from jmarl.config import Chat
from jmarl.models.hub.messages import FORMS, KEY, NAME, Message, each_text
from jmarl.models.hub.special_tokens import (
    TOOLS,
    any_of,
    control_ids,
    control_spans,
    encodable,
    encode_spans,
    encode_text,
    letters_of,
    special_tokens,
)

Change = Callable[[str], str]  # of a text
SCHEMA = {  # fields of tools and calls that templates read by name
    "type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "arguments", "return",
}  # fmt: skip
MARKER = str(10**15 + secrets.randbelow(10**15))  # a text that nobody knows
STAND_INS, LETTERS = range(0xF0000, 0x10FFFE), range(0x20000, 0x2A6D7)  # characters for private use; rare letters
ESCAPED = '"\\'  # a template that writes JSON must see them


class TemplateRefusal(ValueError):
    """A chat template refuses messages."""


def render(tokenizer: Any, messages: Sequence[Message], chat: Chat) -> str:
    """Return the chat template's text of messages, up to the beginning of the assistant's answer.

    It may spell control tokens where the messages do.

    Raises ValueError if there is no template, and TemplateRefusal if it refuses the messages.
    """
    talk = _Conversation(tokenizer, messages, chat)
    try:
        return talk.written()
    except TemplateError:  # of what messages say
        return talk.written(talk.neutral).translate(talk.as_x)


def encode_messages(
    tokenizer: Any, messages: Sequence[Message], chat: Chat, *, follows: bool = False, outside: bool = False
) -> list[int]:
    """Return the token ids of messages in the chat template, up to the beginning of the assistant's answer.

    Args:
        tokenizer: the tokenizer.
        messages: with role and content, and what else the template reads.
        chat: what the template reads besides. Its tools are contents as well.
        follows: return what follows the text of an assistant's message, which comes before the messages.
        outside: raise TemplateRefusal for contents that make control tokens however they are encoded. Otherwise they are
            neutral then, and a warning says so.
    """
    talk = _Conversation(tokenizer, messages, chat, follows)
    try:
        meant = talk.written(talk.neutral)
    except TemplateError as error:
        raise talk.refusal(str(error)) from error
    reference = control_ids(tokenizer, encode_text(tokenizer, talk.tokens.inner.sub("", meant)))  # the same, and shorter
    for characters in (frozenset(), talk.tokens.essential, talk.characters):
        with contextlib.suppress(TemplateError):  # of what messages say
            if control_ids(tokenizer, ids := talk.encode(characters)) == reference:
                return ids
    problem = "what a message says becomes control tokens of the chat template"
    if outside:
        raise TemplateRefusal(f"{problem}: change the texts of the messages and tools")
    warnings.warn(f"{problem}, whichever way it is encoded: its letters are read as x; use another template", stacklevel=2)
    return encode_spans(tokenizer, meant.translate(talk.as_x), control_spans(tokenizer, meant))


class _Conversation:
    """Messages in the form that a chat template accepts, and the tools of a chat, whose texts can be changed."""

    def __init__(self, tokenizer: Any, messages: Sequence[Message], chat: Chat, follows: bool = False):
        if tokenizer.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template (a base model?): use chat=False and prompts that are texts, or set "
                "tokenizer.chat_template"
            )
        self.tokenizer, self.tokens, self.chat, self.follows = tokenizer, special_tokens(tokenizer), chat, follows
        self.roles = tuple(message["role"] for message in messages)
        self.rare = dict[str, tuple[str, str]]()  # the letter and the sign of a text
        kwargs = dict(chat.template_kwargs) | ({"tools": TOOLS} if chat.template_kwargs.get("tools") else {})
        probed = dataclasses.replace(chat, template_kwargs=kwargs)
        if all(message.keys() <= {"role", "content"} for message in messages):
            form, problem = _accepted(tokenizer, str(tokenizer.chat_template), self.roles, probed, follows)
        else:
            form, problem = _form(tokenizer, messages, probed, follows)
        if form is None:
            raise self.refusal(problem)
        self.messages = FORMS[form](each_text([*messages], lambda text, _: encodable(text)))
        kwargs = {name: value for name, value in chat.template_kwargs.items() if isinstance(value, list | tuple | Mapping)}
        self.contents = each_text(kwargs, lambda text, _: encodable(text))  # tools, documents
        self.letters, self.signs = self.unused(LETTERS), self.unused(STAND_INS)
        self.names, self.switches = _quoted(str(tokenizer.chat_template))

    def refusal(self, problem: str) -> TemplateRefusal:
        """Return the error for messages that a template refuses."""
        return TemplateRefusal(
            f"the chat template refuses messages of the roles {', '.join(self.roles)} ({problem}): "
            "change the prompt (formatters, roles, system prompts), use prompts that are texts and chat=False, or set "
            "tokenizer.chat_template"
        )

    def written(self, change: Change = str) -> str:
        """Apply the template. Raises TemplateError.

        change: made to all texts, but to no role, type, id or field of a message. Its reader may know what stays besides:
            the tokens that an assistant's message may write, switches, names that a template quotes, and those of fields,
            unless one is the word in a control token.
        """

        def others(text: str, field: str, own: frozenset[str] = frozenset()) -> str:
            is_name = NAME.fullmatch(text) and (letters_of(text) not in self.tokens.words or text in SCHEMA)
            if is_name and (field == KEY or text in self.names):
                return text
            parts = re.split(self.stays(own, field == "content"), text)
            return "".join(x if i % 2 else change(x) for i, x in enumerate(parts))

        def answers(text: str, field: str) -> str:
            return others(text, field, frozenset() if field in ("name", KEY) else self.tokens.own)

        changes = [answers if message["role"] == "assistant" else others for message in self.messages]
        messages = [
            {field: each_text(value, change, field) for field, value in message.items()}
            for message, change in zip(self.messages, changes, strict=True)
        ]
        kwargs = dict(self.chat.template_kwargs) | {name: each_text(value, others) for name, value in self.contents.items()}
        chat = dataclasses.replace(self.chat, template_kwargs=kwargs)
        text = _apply(self.tokenizer, [*(_BEFORE if self.follows else ()), *messages], chat)
        return text.partition(MARKER)[2] if self.follows else text

    def neutral(self, text: str) -> str:
        """Return a text with a letter of its own in place of letters and digits, and of what is in control tokens without any,
        and a sign of its own for signs that are not ASCII.

        Texts that differ stay different, for templates that look for a message among others."""
        if text not in self.rare:
            self.rare[text] = next(self.letters, "x"), next(self.signs, "\ufffd")
        letter, sign = self.rare[text]
        if text.isascii():  # the same, faster
            return self.tokens.letters.sub(lambda match: letter * len(match[0]), text)
        return self.tokens.letters.sub(lambda match: "".join(sign if is_sign(x) else letter for x in match[0]), text)

    def unused(self, characters: Iterable[int]) -> Iterator[str]:
        """Return those of rare characters that no text has."""
        return (x for x in map(chr, characters) if x not in self.used)

    @property
    def as_x(self) -> dict[int, str]:
        """How to write neutral texts for people and models."""
        return {ord(x): "x" for pair in self.rare.values() for x in pair}

    def stays(self, own: frozenset[str], content: bool) -> str:
        """Return an expression of the parts of a text that no change is made to, in one group."""
        switches = rf"(?<![^ \t\n])(?:{any_of(self.switches)})(?![^ \t\n])" if content and self.switches else ""
        return f"({'|'.join(filter(None, (any_of(own), switches))) or '(?!)'})"

    @functools.cached_property
    def used(self) -> set[str]:
        """The characters of all texts."""
        used = set[str]()
        each_text([self.messages, self.contents], lambda text, _: used.update(text) or text)
        return used

    @property
    def characters(self) -> frozenset[str]:
        """Those that a template need not see."""
        return frozenset(x for x in self.used if not x.isspace() and x not in ESCAPED and ord(x) not in STAND_INS)

    def encode(self, characters: frozenset[str]) -> list[int]:
        """Return the token ids. Raises TemplateError.

        characters: these have stand-ins in the contents, which are never parts of control tokens. If contents have so many
            of those that none is free, a replacement character takes their place.
        """
        if not characters:
            text, unknown = self.written(), self.tokens.unknown
            return self.encode(self.tokens.essential) if unknown and unknown in text else encode_text(self.tokenizer, text)
        signs, letters = self.unused(STAND_INS), self.unused(LETTERS)
        stand_ins = {ord(x): next(signs if is_sign(x) else letters, "\ufffd") for x in sorted(characters)}
        text = self.written(lambda x: x.translate(stand_ins))
        back = {ord(stand_in): x for x, stand_in in stand_ins.items() if stand_in != "\ufffd"}
        return encode_spans(self.tokenizer, text.translate(back), control_spans(self.tokenizer, text))


_BEFORE = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARKER}]


@functools.lru_cache(maxsize=64)
def _quoted(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names in the quotes of a template, and the switches that users write: /no_think, detailed thinking on."""
    quoted = {match[2] for match in re.finditer(r"""(['"])([\w/.-]{1,40}(?: [\w/.,-]{1,40}){0,9})\1""", template)}
    switches = {text for text in quoted if " " in text or re.fullmatch(r"/[\w-]+", text)}
    return frozenset(quoted - switches), frozenset(switches)


@functools.lru_cache(maxsize=256)
def _accepted(tokenizer: Any, template: str, roles: tuple[str, ...], chat: Chat, follows: bool) -> tuple[int | None, str]:
    return _form(tokenizer, [{"role": role} for role in roles], chat, follows)


def _form(tokenizer: Any, messages: Sequence[Message], chat: Chat, follows: bool) -> tuple[int | None, str]:
    """Return which of `FORMS` a template accepts without losing a message, user or system; None, and why, if there is none."""
    messages = [{**message, "content": f"{MARKER}{i}{MARKER}"} for i, message in enumerate(messages)]
    before, problem, tried = _BEFORE if follows else [], "", list[list[Message]]()
    for number, form in enumerate(FORMS):
        if (variant := form([*before, *messages])) in tried:
            continue
        tried.append(variant)
        if variant[: len(before)] != before:
            problem = problem or "the assistant's message goes on after its completion: begin with the user"
            continue
        try:
            text = _apply(tokenizer, variant, chat)
        except TemplateError as error:
            problem = problem or str(error)
            continue
        text = text.partition(MARKER)[2] if follows else text
        there = {f"{MARKER}{number}{MARKER}" for number in re.findall(rf"{MARKER}(\d+?){MARKER}", text)}
        lost = [m["role"] for m in messages if m["role"] != "assistant" and m["content"] not in there]
        if not lost:
            return number, ""
        problem = problem or f"it leaves out the role {lost[0]}"
    return None, problem


def refuses_system(tokenizer: Any, chat: Chat) -> bool:
    """Return whether a template refuses the role system, or writes nothing of it."""
    messages = [{"role": "system", "content": MARKER}, {"role": "user", "content": "-"}]
    try:
        return MARKER not in _apply(tokenizer, messages, chat)
    except TemplateError:
        return True


@functools.lru_cache(maxsize=64)
def plain_turns(tokenizer: Any, template: str, chat: Chat) -> str | None:
    """Return the text with which messages begin, if no control token is in it, so that contents may write it; else None."""
    text = render(tokenizer, [{"role": role, "content": MARKER} for role in ("user", "assistant", "user")], chat)
    turns = special_tokens(tokenizer).turn_numbers
    plain = (part for part in text.split(MARKER)[1:3] if turns.isdisjoint(encode_text(tokenizer, part)))
    return next(plain, None)


def answer_start(tokenizer: Any, chat: Chat) -> str:
    """Return the white space that the template writes before an assistant's text, and a model writes in its completion."""
    return _answer_start(tokenizer, str(tokenizer.chat_template), chat)


@functools.lru_cache(maxsize=64)
def _answer_start(tokenizer: Any, template: str, chat: Chat) -> str:
    answered = _answered(tokenizer, chat).partition(MARKER)[0]
    asked = render(tokenizer, _BEFORE[:1], chat)
    start = answered.removeprefix(asked)
    return start if answered.startswith(asked) and not start.strip() else ""


def answer_ends(tokenizer: Any, chat: Chat) -> tuple[str, list[str]]:
    """Return what the template writes after an assistant's text that nothing follows, empty if it refuses such messages, and
    what before messages of several roles that follow."""
    later = ({"role": role, "content": "-"} for role in ("user", "system", "tool", "assistant"))
    texts = [_answered(tokenizer, chat, message).partition(MARKER)[2] for message in later]
    return _answered(tokenizer, chat).partition(MARKER)[2], [text for text in texts if text]


def generation_prompt(tokenizer: Any, chat: Chat) -> str:
    """Return what the template writes before an answer that is asked for, and not without; empty if it refuses a user alone."""
    with contextlib.suppress(TemplateError):
        asked, plain = (_apply(tokenizer, _BEFORE[:1], chat, add_generation_prompt=x) for x in (True, False))
        return asked.removeprefix(plain) if asked.startswith(plain) else ""
    return ""


def _answered(tokenizer: Any, chat: Chat, *later: Message) -> str:
    """Return the text of a user's message, the answer `MARKER`, and later messages; empty if the template refuses them."""
    with contextlib.suppress(TemplateError):
        return _apply(tokenizer, [*_BEFORE, *later], chat, add_generation_prompt=False)
    return ""


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
    from the first token behind those of turns, as <think> is one."""
    user = _BEFORE[0]
    asked = render(tokenizer, [user], chat)
    answered = (_answered(tokenizer, chat, *later) for later in ([], [user]))
    headers = [text.partition(MARKER)[0] for text in answered if MARKER in text]
    if opening := max((asked.removeprefix(x) for x in headers if asked.startswith(x)), key=len, default=""):
        return opening
    turns = special_tokens(tokenizer).of_turns
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content in asked]
    start = max((asked.rfind(token) + len(token) for token in tokens if token in turns), default=0)
    words = [asked.find(token, start) for token in tokens if token not in turns]
    return asked[min((i for i in words if i >= 0), default=len(asked)) :]


def _apply(tokenizer: Any, messages: Sequence[Message], chat: Chat, add_generation_prompt: bool = True) -> str:
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


def is_sign(character: str) -> bool:
    """Return whether a character is no part of a word."""
    return unicodedata.category(character)[0] not in "LMN" and character != "_"
