"""Environments in processes of their own: several at once, each call with a time limit, lost calls made again.

The processes are spawned, never forked: this one may have started JAX. So the environment is pickled to them, and a script
that trains with a pool has its work under `if __name__ == "__main__":`, as `multiprocessing` says.
"""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from jmarl.envs.base import Observations, Step
from jmarl.envs.messages import as_text_environment
from jmarl.envs.vector import Engine, Fault, reset_once, step_once

_env: Any = None  # of a process of the pool


def _begin(env: Any) -> None:
    global _env
    _env = env


class Raised(NamedTuple):
    """What an environment raised in its process."""

    error: Exception
    trace: str


def _made(call: Callable, *arguments: Any) -> bytes:
    """What a call returns or raises, pickled here, so that what cannot be pickled is an error that has a name."""
    try:
        return pickle.dumps(call(_env, *arguments))
    except Exception as error:
        trace = traceback.format_exc()
        try:
            return pickle.dumps(Raised(pickle.loads(pickle.dumps(error)), trace))
        except Exception:  # errors of one's own often cannot be pickled, in whatever way: their text can
            return pickle.dumps(Raised(RuntimeError(f"{type(error).__name__}: {error}"), trace))


class Pool(Engine):
    """An engine (`lockstep.Engine`): `LockStep(Pool(env, workers=4, timeout=10))`. Close it, or use it as a context.

    workers: processes. timeout: seconds a call may take; its process is then killed and another one started. retries: how often
    a call is made again that took too long or lost its process; then it is a `Fault`, which masks the joint action. An error
    that the environment raises is raised here. start_timeout: seconds that processes may take to start.

    A process that dies or hangs between two calls costs nothing: the processes are started anew. Where they do not start, or
    `BATCHES` batches in a row had not one answer, the environment is taken for dead, and that is an error.
    """

    BATCHES = 3

    def __init__(self, env: Any, workers: int = 2, timeout: float = 60.0, retries: int = 1, start_timeout: float = 60.0):
        if workers < 1 or timeout <= 0 or retries < 0 or start_timeout <= 0:
            raise ValueError(
                f"workers={workers}, timeout={timeout}, retries={retries}, start_timeout={start_timeout}: needs workers >= 1, "
                "timeout > 0, retries >= 0, start_timeout > 0"
            )
        self.env, self.workers, self.timeout, self.retries = as_text_environment(env), workers, timeout, retries
        self.start_timeout = start_timeout
        self._unanswered = 0  # batches in a row
        self._began = False  # whether a call was ever answered
        self._pool = self._started()

    def _started(self) -> ProcessPool:
        spawn = multiprocessing.get_context("spawn")
        return ProcessPool(self.workers, context=spawn, initializer=_begin, initargs=(self.env,))

    def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[tuple[Any, Observations] | Fault]:
        return self._all(reset_once, list(zip(tasks, seeds, strict=True)))

    def step(self, states: Sequence[Any], messages: Sequence[Sequence[str]], seeds: Sequence[int]) -> list[Step | Fault]:
        return self._all(step_once, list(zip(states, messages, seeds, strict=True)))

    def _all(self, call: Callable, calls: Sequence[tuple]) -> list[Any]:
        found: list[Any] = [None] * len(calls)
        lost = list(range(len(calls)))
        for _ in range(1 + self.retries):
            lost = self._ask(call, calls, lost, found)
        self._unanswered = self._unanswered + 1 if calls and len(lost) == len(calls) else 0
        if self._unanswered >= self.BATCHES:
            raise RuntimeError(
                f"{self._unanswered} batches in a row had no answer from any of {self.workers} processes: "
                f"{found[0].reason}. Is what the environment needs still running?"
            )
        return found

    def _ask(self, call: Callable, calls: Sequence[tuple], asked: Sequence[int], found: list[Any]) -> list[int]:
        """Make calls, of which found[i] is then the answer, or why there is none. Returns those that were lost."""
        if not self._pool.active:  # a process died that had nothing to do, of which pebble's pools break
            self._restart()
        made = {i: self._pool.schedule(_made, args=(call, *calls[i]), timeout=self.timeout) for i in asked}
        lost, stuck = [], False
        try:
            for i, future in made.items():
                # The calls before it have ended, so this one is answered or killed in that time; unless none are, because
                # pebble's processes share a lock, which one that is stopped or killed may hold.
                stuck = stuck or not wait([future], self.start_timeout + self.timeout).done
                if stuck and not future.done():
                    found[i] = Fault(f"{type(self.env).__name__}: its processes do not react, {1 + self.retries} times")
                    lost.append(i)
                elif not self._answered(future, i, found):
                    lost.append(i)
        except BaseException:
            for future in made.values():
                future.cancel()
            raise
        if stuck:
            self._restart()
        return lost

    def _answered(self, future: Future, i: int, found: list[Any]) -> bool:
        """Whether a call was answered; found[i] is the answer, or why there is none."""
        try:
            made = pickle.loads(future.result())
        except (TimeoutError, ProcessExpired) as error:
            slow = isinstance(error, TimeoutError)
            why = f"did not answer within {self.timeout:g} s" if slow else f"lost its process (code {error.exitcode})"
            found[i] = Fault(f"{type(self.env).__name__} {why}, {1 + self.retries} times")
            return False
        except BrokenProcessPool as error:
            if self._began:
                found[i] = Fault(f"{type(self.env).__name__} lost all its processes, {1 + self.retries} times")
                return False
            raise RuntimeError(
                f"the processes of the pool could not begin with {type(self.env).__name__}: its class must be in a module "
                "that they can import (not in a notebook or a command line), and a script works under if __name__ == '__main__'"
            ) from error
        self._began = True
        if isinstance(made, Raised):
            made.error.add_note(f"in a process of the pool:\n{made.trace}")
            raise made.error
        found[i] = made
        return True

    def _restart(self) -> None:
        self.close()
        self._pool = self._started()

    def close(self) -> None:
        """End the processes."""
        self._pool.stop()
        self._pool.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
