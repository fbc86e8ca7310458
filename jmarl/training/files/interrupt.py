"""Ctrl+C and SIGTERM ask a run to stop where nothing is lost: after its update, with its row and its checkpoint written.

The first signal only leaves a note, which the loop reads between updates. A second one does what it would do without this
module: in a notebook or script Ctrl+C raises KeyboardInterrupt, SIGTERM ends the process; a command ends at once by both.
Left out: threads other than the main one, to which Python gives no signals; training there goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

EXIT_INTERRUPTED = 75  # of commands whose run was interrupted and can be resumed: EX_TEMPFAIL, "try again"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A part of a larger run (imitation, a reward model) was interrupted; the whole stops too."""


class Interrupt:
    """Whether a signal has asked the run to stop, and which."""

    def __init__(self) -> None:
        self.by: str | None = None

    @property
    def requested(self) -> bool:
        return self.by is not None


_active: Interrupt | None = None  # of the outermost loop of the main thread
_second_ends = False  # in `ending_at_second_signal`


@contextlib.contextmanager
def ending_at_second_signal() -> Iterator[None]:
    """Within this context a second signal ends the process at once, without a traceback: for commands."""
    global _second_ends
    _second_ends = True
    try:
        yield
    finally:
        _second_ends = False


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Within this context the first SIGINT or SIGTERM is noted in what it yields. Loops within loops share one note."""
    global _active
    if threading.current_thread() is not threading.main_thread():
        yield Interrupt()
        return
    if _active is not None:
        yield _active
        return
    # A signal that is ignored (nohup, a shell's background job) stays ignored; one handled outside Python (None) is left alone.
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    note = Interrupt()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def noted(number: int, _: object) -> None:
        restore()
        if _second_ends:
            for number_ in before:
                signal.signal(number_, signal.SIG_DFL)
        note.by = signal.Signals(number).name
        text = f"\n{note.by}: the update under way is finished and saved; a second signal ends the run at once\n"
        with contextlib.suppress(OSError, ValueError):  # nobody reads standard error any more
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())

    for number in before:
        signal.signal(number, noted)
    _active = note
    try:
        yield note
    finally:
        _active = None
        restore()
