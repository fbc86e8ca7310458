"""A Python session and a directory of files that stay from call to call, for agents that use tools."""

from __future__ import annotations

import copy
import dataclasses
import json
import struct
import threading
import time

from jmarl.sandbox.client import GRACE_S, Sandbox, default_sandbox, preloadable_imports
from jmarl.sandbox.launch import MAX_SESSIONS
from jmarl.sandbox.types import Limits, utf8

MAX_CALL = 1 << 20
EMPTY_REPLY = {"output": "", "value": "", "error": "", "lost": ""}
REPLAY_FAILED = "a call that had worked did not when it was replayed"
SILENT = "its process did not answer, twice"
FAULTS = (REPLAY_FAILED, SILENT, "it could not be started")  # beginnings of reasons that are the machine's doing
LIMIT_NAMES = {
    "wall": "time of one call",
    "cpu": "processor time of the session",
    "file": "size of all files",
}


@dataclasses.dataclass(frozen=True)
class Reply:
    """The reply to one call. Texts are cut at `Limits.output_kb` and then say how much was cut off."""

    output: str
    """What the code wrote to stdout and stderr."""
    value: str
    """The repr of the last expression of the code; for calls about files the text, the listing or the size."""
    error: str
    """Why the call did not work, written for whoever made it; otherwise empty."""
    limit_hit: str = ""
    """wall, cpu, file or empty. With namespaces too large files raise OSError instead; a lack of memory raises MemoryError."""
    lost: bool = False
    """The call ended the session: its variables and files are gone, and the next call begins anew."""
    fault: bool = False
    """The session was ended because the machine failed, which says nothing about the call."""

    @property
    def text(self) -> str:
        """Output, value and error as a console shows them."""
        return "\n".join(part for part in (self.output.rstrip("\n"), self.value, self.error) if part)


class Session:
    """A Python session in a directory of its own, confined as programs are.

        with Session() as session:
            session.python("x = 2; open('a.txt', 'w').write('hello')")
            session.python("x + 1").value        # "3"
            session.read("a.txt").value          # "hello"

    limits: `wall_s` and `output_kb` are for each call, the others for the whole session. The code can start threads but no
    processes, and `await` works only in functions. A session sees nothing of other sessions, and nothing runs between calls.

    The state of a session is the list of its calls so far. A copy (`copy.copy`, `copy.deepcopy`) shares the process until one
    of the two is called; that one keeps the process, and for the other the calls are replayed in a new one. They are also
    replayed if the process was killed from outside. A replay does not repeat the time or the machine's random numbers.
    """

    def __init__(self, sandbox: Sandbox | None = None, limits: Limits | None = None):
        self.sandbox = sandbox or default_sandbox()
        self.limits = limits or self.sandbox.limits
        self.calls: tuple[bytes, ...] = ()
        self._process: _Process | None = None
        self._lock = threading.Lock()  # shared with copies

    def python(self, code: str) -> Reply:
        """Run code. The value is the repr of its last expression, made inside."""
        return self._call("python", code)

    def read(self, path: str) -> Reply:
        """Read a text file. Paths are relative to the session's directory, in which the code runs, and cannot leave it."""
        return self._call("read", path)

    def write(self, path: str, text: str) -> Reply:
        """Write a text file and make its parent directories."""
        return self._call("write", path, text)

    def list(self, path: str = ".") -> Reply:
        """List the names in a directory, one a line, with their sizes."""
        return self._call("list", path)

    def _call(self, operation: str, *arguments: str) -> Reply:
        if not all(isinstance(text, str) for text in arguments):
            raise TypeError(f"{operation} takes texts, not {', '.join(type(text).__name__ for text in arguments)}")
        call = json.dumps({"do": operation, "arguments": arguments}).encode()
        if len(call) > MAX_CALL:
            return Reply("", "", f"the call has {len(call)} bytes, at most {MAX_CALL} are allowed")
        with self._lock:
            reply = self._exchange(call, preloadable_imports(arguments[0]) if operation == "python" else [])
            lost = reply["lost"]
            self.calls, self._process = ((), None) if lost else ((*self.calls, call), self._process)
        if not lost:
            return Reply(reply["output"], reply["value"], reply["error"])
        reason = f"stopped at a limit: {LIMIT_NAMES[lost]}" if lost in LIMIT_NAMES else f"the session ended: {lost}"
        error = f"{reason}; its variables and files are gone"
        limit_hit = lost if lost in LIMIT_NAMES else ""
        return Reply(reply["output"], "", error, limit_hit, lost=True, fault=lost.startswith(FAULTS))

    def _exchange(self, call: bytes, modules: list[str]) -> dict[str, str]:
        """Make a call in the process, or in a new one after all calls so far have been replayed there."""
        if self._process and (reply := self._process.call(self.calls, call)):
            return reply
        for _ in range(2):  # the helper may be killed meanwhile
            process = self._process = _Process(self.sandbox, self.limits, modules)
            replies = [process.call(self.calls[:i], old_call) for i, old_call in enumerate(self.calls)]
            if any(reply and reply["lost"] for reply in replies):
                return EMPTY_REPLY | {"lost": REPLAY_FAILED}
            if all(replies) and (reply := process.call(self.calls, call)):
                return reply
        return EMPTY_REPLY | {"lost": SILENT}

    def close(self) -> None:
        """End the process. The session keeps its state and can be used again."""
        if self._process:
            self._process.socket.close()

    def __deepcopy__(self, memo: dict) -> Session:
        return copy.copy(self)  # the calls never change, and the process serves whichever copy calls it first

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Process:
    """The process of a session, seen from outside. calls: those that were made in it; last_used: when it was called last."""

    def __init__(self, sandbox: Sandbox, limits: Limits, modules: list[str]):
        self.wall_s, self.calls, self.last_used = limits.wall_s, (), time.monotonic()
        alive = [process for process in sandbox.sessions if process.socket.fileno() >= 0]
        if len(alive) >= MAX_SESSIONS:
            min(alive, key=lambda process: process.last_used).socket.close()  # its session is replayed when it is called
        self.socket = sandbox.start_runner(limits, "session", modules)
        sandbox.sessions.add(self)

    def __del__(self):
        if hasattr(self, "socket"):
            self.socket.close()

    def call(self, previous_calls: tuple[bytes, ...], call: bytes) -> dict[str, str] | None:
        """Make a call and return the reply; None if other calls than these were made before, or the process has ended."""
        if self.calls != previous_calls:
            return None
        complete, self.last_used = False, time.monotonic()
        try:
            self.socket.settimeout(self.wall_s + GRACE_S)
            self.socket.sendall(struct.pack("!I", len(call)) + call)
            reply = EMPTY_REPLY | utf8(json.loads(self._read(struct.unpack("!I", self._read(4))[0])))
            complete, self.calls = not reply["lost"], (*previous_calls, call)
            return reply
        except (OSError, EOFError, ValueError):
            return None
        finally:
            if not complete:  # also after an interrupt: the reply would be taken for that of the next call
                self.socket.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not (part := self.socket.recv(size - len(data))):
                raise EOFError
            data += part
        return bytes(data)
