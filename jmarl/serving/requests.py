"""Read the body of a request to /v1/chat/completions or /v1/completions: types, ranges, limits. Nothing is ignored in silence.

Fields that change nothing here (`user`, `metadata`, `store`, ...) are accepted. Fields that would change what is sampled, and
that the sampler does not have (`frequency_penalty`, `logit_bias`, `response_format`, ...), are refused unless they are off.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jmarl.config.validation import did_you_mean
from jmarl.serving.errors import HttpRefusal, invalid

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
NO_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
# Fields of samplers that this one does not have, and the values with which they are off.
OFF: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "parallel_tool_calls": (True,), "modalities": (["text"],),
}  # fmt: skip
READ = (
    "model", "stream", "stream_options", "n", "seed", "stop", "max_tokens", "temperature", "top_p", "logprobs",
    "return_token_ids",
)  # fmt: skip
CHAT_FIELDS = (*READ, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", *NO_EFFECT, *OFF)
TEXT_OFF = {name: OFF[name] for name in ("frequency_penalty", "presence_penalty", "logit_bias")}
TEXT_OFF |= {"best_of": (1,), "echo": (False,), "suffix": ("",)}
TEXT_FIELDS = (*READ, "prompt", *NO_EFFECT, *TEXT_OFF)
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
MAX_TOP = 20  # alternatives of each token
MAX_MESSAGES, MAX_TOOLS, MAX_STOPS, MAX_STOP = 2048, 128, 4, 256
NUM_SEEDS = 1 << 31


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """What a request may ask for."""

    max_tokens: int  # of a completion
    default_tokens: int  # of a completion where the request does not say
    temperature: float  # the same
    top_p: float
    n: int = 8
    body: int = 1 << 20  # bytes


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A request that was read."""

    model: str
    messages: tuple[dict[str, Any], ...]  # () for a prompt
    limit: int | None  # of a completion, in tokens; None: the request does not say
    temperature: float
    top_p: float
    n: int = 1
    seed: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    top: int = 0  # alternatives of each token
    token_ids: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None  # a text or token ids, without the chat template


def read_chat(body: bytes, limits: RequestLimits) -> ChatRequest:
    """Return the request in a body. Raises `HttpRefusal`."""
    fields = read_object(body)
    check_known(fields, CHAT_FIELDS, OFF)
    limit = [name for name in ("max_completion_tokens", "max_tokens") if fields.get(name) is not None]
    top, logprobs = integer(fields, "top_logprobs", 0, MAX_TOP) or 0, boolean(fields, "logprobs")
    if top and not logprobs:
        raise invalid(f"top_logprobs={top} needs logprobs: set it to true", "top_logprobs")
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none", None):
        raise invalid(f"tool_choice={choice!r:.40} is not supported: give auto or none", "tool_choice")
    return ChatRequest(
        messages=read_messages(fields.get("messages")),
        tools=() if choice == "none" else read_tools(fields.get("tools")),
        **_read_sampling(fields, limits, limit[0] if limit else "max_tokens", logprobs, top),
    )


def read_text(body: bytes, limits: RequestLimits) -> ChatRequest:
    """Return the request for the completion of a prompt, a text or token ids, in a body. Raises `HttpRefusal`."""
    fields = read_object(body)
    check_known(fields, TEXT_FIELDS, TEXT_OFF)
    prompt, top = fields.get("prompt"), integer(fields, "logprobs", 0, MAX_TOP)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_ids = isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise invalid("prompt must be a text or a list of token ids, one of them in a request", "prompt")
    return ChatRequest(
        messages=(),
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        **_read_sampling(fields, limits, "max_tokens", top is not None, top or 0),
    )


def _read_sampling(fields: Mapping[str, Any], limits: RequestLimits, limit: str, logprobs: bool, top: int) -> dict[str, Any]:
    """Return what both kinds of requests say. limit: the field with the longest completion."""
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool | None):
        raise invalid("stream_options is an object with the boolean include_usage", "stream_options")
    stream = boolean(fields, "stream")
    if options and not stream:
        raise invalid("stream_options is for streams: leave it out, or set stream", "stream_options")
    seed = integer(fields, "seed", -(1 << 63), (1 << 63) - 1)
    return dict(
        model=text(fields, "model"),
        limit=integer(fields, limit, 1, limits.max_tokens),
        temperature=read_temperature(fields, limits.temperature),
        top_p=number(fields, "top_p", 0, 1, limits.top_p, low_open=True),
        n=integer(fields, "n", 1, limits.n) or 1,
        seed=None if seed is None else seed % NUM_SEEDS,
        stops=read_stops(fields.get("stop")),
        stream=stream,
        stream_usage=bool(options.get("include_usage")),
        logprobs=logprobs,
        top=top,
        token_ids=logprobs or boolean(fields, "return_token_ids"),
    )


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body."""
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise invalid("the body is not UTF-8: send a JSON object in UTF-8", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        place = f" ({error.msg}, character {error.pos})" if isinstance(error, json.JSONDecodeError) else ""
        raise invalid(f"the body is no JSON{place}: send a JSON object", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid("the body is no JSON object: send one with model and messages or prompt", code="invalid_json")
    return fields


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def check_known(fields: Mapping[str, Any], known: Sequence[str], off_by: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that are unknown, or that ask for what the sampler does not have. off_by: the values of those allowed."""
    for name, value in fields.items():
        if name not in known:
            raise invalid(f"there is no field {name[:40]!r}{did_you_mean(name[:40], known)}", name[:40], "unknown_parameter")
        if name in off_by and value is not None and value not in off_by[name]:
            off = " or ".join(map(json.dumps, off_by[name]))
            raise invalid(f"{name} is not supported: leave it out, or give {off}", name, "unsupported_parameter")


def text(fields: Mapping[str, Any], name: str) -> str:
    """Return a field that is a text."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise invalid(f"{name} must be a text, got {kind_of(value)}", name)
    return value


def boolean(fields: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true or false; false where it is missing."""
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise invalid(f"{name} must be true or false, got {kind_of(value)}", name)
    return bool(value)


def integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """Return a field that is an integer in a range; None where it is missing."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"{name} must be an integer, got {kind_of(value)}", name)
    if not low <= value <= high:
        given = value if abs(value) < 10**20 else "a number of many digits"
        raise invalid(f"{name}={given} is not allowed: give an integer from {low} to {high}", name)
    return value


def number(fields: Mapping[str, Any], name: str, low: float, high: float, default: float, *, low_open: bool = False) -> float:
    """Return a field that is a number in a range."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(f"{name} must be a number, got {kind_of(value)}", name)
    if not low <= value <= high or (low_open and value == low):
        allowed = f"above {low:g}, up to {high:g}" if low_open else f"from {low:g} to {high:g}"
        raise invalid(f"{name} must be a number {allowed}", name)
    return float(value)


def read_temperature(fields: Mapping[str, Any], default: float) -> float:
    """Return the temperature. Numbers close to 0 would overflow the logits."""
    value = number(fields, "temperature", 0, HIGHEST_TEMPERATURE, default)
    if fields.get("temperature") is not None and 0 < value < LOWEST_TEMPERATURE:
        raise invalid(
            f"temperature={value:g} is not allowed: give 0, which is greedy, or a number from {LOWEST_TEMPERATURE} to "
            f"{HIGHEST_TEMPERATURE:g}",
            "temperature",
        )
    return value


def read_stops(value: Any) -> tuple[str, ...]:
    """Return the stop strings."""
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop must be a text or a list of texts", "stop")
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP for stop in stops):
        raise invalid(f"stop may have up to {MAX_STOPS} texts of 1 to {MAX_STOP} characters", "stop")
    return tuple(stops)


def read_messages(value: Any) -> tuple[dict[str, Any], ...]:
    """Return the messages, with texts as contents."""
    if not isinstance(value, list) or not value or len(value) > MAX_MESSAGES:
        raise invalid(f"messages must be a list of 1 to {MAX_MESSAGES} messages", "messages")
    messages = tuple(_read_message(message, i) for i, message in enumerate(value))
    if messages[-1]["role"] == "assistant":
        raise invalid("messages must not end with one of the assistant, which would have to answer itself", "messages")
    return messages


def _read_message(message: Any, i: int) -> dict[str, Any]:
    place = f"messages[{i}]"
    if not isinstance(message, dict):
        raise invalid(f"{place} must be an object with role and content, got {kind_of(message)}", "messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{place}.role must be one of {', '.join(ROLES)}, got {role!r:.40}", "messages")
    calls = message.get("tool_calls") if role == "assistant" else None
    read = {"role", "content", "refusal", *{"assistant": ("tool_calls",), "tool": ("tool_call_id",)}.get(role, ())}
    if unread := [name for name, x in message.items() if name not in read and x is not None]:
        raise invalid(f"{place} has {unread[0][:40]!r}, which is not supported in a message of the role {role}", "messages")
    content = _read_content(message.get("content"), place, optional=bool(calls))
    result: dict[str, Any] = {"role": ROLES[role], "content": content}
    if calls:
        result["tool_calls"] = _read_calls(calls, place)
    return result


def _read_content(content: Any, place: str, optional: bool) -> str:
    if content is None and optional:
        return ""
    if isinstance(content, list):  # parts
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise invalid(f"{place}.content has parts that are no texts: only those of type text are supported", "messages")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise invalid(f"{place}.content must be a text, got {kind_of(content)}", "messages")
    return content


def _read_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Return the tool calls of a message of the assistant, with arguments as objects, which chat templates read."""
    sentence = f"{place}.tool_calls must be a list of objects with a function, of which name and arguments are texts"
    result = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not all(isinstance(function.get(x), str) for x in ("name", "arguments")):
            raise invalid(sentence, "messages")
        try:
            arguments = json.loads(function["arguments"] or "{}", parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise invalid(f"{place}.tool_calls: the arguments of {function['name']!r:.40} are no JSON", "messages") from None
        result.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return result


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Return the tools."""
    tools = [] if value is None else value
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise invalid(f"tools must be a list of at most {MAX_TOOLS} tools", "tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{i}] must be an object of type function, with a function that has a name", "tools")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise invalid(f"tools[{i}].function.parameters must be a JSON schema, an object", "tools")
    return tuple(tools)


def kind_of(value: Any) -> str:
    """Return the type of a JSON value in words."""
    kinds = {"NoneType": "nothing", "str": "a text", "bool": "a boolean", "list": "a list", "dict": "an object"}
    return kinds.get(type(value).__name__, "a number" if not isinstance(value, float) or math.isfinite(value) else "no number")


def unknown_model(name: str, known: Sequence[str]) -> HttpRefusal:
    """Return the refusal of a model that is not served."""
    message = f"there is no model {name[:80]!r}: this server has {', '.join(known)}"
    return HttpRefusal(404, message, "model_not_found", "model")
