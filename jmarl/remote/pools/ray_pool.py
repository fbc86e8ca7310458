"""Play an environment on a cluster of Ray: the interface of the process pool, with actors for processes.

`LockStep(RayPool(env, workers=8))` connects to the cluster of RAY_ADDRESS, or to the one of this machine (`ray start --head`).
All nodes must be able to import jmarl and the environment's module; `ray.init(runtime_env=...)` before can send it.
"""

import importlib
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jmarl.envs.base import class_name
from jmarl.envs.pool import Lost, Workers, pickled_result

MAX_FAILED_STARTS = 2  # of as many actors in a row as the pool has


class Actor:
    """Holds the environment in a process of the cluster."""

    def __init__(self, env: bytes, path: list[str]):
        sys.path += [place for place in path if place not in sys.path]  # as in the processes of `Pool`
        self.env = pickle.loads(env)

    def call(self, function: Callable, call: tuple) -> bytes:
        """Return what function(env, *call) returns or raises, pickled."""
        return pickled_result(function, self.env, *call)


class ActorTask(NamedTuple):
    """What an actor does."""

    actor: Any
    call: int | None  # its number; None: the actor starts
    end: float  # when it is late
    late: str  # what it did not do until then


class RayPool(Workers):
    """Workers that are Ray actors, spread over the nodes of a cluster. Each takes a CPU, and waits for a free one."""

    kind = "actors"

    def __init__(self, env: Any, workers: int = 2, timeout: float = 60.0, retries: int = 1, start_timeout: float = 60.0):
        super().__init__(env, workers, timeout, retries, start_timeout)
        try:
            self._ray = importlib.import_module("ray")
        except ImportError as error:
            raise ImportError("a pool of Ray needs the ray package: pip install 'jmarl[ray]'") from error
        self._actors: list[Any] = []
        self._starting: dict[Any, ActorTask] = {}
        self._make_actor: Callable[[], Any] | None = None

    def close(self) -> None:
        """End the actors. The connection is open until the process ends, or calls `ray.shutdown()`."""
        for actor in self._actors if self._ray.is_initialized() else ():
            self._ray.kill(actor)
        self._actors, self._starting, self._make_actor = [], {}, None

    def _start(self) -> Any:
        """Return a new actor, which need not run yet."""
        if self._make_actor is None:
            if not self._ray.is_initialized():
                self._connect()
            env = self._ray.put(self._ray.cloudpickle.dumps(self.env))
            actors = self._ray.remote(Actor).options(num_cpus=1, scheduling_strategy="SPREAD")
            self._make_actor = lambda: actors.remote(env, sys.path)
        self._actors.append(self._make_actor())
        return self._actors[-1]

    def _connect(self) -> None:
        handler, address = signal.getsignal(signal.SIGTERM), os.environ.get("RAY_ADDRESS") or "auto"
        try:
            if place := re.fullmatch(r"(?:ray://)?\[?([\w.:-]+?)\]?:(\d+)", address):  # Ray itself tries for minutes
                socket.create_connection((place[1], int(place[2])), timeout=10.0).close()
            self._ray.init(address, log_to_driver=False, logging_level="warning")
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            raise RuntimeError(f"there is no cluster of Ray at RAY_ADDRESS={address}: `ray start --head` begins one") from error
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray has set one that exits, and a run saves first

    def _end(self, actor: Any) -> None:
        self._actors.remove(actor)
        self._ray.kill(actor)

    def _try(self, function: Callable, calls: Sequence[tuple], indices: Sequence[int]) -> dict[int, Any]:
        """Run calls once; return the result of each, or `Lost`, by index."""
        waiting, results, failed_starts = list(reversed(indices)), {}, 0
        running, self._starting = self._starting, {}

        def begin(actor: Any, call: int | None) -> None:
            reference = actor.__ray_ready__.remote() if call is None else actor.call.remote(function, calls[call])
            limit, verb = (self.start_timeout, "start") if call is None else (self.timeout, "answer")
            running[reference] = ActorTask(actor, call, time.monotonic() + limit, f"did not {verb} within {limit:g} s")

        try:
            for actor in set(self._actors) - {task.actor for task in running.values()} if indices else ():
                begin(actor, None)  # one that died between two calls costs nothing
            while indices and len(self._actors) < self.workers:
                begin(self._start(), None)
            while len(results) < len(indices):
                for reference, result in self._ended(running).items():
                    actor, call, *_ = running.pop(reference)
                    if call is not None:
                        results[call] = result
                    if isinstance(result, Lost):
                        self._end(actor)
                        failed_starts += call is None
                        self._check_starts(failed_starts, result)
                        begin(self._start(), None)
                    elif waiting:
                        failed_starts = 0
                        begin(actor, waiting.pop())
        except BaseException:
            for task in running.values():
                self._end(task.actor)
            raise
        self._starting = running  # the calls have ended
        return results

    def _check_starts(self, failed: int, last: Lost) -> None:
        if failed >= MAX_FAILED_STARTS * self.workers:
            raise RuntimeError(
                f"{failed} actors in a row could not begin with {class_name(self.env)}: the last one {last.reason}. Has a node "
                "of the cluster a free CPU, and can all nodes import jmarl and the module of the environment?"
            )

    def _ended(self, running: dict[Any, ActorTask]) -> dict[Any, Any]:
        """Wait until a task ends or is late; return the results of those."""
        seconds = min(task.end for task in running.values()) - time.monotonic()
        done, waiting = self._ray.wait(list(running), timeout=max(seconds, 0))
        late = {x: Lost(running[x].late) for x in waiting if running[x].end <= time.monotonic()}
        return {x: self._result(x) for x in done} | late

    def _result(self, reference: Any) -> Any:
        """Return the result of a task that has ended, or `Lost`. Raise what the environment raised."""
        try:
            data = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError:  # a state or a message cannot be unpickled there
            raise
        except self._ray.exceptions.RayError as error:  # the actor or its node has died
            return Lost(f"lost its actor ({str(error).strip().splitlines()[-1]:.160})")
        return self._result_of(data, "an actor of the pool") if isinstance(data, bytes) else None
