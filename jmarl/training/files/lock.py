"""One process a directory: a lock that the kernel frees when its owner ends, however it ends.

The lock is `flock` on a file of the directory that also names the owner. After a kill the file stays, and the lock does not, so
nothing is ever stale. Left out: file systems without `flock` (some network ones), where a run warns that it is not protected.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "lock"
_held: set[int] = set()  # descriptors of locks that this process holds


def _close_in_child() -> None:
    """A process that was forked would hold its parent's locks, also when that is dead."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


class DirectoryInUse(RuntimeError):
    """Another run writes to the directory."""


@contextlib.contextmanager
def locked(directory: str | Path) -> Iterator[None]:
    """Hold the lock of a directory, which is made if missing; raises `DirectoryInUse` where another run has it."""
    path = Path(directory) / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)  # closed in programs that this process starts, as all files of Python
    try:
        _take(fd, path)
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name on it
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(owner).encode(), 0)
        _held.add(fd)
        yield
    finally:
        _held.discard(fd)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def check_unlocked(directory: str | Path) -> None:
    """Raise `DirectoryInUse` where a run has the lock of a directory. Changes nothing, and says it before models are loaded."""
    path = Path(directory) / NAME
    if path.is_file():
        fd = os.open(path, os.O_RDONLY)
        try:
            _take(fd, path)
        finally:
            os.close(fd)


def _take(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DirectoryInUse(
            f"output_dir={str(path.parent)!r} is in use by {_owner(path)}: wait for it to end, or choose another output_dir"
        ) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): make sure that no other process writes there", path.parent, error)


def _owner(path: Path) -> str:
    try:
        of = json.loads(path.read_text())
        return f"process {of['pid']} on {of['host']} since {of['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which has not written its name yet
