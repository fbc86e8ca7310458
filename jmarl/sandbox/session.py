"""A Python session and a directory of files that stay from call to call, for agents that use tools."""

from __future__ import annotations

import copy
import dataclasses
import json
import struct
import threading
import time

from jmarl.sandbox.client import GRACE_S, Sandbox, default_sandbox, imported
from jmarl.sandbox.launch import MAX_SESSIONS
from jmarl.sandbox.types import Limits, utf8

MAX_CALL = 1 << 20
NOTHING = {"output": "", "value": "", "error": "", "lost": ""}
NOT_AGAIN, SILENT = "a call that had worked did not when it was made again", "its process did not answer, twice"
FAULTS = (NOT_AGAIN, SILENT, "it could not be begun")  # the machine's doing
LIMITS = {
    "wall": "time of one call",
    "cpu": "processor time of the session",
    "file": "size of all files",
}


@dataclasses.dataclass(frozen=True)
class Reply:
    """What came of one call. Texts are cut at `Limits.output_kb`, and say how much was left out."""

    output: str
    """What the code wrote to stdout and stderr."""
    value: str
    """The repr of its last expression; of files what was read, or listed."""
    error: str
    """Why it did not work, for whoever made the call; else empty."""
    limit_hit: str = ""
    """wall, cpu, file (where there are namespaces, it raises OSError) or empty; what runs out of memory raises MemoryError."""
    lost: bool = False
    """The session was ended by this call: variables and files are gone, the next call begins anew."""
    fault: bool = False
    """It was ended, and that says nothing about the call: the machine failed."""

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

    limits: wall_s and output_kb are of each call, the others of the whole session. Its code can start threads, but no process,
    and `await` is for functions. Nothing is known of other sessions, and nothing runs between calls.

    A session is what was called in it so far. A copy (`copy.copy`, `copy.deepcopy`) goes its own way from there: the first to
    go on keeps the process, for others the calls are made again in a new one. So they are where the process was killed from
    outside. Time and the machine's random numbers are not repeated.
    """

    def __init__(self, sandbox: Sandbox | None = None, limits: Limits | None = None):
        self.sandbox = sandbox or default_sandbox()
        self.limits = limits or self.sandbox.limits
        self.calls: tuple[bytes, ...] = ()
        self._process: _Process | None = None
        self._lock = threading.Lock()  # of its copies, too

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
        with self._lock:
            said = self._exchange(call, imported(given[0]) if do == "python" else [])
            lost = said["lost"]
            self.calls, self._process = ((), None) if lost else ((*self.calls, call), self._process)
        if not lost:
            return Reply(said["output"], said["value"], said["error"])
        why = f"stopped at a limit: {LIMITS[lost]}" if lost in LIMITS else f"the session ended: {lost}"
        text = f"{why}; its variables and files are gone"
        return Reply(said["output"], "", text, lost if lost in LIMITS else "", lost=True, fault=lost.startswith(FAULTS))

    def _exchange(self, call: bytes, modules: list[str]) -> dict[str, str]:
        """Make a call in the process, or in a new one where all calls so far were made."""
        if self._process and (said := self._process.go_on(self.calls, call)):
            return said
        for _ in range(2):  # the helper may be killed meanwhile
            process = self._process = _Process(self.sandbox, self.limits, modules)
            replies = [process.go_on(self.calls[:i], old) for i, old in enumerate(self.calls)]
            if any(said and said["lost"] for said in replies):
                return NOTHING | {"lost": NOT_AGAIN}
            if all(replies) and (said := process.go_on(self.calls, call)):
                return said
        return NOTHING | {"lost": SILENT}

    def close(self) -> None:
        """End the process. The session can be used again, and is then where it was."""
        if self._process:
            self._process.socket.close()

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
        alive = [other for other in sandbox.sessions if other.socket.fileno() >= 0]
        if len(alive) >= MAX_SESSIONS:
            min(alive, key=lambda other: other.used).socket.close()  # its session goes on in another when it is needed
        self.socket = sandbox.connect(limits, "session", modules)
        sandbox.sessions.add(self)

    def __del__(self):
        if hasattr(self, "socket"):
            self.socket.close()

    def go_on(self, before: tuple[bytes, ...], call: bytes) -> dict[str, str] | None:
        """Make a call, if these were made before it; None if not, or if the process is no more."""
        if self.calls != before:
            return None
        whole, self.used = False, time.monotonic()
        try:
            self.socket.settimeout(self.wall_s + GRACE_S)
            self.socket.sendall(struct.pack("!I", len(call)) + call)
            said = NOTHING | utf8(json.loads(self._read(struct.unpack("!I", self._read(4))[0])))
            whole, self.calls = not said["lost"], (*before, call)
            return said
        except (OSError, EOFError, ValueError):
            return None
        finally:
            if not whole:  # also where the call was interrupted: its reply would be taken for the next one's
                self.socket.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not (part := self.socket.recv(size - len(data))):
                raise EOFError
            data += part
        return bytes(data)
