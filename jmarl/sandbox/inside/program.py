"""The side of the program: run it, then do with its objects what the judge asks for.

Nothing in this process is trusted, because the program can change all of it. It holds no secrets: no tests and no expected
values.
"""

from __future__ import annotations

import atexit
import builtins
import copy
import importlib
import linecache
import operator
import os
import random
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from typing import Any

from .descriptions import describe_error_class, error_class_from, function_from, make_error
from .process import exit_status, flush, join_threads, reopen_standard_streams
from .wire import (
    CONTAINERS,
    DEPTH_RESERVE,
    Channel,
    Disconnected,
    Unsupported,
    Violation,
    decode,
    encode,
    replace_contents,
    standard_name,
    standard_object,
)

MODULE = "program"  # the name of the module that the program runs as

OPERATIONS: dict[str, Callable[..., Any]] = {
    "getattr": getattr, "setattr": setattr, "delattr": delattr, "len": len, "iter": iter, "next": next, "str": str,
    "repr": repr, "bool": bool, "int": int, "float": float, "complex": complex, "abs": abs, "round": round, "format": format,
    "isinstance": isinstance, "issubclass": issubclass, "reversed": reversed, "divmod": divmod, "pow": pow, "hash": hash,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem, "index": operator.index,
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv, "floordiv": operator.floordiv,
    "mod": operator.mod, "matmul": operator.matmul, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "lshift": operator.lshift, "rshift": operator.rshift, "neg": operator.neg, "pos": operator.pos, "invert": operator.invert,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "contains": operator.contains, "iadd": operator.iadd, "isub": operator.isub, "imul": operator.imul, "iand": operator.iand,
    "itruediv": operator.itruediv, "ifloordiv": operator.ifloordiv, "imod": operator.imod, "imatmul": operator.imatmul,
    "ior": operator.ior, "ixor": operator.ixor, "ilshift": operator.ilshift, "irshift": operator.irshift, "ipow": operator.ipow,
    "enter": lambda x: x.__enter__(), "exit": lambda x, error: x.__exit__(*_exception_info(error)),
    "replace": replace_contents, "copy": copy.copy, "deepcopy": copy.deepcopy, "callable": callable, "hasattr": hasattr,
    "await": lambda x: await_result(x),
}  # fmt: skip


def _exception_info(error: BaseException | None) -> tuple:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


class JudgeIterator:
    """Stands for an iterator of the tests."""

    def __init__(self, server: ProgramServer, number: int):
        self._server, self._number = server, number

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        value = self._server.call_judge({"back": self._number, "args": [], "keywords": {}, "next": True})
        if value is None:
            raise StopIteration
        return value[0]


class ProgramServer:
    """Answers the requests of the judge, one at a time.

    Whoever uses the channel holds `turn`. It is free while the program's own code runs, because threads of the program may call
    functions of the tests too.
    """

    def __init__(self, source: str, channel: Channel):
        self.source, self.channel = source, channel
        self.turn, self.number_lock = threading.Lock(), threading.Lock()
        self.objects: list[Any] = []  # objects of the program that the judge knows, by number
        self.numbers: dict[int, int] = {}  # id -> position in `objects`
        self.stand_ins: dict[int, Any] = {}  # for objects of the judge, by their number
        self.stand_in_numbers: dict[int, int] = {}  # id -> the judge's number
        self.last_contents: dict[int, Any] = {}  # encoded contents of containers of which the judge has copies, by number
        self.module = types.ModuleType(MODULE)

    # Values

    def export(self, x: Any) -> dict:
        """Return what stands for an object that stays in this process."""
        if id(x) in self.stand_in_numbers:
            return {"yours": self.stand_in_numbers[id(x)]}
        kind, reference = type(x), {"object": self._number_of(x)}
        if (known := standard_name(x)) is not None:
            return reference | {"standard": known}
        if isinstance(x, type) and issubclass(x, BaseException):
            return reference | {"error": describe_error_class(x, self._number_of)}
        for base in (tuple, list, dict, set, str, int, float, bytes):
            if isinstance(x, base) and kind.__eq__ is base.__eq__ and kind.__hash__ is base.__hash__:
                reference["plain"] = encode(_plain_value(base, x), self.export, DEPTH_RESERVE + 1)
        return reference

    def _number_of(self, x: Any) -> int:
        with self.number_lock:
            if id(x) not in self.numbers:
                self.numbers[id(x)] = len(self.objects)
                self.objects.append(x)
            return self.numbers[id(x)]

    def encode(self, x: Any) -> Any:
        """Return a value as it stands in a message to the other process."""
        return encode(x, self.export, DEPTH_RESERVE)

    def decode(self, data: Any) -> Any:
        """Return the value that stands in a message from the other process."""
        return decode(data, self.objects.__getitem__, self._judge_object)

    def _judge_object(self, reference: dict) -> Any:
        """Return what stands for an object of the judge, the same each time; or something of the standard library, whose module
        is imported if only the tests have imported it so far."""
        if "standard" in reference:
            importlib.import_module(reference["standard"][0])
            return standard_object(reference["standard"])
        number = reference["object"]
        if "error" in reference:
            error_class = error_class_from(reference["error"], self.stand_ins, {})
            x = make_error(error_class, self.decode(reference["args"])) if "args" in reference else error_class
        elif "iterator" in reference:
            x = JudgeIterator(self, number)
        else:
            x = function_from(reference, lambda arguments, keywords: self._call_function(number, arguments, keywords))
        x = self.stand_ins.setdefault(number, x)
        self.stand_in_numbers[id(x)] = number
        return x

    def _call_function(self, number: int, arguments: tuple, keywords: dict) -> Any:
        return self.call_judge({"back": number, "args": list(arguments), "keywords": keywords})

    # Requests

    def load(self) -> dict:
        """Run the program as a module and return the reply."""
        sys.modules[MODULE] = self.module
        return self._reply_of(lambda: self._execute(self.module.__dict__))

    def _execute(self, names: dict) -> None:
        linecache.cache["<program>"] = (len(self.source), None, self.source.splitlines(keepends=True), "<program>")
        names["__file__"] = "program.py"
        exec(compile(self.source, "<program>", "exec", dont_inherit=True), names)

    def _reply_of(self, action: Callable[[], Any]) -> dict:
        """Return the reply that has what the action returns or raises."""
        try:
            return {"value": self.encode(action())}
        except (Disconnected, Violation):
            raise
        except BaseException as error:
            return self._error_reply(error)
        finally:
            flush()

    def _error_reply(self, error: BaseException) -> dict:
        if id(error) in self.stand_in_numbers:
            return {"raised": self.stand_in_numbers[id(error)]}
        try:
            return {
                "raised": describe_error_class(type(error), self._number_of),
                "args": self.encode(list(error.args)),
                "object": self.encode(error),
            }
        except BaseException:  # the program's own error class may do anything here
            return failure("Exception")

    def answer(self, request: dict) -> dict:
        """Do what a request asks for and return the reply."""
        operation = request.get("do", "")
        if operation == "names":
            names = vars(self.module)
            return {"value": {name: self.encode(names[name]) for name in request["names"] if name in names}}
        if operation == "main":
            return self._reply_of(lambda: self._run_script(request["stdin"]))
        try:
            arguments = [self.decode(x) for x in request["args"]]
            keywords = {name: self.decode(x) for name, x in request.get("keywords", {}).items()}
        except Violation as error:
            return failure("TypeError", str(error))
        reply = self._operate(operation, arguments, keywords)
        contents = {number: self._contents(self.objects[number]) for number in request.get("copies", ())}
        changed = {
            number: data for number, data in contents.items() if data is not None and data != self.last_contents.get(number)
        }
        self.last_contents.update(changed)
        return reply | {"copies": list(changed.items())} if changed else reply

    def _operate(self, operation: str, arguments: list, keywords: dict) -> dict:
        """Return the reply to an operation. It includes the new contents of arguments that are containers and were changed,
        and, for an attribute that is a container, the number under which the judge may keep a copy."""
        if operation == "call":
            passed: dict[Any, Any] = {**dict(enumerate(arguments[1:])), **keywords}
            before = {which: self._contents(x) for which, x in passed.items()}
            reply = self._reply_of(lambda: arguments[0](*arguments[1:], **keywords))
            after = {which: self._contents(x) for which, x in passed.items()}
            changed = [[which, data] for which, data in after.items() if data is not None and data != before[which]]
            return reply | {"changed": changed} if changed else reply
        values: list[Any] = []
        reply = self._reply_of(lambda: values.append(OPERATIONS[operation](*arguments)) or values[0])
        if operation == "getattr" and "value" in reply and type(values[0]) in CONTAINERS:
            number = self._number_of(values[0])
            self.last_contents[number] = reply["value"]
            reply["copy"] = number
        return reply

    def _contents(self, x: Any) -> Any:
        """Return the encoded contents of a container; None if it is none or cannot be encoded."""
        if type(x) not in CONTAINERS:
            return None
        try:
            return self.encode(x)
        except Unsupported:
            return None

    def _run_script(self, stdin: str) -> str:
        """Run the program as a script and return what it writes to standard output.

        It runs in a process of its own, so that it may end in any way. Where no new process is allowed (S2), it runs in this
        one.
        """
        with tempfile.TemporaryFile() as reads, tempfile.TemporaryFile() as writes:
            reads.write(stdin.encode("utf-8", "surrogatepass"))
            reads.seek(0)
            try:
                child = os.fork()
            except PermissionError:
                self._execute_script(reads.fileno(), writes.fileno())
            else:
                if child == 0:
                    os._exit(exit_status(lambda: self._execute_script(reads.fileno(), writes.fileno())))
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                if status:
                    raise RuntimeError(f"the script ended with status {status}")
            writes.seek(0)
            return writes.read().decode("utf-8", "replace")

    def _execute_script(self, read_fd: int, write_fd: int) -> None:
        """Run the program with these files as descriptors 0 and 1, so that every way to read and write uses them."""
        stdout, null = os.dup(1), os.open("/dev/null", os.O_RDONLY)
        os.dup2(read_fd, 0)
        os.dup2(write_fd, 1)
        reopen_standard_streams()
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            self._execute(module.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        finally:
            join_threads()
            atexit._run_exitfuncs()
            flush()
            module.__dict__.clear()  # closes files that the script left open, so that their buffers are written
            for fd, original in ((0, null), (1, stdout)):
                os.dup2(original, fd)
                os.close(original)

    def call_judge(self, request: dict) -> Any:
        """Call a function of the judge, and serve its requests until it returns."""
        with self.turn:
            request["args"] = [self.encode(x) for x in request["args"]]
            request["keywords"] = {name: self.encode(x) for name, x in request["keywords"].items()}
            self.channel.send(request)
            while "do" in (message := self.channel.receive()):
                self._serve_request(message)
        if "raised" in message:
            raise self.decode(message["raised"])
        return self.decode(message["value"])

    def _serve_request(self, request: dict) -> None:
        """Answer a request. The caller holds `turn`, which is released while the program's code runs."""
        self.turn.release()
        try:
            reply = self.answer(request)
        except Unsupported as error:
            reply = failure("TypeError", str(error))
        finally:
            self.turn.acquire()
        try:
            self.channel.send(reply)
        except Unsupported as error:
            self.channel.send(failure("TypeError", str(error)))

    def serve(self, load: bool) -> None:
        """Answer requests until the judge ends. load: first run the program as a module."""
        with self.turn:
            self.channel.send(self.load() if load else {"value": None})
            while True:
                self._serve_request(self.channel.receive())


def failure(builtin_error: str, *arguments: str) -> dict:
    """Return a reply that raises one of Python's builtin exceptions."""
    return {"raised": describe_error_class(getattr(builtins, builtin_error), id), "args": list(arguments), "object": None}


_ASYNCIO_RUNNER: list[Any] = []  # the one runner of all coroutines, so that they share an event loop


def await_result(awaitable: Any) -> Any:
    """Run an awaitable of the program to its end and return its result."""
    import asyncio

    async def result() -> Any:
        return await awaitable

    if not _ASYNCIO_RUNNER:
        _ASYNCIO_RUNNER.append(asyncio.Runner())
    return _ASYNCIO_RUNNER[0].run(result())


def _plain_value(base: type, x: Any) -> Any:
    """Return the value of an instance of a builtin type's subclass, without calling methods of the subclass."""
    if base is dict:
        return dict(dict.items(x))
    if base is list:
        return list(list.__iter__(x))
    if base in (tuple, set):
        return base(base.__iter__(x))
    return int.__int__(x) if base is int else base.__getnewargs__(x)[0]


def main(source: bytes, channel: Channel, is_script: bool) -> None:
    """Serve a program until its judge ends. This process is confined already. is_script: run it on request, not now."""
    random.seed(0)  # so that the verdict is the same every time
    sys.argv = ["program"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    reopen_standard_streams()
    try:
        ProgramServer(source.decode("utf-8", "surrogatepass"), channel).serve(not is_script)
    except (Disconnected, Violation):
        return
