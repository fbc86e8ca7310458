"""Fingerprints of what a run learns from, so that one that goes on is told where its data or its reward are others.

Functions and classes of the user are known by their source where Python has it, else by name. Left out: what their objects hold
(a reward may count its calls), modules that they import, and the numbers of a closure of the user's.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import types
from collections.abc import Iterable
from typing import Any

import numpy as np

OWN = "jmarl."  # functions of this library are known by their names and constants


def of_data(items: Iterable[Any]) -> dict[str, Any]:
    """How many items there are, and a digest of all of them in their order."""
    digest, count = hashlib.sha256(), 0
    for item in items:
        digest.update(json.dumps(item, sort_keys=True, default=_plain).encode("utf-8", "backslashreplace") + b"\n")
        count += 1
    return {"items": count, "sha256": digest.hexdigest()[:16]}


def _plain(value: Any) -> Any:
    """What JSON has no form for: numbers of numpy as numbers, anything else as its text without addresses in memory."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def of_reward(env: Any) -> dict[str, str]:
    """The functions and classes that reward a run and write its prompts: qualified name -> digest of its source."""
    found: dict[str, str] = {}
    _collect(env, found, set())
    return found


def _collect(value: Any, found: dict[str, str], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            _collect(part, found, seen)
    elif isinstance(value, list | tuple):
        for part in value:
            _collect(part, found, seen)
    elif isinstance(value, types.MethodType):
        _collect(value.__func__, found, seen)
        _collect(value.__self__, found, seen)
    elif isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        _add(value, found)
        for cell in getattr(value, "__closure__", None) or ():
            _collect(_content(cell), found, seen)
    elif callable(value) or callable(getattr(value, "step", None)):  # an environment, a reward, a model that is called
        _add(type(value), found)
        for part in getattr(value, "__dict__", {}).values():
            _collect(part, found, seen)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was not given a value yet
        return None


def _add(function: Any, found: dict[str, str]) -> None:
    module = getattr(function, "__module__", None) or ""
    if module == "builtins":
        return
    base = f"{module}.{function.__qualname__}"
    name, number = base, 2
    while name in found:
        name, number = f"{base} {number}", number + 1
    found[name] = _digest(function, own=module.startswith(OWN))


def _digest(function: Any, own: bool) -> str:
    """Of a function of this library its constants; of any other its source, if Python has it."""
    if own:
        cells = [_content(cell) for cell in getattr(function, "__closure__", None) or ()]
        text = repr([x for x in cells if isinstance(x, bool | int | float | str)])
    else:
        try:
            text = inspect.getsource(function)
        except (OSError, TypeError):
            return "no source"
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def difference(name: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs between two fingerprints, in one line; empty: nothing."""
    if old == new:
        return ""
    if "items" in new:
        counts = f"{old.get('items')} items -> {new['items']}" if old.get("items") != new["items"] else "other items"
        return f"{name}: {counts}"
    changed = [f"{key} (changed)" for key in new if key in old and old[key] != new[key]]
    changed += [f"{key} (gone)" for key in old if key not in new] + [f"{key} (new)" for key in new if key not in old]
    return f"{name}: {', '.join(changed)}"
