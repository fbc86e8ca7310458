"""How much disk a program takes while it runs, and how its directory is removed, where no namespace does both.

There is no quota that a process without rights could set. So the runner measures: often where little is left, and with the
program stopped where that takes long or directories move about meanwhile. What a program writes between two measures, some
milliseconds, comes on top of the limit.

    files      all in its directory, and those that are open and have no name any more: up to the limit
    entries    of the directory, whatever their kind: up to MAX_ENTRIES, of which MAX_DIRECTORIES may be directories, because to
               remove one can take milliseconds
    written    bytes that the kernel says it has written to a disk, deleted or not: up to WRITTEN times the limit. For files
               that can be seen in no other way (mapped, without a name). A tmpfs is no disk: there nothing tells of them

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

MAX_ENTRIES = 4096  # as many as where a program has a file system of its own (`confine.own_files`)
MAX_DIRECTORIES = 1000
WRITTEN = 4
FASTEST, MOST_MADE = 4 << 30, 100_000  # bytes that a program may write, and directories that it may make, in a second
SHORTEST, LONGEST = 0.002, 0.02  # seconds from one measure to the next
LONG = 0.003  # seconds of a measure, from which on the next is made with the program stopped
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Disk:
    """What one program takes. pidfd: of its process, which nobody has waited for yet."""

    def __init__(self, directory: str, pid: int, pidfd: int, limit: int):
        self.directory, self.pid, self.pidfd, self.limit = directory, pid, pidfd, limit
        self.pause, self.due, self.hold = SHORTEST, 0.0, False

    def over(self) -> bool:
        """Whether it is too much. Measures where it is time to, else says no; call it again after `pause`."""
        began = time.monotonic()
        if began < self.due:
            return False
        size = entries = directories = 0
        if self.hold:
            signal.pidfd_send_signal(self.pidfd, signal.SIGSTOP)
        try:
            over, moved = written(self.pid) > WRITTEN * self.limit, False
            size, entries, directories = taken(self.directory, unlinked(self.pid), self.limit)
        except PermissionError:  # also of a process that has ended
            over, moved = not select.select([self.pidfd], [], [], 0)[0], False
        except OSError:  # a directory was moved or removed meanwhile
            over, moved = False, True
        finally:
            if self.hold:
                signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)
        cost = time.monotonic() - began
        self.hold = moved or cost > LONG
        soonest = min((self.limit - size) / FASTEST, (MAX_DIRECTORIES - directories) / MOST_MADE)
        self.pause = max(min(soonest, LONGEST), SHORTEST, cost / 2)
        self.due = time.monotonic() + self.pause
        return over or size > self.limit or entries > MAX_ENTRIES or directories > MAX_DIRECTORIES


def taken(directory: str, size: int, limit: int) -> tuple[int, int, int]:
    """Bytes of all files below a directory, beyond `size`, entries, and directories; no more is counted once one of them is too
    much."""
    entries = directories = 0
    for fd, name, is_directory in walk(directory):
        entries += 1
        if is_directory:
            directories += 1
        else:
            with contextlib.suppress(FileNotFoundError):
                size += bytes_of(os.stat(name, dir_fd=fd, follow_symlinks=False))
        if size > limit or entries > MAX_ENTRIES or directories > MAX_DIRECTORIES:
            break
    return size, entries, directories


def bytes_of(about: os.stat_result) -> int:
    """On the disk: less than the length of a file with holes; but file systems set space aside that is not used yet."""
    return min(about.st_blocks * 512, about.st_size + 4095)


def unlinked(pid: int) -> int:
    """Bytes of files that a process has open and nobody can find by a name."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            about = os.stat(f"/proc/{pid}/fd/{fd}")
            if stat.S_ISREG(about.st_mode) and not about.st_nlink:
                found[about.st_dev, about.st_ino] = bytes_of(about)
    return sum(found.values())


def written(pid: int) -> int:
    """Bytes that a process has written to a disk, less those that were deleted before they got there."""
    try:
        with open(f"/proc/{pid}/io") as file:
            counts = dict(line.split(": ") for line in file.read().splitlines())
    except FileNotFoundError:  # a kernel that does not count them
        return 0
    return int(counts["write_bytes"]) - int(counts["cancelled_write_bytes"])


def walk(top: str, unlock: bool = False) -> Iterator[tuple[int, str, bool]]:
    """All entries below a directory, those in a directory before itself: a descriptor of the directory that an entry is in, its
    name, and whether it is a directory. By descriptors, two at a time, because paths may be longer than the kernel takes; an
    OSError if a directory moves meanwhile. unlock: make directories readable and writable."""
    fd, above = _opened(top, None, unlock), []
    try:
        names, directories = _listed(fd)
        while True:
            for name in names:
                yield fd, name, False
            if directories:
                child = _opened(directories[-1], fd, unlock)
                above.append((_identity(fd), directories))
                os.close(fd)
                fd = child
                names, directories = _listed(fd)
                continue
            if not above:
                return
            parent = os.open("..", _LISTED, dir_fd=fd)
            os.close(fd)
            fd, names = parent, []
            identity, directories = above.pop()
            if _identity(fd) != identity:
                raise OSError(errno.ESTALE, "a directory was moved")
            yield fd, directories.pop(), True
    finally:
        os.close(fd)


def _listed(fd: int) -> tuple[list[str], list[str]]:
    """Names of what is no directory, and of directories."""
    names: tuple[list[str], list[str]] = [], []
    with os.scandir(fd) as found:
        for entry in found:
            names[entry.is_dir(follow_symlinks=False)].append(entry.name)
    return names


def _identity(fd: int) -> tuple[int, int]:
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


def _opened(name: str, inside: int | None, unlock: bool) -> int:
    if unlock:  # by a descriptor: a name may have become a link to somebody else's file
        place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
        os.chmod(f"/proc/self/fd/{place}", 0o700)
        os.close(place)
    return os.open(name, _LISTED, dir_fd=inside)


def remove(top: str, seconds: float = 30.0) -> None:
    """Remove a directory and all that is in it, however deep and whatever its modes; nothing where there is none. It is tried
    again while something still changes it, a process that is being killed, and for so many seconds; then an OSError says what
    is in the way."""
    end = time.monotonic() + seconds
    while True:
        try:
            for fd, name, is_directory in walk(top, unlock=True):
                (os.rmdir if is_directory else os.unlink)(name, dir_fd=fd)
                if time.monotonic() > end:
                    raise TimeoutError(errno.ETIMEDOUT, f"not all of it could be removed in {seconds:g} s")
            return os.rmdir(top)
        except FileNotFoundError:
            if not os.path.lexists(top):
                return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.01)
