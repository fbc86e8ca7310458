"""Warn of prompts that a chat template does not put in words as they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from jmarl.config import Chat, as_chat
from jmarl.models.hub.messages import ChatPrompt, as_prompt
from jmarl.models.hub.special_tokens import special_tokens
from jmarl.models.hub.template import plain_turns, refuses_system


def warn_of_prompts(tokenizer: Any, prompts: Iterable[Any], chat: bool | Chat, agent: int) -> None:
    """Warn once each of messages with a role that an agent's template refuses, of texts that hold a template already, and of
    turns that begin with plain text."""
    chat, prompts = as_chat(chat), [as_prompt(prompt) for prompt in prompts]
    roles = {message["role"] for prompt in prompts if isinstance(prompt, ChatPrompt) for message in prompt.messages}
    if "system" in roles and refuses_system(tokenizer, chat):
        warnings.warn(
            f"the chat template of agent {agent} refuses the role system: the text of such messages begins the next message of "
            "the user; this warning appears once",
            stacklevel=2,
        )
    begins_turn = sorted(special_tokens(tokenizer).of_turns) if chat else ()
    texts = (prompt.lstrip() for prompt in prompts if isinstance(prompt, str) and not isinstance(prompt, ChatPrompt))
    if begins_turn and (begin := next((token for text in texts for token in begins_turn if text.startswith(token)), "")):
        warnings.warn(
            f"a prompt of agent {agent} begins with {begin!r}, as if it stood in a chat template already: with chat it is "
            "the text of a message, in which special tokens are plain text; give messages, the text without a template, or "
            "chat=False; this warning appears once",
            stacklevel=2,
        )
    warn_of_plain_turns(tokenizer, chat, agent)


def warn_of_plain_turns(tokenizer: Any, chat: bool | Chat, agent: int) -> None:
    """Warn once of a chat template whose messages begin with plain text. Without a chat there is none."""
    if not (chat := as_chat(chat)):
        return
    try:
        begin = plain_turns(tokenizer, str(tokenizer.chat_template), chat)
    except ValueError:  # no template, or one for other conversations: encoding a prompt says so
        return
    if begin is not None:
        warnings.warn(
            f"the chat template of agent {agent} begins messages with the plain text {begin.strip()!r:.60}, which messages may "
            "write too: an agent, tool or client can forge messages of others; use a model whose template has special tokens "
            "for that; this warning appears once",
            stacklevel=3,
        )
