"""Tools that run in the sandbox: a Python session and a directory of files, both kept from turn to turn.

The state of an episode holds only the list of calls made so far (`Workspace.calls`, plain data). So a state may be copied,
pickled, and continued in another process; there the calls are made again. To save that time, a process keeps some live
sessions, and the first episode that continues from a list of calls takes the session with that list. Programs that read the
clock or random numbers may see other values when their calls are made again.

The sandbox starts at the first call that needs it. If there is none, or the machine fails, the joint action is masked
(`Unanswered`). What a program does to its own session, such as running out of time, is an error that the agent reads.

Left out: network access, and installing packages.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

from jmarl.envs.base import Unanswered
from jmarl.envs.tools.registry import Tool, ToolError
from jmarl.sandbox import Limits, Reply, SandboxUnavailable, Session, default_sandbox

LIMITS = Limits(wall_s=2.0, cpu_s=10, memory_mb=256, file_mb=4, output_kb=4)
MAX_LIVE = 32  # sessions; a sandbox has as many processes
Calls = tuple[bytes, ...]

_live_sessions: OrderedDict[tuple[Limits, Calls], Session] = OrderedDict()  # of this process, least recently used first
_lock = threading.Lock()


class Workspace:
    """The Python session and the files of an episode.

    Args:
        files: path -> text, present at the start.
        calls: made so far.
        limits: of the session.
    """

    def __init__(self, files: Mapping[str, str], calls: Calls = (), limits: Limits = LIMITS):
        self.files, self.calls, self.limits = files, calls, limits
        self._session: Session | None = None

    def python(self, code: str) -> Reply:
        """Run Python code."""
        return self._call("python", code)

    def read(self, path: str) -> Reply:
        """Read a file."""
        return self._call("read", path)

    def write(self, path: str, text: str) -> Reply:
        """Write a file."""
        return self._call("write", path, text)

    def list(self, path: str) -> Reply:
        """List a directory."""
        return self._call("list", path)

    def _call(self, method: str, *arguments: str) -> Reply:
        try:
            session = self._session = self._session or self._take_session()
            if not session.calls:  # a new session, or one that has lost its files
                for path, text in self.files.items():
                    _check_reply(session.write(path, text), must_work=True)
            reply = _check_reply(getattr(session, method)(*arguments))
        except (SandboxUnavailable, OSError) as error:
            raise Unanswered(f"no sandbox: {error}") from error
        self.calls = session.calls
        return reply

    def _take_session(self) -> Session:
        """Return a live session with these calls, or a new one that will make them again."""
        with _lock:
            session = _live_sessions.pop((self.limits, self.calls), None)
        if session is None:
            session = Session(default_sandbox(), self.limits)
            session.calls = self.calls
        return session

    def release(self, episode_continues: bool) -> None:
        """Release the session after a turn: keep it for the next turn, or close it."""
        session, self._session = self._session, None
        if session is None:
            return
        if not episode_continues or not session.calls:
            session.close()
            return
        with _lock:
            _live_sessions[self.limits, session.calls] = session
            _live_sessions.move_to_end((self.limits, session.calls))
            while len(_live_sessions) > MAX_LIVE:
                _live_sessions.popitem(last=False)[1].close()


def _check_reply(reply: Reply, must_work: bool = False) -> Reply:
    """Return a reply; raise Unanswered if the machine failed, or (must_work) on any error."""
    if reply.fault or (must_work and reply.error):
        raise Unanswered(f"the sandbox failed: {reply.error}")
    return reply


def python_repl(workspace: Workspace, code: str) -> str:
    """Run code; return its output and the value of its last expression."""
    reply = workspace.python(code)
    if reply.error:
        raise ToolError(reply.text)
    return reply.text or "(it printed nothing; the last line's value is shown if it is an expression)"


def file_system(workspace: Workspace, action: str, path: str, text: str = "") -> str:
    """Read or write a file, or list a directory."""
    if action == "write":
        reply = workspace.write(path, text)
    elif action == "read":
        reply = workspace.read(path)
    else:
        reply = workspace.list(path)
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
