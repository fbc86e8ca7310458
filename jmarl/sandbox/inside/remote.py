"""The judge's view of a program: the requests about objects that live in the other process, and what comes back."""

from __future__ import annotations

import builtins
import io
import sys
import threading
import types
from typing import Any, NoReturn

from .crossing import built, described, instance, tree
from .handles import NOTHING, Remote
from .wire import (
    CONTAINERS,
    FLAT,
    MAX_DEPTH,
    NESTED,
    SLACK,
    Channel,
    Gone,
    Unsupported,
    Untold,
    Violation,
    by_name,
    decode,
    encode,
    named,
    replace_contents,
)

MOST_KEPT = 256
MOST_HEARD = 1 << 20  # what is too large to be sent, after the program sent this much, may be of its making
PLAIN = {int, float, complex, str, bool, bytes, bytearray, list, type(None), *NESTED, *FLAT}
ERRORS = {x for x in vars(builtins).values() if isinstance(x, type) and issubclass(x, BaseException)}
INERT = PLAIN | ERRORS  # classes that do no more than hold
_LIMIT_NUMBERS = {27: "file", 28: "file", 11: "processes"}  # EFBIG, ENOSPC, EAGAIN


class Judge:
    """Asks the program on behalf of the tests; their threads one after the other."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.turn = threading.RLock()
        self.asked = 0
        self.wanted = False
        self.weak = False
        self.gone = False
        self.violation = ""
        self.limit = ""
        self.unsupported = ""  # what of the tests' own could not be told to the program
        self.uncrossed = ""  # the same, also if the program may have made it so
        self.mine: list[Any] = []
        self.given: dict[Any, int] = {}  # by what it is: its place in `mine`
        self.errors: dict[int, type] = {}
        self.numbers: dict[type, int] = {}
        self.tested: set[int] = set()  # what the tests name as a class, and its objects: their methods are what is tested
        self.kept: dict[int, tuple[Any, Any]] = {}  # copies of the program's containers, and as what they were last seen

    # Values

    def export(self, x: Any) -> dict:
        """What the program gets for an object of the tests: what is in the standard library by name, of their own only
        functions, iterators and exceptions. Nothing else can be reached from there."""
        if type(x) is Remote:
            return {"yours": x._jmarl_id}
        if isinstance(x, BaseException) and type(x.__dict__.get("_jmarl_remote")) is Remote:
            return {"yours": x.__dict__["_jmarl_remote"]._jmarl_id}
        if isinstance(x, type) and x in self.numbers:
            return {"yours": self.numbers[x]}
        if (known := named(x)) is not None:
            return {"standard": known}
        kind = x if isinstance(x, type) else type(x)
        if issubclass(kind, BaseException):
            about = {"object": self.number(x), "error": tree(kind, self.number)}
            told = [] if kind is x or issubclass(kind, AssertionError) else list(x.args)  # not what was expected
            return about if kind is x else about | {"args": self.encode(told)}
        walk = hasattr(kind, "__next__") and not isinstance(x, io.IOBase)  # a file is more than its lines
        if kind is not x and (walk or callable(x)):
            known = self._key(x) in self.given
            return {"object": self.number(x)} | ({} if known else {"walk": True} if walk else described(x))
        root = kind.__module__.partition(".")[0]  # an array of what the program gave, and what stands for its objects
        raise self.untold(f"a {kind.__name__} of the tests cannot be given to the program", root not in ("numpy", "inside"))

    def untold(self, text: str, of_tests: bool = True) -> Untold:
        """The error to raise where something cannot be told to the program; no test passes any more. of_tests: the program
        cannot have made it so."""
        self.uncrossed = self.uncrossed or text
        if of_tests:
            self.unsupported = self.unsupported or text
        return Untold(text)

    def number(self, x: Any) -> int:
        """Of an object of the tests, the same each time."""
        key = self._key(x)
        if key not in self.given:
            self.given[key] = len(self.mine)
            self.mine.append(x)
        return self.given[key]

    @staticmethod
    def _key(x: Any) -> Any:
        """A method is made anew each time."""
        return (id(x.__self__), id(x.__func__)) if type(x) is types.MethodType else id(x)

    def encode(self, x: Any) -> Any:
        try:
            return encode(x, self.export)
        except Unsupported as error:
            raise self.untold(str(error)) from None

    def decode(self, data: Any) -> Any:
        return decode(data, self.mine.__getitem__, self._theirs, MAX_DEPTH - SLACK)

    def _theirs(self, about: dict) -> Any:
        """What stands for an object of the program's."""
        if "standard" in about:
            found = by_name(about["standard"])
            return found if found in INERT else self.remote(about)
        return self.error_class(about["error"]) if "error" in about else self.remote(about)

    def remote(self, about: dict) -> Remote:
        """A new one even for the same object, because containers find one and the same thing equal to itself without asking."""
        return Remote(self, int(about["object"]), self.decode(about["plain"]) if "plain" in about else NOTHING)

    def error_class(self, entries: list) -> type:
        """The exception that a `tree` tells of: one of the standard library, or one like the program's own."""
        known = len(self.errors)
        found = built(entries, self.errors, {"__getattr__": _of_error, "__str__": _text_of_error})
        if len(self.errors) != known:
            self.numbers = {kind: number for number, kind in self.errors.items()}
        return found

    # Requests

    def ask(self, operation: str, /, *arguments: Any, **by_keyword: Any) -> Any:
        """What an operation of the program's gives."""
        with self.turn:
            self.flush()
            self.asked += 1
            request: dict[str, Any] = {"do": operation, "args": [self.encode(x) for x in arguments]}
            if by_keyword:
                request["named"] = {name: self.encode(x) for name, x in by_keyword.items()}
            if self.kept:
                request["kept"] = list(self.kept)
            reply = self.exchange(request)
            try:
                for which, data in reply.get("changed", ()):
                    self._update(by_keyword[which] if type(which) is str else arguments[1 + which], data)
                for number, data in reply.get("kept", ()):
                    value = self._update(self.kept[number][0], data)
                    self.kept[number] = (value, self.encode(value))
            except (TypeError, ValueError, LookupError):
                self._broken("no changes")
            try:
                value = self.value(reply)
            except StopIteration as error:
                if operation == "next":
                    raise
                raise RuntimeError("the program raised StopIteration") from error  # it would end a loop of the tests early
            if "keep" in reply and operation == "getattr" and type(value) in CONTAINERS:
                return self._keep(int(reply["keep"]), value)
            return value

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """What the program calls by these names. Values are answers already, objects have yet to be asked. A class of the
        standard library counts as that only under its own name: under another it could stand in for one that the tests mean."""
        self.wanted = True
        reply = self.exchange({"do": "names", "args": [], "names": wanted})
        if "raised" in reply or type(reply.get("value")) is not dict:
            self._broken("no names")
        found = {}
        for name, about in reply["value"].items():
            borrowed = type(about) is dict and "standard" in about and list(about["standard"])[1:] != [name]
            if name in wanted:
                found[name] = self.remote(about) if borrowed else self.decode(about)
        self.asked += sum(type(x) is not Remote for x in found.values())
        self.tested = {
            x._jmarl_id for name, x in found.items() if type(x) is Remote and name[0].isupper() and not name.isupper()
        }
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
        if "raised" in reply:
            raise self._raised(reply)
        if "value" not in reply:
            self._broken("a reply without a value")
        return self.decode(reply["value"])

    def _raised(self, reply: dict) -> BaseException:
        """The program's error, or the tests' own that came through it."""
        about, error, arguments = None, None, []
        try:
            if type(reply["raised"]) is int:
                error = self.mine[reply["raised"]]
            else:
                kind, arguments = self.error_class(reply["raised"]), self.decode(reply["args"])
                about, error = self.decode(reply["object"]), instance(kind, arguments)
        except (TypeError, ValueError, LookupError):
            self._broken("an error that is none")
        if not isinstance(error, BaseException):
            self._broken("an error that is none")
        number = arguments[0] if type(arguments) is list and arguments and type(arguments[0]) is int else 0
        if isinstance(error, OSError) and number in _LIMIT_NUMBERS:
            self.limit = _LIMIT_NUMBERS[number]
        elif isinstance(error, MemoryError):
            self.limit = "memory"
        error.__dict__.update(_jmarl_raised=True, _jmarl_remote=about)  # by the program
        return error

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
        except Unsupported as error:
            raise self.untold(str(error), self.channel.received < MOST_HEARD) from None

    def _called(self, message: dict) -> dict:
        """The program calls a function of the tests."""
        try:
            function = self.mine[message["back"]]
            if "next" in message:
                found = next(function, NOTHING)
                return {"value": None if found is NOTHING else self.encode([found])}
            arguments = [self.decode(x) for x in message["args"]]
            by_keyword = {str(name): self.decode(x) for name, x in message["named"].items()}
            return {"value": self.encode(function(*arguments, **by_keyword))}
        except Exception as error:
            self.weak |= isinstance(error, AssertionError)  # the program could make it go away
            return {"raised": self.encode(error)}

    # The program's containers, and the tests' copies of them

    def _keep(self, number: int, value: Any) -> Any:
        """What an attribute is: the copy that is there already, if there is one, as it is the same thing for the program."""
        if number in self.kept and type(self.kept[number][0]) is type(value):
            replace_contents(self.kept[number][0], value)
            value = self.kept[number][0]
        elif len(self.kept) >= MOST_KEPT:
            del self.kept[next(iter(self.kept))]
        self.kept[number] = (value, self.encode(value))
        return value

    def _update(self, old: Any, data: Any) -> Any:
        """Make a container of the tests hold what the program's does now."""
        new = self.decode(data)
        if type(new) is not type(old) or type(old) not in CONTAINERS:
            self._broken("a container changed its type")
        replace_contents(old, new)
        return old

    def flush(self) -> None:
        """Bring the program's containers up to date with the copies that the tests have changed; forget those that they do not
        have any more."""
        for number in list(self.kept):
            self._bring_back(number)
            if holders(self.kept[number]) <= ALONE:
                del self.kept[number]

    def _bring_back(self, number: int) -> None:
        value, was = self.kept[number]
        if (now := self.encode(value)) != was:
            if "raised" in self.exchange({"do": "replace", "args": [{"yours": number}, now]}):
                self._broken("a container that cannot be changed")
            self.kept[number] = (value, self.encode(value))

    def _broken(self, what: str) -> NoReturn:
        self.violation = what
        raise Violation(what)


def holders(kept: tuple) -> int:
    """How many references there are to what is kept; versions of Python count them differently."""
    return sys.getrefcount(kept[0])


ALONE = holders(([], None))


def _of_error(self: BaseException, name: str) -> Any:
    remote = self.__dict__.get("_jmarl_remote")
    if remote is None or name.startswith("__"):
        raise AttributeError(name)
    return getattr(remote, name)


def _text_of_error(self: BaseException) -> str:
    remote = self.__dict__.get("_jmarl_remote")
    return BaseException.__str__(self) if remote is None else str(remote)
