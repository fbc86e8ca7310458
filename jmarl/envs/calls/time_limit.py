"""Limit the time that a call of the user may take (host code, no jax)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
LATE = "it did not return within timeout={:g} seconds and was ended"
ABANDONED = "it did not return within timeout={:g} seconds and was abandoned"
SIGNAL = signal.SIGURG  # unused elsewhere, and ignored by default
PAUSE_S = 1.0  # between the attempts to end a call that catches `Late`


class Late(BaseException):
    """Raised inside a call whose time is over. `except Exception` does not catch it."""


def call_within(timeout: float | None, call: Callable[[], T]) -> T:
    """Return what a call returns, or raise what it raises, or a TimeoutError after `timeout` seconds.

    In the main thread the call stays there, because some libraries work nowhere else (those with time limits by signals), and a
    late call is ended by a signal; code in C is ended when it returns to Python. In other threads, which get no signals, the
    call runs in a daemon thread, which is abandoned when it is late; the process does not wait for it.
    """
    if timeout is None:
        return call()
    if threading.current_thread() is threading.main_thread():
        return _call_and_end(timeout, call)
    return _call_and_abandon(timeout, call)


def _call_and_end(timeout: float, call: Callable[[], T]) -> T:
    returned, is_late = threading.Event(), False
    outer = signal.getsignal(SIGNAL)

    def end_call(number: int, frame: FrameType | None) -> None:
        if is_late and not returned.is_set():
            raise Late
        if callable(outer):
            outer(number, frame)

    def watch() -> None:
        nonlocal is_late
        pause = timeout
        while not returned.wait(pause):
            is_late, pause = True, PAUSE_S
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    watcher = threading.Thread(target=watch, name="time_limit", daemon=True)
    signal.signal(SIGNAL, end_call)
    watcher.start()
    try:
        try:
            return call()
        finally:
            returned.set()
    except Late as late:  # its traceback says where the call was
        raise TimeoutError(LATE.format(timeout)).with_traceback(late.__traceback__) from None
    finally:
        returned.set()
        watcher.join()
        signal.signal(SIGNAL, signal.SIG_DFL if outer is None else outer)


def _call_and_abandon(timeout: float, call: Callable[[], T]) -> T:
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # raised in the caller's thread
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="reward", daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise TimeoutError(ABANDONED.format(timeout))
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
