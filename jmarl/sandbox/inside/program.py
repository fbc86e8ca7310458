"""The side of the program: runs it, then does with its objects what the judge asks for.

Nothing here is trusted, because the program can change all of it. It holds nothing worth having: no tests, no expected values.
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

from .crossing import built, instance, stand_in, tree
from .wire import CONTAINERS, SLACK, Channel, Gone, Unsupported, Violation, by_name, decode, encode, named, replace_contents

NAME = "program"

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
    "enter": lambda x: x.__enter__(), "exit": lambda x, error: x.__exit__(*_of(error)),
    "replace": replace_contents, "copy": copy.copy, "deepcopy": copy.deepcopy, "callable": callable, "hasattr": hasattr,
    "await": lambda x: awaited(x),
}  # fmt: skip


def _of(error: BaseException | None) -> tuple:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


class Walk:
    """An iterator of the judge's."""

    def __init__(self, server: Server, number: int):
        self._server, self._number = server, number

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        found = self._server.ask_back({"back": self._number, "args": [], "named": {}, "next": True})
        if found is None:
            raise StopIteration
        return found[0]


class Server:
    """Answers the judge, one request at a time. Who talks has the turn, which is free while the program's own code runs: its
    threads, too, may call functions of the tests."""

    def __init__(self, source: str, channel: Channel):
        self.source, self.channel = source, channel
        self.turn, self.numbering = threading.Lock(), threading.Lock()
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.theirs: dict[int, Any] = {}  # what stands for the judge's, by number
        self.borrowed: dict[int, int] = {}  # and back
        self.seen: dict[int, Any] = {}  # containers that the judge has copies of, as it saw them last
        self.module = types.ModuleType(NAME)

    # Values

    def export(self, x: Any) -> dict:
        """An object of the program's that stays here."""
        if id(x) in self.borrowed:
            return {"yours": self.borrowed[id(x)]}
        kind, out = type(x), {"object": self._number(x)}
        if (known := named(x)) is not None:
            return out | {"standard": known}
        if isinstance(x, type) and issubclass(x, BaseException):
            return out | {"error": tree(x, self._number)}
        for base in (tuple, list, dict, set, str, int, float, bytes):
            if isinstance(x, base) and kind.__eq__ is base.__eq__ and kind.__hash__ is base.__hash__:
                out["plain"] = encode(_as_base(base, x), self.export, SLACK + 1)
        return out

    def _number(self, x: Any) -> int:
        with self.numbering:
            if id(x) not in self.numbers:
                self.numbers[id(x)] = len(self.objects)
                self.objects.append(x)
            return self.numbers[id(x)]

    def encode(self, x: Any) -> Any:
        return encode(x, self.export, SLACK)

    def decode(self, data: Any) -> Any:
        return decode(data, self.objects.__getitem__, self._theirs)

    def _theirs(self, about: dict) -> Any:
        """What stands for the judge's, the same each time; or what both sides have, of which a module that only the tests use
        is loaded."""
        if "standard" in about:
            importlib.import_module(about["standard"][0])
            return by_name(about["standard"])
        number = about["object"]
        if "error" in about:
            found = built(about["error"], self.theirs, {})
            found = instance(found, self.decode(about["args"])) if "args" in about else found
        else:
            found = Walk(self, number) if "walk" in about else stand_in(about, lambda a, n: self._call_back(number, a, n))
        found = self.theirs.setdefault(number, found)
        self.borrowed[id(found)] = number
        return found

    def _call_back(self, number: int, arguments: tuple, by_keyword: dict) -> Any:
        return self.ask_back({"back": number, "args": list(arguments), "named": by_keyword})

    # Requests

    def load(self) -> dict:
        """Run the program as a module."""
        sys.modules[NAME] = self.module
        return self._guarded(lambda: self._execute(self.module.__dict__))

    def _execute(self, names: dict) -> None:
        linecache.cache["<program>"] = (len(self.source), None, self.source.splitlines(keepends=True), "<program>")
        names["__file__"] = "program.py"
        exec(compile(self.source, "<program>", "exec", dont_inherit=True), names)

    def _guarded(self, action: Callable[[], Any]) -> dict:
        """The reply: what the action returns, or how it raised."""
        try:
            return {"value": self.encode(action())}
        except (Gone, Violation):
            raise
        except BaseException as error:
            return self._raised(error)
        finally:
            flush()

    def _raised(self, error: BaseException) -> dict:
        if id(error) in self.borrowed:
            return {"raised": self.borrowed[id(error)]}
        try:
            return {
                "raised": tree(type(error), self._number), "args": self.encode(list(error.args)), "object": self.encode(error),
            }  # fmt: skip
        except BaseException:  # the error is the program's, and so is all that it does here
            return failure("Exception")

    def answer(self, request: dict) -> dict:
        """The reply to a request."""
        operation = request.get("do", "")
        if operation == "names":
            names = vars(self.module)
            return {"value": {name: self.encode(names[name]) for name in request["names"] if name in names}}
        if operation == "main":
            return self._guarded(lambda: self._main(request["stdin"]))
        try:
            arguments = [self.decode(x) for x in request["args"]]
            by_keyword = {name: self.decode(x) for name, x in request.get("named", {}).items()}
        except Violation as error:
            return failure("TypeError", str(error))
        reply = self._do(operation, arguments, by_keyword)
        kept = {number: self._contents(self.objects[number]) for number in request.get("kept", ())}
        changed = {number: now for number, now in kept.items() if now is not None and now != self.seen.get(number)}
        self.seen.update(changed)
        return reply | {"kept": list(changed.items())} if changed else reply

    def _do(self, operation: str, arguments: list, by_keyword: dict) -> dict:
        """The reply, with what became of arguments that are containers, and whether the value is one that stays here."""
        if operation == "call":
            given: dict[Any, Any] = {**dict(enumerate(arguments[1:])), **by_keyword}
            before = {which: self._contents(x) for which, x in given.items()}
            reply = self._guarded(lambda: arguments[0](*arguments[1:], **by_keyword))
            after = {which: self._contents(x) for which, x in given.items()}
            changed = [[which, now] for which, now in after.items() if now is not None and now != before[which]]
            return reply | {"changed": changed} if changed else reply
        found: list[Any] = []
        reply = self._guarded(lambda: found.append(OPERATIONS[operation](*arguments)) or found[0])
        if operation == "getattr" and "value" in reply and type(found[0]) in CONTAINERS:
            number = self._number(found[0])
            self.seen[number] = reply["value"]
            reply["keep"] = number
        return reply

    def _contents(self, x: Any) -> Any:
        if type(x) not in CONTAINERS:
            return None
        try:
            return self.encode(x)
        except Unsupported:
            return None

    def _main(self, stdin: str) -> str:
        """Run the program as a script: what it wrote. In a process of its own, so that it may end as it likes; where there are
        no new processes (S2), in this one."""
        with tempfile.TemporaryFile() as reads, tempfile.TemporaryFile() as writes:
            reads.write(stdin.encode("utf-8", "surrogatepass"))
            reads.seek(0)
            try:
                child = os.fork()
            except PermissionError:
                self._script(reads.fileno(), writes.fileno())
            else:
                if child == 0:
                    os._exit(ended(lambda: self._script(reads.fileno(), writes.fileno())))
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                if status:
                    raise RuntimeError(f"the script ended with status {status}")
            writes.seek(0)
            return writes.read().decode("utf-8", "replace")

    def _script(self, reads: int, writes: int) -> None:
        """With these as standard input and output, whichever way it uses them."""
        before, nothing = os.dup(1), os.open("/dev/null", os.O_RDONLY)
        os.dup2(reads, 0)
        os.dup2(writes, 1)
        standard_streams()
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
            module.__dict__.clear()  # files that it has left open are written
            for fd, back in ((0, nothing), (1, before)):
                os.dup2(back, fd)
                os.close(back)

    def ask_back(self, request: dict) -> Any:
        """Call a function of the judge's, and serve what it asks for meanwhile."""
        with self.turn:
            request["args"] = [self.encode(x) for x in request["args"]]
            request["named"] = {name: self.encode(x) for name, x in request["named"].items()}
            self.channel.send(request)
            while "do" in (message := self.channel.receive()):
                self._serve(message)
        if "raised" in message:
            raise self.decode(message["raised"])
        return self.decode(message["value"])

    def _serve(self, request: dict) -> None:
        """With the turn, which is given away meanwhile."""
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
        """Until the judge has gone."""
        with self.turn:
            self.channel.send(self.load() if load else {"value": None})
            while True:
                self._serve(self.channel.receive())


def failure(kind: str, *arguments: str) -> dict:
    """A reply that raises an exception of Python's."""
    return {"raised": tree(getattr(builtins, kind), id), "args": list(arguments), "object": None}


def awaited(x: Any) -> Any:
    """What a coroutine of the program's comes to, always in the same loop."""
    import asyncio

    async def result() -> Any:
        return await x

    if not _RUNNER:
        _RUNNER.append(asyncio.Runner())
    return _RUNNER[0].run(result())


_RUNNER: list[Any] = []


def join_threads() -> None:
    """Wait for those that are not daemons, as Python does at its end."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def flush() -> None:
    for stream in dict.fromkeys((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        try:
            stream.flush()  # type: ignore[union-attr]
        except Exception:  # the program may have closed or replaced it
            continue


def standard_streams() -> None:
    """Over the descriptors as they are now."""
    how: dict[str, Any] = dict(errors="backslashreplace", closefd=False)
    streams = [open(fd, mode, **how) for fd, mode in ((0, "r"), (1, "w"), (2, "w"))]  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams


def ended(action: Callable[[], None]) -> int:
    """The exit status of a process that does `action`."""
    try:
        action()
        return 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    finally:
        flush()


def _as_base(base: type, x: Any) -> Any:
    if base is dict:
        return dict(dict.items(x))
    if base is list:
        return list(list.__iter__(x))
    return base(base.__iter__(x)) if base in (tuple, set) else base.__getnewargs__(x)[0] if base is not int else int.__int__(x)


def main(source: bytes, channel: Channel, script: bool) -> None:
    """Run as the program's process, confined already."""
    random.seed(0)  # the same verdict every time
    sys.argv = ["program"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    standard_streams()
    try:
        Server(source.decode("utf-8", "surrogatepass"), channel).serve(not script)
    except (Gone, Violation):
        return
