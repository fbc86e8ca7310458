"""Start the processes of a run on this host, pass their output and signals on, and end the others when one fails."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jmarl.processes.ending import FOLLOWED

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
INTERRUPTED = 75  # exit code of a process that has saved and can be started again
LEAVE = 5.0  # seconds in which the others can say why they end, before SIGTERM
# A program that lets Linux kill it when the launcher (argument 1, which may have gone already) ends, even by SIGKILL, and then
# becomes the command. Not done between fork and exec: other threads of the launcher may hold locks then.
WITH_LAUNCHER = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])"""
LAST_LINES = 12  # that are shown of the first process that failed


@dataclass(frozen=True, order=True)
class Exit:
    """How a process ended."""

    time: float
    rank: int
    code: int  # negative: the signal that killed it

    @property
    def failed(self) -> bool:
        """Whether the process neither did its work nor saved it."""
        return self.code not in (0, INTERRUPTED)

    @property
    def words(self) -> str:
        """What the code says."""
        return f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with exit code {self.code}"

    @property
    def exit_code(self) -> int:
        """The code as shells write it."""
        return 128 - self.code if self.code < 0 else self.code


@dataclass(frozen=True)
class LaunchResult:
    """How all processes ended."""

    exits: list[Exit]
    signals: list[int]  # that the launcher got
    last_lines: Mapping[int, Sequence[str]]

    @property
    def first_failed(self) -> Exit | None:
        """The process that failed first. One that ended because of another one, by jmarl's code or JAX's abort, comes last."""
        failed = [end for end in sorted(self.exits) if end.failed]
        own = [end for end in failed if end.code not in (FOLLOWED, -signal.SIGABRT)]
        return next(iter([*own, *failed]), None)


def with_launcher(command: Sequence[str]) -> list[str]:
    """Return a command that Linux ends with the thread that starts it, even if its process is killed."""
    before = [sys.executable, "-I", "-S", "-c", WITH_LAUNCHER, str(os.getpid())] if sys.platform == "linux" else []
    return [*before, *command]


class Child:
    """A process, the thread that reads its output, and the one that waits for its end. Made in the main thread: Linux ends the
    process with the thread that started it."""

    def __init__(self, rank: int, command: Sequence[str], env: Mapping[str, str], file: BinaryIO, ends: queue.SimpleQueue):
        self.rank, self.file, self.ends = rank, file, ends
        self.last_lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self.process = subprocess.Popen(
            with_launcher(command), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            process_group=0,  # a terminal sends Ctrl+C to its own group; here it comes once, from the launcher
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.waiter = threading.Thread(target=self._wait, daemon=True)
        self.reader.start()
        self.waiter.start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process has not ended."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process with those that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self.process.stdout is not None
        prefix = f"[rank {self.rank}] ".encode()
        with self.process.stdout as lines:
            for line in lines:
                line = line if line.endswith(b"\n") else line + b"\n"
                self.last_lines.append(line.decode(errors="replace").rstrip())
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                    show(prefix + line)
                with contextlib.suppress(OSError):  # the disk is full, which stops no run
                    self.file.write(line)
                    self.file.flush()

    def _wait(self) -> None:
        code = self.process.wait()
        now = time.monotonic()
        self.reader.join(1.0)  # workers that outlive the process have its output open
        self.ends.put(Exit(now, self.rank, code))


def run_children(
    commands: Mapping[int, tuple[Sequence[str], Mapping[str, str]]], logs: Path, header: str, grace: float
) -> LaunchResult:
    """Run processes until all have ended.

    Args:
        commands: rank -> the command and the environment of its process.
        logs: directory of the files rank_N.txt, to which output is appended.
        header: first line there.
        grace: seconds after SIGTERM until the others are killed when one has failed.
    """
    ends: queue.SimpleQueue[Exit] = queue.SimpleQueue()
    children: list[Child] = []
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        files = {rank: stack.enter_context(open(logs / f"rank_{rank}.txt", "ab")) for rank in commands}
        signals = stack.enter_context(_forwarding(children))
        for rank, (command, env) in commands.items():
            files[rank].write(f"{header}\n".encode())
            files[rank].flush()
            children.append(Child(rank, command, env, files[rank], ends))
        try:
            exits = _wait_for_all(children, ends, grace)
        finally:
            for child in children:
                if child.process.poll() is None:  # an error of the launcher itself
                    child.kill()
                child.waiter.join()
                child.reader.join(1.0)
    return LaunchResult(exits, signals, {child.rank: list(child.last_lines) for child in children})


def _wait_for_all(children: Sequence[Child], ends: queue.SimpleQueue[Exit], grace: float) -> list[Exit]:
    """Return how the processes ended. After the first failure the others get a few seconds, SIGTERM, and SIGKILL."""
    exits: list[Exit] = []
    steps: list[tuple[float, Callable[[Child], None]]] = []  # when, and what to do with those that are there

    while len(exits) < len(children):
        wait = max(steps[0][0] - time.monotonic(), 0.0) if steps else None
        try:
            exits.append(ends.get(timeout=wait))
        except queue.Empty:
            _, act = steps.pop(0)
            ended = {end.rank for end in exits}
            for child in children:
                if child.rank not in ended:
                    act(child)
            continue
        if exits[-1].failed and not any(end.failed for end in exits[:-1]):
            now = time.monotonic()
            leave = now + min(LEAVE, grace)
            steps = [(leave, lambda child: child.send(signal.SIGTERM)), (leave + grace, Child.kill)]
    return exits


@contextlib.contextmanager
def _forwarding(children: Sequence[Child]) -> Iterator[list[int]]:
    """Send the signals that this process gets to all children. Yields the list of those that came.

    Slurm sends those of a job to the children too, and a second one would end them before they have saved."""
    numbers: list[int] = []
    came_to_all = "SLURM_STEP_ID" in os.environ and not (sys.stdin and sys.stdin.isatty())

    def forward(number: int, _: object) -> None:
        numbers.append(number)
        for child in [] if came_to_all else list(children):
            child.send(signal.Signals(number))

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield numbers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show(line: bytes) -> None:
    """Write a line to standard output, which in a notebook takes text only."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.buffer.write(line)
    else:
        sys.stdout.write(line.decode(errors="replace"))
    sys.stdout.flush()
