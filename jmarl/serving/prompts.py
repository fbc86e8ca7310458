"""Encode the messages and tools of a request with the chat template of an agent, and read the tool calls of its completions.

A template that writes tools gets them, and messages with tool calls, as they are. For others tools are a system message, calls
are text of the assistant in the form of this project's prompts, and results are text of the user.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jmarl.config import Chat
from jmarl.envs.formats.native_calls import FORMAT_HINT
from jmarl.envs.tools.tool_calls import MAX_MESSAGE, SPECIAL_TOKENS, format_message, parse_message
from jmarl.models.hub.special_tokens import TOOLS
from jmarl.models.hub.template import TemplateRefusal, render
from jmarl.models.hub.template import encode_messages as encode
from jmarl.models.hub.tokenize import encode_prompt, without_end
from jmarl.serving.errors import invalid
from jmarl.team import StackSpec

Tools = Sequence[Mapping[str, Any]]
TOOL_MARKS = SPECIAL_TOKENS  # special tokens that stay in a completion when there are tools


def encode_messages(spec: StackSpec, messages: Sequence[Mapping[str, Any]], tools: Tools, chat: Chat) -> list[int]:
    """Return the token ids of messages. Raises `Refusal` if the chat template refuses them.

    Args:
        spec: of the agent alone.
        messages: with role, content and, of the assistant, tool_calls.
        tools: as clients of OpenAI give them.
        chat: what the template reads besides.
    """
    try:
        row = _encode(spec.tokenizer, messages, tools, chat)
    except RecursionError:
        raise invalid("messages or tools are nested too deeply", "messages") from None
    except ValueError as error:  # a refusal of the template, in one sentence
        raise invalid(str(error), "messages", "template_refusal") from error
    if not row:
        raise invalid("the messages are empty: there is no token to continue from", "messages")
    return without_end(row, spec.stop, least=1)


def encode_text_prompt(spec: StackSpec, prompt: str | Sequence[int]) -> list[int]:
    """Return the token ids of a prompt without the chat template, in which special tokens are tokens, or those given.

    Raises `Refusal` for ids that the model does not have."""
    if isinstance(prompt, str):
        return encode_prompt(spec.tokenizer, prompt, stop=spec.stop)
    if wrong := [i for i in prompt if not 0 <= i < spec.config.vocab_size]:
        raise invalid(f"prompt has the token {str(wrong[0]):.20}: ids are from 0 to {spec.config.vocab_size - 1}", "prompt")
    return [*prompt]


def _encode(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Tools, chat: Chat) -> list[int]:
    has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    with_tools = dataclasses.replace(chat, template_kwargs={**chat.template_kwargs, "tools": [*tools]}) if tools else chat
    if not tools and not has_calls:
        return encode(tokenizer, messages, chat, outside=True)
    try:
        if writes_tools(tokenizer, chat):
            return encode(tokenizer, messages, with_tools, outside=True)
    except TemplateRefusal:  # of the roles: they are written as text
        pass
    return encode(tokenizer, as_text(messages, tools), chat, outside=True)


def writes_tools(tokenizer: Any, chat: Chat) -> bool:
    """Return whether the chat template writes tools, and does not drop them."""
    user, kwargs = [{"role": "user", "content": "-"}], {**chat.template_kwargs, "tools": TOOLS}
    return "probe" in render(tokenizer, user, dataclasses.replace(chat, template_kwargs=kwargs))


def as_text(messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, str]]:
    """Return messages whose tools, calls and results are text."""
    result = []
    if tools:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        lines = ["You may call these functions:", *lines, f"To call one, {FORMAT_HINT}."]
        result.append({"role": "system", "content": "\n".join(lines)})
    for message in messages:
        if message["role"] == "tool":
            result.append({"role": "user", "content": f"<tool_result>{message['content']}</tool_result>"})
            continue
        calls = [call["function"] for call in message.get("tool_calls", ())]
        written = format_message([{"name": f["name"], "parameters": f["arguments"]} for f in calls], "")
        result.append({"role": message["role"], "content": "\n".join(x for x in (message["content"], written) if x)})
    return result


def read_tool_calls(text: str, tools: Tools) -> list[tuple[str, str]]:
    """Return the calls in a completion, each a name and its arguments as JSON; none unless all can be read.

    A call that cannot be read stays text, for the client to see.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if len(text) > MAX_MESSAGE:
        return []
    message = parse_message(text, schemas)
    if message.unclosed or message.num_refused or any(call.problem for call in message.calls):
        return []
    return [(call.name, json.dumps(call.parameters, ensure_ascii=False)) for call in message.calls]
