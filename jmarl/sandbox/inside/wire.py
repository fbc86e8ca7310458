"""Messages between a program and its judge: length-capped JSON of exact builtin types. No pickle.

    message   4 bytes length, JSON
    value     null, true, text, number, [list]        as JSON
              {"tuple": [...]}, {"set": [...]}, ...    other types whose behaviour nobody can change: `PLAIN`
              {"object": id, ...}                      an object of the sender, which stays where it is
              {"yours": id}                            an object of the receiver
    {"standard": [module, name]}              a class or function of the standard library, which both sides have

A type counts only if it is that type exactly (`type(x) is int`): a subclass may have an `__eq__` of its own, and with it the
verdict. An object of a subclass that compares as its base does crosses as an object that carries its plain value.
Left out: shared and cyclic references; cycles are refused by depth.
"""

from __future__ import annotations

import abc
import base64
import collections
import datetime
import decimal
import fractions
import os
import struct
import sys
import types
from collections.abc import Callable
from json import dumps, loads  # now, because a program may change the module
from typing import Any

MAX_MESSAGE = 16 << 20
MAX_DEPTH = 100
SLACK = 10  # of it: what the program may not use, so that what tests make of its values can go back


class Gone(BaseException):
    """The other side is not there any more. Not an `Exception`, so that a test that expects one does not take it for that."""


class Violation(BaseException):
    """The other side broke the protocol."""


class Unsupported(TypeError):
    """A value that cannot cross."""


class Untold(BaseException):
    """The same where the tests gave it. They cannot take it for an error of the program's."""


class Channel:
    """One end of a two-way channel."""

    def __init__(self, reads: int, writes: int):
        self.reads, self.writes = reads, writes
        self.received = 0

    def send(self, message: dict) -> None:
        try:
            data = dumps(message, separators=(",", ":"), allow_nan=False).encode()
        except ValueError as error:
            raise Unsupported(f"a value that is no message: {error}") from None
        if len(data) > MAX_MESSAGE:
            raise Unsupported(f"a message of {len(data)} bytes: at most {MAX_MESSAGE}")
        try:
            write_all(self.writes, struct.pack("!I", len(data)) + data)
        except OSError:
            raise Gone from None

    def receive(self) -> dict:
        size = struct.unpack("!I", self._read(4))[0]
        if size > MAX_MESSAGE:
            raise Violation(f"a message of {size} bytes")
        self.received += size
        try:
            message = loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise Violation(f"no JSON: {error!s:.100}") from None
        if type(message) is not dict:
            raise Violation("a message that is no object")
        return message

    def _read(self, size: int) -> bytes:
        try:
            return read_exactly(self.reads, size)
        except (EOFError, OSError):
            raise Gone from None


def read_exactly(fd: int, size: int) -> bytes:
    """Exactly `size` bytes and not one more, because another process may be meant to read those."""
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _aware(x: Any) -> bool:
    return x.tzinfo is None or type(x.tzinfo) is datetime.timezone


def _seconds(x: datetime.timedelta) -> list[int]:
    return [x.days, x.seconds, x.microseconds]


def _zone(zone: Any) -> Any:
    return None if zone is None else _seconds(zone.utcoffset(None))


def _unzone(x: Any) -> Any:
    return None if x is None else datetime.timezone(datetime.timedelta(*x))


def _when(x: Any) -> list:
    return [x.isoformat() if x.tzinfo is None else x.replace(tzinfo=None).isoformat(), _zone(x.tzinfo)]


# Type -> name, its contents as values that cross, and back. Contents of the first group are encoded in turn.
NESTED: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: ("tuple", list, tuple),
    set: ("set", list, set),
    frozenset: ("frozenset", list, frozenset),
    dict: ("dict", lambda x: [[k, v] for k, v in x.items()], lambda pairs: {k: v for k, v in pairs}),
    collections.OrderedDict: ("ordered", lambda x: [[k, v] for k, v in x.items()], collections.OrderedDict),
    collections.Counter: (
        "counter",
        lambda x: [[k, v] for k, v in x.items()],
        lambda pairs: collections.Counter({k: v for k, v in pairs}),
    ),
    collections.defaultdict: (
        "defaultdict",
        lambda x: [[k, v] for k, v in x.items()],
        lambda pairs: collections.defaultdict(None, pairs),
    ),
    collections.deque: ("deque", lambda x: [list(x), x.maxlen], lambda x: collections.deque(*x)),
    slice: ("slice", lambda x: [x.start, x.stop, x.step], lambda x: slice(*x)),
    range: ("range", lambda x: [x.start, x.stop, x.step], lambda x: range(*x)),
    complex: ("complex", lambda x: [x.real, x.imag], lambda x: complex(*x)),
}
for _of in ({}, collections.OrderedDict()):  # views, as of a dictionary that is there for them only
    NESTED[type(_of.keys())] = ("keys", list, lambda x: dict.fromkeys(x).keys())
    NESTED[type(_of.values())] = ("values", list, lambda x: dict(enumerate(x)).values())
    NESTED[type(_of.items())] = ("items", list, lambda x: dict(x).items())
FLAT: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: ("bytes", lambda x: base64.b85encode(x).decode(), base64.b85decode),
    bytearray: ("bytearray", lambda x: base64.b85encode(x).decode(), lambda x: bytearray(base64.b85decode(x))),
    decimal.Decimal: ("decimal", str, decimal.Decimal),
    fractions.Fraction: ("fraction", lambda x: [hex(x.numerator), hex(x.denominator)], lambda x: _fraction(*x)),
    datetime.date: ("date", lambda x: x.isoformat(), datetime.date.fromisoformat),
    datetime.timedelta: ("timedelta", _seconds, lambda x: datetime.timedelta(*x)),
    datetime.datetime: ("datetime", _when, lambda x: datetime.datetime.fromisoformat(x[0]).replace(tzinfo=_unzone(x[1]))),
    datetime.time: ("time", _when, lambda x: datetime.time.fromisoformat(x[0]).replace(tzinfo=_unzone(x[1]))),
    datetime.timezone: ("timezone", _zone, _unzone),
    type(...): ("ellipsis", lambda x: 0, lambda x: ...),
    type(NotImplemented): ("notimplemented", lambda x: 0, lambda x: NotImplemented),
}
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
CONTAINERS = (list, set, bytearray, collections.deque, *_MAPPINGS)
_UNNEST = {name: back for name, _, back in NESTED.values()}
_UNFLAT = {name: back for name, _, back in FLAT.values()}


_FUNCTIONS = (type(len), type(_aware))
_CLASSES = (type, abc.ABCMeta)
_UNNAMED = {x: name for name, x in vars(types).items() if type(x) is type and x.__qualname__ != name}  # types.GeneratorType
_NO_VALUE = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError, ImportError)


def _fraction(numerator: str, denominator: str) -> fractions.Fraction:
    return fractions.Fraction(int(numerator, 16), int(denominator, 16))


def encode(x: Any, export: Callable[[Any], dict], depth: int = 0) -> Any:
    """A value for a message. export: what stands for an object that stays here."""
    if depth > MAX_DEPTH:
        raise Unsupported(f"a value nested more than {MAX_DEPTH} times")
    kind = type(x)
    if x is None or kind is bool or kind is str:
        return x
    if kind is int:
        return x if -(1 << 63) <= x < 1 << 63 else {"int": hex(x)}
    if kind is float:
        return x if x - x == 0 else {"float": repr(x)}
    if kind is list:
        return [encode(y, export, depth + 1) for y in x]
    if kind in NESTED:
        name, contents, _ = NESTED[kind]
        return {name: encode(contents(x), export, depth + 1)}
    if kind in FLAT and (not hasattr(x, "tzinfo") or _aware(x)):
        name, contents, _ = FLAT[kind]
        return {name: contents(x)}
    return _encode_array(x) or _encode_element(x) or _encode_path(x) or export(x)


def _encode_path(x: Any) -> dict | None:
    """A path, or a UUID."""
    paths, uuids = sys.modules.get("pathlib"), sys.modules.get("uuid")
    if paths is not None and type(x) in (paths.PosixPath, paths.PurePosixPath):
        return {"path": [type(x).__name__, str(x)]}
    return {"uuid": x.hex} if uuids is not None and type(x) is uuids.UUID else None


def _decode_path(kind: str, text: str) -> Any:
    import pathlib

    return {"PosixPath": pathlib.PosixPath, "PurePosixPath": pathlib.PurePosixPath}[kind](text)


def _decode_uuid(text: str) -> Any:
    import uuid

    return uuid.UUID(hex=text)


def _encode_element(x: Any) -> dict | None:
    """A tree of XML."""
    trees = sys.modules.get("xml.etree.ElementTree")
    return {"element": trees.tostring(x, "unicode")} if trees is not None and type(x) is trees.Element else None


def _decode_element(text: str) -> Any:
    from xml.etree.ElementTree import ParseError, fromstring

    try:
        return fromstring(text)
    except ParseError as error:
        raise ValueError(error) from None


def _encode_array(x: Any) -> dict | None:
    numpy = sys.modules.get("numpy")
    kind = type(x)
    if numpy is None or not (kind is numpy.ndarray or kind.__module__ == "numpy" and isinstance(x, numpy.generic)):
        return None
    if x.dtype.kind not in "biufU" or x.dtype.itemsize > 8 and x.dtype.kind != "U":
        return None
    return {"array": [x.dtype.str, None if kind is not numpy.ndarray else list(x.shape), encode(x.tolist(), _nothing)]}


def _nothing(x: Any) -> dict:
    raise Unsupported(f"a {type(x).__name__} in an array")


def decode(data: Any, mine: Callable[[int], Any], theirs: Callable[[dict], Any], deepest: int = MAX_DEPTH) -> Any:
    """A value of a message. mine: id -> object of this side; theirs: what stands here for an object of the other."""
    try:
        return _decode(data, mine, theirs, deepest)
    except _NO_VALUE as error:
        raise Violation(f"no value: {error!s:.100}") from None


def _decode(data: Any, mine: Callable[[int], Any], theirs: Callable[[dict], Any], left: int) -> Any:
    if left < 0:
        raise ValueError("a value that is nested too deep")
    if type(data) is list:
        return [_decode(x, mine, theirs, left - 1) for x in data]
    if type(data) is not dict:
        return data
    if "object" in data or "standard" in data:
        return theirs(data)
    ((name, x),) = data.items()
    if name in _UNNEST:
        return _UNNEST[name](_decode(x, mine, theirs, left - 1))
    if name in _UNFLAT:
        return _UNFLAT[name](x)
    if name == "int":
        return int(x, 16)
    if name == "float":
        return float(x)
    if name == "yours":
        return mine(x)
    if name == "path":
        return _decode_path(*x)
    if name == "uuid":
        return _decode_uuid(x)
    if name == "element":
        return _decode_element(x)
    if name == "array":
        dtype, shape, values = x
        return _decode_array(_decode(values, mine, theirs, left - 1), dtype, shape)
    raise ValueError(f"unknown kind of value {name!r}")


def _decode_array(values: Any, dtype: str, shape: list | None) -> Any:
    import numpy

    kind = numpy.dtype(dtype)
    if kind.kind not in "biufU" or kind.itemsize > 8 and kind.kind != "U":
        raise ValueError(f"an array of {dtype}")
    array = numpy.array(values, kind)
    if kind.kind in "iuf":  # in fewer bits, numbers of the tests that are compared with them would be cut to size
        array = array.astype(f"{kind.kind}8")
    return array[()] if shape is None else array.reshape(shape)


def named(x: Any) -> list[str] | None:
    """Module and name of a class or function of the standard library; None for everything else."""
    module, name = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
    if type(module) is not str or type(name) is not str or type(x) not in (*_CLASSES, *_FUNCTIONS):
        return None
    if module == "builtins" and type(x) is type and x in _UNNAMED:
        module, name = "types", _UNNAMED[x]
    known = module.partition(".")[0] in sys.stdlib_module_names and getattr(sys.modules.get(module), name, None) is x
    return [module, name] if known else None


def by_name(known: Any) -> Any:
    """What `named` means by a name; None if its module is not loaded here, or it is not to be had."""
    module, name = known
    found = getattr(sys.modules.get(module), name, None) if module.partition(".")[0] in sys.stdlib_module_names else None
    return found if found is not None and named(found) == [module, name] else None


def replace_contents(x: Any, new: Any) -> None:
    """Make container x hold what `new` does, in place."""
    if type(x) in (list, bytearray):
        x[:] = new
    elif type(x) is collections.deque:
        x.clear()
        x.extend(new)
    else:
        x.clear()
        x.update(new)
