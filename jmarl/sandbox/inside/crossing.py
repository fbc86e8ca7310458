"""What crosses by a description, of which the other side makes something like it: classes of exceptions, and functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any


def tree(kind: type, number: Callable[[type], int]) -> list[list]:
    """An exception's class and those that it comes from, most derived first: module, name, number, and the places of its bases
    in this list."""
    kinds = [c for c in kind.__mro__ if issubclass(c, BaseException)]
    names = [(str(c.__module__), str(c.__qualname__)) for c in kinds]
    numbers = [-1 if standard_error(*name) is c else number(c) for c, name in zip(kinds, names, strict=True)]
    bases = [[kinds.index(base) for base in c.__bases__ if base in kinds] for c in kinds]
    return [[*name, *about] for name, *about in zip(names, numbers, bases, strict=True)]


def built(entries: list, known: dict[int, Any], body: dict[str, Any]) -> type:
    """The class that a `tree` tells of: of the standard library, or one like it, the same for the same number."""
    made: list[type] = []
    for module, name, number, bases in reversed(entries):
        found = standard_error(str(module), str(name)) or known.get(number)
        if found is None:
            above = tuple(made[len(entries) - 1 - place] for place in bases)
            found = known[number] = type(str(name).rpartition(".")[2], above or (Exception,), body)
        made.append(found)
    return made[-1]


def instance(kind: type, arguments: list) -> Any:
    try:
        return kind(*arguments)
    except Exception:  # a constructor that wants something else
        return kind.__new__(kind, *arguments)


def standard_error(module: str, name: str) -> type | None:
    """An exception of the standard library, loaded already; not those that unittest steers by."""
    root = module.partition(".")[0]
    if root not in sys.stdlib_module_names or root == "unittest":
        return None
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def described(function: Any) -> dict[str, Any]:
    """What a decorator may want to know of a function."""
    about = {name: text for name in ("__name__", "__qualname__", "__doc__") if type(text := getattr(function, name, 0)) is str}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {"named": about}
    return {
        "named": about,
        "parameters": [[p.name, int(p.kind), [_simple(p.default)][: p.default is not p.empty]] for p in parameters],
    }


def _simple(x: Any) -> Any:
    return x if type(x) in (str, bool) or type(x) is int and abs(x) < 1 << 63 else None


def stand_in(about: dict[str, Any], call: Callable[[tuple, dict], Any]) -> Callable[..., Any]:
    """A function as it was `described`."""

    def function(*arguments: Any, **named: Any) -> Any:
        return call(arguments, named)

    for name, text in about.get("named", {}).items():
        setattr(function, name, text)
    if "parameters" in about:
        kinds = list(inspect._ParameterKind)
        parameters = [
            inspect.Parameter(name, kinds[kind], default=(*default, inspect.Parameter.empty)[0])
            for name, kind, default in about["parameters"]
        ]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function
