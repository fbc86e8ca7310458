"""The judge's view of a program: objects that live in the other process, and the requests about them.

What decides a verdict is never asked of the program. An object of its own is equal to a plain value only if its plain contents
are (`wire`), and what it contains is found by walking through it. Two of its objects can be compared only by itself: the run is
then marked as weak.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from .wire import CONTAINERS, Channel, Gone, Unsupported, Violation, decode, encode, replace_contents

MOST_KEPT = 256
_LIMITS = {"BlockingIOError": "processes"}
_LIMIT_NUMBERS = {27: "file", 28: "file"}  # EFBIG, ENOSPC


class Judge:
    """Asks the program on behalf of the tests."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.asked = 0
        self.weak = False
        self.gone = False
        self.violation = ""
        self.limit = ""
        self.mine: list[Any] = []
        self.errors: dict[tuple[str, ...], type] = {}
        self.kept: list[tuple[Any, Any, int]] = []

    def export(self, x: Any) -> dict:
        """A function, or an iterator, of the tests; nothing else of theirs can be reached from the program."""
        if type(x) is Remote:
            return {"yours": object.__getattribute__(x, "_id")}
        if callable(x) or hasattr(type(x), "__next__"):
            self.mine.append(x)
            return {"object": len(self.mine) - 1}
        raise Unsupported(f"a {type(x).__name__} of the tests cannot be given to the program")

    def encode(self, x: Any) -> Any:
        return encode(x, self.export)

    def decode(self, data: Any) -> Any:
        return decode(data, self.mine.__getitem__, self._theirs)

    def _theirs(self, about: dict) -> Any:
        """What stands for an object of the program's."""
        if "standard" in about:
            module, name = about["standard"]
            if module in sys.stdlib_module_names and type(found := getattr(importlib.import_module(module), name)) is type:
                return found
        if "error" in about:
            return self.error_class([str(name) for name in about["error"]])
        if type(about["object"]) is not int:
            raise ValueError("an object without a number")
        return Remote(self, about["object"], self.decode(about["plain"]) if "plain" in about else Remote)

    def error_class(self, names: list[str]) -> type:
        """The exception of these names, most derived first: a builtin one, or one like the program's own."""
        known = (getattr(builtins, name, None) for name in names)
        base = next((x for x in known if isinstance(x, type) and issubclass(x, BaseException)), Exception)
        if names and names[0] == base.__name__:
            return base
        key = tuple(names)
        if key not in self.errors:
            self.errors[key] = type(names[0] if names else "Exception", (base,), {})
        return self.errors[key]

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """What an operation of the program's gives."""
        self.flush()
        self.asked += 1
        request: dict[str, Any] = {"do": operation, "args": [self.encode(x) for x in arguments]}
        if named:
            request["named"] = {name: self.encode(x) for name, x in named.items()}
        reply = self.exchange(request)
        for i, data in reply.get("changed", ()):
            new, old = self.decode(data), arguments[1 + i]
            if type(new) is not type(old) or type(old) not in CONTAINERS:
                self._broken("an argument changed its type")
            replace_contents(old, new)
        value = self.value(reply)
        if "kept" in reply and type(value) in CONTAINERS:
            self.kept = [*self.kept[1 - MOST_KEPT :], (value, self.encode(value), reply["kept"])]
        return value

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """What the program calls by these names. Values are answers already, objects have yet to be asked."""
        found = self.value(self.exchange({"do": "names", "args": [], "names": wanted}))
        if type(found) is not dict:
            self._broken("no names")
        found = {name: x for name, x in found.items() if name in wanted and not _borrowed(name, x)}
        self.asked += sum(type(x) is not Remote for x in found.values())
        return found

    def main(self, stdin: str) -> str:
        """What the program writes as a script."""
        self.asked += 1
        written = self.value(self.exchange({"do": "main", "args": [], "stdin": stdin}))
        if type(written) is not str:
            self._broken("no text")
        return written

    def value(self, reply: dict) -> Any:
        """What a reply says, or raises."""
        if "raised" not in reply:
            if "value" not in reply:
                self._broken("a reply without a value")
            return self.decode(reply["value"])
        names, arguments = [str(name) for name in reply["raised"]], self.decode(reply["args"])
        kind = self.error_class(names)
        number = arguments[0] if arguments and type(arguments[0]) is int else 0
        if issubclass(kind, OSError):
            self.limit = self.limit or _LIMITS.get(kind.__name__) or _LIMIT_NUMBERS.get(number, "")
        elif issubclass(kind, MemoryError):
            self.limit = "memory"
        try:
            error = kind(*arguments)
        except (TypeError, ValueError):
            error = self.error_class([f"{kind.__name__}", "Exception"])(*arguments)
        raise error

    def exchange(self, request: dict | None) -> dict:
        """Send a request, if there is one, and serve the program's calls until its reply is there."""
        try:
            if request is not None:
                self.channel.send(request)
            while "back" in (message := self.channel.receive()):
                self.channel.send(self._called(message))
            return message
        except Gone:
            self.gone = True
            raise
        except Violation as error:
            self.violation = str(error)
            raise

    def _called(self, message: dict) -> dict:
        """The program calls a function of the tests."""
        try:
            function = self.mine[message["back"]]
            if "next" in message:
                found = next(function, self)
                return {"value": None if found is self else self.encode([found])}
            arguments = [self.decode(x) for x in message["args"]]
            named = {str(name): self.decode(x) for name, x in message["named"].items()}
            return {"value": self.encode(function(*arguments, **named))}
        except Exception as error:
            return {"raised": type(error).__name__}

    def flush(self) -> None:
        """Bring the program's containers up to date with the tests' copies of them."""
        for i, (value, was, number) in enumerate(self.kept):
            if (now := self.encode(value)) != was:
                self.value(self.exchange({"do": "replace", "args": [{"yours": number}, now]}))
                self.kept[i] = (value, now, number)

    def _broken(self, what: str) -> None:
        self.violation = what
        raise Violation(what)


def _borrowed(name: str, x: Any) -> bool:
    """Whether this is a class of the standard library under the name of another."""
    return isinstance(x, type) and not issubclass(x, BaseException) and x.__name__ != name


class Remote:
    """An object of the program's."""

    __slots__ = ("_judge", "_id", "_plain")
    _judge: Judge
    _id: int
    _plain: Any  # what it holds as a value of a builtin type; the class `Remote` where there is nothing of the kind

    def __init__(self, judge: Judge, number: int, plain: Any):
        for name, x in (("_judge", judge), ("_id", number), ("_plain", plain)):
            object.__setattr__(self, name, x)

    def __getattr__(self, name: str) -> Any:
        return self._judge.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._judge.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._judge.ask("delattr", self, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._judge.ask("call", self, *arguments, **named)

    def __iter__(self) -> Iterator[Any]:
        if self._plain is not Remote:
            yield from self._plain
            return
        walk = self._judge.ask("iter", self)
        while True:
            try:
                found = self._judge.ask("next", walk)
            except StopIteration:
                return
            yield found

    def __next__(self) -> Any:
        return self._judge.ask("next", self)

    def __contains__(self, x: Any) -> bool:
        return any(y is x or y == x for y in self)

    def __eq__(self, other: Any) -> bool:
        return self._compare("eq", other, False)

    def __ne__(self, other: Any) -> bool:
        return self._compare("ne", other, True)

    def __hash__(self) -> int:
        return hash(self._plain) if self._plain is not Remote else self._id

    def _compare(self, operation: str, other: Any, unlike: Any) -> Any:
        if type(other) is Remote and other._id == self._id and operation in ("eq", "ne"):
            return operation == "eq"
        mine, others = self._plain, other._plain if type(other) is Remote else other
        if mine is not Remote and others is not Remote:
            return getattr(mine, f"__{operation}__")(others)
        if type(other) is not Remote:
            return unlike
        self._judge.weak = True
        return self._judge.ask(operation, self, other)

    def __instancecheck__(self, x: Any) -> bool:
        return type(x) is Remote and self._judge.ask("isinstance", x, self)

    def __subclasscheck__(self, x: Any) -> bool:
        return type(x) is Remote and self._judge.ask("issubclass", x, self)

    def __enter__(self) -> Any:
        return self._judge.ask("enter", self)

    def __exit__(self, *error: Any) -> Any:
        return self._judge.ask("exit", self, None, None, None)

    def __format__(self, how: str) -> str:
        return self._judge.ask("format", self, how)


def _forward(operation: str, name: str, reflected: bool = False) -> None:
    def method(self: Remote, *arguments: Any) -> Any:
        return self._judge.ask(operation, *arguments, self) if reflected else self._judge.ask(operation, self, *arguments)

    setattr(Remote, name, method)


_ONE = "len str repr bool int float complex abs round reversed getitem setitem delitem index neg pos invert"
_TWO = "add sub mul truediv floordiv mod matmul and or xor lshift rshift divmod pow"
for _operation in f"{_ONE} {_TWO}".split():
    _forward(_operation, f"__{_operation}__")
for _operation in _TWO.split():
    _forward(_operation, f"__r{_operation}__", reflected=True)
for _operation in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_operation}__", lambda self, other, _how=_operation: self._compare(_how, other, NotImplemented))
