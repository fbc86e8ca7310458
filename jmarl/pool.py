"""Environments in processes of their own: several at once, each call with a time limit, lost calls made again.

The processes are spawned, never forked: this one may have started JAX. So the environment is pickled to them, and a script
that trains with a pool has its work under `if __name__ == "__main__":`, as `multiprocessing` says.
"""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from jmarl.lockstep import Engine, Fault, Observations, Step, reset_once, step_once, text_environment

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
    that the environment raises is raised here.
    """

    def __init__(self, env: Any, workers: int = 2, timeout: float = 60.0, retries: int = 1):
        if workers < 1 or timeout <= 0 or retries < 0:
            raise ValueError(
                f"workers={workers}, timeout={timeout}, retries={retries}: needs workers >= 1, timeout > 0, retries >= 0"
            )
        self.env, self.timeout, self.retries = text_environment(env), timeout, retries
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPool(workers, context=spawn, initializer=_begin, initargs=(self.env,))

    def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[tuple[Any, Observations] | Fault]:
        return self._all(reset_once, list(zip(tasks, seeds, strict=True)))

    def step(self, states: Sequence[Any], messages: Sequence[Sequence[str]], seeds: Sequence[int]) -> list[Step | Fault]:
        return self._all(step_once, list(zip(states, messages, seeds, strict=True)))

    def _all(self, call: Callable, calls: Sequence[tuple]) -> list[Any]:
        found: list[Any] = [None] * len(calls)
        lost = list(range(len(calls)))
        for _ in range(1 + self.retries):
            asked = {i: self._pool.schedule(_made, args=(call, *calls[i]), timeout=self.timeout) for i in lost}
            try:
                lost = [i for i, future in asked.items() if not self._answered(future, i, found)]
            except BaseException:
                for future in asked.values():
                    future.cancel()
                raise
        return found

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
            raise RuntimeError(
                f"the processes of the pool could not begin with {type(self.env).__name__}: its class must be in a module "
                "that they can import (not in a notebook or a command line), and a script works under if __name__ == '__main__'"
            ) from error
        if isinstance(made, Raised):
            made.error.add_note(f"in a process of the pool:\n{made.trace}")
            raise made.error
        found[i] = made
        return True

    def close(self) -> None:
        """End the processes."""
        self._pool.stop()
        self._pool.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
