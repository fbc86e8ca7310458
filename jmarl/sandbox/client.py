"""Run programs against tests in a helper process, many at a time."""

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

from jmarl.sandbox.canary import CANARY, CANARY_TESTS, stand_ins
from jmarl.sandbox.launch import REMEDY, Helper, start_helper, unsupported_reason
from jmarl.sandbox.types import LEVELS, ExecutionResult, Limits, SandboxUnavailable, TestResult, Tests, asserts, utf8

MAX_PROGRAM = 1 << 20
MAX_TRIES = 2
GRACE_S = 10.0  # that a runner gets to answer after its own limit
AUTO = ("S4", "S3", "S2")
UNSAFE = "unsafe-process"
NOT_PRELOADED = {"antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo", "lib2to3"}  # windows, a browser, old code
PRELOADABLE = sys.stdlib_module_names - NOT_PRELOADED | {"numpy"}  # what the fork server may import for programs
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+(\w+)", re.MULTILINE)


@dataclasses.dataclass
class _Job:
    """A program that is to run, or runs. key: under which its result is cached. received: its runner's reply so far."""

    program: bytes
    tests: Tests
    limits: Limits
    key: bytes
    tries: int = 0
    deadline: float = 0.0
    received: bytearray = dataclasses.field(default_factory=bytearray)


class Sandbox:
    """A helper process that runs programs, confined at a level that is chosen once. Threads may share a sandbox.

    Args:
        level: auto (the first of S4, S3 and S2 that holds), one of these by name, or unsafe-process (S1, for programs that you
            have read).
        limits: of programs that come without limits.
        workers: how many programs run at once; by default the number of cores, at least 2.
        cache: how many results are cached; the same program with the same tests and limits does not run again.

    Attributes:
        level: S4 to S1.
        reasons: why levels that were tried before do not hold.

    Raises `SandboxUnavailable` if the level does not hold: a program that tries it out could do something that it must not.
    """

    def __init__(self, level: str = "auto", *, limits: Limits | None = None, workers: int | None = None, cache: int = 4096):
        if level not in (*AUTO, "auto", UNSAFE):
            raise ValueError(f"level={level!r}: choose auto, {', '.join(AUTO)} or {UNSAFE}")
        self.limits = limits or Limits()
        self.workers = workers or max(len(os.sched_getaffinity(0)), 2)
        self.level = ""
        self._lock = threading.Lock()
        self._helper: Helper | None = None
        self._cache: collections.OrderedDict[bytes, ExecutionResult] = collections.OrderedDict()
        self._cache_size = cache
        self._capacity = (self.limits, self.workers)  # what the control group has room for
        self.sessions: weakref.WeakSet = weakref.WeakSet()
        self.reasons: dict[str, str] = {}
        for choice in AUTO if level == "auto" else ["S1" if level == UNSAFE else level]:
            if not (reason := self._try(choice)):
                return
            self.reasons[choice] = reason
        reasons = "; ".join(f"{reason} ({REMEDY[choice]})" for choice, reason in self.reasons.items())
        raise SandboxUnavailable(f"programs cannot be confined on this machine: {reasons}")

    def _try(self, level: str) -> str:
        """Try a level. If it holds, take it and return an empty text, else return why it does not."""
        if reason := unsupported_reason(level):
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
        """Run one program against its tests."""
        return self.run_many([program], [tests], limits)[0]

    def run_many(
        self, programs: Sequence[str], tests: Sequence[Tests], limits: Limits | None = None, workers: int | None = None
    ) -> list[ExecutionResult]:
        """Run each program against its tests. The results are in the order of the programs.

        limits, workers: instead of the sandbox's own. A program whose runner or judge was killed runs once more. Where tests
        seem to be at fault, they run again with `stand_ins` for the program, and it has failed if they are not at fault then.
        """
        if isinstance(programs, str) or not all(isinstance(x, Tests) for x in tests):
            raise TypeError("give a list of programs, and as many tests, made by asserts, unittests, pairs or calls")
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers}: give at least 1")
        if len(programs) != len(tests):
            raise ValueError(f"{len(programs)} programs and {len(tests)} tests: give as many tests as programs")
        limits = limits or self.limits
        results = self._results(programs, tests, limits, workers or self.workers)
        faults = [(i, result.message) for i, result in enumerate(results) if result.kind == "tests"]
        others = [(i, other) for i, fault in faults for other in stand_ins(tests[i], fault)]
        of_others = self._results([x for _, x in others], [tests[i] for i, _ in others], limits, workers or self.workers)
        for (i, _), result in zip(others, of_others, strict=True):
            if not result.masked:
                results[i] = dataclasses.replace(results[i], outcome="failed", kind="")
        return results

    def _results(self, programs: Sequence[str], tests: Sequence[Tests], limits: Limits, workers: int) -> list[ExecutionResult]:
        """Return the results of programs, those of the cache among them."""
        keys: list[bytes] = []
        jobs: dict[bytes, _Job] = {}
        results: dict[bytes, ExecutionResult] = {}
        for program, program_tests in zip(programs, tests, strict=True):
            if not isinstance(program, str):
                raise TypeError(f"a program is a text, not {type(program).__name__}")
            source = program.encode("utf-8", "surrogatepass")
            key = _cache_key(source, program_tests, limits, self.level)
            keys.append(key)
            if (cached := self._cached(key)) is not None:
                results[key] = cached
            elif len(source) > MAX_PROGRAM:
                message = f"the program has {len(source)} bytes, at most {MAX_PROGRAM} are allowed"
                results[key] = _to_result({"message": message}, self.level)
            elif key not in jobs:
                jobs[key] = _Job(source, program_tests, limits, key)
        self._raise_capacity(limits, workers)
        results |= self._run_jobs(list(jobs.values()), workers)
        return [results[key] for key in keys]

    def _run_jobs(self, waiting: list[_Job], workers: int) -> dict[bytes, ExecutionResult]:
        """Run jobs, at most `workers` at once; at the end, one by one, those that another program may have harmed."""
        results: dict[bytes, ExecutionResult] = {}
        run_alone: list[_Job] = []
        workers = min(workers, len(waiting))
        waiting.reverse()
        with selectors.DefaultSelector() as running:
            while waiting or run_alone or running.get_map():
                if not waiting and not running.get_map():
                    waiting, run_alone, workers = run_alone, [], 1
                while waiting and len(running.get_map()) < workers:
                    job = waiting.pop()
                    running.register(self._start(job), selectors.EVENT_READ, job)
                first_deadline = min(key.data.deadline for key in running.get_map().values())
                for key, _ in running.select(max(first_deadline - time.monotonic(), 0)):
                    if data := _receive(key.fileobj):
                        key.data.received += data
                    else:
                        self._finish(_unregister(running, key), results, waiting, run_alone)
                for key in [key for key in running.get_map().values() if key.data.deadline < time.monotonic()]:
                    self._restart()  # the runner does not answer at all
                    self._finish(_unregister(running, key), results, waiting, run_alone)
        return results

    def _finish(self, job: _Job, results: dict[bytes, ExecutionResult], waiting: list[_Job], run_alone: list[_Job]) -> None:
        """Record the result of a job whose runner has ended, or let it run again.

        It runs again if it has no result. It runs again alone if one of its processes was killed, which happens when another
        program uses up the memory of all. It has at most MAX_TRIES.
        """
        try:
            reply = utf8(json.loads(job.received))
        except ValueError:  # empty or incomplete: the runner was killed
            reply = {"outcome": "error", "kind": "infrastructure", "message": "no answer"}
        result = _to_result(reply, self.level)
        if result.kind == "infrastructure" and job.tries < MAX_TRIES:
            waiting.append(job)
            return
        if reply.get("killed") and job.tries < MAX_TRIES:
            run_alone.append(job)
            return
        results[job.key] = result
        if result.kind not in ("infrastructure", "timeout"):  # the machine may be the reason for these
            with self._lock:
                self._cache[job.key] = result
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)

    def _start(self, job: _Job) -> socket.socket:
        """Start a runner for a job and return the socket on which it will answer."""
        job.tries += 1
        job.deadline = time.monotonic() + job.limits.wall_s + GRACE_S
        job.received.clear()
        modules = preloadable_imports(job.program.decode("utf-8", "replace"))
        sock = self.start_runner(job.limits, job.tests.kind, modules, job.program, job.tests.to_json())
        sock.setblocking(False)
        return sock

    def start_runner(
        self, limits: Limits, kind: str, modules: Sequence[str], program: bytes = b"", tests: bytes = b""
    ) -> socket.socket:
        """Start a runner, and the helper if it does not run; return the runner's socket.

        kind: that of the tests, or session. modules: what the fork server imports first; at most 50 are.
        """
        self._raise_capacity(limits)
        request = json.dumps(limits.in_bytes() | {"kind": kind}).encode()
        for is_last_try in (False, True):
            sock, runner_end = socket.socketpair()
            try:
                with runner_end:
                    self._send(json.dumps(modules[:50]).encode(), runner_end)
            except BaseException as error:
                sock.close()
                if is_last_try or not isinstance(error, OSError):
                    raise
                self._restart()
                continue
            sock.settimeout(GRACE_S)
            with contextlib.suppress(OSError):  # a runner may end at a limit before it has read everything; its answer says so
                sock.sendall(struct.pack("!III", len(request), len(program), len(tests)) + request + program + tests)
            return sock
        raise AssertionError

    def _send(self, message: bytes, runner_end: socket.socket) -> None:
        with self._lock:
            if self._helper is None:
                self._helper = start_helper(self.level, *self._capacity)
            socket.send_fds(self._helper.control, [message], [runner_end.fileno()])

    def _raise_capacity(self, limits: Limits, workers: int = 1) -> None:
        """Give the control group room for the largest limits and the most workers of all calls so far."""
        with self._lock:
            old_limits, old_workers = self._capacity
            larger = {name: max(getattr(limits, name), getattr(old_limits, name)) for name in ("memory_mb", "processes")}
            capacity = dataclasses.replace(old_limits, **larger), max(workers, old_workers)
            if capacity != self._capacity and self._helper:
                self._helper.raise_group_limits(*capacity)
            self._capacity = capacity

    def _restart(self) -> None:
        """Kill the helper; the next job starts another."""
        with self._lock:
            helper, self._helper = self._helper, None
        if helper:
            helper.process.kill()
            helper.close()

    def kill_helper(self) -> None:
        """Kill the fork server without cleaning up, to test what happens then."""
        if self._helper:
            pid = self._helper.process.pid
            for process in (*(child_pids(pid) if self.level in ("S4", "S3") else ()), pid):
                os.kill(process, signal.SIGKILL)

    def _cached(self, key: bytes) -> ExecutionResult | None:
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def close(self) -> None:
        """End the helper and everything that it runs. The sandbox can be used again."""
        with self._lock:
            helper, self._helper = self._helper, None
        if helper:
            helper.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def child_pids(pid: int) -> list[int]:
    """Return the children of a process. The child of bubblewrap is the fork server; at S2 and S1 the helper itself is."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def preloadable_imports(program: str) -> list[str]:
    """Return the modules that a program imports and the fork server may import for all programs."""
    return [name for name in dict.fromkeys(_IMPORT.findall(program)) if name in PRELOADABLE]


def _unregister(running: selectors.BaseSelector, key: selectors.SelectorKey) -> _Job:
    """Close the socket of a job whose runner has ended or does not answer, and return the job."""
    running.unregister(key.fileobj)
    key.fileobj.close()  # type: ignore[union-attr]
    return key.data


def _receive(sock: Any) -> bytes:
    """Return what a runner has sent; b"" if it has ended."""
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""


def _cache_key(source: bytes, tests: Tests, limits: Limits, level: str) -> bytes:
    parts = [source, tests.to_json(), repr(limits).encode(), level.encode()]
    return hashlib.sha256(b"".join(struct.pack("!Q", len(part)) + part for part in parts)).digest()


def _to_result(reply: dict[str, Any], level: str) -> ExecutionResult:
    """Return the result from a runner's reply; what the reply lacks is empty."""
    fields: dict[str, Any] = {name: "" for name in ("kind", "message", "stdout", "stderr", "limit_hit")}
    fields.update(outcome="failed", killed=False, passed=0, total=0, wall_s=0.0, integrity="strong")
    fields.update(reply, level=level, tests=tuple(TestResult(*test) for test in reply.get("tests", ())))
    del fields["killed"]
    return ExecutionResult(**fields)


_default: Sandbox | None = None
_default_lock = threading.Lock()


def default_sandbox() -> Sandbox:
    """Return the sandbox of this process; the first call starts it."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Sandbox()
            atexit.register(_default.close)
        return _default


def run_program(program: str, tests: Tests, limits: Limits | None = None, sandbox: Sandbox | None = None) -> ExecutionResult:
    """Run a program against its tests, by default in `default_sandbox()`; see `Sandbox`."""
    return (sandbox or default_sandbox()).run(program, tests, limits)


def run_programs(
    programs: Sequence[str],
    tests: Sequence[Tests],
    limits: Limits | None = None,
    *,
    workers: int | None = None,
    sandbox: Sandbox | None = None,
) -> list[ExecutionResult]:
    """Run programs side by side, each against its tests, by default in `default_sandbox()`; see `Sandbox.run_many`."""
    return (sandbox or default_sandbox()).run_many(programs, tests, limits, workers)


def levels() -> dict[str, str]:
    """Try every level. Return for each an empty text if it holds on this machine, else why it does not."""
    reasons = {}
    for level in LEVELS:
        try:
            Sandbox(UNSAFE if level == "S1" else level).close()
            reasons[level] = ""
        except SandboxUnavailable as error:
            reasons[level] = str(error)
    return reasons
