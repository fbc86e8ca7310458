"""Run several plain functions in lock step, so that their requests are answered together.

A function that plays episodes stops in the middle, wherever it needs completions. To answer the requests of K such functions by
one program, all of them have to be stopped at the same time. Each therefore runs in a thread of its own; so `play` and all that
calls it stay plain functions, and one run needs no thread at all.

Guarantees:
  * One thread runs at a time, so nothing runs concurrently. Function 0 runs until it requests something or returns, then
    function 1, and so on; then the caller's thread answers all requests, and function 0 goes on. The order of calls to
    environments and rewards is the same in every execution.
  * An exception in a function ends all threads, and is raised in the caller with its traceback. So does an exception in the
    caller's thread, such as KeyboardInterrupt: the functions raise `Cancelled` from their request. A function that runs at that
    moment is waited for until its next request: a thread cannot be interrupted from outside.
  * Functions run in a copy of the caller's `contextvars` (NumPy's `errstate` is one). jax keeps its settings in the thread and
    not there: `with jax.enable_x64(True)` of the caller has no effect on what a function itself computes with jax. Requests are
    answered in the caller's thread, with its settings.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Result = TypeVar("Result")
_RETURNED = object()


class Cancelled(BaseException):
    """Ends a function whose request is not answered, because another function or the caller has raised."""


class _Function(Generic[Request, Reply, Result]):
    """A function in a thread of its own, which runs only while `resume` waits for it."""

    def __init__(self, function: Callable[[Callable[[Request], Reply]], Result], threads: ThreadPoolExecutor):
        self.function, self.cancelled = function, False
        self.replies: SimpleQueue[Any] = SimpleQueue()
        self.requests: SimpleQueue[Any] = SimpleQueue()
        self.result = threads.submit(contextvars.copy_context().run, self._run)

    def _run(self) -> Result:
        try:
            self._wait()
            return self.function(self._request)
        finally:
            self.requests.put(_RETURNED)

    def _request(self, request: Request) -> Reply:
        self.requests.put(request)
        return self._wait()

    def _wait(self) -> Any:
        reply = None if self.cancelled else self.replies.get()
        if self.cancelled:
            raise Cancelled
        return reply

    def resume(self, reply: Reply | None) -> Request | None:
        """Let the function run to its next request, and return that; None: it has returned. Raises what it raises."""
        self.replies.put(reply)
        if (request := self.requests.get()) is _RETURNED:
            self.result.result()
            return None
        return request

    def cancel(self) -> None:
        self.cancelled = True
        self.replies.put(None)


def run_in_lock_step(
    functions: Sequence[Callable[[Callable[[Request], Reply]], Result]],
    answer: Callable[[dict[int, Request]], Mapping[int, Reply]],
) -> list[Result]:
    """Run functions in lock step, and return what each returns.

    Args:
        functions: take the function by which they request something, which they may call in their own thread only.
        answer: takes the requests of all functions that wait, by the number of the function, and returns their replies.
    """
    with ThreadPoolExecutor(len(functions), thread_name_prefix="lock_step") as threads:
        running: list[_Function] = []
        try:
            running.extend(_Function(function, threads) for function in functions)
            replies: Mapping[int, Any] = dict.fromkeys(range(len(running)))
            while replies:
                requests = {i: running[i].resume(reply) for i, reply in replies.items()}
                requests = {i: request for i, request in requests.items() if request is not None}
                replies = answer(requests) if requests else {}
            return [function.result.result() for function in running]
        finally:
            for function in running:
                function.cancel()
