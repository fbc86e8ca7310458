"""A Python session and a directory of files that stay from call to call, for agents that use tools."""

from __future__ import annotations

import copy
import dataclasses
import json
import socket
import struct
import threading
import time
import weakref

from jmarl.sandbox.client import GRACE_S, Sandbox, default_sandbox, imported
from jmarl.sandbox.launch import MAX_SESSIONS
from jmarl.sandbox.types import Limits

MAX_CALL = 1 << 20
NOTHING = {"output": "", "value": "", "error": "", "lost": ""}
LIMITS = {
    "wall": "time of one call",
    "cpu": "processor time of the session",
    "memory": "memory",
    "output": "output of one call",
}


@dataclasses.dataclass(frozen=True)
class Reply:
    """What came of one call. Texts are cut at `Limits.output_kb`."""

    output: str
    """What the code wrote to stdout and stderr."""
    value: str
    """The repr of its last expression; of files what was read, or listed."""
    error: str
    """Why it did not work, for whoever made the call; else empty."""
    limit_hit: str = ""
    """wall, cpu, memory, output or empty."""
    lost: bool = False
    """The session was ended by this call: variables and files are gone, the next call begins anew."""

    @property
    def text(self) -> str:
        """All of it, as a console shows it."""
        return "\n".join(part for part in (self.output.rstrip("\n"), self.value, self.error) if part)


class Session:
    """Python code that goes on where it was, in a directory of its own, confined as programs are.

        with Session() as session:
            session.python("x = 2; open('a.txt', 'w').write('hello')")
            session.python("x + 1").value        # "3"
            session.read("a.txt").value          # "hello"

    limits: wall_s and output_kb are of each call, the others of the whole session. Its code can start threads, but no process.
    Nothing is known of other sessions, and nothing runs between calls.

    A session is what was called in it so far. A copy (`copy.copy`, `copy.deepcopy`) goes its own way from there: the first to
    go on keeps the process, for others the calls are made again in a new one. So they are where the process was killed from
    outside. Time and the machine's random numbers are not repeated.
    """

    def __init__(self, sandbox: Sandbox | None = None, limits: Limits | None = None):
        self.sandbox = sandbox or default_sandbox()
        self.limits = limits or self.sandbox.limits
        self.calls: tuple[bytes, ...] = ()
        self._process: _Process | None = None

    def python(self, code: str) -> Reply:
        """Run code; the value is the repr of a last expression, made inside."""
        return self._call("python", code)

    def read(self, path: str) -> Reply:
        """A file's text. Paths are relative to the session's directory, in which the code runs, and lead nowhere else."""
        return self._call("read", path)

    def write(self, path: str, text: str) -> Reply:
        """Write a file, and the directories above it."""
        return self._call("write", path, text)

    def list(self, path: str = ".") -> Reply:
        """Names in a directory, a line each, with their sizes."""
        return self._call("list", path)

    def _call(self, do: str, *given: str) -> Reply:
        if not all(isinstance(text, str) for text in given):
            raise TypeError(f"{do} takes texts, not {', '.join(type(text).__name__ for text in given)}")
        call = json.dumps({"do": do, "with": given}).encode()
        if len(call) > MAX_CALL:
            return Reply("", "", f"a call of {len(call)} bytes: at most {MAX_CALL}")
        said = self._exchange(call, imported(given[0]) if do == "python" else [])
        limit = said["lost"] if said["lost"] in LIMITS else ""
        if not said["lost"]:
            self.calls = (*self.calls, call)
            return Reply(said["output"], said["value"], said["error"])
        self.calls, self._process = (), None
        why = f"stopped at a limit: {LIMITS[limit]}" if limit else f"the session ended: {said['lost']}"
        return Reply(said["output"], "", f"{why}; its variables and files are gone", limit, lost=True)

    def _exchange(self, call: bytes, modules: list[str]) -> dict[str, str]:
        """Make a call in the process, or in a new one where all calls so far were made."""
        if self._process and (said := self._process.go_on(self.calls, call)):
            return said
        for _ in range(2):  # the helper may be killed meanwhile
            process = self._process = _Process(self.sandbox, self.limits, modules)
            replies = [process.go_on(self.calls[:i], old) for i, old in enumerate(self.calls)]
            if any(said and said["lost"] for said in replies):
                return NOTHING | {"lost": "a call that had worked did not when it was made again"}
            if all(replies) and (said := process.go_on(self.calls, call)):
                return said
        return NOTHING | {"lost": "its process was killed from outside, twice"}

    def close(self) -> None:
        """End the process. The session can be used again, and is then where it was."""
        if self._process:
            self._process.close()

    def __deepcopy__(self, memo: dict) -> Session:
        return copy.copy(self)  # calls never change, and a process serves one of those that have it

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Process:
    """A process of a session."""

    def __init__(self, sandbox: Sandbox, limits: Limits, modules: list[str]):
        self.wall_s, self.calls, self.used = limits.wall_s, (), time.monotonic()
        self.lock = threading.Lock()
        idle = [other for other in sandbox.sessions if other.close.alive and not other.lock.locked()]
        if len(idle) >= MAX_SESSIONS:
            min(idle, key=lambda other: other.used).close()  # its session goes on in another when it is needed
        self.socket = sandbox.connect(limits, "session", modules)
        self.close = weakref.finalize(self, self.socket.close)
        sandbox.sessions.add(self)

    def go_on(self, before: tuple[bytes, ...], call: bytes) -> dict[str, str] | None:
        """Make a call, if these were made before it; None if not, or if the process is no more."""
        with self.lock:
            if self.calls != before:
                return None
            try:
                self.socket.settimeout(self.wall_s + GRACE_S)
                self.socket.sendall(struct.pack("!I", len(call)) + call)
                said = NOTHING | json.loads(self._read(struct.unpack("!I", self._read(4))[0]))
            except (OSError, EOFError, ValueError):
                self.close()
                return None
            self.used, self.calls = time.monotonic(), (*before, call)
            if said["lost"]:
                self.close()
            return said

    def _read(self, size: int) -> bytes:
        data = self.socket.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise EOFError
        return data
