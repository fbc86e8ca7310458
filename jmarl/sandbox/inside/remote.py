"""The judge's view of a program: objects that live in the other process, and the requests about them.

What decides a verdict is not asked of the program: an object of its own is equal to a plain value only if its plain contents
are (`wire`). Where nothing else is possible than to ask (two of its objects are compared, one takes part in a calculation with
a value of the tests, or is said to contain one), it is asked, and the test is marked as weak. What an object says about itself
(`f(x).is_valid()`) is taken as a function's answer is.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterator
from typing import Any

from .wire import (
    CONTAINERS,
    FLAT,
    NESTED,
    Channel,
    Gone,
    Unsupported,
    Violation,
    by_name,
    decode,
    encode,
    named,
    replace_contents,
)

MOST_KEPT = 256
MOST_WALKED = 10_000
TESTS = "tests"  # the module that the tests are
ASKABLE = ("__name__", "__qualname__", "__doc__", "__module__", "__dict__", "__class__", "__wrapped__", "__annotations__")
INERT = {
    int,
    float,
    complex,
    str,
    bool,
    bytes,
    bytearray,
    list,
    type(None),
    *NESTED,
    *FLAT,
}  # classes that do no more than hold
_LIMIT_NUMBERS = {27: "file", 28: "file", 11: "processes"}  # EFBIG, ENOSPC, EAGAIN
_NOTHING = object()


class Judge:
    """Asks the program on behalf of the tests."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.asked = 0
        self.weak = False
        self.gone = False
        self.violation = ""
        self.limit = ""
        self.unsupported = ""
        self.mine: list[Any] = []
        self.errors: dict[tuple, type] = {}
        self.numbers: dict[type, int] = {}
        self.kept: list[tuple[Any, Any, int]] = []

    # Values

    def export(self, x: Any) -> dict:
        """What the program gets for an object of the tests: what is in the standard library by name, of their own only
        functions and iterators. Nothing else can be reached from there."""
        if type(x) is Remote:
            return {"yours": x._jmarl_id}
        if isinstance(x, type) and x in self.numbers:
            return {"yours": self.numbers[x]}
        if (known := named(x)) is not None:
            return {"standard": known}
        if not isinstance(x, type) and (callable(x) or hasattr(type(x), "__next__")):
            self.mine.append(x)
            return {"object": len(self.mine) - 1}
        text = f"a {type(x).__name__} of the tests cannot be given to the program"
        if type(x).__module__ == TESTS:  # the program cannot have made it
            self.unsupported = self.unsupported or text
        raise Unsupported(text)

    def encode(self, x: Any) -> Any:
        return encode(x, self.export)

    def decode(self, data: Any) -> Any:
        return decode(data, self.mine.__getitem__, self._theirs)

    def _theirs(self, about: dict) -> Any:
        """What stands for an object of the program's."""
        if "standard" in about:
            found = by_name(about["standard"])
            return found if found in INERT else self.remote(about)
        if "error" in about:
            found = self.error_class(about["error"])
            self.numbers.setdefault(found, int(about["object"]))
            return found
        return self.remote(about)

    def remote(self, about: dict) -> Remote:
        """A new one even for the same object, because containers find one and the same thing equal to itself without asking."""
        return Remote(self, int(about["object"]), self.decode(about["plain"]) if "plain" in about else _NOTHING)

    def error_class(self, names: list) -> type:
        """The exception of these classes, each as module and name, most derived first: one of the standard library, or one like
        the program's own."""
        chain = [(str(module), str(name)) for module, name in names]
        found = [standard_error(*each) for each in chain]
        if found and found[0] is not None:
            return found[0]
        key = tuple(chain)
        if key not in self.errors:
            base = next((x for x in found if x is not None), Exception)
            own = {"__getattr__": _of_error, "__str__": _text_of_error}
            self.errors[key] = type(chain[0][1] if chain else "Exception", (base,), own)
        return self.errors[key]

    # Requests

    def ask(self, operation: str, *arguments: Any, **named_arguments: Any) -> Any:
        """What an operation of the program's gives."""
        self.flush()
        self.asked += 1
        request: dict[str, Any] = {"do": operation, "args": [self.encode(x) for x in arguments]}
        if named_arguments:
            request["named"] = {name: self.encode(x) for name, x in named_arguments.items()}
        reply = self.exchange(request)
        for which, data in reply.get("changed", ()):
            new, old = self.decode(data), named_arguments[which] if type(which) is str else arguments[1 + which]
            if type(new) is not type(old) or type(old) not in CONTAINERS:
                self._broken("an argument changed its type")
            replace_contents(old, new)
        try:
            value = self.value(reply)
        except StopIteration as error:
            if operation == "next":
                raise
            raise RuntimeError("the program raised StopIteration") from error  # it would end a loop of the tests early
        if "kept" in reply and type(value) in CONTAINERS:
            self.kept = [*self.kept[1 - MOST_KEPT :], (value, self.encode(value), reply["kept"])]
        return value

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """What the program calls by these names. Values are answers already, objects have yet to be asked. A class of the
        standard library counts as that only under its own name: under another it could stand in for one that the tests mean."""
        reply = self.exchange({"do": "names", "args": [], "names": wanted})
        if "raised" in reply or type(reply.get("value")) is not dict:
            self._broken("no names")
        found = {}
        for name, about in reply["value"].items():
            borrowed = type(about) is dict and "standard" in about and list(about["standard"])[1:] != [name]
            if name in wanted:
                found[name] = self.remote(about) if borrowed else self.decode(about)
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
        try:
            kind, arguments = self.error_class(reply["raised"]), self.decode(reply["args"])
            about = self.decode(reply["object"])
        except (TypeError, ValueError, KeyError):
            self._broken("an error that is none")
        number = arguments[0] if type(arguments) is list and arguments and type(arguments[0]) is int else 0
        if issubclass(kind, OSError) and number in _LIMIT_NUMBERS:
            self.limit = _LIMIT_NUMBERS[number]
        elif issubclass(kind, MemoryError):
            self.limit = "memory"
        try:
            error = kind(*arguments)
        except Exception:  # a constructor that wants something else
            error = kind.__new__(kind, *arguments)
        if type(error) in self.errors.values():
            error.__dict__["_jmarl_remote"] = about
        error.__dict__["_jmarl_raised"] = True  # by the program
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
                found = next(function, _NOTHING)
                return {"value": None if found is _NOTHING else self.encode([found])}
            arguments = [self.decode(x) for x in message["args"]]
            by_keyword = {str(name): self.decode(x) for name, x in message["named"].items()}
            return {"value": self.encode(function(*arguments, **by_keyword))}
        except Exception as error:
            kind = type(error) if type(error).__module__ == "builtins" else Exception
            return {"raised": kind.__name__}

    def flush(self) -> None:
        """Bring the program's containers up to date with the tests' copies of them."""
        for i, (value, was, number) in enumerate(self.kept):
            if (now := self.encode(value)) != was:
                self.value(self.exchange({"do": "replace", "args": [{"yours": number}, now]}))
                self.kept[i] = (value, now, number)

    def _broken(self, what: str) -> Any:
        self.violation = what
        raise Violation(what)


def standard_error(module: str, name: str) -> type | None:
    """An exception of the standard library, loaded already; not those that unittest steers by."""
    root = module.partition(".")[0]
    if root not in sys.stdlib_module_names or root == "unittest":
        return None
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _of_error(self: BaseException, name: str) -> Any:
    remote = self.__dict__.get("_jmarl_remote")
    if remote is None or name.startswith("__"):
        raise AttributeError(name)
    return getattr(remote, name)


def _text_of_error(self: BaseException) -> str:
    remote = self.__dict__.get("_jmarl_remote")
    return BaseException.__str__(self) if remote is None else str(remote)


class Remote:
    """An object of the program's."""

    __slots__ = ("_jmarl_judge", "_jmarl_id", "_jmarl_plain")
    _jmarl_judge: Judge
    _jmarl_id: int
    _jmarl_plain: Any  # what it holds as a value of a builtin type, if it compares as that does

    def __init__(self, judge: Judge, number: int, plain: Any):
        for name, x in (("_jmarl_judge", judge), ("_jmarl_id", number), ("_jmarl_plain", plain)):
            object.__setattr__(self, name, x)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ASKABLE:
            raise AttributeError(name)  # libraries look these up on their own, and believe what they find (numpy: an address)
        return self._jmarl_judge.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._jmarl_judge.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._jmarl_judge.ask("delattr", self, name)

    def __call__(self, *arguments: Any, **named_arguments: Any) -> Any:
        return self._jmarl_judge.ask("call", self, *arguments, **named_arguments)

    def __iter__(self) -> Iterator[Any]:
        walk = self._jmarl_judge.ask("iter", self)
        while True:
            try:
                found = self._jmarl_judge.ask("next", walk)
            except StopIteration:
                return
            yield found

    def __next__(self) -> Any:
        return self._jmarl_judge.ask("next", self)

    def __contains__(self, x: Any) -> bool:
        return _contains(self, x)

    def __eq__(self, other: Any) -> bool:
        return _compare(self, operator.eq, other, False)

    def __ne__(self, other: Any) -> bool:
        return _compare(self, operator.ne, other, True)

    def __hash__(self) -> int:
        return hash(self._jmarl_plain) if self._jmarl_plain is not _NOTHING else self._jmarl_judge.ask("hash", self)

    def __instancecheck__(self, x: Any) -> bool:
        return type(x) is Remote and self._jmarl_judge.ask("isinstance", x, self)

    def __subclasscheck__(self, x: Any) -> bool:
        known = type(x) is Remote or x in self._jmarl_judge.numbers
        return known and self._jmarl_judge.ask("issubclass", x, self)

    def __enter__(self) -> Any:
        return self._jmarl_judge.ask("enter", self)

    def __exit__(self, *error: Any) -> Any:
        return self._jmarl_judge.ask("exit", self, None, None, None)


# Not methods of `Remote`, where they would stand in front of the program's attributes.


def _left_to_it(remote: Remote, operation: str, *arguments: Any) -> Any:
    """Ask what a verdict may hang on."""
    remote._jmarl_judge.weak = True
    return remote._jmarl_judge.ask(operation, *arguments)


def _contains(self: Remote, x: Any) -> bool:
    """What a walk through it finds, which is as good as a list of its contents; if it says something else, that."""
    if self._jmarl_plain is not _NOTHING:
        return x in self._jmarl_plain
    try:
        found = any(y is x or y == x for y in itertools.islice(iter(self), MOST_WALKED))
    except TypeError:  # it has no iterator
        found = None
    said = self._jmarl_judge.ask("contains", self, x)
    if said is not found:
        self._jmarl_judge.weak = True
    return said


def _compare(self: Remote, how: Any, other: Any, unlike: Any) -> Any:
    mine = self._jmarl_plain
    if type(other) is not Remote:
        return unlike if mine is _NOTHING else how(mine, other)
    self._jmarl_judge.weak = True  # both are the program's
    if mine is not _NOTHING and other._jmarl_plain is not _NOTHING:
        return how(mine, other._jmarl_plain)
    return self._jmarl_judge.ask(how.__name__, self, other)


def _calculate(self: Remote, operation: str, other: Any, reflected: bool) -> Any:
    pair = (other, self) if reflected else (self, other)
    if type(other) is Remote:
        return self._jmarl_judge.ask(operation, *pair)
    return _left_to_it(self, operation, *pair)


def _set(name: str, method: Any) -> None:
    setattr(Remote, name, method)


_ABOUT = "len str repr bool int float complex abs round reversed getitem setitem delitem index neg pos invert format"
_WITH = "add sub mul truediv floordiv mod matmul and or xor lshift rshift pow"
for _name in _ABOUT.split(" "):
    _set(f"__{_name}__", lambda self, *more, _how=_name: self._jmarl_judge.ask(_how, self, *more))
for _name in ["divmod", *_WITH.split(" ")]:
    _set(f"__{_name}__", lambda self, other, _how=_name: _calculate(self, _how, other, False))
    _set(f"__r{_name}__", lambda self, other, _how=_name: _calculate(self, _how, other, True))
for _name in _WITH.split(" "):
    _set(f"__i{_name}__", lambda self, other, _how=f"i{_name}": _calculate(self, _how, other, False))
for _order in (operator.lt, operator.le, operator.gt, operator.ge):
    _set(f"__{_order.__name__}__", lambda self, other, _how=_order: _compare(self, _how, other, NotImplemented))
