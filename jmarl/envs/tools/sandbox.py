"""Tools that run in the sandbox: a Python session and a directory of files, both the same from turn to turn.

What stays in an episode's state is the list of calls that were made (`Session.calls`, plain data), so a state may be copied,
pickled, and played on in another process: there the calls are made again. Where an episode goes on in the process where it
was, it finds its session alive in a small store, which the first of several branches takes. Programs that read the clock or
random numbers are the exception: those are not repeated.

No sandbox is started before a call needs one. Where none can be had, or the machine fails, the joint action is masked
(`base.Unanswered`); what a program does to its own session is the agent's doing, and is told to it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

from jmarl.envs.base import Unanswered
from jmarl.envs.tools.registry import Tool, ToolError
from jmarl.sandbox import Limits, Reply, SandboxUnavailable, Session, default_sandbox

LIMITS = Limits(wall_s=2.0, cpu_s=10, memory_mb=256, file_mb=4, output_kb=4)
MAX_ALIVE = 32  # as many as a sandbox has processes for
Calls = tuple[bytes, ...]

_alive: OrderedDict[tuple[Limits, Calls], Session] = OrderedDict()  # of this process: to save time, and nothing else
_lock = threading.Lock()


class Workspace:
    """What the tools of an episode work on. files: that are there at the start; calls: made so far."""

    def __init__(self, files: Mapping[str, str], calls: Calls = (), limits: Limits = LIMITS):
        self.files, self.calls, self.limits = files, calls, limits
        self._session: Session | None = None

    def python(self, code: str) -> Reply:
        return self._call("python", code)

    def read(self, path: str) -> Reply:
        return self._call("read", path)

    def write(self, path: str, text: str) -> Reply:
        return self._call("write", path, text)

    def list(self, path: str) -> Reply:
        return self._call("list", path)

    def _call(self, do: str, *given: str) -> Reply:
        try:
            session = self._session = self._session or self._found()
            if not session.calls:  # it begins, or begins anew
                for path, text in self.files.items():
                    self._checked(session.write(path, text), needed=True)
            reply = self._checked(getattr(session, do)(*given))
        except (SandboxUnavailable, OSError) as error:
            raise Unanswered(f"no sandbox: {error}") from error
        self.calls = session.calls
        return reply

    def _found(self) -> Session:
        with _lock:
            session = _alive.pop((self.limits, self.calls), None)
        if session is None:
            session = Session(default_sandbox(), self.limits)
            session.calls = self.calls
        return session

    @staticmethod
    def _checked(reply: Reply, needed: bool = False) -> Reply:
        if reply.fault or needed and reply.error:
            raise Unanswered(f"the sandbox failed: {reply.error}")
        return reply

    def leave(self, going: bool) -> None:
        """After a turn; going: whether the episode is played on."""
        session, self._session = self._session, None
        if session is None:
            return
        if not going or not session.calls:
            return session.close()
        with _lock:
            _alive[self.limits, session.calls] = session
            _alive.move_to_end((self.limits, session.calls))
            while len(_alive) > MAX_ALIVE:
                _alive.popitem(last=False)[1].close()


def python_repl(workspace: Workspace, code: str) -> str:
    reply = workspace.python(code)
    if reply.error:
        raise ToolError(reply.text)
    return reply.text or "(it printed nothing; the last line's value is shown if it is an expression)"


def file_system(workspace: Workspace, action: str, path: str, text: str = "") -> str:
    if action == "write":
        reply = workspace.write(path, text)
    else:
        reply = workspace.read(path) if action == "read" else workspace.list(path)
    if reply.error:
        raise ToolError(reply.error)
    return f"wrote {reply.value}" if action == "write" else reply.value or "(empty)"


PYTHON_REPL = Tool(
    "python_repl",
    "runs Python; variables and files stay from call to call",
    {
        "type": "object",
        "properties": {"code": {"type": "string", "minLength": 1}},
        "required": ["code"],
        "additionalProperties": False,
    },
    python_repl,
    {"code": "n = 7\nprint(sum(range(n, 100, n)))"},
    question="What is the sum of the numbers below 100 that are divisible by 7?",
    sandboxed=True,
)
FILE_SYSTEM = Tool(
    "file_system",
    "reads or writes a file, or lists a directory (. is the uppermost)",
    {
        "type": "object",
        "properties": {
            "action": {"type": "string", "enum": ["read", "write", "list"]},
            "path": {"type": "string", "minLength": 1},
            "text": {"type": "string"},
        },
        "required": ["action", "path"],
        "additionalProperties": False,
        "if": {"properties": {"action": {"const": "write"}}},
        "then": {"required": ["text"]},
    },
    file_system,
    {"action": "list", "path": "."},
    question="How many files are there?",
    sandboxed=True,
)
