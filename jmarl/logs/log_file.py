"""What a log is, and a file of records that is never left with a partial record, even if the disk is full for a while.

Left out: records waiting in memory are lost with the process. Their number is limited for large records only (a row is about a
kilobyte).
"""

from __future__ import annotations

import abc
import logging
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line imports this file, and answers at once
    import numpy as np

logger = logging.getLogger(__name__)

REWARD_TAG = "reward/mean"  # shown by the progress bar and TensorBoard's HPARAMS tab


def is_in_place(fd: int, path: Path) -> bool:
    """Return whether a path is still the file that is open: nobody has removed it, or put another in its place."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


class LogFile:
    """Appends records. A record that cannot be written waits in memory, like all records after it, until a later call succeeds.
    So the file contains complete records in order.

    max_waiting: bytes that may wait; records beyond them are lost, which is logged once. None: no limit.
    """

    def __init__(self, path: Path, max_waiting: int | None = None):
        self.path, self.max_waiting, self.lost = path.absolute(), max_waiting, 0
        # No O_APPEND: pwrite would ignore its offset. O_NONBLOCK: a pipe is an error, and does not wait for its reader.
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        self.end = os.lseek(self.fd, 0, os.SEEK_END)  # of the last complete record; a partial one after it is overwritten
        self.waiting: deque[bytes] = deque()

    def lost_file(self) -> Path | None:
        """Return the path of the file if it was removed, or if there is another in its place; what is written then is lost."""
        return None if is_in_place(self.fd, self.path) else self.path

    def write(self, record: bytes) -> None:
        """Append a record after the waiting ones. Raises OSError if the disk does not take it; then it waits too, or is lost if
        too many wait."""
        self.waiting.append(record)
        try:
            self.flush()
        except OSError:
            if self.max_waiting is not None and sum(map(len, self.waiting)) > self.max_waiting:
                self.waiting.pop()
                self.lost += 1
                if self.lost == 1:
                    waiting = f"{self.max_waiting / 1e6:g} MB wait for space on the disk"
                    logger.warning("%s: %s; until then records are lost", self.path, waiting)
            raise

    def flush(self) -> None:
        """Write the waiting records."""
        while self.waiting:
            record, written = self.waiting[0], 0
            while written < len(record):
                written += os.pwrite(self.fd, record[written:], self.end + written)
            self.end += len(record)
            self.waiting.popleft()

    def sync(self) -> None:
        """Write the waiting records and flush the file to the disk."""
        self.flush()
        os.fsync(self.fd)

    def close(self) -> None:
        """Write the waiting records and close the file. Logs how many records are lost if that fails."""
        try:
            self.flush()
        except OSError as error:
            logger.warning("%s: the last %d records are lost: %s", self.path, len(self.waiting), error)
            os.ftruncate(self.fd, self.end)
            raise
        finally:
            os.close(self.fd)


class Sink(abc.ABC):
    """One log. Its `errors` are counted and do not stop the run."""

    errors: tuple[type[BaseException], ...] = (OSError,)

    @abc.abstractmethod
    def write(self, step: int, row: dict[str, float]) -> None:
        """Write a row of metrics by their tags."""

    def text(self, step: int, name: str, markdown: str) -> None:
        return None

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        return None

    def completions(self, step: int, kind: str, record: Mapping[str, Any]) -> None:
        return None

    def lost_file(self) -> Path | None:
        """Return its file if that was removed or replaced while the run writes to it."""
        return None

    def sync(self) -> None:
        return None

    def close(self) -> None:
        return None
