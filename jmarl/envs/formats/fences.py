"""Find the fenced blocks of a Markdown text, as CommonMark defines them and as language models write them.

A fence is three or more backticks or tildes; the block ends at a line of at least as many of the same characters, indented by
at most three columns more, or with the text. So a block may contain shorter fences, and fences in an indented docstring. Fences
stand also in quotes and lists. The language is the first word of the info string, whatever follows: a title, attributes in
braces, a file name after a colon.

What CommonMark does not have: text before the opening fence or code before the closing one on the same line, code behind the
opening fence (```def f(x): ...), an opening fence that closes the block before it, and blocks in a block of Markdown, which are
read too. Text between triple backticks in one line is no block; it counts only if the text has no other.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

_OPENING = re.compile(
    r"(?P<container>[ \t]*(?:(?:>|(?:[-*+]|[0-9]{1,9}[.)])[ \t])[ \t]*)*)"
    r"(?:(?P<fence>`{3,})(?P<info>[^`]*)|(?P<tildes>~{3,})(?P<after>.*))"
)
_OPENING_AFTER_TEXT = re.compile(r"(?P<container>)(?=[ \t]*[^`\s])[^`]++(?P<fence>`{3,})(?P<info>[\w+#.-]*[ \t]*)")
_INLINE = re.compile(r"(?<!`)```(?!`)((?:[^`\n]|`(?!``))+)```(?!`)")
_CODE_BEHIND = re.compile(r"(?:async +def|def|class|import|from) +\w|@\w|\w+ = ")  # in place of an info string
_PYTHON = re.compile(r"(?:i?python|py)[0-9.]*|.*\.py", re.I)
_MARKDOWN = ("", "markdown", "md")
SPECIAL_TOKENS_AT_END = re.compile(r"(?:(?<!\s)\s*(?:<\|[^|<>\n]{1,30}\|>|<(?:/s|eos|end_of_turn)>))+\s*\Z")


class FencedBlock(NamedTuple):
    """A fenced block."""

    language: str  # empty: none is given
    text: str


def is_python(language: str) -> bool:
    """Return whether blocks of a language hold Python, as those without a language may."""
    return not language or bool(_PYTHON.fullmatch(language))


def fenced_blocks(text: str) -> list[FencedBlock]:
    """Return the fenced blocks of a text with line ends \\n. A last block that is not closed ends with the text."""
    text = SPECIAL_TOKENS_AT_END.sub("", text)
    blocks, lines, i = list[FencedBlock](), text.split("\n"), 0
    while i < len(lines):
        opening = _OPENING.fullmatch(lines[i]) or _OPENING_AFTER_TEXT.fullmatch(lines[i])
        i += 1
        if opening is not None:
            inside, i = _lines_of_block(opening, lines, i)
            blocks += _blocks_of(opening, inside)
    return blocks or [FencedBlock("", code.strip()) for code in _INLINE.findall(text)]


def _lines_of_block(opening: re.Match[str], lines: Sequence[str], start: int) -> tuple[list[str], int]:
    """Return the lines of a block, without the marks of quotes, and the index of the line behind it."""
    groups = opening.groupdict()
    fence = groups["fence"] or groups["tildes"]
    num_quotes, width = groups["container"].count(">"), len(groups["container"].expandtabs(4))
    closing = re.compile(rf"{fence[0]}{{{len(fence)},}}[ \t]*")
    inside: list[str] = []
    for i in range(start, len(lines)):
        line = re.sub(rf"(?:[ \t]*>){{0,{num_quotes}}} ?", "", lines[i], count=1) if num_quotes else lines[i]
        indent = len(line.expandtabs(4)) - len(line.expandtabs(4).lstrip())
        if closing.match(line.lstrip()) and indent <= width + 3:
            rest = closing.sub("", line.lstrip(), count=1)
            if not rest or re.fullmatch(r"[\w+#.-]+", rest):  # the next block begins before this one is closed
                return inside, i + (not rest)
        code = line.rstrip().rstrip(fence[0])
        if fence[0] not in code and closing.fullmatch(line.rstrip()[len(code) :]) and code.strip():
            return [*inside, code], i + 1
        inside.append(line)
    return inside, len(lines)


def _blocks_of(opening: re.Match[str], inside: list[str]) -> list[FencedBlock]:
    """Return the block, or the blocks that a block of Markdown contains."""
    groups = opening.groupdict()
    info = ((groups["info"] if groups["fence"] else groups["after"]) or "").strip()
    if _CODE_BEHIND.match(info):
        return [FencedBlock("", textwrap.dedent("\n".join([info, *inside])).rstrip())]
    text, language = textwrap.dedent("\n".join(inside)).rstrip(), language_of(info)
    if language in _MARKDOWN and any(_OPENING.fullmatch(line) for line in inside):
        return fenced_blocks(text)
    return [FencedBlock(language, text)]


def language_of(info: str) -> str:
    """Return the language of an info string in lower case, such as python of `python:main.py` or `{.python .numbers}`."""
    if classes := re.findall(r"(?<=[\s{])\.([\w+-]+)", info) if info.startswith("{") else []:
        return classes[0].lower()
    word = re.match(r"\{?[.#]?([^\s:,;={}()\[\]\"']*)(=?)", info.strip())
    return "" if word is None or word[2] else word[1].lower()
