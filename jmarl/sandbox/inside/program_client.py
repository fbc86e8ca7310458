"""The judge's connection to the program: requests about objects in the other process, and the values of the replies."""

from __future__ import annotations

import builtins
import io
import sys
import threading
import types
from typing import Any, NoReturn

from .descriptions import describe_error_class, describe_function, error_class_from, make_error
from .proxy import NOTHING, Proxy
from .wire import (
    CONTAINERS,
    DEPTH_RESERVE,
    FLAT,
    MAX_DEPTH,
    NESTED,
    Channel,
    Disconnected,
    Unsupported,
    UnsupportedTestValue,
    Violation,
    decode,
    encode,
    replace_contents,
    standard_name,
    standard_object,
)

MAX_COPIES = 256
PLAIN_CLASSES = {int, float, complex, str, bool, bytes, bytearray, list, type(None), *NESTED, *FLAT}
BUILTIN_ERRORS = {x for x in vars(builtins).values() if isinstance(x, type) and issubclass(x, BaseException)}
HARMLESS_CLASSES = PLAIN_CLASSES | BUILTIN_ERRORS  # they only hold values; calling one runs no other code
_LIMIT_OF_ERRNO = {27: "file", 28: "file", 11: "processes"}  # EFBIG, ENOSPC, EAGAIN


class ProgramClient:
    """Sends the requests of the tests to the program. Threads of the tests take turns.

    Attributes:
        answers: how many answers of the program the tests have used.
        names_requested: whether the tests have asked for names that the program defines.
        weak: whether the program alone has decided something; the judge reads this for each test and resets it.
        disconnected: whether the program has ended.
        violation: how the program broke the protocol.
        limit: the limit that an error of the program points to.
        unsupported_test_value: why a value of the tests could not be sent; the program may be the reason.
    """

    def __init__(self, channel: Channel):
        self.channel = channel
        self.turn = threading.RLock()
        self.answers = 0
        self.names_requested = False
        self.weak = False
        self.disconnected = False
        self.violation = ""
        self.limit = ""
        self.unsupported_test_value = ""
        self.exported: list[Any] = []  # objects of the tests that the program knows, by number
        self.export_numbers: dict[Any, int] = {}  # identity -> position in `exported`
        self.error_classes: dict[int, type] = {}  # stand-ins for the program's exception classes, by number
        self.error_class_numbers: dict[type, int] = {}
        self.tested_ids: set[int] = set()  # classes that the tests name and their objects: their methods are what is tested
        # Copies of containers that are attributes of the program's objects: number -> copy, encoded contents when last synced.
        self.copies: dict[int, tuple[Any, Any]] = {}

    # Values

    def export(self, x: Any) -> dict:
        """Return what stands for an object that is no plain value. The program gets things of the standard library by name, and
        of the tests' own objects only functions, iterators and exceptions. It can reach nothing else."""
        if type(x) is Proxy:
            return {"yours": x._jmarl_id}
        if isinstance(x, BaseException) and type(x.__dict__.get("_jmarl_remote")) is Proxy:
            return {"yours": x.__dict__["_jmarl_remote"]._jmarl_id}
        if isinstance(x, type) and x in self.error_class_numbers:
            return {"yours": self.error_class_numbers[x]}
        if (known := standard_name(x)) is not None:
            return {"standard": known}
        kind = x if isinstance(x, type) else type(x)
        if issubclass(kind, BaseException):
            return self._export_error(x, kind)
        is_iterator = hasattr(kind, "__next__") and not isinstance(x, io.IOBase)  # a file is more than its lines
        if kind is not x and (is_iterator or callable(x)):
            if self._key(x) in self.export_numbers:
                description = {}
            else:
                description = {"iterator": True} if is_iterator else describe_function(x)
            return {"object": self.number_of(x)} | description
        raise self.unsupported(f"a {kind.__name__} of the tests cannot be given to the program")

    def _export_error(self, x: Any, kind: type) -> dict:
        """Return what stands for an exception, or an exception class, of the tests."""
        reference = {"object": self.number_of(x), "error": describe_error_class(kind, self.number_of)}
        if kind is x:
            return reference
        arguments = [] if issubclass(kind, AssertionError) else list(x.args)  # an assertion would tell what was expected
        return reference | {"args": self.encode(arguments)}

    def unsupported(self, text: str) -> UnsupportedTestValue:
        """Return the error to raise where a value cannot be sent; no test passes any more."""
        self.unsupported_test_value = self.unsupported_test_value or text
        return UnsupportedTestValue(text)

    def number_of(self, x: Any) -> int:
        """Return the number of an object of the tests, which is the same each time."""
        key = self._key(x)
        if key not in self.export_numbers:
            self.export_numbers[key] = len(self.exported)
            self.exported.append(x)
        return self.export_numbers[key]

    @staticmethod
    def _key(x: Any) -> Any:
        """Return what identifies an object; a bound method is a new object each time it is looked up."""
        return (id(x.__self__), id(x.__func__)) if type(x) is types.MethodType else id(x)

    def encode(self, x: Any) -> Any:
        """Return a value as it stands in a message to the other process."""
        try:
            return encode(x, self.export)
        except Unsupported as error:
            raise self.unsupported(str(error)) from None

    def decode(self, data: Any) -> Any:
        """Return the value that stands in a message from the other process."""
        return decode(data, self.exported.__getitem__, self._program_object, MAX_DEPTH - DEPTH_RESERVE)

    def _program_object(self, reference: dict) -> Any:
        """Return what stands for an object of the program: a harmless class of the standard library itself, a stand-in for an
        exception class, or a proxy."""
        if "standard" in reference:
            x = standard_object(reference["standard"])
            return x if x in HARMLESS_CLASSES else self.proxy(reference)
        return self.error_class(reference["error"]) if "error" in reference else self.proxy(reference)

    def proxy(self, reference: dict) -> Proxy:
        """Return a new proxy, even for an object that has one: containers take one and the same proxy for equal to itself
        without a comparison."""
        return Proxy(self, int(reference["object"]), self.decode(reference["plain"]) if "plain" in reference else NOTHING)

    def error_class(self, entries: list) -> type:
        """Return the exception class of a description: one of the standard library, or a stand-in for the program's own."""
        count = len(self.error_classes)
        error_class = error_class_from(entries, self.error_classes, {"__getattr__": _error_attribute, "__str__": _error_text})
        if len(self.error_classes) != count:
            self.error_class_numbers = {c: number for number, c in self.error_classes.items()}
        return error_class

    # Requests

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Return what an operation on objects of the program gives, or raise what it raises."""
        with self.turn:
            self.send_changed_copies()
            self.answers += 1
            request: dict[str, Any] = {"do": operation, "args": [self.encode(x) for x in arguments]}
            if keywords:
                request["keywords"] = {name: self.encode(x) for name, x in keywords.items()}
            if self.copies:
                request["copies"] = list(self.copies)
            reply = self.exchange(request)
            self._apply_changes(reply, arguments, keywords)
            try:
                value = self.value_of(reply)
            except StopIteration as error:
                if operation == "next":
                    raise
                raise RuntimeError("the program raised StopIteration") from error  # it would end a loop of the tests early
            if "copy" in reply and operation == "getattr" and type(value) in CONTAINERS:
                return self._add_copy(int(reply["copy"]), value)
            return value

    def _apply_changes(self, reply: dict, arguments: tuple, keywords: dict) -> None:
        """Update the containers that the program has changed: arguments of the call, and copies."""
        try:
            for which, data in reply.get("changed", ()):
                self._update(keywords[which] if type(which) is str else arguments[1 + which], data)
            for number, data in reply.get("copies", ()):
                value = self._update(self.copies[number][0], data)
                self.copies[number] = (value, self.encode(value))
        except (TypeError, ValueError, LookupError):
            self._violate("a reply has malformed changes")

    def request_names(self, names: list[str]) -> dict[str, Any]:
        """Return what the program defines under these names.

        Plain values count as answers; objects do not, until they are used. A class of the standard library is decoded as that
        class only under its own name: under another it could replace one that the tests mean.
        """
        self.names_requested = True
        reply = self.exchange({"do": "names", "args": [], "names": names})
        if "raised" in reply or type(reply.get("value")) is not dict:
            self._violate("a reply has no names")
        values = {}
        for name, data in reply["value"].items():
            renamed = type(data) is dict and "standard" in data and list(data["standard"])[1:] != [name]
            if name in names:
                values[name] = self.proxy(data) if renamed else self.decode(data)
        self.answers += sum(type(x) is not Proxy for x in values.values())
        self.tested_ids = {
            x._jmarl_id for name, x in values.items() if type(x) is Proxy and name[0].isupper() and not name.isupper()
        }
        return values

    def run_script(self, stdin: str) -> str:
        """Run the program as a script and return what it writes to standard output."""
        self.answers += 1
        stdout = self.value_of(self.exchange({"do": "main", "args": [], "stdin": stdin}))
        if type(stdout) is not str:
            self._violate("the output of a script is not a text")
        return stdout

    def value_of(self, reply: dict) -> Any:
        """Return the value of a reply, or raise its error."""
        if "raised" in reply:
            raise self._error_of(reply)
        if "value" not in reply:
            self._violate("a reply has no value")
        return self.decode(reply["value"])

    def _error_of(self, reply: dict) -> BaseException:
        """Return the error of the program, or that of the tests if the program only passed it on."""
        remote, error, arguments = None, None, []
        try:
            if type(reply["raised"]) is int:
                error = self.exported[reply["raised"]]
            else:
                error_class, arguments = self.error_class(reply["raised"]), self.decode(reply["args"])
                remote, error = self.decode(reply["object"]), make_error(error_class, arguments)
        except (TypeError, ValueError, LookupError):
            self._violate("a reply has a malformed error")
        if not isinstance(error, BaseException):
            self._violate("a reply has an error that is not an exception")
        number = arguments[0] if type(arguments) is list and arguments and type(arguments[0]) is int else 0
        if isinstance(error, OSError) and number in _LIMIT_OF_ERRNO:
            self.limit = _LIMIT_OF_ERRNO[number]
        elif isinstance(error, MemoryError):
            self.limit = "memory"
        error.__dict__.update(_jmarl_raised=True, _jmarl_remote=remote)  # the program raised it
        return error

    def exchange(self, request: dict | None) -> dict:
        """Send a request, if there is one, and serve the program's calls until the reply arrives."""
        try:
            if request is not None:
                self.channel.send(request)
            while "back" in (message := self.channel.receive()):
                self.channel.send(self._serve_call(message))
            return message
        except Disconnected:
            self.disconnected = True
            raise
        except Violation as error:
            self.violation = str(error)
            raise
        except Unsupported as error:
            raise self.unsupported(str(error)) from None

    def _serve_call(self, message: dict) -> dict:
        """Call a function of the tests, or advance an iterator of theirs, for the program; return the reply."""
        try:
            function = self.exported[message["back"]]
            if "next" in message:
                value = next(function, NOTHING)
                return {"value": None if value is NOTHING else self.encode([value])}
            arguments = [self.decode(x) for x in message["args"]]
            keywords = {str(name): self.decode(x) for name, x in message["keywords"].items()}
            return {"value": self.encode(function(*arguments, **keywords))}
        except Exception as error:
            self.weak |= isinstance(error, AssertionError)  # the program could suppress it
            return {"raised": self.encode(error)}

    # The program's containers, and the tests' copies of them

    def _add_copy(self, number: int, value: Any) -> Any:
        """Return the copy of a container that is an attribute: the existing one with its contents replaced, if there is one, so
        that the tests see one and the same container as the program does."""
        if number in self.copies and type(self.copies[number][0]) is type(value):
            replace_contents(self.copies[number][0], value)
            value = self.copies[number][0]
        elif len(self.copies) >= MAX_COPIES:
            del self.copies[next(iter(self.copies))]
        self.copies[number] = (value, self.encode(value))
        return value

    def _update(self, container: Any, data: Any) -> Any:
        """Replace the contents of a container of the tests by what the program's holds now."""
        contents = self.decode(data)
        if type(contents) is not type(container) or type(container) not in CONTAINERS:
            self._violate("a container changed its type")
        replace_contents(container, contents)
        return container

    def send_changed_copies(self) -> None:
        """Update the program's containers whose copies the tests have changed, and forget copies that the tests no longer
        hold."""
        for number in list(self.copies):
            self._send_if_changed(number)
            if reference_count(self.copies[number]) <= UNUSED:
                del self.copies[number]

    def _send_if_changed(self, number: int) -> None:
        value, last_sent = self.copies[number]
        if (data := self.encode(value)) != last_sent:
            if "raised" in self.exchange({"do": "replace", "args": [{"yours": number}, data]}):
                self._violate("a container cannot be changed")
            self.copies[number] = (value, self.encode(value))

    def _violate(self, problem: str) -> NoReturn:
        self.violation = problem
        raise Violation(problem)


def reference_count(copy: tuple) -> int:
    """Return the number of references to a copied container, as this version of Python counts them."""
    return sys.getrefcount(copy[0])


UNUSED = reference_count(([], None))  # of a container that nothing but its entry in `copies` refers to


def _error_attribute(self: BaseException, name: str) -> Any:
    remote = self.__dict__.get("_jmarl_remote")
    if remote is None or name.startswith("__"):
        raise AttributeError(name)
    return getattr(remote, name)


def _error_text(self: BaseException) -> str:
    remote = self.__dict__.get("_jmarl_remote")
    return BaseException.__str__(self) if remote is None else str(remote)
