"""Which options clients may set, by an allow list, and which errors about them they may read (host code, no jax).

A text that reaches a constructor may be a path, and an error may hold what a file holds. So clients set numbers, booleans, and
lists and dicts of those. Of a text the allowed values must be known: jmarl names them for its own environments (TEXTS), a class
of the user names them by a `Literal`, or whoever serves lists the option in `client_options`. Paths, data files, addresses and
objects are set by whoever serves, in the file of --config.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jmarl.envs import import_object, place_of
from jmarl.envs.code.data import SOURCES as CODE_DATA
from jmarl.envs.code.generation import FEEDBACK_MODES
from jmarl.envs.math.data import SOURCES as MATH_DATA
from jmarl.envs.options import GENERAL
from jmarl.envs.tools.function_calling import SHARING
from jmarl.envs.tools.tasks import MAKERS

NAME = re.compile(r"\w[\w -]*")  # texts of options that whoever serves has listed, and keys of dicts
TEXTS: dict[str, Collection[str]] = {  # options of jmarl's environments -> their texts
    "feedback": FEEDBACK_MODES,
    "kinds": tuple(MAKERS),
    "sharing": tuple(SHARING),
}
DATA: dict[str, Collection[str]] = {"jmarl.envs.math.": MATH_DATA, "jmarl.envs.code.": CODE_DATA}  # names of data sets
FREE_TEXTS = ("stop_words", "transitions")  # lists and dicts of words, which jmarl's environments look for in texts
MAX_ROWS, MAX_ROWS_BYTES = 10_000, 4 << 20  # of `problems`
MAX_COUNT = 1000  # of agents, turns and the like of jmarl's environments
SET_BY_SERVER = "paths, addresses and data files are set by whoever serves (--config)"


def problem_of(place: str, option: str, value: Any, is_listed: bool, call_seconds: float) -> str:
    """Return why a client may not set an option of an environment; an empty text if it may.

    place: as for `make`. is_listed: whether whoever serves lists it in `client_options`. call_seconds: that a call may take.
    """
    place = place_of(place)
    is_own = place.startswith("jmarl.")
    annotations = annotations_of(import_object(place))
    if option == "servers":
        return "it would let a server connect elsewhere"
    if option == "problems" and (is_own or option not in annotations):
        return problem_of_rows(value)
    if option == "timeout" and option not in annotations:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return "" if is_number and 0 < value <= call_seconds else f"give seconds, above 0 and at most {call_seconds:g}"
    annotation = annotations.get(option)
    if value is not None and "Path" in str(annotation):
        return SET_BY_SERVER
    if value is not None and is_own and option == "limits":
        return "whoever serves sets the limits of programs (--config); give timeout=seconds"
    if is_own and isinstance(value, int) and abs(value) > MAX_COUNT and option not in GENERAL:
        return f"numbers of clients are at most {MAX_COUNT}"
    if is_own and option in FREE_TEXTS and not isinstance(value, str):
        return ""
    allowed = texts_of(place, option) if is_own else [*literals_in(annotation)]
    if is_own or allowed:
        return "" if all(text in allowed for text in texts_in(value)) else not_allowed(allowed)
    texts = [*texts_in(value)]
    if texts and not is_listed:
        return f"it takes texts of clients only if client_options lists it; {SET_BY_SERVER}"
    return "" if all(NAME.fullmatch(text) for text in texts) else f"a text here is a name; {SET_BY_SERVER}"


def not_allowed(texts: Collection[Any]) -> str:
    """Return what a client reads about a text."""
    return f"give {', '.join(map(str, texts))}" if texts else f"clients give no text here; {SET_BY_SERVER}"


def problem_of_rows(value: Any) -> str:
    """Return what is wrong with the `problems` of a client, which are dicts and never the name of a file."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(row, dict) for row in value):
        return f"clients give a list of dicts; {SET_BY_SERVER}"
    if len(value) > MAX_ROWS:
        return f"{len(value)} dicts are too many: give at most {MAX_ROWS}"
    size = len(json.dumps(value))
    return "" if size <= MAX_ROWS_BYTES else f"{size} bytes as JSON are too many: give at most {MAX_ROWS_BYTES}"


def texts_of(place: str, option: str) -> Collection[str]:
    """Return the texts of an option of one of jmarl's environments."""
    if option == "data":
        return next((names for room, names in DATA.items() if place.startswith(room)), ())
    return TEXTS.get(option, ())


def literals_in(annotation: Any) -> Iterator[Any]:
    """Return the values that an annotation names, such as those of `Literal["short", "long"] | None`."""
    for argument in typing.get_args(annotation):
        if typing.get_origin(annotation) is typing.Literal:
            yield argument
        else:
            yield from literals_in(argument)


def texts_in(value: Any) -> Iterator[str]:
    """Return the texts in a value. Keys of dicts count unless they are names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, dict):
        yield from (key for key in value if not NAME.fullmatch(key))
        for item in value.values():
            yield from texts_in(item)


def annotations_of(cls: type) -> dict[str, Any]:
    """Return the annotations of the parameters of a constructor, and of those above it that it passes keyword arguments on
    to: as types where they can be resolved, else as texts."""
    annotations: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        try:
            types = typing.get_type_hints(base.__init__)
        except (NameError, TypeError):  # imported for type checkers only
            types = {}
        for parameter in parameters:
            if parameter.kind is not parameter.VAR_KEYWORD:
                annotations.setdefault(parameter.name, types.get(parameter.name, parameter.annotation))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return annotations


def may_read_files(options: Mapping[str, Any]) -> bool:
    """Return whether an environment with these options may read files while it is built."""
    names_file = isinstance(options.get("problems"), str)
    return names_file or any(options.get(name) is not None for name in ("data", "data_path"))


def is_of_files(error: BaseException) -> bool:
    """Return whether an error, or one that it came from, is one of reading a file: its text may hold what the file holds."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError | UnicodeError | json.JSONDecodeError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
