"""Play an environment in several processes: calls run at once, each with a time limit, and lost calls are repeated.

The processes are spawned, never forked, because this process may have started JAX. The environment is pickled to them, and a
script that trains with a pool does its work under `if __name__ == "__main__":` (see `multiprocessing`).
"""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
from pebble import ProcessExpired, ProcessPool

from jmarl.config import TaskConfig
from jmarl.envs.base import Observations, Step, TextEnvironment, Texts, class_name
from jmarl.envs.calls.arguments import BoundReward
from jmarl.envs.calls.awaiting import awaited
from jmarl.envs.calls.user_code import calling, notes_of, place_of
from jmarl.envs.messages import SimulatedEnvironment, as_text_environment
from jmarl.envs.reward_values import value_list
from jmarl.envs.vector import Engine, Fault, InProcess, LockStep, reset_once, step_once
from jmarl.lazy import Table

MAX_LOST_BATCHES = 3  # as many batches in a row without one answer are an error

_env: Any = None  # the environment, in a process of the pool


def _set_environment(env: Any) -> None:
    global _env
    _env = env


class Raised(NamedTuple):
    """An error that the environment raised in its process."""

    error: Exception
    trace: str


class Lost(NamedTuple):
    """Stands for the result of a call that took too long or lost its process."""

    reason: str


def pickled_result(call: Callable, *arguments: Any) -> bytes:
    """Return the pickled result of a call, or a pickled `Raised`, also for a result that cannot be pickled."""
    try:
        return pickle.dumps(call(*arguments))
    except Exception as error:
        return pickle.dumps(raised_of(error))


def raised_of(error: Exception) -> Raised:
    """Return an error and its traceback in a form that can be pickled."""
    trace = traceback.format_exc()
    try:
        return Raised(pickle.loads(pickle.dumps(error)), trace)
    except Exception:  # user-defined errors often cannot be pickled, and fail in many ways: send their text
        text = RuntimeError(f"{type(error).__name__}: {error}")
        text.__notes__ = notes_of(error)
        return Raised(text, trace)


def _pickled_result(call: Callable, *arguments: Any) -> bytes:
    """Call a function with the environment of this process."""
    return pickled_result(call, _env, *arguments)


class Workers(Engine):
    """What engines with workers share: which calls are repeated, and what is an error. Close them, or use them in `with`.

    A call that takes too long or loses its worker is repeated; after that it is a `Fault`, which masks the joint action. An
    error that the environment raises is raised in this process. A worker that dies or hangs between two calls costs nothing:
    it is replaced. If the workers do not start, or MAX_LOST_BATCHES batches in a row had no answer at all, that is an error.

    Args:
        env: a `TextEnvironment` or `SimulatedEnvironment` that can be pickled.
        workers: how many there are.
        timeout: seconds that one call may take; then its worker is killed and replaced.
        retries: how often a lost call is repeated.
        start_timeout: seconds that the workers may take to start.
    """

    kind = "workers"  # the word for them in messages

    def __init__(self, env: Any, workers: int = 2, timeout: float = 60.0, retries: int = 1, start_timeout: float = 60.0):
        if workers < 1 or timeout <= 0 or retries < 0 or start_timeout <= 0:
            raise ValueError(
                f"workers={workers}, timeout={timeout}, retries={retries}, start_timeout={start_timeout}: needs workers >= 1, "
                "timeout > 0, retries >= 0, start_timeout > 0"
            )
        self.env: TextEnvironment = as_text_environment(env)
        self.workers, self.timeout, self.retries, self.start_timeout = workers, timeout, retries, start_timeout
        self._lost_batches = 0  # in a row
        self._has_answered = False

    def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[tuple[Any, Observations] | Fault]:
        return self.call_all(reset_once, list(zip(tasks, seeds, strict=True)))

    def step(self, states: Sequence[Any], messages: Texts, seeds: Sequence[int]) -> list[Step | Fault]:
        return self.call_all(step_once, list(zip(states, messages, seeds, strict=True)))

    def call_all(self, function: Callable, calls: Sequence[tuple]) -> list[Any]:
        """Return the results of function(env, *call) in the order of the calls; a `Fault` where every try was lost."""
        results: dict[int, Any] = {}
        pending = list(range(len(calls)))
        for _ in range(1 + self.retries):
            results |= self._try(function, calls, pending)
            pending = [i for i in pending if isinstance(results[i], Lost)]
        for i in pending:
            results[i] = Fault(f"{class_name(self.env)} {results[i].reason}, {1 + self.retries} times")
        self._lost_batches = self._lost_batches + 1 if calls and len(pending) == len(calls) else 0
        if self._lost_batches >= MAX_LOST_BATCHES:
            raise RuntimeError(
                f"{self._lost_batches} batches in a row had no answer from any of {self.workers} {self.kind}: "
                f"{results[0].reason}. Is what the environment needs still running?"
            )
        return [results[i] for i in range(len(calls))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _try(self, function: Callable, calls: Sequence[tuple], indices: Sequence[int]) -> dict[int, Any]:
        """Run calls once; return the result of each, or `Lost`, by index."""
        raise NotImplementedError

    def _result_of(self, data: bytes, place: str) -> Any:
        """Return what `pickled_result` has pickled, or raise the error. place: where it was raised."""
        result = pickle.loads(data)
        self._has_answered = True
        if isinstance(result, Raised):
            result.error.add_note(f"in {place}:\n{result.trace}")
            raise result.error
        return result


class Pool(Workers):
    """Workers that are processes of this machine: `LockStep(Pool(env, workers=4, timeout=10))`. See `Workers`."""

    kind = "processes"

    def __init__(self, env: Any, workers: int = 2, timeout: float = 60.0, retries: int = 1, start_timeout: float = 60.0):
        super().__init__(env, workers, timeout, retries, start_timeout)
        self._pool = self._start()

    def close(self) -> None:
        """End the processes."""
        self._pool.stop()
        self._pool.join()

    def _start(self) -> ProcessPool:
        spawn = multiprocessing.get_context("spawn")
        return ProcessPool(self.workers, context=spawn, initializer=_set_environment, initargs=(self.env,))

    def _restart(self) -> None:
        self.close()
        self._pool = self._start()

    def _try(self, function: Callable, calls: Sequence[tuple], indices: Sequence[int]) -> dict[int, Any]:
        """Run calls once; return the result of each, or `Lost`, by index."""
        if not self._pool.active:  # a process died while idle, which breaks pebble's pool
            self._restart()
        futures = {i: self._pool.schedule(_pickled_result, args=(function, *calls[i]), timeout=self.timeout) for i in indices}
        results, stuck = {}, False
        try:
            for i, future in futures.items():
                # The calls before this one have ended, so it is answered or killed within this time. If not, no call is:
                # pebble's processes share a lock, which a process that was stopped or killed may hold.
                stuck = stuck or not wait([future], self.start_timeout + self.timeout).done
                results[i] = Lost("has processes that do not react") if stuck and not future.done() else self._result(future)
        except BaseException:
            for future in futures.values():
                future.cancel()
            raise
        if stuck:
            self._restart()
        return results

    def _result(self, future: Future) -> Any:
        """Return the result of a call that has ended, or `Lost`. Raise what the environment raised."""
        try:
            data = future.result()
        except TimeoutError:
            return Lost(f"did not answer within {self.timeout:g} s")
        except ProcessExpired as error:
            return Lost(f"lost its process (code {error.exitcode})")
        except BrokenProcessPool as error:
            if self._has_answered:
                return Lost("lost all its processes")
            raise RuntimeError(
                f"the processes of the pool could not begin with {class_name(self.env)}: its class must be in a module that "
                "they can import (not in a notebook or a command line), and a script works under if __name__ == '__main__'"
            ) from error
        return self._result_of(data, "a process of the pool")


# --- rewards ----------------------------------------------------------------------------------------------------------


class Rewards(NamedTuple):
    """What the workers of a pool hold: reward functions."""

    functions: list[BoundReward]


class Failed(NamedTuple):
    """What a reward function raised in a worker."""

    raised: Raised


def call_reward(rewards: Rewards, number: int, texts: list, arguments: dict, rng: np.random.Generator) -> list | Failed:
    """Call a reward function in a worker."""
    try:
        with calling(function=rewards.functions[number].func):
            return value_list(awaited(rewards.functions[number](texts, arguments | {"rng": rng})))
    except SystemExit as error:
        return Failed(raised_of(RuntimeError(f"exit({error.code}) was called in {place_of(error)}")))
    except Exception as error:
        return Failed(raised_of(error))


def call_rewards(workers: Workers, calls: Sequence[tuple]) -> list[list | BaseException]:
    """Return the values of calls in the workers of a pool, or what they raised."""
    returned: list[list | BaseException] = []
    for result in workers.call_all(call_reward, calls):
        if isinstance(result, Failed):
            result.raised.error.add_note(f"in a worker of the pool:\n{result.raised.trace}")
            result = result.raised.error
        returned.append(TimeoutError(result.reason) if isinstance(result, Fault) else result)
    return returned


# --- the pool of a task ------------------------------------------------------------------------------------------------------


POOLS = Table[Callable[..., Workers]]({"processes": "jmarl.envs.pool:Pool", "ray": "jmarl.remote:RayPool"})


def pool_of(task: TaskConfig) -> Callable[..., Workers] | None:
    """Return what makes the pool of a task from an environment or from rewards; None without one."""
    if task.pool is None:
        return None
    limit = {} if task.timeout is None else {"timeout": task.timeout}
    return partial(POOLS[task.pool], workers=task.pool_workers, **limit)


def in_pool(env: Any, task: TaskConfig, num_turns: int) -> Any:
    """Return an environment that is played in the pool of a task; env itself without one.

    num_turns: the limit for an environment that sets none."""
    pool = pool_of(task)
    if pool is None:
        return env
    if isinstance(env, LockStep) and not isinstance(env.engine, InProcess):
        raise ValueError(
            f"pool={task.pool!r} is not allowed for {class_name(env.env)}: its servers play it, in processes of their own "
            "with jmarl serve --workers; remove pool"
        )
    if not isinstance(env, TextEnvironment | SimulatedEnvironment):
        raise ValueError(
            f"pool={task.pool!r} is not allowed for {class_name(env)}: it answers all episodes of a step in one call, and "
            "a pool needs a TextEnvironment, which answers one; remove pool"
        )
    return LockStep(pool(as_text_environment(env, num_turns)))
