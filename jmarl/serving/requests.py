"""The bodies of requests to /v1/chat/completions and /v1/completions: types, ranges, limits. Nothing is ignored in silence.

Fields that change nothing here (`user`, `metadata`, `store`, ...) are accepted. Fields that would change what is sampled, and
that the sampler does not have (`frequency_penalty`, `logit_bias`, `response_format`, ...), are refused unless they are off.
null stands for a field that is missing. pydantic checks types and ranges; `refusal_of` says what was wrong.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from jmarl.config.validation import did_you_mean
from jmarl.serving.errors import HttpRefusal, invalid

Role = Literal["system", "developer", "user", "assistant", "tool"]
OF_ROLE = {"tool_calls": "assistant", "tool_call_id": "tool"}  # fields of a message that only one role has
NO_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
# Fields of samplers that this one does not have, and the value with which they are off.
OFF: dict[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}
CHAT_OFF = OFF | {"response_format": {"type": "text"}, "parallel_tool_calls": True, "modalities": ["text"]}
TEXT_OFF = OFF | {"best_of": 1, "echo": False, "suffix": ""}
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
MAX_TOP = 20  # alternatives of each token
MAX_SHOWN = 40  # characters of what was given, in a sentence
MAX_MESSAGES, MAX_TOOLS, MAX_STOPS, MAX_STOP = 2048, 128, 4, 256
SIZES = {  # by field; also where one is empty
    "messages": f"must be a list of 1 to {MAX_MESSAGES} messages",
    "tools": f"must be a list of up to {MAX_TOOLS} tools",
    "stop": f"may have up to {MAX_STOPS} texts of 1 to {MAX_STOP} characters",
    "prompt": "must be a text or a list of token ids, and not empty",
}
SIZE_ERRORS = ("too_short", "too_long", "string_too_short", "string_too_long")
WORDS = {  # for what pydantic calls a valid string, a valid dictionary or object to extract fields from, ...
    "string_type": "a text", "int_type": "an integer", "float_type": "a number", "bool_type": "true or false",
    "list_type": "a list", "dict_type": "an object", "model_type": "an object", "model_attributes_type": "an object",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """What a request may ask for."""

    max_tokens: int  # of a completion
    default_tokens: int  # of a completion where the request does not say
    temperature: float  # the same
    top_p: float
    n: int = 8
    body: int = 1 << 20  # bytes


# --- parts of bodies ---------------------------------------------------------------------------------------------------


def not_tiny(temperature: float) -> float:
    """Return a temperature. Numbers close to 0 would overflow the logits."""
    if 0 < temperature < LOWEST_TEMPERATURE:
        allowed = f"give 0, which is greedy, or a number from {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE:g}"
        raise invalid(f"temperature={temperature:g} is not allowed: {allowed}", "temperature")
    return temperature


def read_arguments(text: str) -> Any:
    """Return the arguments of a call as an object, which chat templates read."""
    try:
        return json.loads(text or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise invalid(f"messages have a tool call with arguments that are no JSON, {text!r:.40}", "messages") from None


def only_one(prompt: Any) -> Any:
    """Return the prompt in a list of one."""
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)):
        return prompt
    if len(prompt) > 1:
        raise invalid(f"prompt is a list of {len(prompt)} prompts: give one prompt per request", "prompt")
    return prompt[0]


def as_sent(value: Any, check: Any) -> Any:
    """Return a value with all its fields in their order, which a template may write, when it was checked."""
    check(value)
    return value


UNKNOWN = "unknown_field"
FIRST_ERROR = Field(fail_fast=True)  # of a list: a body has room for 500,000 wrong items, and pydantic would describe each
Top = Annotated[int, Field(ge=0, le=MAX_TOP)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]


class BodyPart(BaseModel):
    """An object in a body."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, fields: Any) -> Any:
        """Leave out what is null."""
        return {name: x for name, x in fields.items() if x is not None} if isinstance(fields, dict) else fields


class StreamOptions(BodyPart):
    """Settings of a stream."""

    include_usage: bool = False


class ToolFunction(BodyPart):
    """A function that an agent may call. parameters: a JSON schema."""

    name: str
    parameters: dict[str, Any] = {}


class ChatTool(BodyPart):
    """A tool of a chat."""

    type: Literal["function"]
    function: ToolFunction


class CalledFunction(BodyPart):
    """A function and its arguments, a JSON text."""

    name: str
    arguments: Annotated[str, AfterValidator(read_arguments)]


class ChatCall(BodyPart):
    """A call in a message of the assistant."""

    function: CalledFunction


class TextPart(BodyPart):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BodyPart):
    """A message of a chat."""

    role: Role
    content: str | Annotated[list[TextPart], FIRST_ERROR] | None = None
    refusal: Any = None
    tool_calls: Annotated[list[ChatCall], FIRST_ERROR] | None = None
    tool_call_id: Any = None

    @model_validator(mode="before")
    @classmethod
    def only_known(cls, fields: Any) -> Any:
        """Refuse the first field that is unknown: pydantic would describe each."""
        if isinstance(fields, dict) and fields.get("role") in get_args(Role):
            for name, value in fields.items():
                if value is not None and name not in cls.model_fields:
                    given = {"name": repr(name[:MAX_SHOWN]), "role": fields["role"]}
                    raise PydanticCustomError(
                        UNKNOWN, "has {name}, which is not supported in a message of the role {role}", given
                    )
        return fields

    def for_template(self, place: str) -> dict[str, Any]:
        """Return the message as chat templates read it, with a text as content. Raises `HttpRefusal`."""
        for name, role in OF_ROLE.items():
            if getattr(self, name) is not None and self.role != role:
                raise invalid(f"{place} has {name!r}, which is not supported in a message of the role {self.role}", "messages")
        if self.content is None and not self.tool_calls:
            raise invalid(f"{place}.content must be a text, got nothing", "messages")
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        functions = [{"name": call.function.name, "arguments": call.function.arguments} for call in self.tool_calls or ()]
        calls = {"tool_calls": [{"type": "function", "function": function} for function in functions]} if functions else {}
        return {"role": "system" if self.role == "developer" else self.role, "content": text} | calls


# --- bodies ------------------------------------------------------------------------------------------------------------


class CompletionRequest(BaseModel):
    """What requests of both kinds say."""

    model_config = ConfigDict(strict=True)
    off: ClassVar[Mapping[str, Any]] = {}

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1  # its range, and that of max_tokens: see `check`
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopText | Annotated[list[StopText], FIRST_ERROR, Field(max_length=MAX_STOPS)] = []
    max_tokens: int | None = None
    temperature: Annotated[float, Field(ge=0, le=HIGHEST_TEMPERATURE), AfterValidator(not_tiny)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def only_known(cls, fields: Any) -> Any:
        """Leave out what is null or changes nothing, and refuse what is unknown or what the sampler does not have."""
        if not isinstance(fields, dict):
            return fields
        known = (*cls.model_fields, *NO_EFFECT, *cls.off)
        for name, value in fields.items():
            if name not in known:
                hint = did_you_mean(name[:MAX_SHOWN], known)
                raise invalid(f"there is no field {name[:MAX_SHOWN]!r}{hint}", name[:MAX_SHOWN], "unknown_parameter")
            if name in cls.off and value not in (None, cls.off[name]):
                sentence = f"{name} is not supported: leave it out, or give {json.dumps(cls.off[name])}"
                raise invalid(sentence, name, "unsupported_parameter")
        return {name: x for name, x in fields.items() if name in cls.model_fields and x is not None}

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with the number of its tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def limit_field(self) -> str:
        """The name of the field with the longest completion."""
        return "max_tokens"

    def check(self, limits: RequestLimits) -> None:
        """Raise `HttpRefusal` for more than a server allows, and for fields that need others."""
        for name, most in ((self.limit_field, limits.max_tokens), ("n", limits.n)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise invalid(f"{name}={shown(value)} is not allowed: give an integer from 1 to {most}", name)
        if self.stream_options and self.stream_options.model_fields_set and not self.stream:
            raise invalid("stream_options is for streams: leave it out, or set stream", "stream_options")


class ChatRequest(CompletionRequest):
    """A request to /v1/chat/completions."""

    off = CHAT_OFF

    messages: Annotated[list[ChatMessage], FIRST_ERROR, Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Top = 0
    tools: Annotated[list[ChatTool], FIRST_ERROR, Field(max_length=MAX_TOOLS), WrapValidator(as_sent)] = []
    tool_choice: Literal["auto", "none"] = "auto"

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def top(self) -> int | None:
        """Alternatives of each token; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if self.messages[-1].role == "assistant":
            raise invalid("messages must not end with one of the assistant, which would have to answer itself", "messages")
        if self.top_logprobs and not self.logprobs:
            raise invalid(f"top_logprobs={self.top_logprobs} needs logprobs: set it to true", "top_logprobs")

    def for_template(self) -> tuple[list[dict[str, Any]], Sequence[Any]]:
        """Return the messages and tools as chat templates read them. Raises `HttpRefusal`."""
        messages = [message.for_template(f"messages[{i}]") for i, message in enumerate(self.messages)]
        return messages, self.tools if self.tool_choice == "auto" else ()


class TextRequest(CompletionRequest):
    """A request to /v1/completions. prompt: a text or token ids, or a list with one of them."""

    off = TEXT_OFF

    prompt: Annotated[str | Annotated[list[int], FIRST_ERROR], Field(min_length=1), BeforeValidator(only_one)]
    logprobs: Top | None = None

    @property
    def top(self) -> int | None:
        """As of a chat."""
        return self.logprobs


# --- errors ------------------------------------------------------------------------------------------------------------


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Python reads more than JSON, and in other encodings than UTF-8."""
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        place = f" ({error.msg}, character {error.pos})" if isinstance(error, json.JSONDecodeError) else ""
        raise invalid(f"the body is no JSON in UTF-8{place}: send a JSON object", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid("the body is no JSON object: send one with model and messages or prompt", code="invalid_json")
    return fields


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def refusal_of(errors: Sequence[Mapping[str, Any]]) -> HttpRefusal:
    """Return what a client reads of errors that pydantic has found in a body: one place, and all that is allowed there."""

    def rank(error: Mapping[str, Any]) -> tuple[bool, int]:
        return not error["type"].endswith("_type"), len(error["loc"])  # of a list that is nearly right, what is wrong in it

    worst = max(errors, key=rank)
    place, given = place_of(worst["loc"]), worst["input"]
    param = place.partition("[")[0].partition(".")[0]
    if not place:
        return invalid("the body is empty: send a JSON object", code="invalid_json")
    if worst["type"] == "missing":
        return invalid(f"{place} is missing: give it", param)
    if worst["type"] == UNKNOWN:
        return invalid(f"{place} {worst['msg']}", param)
    if worst["type"] in SIZE_ERRORS and param in SIZES:
        return invalid(f"{param} {SIZES[param]}", param)
    same = [error for error in errors if (rank(error)[0], place_of(error["loc"])) == (rank(worst)[0], place)]
    allowed = dict.fromkeys(WORDS.get(error["type"]) or error["msg"].removeprefix("Input should be ") for error in same)
    verb = " must be" if worst["type"] in WORDS or worst["msg"].startswith("Input should be ") else ":"
    return invalid(f"{place}{verb} {' or '.join(allowed)}, got {shown(given)}", param)


def shown(given: Any) -> str:
    """Return what was given, shortened."""
    text = {dict: "an object", list: "a list"}.get(type(given)) or json.dumps(given)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def place_of(loc: Sequence[int | str]) -> str:
    """Return a place in a body, such as messages[0].role. loc: of pydantic, which names types of unions too."""
    names = [x for x in loc[1:] if isinstance(x, int) or (x.isidentifier() and x != "str")]
    return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in names)[1:]


def unknown_model(name: str, known: Sequence[str]) -> HttpRefusal:
    """Return the refusal of a model that is not served."""
    message = f"there is no model {name[:80]!r}: this server has {', '.join(known)}"
    return HttpRefusal(404, message, "model_not_found", "model")
