"""Runs programs against tests in a helper process, many at a time."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jmarl.sandbox.canary import CANARY, CANARY_TESTS
from jmarl.sandbox.launch import REMEDY, Launched, launch, supported
from jmarl.sandbox.types import LEVELS, ExecutionResult, Limits, SandboxUnavailable, TestResult, Tests, asserts, utf8

MAX_PROGRAM = 1 << 20
GRACE_S = 10.0  # after its own limit the runner has this long to answer
AUTO = ("S4", "S3", "S2")
UNSAFE = "unsafe-process"
COLD = {"antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo", "lib2to3"}
WARM = sys.stdlib_module_names - COLD | {"numpy"}
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+(\w+)", re.MULTILINE)


@dataclasses.dataclass
class _Job:
    program: bytes
    tests: Tests
    limits: Limits
    key: bytes
    tries: int = 0
    deadline: float = 0.0
    received: bytearray = dataclasses.field(default_factory=bytearray)


class Sandbox:
    """A helper process that runs programs, at a level that is found once and then stays.

    level: auto (S4, S3 or S2, whichever holds first; else `SandboxUnavailable`), one of them by name, or unsafe-process (S1,
    for programs that you have read). limits: of programs that come without. workers: how many run at once. cache: how many
    results are kept; the same program with the same tests and limits is not run again.
    Threads may use one sandbox together.
    """

    def __init__(self, level: str = "auto", *, limits: Limits | None = None, workers: int | None = None, cache: int = 4096):
        if level not in (*AUTO, "auto", UNSAFE):
            raise ValueError(f"level={level!r}: choose auto, {', '.join(AUTO)} or {UNSAFE}")
        self.limits = limits or Limits()
        self.workers = workers or max(len(os.sched_getaffinity(0)), 2)
        self.level = ""
        self._lock = threading.Lock()
        self._helper: Launched | None = None
        self._cache: collections.OrderedDict[bytes, ExecutionResult] = collections.OrderedDict()
        self._cache_size = cache
        self._room = (self.limits, self.workers)
        self.sessions: weakref.WeakSet = weakref.WeakSet()
        self.reasons: dict[str, str] = {}
        for choice in AUTO if level == "auto" else ["S1" if level == UNSAFE else level]:
            if not (reason := self._try(choice)):
                return
            self.reasons[choice] = reason
        said = "; ".join(f"{reason} ({REMEDY[choice]})" for choice, reason in self.reasons.items())
        raise SandboxUnavailable(f"programs cannot be confined on this machine: {said}")

    def _try(self, level: str) -> str:
        """Why a level does not hold; empty if it does, and then it is this sandbox's."""
        if reason := supported(level):
            return f"{level}: {reason}"
        self.level = level
        try:
            result = self.run(CANARY, asserts(CANARY_TESTS[level]), Limits(wall_s=10))
        except SandboxUnavailable as error:
            self.level = ""
            return str(error)
        if result.outcome == "passed":
            return ""
        self.close()
        self.level = ""
        return f"{level}: a program could do what it must not: {result.message or [t for t in result.tests if not t.passed]}"

    def run(self, program: str, tests: Tests, limits: Limits | None = None) -> ExecutionResult:
        """Run one program."""
        return self.run_many([program], [tests], limits)[0]

    def run_many(
        self, programs: Sequence[str], tests: Sequence[Tests], limits: Limits | None = None, workers: int | None = None
    ) -> list[ExecutionResult]:
        """Run each program against its tests; the results are in the same order whatever `workers` is."""
        if isinstance(programs, str) or not all(isinstance(of, Tests) for of in tests):
            raise TypeError("give a list of programs, and as many tests, made by asserts, unittests, pairs or calls")
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers}: give at least 1")
        if len(programs) != len(tests):
            raise ValueError(f"{len(programs)} programs and {len(tests)} tests: give one of each")
        limits = limits or self.limits
        jobs, order, found = {}, [], {}
        for program, of_program in zip(programs, tests, strict=True):
            if not isinstance(program, str):
                raise TypeError(f"a program is a text, not {type(program).__name__}")
            source = program.encode("utf-8", "surrogatepass")
            key = _key(source, of_program, limits, self.level)
            order.append(key)
            if (kept := self._kept(key)) is not None:
                found[key] = kept
            elif len(source) > MAX_PROGRAM:
                found[key] = _result({"message": f"a program of {len(source)} bytes: at most {MAX_PROGRAM}"}, self.level)
            elif key not in jobs:
                jobs[key] = _Job(source, of_program, limits, key)
        self._make_room(limits, workers or self.workers)
        found |= self._run_all(list(jobs.values()), workers or self.workers)
        return [found[key] for key in order]

    def _run_all(self, waiting: list[_Job], workers: int) -> dict[bytes, ExecutionResult]:
        """At most `workers` at once, as they come; behind them, one by one, those that another may have harmed."""
        found: dict[bytes, ExecutionResult] = {}
        alone: list[_Job] = []
        workers = min(workers, len(waiting))
        waiting.reverse()
        with selectors.DefaultSelector() as running:
            while waiting or alone or running.get_map():
                if not waiting and not running.get_map():
                    waiting, alone, workers = alone, [], 1
                while waiting and len(running.get_map()) < workers:
                    job = waiting.pop()
                    running.register(self._start(job), selectors.EVENT_READ, job)
                first = min(key.data.deadline for key in running.get_map().values())
                for key, _ in running.select(max(first - time.monotonic(), 0)):
                    if data := _read(key.fileobj):
                        key.data.received += data
                    else:
                        self._over(running, key, found, waiting, alone)
                for key in [key for key in running.get_map().values() if key.data.deadline < time.monotonic()]:
                    self._restart()  # it does not answer at all
                    self._over(running, key, found, waiting, alone)
        return found

    def _over(
        self, running: selectors.BaseSelector, key: selectors.SelectorKey, found: dict, waiting: list, alone: list
    ) -> None:
        """A runner has ended: keep its result, or try once more if it has none; alone if one of its processes was killed, as
        where another program has used up the memory of all. None has more than two tries."""
        running.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]
        job: _Job = key.data
        try:
            said = utf8(json.loads(job.received))
        except ValueError:  # nothing, or a part: the runner was killed
            said = {"outcome": "error", "kind": "infrastructure", "message": "no answer"}
        result = _result(said, self.level)
        if result.kind == "infrastructure" and job.tries < 2:
            waiting.append(job)
            return
        if said.get("killed") and job.tries < 2:
            alone.append(job)
            return
        found[job.key] = result
        if result.kind not in ("infrastructure", "timeout"):  # both may be the machine's doing
            with self._lock:
                self._cache[job.key] = result
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)

    def _start(self, job: _Job) -> socket.socket:
        """Give a job to the helper; starts it if it is not there (any more)."""
        job.tries += 1
        job.deadline = time.monotonic() + job.limits.wall_s + GRACE_S
        job.received.clear()
        modules = imported(job.program.decode("utf-8", "replace"))
        sock = self.connect(job.limits, job.tests.kind, modules, job.program, job.tests.encoded())
        sock.setblocking(False)
        return sock

    def connect(
        self, limits: Limits, kind: str, modules: Sequence[str], program: bytes = b"", tests: bytes = b""
    ) -> socket.socket:
        """A runner of its own, which was given these."""
        self._make_room(limits)
        about = json.dumps(limits.as_bytes() | {"kind": kind}).encode()
        for again in (True, False):
            mine, its = socket.socketpair()
            try:
                with its:
                    self._send(json.dumps(modules[:50]).encode(), its)
            except BaseException as error:
                mine.close()
                if not (again and isinstance(error, OSError)):
                    raise
                self._restart()
                continue
            mine.settimeout(GRACE_S)
            with contextlib.suppress(
                OSError
            ):  # a runner that is stopped at a limit may end before it has read all, and says so
                mine.sendall(struct.pack("!III", len(about), len(program), len(tests)) + about + program + tests)
            return mine
        raise AssertionError

    def _send(self, message: bytes, end: socket.socket) -> None:
        with self._lock:
            if self._helper is None:
                self._helper = launch(self.level, *self._room)
            socket.send_fds(self._helper.control, [message], [end.fileno()])

    def _make_room(self, limits: Limits, workers: int = 1) -> None:
        """In the control group, for the largest programs of all calls so far."""
        with self._lock:
            most, before = self._room
            more = {name: max(getattr(limits, name), getattr(most, name)) for name in ("memory_mb", "processes")}
            room = dataclasses.replace(most, **more), max(workers, before)
            if room != self._room and self._helper:
                self._helper.make_room(*room)
            self._room = room

    def _restart(self) -> None:
        """End the helper; the next job starts another."""
        with self._lock:
            helper, self._helper = self._helper, None
        if helper:
            helper.process.kill()
            helper.close()

    def kill_helper(self) -> None:
        """End the fork server at once, for tests of what happens then."""
        if self._helper:
            pid = self._helper.process.pid
            for each in (*(children(pid) if self.level in ("S4", "S3") else ()), pid):
                os.kill(each, signal.SIGKILL)

    def _kept(self, key: bytes) -> ExecutionResult | None:
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def close(self) -> None:
        """End the helper and all that it runs. The sandbox can be used again."""
        with self._lock:
            helper, self._helper = self._helper, None
        if helper:
            helper.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def children(pid: int) -> list[int]:
    """Of a process; bubblewrap's is the fork server, without it the helper is that itself."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def imported(program: str) -> list[str]:
    """Modules that a program asks for and the fork server may load for all of them."""
    return [name for name in dict.fromkeys(_IMPORT.findall(program)) if name in WARM]


def _read(sock) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""


def _key(source: bytes, tests: Tests, limits: Limits, level: str) -> bytes:
    parts = [source, tests.encoded(), repr(limits).encode(), level.encode()]
    return hashlib.sha256(b"".join(struct.pack("!Q", len(part)) + part for part in parts)).digest()


def _result(said: dict[str, Any], level: str) -> ExecutionResult:
    """A result from what a runner said; what it left out is empty."""
    fields: dict[str, Any] = {name: "" for name in ("kind", "message", "stdout", "stderr", "limit_hit")}
    fields.update(outcome="failed", killed=False, passed=0, total=0, wall_s=0.0, integrity="strong")
    fields.update(said, level=level, tests=tuple(TestResult(*test) for test in said.get("tests", ())))
    del fields["killed"]
    return ExecutionResult(**fields)


_default: Sandbox | None = None
_default_lock = threading.Lock()


def default_sandbox() -> Sandbox:
    """The sandbox of this process, started when it is first asked for."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Sandbox()
            atexit.register(_default.close)
        return _default


def run_program(program: str, tests: Tests, limits: Limits | None = None, sandbox: Sandbox | None = None) -> ExecutionResult:
    """Run a program against its tests; see `Sandbox`. sandbox: the process's own if none is given."""
    return (sandbox or default_sandbox()).run(program, tests, limits)


def run_programs(
    programs: Sequence[str],
    tests: Sequence[Tests],
    limits: Limits | None = None,
    *,
    workers: int | None = None,
    sandbox: Sandbox | None = None,
) -> list[ExecutionResult]:
    """Run programs side by side, each against its tests. workers: how many at once; by default as many as there are cores."""
    return (sandbox or default_sandbox()).run_many(programs, tests, limits, workers)


def levels() -> dict[str, str]:
    """Of each level that can be asked for: empty if it holds here, else why not. Tries all of them."""
    out = {}
    for level in LEVELS:
        try:
            Sandbox(UNSAFE if level == "S1" else level).close()
            out[level] = ""
        except SandboxUnavailable as error:
            out[level] = str(error)
    return out
