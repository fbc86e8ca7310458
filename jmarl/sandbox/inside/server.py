"""The fork server, a warm interpreter, and the runner that it forks for each request.

    server ── runner ─┬─ program                own namespaces; has its source and the judge's requests
                      └─ supervisor ── judge    other namespaces; has the tests

The server itself reads only a list of modules to import first, with which a socket for the runner comes. It ends when its
control socket is closed. On its socket the runner reads 3 lengths, then the limits and the program, and forks both sides. Only
the judge reads the tests, from the same socket, so that the memory of the program never holds them. The reply is one JSON
object. A request for a session is passed to `session.serve`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from . import confine, judge, program, session
from .disk import remove_tree
from .process import Confinement, close_all_except, fork, kill_children, socket_pipe
from .wire import Channel, read_exactly, write_all

HEADER = struct.Struct("!III")
JUDGE_MEMORY_BYTES = 1 << 30
JUDGE_TMP_BYTES = 1 << 20
JUDGE_PROCESSES = 32  # includes threads of the tests
WEAK_MESSAGE = "held by the program's own word only: its comparison or arithmetic was asked"


# --- The server


def main(control_fd: int, level: str, readable: list[str], tmp: str) -> None:
    """Fork a runner for each message until the control socket is closed. readable, tmp: see `Confinement`; empty where there
    are namespaces."""
    if level in ("S4", "S3"):
        confine.drop_root()
    elif readable_by_nobody(readable):
        os.chown(tmp, confine.NOBODY, confine.NOBODY)
        confine.drop_root()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # runners that end leave no zombies
    confine.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client
    confinement = Confinement(level, readable, tmp)
    with socket.socket(fileno=control_fd) as control:
        control.send(b"ready")
        gc.freeze()
        while True:
            message, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
            if not message:
                break
            preload(json.loads(message))
            try:
                child = os.fork()
            except BlockingIOError:  # too many processes: the client gets no answer and tries again
                child = -1
            if child == 0:
                control.close()
                serve_request(fds[0], confinement)
            os.close(fds[0])
    if tmp:  # removed here too, in case the client was killed; processes that may still write there end first
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kill_children()
        remove_tree(tmp)


def readable_by_nobody(paths: list[str]) -> bool:
    """Return whether this process is root and nobody can read these paths, so that the server can become nobody."""
    if not confine.is_root():
        return False
    existing = [path for path in paths if os.path.exists(path)]
    os.setegid(confine.NOBODY)
    os.seteuid(confine.NOBODY)
    try:
        return all(os.access(path, os.R_OK | os.X_OK, effective_ids=True) for path in existing)
    finally:
        os.seteuid(0)
        os.setegid(0)


def preload(modules: list[str]) -> None:
    """Import modules that a program imports, once for all programs."""
    for name in modules:
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except Exception:  # the program that imports the module gets the same error
                continue
            gc.freeze()


# --- The runner


def serve_request(request_fd: int, confinement: Confinement) -> NoReturn:
    """Serve one request and exit. This process is the runner."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.disable()
    if not confinement.namespaces:
        confine.adopt_orphans()
    limits_size, program_size, tests_size = HEADER.unpack(read_exactly(request_fd, HEADER.size))
    limits, source = json.loads(read_exactly(request_fd, limits_size)), read_exactly(request_fd, program_size)
    try:
        if limits["kind"] == "session":
            session.serve(confinement, limits, request_fd)
            os._exit(0)
        result = ProgramRun(confinement, limits, request_fd, source, tests_size).result()
    except Exception as error:
        result = {"outcome": "error", "kind": "infrastructure", "message": f"{type(error).__name__}: {error}"}
    confinement.clean_up()  # before the client gets the verdict
    write_all(request_fd, json.dumps(result).encode())
    os._exit(0)


class Pipes:
    """The pipes of a run; each has an end to read from (`_in`) and one to write to (`_out`).

    request, answer: from the judge to the program and back. verdict: from the judge to the runner. confined: the program's
    process writes a byte when it is confined, before it runs anything.
    """

    def __init__(self) -> None:
        self.request_in, self.request_out = socket_pipe()
        self.answer_in, self.answer_out = socket_pipe()
        self.verdict_in, self.verdict_out = socket_pipe()
        self.stdout_in, self.stdout_out = os.pipe()
        self.stderr_in, self.stderr_out = os.pipe()
        self.confined_in, self.confined_out = os.pipe()
        self.null = os.open("/dev/null", os.O_RDWR)

    def close_other_ends(self) -> None:
        """Close what the runner itself does not use."""
        outs = (self.request_out, self.answer_out, self.verdict_out, self.stdout_out, self.stderr_out, self.confined_out)
        for fd in (*outs, self.request_in, self.answer_in, self.null):
            os.close(fd)


class ProgramRun:
    """One program with its judge, from the forks to the result.

    stopped: the limit at which the runner stopped it. planned, tests, fault, load_error, final: what the judge has written (see
    `judge`); tests are name -> (number, problem, weak). broken: why a process could not be set up.
    """

    def __init__(self, confinement: Confinement, limits: dict, request_fd: int, source: bytes, tests_size: int):
        self.confinement, self.limits, self.request_fd, self.tests_size = confinement, limits, request_fd, tests_size
        self.start_time = time.monotonic()
        self.stopped = self.fault = self.load_error = self.broken = ""
        self.planned = 0
        self.tests: dict[str, tuple[int, str, bool]] = {}
        self.final: dict[str, Any] = {}
        self.start(source)

    def start(self, source: bytes) -> None:
        """Fork the supervisor and the program."""
        self.pipes = pipes = Pipes()
        confinement, file_bytes = self.confinement, self.limits["file_bytes"]
        # Classes of unittest often write files for the program, and read files that it wrote: they share its directory.
        shared = confinement.make_directory(file_bytes) if self.limits["kind"] == "unittest" else ""
        judge_directory = shared or ("" if confinement.namespaces else confinement.make_directory(0))
        self.supervisor = fork(lambda: self.supervise(pipes, judge_directory, bool(shared)), pipes.verdict_out)
        directory = shared or confinement.make_directory(file_bytes)
        confinement.prepare()
        self.child = fork(lambda: self.run_program(pipes, source, directory), 2)
        self.child_fd = os.pidfd_open(self.child)
        self.disk = confinement.disk_meter(directory, self.child, self.child_fd, file_bytes)
        pipes.close_other_ends()
        self.output = {pipes.stdout_in: bytearray(), pipes.stderr_in: bytearray()}

    def supervise(self, pipes: Pipes, directory: str, is_shared: bool) -> None:
        """Fork the judge and wait for it. This process is the supervisor.

        directory: that of the judge, or empty if it gets a new one; is_shared: whether the program has the same.
        """
        for fd in (0, 1, 2):
            os.dup2(pipes.null, fd)
        close_all_except(self.request_fd, pipes.answer_in, pipes.request_out, pipes.verdict_out)
        directory = directory or self.confinement.make_directory(JUDGE_TMP_BYTES)
        self.confinement.prepare()
        file_bytes = self.limits["file_bytes"] if is_shared else JUDGE_TMP_BYTES
        os.waitpid(fork(lambda: self.run_judge(pipes, directory, file_bytes), pipes.verdict_out), 0)

    def run_judge(self, pipes: Pipes, directory: str, file_bytes: int) -> None:
        """Read the tests and judge the program. This process is the judge. It may use a little more time than the program,
        which the runner stops first."""
        tests = read_exactly(self.request_fd, self.tests_size)
        os.close(self.request_fd)
        limits = {"cpu_s": int(self.limits["wall_s"]) + 2, "file_bytes": file_bytes, "processes": JUDGE_PROCESSES}
        self.confinement.apply(limits, JUDGE_MEMORY_BYTES, directory)
        with contextlib.suppress(BaseException):  # such as MemoryError: the program may be the reason, so it is not `broken`
            judge.main(tests, Channel(pipes.answer_in, pipes.request_out), pipes.verdict_out)

    def run_program(self, pipes: Pipes, source: bytes, directory: str) -> None:
        """Run the program. This process is the program's."""
        for fd, target in ((pipes.null, 0), (pipes.stdout_out, 1), (pipes.stderr_out, 2)):
            os.dup2(fd, target)
        close_all_except(pipes.request_in, pipes.answer_out, pipes.confined_out)
        self.confinement.apply(self.limits, self.limits["memory"], directory)
        os.write(pipes.confined_out, b"1")
        os.close(pipes.confined_out)
        gc.enable()
        program.main(source, Channel(pipes.request_in, pipes.answer_out), self.limits["kind"] == "io")

    def result(self) -> dict[str, Any]:
        """Wait for the verdict, end both processes, and return the reply for the client."""
        try:
            self.wait()
        finally:
            exit_code = self.end()
        self.tests = dict(sorted(self.tests.items(), key=lambda item: item[1][0]))
        tests, held, weak = [], 0, 0
        for name, (_, problem, is_weak) in self.tests.items():
            message = problem or (WEAK_MESSAGE if is_weak else "")
            tests.append([name, not problem and not is_weak, message, is_weak and not problem])  # the fields of a TestResult
            held += not problem
            weak += is_weak and not problem
        outcome, kind, message, limit = self.outcome(held, exit_code)
        if outcome == "passed" and weak:
            outcome, message = "weak", f"{weak} of {held} tests {WEAK_MESSAGE}"
        judge_killed = not (self.final or self.stopped or self.broken)
        stdout, stderr = (bytes(text).decode("utf-8", "replace") for text in self.output.values())
        return {
            "outcome": outcome,
            "kind": kind,
            "message": message,
            "passed": held - weak,
            "total": max(self.planned, len(self.tests)),
            "stdout": stdout,
            "stderr": stderr,
            "limit_hit": limit,
            "killed": judge_killed or (exit_code == -signal.SIGKILL and limit == "memory"),
            "wall_s": time.monotonic() - self.start_time,
            "integrity": "weak" if weak else "strong",
            "tests": tests,
        }

    def outcome(self, held: int, exit_code: int) -> tuple[str, str, str, str]:
        """Return outcome, kind of error, message and limit. held: the number of tests without a problem, weak ones included;
        exit_code: see `end`. The order of the checks matters: no error may hide one that is the program's doing."""
        if not self.was_confined:
            stderr = bytes(self.output[self.pipes.stderr_in]).decode("utf-8", "replace")
            return "error", "infrastructure", stderr[:300], ""
        if self.stopped:
            return _at_limit(self.stopped)
        if self.broken:
            return "error", "infrastructure", self.broken, ""
        final = self.final
        if not final:  # both processes were confined and had begun, so the program is the reason
            return "error", "sandbox", "the judge ended without a verdict", ""
        if final["violation"]:
            return "error", "sandbox", f"the program broke the protocol: {final['violation']}", ""
        if self.fault:
            return "error", "tests", self.fault, ""
        if held and held == max(self.planned, len(self.tests)) and final["answers"]:
            return "passed", "", "", ""
        if final["disconnected"] and exit_code == -signal.SIGXCPU or exit_code == -signal.SIGKILL:
            return _at_limit("cpu" if exit_code == -signal.SIGXCPU or self.cpu_s >= self.limits["cpu_s"] else "memory")
        if final["limit"]:
            return _at_limit(final["limit"])
        return self._failure(held, final)

    def _failure(self, held: int, final: dict) -> tuple[str, str, str, str]:
        """Return the outcome of a program that did not pass and reached no limit."""
        if self.load_error or final["disconnected"]:
            return "failed", "", self.load_error or "the program has ended", ""
        if final["unsupported_test_value"]:
            return "error", "tests", final["unsupported_test_value"], ""
        all_held = held == max(self.planned, len(self.tests))
        if not final["answers"] and (all_held or not final["names_requested"]):
            return "error", "tests", "the tests never asked the program anything", ""
        return "failed", "", next((problem for _, problem, _ in self.tests.values() if problem), "not all tests ran"), ""

    def wait(self) -> None:
        """Read until the verdict is complete or a limit is reached."""
        poll, partial_line = select.poll(), b""
        for fd in (self.pipes.verdict_in, *self.output):
            poll.register(fd, select.POLLIN)
        while True:
            if self.disk and self.disk.exceeded():
                self.stopped = "file"
                return
            time_left = self.start_time + self.limits["wall_s"] - time.monotonic()
            pause = min(time_left, self.disk.pause) if self.disk else time_left
            ready = poll.poll(max(pause, 0) * 1000)
            if not ready and time_left <= 0:
                self.stopped = "wall"
                return
            for fd, _ in ready:
                data = os.read(fd, 1 << 16)
                if fd == self.pipes.verdict_in:
                    *lines, partial_line = (partial_line + data).split(b"\n")
                    for line in lines:
                        self.read_line(json.loads(line))
                    if self.final or not data:
                        return
                elif not data:
                    poll.unregister(fd)
                else:
                    self.output[fd] += data[: self.limits["output_bytes"] - len(self.output[fd])]
                    if len(self.output[fd]) >= self.limits["output_bytes"]:
                        self.stopped = "output"
                        return

    def read_line(self, line: dict) -> None:
        """Take in one line of the verdict."""
        self.planned = line.get("planned", self.planned)
        self.fault, self.load_error = line.get("fault", self.fault), line.get("load_error", self.load_error)
        self.broken = line.get("broken", self.broken)
        if "test" in line:
            self.tests[line["test"]] = (line["number"], line["message"], line["weak"])
        if "done" in line:
            self.final = line

    def end(self) -> int:
        """Kill both processes and read the output that is left. Return how the program's process had ended by itself: its exit
        status, or minus the signal; 0 if it was still running."""
        timeout = 1 if self.final.get("disconnected") else 0  # a process closes its descriptors a moment before it ends
        had_ended = bool(select.select([self.child_fd], [], [], timeout)[0])
        if not had_ended:
            signal.pidfd_send_signal(self.child_fd, signal.SIGKILL)
        os.kill(self.supervisor, signal.SIGKILL)
        _, status, used = os.wait4(self.child, 0)
        os.waitpid(self.supervisor, 0)
        self.was_confined = os.read(self.pipes.confined_in, 1) == b"1"
        self.cpu_s = used.ru_utime + used.ru_stime
        for fd, text in self.output.items():
            os.set_blocking(fd, False)
            try:
                text += os.read(fd, max(self.limits["output_bytes"] - len(text), 0))
            except BlockingIOError:
                continue
        return os.waitstatus_to_exitcode(status) if had_ended else 0


def _at_limit(limit: str) -> tuple[str, str, str, str]:
    """Return the outcome of a program that was stopped at a limit."""
    return "error", "timeout" if limit == "wall" else "limit", f"stopped at its limit: {limit}", limit
