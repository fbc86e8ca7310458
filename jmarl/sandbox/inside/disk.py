"""Measure how much disk a program takes while it runs, and remove its directory, where no namespace does either (level S2).

A process without privileges cannot set a quota, so the runner measures: often when little is left, and with the program stopped
when a measurement takes long or the program moves directories meanwhile. What a program writes between two measurements, some
milliseconds apart, comes on top of the limit.

    files      all files in its directory and those that it has open without a name: up to the limit
    entries    of the directory, of any kind: up to MAX_ENTRIES, of which MAX_DIRECTORIES may be directories, because removing a
               directory can take milliseconds
    written    bytes that the kernel counts as written to a disk, deleted or not: up to WRITTEN_FACTOR times the limit. This
               bounds files that can be seen in no other way (mapped, without a name). A tmpfs is no disk: such files on one are
               not bounded

What cannot be measured counts as too much.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
import time
from collections.abc import Iterator

MAX_ENTRIES = 4096  # the same as in a program's own file system (`confine.mount_tmp`)
MAX_DIRECTORIES = 1000
WRITTEN_FACTOR = 4
FASTEST_WRITE, FASTEST_MKDIR = 4 << 30, 100_000  # bytes and directories that a program may make in a second
MIN_PAUSE_S, MAX_PAUSE_S = 0.002, 0.02  # between two measurements
LONG_S = 0.003  # after a measurement that took longer, the program is stopped during the next one
ENDING_S = 1.0  # a process that is killed frees its memory before it has ended
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskMeter:
    """Measures what one program takes.

    pidfd: of the program's process, which must not have been waited for. pause: seconds to wait before the next call of
    `exceeded`.
    """

    def __init__(self, directory: str, pid: int, pidfd: int, limit: int):
        self.directory, self.pid, self.pidfd, self.limit = directory, pid, pidfd, limit
        self.pause, self.due, self.stop_program = MIN_PAUSE_S, 0.0, False

    def exceeded(self) -> bool:
        """Measure if it is time to, and return whether the program takes too much."""
        start = time.monotonic()
        if start < self.due:
            return False
        size = entries = directories = 0
        if self.stop_program:
            signal.pidfd_send_signal(self.pidfd, signal.SIGSTOP)
        try:
            exceeded, moved = written_bytes(self.pid) > WRITTEN_FACTOR * self.limit, False
            size, entries, directories = usage(self.directory, unlinked_bytes(self.pid), self.limit)
        except PermissionError:  # also raised for a process that is ending
            signal.pidfd_send_signal(self.pidfd, signal.SIGSTOP)  # another one writes nothing meanwhile
            exceeded, moved = not select.select([self.pidfd], [], [], ENDING_S)[0], False
        except OSError:  # a directory was moved or removed meanwhile
            exceeded, moved = False, True
        finally:
            if self.stop_program:
                signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)
        cost = time.monotonic() - start
        self.stop_program = moved or cost > LONG_S
        soonest = min((self.limit - size) / FASTEST_WRITE, (MAX_DIRECTORIES - directories) / FASTEST_MKDIR)
        self.pause = max(min(soonest, MAX_PAUSE_S), MIN_PAUSE_S, cost / 2)
        self.due = time.monotonic() + self.pause
        return exceeded or size > self.limit or entries > MAX_ENTRIES or directories > MAX_DIRECTORIES


def usage(directory: str, size: int, limit: int) -> tuple[int, int, int]:
    """Return `size` plus the bytes of all files below a directory, and its numbers of entries and of directories. Counting
    stops as soon as one of the three is too large."""
    entries = directories = 0
    for fd, name, is_directory in walk(directory):
        entries += 1
        if is_directory:
            directories += 1
        else:
            with contextlib.suppress(FileNotFoundError):
                size += allocated_bytes(os.stat(name, dir_fd=fd, follow_symlinks=False))
        if size > limit or entries > MAX_ENTRIES or directories > MAX_DIRECTORIES:
            break
    return size, entries, directories


def allocated_bytes(status: os.stat_result) -> int:
    """Return what a file takes on the disk: less than its length if it has holes, and not the blocks that some file systems
    reserve beyond its end."""
    return min(status.st_blocks * 512, status.st_size + 4095)


def unlinked_bytes(pid: int) -> int:
    """Return the bytes of the files that a process has open and that have no name any more."""
    sizes = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            status = os.stat(f"/proc/{pid}/fd/{fd}")
            if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                sizes[status.st_dev, status.st_ino] = allocated_bytes(status)
    return sum(sizes.values())


def written_bytes(pid: int) -> int:
    """Return the bytes that a process has written to a disk, without those that were deleted before they got there; 0 if the
    kernel does not count them."""
    try:
        with open(f"/proc/{pid}/io", encoding="utf-8") as file:
            counts = dict(line.split(": ") for line in file.read().splitlines())
    except FileNotFoundError:
        return 0
    return int(counts["write_bytes"]) - int(counts["cancelled_write_bytes"])


def walk(top: str, unlock: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Yield every entry below a directory, the contents of a directory before the directory itself.

    An entry is a descriptor of the directory that holds it, its name, and whether it is a directory. The walk goes by
    descriptors, two at a time, because paths may be longer than the kernel takes. unlock: make each directory readable and
    writable first. Raises an OSError if a directory is moved meanwhile.
    """
    fd, parents = _open_directory(top, None, unlock), []
    try:
        names, directories = _list_directory(fd)
        while True:
            for name in names:
                yield fd, name, False
            if directories:
                child = _open_directory(directories[-1], fd, unlock)
                parents.append((_identity(fd), directories))
                os.close(fd)
                fd = child
                names, directories = _list_directory(fd)
                continue
            if not parents:
                return
            parent = os.open("..", _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd, names = parent, []
            identity, directories = parents.pop()
            if _identity(fd) != identity:
                raise OSError(errno.ESTALE, "a directory was moved")
            yield fd, directories.pop(), True
    finally:
        os.close(fd)


def _list_directory(fd: int) -> tuple[list[str], list[str]]:
    """Return the names of entries that are no directories, and of directories."""
    names: tuple[list[str], list[str]] = [], []
    with os.scandir(fd) as entries:
        for entry in entries:
            names[entry.is_dir(follow_symlinks=False)].append(entry.name)
    return names


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _open_directory(name: str, parent_fd: int | None, unlock: bool) -> int:
    if unlock:  # by a descriptor, because the name may have become a link to a file outside
        place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
        os.chmod(f"/proc/self/fd/{place}", 0o700)
        os.close(place)
    return os.open(name, _DIRECTORY, dir_fd=parent_fd)


def remove_tree(top: str, timeout_s: float = 30.0) -> None:
    """Remove a directory and its contents, however deep and whatever their modes; do nothing if it does not exist.

    Errors are retried for `timeout_s` seconds, because a process that is being killed may still change the directory; then the
    last OSError is raised.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            for fd, name, is_directory in walk(top, unlock=True):
                (os.rmdir if is_directory else os.unlink)(name, dir_fd=fd)
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, f"not everything below {top} could be removed in {timeout_s:g} s")
            return os.rmdir(top)
        except FileNotFoundError:
            if not os.path.lexists(top):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)
