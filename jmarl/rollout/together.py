"""Run several plain functions together: their requests are answered in one call.

A function that plays episodes pauses whenever it needs completions. To answer the requests of K such functions with one
program, all of them must be paused at the same time. So each function runs in a thread of its own. This way `play` and its
callers are plain functions, and a single run needs no thread.

Guarantees:
  * One thread runs at a time, so nothing runs concurrently. Function 0 runs until it makes a request or returns, then
    function 1, and so on; then the caller's thread answers all requests, and function 0 continues. The order of calls to
    environments and rewards is the same in every execution. `CallersEnvironment` makes these calls in the caller's thread,
    because some libraries of rewards work in the main thread only.
  * An exception in a function ends all threads and is raised in the caller with its traceback. An exception in the caller's
    thread, such as KeyboardInterrupt, ends all threads too: the functions raise `Cancelled` from their requests. The caller
    waits for a running function until its next request, because a thread cannot be interrupted from outside.
  * Functions run in a copy of the caller's `contextvars` (NumPy's `errstate` is one). The settings of jax belong to the thread:
    the caller's `with jax.enable_x64(True)` does not affect what a function itself computes with jax. Requests are answered in
    the caller's thread, with its settings.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np

from jmarl.envs.base import Answer, Environment, Texts, special_tokens

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Result = TypeVar("Result")
_RETURNED = object()


class Cancelled(BaseException):
    """Ends a function whose request is not answered, because another function or the caller raised an exception."""


class _Function(Generic[Request, Reply, Result]):
    """A function in its own thread, which runs only while `resume` waits for it."""

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
        """Run the function to its next request and return that, or None if the function has returned. Raises its errors."""
        self.replies.put(reply)
        while callable(request := self.requests.get()):
            self.replies.put(request())
        if request is _RETURNED:
            self.result.result()
            return None
        return request

    def cancel(self) -> None:
        """End the function by raising `Cancelled` from its request."""
        self.cancelled = True
        self.replies.put(None)


class CallersEnvironment:
    """An environment for a function that runs with others, which is called in the caller's thread."""

    def __init__(self, env: Environment, request: Callable[[Callable[[], Any]], Any]):
        self.env, self.request, self.special_tokens = env, request, special_tokens(env)

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Any], list[list[Any]]]:
        return self.request(partial(self.env.reset, items, rng))

    def step(self, states: Sequence[Any], actions: Texts, rng: np.random.Generator) -> Answer:
        return self.request(partial(self.env.step, states, actions, rng))

    def observe(self, after: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        return self.request(partial(self.env.observe, after))


def run_together(
    functions: Sequence[Callable[[Callable[[Request], Reply]], Result]],
    answer: Callable[[dict[int, Request]], Mapping[int, Reply]],
) -> list[Result]:
    """Run functions together, and return their results.

    Args:
        functions: each takes a function request -> reply, which it may call only in its own thread. A request that is callable
            is called in the caller's thread, at once and alone; the reply is what it returns.
        answer: returns the replies to the requests of all waiting functions; both by index of the function.
    """
    with ThreadPoolExecutor(len(functions), thread_name_prefix="together") as threads:
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
