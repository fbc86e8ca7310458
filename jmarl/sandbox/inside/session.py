"""A process that stays: Python code and files of one session, call after call.

    server ── keeper ── shell     namespaces of its own; runs the calls, and is stopped between them

The keeper passes calls on, watches time and output, and answers with texts only. The shell is one process that can start no
other, so that its CPU limit is the session's, and nothing of it runs while nobody waits for it. Calls and replies are frames:
4 bytes length, JSON.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import json
import linecache
import os
import random
import select
import signal
import stat
import struct
import sys
import time
import traceback
import types

from .process import Confined, forked, keep_only
from .program import flush, standard_streams
from .wire import Channel, Gone, Violation, read_exactly, write_all

MAX_CALL = 2 << 20
MAX_LISTED = 500
TEXTS = ("value", "error")
GONE = "gone"
NOTE = 100  # characters, of how much was cut off
JSON_BYTES = 26  # of one character at most, in two texts


class Keeper:
    """The side of the keeper: starts a shell and serves its client until one of the two has gone."""

    def __init__(self, confined: Confined, limits: dict, request: int):
        self.limits, self.request = limits, request
        self.cap = limits["output_bytes"]
        (down, self.ask), (self.answers, up), (self.out, out_w), (ready, told) = os.pipe(), os.pipe(), os.pipe(), os.pipe()
        nothing = os.open("/dev/null", os.O_RDWR)
        directory = confined.directory(limits["file_bytes"])
        self.confined = confined

        def execute() -> None:
            for fd, end in ((0, nothing), (1, out_w), (2, out_w)):
                os.dup2(end, fd)
            keep_only(down, up, told)
            confined.close(limits, limits["memory"], directory, single=True)
            os.write(told, b"1")
            os.close(told)
            gc.enable()
            main(Channel(down, up), directory, self.cap)

        confined.enter()
        self.child = forked(execute, 2)
        self.watch = os.pidfd_open(self.child)
        self.disk = confined.disk(directory, self.child, self.watch, limits["file_bytes"])
        for fd in (down, up, out_w, nothing, told):
            os.close(fd)
        if os.read(ready, 1) != b"1":
            raise OSError("the session could not be confined")
        for fd in (self.ask, self.answers, self.out):
            os.set_blocking(fd, False)

    def serve(self) -> None:
        signal.pidfd_send_signal(self.watch, signal.SIGSTOP)
        lost = ""
        with contextlib.suppress(EOFError, OSError):  # the client has gone
            while not lost:
                size = read_exactly(self.request, 4)
                if struct.unpack("!I", size)[0] > MAX_CALL:
                    break
                said, lost = self.exchange(size + read_exactly(self.request, struct.unpack("!I", size)[0]))
                if lost:
                    self.end()
                reply(self.request, said | {"lost": lost})
        self.end()

    def end(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            signal.pidfd_send_signal(self.watch, signal.SIGKILL)
        self.confined.leave_nothing()

    def exchange(self, call: bytes) -> tuple[dict, str]:
        """One call: the reply, and why the session has ended if it has."""
        drain(self.answers, 1 << 30)  # what it said that nobody had asked for
        signal.pidfd_send_signal(self.watch, signal.SIGCONT)
        output, frame = bytearray(), bytearray()
        self.passed_over = 0
        lost = self.pass_on(call, frame, output)
        if lost == GONE:
            lost = self.ended()
        else:
            signal.pidfd_send_signal(self.watch, signal.SIGSTOP)
        self.take(output, drain(self.out, 1 << 20))
        text = bytes(output).decode("utf-8", "replace")
        said = {"output": f"{text} … ({self.passed_over} more bytes)" if self.passed_over else text}
        return said if lost else said | texts(bytes(frame[4:]), self.cap), lost

    def take(self, output: bytearray, data: bytes) -> None:
        """What was written, up to the limit; the rest is only counted."""
        room = self.cap - len(output)
        output += data[:room]
        self.passed_over += len(data[room:])

    def pass_on(self, call: bytes, frame: bytearray, output: bytearray) -> str:
        """Write the call, and read the frame of the reply; empty, or what ended it."""
        end, poll = time.monotonic() + self.limits["wall_s"], select.poll()
        poll.register(self.ask, select.POLLOUT)
        poll.register(self.request, select.POLLRDHUP)
        for fd in (self.answers, self.out):
            poll.register(fd, select.POLLIN)
        while len(frame) < 4 or len(frame) < 4 + struct.unpack("!I", frame[:4])[0]:
            if self.disk and self.disk.over():
                return "file"
            left = end - time.monotonic()
            ready = poll.poll(max(min(left, self.disk.pause) if self.disk else left, 0) * 1000)
            if not ready and left <= 0:
                return "wall"
            for fd, _ in ready:
                if fd == self.request:
                    return "nobody waits for it any more"
                if fd == self.ask:
                    with contextlib.suppress(BlockingIOError, BrokenPipeError):
                        call = call[os.write(fd, call) :]
                    if not call:
                        poll.unregister(fd)
                elif not (data := drain(fd, 1 << 16)):
                    if fd == self.answers:
                        return GONE
                    poll.unregister(fd)
                elif fd == self.out:
                    self.take(output, data)
                else:
                    frame += data
                    if len(frame) > JSON_BYTES * self.cap + 4096:
                        return "its answer was too long"
        return ""

    def ended(self) -> str:
        """What a shell that closed its end of the channel died of."""
        if not select.select([self.watch], [], [], 1)[0]:
            signal.pidfd_send_signal(self.watch, signal.SIGKILL)
            return "it closed what it answers through"
        _, status, used = os.wait4(self.child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU or code == -signal.SIGKILL and used.ru_utime + used.ru_stime >= self.limits["cpu_s"]:
            return "cpu"
        return f"killed by signal {-code}" if code < 0 else f"it ended with status {code}"


def keep(confined: Confined, limits: dict, request: int) -> None:
    """Run as the keeper's process, until its client has gone."""
    try:
        keeper = Keeper(confined, limits, request)
    except OSError as error:
        reply(request, {"lost": f"it could not be begun: {error}"})
    else:
        keeper.serve()


def reply(request: int, said: dict[str, str]) -> None:
    data = json.dumps(said).encode()
    write_all(request, struct.pack("!I", len(data)) + data)


def drain(fd: int, most: int) -> bytes:
    """What is there; b"" also if the other end is closed."""
    parts = []
    with contextlib.suppress(BlockingIOError):
        while most > 0 and (part := os.read(fd, min(most, 1 << 16))):
            parts.append(part)
            most -= len(part)
    return b"".join(parts)


def texts(frame: bytes, cap: int) -> dict[str, str]:
    """The texts of a reply; whatever else is in it is not passed on."""
    try:
        said = json.loads(frame)
    except (ValueError, RecursionError):
        return {"error": "the session answered with something that is no reply"}
    said = said if type(said) is dict else {}
    return {name: cut(said[name], cap + NOTE) for name in TEXTS if type(said.get(name)) is str}


def cut(text: str, cap: int) -> str:
    return text if len(text) <= cap else f"{text[:cap]} … ({len(text) - cap} more characters)"


class Refused(Exception):
    """What went wrong, as a text for whoever made the call."""


class Shell:
    """The side of the session. Its code can change all of this; what it says is believed as its own words are."""

    def __init__(self, root: str, cap: int):
        self.root, self.cap, self.cells = os.path.realpath(root), cap, 0
        self.module = sys.modules["__main__"] = types.ModuleType("__main__")

    def answer(self, call: dict) -> dict[str, str]:
        try:
            return {"value": getattr(self, "do_" + call["do"])(*call["with"])}
        except Refused as error:
            return {"error": cut(str(error), self.cap)}
        except OSError as error:
            return {"error": error.strerror or str(error)}
        except Exception as error:  # of a file, such as one too large for the memory
            return {"error": type(error).__name__}

    def do_python(self, code: str) -> str:
        """Run a cell: the repr of its last expression, which is made here."""
        self.cells += 1
        name = f"<cell {self.cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        try:
            tree = ast.parse(code, name)
            last = tree.body[-1] if tree.body else None
            shown = ast.Expression(tree.body.pop().value) if isinstance(last, ast.Expr) else None  # type: ignore[attr-defined]
            names = self.module.__dict__
            exec(compile(tree, name, "exec", dont_inherit=True), names)
            value = shown and eval(compile(shown, name, "eval", dont_inherit=True), names)
            if value is None:
                return ""
            names["_"] = value
            return cut(repr(value), self.cap)
        except BaseException as error:  # also an exit, which must not end the session
            raise Refused(told(error)) from None
        finally:
            flush()

    def place(self, path: str) -> str:
        """A path below the root, whatever links lead there."""
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise Refused("the path has characters that no name has") from None
        if not path or "\0" in path:
            raise Refused("a path without null bytes is needed, relative to the session's directory; '.' is the directory")
        full = os.path.realpath(os.path.join(self.root, path))
        if os.path.isabs(path) or os.path.commonpath([full, self.root]) != self.root:
            raise Refused("the path leads out of the session's directory: give one relative to it, without '..' above it")
        return full

    def do_read(self, path: str) -> str:
        full = self.place(path)
        if os.path.isdir(full):
            raise Refused("this is a directory: use list")
        fd = regular(full, os.O_RDONLY)
        try:
            data, size = os.read(fd, self.cap), os.fstat(fd).st_size
        finally:
            os.close(fd)
        more = f" … ({size - len(data)} more bytes)" if size > len(data) else ""
        return data.decode("utf-8", "backslashreplace") + more

    def do_write(self, path: str, text: str) -> str:
        full = self.place(path)
        if path.endswith("/") or os.path.isdir(full):
            raise Refused("this is a directory: give the path of a file")
        data, above = text.encode("utf-8", "backslashreplace"), os.path.dirname(full)
        if os.path.lexists(above) and not os.path.isdir(above):
            raise Refused("what should be the directory of this file is one itself")
        os.makedirs(above, exist_ok=True)
        fd = regular(full, os.O_WRONLY | os.O_CREAT)
        try:
            os.ftruncate(fd, 0)
            write_all(fd, data)
        finally:
            os.close(fd)
        return f"{len(data)} bytes"

    def do_list(self, path: str) -> str:
        """A line each: directories end with /, others have a size or what they are."""
        full = self.place(path)
        if not os.path.isdir(full):
            raise Refused("this is no directory" if os.path.lexists(full) else "no such directory")
        with os.scandir(full) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        lines = [line(entry) for entry in entries[:MAX_LISTED]]
        if len(entries) > MAX_LISTED:
            lines.append(f"… and {len(entries) - MAX_LISTED} more")
        return cut("\n".join(lines), self.cap)


def regular(path: str, flags: int) -> int:
    """A descriptor of a regular file; pipes and devices would block, or never end."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Refused("this is no regular file")
    return fd


def line(entry: os.DirEntry) -> str:
    name = entry.name if entry.name.isprintable() else repr(entry.name)
    if entry.is_dir(follow_symlinks=False):
        return f"{name}/"
    mode = entry.stat(follow_symlinks=False)
    kinds = ((stat.S_ISREG, f"{mode.st_size} bytes"), (stat.S_ISLNK, "link"), (stat.S_ISFIFO, "pipe"))
    return f"{name}  {next((what for holds, what in kinds if holds(mode.st_mode)), 'special')}"


def told(error: BaseException) -> str:
    """As Python shows it, from the first frame of a cell on."""
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
        trace = trace.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error.with_traceback(trace), trace, limit=-20)).rstrip()
    except BaseException:  # whatever the cell's own class makes of it
        return "an error that cannot be shown"


def main(channel: Channel, root: str, cap: int) -> None:
    """Run as the session's process, confined already."""
    random.seed(0)  # the same every time it is replayed
    sys.argv = ["session"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    standard_streams()
    shell = Shell(root, cap)
    with contextlib.suppress(Gone, Violation):
        while True:
            channel.send(shell.answer(channel.receive()))
