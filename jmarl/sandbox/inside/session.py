"""A process that stays from call to call: Python code and files of one session.

    server ── supervisor ── shell     own namespaces; runs the calls, and is stopped between them

The supervisor is the runner of a session's request. It passes calls on, watches time and output, and replies with texts only.
The shell cannot start other processes, so its CPU limit is the session's, and nothing runs while nobody waits for it. Calls and
replies are 4 bytes length and JSON: {"do": operation, "arguments": texts}, and {"output", "value", "error", "lost"}.
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

from .process import Confinement, close_all_except, flush, fork, reopen_standard_streams
from .wire import Channel, Disconnected, Violation, read_exactly, write_all

MAX_CALL = 2 << 20
MAX_LISTED = 500
REPLY_TEXTS = ("value", "error")
CHANNEL_CLOSED = "channel closed"  # an intermediate reason, which `Supervisor.end_reason` replaces
NOTE_LENGTH = 100  # characters that may be added to say how much was cut off
JSON_BYTES = 26  # at most, for one character in two texts


class Supervisor:
    """Starts a shell and serves its client until one of the two ends."""

    def __init__(self, confinement: Confinement, limits: dict, request_fd: int):
        self.confinement, self.limits, self.request_fd = confinement, limits, request_fd
        self.max_output = limits["output_bytes"]
        (call_in, self.call_out), (reply_in, reply_out) = os.pipe(), os.pipe()
        (self.stdout, stdout_w), (confined, confined_w) = os.pipe(), os.pipe()
        self.reply_in = reply_in
        null = os.open("/dev/null", os.O_RDWR)
        directory = confinement.make_directory(limits["file_bytes"])

        def execute() -> None:
            for fd, target in ((null, 0), (stdout_w, 1), (stdout_w, 2)):
                os.dup2(fd, target)
            close_all_except(call_in, reply_out, confined_w)
            confinement.apply(limits, limits["memory"], directory, no_forks=True)
            os.write(confined_w, b"1")
            os.close(confined_w)
            gc.enable()
            main(Channel(call_in, reply_out), directory, self.max_output)

        confinement.prepare()
        self.child = fork(execute, 2)
        self.child_fd = os.pidfd_open(self.child)
        self.disk = confinement.disk_meter(directory, self.child, self.child_fd, limits["file_bytes"])
        for fd in (call_in, reply_out, stdout_w, null, confined_w):
            os.close(fd)
        if os.read(confined, 1) != b"1":
            raise OSError("the session could not be confined")
        for fd in (self.call_out, self.reply_in, self.stdout):
            os.set_blocking(fd, False)

    def serve(self) -> None:
        """Serve calls until the client or the shell ends."""
        signal.pidfd_send_signal(self.child_fd, signal.SIGSTOP)
        lost = ""
        with contextlib.suppress(EOFError, OSError):  # the client has ended
            while not lost:
                header = read_exactly(self.request_fd, 4)
                size = struct.unpack("!I", header)[0]
                if size > MAX_CALL:
                    break
                reply, lost = self.exchange(header + read_exactly(self.request_fd, size))
                if lost:
                    self.end()
                send_reply(self.request_fd, reply | {"lost": lost})
        self.end()

    def end(self) -> None:
        """Kill the shell and remove its directory."""
        with contextlib.suppress(OSError):  # it has ended
            signal.pidfd_send_signal(self.child_fd, signal.SIGKILL)
        self.confinement.clean_up()

    def exchange(self, call: bytes) -> tuple[dict, str]:
        """Make one call. Return the texts of the reply, and why the session has ended, or an empty text."""
        read_available(self.reply_in, 1 << 30)  # drop replies that no call asked for
        signal.pidfd_send_signal(self.child_fd, signal.SIGCONT)
        output, frame = bytearray(), bytearray()
        self.dropped_bytes = 0
        lost = self.transfer(call, frame, output)
        if lost == CHANNEL_CLOSED:
            lost = self.end_reason()
        else:
            signal.pidfd_send_signal(self.child_fd, signal.SIGSTOP)
        self.append_output(output, read_available(self.stdout, 1 << 20))
        text = bytes(output).decode("utf-8", "replace")
        reply = {"output": f"{text} … ({self.dropped_bytes} more bytes)" if self.dropped_bytes else text}
        return reply if lost else reply | reply_texts(bytes(frame[4:]), self.max_output), lost

    def append_output(self, output: bytearray, data: bytes) -> None:
        """Append what was written, up to the limit; count what is beyond it."""
        room = self.max_output - len(output)
        output += data[:room]
        self.dropped_bytes += len(data[room:])

    def transfer(self, call: bytes, frame: bytearray, output: bytearray) -> str:
        """Write a call and read the frame of its reply and the output. Return an empty text, or why the session has to end."""
        deadline, poll = time.monotonic() + self.limits["wall_s"], select.poll()
        poll.register(self.call_out, select.POLLOUT)
        poll.register(self.request_fd, select.POLLRDHUP)
        for fd in (self.reply_in, self.stdout):
            poll.register(fd, select.POLLIN)
        while len(frame) < 4 or len(frame) < 4 + struct.unpack("!I", frame[:4])[0]:
            if self.disk and self.disk.exceeded():
                return "file"
            time_left = deadline - time.monotonic()
            pause = min(time_left, self.disk.pause) if self.disk else time_left
            ready = poll.poll(max(pause, 0) * 1000)
            if not ready and time_left <= 0:
                return "wall"
            for fd, _ in ready:
                if fd == self.request_fd:
                    return "the client no longer waits for the reply"
                if fd == self.call_out:
                    with contextlib.suppress(BlockingIOError, BrokenPipeError):
                        call = call[os.write(fd, call) :]
                    if not call:
                        poll.unregister(fd)
                elif not (data := read_available(fd, 1 << 16)):
                    if fd == self.reply_in:
                        return CHANNEL_CLOSED
                    poll.unregister(fd)
                elif fd == self.stdout:
                    self.append_output(output, data)
                else:
                    frame += data
                    if len(frame) > JSON_BYTES * self.max_output + 4096:
                        return "its reply was too long"
        return ""

    def end_reason(self) -> str:
        """Return why a shell has ended that closed its end of the channel."""
        if not select.select([self.child_fd], [], [], 1)[0]:
            signal.pidfd_send_signal(self.child_fd, signal.SIGKILL)
            return "it closed its channel"
        _, status, used = os.wait4(self.child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU or code == -signal.SIGKILL and used.ru_utime + used.ru_stime >= self.limits["cpu_s"]:
            return "cpu"
        return f"killed by signal {-code}" if code < 0 else f"it ended with status {code}"


def serve(confinement: Confinement, limits: dict, request_fd: int) -> None:
    """Serve a session until it ends. This process is the supervisor."""
    try:
        supervisor = Supervisor(confinement, limits, request_fd)
    except OSError as error:
        send_reply(request_fd, {"lost": f"it could not be started: {error}"})
    else:
        supervisor.serve()


def send_reply(request_fd: int, reply: dict[str, str]) -> None:
    """Send a reply to the client."""
    data = json.dumps(reply).encode()
    write_all(request_fd, struct.pack("!I", len(data)) + data)


def read_available(fd: int, max_bytes: int) -> bytes:
    """Read what is available without waiting; b"" also if the other end is closed."""
    parts = []
    with contextlib.suppress(BlockingIOError):
        while max_bytes > 0 and (part := os.read(fd, min(max_bytes, 1 << 16))):
            parts.append(part)
            max_bytes -= len(part)
    return b"".join(parts)


def reply_texts(frame: bytes, max_length: int) -> dict[str, str]:
    """Return the texts of a shell's reply. The shell is not trusted: anything else is dropped."""
    try:
        reply = json.loads(frame)
    except (ValueError, RecursionError):
        return {"error": "the session sent a malformed reply"}
    reply = reply if type(reply) is dict else {}
    return {name: cut(reply[name], max_length + NOTE_LENGTH) for name in REPLY_TEXTS if type(reply.get(name)) is str}


def cut(text: str, max_length: int) -> str:
    """Return a text, cut to a length with a note of how much was cut off."""
    return text if len(text) <= max_length else f"{text[:max_length]} … ({len(text) - max_length} more characters)"


class RefusedCall(Exception):
    """A call is refused; the message is for whoever made it."""


class Shell:
    """Runs the calls of a session. Its code can change all of this, so a reply is trusted no more than the code's own
    output."""

    def __init__(self, root: str, max_length: int):
        self.root, self.max_length, self.cells = os.path.realpath(root), max_length, 0
        self.module = sys.modules["__main__"] = types.ModuleType("__main__")

    def answer(self, call: dict) -> dict[str, str]:
        """Return the reply to a call."""
        try:
            return {"value": getattr(self, "do_" + call["do"])(*call["arguments"])}
        except RefusedCall as error:
            return {"error": cut(str(error), self.max_length)}
        except OSError as error:
            return {"error": error.strerror or str(error)}
        except Exception as error:  # of a file operation, such as MemoryError
            return {"error": type(error).__name__}

    def do_python(self, code: str) -> str:
        """Run a cell and return the repr of its last expression, or "" if that is None or no expression."""
        self.cells += 1
        name = f"<cell {self.cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        try:
            tree = ast.parse(code, name)
            last = tree.body[-1] if tree.body else None
            expression = ast.Expression(tree.body.pop().value) if isinstance(last, ast.Expr) else None  # type: ignore[attr-defined]
            names = self.module.__dict__
            exec(compile(tree, name, "exec", dont_inherit=True), names)
            value = expression and eval(compile(expression, name, "eval", dont_inherit=True), names)
            if value is None:
                return ""
            names["_"] = value
            return cut(repr(value), self.max_length)
        except BaseException as error:  # also SystemExit, which must not end the session
            raise RefusedCall(format_error(error)) from None
        finally:
            flush()

    def resolve(self, path: str) -> str:
        """Return the real path of a relative one; raise `RefusedCall` unless it lies below the root."""
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise RefusedCall("the path has characters that no file name can have") from None
        if not path or "\0" in path:
            raise RefusedCall("give a path without null bytes, relative to the session's directory; '.' is the directory")
        full = os.path.realpath(os.path.join(self.root, path))
        if os.path.isabs(path) or os.path.commonpath([full, self.root]) != self.root:
            raise RefusedCall("the path leads out of the session's directory: give one relative to it, without '..' above it")
        return full

    def do_read(self, path: str) -> str:
        """Return the text of a file."""
        full = self.resolve(path)
        if os.path.isdir(full):
            raise RefusedCall("this is a directory: use list")
        fd = open_regular(full, os.O_RDONLY)
        try:
            data, size = os.read(fd, self.max_length), os.fstat(fd).st_size
        finally:
            os.close(fd)
        note = f" … ({size - len(data)} more bytes)" if size > len(data) else ""
        return data.decode("utf-8", "backslashreplace") + note

    def do_write(self, path: str, text: str) -> str:
        """Write a file and make its parent directories; return its size."""
        full = self.resolve(path)
        if path.endswith("/") or os.path.isdir(full):
            raise RefusedCall("this is a directory: give the path of a file")
        data, parent = text.encode("utf-8", "backslashreplace"), os.path.dirname(full)
        if os.path.lexists(parent) and not os.path.isdir(parent):
            raise RefusedCall("the parent of this path is a file, not a directory")
        os.makedirs(parent, exist_ok=True)
        fd = open_regular(full, os.O_WRONLY | os.O_CREAT)
        try:
            os.ftruncate(fd, 0)
            write_all(fd, data)
        finally:
            os.close(fd)
        return f"{len(data)} bytes"

    def do_list(self, path: str) -> str:
        """Return one line for each entry of a directory."""
        full = self.resolve(path)
        if not os.path.isdir(full):
            raise RefusedCall("this is not a directory" if os.path.lexists(full) else "there is no such directory")
        with os.scandir(full) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
        lines = [list_line(entry) for entry in entries[:MAX_LISTED]]
        if len(entries) > MAX_LISTED:
            lines.append(f"… and {len(entries) - MAX_LISTED} more")
        return cut("\n".join(lines), self.max_length)


def open_regular(path: str, flags: int) -> int:
    """Open a regular file and return its descriptor; refuse pipes and devices, whose reads may never end."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RefusedCall("this is not a regular file")
    return fd


def list_line(entry: os.DirEntry) -> str:
    """Return the name of a directory with a slash, of a file with its size, and of anything else with its kind."""
    name = entry.name if entry.name.isprintable() else repr(entry.name)
    if entry.is_dir(follow_symlinks=False):
        return f"{name}/"
    status = entry.stat(follow_symlinks=False)
    if stat.S_ISREG(status.st_mode):
        return f"{name}  {status.st_size} bytes"
    if stat.S_ISLNK(status.st_mode):
        return f"{name}  link"
    return f"{name}  pipe" if stat.S_ISFIFO(status.st_mode) else f"{name}  special"


def format_error(error: BaseException) -> str:
    """Return an error with its traceback from the first frame of a cell on."""
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
        trace = trace.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error.with_traceback(trace), trace, limit=-20)).rstrip()
    except BaseException:  # the cell's own error class may raise anything
        return "an error that cannot be shown"


def main(channel: Channel, root: str, max_length: int) -> None:
    """Run the calls of a session until its supervisor ends. This process is the shell, and is confined already."""
    random.seed(0)  # so that replayed calls give the same
    sys.argv = ["session"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    reopen_standard_streams()
    shell = Shell(root, max_length)
    with contextlib.suppress(Disconnected, Violation):
        while True:
            channel.send(shell.answer(channel.receive()))
