"""Fingerprints of what a run learns from, so that one that goes on is told where its data or its reward are others.

Functions and classes of the user are known by their source where Python has it, else by name; functions of the same file that
they call are looked at too. Left out: other modules that they import, numbers that their objects or closures hold (a reward may
count its calls), and held-out items.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jmarl.envs.rewards import RewardFunction

OF_JMARL = "jmarl."  # functions of this library are known by their names and constants


def of_data(items: Iterable[Any]) -> dict[str, Any]:
    """How many items there are, and a digest of all of them in their order: the same in every process."""
    digest, count = hashlib.sha256(), 0
    for item in items:
        digest.update(json.dumps(_canonical(item)).encode() + b"\n")
        count += 1
    return {"items": count, "sha256": digest.hexdigest()[:16]}


def _canonical(value: Any) -> Any:
    """A value in JSON's types and in an order that does not depend on the process; what is none of these as its text, without
    addresses in memory."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {"mapping": sorted([[repr(key), _canonical(x)] for key, x in value.items()], key=lambda pair: pair[0])}
    if isinstance(value, list | tuple):
        return [_canonical(x) for x in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted(map(repr, value))}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def of_reward(env: Any) -> dict[str, str]:
    """The functions and classes that reward a run and write its prompts: qualified name -> digest of its source."""
    found: dict[str, str] = {}
    _collect(env, found, set())
    return found


def _collect(value: Any, found: dict[str, str], seen: set[int]) -> None:
    """Add what a value is made of."""
    if id(value) in seen or isinstance(value, types.ModuleType):
        return
    seen.add(id(value))
    parts: Iterable[Any] = ()
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        constants = [x for x in (*value.args, *value.keywords.items()) if _is_plain(x)]
        _add(f"partial of {_name(value.func)}", repr(constants), found)
    elif isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, types.MethodType):
        parts = (value.__func__, *_attributes(value.__self__))
    elif isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        _add(_name(value), _source(value), found)
        parts = [*map(_content, getattr(value, "__closure__", None) or ()), *_called(value)]
    elif callable(value) or callable(getattr(value, "step", None)):  # an environment, a reward, a model that is called
        _add(_name(type(value)), _source(type(value)) + _settings(value), found)
        parts = (getattr(value, "__wrapped__", None), *_attributes(value))
    for part in parts:
        _collect(part, found, seen)


def _attributes(value: Any) -> list[Any]:
    return list(getattr(value, "__dict__", {}).values())


def _settings(value: Any) -> str:
    """Of a reward how it is put together."""
    if not isinstance(value, RewardFunction):
        return ""
    return repr((value.weights, value.batched, value.on_error))


def _called(function: Any) -> list[Any]:
    """Functions and classes of the same file that a function of the user names."""
    if not isinstance(function, types.FunctionType) or _is_of_jmarl(function):
        return []
    named = [function.__globals__.get(name) for code in _codes(function.__code__) for name in code.co_names]
    return [x for x in named if isinstance(x, types.FunctionType | type) and x.__module__ == function.__module__]


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """The code of a function and of functions and comprehensions within it."""
    return [code, *(inner for x in code.co_consts if isinstance(x, types.CodeType) for inner in _codes(x))]


def _is_plain(value: Any) -> bool:
    """Whether a value is a constant, or a name and a constant."""
    return isinstance(value[1] if isinstance(value, tuple) and len(value) == 2 else value, bool | int | float | str)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was not given a value yet
        return None


def _name(function: Any) -> str:
    return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _is_of_jmarl(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(OF_JMARL)


def _source(function: Any) -> str:
    """Of a function of this library its constants; of any other its source, if Python has it."""
    if _is_of_jmarl(function):
        cells = [_content(cell) for cell in getattr(function, "__closure__", None) or ()]
        return repr([x for x in cells if isinstance(x, bool | int | float | str)])
    code = getattr(function, "__code__", None)  # two lambdas of one line have one source
    constants = repr([x for c in _codes(code) for x in c.co_consts if isinstance(x, int | float)]) if code else ""
    try:
        return inspect.getsource(function) + constants
    except (OSError, TypeError):
        return constants


def _add(base: str, text: str, found: dict[str, str]) -> None:
    """Add a function under its name, with a number where the name is taken."""
    if base.startswith("builtins."):
        return
    name, number = base, 2
    while name in found:
        name, number = f"{base} {number}", number + 1
    found[name] = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def difference(name: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs between two fingerprints, in one line; empty: nothing. What is only new is no difference: an object may have
    made it (a pool, say) when it was used before, and what a reward is made of is known to the reward."""
    if "items" in new:
        if old == new:
            return ""
        return f"{name}: {old['items']} items -> {new['items']}" if old.get("items") != new["items"] else f"{name}: other items"
    changed = [f"{key} (changed)" for key in new if key in old and old[key] != new[key]]
    gone = [f"{key} (gone)" for key in old if key not in new]
    added = [f"{key} (new)" for key in new if key not in old]
    return f"{name}: {', '.join(changed + gone + added)}" if changed or gone else ""
