"""Stop a run after its current update on Ctrl+C, SIGTERM or SIGUSR1 (which queues send before a time limit), when its row and
checkpoint are written.

The first signal only sets a flag, which the loop reads between updates. A second signal acts as without this module: in a
notebook or script Ctrl+C raises KeyboardInterrupt and SIGTERM ends the process; commands end at once on either. Before the loop
Ctrl+C raises KeyboardInterrupt, and `raised_again` keeps Python from dropping it.
Left out: threads other than the main one, where Python delivers no signals; training in them continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Iterator

from jmarl.processes.ending import Interrupted as Interrupted  # as of a run inside a larger one, which stops too

EXIT_INTERRUPTED = 75  # exit code of a command whose run can be resumed: EX_TEMPFAIL, "try again"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclasses.dataclass
class Interrupt:
    """The flag that a signal sets."""

    by: str | None = None  # name of the signal; None: there was none
    raises: bool = False  # whether the signal also raises `Stopped`

    @property
    def requested(self) -> bool:
        """Whether the run should stop."""
        return self.by is not None

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Let the signal raise `Stopped`: for work that changes nothing and that the resumed run repeats."""
        self.raises = True
        try:
            yield
        finally:
            self.raises = False


class Stopped(KeyboardInterrupt):  # which code of users does not take for an error of its own
    """A signal has come."""


def _descriptor() -> int:
    """Return the file descriptor of standard error; in a notebook, which shows that as an error, the one of standard output."""
    if "ipykernel" in sys.modules:
        return sys.__stdout__.fileno() if sys.__stdout__ else 1
    return sys.__stderr__.fileno() if sys.__stderr__ else 2


def line_of_ignored() -> str:
    """Return a line that says that Ctrl+C is ignored, as it is in a job that a script starts in the background; else an empty
    text."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        return ""
    return (
        f"SIGINT is ignored here, as in a background job of a script: Ctrl+C does not stop this run, `kill {os.getpid()}` does"
    )


_active: Interrupt | None = None  # the flag of the outermost loop in the main thread
_second_ends = False  # set by `ending_at_second_signal`


@contextlib.contextmanager
def ending_at_second_signal() -> Iterator[None]:
    """End the process at once on a second signal, without a traceback: for commands."""
    global _second_ends
    _second_ends = True
    try:
        yield
    finally:
        _second_ends = False


@contextlib.contextmanager
def raised_again() -> Iterator[None]:
    """Raise a KeyboardInterrupt again that Python has only printed, because it was raised in a callback whose caller takes no
    errors: JAX has one that runs with every garbage collection, and while programs compile most signals arrive there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    show, main = sys.unraisablehook, threading.get_ident()

    def raise_later(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is KeyboardInterrupt:  # from a thread, because here it would be dropped once more
            threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            show(dropped)

    sys.unraisablehook = raise_later
    try:
        yield
    finally:
        sys.unraisablehook = show


@contextlib.contextmanager
def interruptible(saves: bool) -> Iterator[Interrupt]:
    """Yield the flag that the first of `SIGNALS` sets. Nested loops share one flag.

    saves: whether the run writes a checkpoint when it ends early; only for the message."""
    global _active
    if threading.current_thread() is not threading.main_thread():
        yield Interrupt()
        return
    if _active is not None:
        yield _active
        return
    # Ignored signals (nohup, a background job of a shell) stay ignored, and handlers from outside Python (None) are unchanged.
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    if handlers.get(signal.SIGUSR1) is not signal.SIG_DFL:  # a program that has a use of its own for it keeps its handler
        handlers.pop(signal.SIGUSR1, None)
    flag = Interrupt()
    then = " and saved" if saves else ", and nothing is saved because the run makes no checkpoints"

    def restore(end_at_once: bool = False) -> None:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if end_at_once else handler)

    def set_flag(number: int, _: object) -> None:
        restore(end_at_once=_second_ends)
        flag.by = signal.Signals(number).name
        text = f"\n{flag.by}: the current update is finished{then}; a second signal ends the run at once\n"
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            os.write(_descriptor(), text.encode())
        if flag.raises:
            raise Stopped

    for number in handlers:
        signal.signal(number, set_flag)
    _active = flag
    try:
        yield flag
    finally:
        _active = None
        restore()
