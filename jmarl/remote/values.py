"""Convert values of Python to the messages of environments.proto and back, exactly (host code, no jax).

Values are those of JSON, tuples, integers of any size, NaN and infinities; an int stays an int and True stays a bool. Scalars
of numpy become those of Python, arrays lists. Anything else is a TypeError that names the place, such as `task['image']`, and a
text with a lone surrogate is a ValueError, because UTF-8 does not hold it. Nothing is pickled or written as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jmarl.envs.base import Step
from jmarl.models.hub.tokenize import ChatPrompt
from jmarl.remote import environments_pb2 as pb

PROTOCOL = "1"  # changes with every change of environments.proto that an older client or server would misread
MAX_DEPTH = 24  # of lists and dicts in each other; protobuf reads messages up to a depth of 100, and a level of a dict has 3
INT64 = range(-(1 << 63), 1 << 63)


def to_value(value: Any, place: str, depth: int = 0) -> pb.Value:
    """Return the message of a value. place: what errors call it."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    match value:
        case None:
            return pb.Value(null=True)
        case bool():
            return pb.Value(boolean=value)
        case int():
            return pb.Value(integer=value) if value in INT64 else pb.Value(big_integer=format(value, "x"))
        case float():
            return pb.Value(number=value)
        case str():
            return pb.Value(text=checked_text(value, place))
        case list():
            return pb.Value(list=to_list(value, place, depth))
        case tuple():
            return pb.Value(tuple=to_list(value, place, depth))
        case Mapping():
            return pb.Value(map=to_map(value, place, depth))
    raise TypeError(
        f"{place} is a {type(value).__name__}, which cannot be sent to another process: allowed are texts, numbers, True, "
        "False, None, and lists, tuples and dicts of them"
    )


def to_list(values: Sequence[Any], place: str, depth: int = 0) -> pb.List:
    """Return the message of a list or tuple."""
    check_depth(place, depth)
    return pb.List(values=[to_value(value, f"{place}[{i}]", depth + 1) for i, value in enumerate(values)])


def to_map(values: Mapping[str, Any], place: str, depth: int = 0) -> pb.Map:
    """Return the message of a dict, in its order."""
    check_depth(place, depth)
    if not isinstance(values, Mapping):
        raise TypeError(f"{place} is a {type(values).__name__}: give a dict")
    entries = []
    for key, value in values.items():
        if not isinstance(key, str):
            raise TypeError(f"{place} has the key {key!r:.80}, a {type(key).__name__}: keys of dicts that are sent are texts")
        entries.append(
            pb.Entry(key=checked_text(key, f"a key of {place}"), value=to_value(value, f"{place}[{key!r}]", depth + 1))
        )
    return pb.Map(entries=entries)


def check_depth(place: str, depth: int) -> None:
    """Raise a ValueError if lists and dicts are too deep in each other to be read again."""
    if depth >= MAX_DEPTH:
        raise ValueError(
            f"{place:.200} is inside more than {MAX_DEPTH} lists and dicts: what is sent has at most so many levels"
        )


def checked_text(text: str, place: str) -> str:
    """Return a text that UTF-8 can hold, as a plain `str`; raise a ValueError for another."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = f"{text[error.start]!r} at position {error.start}"
        raise ValueError(f"{place} has the lone surrogate {character}, which UTF-8 does not hold: replace it") from None
    return str(text)


def from_value(value: pb.Value) -> Any:
    """Return the value of a message. Raises a ValueError if it has none."""
    match value.WhichOneof("kind"):
        case "null":
            return None
        case "boolean":
            return value.boolean
        case "integer":
            return value.integer
        case "big_integer":
            return int(value.big_integer, 16)
        case "number":
            return value.number
        case "text":
            return value.text
        case "list":
            return from_list(value.list)
        case "tuple":
            return tuple(from_list(value.tuple))
        case "map":
            return from_map(value.map)
    raise ValueError("a value without a kind: the other side writes another protocol, or is no server or client of jmarl")


def from_list(values: pb.List) -> list[Any]:
    """Return the list of a message."""
    return [from_value(value) for value in values.values]


def from_map(values: pb.Map) -> dict[str, Any]:
    """Return the dict of a message. Raises a ValueError if a key is there twice."""
    result = {entry.key: from_value(entry.value) for entry in values.entries}
    if len(result) != len(values.entries):
        raise ValueError("a dict has a key twice")
    return result


def to_observation(prompt: Any, place: str) -> pb.Observation:
    """Return the message of what an agent reads: a text, a `ChatPrompt`, or None."""
    match prompt:
        case None:
            return pb.Observation(absent=True)
        case ChatPrompt():
            texts = [{name: checked_text(message[name], place) for name in ("role", "content")} for message in prompt.messages]
            return pb.Observation(messages=pb.Chat(messages=[pb.ChatMessage(**message) for message in texts]))
        case str():
            return pb.Observation(text=checked_text(prompt, place))
    raise TypeError(f"{place} is a {type(prompt).__name__}: an observation is a text, a list of chat messages, or None")


def from_observation(observation: pb.Observation) -> str | ChatPrompt | None:
    """Return what an agent reads. Raises a ValueError if the message has no kind."""
    match observation.WhichOneof("kind"):
        case "absent":
            return None
        case "text":
            return observation.text
        case "messages":
            return ChatPrompt([{"role": m.role, "content": m.content} for m in observation.messages.messages])
    raise ValueError("an observation without a kind: the server writes another protocol, or is no server of jmarl")


def to_observations(prompts: Sequence[Any], name: str) -> list[pb.Observation]:
    """Return the messages of what each agent reads. name: of the environment."""
    return [to_observation(prompt, f"the observation of agent {n} in {name}") for n, prompt in enumerate(prompts)]


def to_result(step: Step, number: int, name: str) -> pb.Result:
    """Return the message of a step, without its state.

    number: of joint actions so far. name: of the environment. A reward is sent as it is, also one that is no number; arrays
    of any library are sent as lists.
    """
    return pb.Result(
        step=number,
        observations=[] if step.done else to_observations(step.observations, name),
        reward=to_value(plain_numbers(step.reward), f"the reward of {name}"),
        done=bool(step.done),
        truncated=bool(step.truncated),
        info=to_map({key: plain_numbers(x) for key, x in step.info.items()}, f"info of {name}"),
        parts=to_map({key: plain_numbers(x) for key, x in step.parts.items()}, f"parts of {name}"),
    )


def from_result(result: pb.Result, state: Any) -> Step:
    """Return the step of a message. state: of the episode."""
    return Step(
        state,
        [from_observation(observation) for observation in result.observations],
        from_value(result.reward),
        result.done,
        from_map(result.info),
        result.truncated,
        from_map(result.parts),
    )


def plain_numbers(value: Any) -> Any:
    """Return an array or tensor of any library as a list or number, and any other value as it is."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value
