"""Check settings: their names, types, ranges and choices. The annotations of a dataclass say what is allowed.

top_p: Annotated[float, Range(0, 1, low_open=True, note="1 is off")] = 1.0
branching: Literal["tree", "chain"] = "tree"
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from jmarl.config.aliases import REFUSED

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; the open ends are excluded. note: what one of the numbers means."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    note: str = ""

    def __contains__(self, x: float) -> bool:
        above = x > self.low if self.low_open else x >= self.low
        return above and (x < self.high if self.high_open else x <= self.high)

    def __str__(self) -> str:
        if math.isinf(self.high):
            text = f"{'>' if self.low_open else '>='} {_number(self.low)}"
        else:
            text = f"in {'[('[self.low_open]}{_number(self.low)}, {_number(self.high)}{'])'[self.high_open]}"
        return f"{text} ({self.note})" if self.note else text


def _number(x: float) -> str:
    return str(int(x)) if x == int(x) else str(x)


Positive = Annotated[float, Range(0, low_open=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Count = Annotated[int, Range(1)]
CountOrAuto = Annotated[int, Range(1)] | Literal["auto"]
CountOrOff = Annotated[int, Range(0, note="0 is off")]


def check(name: str, value: Any, ok: bool, allowed: str) -> None:
    """Raise a ValueError for a bad setting that says what was given and what is allowed."""
    if not ok:
        raise ValueError(f"{name}={value!r} is not allowed: {name} must be {allowed}")


def check_argument(name: str, value: Any, kind: Any, wanted: str) -> None:
    """Raise a TypeError unless an argument of a public function is of a class, or of one of several. wanted: what to give."""
    if not isinstance(value, kind):
        given = f"of type {type(value).__name__}" if value is not None else "None"
        given = f"the class {value.__name__}, no object of it" if isinstance(value, type) else given
        raise TypeError(f"{name} is {given}: give {wanted}")


def per_agent_values(value: Any) -> tuple:
    """Return the values of a setting that is one for all agents or a tuple with one per agent."""
    return value if isinstance(value, tuple) else (value,)


MAX_NAME = 200  # characters of a name that is compared with others


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that names the nearest known name, or "" where none is near; `REFUSED` has its own."""
    if name in REFUSED:
        return f"; {REFUSED[name]}"
    if len(name) > MAX_NAME:  # comparing takes long
        return ""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.65)  # at 0.6 deepspeed is near seed
    return f"; did you mean {near[0]!r}?" if near else ""


def check_names(cls: Any, names: Iterable[str], other_names: Sequence[str] = ()) -> None:
    """Raise a TypeError that names the nearest setting for names that are neither fields of the dataclass nor other_names."""
    known = [*(field.name for field in dataclasses.fields(cls)), *other_names]
    for name in names:
        if name not in known:
            meant = did_you_mean(name, known) or f"; help({cls.__name__}) lists its settings"
            raise TypeError(f"{cls.__name__} has no setting {name!r}{meant}")


def with_known_names(cls: type[T]) -> type[T]:
    """Make the constructor of a dataclass name the nearest setting where it gets one that the class does not have."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **settings: Any) -> None:
        check_names(cls, settings)
        init(self, *args, **settings)

    cls.__init__ = checked
    return cls


def check_fields(section: Any, names: Iterable[str] | None = None) -> None:
    """Check fields of a dataclass against their annotations; lists become tuples, so that settings are hashable.

    names: of the fields to check; None: all. Raises TypeError for another type (such as text for a number, as YAML reads 1e-5)
    and ValueError for a number out of its range or a text that is no choice."""
    hints = _hints(type(section))
    for name in hints if names is None else names:
        value = getattr(section, name)
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(section, name, value)
        problem = _problem(value, hints[name])
        if problem is not None:
            kind, allowed = problem
            raise kind(f"{name}={value!r} is not allowed: {name} must be {allowed}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _problem(value: Any, hint: Any) -> tuple[type[Exception], str] | None:
    """Return what is wrong with a value (the exception and what is allowed); None where nothing is."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        problem = _problem(value, arguments[0])
        outside = [x for x in arguments[1:] if isinstance(x, Range) and problem is None and value not in x]
        return (ValueError, str(outside[0])) if outside else problem
    if origin is Literal:
        if value in arguments:
            return None
        return (ValueError if isinstance(value, str) else TypeError), f"one of {arguments}"
    if origin in (typing.Union, types.UnionType):
        problems = [_problem(value, option) for option in arguments]
        if None in problems:
            return None
        wrong_values = [problem for problem in problems if problem is not None and problem[0] is ValueError]
        or_none = ", or None" if type(None) in arguments else ""
        if Literal["auto"] in arguments:  # a number or a bool, or this text
            ranges = [x for x in typing.get_args(arguments[0]) if isinstance(x, Range)]
            allowed = ranges[0] if ranges else _type_name(arguments[0])
            return (ValueError if wrong_values else TypeError), f"{allowed}, or 'auto'"
        if float in arguments and any(typing.get_origin(option) is Literal for option in arguments):
            or_none = f", or a number{or_none}"
        return (ValueError, wrong_values[0][1] + or_none) if wrong_values else (TypeError, f"of type {_type_name(hint)}")
    if origin is dict:
        named = isinstance(value, dict) and all(isinstance(name, str) for name in value)
        return None if named else (TypeError, "a dict whose keys are names")
    if origin is tuple:
        if not isinstance(value, tuple):
            return TypeError, f"of type {_type_name(hint)}"
        return next((problem for x in value if (problem := _problem(x, arguments[0])) is not None), None)
    if hint in (int, float):
        fits = isinstance(value, numbers.Integral if hint is int else numbers.Real) and not isinstance(value, bool)
    else:
        fits = value is None if hint is type(None) else isinstance(value, hint)
    return None if fits else (TypeError, f"of type {_type_name(hint)}")


def _type_name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return "str"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_type_name, arguments)))
    if origin is dict:
        return "dict"
    if origin is tuple:
        return f"tuple[{_type_name(arguments[0])}, ...]"
    return "None" if hint is type(None) else hint.__name__


# --- explanations ------------------------------------------------------------------------------------------------------


def explain(cls: Any) -> dict[str, str]:
    """Return "default | what is allowed | meaning" of each field of a dataclass, by name. The meaning is the text below it."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    texts = {
        field.target.id: " ".join(str(ast.literal_eval(text.value)).split())  # type: ignore[union-attr]
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    hints, lines = _hints(cls), {}
    for field in dataclasses.fields(cls):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        parts = ["needed" if needed else f"{default!r}", allowed_text(hints[field.name]), texts.get(field.name, "")]
        lines[field.name] = " | ".join(parts)
    return lines


def allowed_text(hint: Any) -> str:
    """Return what an annotation allows, in words: its choices, its range or its type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        ranges = [str(x) for x in arguments[1:] if isinstance(x, Range)]
        return " ".join([{int: "a whole number"}.get(arguments[0], "a number"), *ranges])
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(allowed_text, arguments)))
    if origin is tuple:
        return f"a list of: {allowed_text(arguments[0])}"
    if origin is dict:
        return "a mapping"
    words = {bool: "True, False", int: "a whole number", float: "a number", str: "a text", type(None): "None"}
    return words.get(hint, _type_name(hint))
