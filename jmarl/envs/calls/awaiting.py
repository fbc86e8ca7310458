"""Wait for what `async def` functions of the user return (host code, no jax).

Rewards, formatters, transitions, environments and tools may be coroutine functions, or functions that return an awaitable. All
awaitables of a call run at once, in one event loop per thread that stays open between calls, because HTTP clients are bound to
the loop that they were first used in. The loop runs in the thread that calls, also if that thread is inside another running
loop, as a cell of a notebook is: the other loop rests meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from typing import Any

from jmarl.envs.calls.copies import FIXED
from jmarl.envs.calls.time_limit import LATE, Late


class _ThreadLoop(threading.local):
    """The event loop of a thread."""

    loop: asyncio.AbstractEventLoop | None = None
    holder: _Holder  # lives as long as the thread


FINISHED = FIXED | {list, tuple, dict}  # types that are not awaitable, of which most values are


class _Holder:
    """Closes a loop when it is deleted, or when the process ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        weakref.finalize(self, loop.close)


_thread = _ThreadLoop()


def is_async(func: Callable) -> bool:
    """Return whether a function, a partial, a bound method or an object with `__call__` is a coroutine function."""
    while isinstance(func, functools.partial):
        func = func.func
    return any(inspect.iscoroutinefunction(x) or inspect.isasyncgenfunction(x) for x in (func, type(func).__call__))


def awaited(value: Any) -> Any:
    """Return a value; if it is awaitable, what it returns. The items of an asynchronous generator are returned as a list."""
    return wait_for_all([value])[0] if needs_waiting(value) else value


def needs_waiting(value: Any) -> bool:
    """Return whether a value is an awaitable, an asynchronous iterator, or a list with some of them."""
    if type(value) in FIXED:
        return False
    if isinstance(value, list | tuple):
        return any(type(entry) not in FINISHED and inspect.isawaitable(entry) for entry in value)
    return inspect.isawaitable(value) or isinstance(value, AsyncIterable)


def wait_for_all(values: Sequence[Any], timeout: float | None = None, return_exceptions: bool = False) -> list[Any]:
    """Return the results of values that need waiting, all at once; others are returned unchanged.

    Args:
        values: see `needs_waiting`.
        timeout: seconds that each may take; a slower one is cancelled and raises a TimeoutError.
        return_exceptions: return exceptions in place of results. Otherwise the first one is raised, and the others are
            cancelled.
    """
    if _thread.loop is None:
        _thread.loop = asyncio.new_event_loop()
        _thread.holder = _Holder(_thread.loop)
    # `asyncio.gather` of a function that is no coroutine function has made its future in the thread's default loop.
    others = [value.get_loop() for value in values if asyncio.isfuture(value)]
    loop = next((other for other in others if not other.is_running()), _thread.loop)
    with _no_running_loop():
        results = loop.create_task(_all_results(values, timeout, return_exceptions))
        try:
            return loop.run_until_complete(results)
        finally:
            if not results.done():  # an exception such as KeyboardInterrupt ended the loop
                results.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    loop.run_until_complete(results)
                for value in filter(inspect.iscoroutine, values):
                    value.close()  # also those that had not begun


async def _all_results(values: Sequence[Any], timeout: float | None, return_exceptions: bool) -> list[Any]:
    tasks = [asyncio.ensure_future(_timed_result(value, timeout)) for value in values]
    try:
        return await asyncio.gather(*tasks, return_exceptions=return_exceptions)
    finally:
        for task in tasks:
            task.cancel()


async def _timed_result(value: Any, timeout: float | None) -> Any:
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            return await _result(value)
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(LATE.format(timeout)) from None
        raise
    except Late as late:  # it did not let the loop go on
        raise TimeoutError(LATE.format(timeout)).with_traceback(late.__traceback__) from None
    except SystemExit as error:  # must not end the loop, and the run with it
        raise RuntimeError(f"exit({error.code}) was called") from error


async def _result(value: Any) -> Any:
    if isinstance(value, list | tuple) and needs_waiting(value):
        return list(await asyncio.gather(*map(_result, value)))
    if inspect.isawaitable(value):
        value = await value
        return await _result(value) if needs_waiting(value) else value
    if isinstance(value, AsyncIterable):
        return [entry async for entry in value]
    return value


@contextlib.contextmanager
def _no_running_loop() -> Iterator[None]:
    """Let the running event loop of this thread, if there is one, and its task rest in the context."""
    outer = asyncio._get_running_loop()
    if outer is None:
        yield
        return
    task = asyncio.current_task(outer)
    if task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if task is not None:
            asyncio.tasks._enter_task(outer, task)
