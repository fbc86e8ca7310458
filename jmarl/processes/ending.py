"""End all processes of a run when one of them fails, and let each say which one it was and why.

A process that fails leaves its reason with JAX's coordinator, where the others look once a second. One that is killed leaves
none: JAX ends the others when its heartbeats are missing (`join.HEARTBEAT`).
A run that is interrupted in one of its processes ends in all, saved, because they all raise `Interrupted`.
Left out: processes that end by `raise SystemExit` of a script, which JAX lets wait for the others.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

FOLLOWED = 76  # exit code of a process that ends because another one failed
KEY = "jmarl/failed"
EVERY = 1.0  # seconds between two looks
LINGER = 3.0  # seconds in which the others can read the reason and end, before process 0 ends, and with it the coordinator
FAILED, STOPPED = 1, 130
OTHER = re.compile(r"(\w+: )?process \d+ of \d+ failed: ")  # how an error begins that is another process's
LOST = ("closed by peer", "reset by peer", "ncclRemoteError")  # in errors of an exchange with a process that has ended

_watcher: Watcher | None = None


class Interrupted(Exception):
    """Ends a run early. The run is saved first and can be resumed: nothing is wrong with it.

    Raised where processes exchange something, it is raised in all of them. The text goes on after "interrupted".
    """


class NoServer(RuntimeError):
    """No server plays an environment or computes a reward when a run begins. A run that resumes can be resumed later."""


def watch(client: Any, process: int, count: int) -> None:
    """End this process when another one fails, and the others when this one does.

    client: JAX's, of the coordinator."""
    global _watcher
    _watcher = Watcher(client, process, count)
    threading.Thread(target=_watcher.run, name="jmarl-processes", daemon=True).start()
    atexit.register(_watcher.stopped.set)  # called before JAX's own, which closes the client
    before = sys.excepthook

    def end_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        fail(sentence(error), STOPPED if isinstance(error, KeyboardInterrupt) else FAILED)

    sys.excepthook = end_all


def fail(reason: str, code: int) -> None:
    """Tell the other processes why this one fails, and end it with an exit code. Returns if it is the only process."""
    if _watcher is not None:
        _watcher.fail(reason, code)


def say(process: int, text: str) -> None:
    """Print a line on standard error."""
    print(f"jmarl: {text}" if process == 0 else f"jmarl [{process}]: {text}", file=sys.stderr, flush=True)


def sentence(error: BaseException) -> str:
    """Return an error in one line, with the last line of the user's own code, or the last one if there is none. That of another
    process has its place there."""
    text = " ".join(str(error).split())
    if OTHER.match(text):
        return f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    own = [frame for frame in frames if not any(x in frame.filename for x in ("site-packages", package, "<frozen"))]
    where = "".join(f", in {frame.filename}, line {frame.lineno}" for frame in (own or list(frames))[-1:])
    lost = " (another process has ended, and its output says why)" if any(x in text for x in LOST) else ""
    return f"{type(error).__name__}{': ' * bool(text)}{text}{where}{lost}"


class Watcher:
    """Looks whether another process has failed."""

    def __init__(self, client: Any, process: int, count: int):
        self.client, self.process = client, process
        self.name = f"process {process} of {count} (host {socket.gethostname()}, pid {os.getpid()})"
        self.stopped = threading.Event()

    def run(self) -> None:
        """End this process when another one has failed; return when this one ends by itself."""
        while not self.stopped.wait(EVERY):
            try:
                reason = self.client.key_value_try_get(KEY)
            except RuntimeError as error:
                if "NOT_FOUND" in str(error):
                    continue
                return  # the coordinator has gone, and JAX ends this process
            if not self.stopped.is_set():
                self.end(f"{reason}; {self.name} ends too", FOLLOWED)

    def fail(self, reason: str, code: int) -> None:
        """Leave the reason for the others and end this process."""
        self.stopped.set()
        if OTHER.match(reason):  # which it was told in an exchange
            self.end(f"{reason}; {self.name} ends too", FOLLOWED)
        text = f"{self.name} failed: {reason}"
        try:
            self.client.key_value_set(KEY, text)
        except RuntimeError as error:  # another one failed before, or the coordinator has gone
            is_second = "ALREADY_EXISTS" in str(error)
            text, code = (text, FOLLOWED) if is_second else (f"{text}; the other processes could not be told", code)
        self.end(text, code)

    def end(self, text: str, code: int) -> NoReturn:
        """Print a line and end this process: an ordinary end waits for the other processes."""
        say(self.process, text)
        sys.stdout.flush()
        if self.process == 0:
            time.sleep(LINGER)
        os._exit(code)
