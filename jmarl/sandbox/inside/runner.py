"""Runs one program against its tests: two confined processes, a clock, and the result.

    server ── runner ─┬─ program            namespaces of its own; sees its source and the judge's requests
                      └─ keeper ── judge    other namespaces; sees the tests, reads them from the request itself

Request (on the socket that the server was given): 3 lengths, then limits, program, tests. The runner reads limits and program
and forks the program before anyone has read the tests, so that its memory never held them. Reply: one JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import struct
import time
from typing import Any, NoReturn

from . import confine, judge, program, session
from .process import Confined, forked, keep_only, pipe
from .wire import Channel, read_exactly, write_all

HEADER = struct.Struct("!III")
JUDGE_MEMORY = 1 << 30
JUDGE_TMP = 1 << 20
OWN_WORD = "held by the program's own word only: its comparison or arithmetic was asked"
JUDGE_PROCESSES = 32  # threads of the tests, too


def run(request: int, confined: Confined) -> NoReturn:
    """In a process of its own, which ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.disable()
    if not confined.namespaces:
        confine.adopt_orphans()
    sizes = HEADER.unpack(read_exactly(request, HEADER.size))
    limits, source = json.loads(read_exactly(request, sizes[0])), read_exactly(request, sizes[1])
    try:
        if limits["kind"] == "session":
            session.keep(confined, limits, request)
            os._exit(0)
        result = Run(confined, limits, request, source, sizes[2]).result()
    except Exception as error:
        result = {"outcome": "error", "kind": "infrastructure", "message": f"{type(error).__name__}: {error}"}
    confined.leave_nothing()  # before anyone hears of it
    write_all(request, json.dumps(result).encode())
    os._exit(0)


class Run:
    """One program, from its fork to its verdict."""

    def __init__(self, confined: Confined, limits: dict, request: int, source: bytes, tests_size: int):
        self.confined, self.limits, self.request, self.tests_size = confined, limits, request, tests_size
        self.started = time.monotonic()
        self.out: dict[int, bytearray] = {}
        self.stopped = ""
        self.planned, self.tests, self.last, self.fault, self.unloaded, self.broken = 0, {}, {}, "", "", ""
        self.start(source)

    def start(self, source: bytes) -> None:
        """Fork both. Tests of objects often leave files for the program, and read what it wrote: those share a directory."""
        (down, ask), (answers, up), (self.verdict, verdict) = pipe(), pipe(), pipe()
        (out, out_w), (err, err_w) = os.pipe(), os.pipe()
        kind = self.limits["kind"]
        shared = self.directory = self.confined.directory(self.limits["file_bytes"]) if kind == "unittest" else ""
        self.ready, ready = os.pipe()  # told of by the program's process once it is confined, before it runs anything
        own = "" if self.confined.namespaces else self.confined.directory(0)
        nothing = os.open("/dev/null", os.O_RDWR)

        def keep() -> None:
            for fd in (0, 1, 2):
                os.dup2(nothing, fd)
            keep_only(self.request, answers, ask, verdict)
            self.directory = shared or own or self.confined.directory(JUDGE_TMP)
            self.confined.enter()
            os.waitpid(forked(weigh, verdict), 0)

        def weigh() -> None:
            tests = read_exactly(self.request, self.tests_size)
            os.close(self.request)
            size = self.limits["file_bytes"] if shared else JUDGE_TMP
            limits = {"cpu_s": int(self.limits["wall_s"]) + 2, "file_bytes": size, "processes": JUDGE_PROCESSES}
            self.confined.close(limits, JUDGE_MEMORY, self.directory)
            judge.main(tests, Channel(answers, ask), verdict)

        def execute() -> None:
            for fd, end in ((0, nothing), (1, out_w), (2, err_w)):
                os.dup2(end, fd)
            keep_only(down, up, ready)
            self.confined.close(self.limits, self.limits["memory"], self.directory)
            os.write(ready, b"1")
            os.close(ready)
            gc.enable()
            program.main(source, Channel(down, up), kind == "io")

        self.keeper = forked(keep, verdict)
        self.directory = shared or self.confined.directory(self.limits["file_bytes"])
        self.confined.enter()
        self.child = forked(execute, 2)
        self.watch = os.pidfd_open(self.child)
        self.disk = self.confined.disk(self.directory, self.child, self.watch, self.limits["file_bytes"])
        for fd in (down, ask, answers, up, verdict, out_w, err_w, nothing, ready):
            os.close(fd)
        self.out, self.stderr = {out: bytearray(), err: bytearray()}, err

    def result(self) -> dict[str, Any]:
        """Wait for the verdict, end both processes, and say what came of it."""
        try:
            self.wait()
        finally:
            exited = self.end()
        self.tests = dict(sorted(self.tests.items(), key=lambda test: test[1][0]))
        held = sum(not problem for _, problem, _ in self.tests.values())
        tests = [
            [name, not (problem or weak), problem or OWN_WORD * weak, weak and not problem]
            for name, (_, problem, weak) in self.tests.items()
        ]
        weak = sum(test[-1] for test in tests)
        outcome, kind, message, limit = self.outcome(held, exited)
        if outcome == "passed" and weak:
            outcome, message = "weak", f"{weak} of {held} tests {OWN_WORD}"
        judge_gone = not (self.last or self.stopped or self.broken)
        out, err = (bytes(x).decode("utf-8", "replace") for x in self.out.values())
        return {
            "outcome": outcome,
            "kind": kind,
            "message": message,
            "passed": held - weak,
            "total": max(self.planned, len(self.tests)),
            "stdout": out,
            "stderr": err,
            "limit_hit": limit,
            "killed": judge_gone or (exited == -signal.SIGKILL and limit == "memory"),
            "wall_s": time.monotonic() - self.started,
            "integrity": "weak" if weak else "strong",
            "tests": tests,
        }

    def outcome(self, held: int, exited: int) -> tuple[str, str, str, str]:
        """Outcome (not yet whether it is weak), kind of error, message, limit. held: how many tests did."""
        total = max(self.planned, len(self.tests))
        if not self.confined_at_all:
            return "error", "infrastructure", bytes(self.out[self.stderr]).decode("utf-8", "replace")[:300], ""
        if self.stopped:
            kind = "timeout" if self.stopped == "wall" else "limit"
            return "error", kind, f"stopped at its limit: {self.stopped}", self.stopped
        if self.broken:
            return "error", "infrastructure", self.broken, ""
        if not self.last:  # it was confined and began: what ended it came from the program
            return "error", "sandbox", "the judge ended without a verdict", ""
        if self.last["violation"]:
            return "error", "sandbox", f"the program broke the protocol: {self.last['violation']}", ""
        if self.fault:
            return "error", "tests", self.fault, ""
        if total and held == total and self.last["asked"]:
            return "passed", "", "", ""
        if self.last["gone"] and exited == -signal.SIGXCPU or exited == -signal.SIGKILL:
            limit = "cpu" if exited == -signal.SIGXCPU or self.cpu_s >= self.limits["cpu_s"] else "memory"
            return "error", "limit", f"stopped at its limit: {limit}", limit
        if self.last["limit"]:
            return "error", "limit", f"stopped at its limit: {self.last['limit']}", self.last["limit"]
        if self.unloaded or self.last["gone"]:
            return "failed", "", self.unloaded or "the program has ended", ""
        if self.last["unsupported"]:
            return "error", "tests", self.last["unsupported"], ""
        if not self.last["asked"] and (held == total or not self.last["wanted"]):
            return "error", "tests", "the tests never asked the program anything", ""
        return "failed", "", next((text for _, text, _ in self.tests.values() if text), "not all tests ran"), ""

    def wait(self) -> None:
        """Until the verdict is complete, or a limit is reached."""
        poll, lines = select.poll(), b""
        for fd in (self.verdict, *self.out):
            poll.register(fd, select.POLLIN)
        while True:
            if self.disk and self.disk.over():
                self.stopped = "file"
                return
            left = self.started + self.limits["wall_s"] - time.monotonic()
            ready = poll.poll(max(min(left, self.disk.pause) if self.disk else left, 0) * 1000)
            if not ready and left <= 0:
                self.stopped = "wall"
                return
            for fd, _ in ready:
                data = os.read(fd, 1 << 16)
                if fd == self.verdict:
                    *whole, lines = (lines + data).split(b"\n")
                    for line in whole:
                        self.note(json.loads(line))
                    if self.last or not data:
                        return
                elif not data:
                    poll.unregister(fd)
                else:
                    self.out[fd] += data[: self.limits["output_bytes"] - len(self.out[fd])]
                    if len(self.out[fd]) >= self.limits["output_bytes"]:
                        self.stopped = "output"
                        return

    def note(self, line: dict) -> None:
        self.planned = line.get("planned", self.planned)
        self.fault, self.unloaded = line.get("fault", self.fault), line.get("unloaded", self.unloaded)
        self.broken = line.get("broken", self.broken)
        if "test" in line:
            self.tests[line["test"]] = (line["number"], line["message"], line["weak"])
        if "done" in line:
            self.last = line

    def end(self) -> int:
        """Kill what still runs, collect what was written, and leave nothing. Returns how the program's process had ended: its
        exit status, or minus the signal; 0 if it was still running."""
        patience = 1 if self.last.get("gone") else 0  # its descriptors are closed a moment before it has ended
        over = bool(select.select([self.watch], [], [], patience)[0])
        if not over:
            signal.pidfd_send_signal(self.watch, signal.SIGKILL)
        os.kill(self.keeper, signal.SIGKILL)
        _, status, used = os.wait4(self.child, 0)
        os.waitpid(self.keeper, 0)
        self.confined_at_all = os.read(self.ready, 1) == b"1"
        self.cpu_s = used.ru_utime + used.ru_stime
        for fd, text in self.out.items():
            os.set_blocking(fd, False)
            try:
                text += os.read(fd, max(self.limits["output_bytes"] - len(text), 0))
            except BlockingIOError:
                continue
        return os.waitstatus_to_exitcode(status) if over else 0
