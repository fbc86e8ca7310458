"""Let only one process write to a directory, with a lock that the kernel frees whenever its owner ends.

The lock is `flock` on a file in the directory, which also names the owner. After a kill the file remains but the lock is free,
so locks are never stale. Left out: file systems without `flock` (some network ones): a run there only warns.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from jmarl.config.bounded_files import kind_of, read_json
from jmarl.logs.log_file import is_in_place

logger = logging.getLogger(__name__)

NAME = "lock"
OWNER = b'{"host"'  # with which the content begins
_held: dict[Path, int] = {}  # lock files of this process, and their descriptors
_reserved: set[tuple[Path, int]] = set()  # lock files, and the threads whose next `locked` may have them


def _close_in_child() -> None:
    """Close the locks in a forked process, which would otherwise hold them even after its parent has ended."""
    while _held:
        os.close(_held.popitem()[1])
    _reserved.clear()


os.register_at_fork(after_in_child=_close_in_child)


class DirectoryInUse(RuntimeError):
    """Another process writes to the directory."""


@contextlib.contextmanager
def locked(directory: str | Path) -> Iterator[None]:
    """Hold the lock of a directory, which is created if missing. Raises `DirectoryInUse` if another run has the lock."""
    path = Path(directory) / NAME
    if (key := _key(path)) in _reserved:
        _reserved.discard(key)
        try:
            yield
        finally:
            _reserved.add(key)
        return
    held = path.absolute()
    _held[held] = _acquire(path)
    try:
        yield
    finally:
        if (fd := _held.pop(held, None)) is not None:  # a forked process has none
            _release(fd)


def keep(directory: str | Path) -> bool:
    """Return whether this process still has the lock that it took in a directory, if it took one. A lock that was removed,
    alone or with the directory, is made anew; in place of it there may be that of another run."""
    path = Path(directory).absolute() / NAME
    if path not in _held or is_in_place(_held[path], path):
        return True
    if os.path.lexists(path):
        return False
    try:
        new = _acquire(path, os.O_EXCL)
    except (OSError, DirectoryInUse):
        return False
    _release(_held[path])
    _held[path] = new
    return True


def _acquire(path: Path, flags: int = 0) -> int:
    """Return the descriptor of a lock file, which is made if missing, with the lock and the name of this process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags, 0o644)  # Python closes it in programs it starts
    except OSError as error:
        kind, reason = type(error), str(error.strerror).lower()
        if error.errno == errno.ELOOP:
            kind, reason = FileExistsError, "its lock is a link"
        verb = "used" if path.parent.is_dir() else "made"
        raise kind(
            f"the output directory {path.parent} cannot be {verb}, {reason}: {error.filename}; choose another output_dir "
            "(--output)"
        ) from error
    try:
        _take(fd, path)
        if kind_of(os.fstat(fd).st_mode) or os.pread(fd, len(OWNER), 0) not in (b"", OWNER):
            raise FileExistsError(
                f"the output directory {path.parent} has a file {NAME} that no run of jmarl has written: choose another "
                "output_dir (--output), or move it"
            )
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        with contextlib.suppress(OSError):  # on a full disk the lock works without the name
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(owner).encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _release(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@contextlib.contextmanager
def reserved(directory: str | Path) -> Iterator[None]:
    """Hold the lock of a directory as `locked` does, and let one `locked` inside the context, in this thread, share it."""
    with locked(directory):
        key = _key(Path(directory) / NAME)
        _reserved.add(key)
        try:
            yield
        finally:
            _reserved.discard(key)


def check_unlocked(directory: str | Path) -> None:
    """Raise `DirectoryInUse` if a run has the lock of a directory. Changes nothing, so it can run before models are loaded."""
    path = Path(directory) / NAME
    if path.is_file() and not path.is_symlink() and _key(path) not in _reserved:
        fd = os.open(path, os.O_RDONLY)
        try:
            _take(fd, path, fcntl.LOCK_SH)  # those who only ask do not shut each other out
        finally:
            os.close(fd)


def _key(path: Path) -> tuple[Path, int]:
    return path.resolve(), threading.get_ident()


def _take(fd: int, path: Path, kind: int = fcntl.LOCK_EX) -> None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DirectoryInUse(
            f"the output directory {path.parent} is in use by {_owner(path)}: wait for it to end, or choose another one"
        ) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): make sure that no other process writes there", path.parent, error)


def _owner(path: Path) -> str:
    try:
        owner = read_json(path)
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written its name yet
        return "another process"
