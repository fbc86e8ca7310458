"""How one process is forked and confined at a level."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
from collections.abc import Callable

from . import confine
from .disk import Disk, remove
from .wire import write_all

REMOVE_S = 8.0  # less than the client waits for a verdict after the limit (`client.GRACE_S`)


class Confined:
    """How processes are confined at a level."""

    def __init__(self, level: str, readable: list[str], tmp: str):
        self.namespaces = level in ("S4", "S3")
        self.landlock = level == "S2"
        self.readable, self.tmp = readable, tmp
        self.size = 0  # bytes of address space that a process begins with
        self.own = ""  # of one run, where there are no namespaces: all of its directories are in it

    def directory(self, tmp_bytes: int) -> str:
        """A directory for this process and what it forks."""
        if self.namespaces:
            confine.own_files(tmp_bytes)
            return "/tmp"
        self.own = self.own or tempfile.mkdtemp(dir=self.tmp)
        return tempfile.mkdtemp(dir=self.own)

    def enter(self) -> None:
        """In the process that forks the confined one."""
        self.size = address_space()
        if self.namespaces:
            confine.isolate()
        confine.die_with_parent()

    def disk(self, directory: str, pid: int, pidfd: int, limit: int) -> Disk | None:
        """What measures a program's directory; None where that has a size."""
        return None if self.namespaces else Disk(directory, pid, pidfd, limit)

    def leave_nothing(self) -> None:
        """End all processes of this run and remove its directories, where its namespaces do not. What cannot be removed in time
        is tried again, and told of, when the helper ends."""
        if not self.namespaces:
            end_children()
            with contextlib.suppress(OSError):
                remove(self.own, REMOVE_S)

    def close(self, limits: dict, memory: int, directory: str, single: bool = False) -> None:
        """In the confined process itself, last. single: it may start no others."""
        os.setsid()
        confine.die_with_parent()
        others = 0 if self.namespaces else processes_of_user()  # who has no namespace of his own is counted with them
        confine.limit(memory + self.size, limits["cpu_s"], limits["processes"] + others, limits["file_bytes"])
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(HOME=directory, TMPDIR=directory, PATH="/usr/bin:/bin", LANG="C.UTF-8")
        tempfile.tempdir = directory
        if self.landlock:
            confine.landlock(self.readable, [directory], ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"])
        if self.namespaces or self.landlock:
            confine.seal(alone=self.landlock, single=single)


def processes_of_user() -> int:
    found = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            found += name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid()
    return found


def end_children() -> None:
    """Kill and collect all children, and those that they leave to this process if it adopts orphans."""
    with contextlib.suppress(ChildProcessError):  # there are none any more
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for child in file.read().split():
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def address_space() -> int:
    """Bytes that this process has: of a fork server that has loaded libraries many more than of a new one."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def pipe() -> tuple[int, int]:
    """As os.pipe, but of sockets: nobody can open those a second time by a name in /proc."""
    reads, writes = socket.socketpair()
    return reads.detach(), writes.detach()


def keep_only(*fds: int) -> None:
    """Close every other descriptor."""
    low = 0
    for fd in sorted({*fds, 0, 1, 2}):
        if low < fd:  # an empty range would be all of them
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, (1 << 31) - 1)


def forked(action: Callable[[], None], report: int) -> int:
    """A child that does `action` and ends. report: where it says so if it could not."""
    if pid := os.fork():
        return pid
    try:
        action()
        os._exit(0)
    except BaseException as error:
        said = f": {error}" if isinstance(error, OSError) else ""
        write_all(report, json.dumps({"broken": f"{type(error).__name__}{said}"}).encode() + b"\n")
        os._exit(70)
