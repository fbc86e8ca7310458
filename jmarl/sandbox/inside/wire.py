"""Messages between a program and its judge: JSON of exact builtin types, with a maximum length. Never pickle.

    message   4 bytes length, JSON
    value     null, true, text, number, [list]        as JSON
              {"tuple": [...]}, {"set": [...]}, ...    other types whose behavior no subclass can change: NESTED and FLAT
              {"object": number, ...}                  an object of the sender, which stays in its process
              {"yours": number}                        an object of the receiver
              {"standard": [module, name]}             a class or function of the standard library, which both sides have

A value counts as a type only if it is exactly of that type (`type(x) is int`): a subclass may define an `__eq__` that decides
the verdict. An object whose subclass compares as its base does crosses as an object that carries its plain value. Shared and
cyclic references are not kept; a cycle is refused because it is too deep.
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
from json import dumps, loads  # bound at import, because a program may change the module
from typing import Any

MAX_MESSAGE = 16 << 20
MAX_DEPTH = 100
DEPTH_RESERVE = (
    10  # levels of MAX_DEPTH that a program may not use, so that tests can nest its values deeper and send them back
)


class Disconnected(BaseException):
    """The other side has closed the channel. Not an `Exception`, so that a test that expects one does not catch it."""


class Violation(BaseException):
    """The other side broke the protocol."""


class Unsupported(TypeError):
    """A value cannot be sent."""


class UnsupportedTestValue(BaseException):
    """A value of the tests cannot be sent. Not an `Exception`, so that the tests do not take it for an error of the program."""


class Channel:
    """One end of a two-way channel of messages."""

    def __init__(self, read_fd: int, write_fd: int):
        self.read_fd, self.write_fd = read_fd, write_fd

    def send(self, message: dict) -> None:
        """Send a message. Raises `Unsupported` if it is too long or no JSON, `Disconnected` if nobody reads it."""
        try:
            data = dumps(message, separators=(",", ":"), allow_nan=False).encode()
        except ValueError as error:
            raise Unsupported(f"the value cannot be written as JSON: {error}") from None
        if len(data) > MAX_MESSAGE:
            raise Unsupported(f"the message has {len(data)} bytes, at most {MAX_MESSAGE} are allowed")
        try:
            write_all(self.write_fd, struct.pack("!I", len(data)) + data)
        except OSError:
            raise Disconnected from None

    def receive(self) -> dict:
        """Wait for a message. Raises `Violation` if it is malformed, `Disconnected` if none will come."""
        size = struct.unpack("!I", self._read(4))[0]
        if size > MAX_MESSAGE:
            raise Violation(f"a message of {size} bytes, at most {MAX_MESSAGE} are allowed")
        try:
            message = loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise Violation(f"a message is not JSON: {error!s:.100}") from None
        if type(message) is not dict:
            raise Violation("a message is not a JSON object")
        return message

    def _read(self, size: int) -> bytes:
        try:
            return read_exactly(self.read_fd, size)
        except (EOFError, OSError):
            raise Disconnected from None


def read_exactly(fd: int, size: int) -> bytes:
    """Read `size` bytes and not one more, because another process may have to read those. Raises EOFError if there are
    fewer."""
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes, in as many writes as it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _has_exact_timezone(x: Any) -> bool:
    return x.tzinfo is None or type(x.tzinfo) is datetime.timezone


def _timedelta_fields(x: datetime.timedelta) -> list[int]:
    return [x.days, x.seconds, x.microseconds]


def _encode_timezone(zone: Any) -> Any:
    return None if zone is None else _timedelta_fields(zone.utcoffset(None))


def _decode_timezone(fields: Any) -> Any:
    return None if fields is None else datetime.timezone(datetime.timedelta(*fields))


def _encode_time(x: Any) -> list:
    """Encode a time or a datetime as its text and its time zone."""
    return [x.isoformat() if x.tzinfo is None else x.replace(tzinfo=None).isoformat(), _encode_timezone(x.tzinfo)]


def _decode_time(kind: Any, text: str, zone: Any) -> Any:
    return kind.fromisoformat(text).replace(tzinfo=_decode_timezone(zone))


def _items(x: Any) -> list[list]:
    return [[key, value] for key, value in x.items()]


def _dict_of(items: Any) -> dict:
    return {key: value for key, value in items}


# Type -> its name in a message, a function that returns its contents, and one that builds it from them.
# The contents of a NESTED type are values that are encoded in turn; those of a FLAT type are JSON already.
NESTED: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: ("tuple", list, tuple),
    set: ("set", list, set),
    frozenset: ("frozenset", list, frozenset),
    dict: ("dict", _items, _dict_of),
    collections.OrderedDict: ("ordered", _items, collections.OrderedDict),
    collections.Counter: ("counter", _items, lambda items: collections.Counter(_dict_of(items))),
    collections.defaultdict: ("defaultdict", _items, lambda items: collections.defaultdict(None, items)),
    collections.deque: ("deque", lambda x: [list(x), x.maxlen], lambda x: collections.deque(*x)),
    slice: ("slice", lambda x: [x.start, x.stop, x.step], lambda x: slice(*x)),
    range: ("range", lambda x: [x.start, x.stop, x.step], lambda x: range(*x)),
    complex: ("complex", lambda x: [x.real, x.imag], lambda x: complex(*x)),
}
for _mapping in ({}, collections.OrderedDict()):  # a view is decoded as that of a new dictionary
    NESTED[type(_mapping.keys())] = ("keys", list, lambda x: dict.fromkeys(x).keys())
    NESTED[type(_mapping.values())] = ("values", list, lambda x: dict(enumerate(x)).values())
    NESTED[type(_mapping.items())] = ("items", list, lambda x: dict(x).items())
FLAT: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: ("bytes", lambda x: base64.b85encode(x).decode(), base64.b85decode),
    bytearray: ("bytearray", lambda x: base64.b85encode(x).decode(), lambda x: bytearray(base64.b85decode(x))),
    decimal.Decimal: ("decimal", str, decimal.Decimal),
    fractions.Fraction: ("fraction", lambda x: [hex(x.numerator), hex(x.denominator)], lambda x: _decode_fraction(*x)),
    datetime.date: ("date", lambda x: x.isoformat(), datetime.date.fromisoformat),
    datetime.timedelta: ("timedelta", _timedelta_fields, lambda x: datetime.timedelta(*x)),
    datetime.datetime: ("datetime", _encode_time, lambda x: _decode_time(datetime.datetime, *x)),
    datetime.time: ("time", _encode_time, lambda x: _decode_time(datetime.time, *x)),
    datetime.timezone: ("timezone", _encode_timezone, _decode_timezone),
    type(...): ("ellipsis", lambda x: 0, lambda x: ...),
    type(NotImplemented): ("notimplemented", lambda x: 0, lambda x: NotImplemented),
}
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
CONTAINERS = (list, set, bytearray, collections.deque, *_MAPPINGS)
_FROM_NESTED = {name: build for name, _, build in NESTED.values()}
_FROM_FLAT = {name: build for name, _, build in FLAT.values()}
_FUNCTIONS = (type(len), type(_items))
_CLASSES = (type, abc.ABCMeta)
# Classes that `types` has under another name than their own, such as types.GeneratorType.
_NAMES_IN_TYPES = {x: name for name, x in vars(types).items() if type(x) is type and x.__qualname__ != name}
_DECODE_ERRORS = (
    TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError, ImportError,
)  # fmt: skip


def _decode_fraction(numerator: str, denominator: str) -> fractions.Fraction:
    return fractions.Fraction(int(numerator, 16), int(denominator, 16))


def encode(x: Any, export: Callable[[Any], dict], depth: int = 0) -> Any:
    """Return a value as it stands in a message.

    export: returns what stands for an object that stays in this process. depth: how deep `x` is nested already. Raises
    `Unsupported` if `x` is nested more than MAX_DEPTH times.
    """
    if depth > MAX_DEPTH:
        raise Unsupported(f"the value is nested more than {MAX_DEPTH} times")
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
    if kind in FLAT and (not hasattr(x, "tzinfo") or _has_exact_timezone(x)):
        name, contents, _ = FLAT[kind]
        return {name: contents(x)}
    return _encode_array(x) or _encode_element(x) or _encode_path(x) or export(x)


def _encode_path(x: Any) -> dict | None:
    """Encode a path or a UUID."""
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
    """Encode a tree of XML."""
    trees = sys.modules.get("xml.etree.ElementTree")
    return {"element": trees.tostring(x, "unicode")} if trees is not None and type(x) is trees.Element else None


def _decode_element(text: str) -> Any:
    from xml.etree.ElementTree import ParseError, fromstring

    try:
        return fromstring(text)
    except ParseError as error:
        raise ValueError(error) from None


def _encode_array(x: Any) -> dict | None:
    """Encode an array or scalar of numpy that holds numbers of at most 8 bytes, truth values or texts."""
    numpy = sys.modules.get("numpy")
    kind = type(x)
    if numpy is None or not (kind is numpy.ndarray or kind.__module__ == "numpy" and isinstance(x, numpy.generic)):
        return None
    if x.dtype.kind not in "biufU" or x.dtype.itemsize > 8 and x.dtype.kind != "U":
        return None
    return {"array": [x.dtype.str, None if kind is not numpy.ndarray else list(x.shape), encode(x.tolist(), _refuse)]}


def _refuse(x: Any) -> dict:
    raise Unsupported(f"an array holds a {type(x).__name__}; it may hold numbers, truth values and texts")


def decode(data: Any, own_object: Callable[[int], Any], peer_object: Callable[[dict], Any], max_depth: int = MAX_DEPTH) -> Any:
    """Return the value that stands in a message.

    own_object: returns the object of this side with a number. peer_object: returns what stands here for an object of the other
    side, or for something of the standard library. Raises `Violation` if the data is malformed.
    """
    try:
        return _decode(data, own_object, peer_object, max_depth)
    except _DECODE_ERRORS as error:
        raise Violation(f"a value is malformed: {error!s:.100}") from None


def _decode(data: Any, own_object: Callable[[int], Any], peer_object: Callable[[dict], Any], depth_left: int) -> Any:
    if depth_left < 0:
        raise ValueError("it is nested too deep")
    if type(data) is list:
        return [_decode(x, own_object, peer_object, depth_left - 1) for x in data]
    if type(data) is not dict:
        return data
    if "object" in data or "standard" in data:
        return peer_object(data)
    ((name, x),) = data.items()
    if name in _FROM_NESTED:
        return _FROM_NESTED[name](_decode(x, own_object, peer_object, depth_left - 1))
    if name in _FROM_FLAT:
        return _FROM_FLAT[name](x)
    if name == "int":
        return int(x, 16)
    if name == "float":
        return float(x)
    if name == "yours":
        return own_object(x)
    if name == "path":
        return _decode_path(*x)
    if name == "uuid":
        return _decode_uuid(x)
    if name == "element":
        return _decode_element(x)
    if name == "array":
        dtype, shape, values = x
        return _decode_array(_decode(values, own_object, peer_object, depth_left - 1), dtype, shape)
    raise ValueError(f"unknown kind of value {name!r}")


def _decode_array(values: Any, dtype: str, shape: list | None) -> Any:
    import numpy

    kind = numpy.dtype(dtype)
    if kind.kind not in "biufU" or kind.itemsize > 8 and kind.kind != "U":
        raise ValueError(f"an array of {dtype}")
    array = numpy.array(values, kind)
    if kind.kind in "iuf":  # widened, because numpy would cut a number of the tests to the size of what it is compared with
        array = array.astype(f"{kind.kind}8")
    return array[()] if shape is None else array.reshape(shape)


def standard_name(x: Any) -> list[str] | None:
    """Return the module and name of a class or function of the standard library; None for everything else."""
    module, name = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
    if type(module) is not str or type(name) is not str or type(x) not in (*_CLASSES, *_FUNCTIONS):
        return None
    if module == "builtins" and type(x) is type and x in _NAMES_IN_TYPES:
        module, name = "types", _NAMES_IN_TYPES[x]
    is_standard = module.partition(".")[0] in sys.stdlib_module_names and getattr(sys.modules.get(module), name, None) is x
    return [module, name] if is_standard else None


def standard_object(module_and_name: Any) -> Any:
    """Return the class or function whose `standard_name` this is; None if there is none or its module is not loaded here."""
    module, name = module_and_name
    x = getattr(sys.modules.get(module), name, None) if module.partition(".")[0] in sys.stdlib_module_names else None
    return x if x is not None and standard_name(x) == [module, name] else None


def replace_contents(container: Any, contents: Any) -> None:
    """Replace the contents of a list, set, bytearray, deque or mapping in place."""
    if type(container) in (list, bytearray):
        container[:] = contents
    elif type(container) is collections.deque:
        container.clear()
        container.extend(contents)
    else:
        container.clear()
        container.update(contents)
