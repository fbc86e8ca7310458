"""The fork server: a warm interpreter that forks a runner for each request.

It takes no text from anyone: a message is the name of modules to import first, and a socket on which the runner finds the rest.
Ends when its control socket is closed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys

from . import confine, runner
from .disk import remove
from .process import end_children


def main(control_fd: int, level: str, readable: list[str], tmp: str) -> None:
    if level in ("S4", "S3"):
        confine.drop_root()
    elif nobody_reads(readable):
        os.chown(tmp, confine.NOBODY, confine.NOBODY)
        confine.drop_root()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # runners that end leave nothing
    confine.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client
    confined = runner.Confined(level, readable, tmp)
    with socket.socket(fileno=control_fd) as control:
        control.send(b"ready")
        gc.freeze()
        while True:
            message, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
            if not message:
                break
            warm(json.loads(message))
            try:
                child = os.fork()
            except BlockingIOError:  # no room for a process: the client sees that nobody answers, and tries again
                child = -1
            if child == 0:
                control.close()
                runner.run(fds[0], confined)
            os.close(fds[0])
    if tmp:  # also if the client was killed; first what may still write there
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_children()
        remove(tmp)


def nobody_reads(places: list[str]) -> bool:
    """Whether the interpreter and its libraries are there for a user without rights."""
    if not confine.is_root():
        return False
    there = [place for place in places if os.path.exists(place)]
    os.setegid(confine.NOBODY)
    os.seteuid(confine.NOBODY)
    try:
        return all(os.access(place, os.R_OK | os.X_OK, effective_ids=True) for place in there)
    finally:
        os.seteuid(0)
        os.setegid(0)


def warm(modules: list[str]) -> None:
    """Import what programs ask for once, before the fork."""
    for name in modules:
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except Exception:  # whatever it is, the program that asks for the module gets it itself
                continue
            gc.freeze()
