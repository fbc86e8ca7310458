"""Record each start of a run in `attempts/N/` of its directory, so that a run of several resumes can be understood.

`start.json` has the command line, the host, versions, devices, the time and the settings. `log.txt` has the first step, the
lines that the run printed, warnings of jmarl's loggers, and how the attempt ended; a killed process leaves no last line.
`end.json` is there if nothing went wrong: the run is complete (all updates, evaluations and models), or a signal stopped it and
it is saved.

Left out: the progress bar of a terminal, and what rewards and environments print.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jmarl.config.bounded_files import read_json
from jmarl.files.run_files import PACKAGES, version_of
from jmarl.logs.log_file import LogFile
from jmarl.logs.terminal import console

LOGGERS = (logging.getLogger("jmarl"), console)


@contextlib.contextmanager
def attempt(directory: str, settings: Mapping[str, Any]) -> Iterator[Callable[[str], None]]:
    """Write `attempts/N/start.json`, and `log.txt` until the context ends. Yields a function that writes a line to this
    log only.

    directory: of the run, which is locked; settings: what the run consists of, as JSON values.
    """
    folder = _next_folder(Path(directory) / "attempts")
    content = {
        "command": [sys.executable, *sys.argv],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "devices": [str(device) for device in jax.devices()],
        "settings": settings,
    }
    temporary = folder / "start.json.tmp"  # a kill leaves no half of the file
    temporary.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    temporary.replace(folder / "start.json")
    handler = _Handler(folder / "log.txt")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for logger in LOGGERS:
        logger.addHandler(handler)

    def note(line: str) -> None:
        handler.handle(logging.makeLogRecord({"msg": line}))

    try:
        yield note
        note("the attempt ended")
    except BaseException as error:
        trace = "".join(traceback.format_exception(error)).rstrip()
        note(f"the attempt ended with {type(error).__name__}: {error}\n{trace}")
        raise
    finally:
        for logger in LOGGERS:
            logger.removeHandler(handler)
        handler.close()


def write_end(directory: str, num_updates: int, updates: int, interrupted: bool) -> None:
    """Write how the run in a directory has ended, as the last thing of its newest attempt. updates: made so far."""
    folder = _newest(Path(directory) / "attempts")
    content = {"num_updates": num_updates, "updates": updates, "interrupted": interrupted}
    with contextlib.suppress(OSError):  # on a full disk the next attempt finds that nothing is left to do
        (folder / "end.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


def is_complete(directory: str | Path, num_updates: int) -> bool:
    """Return whether the newest attempt has completed the run in a directory, with this number of updates."""
    try:
        file = _newest(Path(directory) / "attempts") / "end.json"
        content = read_json(file)
        return content["num_updates"] == num_updates and not content.get("interrupted")  # older files lack this
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # it was cut short
        return False


class _Handler(logging.Handler):
    """Writes lines to a file. On a full disk they wait in memory for the next one; no error stops the run."""

    def __init__(self, path: Path):
        super().__init__()
        self.file, self.is_open = LogFile(path), True

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the line waits in the LogFile
            self.file.write(f"{self.format(record)}\n".encode("utf-8", "replace"))

    def close(self) -> None:
        if not self.is_open:  # `logging` closes all handlers once more at the exit of the process
            return
        self.is_open = False
        with contextlib.suppress(OSError):  # the LogFile says how many lines are lost
            self.file.close()
        super().close()


def _next_folder(attempts: Path) -> Path:
    """Make and return the folder of the next attempt; numbers begin at 1."""
    folder = attempts / str(int(_newest(attempts).name) + 1)
    folder.mkdir(parents=True)
    return folder


def _newest(attempts: Path) -> Path:
    """Return the folder of the newest attempt; 0, which does not exist, without any."""
    numbers = [int(path.name) for path in attempts.glob("*") if path.name.isdecimal()] if attempts.exists() else []
    return attempts / str(max(numbers, default=0))
