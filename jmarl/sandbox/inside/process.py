"""Fork a process, confine it as a level asks, and handle its standard streams and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from . import confine
from .disk import DiskMeter, remove_tree
from .wire import write_all

REMOVE_TIMEOUT_S = 8.0  # less than the client waits for a verdict after the limit (`client.GRACE_S`)
DEVICES = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"]


class Confinement:
    """How the processes of one run are confined at a level.

    readable: paths that a program may read where there are no namespaces. tmp: the directory in which the directories of all
    runs are made there.
    """

    def __init__(self, level: str, readable: list[str], tmp: str):
        self.namespaces = level in ("S4", "S3")
        self.landlock = level == "S2"
        self.readable, self.tmp = readable, tmp
        self.initial_bytes = 0  # address space that a forked process begins with
        self.run_directory = ""  # holds all directories of this run where there are no namespaces

    def make_directory(self, size_bytes: int) -> str:
        """Make a directory for this process and its descendants; its size is limited only where there are namespaces."""
        if self.namespaces:
            confine.mount_tmp(size_bytes)
            return "/tmp"
        self.run_directory = self.run_directory or tempfile.mkdtemp(dir=self.tmp)
        return tempfile.mkdtemp(dir=self.run_directory)

    def prepare(self) -> None:
        """Enter the namespaces. Call this in the process that then forks the confined one."""
        self.initial_bytes = address_space_bytes()
        if self.namespaces:
            confine.isolate()
        confine.die_with_parent()

    def disk_meter(self, directory: str, pid: int, pidfd: int, limit: int) -> DiskMeter | None:
        """Return a meter of a program's directory; None where the file system itself limits it."""
        return None if self.namespaces else DiskMeter(directory, pid, pidfd, limit)

    def clean_up(self) -> None:
        """End all processes of this run and remove its directories. Namespaces do both by themselves. Directories that cannot
        be removed in time are tried once more, and reported, when the fork server ends."""
        if not self.namespaces:
            kill_children()
            with contextlib.suppress(OSError):
                remove_tree(self.run_directory, REMOVE_TIMEOUT_S)

    def apply(self, limits: dict, memory_bytes: int, directory: str, no_forks: bool = False) -> None:
        """Confine this process for good. Call this last before untrusted code runs.

        memory_bytes: address space that it may add to what it begins with. no_forks: it may start no other process.
        """
        os.setsid()
        confine.die_with_parent()
        # Without a user namespace the kernel counts all processes of this user, on the whole host.
        existing = 0 if self.namespaces else count_user_processes()
        processes = limits["processes"] + existing
        confine.set_limits(memory_bytes + self.initial_bytes, limits["cpu_s"], processes, limits["file_bytes"])
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(HOME=directory, TMPDIR=directory, PATH="/usr/bin:/bin", LANG="C.UTF-8")
        tempfile.tempdir = directory
        if self.landlock:
            confine.restrict_paths(self.readable, [directory], DEVICES)
        if self.namespaces or self.landlock:
            confine.seal(without_namespaces=self.landlock, no_forks=no_forks)


def count_user_processes() -> int:
    """Return the number of processes of this user that /proc shows."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(FileNotFoundError):  # ended meanwhile
            count += name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid()
    return count


def kill_children() -> None:
    """Kill and wait for all children, also those that this process adopts while it does so (`confine.adopt_orphans`)."""
    with contextlib.suppress(ChildProcessError):  # no children are left
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as file:
                for child in file.read().split():
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def address_space_bytes() -> int:
    """Return the address space of this process; a fork server that has imported libraries has far more than a new process."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def socket_pipe() -> tuple[int, int]:
    """Return the two ends of a pipe that is made of sockets, because no process can reopen those by a path in /proc."""
    read_end, write_end = socket.socketpair()
    return read_end.detach(), write_end.detach()


def close_all_except(*fds: int) -> None:
    """Close every descriptor but these and the standard streams."""
    low = 0
    for fd in sorted({*fds, 0, 1, 2}):
        if low < fd:  # an empty range would close all of them
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, (1 << 31) - 1)


def fork(action: Callable[[], None], report_fd: int) -> int:
    """Fork a child that runs `action` and ends; return its process number. If the action raises, the child writes
    `{"broken": reason}` to `report_fd`."""
    if pid := os.fork():
        return pid
    try:
        action()
        os._exit(0)
    except BaseException as error:
        reason = f": {error}" if isinstance(error, OSError) else ""
        write_all(report_fd, json.dumps({"broken": f"{type(error).__name__}{reason}"}).encode() + b"\n")
        os._exit(70)


def join_threads() -> None:
    """Wait for all threads but daemons, as Python does before it exits."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def flush() -> None:
    """Flush the standard streams, the original ones too."""
    for stream in dict.fromkeys((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        try:
            stream.flush()  # type: ignore[union-attr]
        except Exception:  # the program may have closed or replaced it
            continue


def reopen_standard_streams() -> None:
    """Open the standard streams anew over descriptors 0 to 2, which may be other files by now."""

    def reopen(fd: int, mode: str) -> Any:
        return open(fd, mode, encoding="utf-8", errors="backslashreplace", closefd=False)

    sys.stdin, sys.stdout, sys.stderr = reopen(0, "r"), reopen(1, "w"), reopen(2, "w")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def exit_status(action: Callable[[], None]) -> int:
    """Run an action and return the exit status of a process that does so; an error is printed."""
    try:
        action()
        return 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    finally:
        flush()
