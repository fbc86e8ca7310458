"""Copies of rows for functions of the user, so that each call reads a row as it was given, whatever an earlier call did to it.

Containers are copied with the containers in them: lists, dicts, sets, deques and their kin, tuples, NumPy arrays, bytearrays,
dataclasses. All other objects pass as they are, such as a model, a connection, or an instance of a class of the user. Values
that cannot change are not copied either, so a row of them costs one shallow copy. `copy.deepcopy` copies every object, fails on
some, and takes ten times as long.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterable, MutableMapping, MutableSequence
from typing import Any

import numpy as np

FIXED = frozenset({str, bytes, int, float, bool, complex, type(None)})  # types whose values cannot change


def copies(rows: Iterable[Any]) -> list[Any]:
    """Return a copy of each row; one row that is there twice becomes two."""
    return [copied(row) for row in rows]


def copied(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a copy of a container and of the containers in it, and any other value as it is.

    known: id of a container -> its copy. A container that is in a value twice, or in itself, is so in the copy.
    """
    kind = type(value)
    if kind in FIXED:
        return value
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    if kind is dict or kind is list:
        new = known[id(value)] = value.copy()
        if not FIXED.issuperset(map(type, value.values() if kind is dict else value)):
            _copy_entries(new, known)
        return new
    if isinstance(value, tuple):
        return _copied_tuple(value, known)
    if isinstance(value, set | bytearray | np.ndarray):
        new = known[id(value)] = copy.copy(value)
        if isinstance(new, np.ndarray) and new.dtype == object and new.ndim:
            for index in np.ndindex(new.shape):
                new[index] = copied(new[index], known)
        return new
    if isinstance(value, MutableMapping | MutableSequence | deque):
        new = known[id(value)] = copy.copy(value)
        _copy_entries(new, known)
        return new
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _copied_dataclass(value, known)
    return value


def _copy_entries(container: Any, known: dict[int, Any]) -> None:
    """Replace the containers in a mapping or sequence by copies of them."""
    for key, old in list(container.items() if isinstance(container, MutableMapping) else enumerate(container)):
        if type(old) not in FIXED and (new := copied(old, known)) is not old:
            container[key] = new


def _copied_tuple(value: tuple, known: dict[int, Any]) -> tuple:
    """Return a tuple with copies of the containers in it; the tuple itself if there are none. A `NamedTuple` stays one."""
    new = [copied(x, known) for x in value]
    if all(x is y for x, y in zip(new, value, strict=True)):
        return value
    if type(value) is tuple:
        return tuple(new)
    make = getattr(type(value), "_make", None)  # of a NamedTuple; other subclasses have constructors of their own
    return value if make is None else make(new)


def _copied_dataclass(value: Any, known: dict[int, Any]) -> Any:
    """Return a dataclass with copies of the containers in its fields."""
    new = known[id(value)] = copy.copy(value)
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        if (own := copied(old, known)) is not old:
            object.__setattr__(new, field.name, own)  # also of a frozen one
    return new
