"""A file of records that a full disk delays and does not damage.

Left out: what waits in memory is lost with the process, and nothing bounds it (a row of metrics is about a kilobyte).
"""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path

logger = logging.getLogger(__name__)


class LogFile:
    """Appends records. One that cannot be written waits in memory with those after it, and the next call begins with them, so
    the file holds whole records in their order."""

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)  # no O_APPEND: pwrite would ignore its offset
        self.end = os.lseek(self.fd, 0, os.SEEK_END)  # of the last whole record; a part of one behind it is overwritten
        self.waiting: deque[bytes] = deque()

    def write(self, record: bytes) -> None:
        """Append a record after those that wait. An OSError says that it waits, too."""
        self.waiting.append(record)
        self.flush()

    def flush(self) -> None:
        """Write the records that wait."""
        while self.waiting:
            record, written = self.waiting[0], 0
            while written < len(record):
                written += os.pwrite(self.fd, record[written:], self.end + written)
            self.end += len(record)
            self.waiting.popleft()

    def sync(self) -> None:
        """Write the records that wait, and have the system put all of them on the disk."""
        self.flush()
        os.fsync(self.fd)

    def close(self) -> None:
        """Write the records that wait, once more; a warning says how many are lost."""
        try:
            self.flush()
        except OSError as error:
            logger.warning("%s: the last %d records are lost: %s", self.path, len(self.waiting), error)
            os.ftruncate(self.fd, self.end)
            raise
        finally:
            os.close(self.fd)
