"""Follow which special tokens the texts of an episode spell, for prompts without a chat template.

Such a prompt may hold a template that the user's data, formatter or environment writes by hand, so its special tokens are
tokens in the first turn. In later turns the prompt may also hold what agents wrote. Then a special token is one only if the
agent's first prompt spells it too, and no completion of the episode does, nor the end of one with the beginning of another,
or with whole ones between them (an environment may write them side by side); otherwise it is text. Escaped forms count as
well, such as &lt; and \\u003c, since an environment may decode them. Chat templates need none of this: there, all contents
are text. Left out: forms that only one environment decodes; let it write messages, not texts.
"""

from __future__ import annotations

import base64
import html
import re
import unicodedata
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.models.hub.special_tokens import special_tokens, spelled
from jmarl.rollout.turns import Turn
from jmarl.team import Team


class Spelling(NamedTuple):
    """The special tokens of an agent that its episode has spelled."""

    first: frozenset[str] | None = None  # in its first prompt; None: it had none so far
    by_agents: frozenset[str] = frozenset()  # in completions
    begun: frozenset[str] = frozenset()  # beginnings of special tokens with which completions end
    ended: frozenset[str] = frozenset()  # ends of special tokens with which completions begin

    @property
    def allowed(self) -> frozenset[str]:
        """Those that a prompt may write."""
        return (self.first or frozenset()) - self.by_agents

    def after(self, tokenizer: Any, completions: Iterable[str], prompt: str | None) -> Spelling:
        """Return the spelling after the completions of a turn, with the prompt of the next one."""
        if self.first == frozenset():  # no later prompt may write any
            return self
        tokens = special_tokens(tokenizer)
        texts = [form.strip() for text in completions for form in decoded_forms(text)]
        sizes = range(1, tokens.longest)
        begun = self.begun | tokens.heads.intersection(text[-size:] for text in texts for size in sizes)
        short, longer = {text for text in texts if 0 < len(text) < tokens.longest}, begun
        while longer := tokens.heads.intersection(head + text for head in longer for text in short) - begun:
            begun |= longer
        ended = self.ended | tokens.tails.intersection(text[:size] for text in texts for size in sizes)
        joined = {head + tail for head in begun for tail in ended} & tokens.ids.keys()
        by_agents = self.by_agents.union(joined, *(spelled(tokenizer, text) for text in texts))
        return Spelling(_in_prompt(tokenizer, prompt) if self.first is None else self.first, by_agents, begun, ended)


def decoded_forms(text: str) -> list[str]:
    """Return a text, and what may become of it where it is decoded: entities, %3c, \\u003c, NFKC, base64, other cases."""
    forms, steps = [text], (html.unescape, urllib.parse.unquote, _without_backslashes, _normalized, _from_base64)
    for _ in range(2):  # an environment may decode twice
        for step in steps:
            forms += [form for form in [step(forms[-1])] if form != forms[-1]]
    return list(dict.fromkeys(x for form in forms for x in (form, form.lower(), form.upper())))


def _without_backslashes(text: str) -> str:
    codes = r"\\(?:[uU]\{?0*([0-9a-fA-F]{2,6})\}?|x([0-9a-fA-F]{2}))"
    text = re.sub(codes, lambda match: chr(min(int(match[1] or match[2], 16), 0x10FFFF)), text)
    return text.replace("\\", "")


def _normalized(text: str) -> str:
    return unicodedata.normalize("NFKC", "".join(x for x in text if unicodedata.category(x) != "Cf"))


def _from_base64(text: str) -> str:
    words = [word[: len(word) - (len(word) % 4 == 1)] for word in re.findall(r"[A-Za-z0-9+/_-]{8,}", text)]
    words = [word + "=" * (-len(word) % 4) for word in words]
    decoded = [base64.urlsafe_b64decode(word.replace("+", "-").replace("/", "_")) for word in words]
    return " ".join([text, *(x.decode("utf-8", "ignore") for x in decoded)])


Spellings = list[list[Spelling]]  # [N][P]


def _in_prompt(tokenizer: Any, prompt: Any) -> frozenset[str] | None:
    return None if prompt is None else spelled(tokenizer, prompt) if isinstance(prompt, str) else frozenset()


def first_spellings(team: Team, prompts: Sequence[Sequence[Any]]) -> Spellings:
    """Return the spellings [N][P] at the beginning of episodes, with their first prompts [N][P]."""
    agents = zip(team.agent_specs, prompts, strict=True)
    return [[Spelling(_in_prompt(spec.tokenizer, prompt)) for prompt in row] for spec, row in agents]


def next_spellings(
    team: Team, spellings: Spellings, turn: Turn, continuing: np.ndarray, prompts: Sequence[Sequence[Any]]
) -> Spellings:
    """Return the spellings [N][P] at the nodes after the joint actions `continuing` of a turn, with their prompts [N][P]."""
    node, joint = np.divmod(continuing, len(turn.joint))
    actions = zip(node, turn.joint[joint], strict=True)
    written = [[texts[p][g] for texts, g in zip(turn.texts, action, strict=True)] for p, action in actions]
    return [
        [row[p].after(spec.tokenizer, texts, prompt) for p, texts, prompt in zip(node, written, own, strict=True)]
        for spec, row, own in zip(team.agent_specs, spellings, prompts, strict=True)
    ]


def allowed(spellings: Spellings) -> list[list[frozenset[str]]]:
    """Return the special tokens [N][P] that prompts may write."""
    return [[spelling.allowed for spelling in row] for row in spellings]
