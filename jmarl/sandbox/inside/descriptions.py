"""Describe exception classes and functions, and build from a description something like them in the other process."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any


def describe_error_class(error_class: type, number_of: Callable[[type], int]) -> list[list]:
    """Return an exception class and its base classes that are exceptions, most derived first.

    Each is [module, name, number, bases], where bases are positions in the list. The number is -1 for a class of the standard
    library; `number_of` gives it for the others.
    """
    classes = [c for c in error_class.__mro__ if issubclass(c, BaseException)]
    entries = []
    for c in classes:
        module, name = str(c.__module__), str(c.__qualname__)
        number = -1 if standard_error(module, name) is c else number_of(c)
        entries.append([module, name, number, [classes.index(base) for base in c.__bases__ if base in classes]])
    return entries


def error_class_from(entries: list, known: dict[int, Any], body: dict[str, Any]) -> type:
    """Return the class that `describe_error_class` described: that of the standard library, or one like it.

    known: classes by number; new ones are added, so that a number always means the same class. body: attributes of a new class.
    """
    classes: list[type] = []
    for module, name, number, bases in reversed(entries):
        error_class = standard_error(str(module), str(name)) or known.get(number)
        if error_class is None:
            parents = tuple(classes[len(entries) - 1 - position] for position in bases)
            error_class = known[number] = type(str(name).rpartition(".")[2], parents or (Exception,), body)
        classes.append(error_class)
    return classes[-1]


def make_error(error_class: type, arguments: list) -> Any:
    """Return an exception with these arguments, even if its constructor takes others."""
    try:
        return error_class(*arguments)
    except Exception:
        return error_class.__new__(error_class, *arguments)


def standard_error(module: str, name: str) -> type | None:
    """Return an exception of the standard library if its module is loaded. Those of unittest are excluded, because raising one
    steers how tests run."""
    package = module.partition(".")[0]
    if package not in sys.stdlib_module_names or package == "unittest":
        return None
    x = getattr(sys.modules.get(module), name, None)
    return x if isinstance(x, type) and issubclass(x, BaseException) else None


def describe_function(function: Any) -> dict[str, Any]:
    """Return what a decorator may want to know of a function: its names, its docstring and its parameters."""
    names = ("__name__", "__qualname__", "__doc__")
    description: dict[str, Any] = {"names": {name: text for name in names if type(text := getattr(function, name, 0)) is str}}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return description
    description["parameters"] = [[p.name, int(p.kind), _default_of(p)] for p in parameters]
    return description


def _default_of(parameter: inspect.Parameter) -> list:
    """Return a list with the default, or an empty one; a default that is no simple value is given as None."""
    x = parameter.default
    if x is parameter.empty:
        return []
    return [x if type(x) in (str, bool) or type(x) is int and abs(x) < 1 << 63 else None]


def function_from(description: dict[str, Any], call: Callable[[tuple, dict], Any]) -> Callable[..., Any]:
    """Return a function that looks as `describe_function` described and passes its arguments on to `call`."""

    def function(*arguments: Any, **keywords: Any) -> Any:
        return call(arguments, keywords)

    for name, text in description.get("names", {}).items():
        setattr(function, name, text)
    if "parameters" in description:
        kinds = list(inspect._ParameterKind)
        parameters = [
            inspect.Parameter(name, kinds[kind], default=(*default, inspect.Parameter.empty)[0])
            for name, kind, default in description["parameters"]
        ]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function
