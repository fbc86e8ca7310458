"""Engines of a server, and the thread in which an environment or a reward is called (host code, no jax).

Every environment is called as training calls it: one call after the other, in one thread, or in the processes of a `Pool`.
Calls of several clients take turns, so that a long batch of one does not block the others. Left out: ending a call that hangs
in the thread, which only a process of its own allows (`workers`); its thread is left to itself, and another one goes on.
"""

import asyncio
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from jmarl.envs.base import Observations, Step, TextEnvironment, Texts, class_name
from jmarl.envs.messages import SimulatedEnvironment, as_text_environment
from jmarl.envs.options import WithOptions
from jmarl.envs.pool import Pool
from jmarl.envs.vector import Engine, Fault, InProcess
from jmarl.remote.gate import Code, GrpcRefusal

SLICE_S = 0.05  # calls of one batch that are made before those of others
MAX_AT_ONCE = 256  # calls that an engine gets at once
MAX_HANGING = 8  # threads of an environment that are left to themselves


class NoDraws:
    """Stands for the random numbers of a whole batch, which depend on the other calls in it. Any use is an error."""

    def __getattr__(self, name: str) -> Any:
        raise TypeError(
            f"it draws random numbers for a whole batch (rng.{name}), and batches of a server are not those of training: "
            "write it as a TextEnvironment, where each episode has its own rng"
        )


class WholeBatch(Engine):
    """An `Environment` of many episodes, such as `code`, as an engine: all calls in one."""

    def __init__(self, env: Any):
        self.env, self.whole = env, env  # typed as `Engine` and as what it is

    def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[tuple[Any, Observations] | Fault]:
        states, prompts = self.whole.reset(tasks, NoDraws())
        return [(state, list(texts)) for state, texts in zip(states, zip(*prompts, strict=True), strict=True)]

    def step(self, states: Sequence[Any], messages: Texts, seeds: Sequence[int]) -> list[Step | Fault]:
        answer = self.whole.step(states, [list(texts) for texts in zip(*messages, strict=True)], NoDraws())
        going = [j for j in range(len(states)) if not answer.done[j]]
        later, prompts = self.whole.observe([answer.after[j] for j in going]) if going else ([], [])
        nexts = dict(zip(going, zip(later, zip(*prompts, strict=True), strict=True), strict=True))
        result, steps = answer.result, []
        for j in range(len(states)):
            state, texts = nexts.get(j, (None, ()))
            info, parts = ({name: float(x[j]) for name, x in numbers.items()} for numbers in (result.measures, result.parts))
            steps.append(Step(state, list(texts), result.rewards[j].tolist(), bool(answer.done[j]), info, False, parts))
        return steps


class Processed(Engine):
    """An engine whose rewards are processed by the options of the environment (reward_scale, reward_bias, reward_clip)."""

    def __init__(self, engine: Engine, options: WithOptions):
        self.engine, self.options, self.env = engine, options, engine.env

    def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[tuple[Any, Observations] | Fault]:
        return self.engine.reset(tasks, seeds)

    def step(self, states: Sequence[Any], messages: Texts, seeds: Sequence[int]) -> list[Step | Fault]:
        steps = self.engine.step(states, messages, seeds)
        return [
            step if isinstance(step, Fault) else self.options.processed(step, texts)
            for step, texts in zip(steps, messages, strict=True)
        ]


def engine_of(env: Any, workers: int, timeout: float, num_turns: int) -> tuple[Engine, bool]:
    """Return an engine for what `make` returned, and whether it works on several calls at once.

    workers: processes of a pool; 0: this process. timeout: seconds of a call in a pool. num_turns: of an episode, where the
    environment declares none; 0: unknown.

    Raises:
        ValueError: the object is no environment that can be served.
    """
    played = env.env if isinstance(env, WithOptions) else env
    played = as_text_environment(played, num_turns) if num_turns else as_text_environment(played)
    if isinstance(played, TextEnvironment):
        engine: Engine = Pool(played, workers, timeout) if workers else InProcess(played)
        return (Processed(engine, env) if isinstance(env, WithOptions) else engine), workers > 0
    if not all(callable(getattr(played, name, None)) for name in ("reset", "step", "observe")) or not hasattr(played, "roles"):
        raise ValueError(
            f"{class_name(played)} cannot be served: it is neither a TextEnvironment, nor a SimulatedEnvironment, nor an "
            "environment of many episodes with roles, reset, step and observe"
        )
    if workers:
        raise ValueError(
            f"workers={workers} has no effect on {class_name(played)}, which plays a whole batch itself: remove it"
        )
    return WholeBatch(played), True


def plays_one_episode(env: Any) -> bool:
    """Return whether what `make` returned plays one episode, so that processes can play several of its episodes."""
    played = env.env if isinstance(env, WithOptions) else env
    return isinstance(played, TextEnvironment | SimulatedEnvironment)


def declares_turns(env: Any) -> bool:
    """Return whether the number of turns of what `make` returned is its own, not that of the run."""
    return not isinstance(env, SimulatedEnvironment) or env.max_turns is not None


def all_results(method: Callable, calls: Sequence[tuple]) -> list[Any]:
    """Return the results of calls of a method of an engine."""
    results = method(*map(list, zip(*calls, strict=True)))
    if len(results) != len(calls):
        raise RuntimeError(f"{len(results)} results of {len(calls)} calls")
    return results


def some_results(method: Callable, calls: Sequence[tuple], bulk: bool, results: list[Any]) -> None:
    """Append the results of the first calls, at least one, or in place of a result the error that a call raised.

    method: of an engine. bulk: whether it works on several calls at once; otherwise it gets one after the other, as many as
    there is time for.
    """
    if bulk:
        try:
            results += all_results(method, calls)
            return
        except Exception as error:
            if len(calls) == 1:
                results.append(error)
                return
    end = time.monotonic() + SLICE_S
    for call in calls:  # after an error of all: of which call is it?
        try:
            results += all_results(method, [call])
        except Exception as error:
            results.append(error)
        if time.monotonic() > end:
            return


class Turns:
    """Does one work after the other, in the order in which they came. A work that has begun goes on when nobody waits for it
    any more; one that has not is given up."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return the result of a work when it has had its turn, or raise what it raises."""
        await self._lock.acquire()
        task = asyncio.get_running_loop().create_task(work())
        task.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(task)


class Lane:
    """A thread that makes one call after the other. Calls wait for their turn in the order in which they came.

    Args:
        name: what errors call it.
        timeout: seconds that a call may take; None: no limit. The thread of a call that takes longer is left to itself.
    """

    def __init__(self, name: str, timeout: float | None):
        self.name, self.timeout = name, timeout
        self.hanging: list[threading.Thread] = []
        self._turns = Turns()
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    async def run(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call, or raise what it raises. Raises `GrpcRefusal` if it takes too long."""
        return await self._turns.run(lambda: self._run(call))

    async def _run(self, call: Callable[[], Any]) -> Any:
        self.hanging = [thread for thread in self.hanging if thread.is_alive()]
        if len(self.hanging) >= MAX_HANGING:
            raise GrpcRefusal(Code.UNAVAILABLE, f"{self.name} hangs in {MAX_HANGING} calls on this server: try another one")
        if self._thread is None:  # not before, so that an environment that nobody uses has no thread
            self._thread = threading.Thread(target=_work, args=(self._calls,), name=f"jmarl {self.name}", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        result: asyncio.Future = loop.create_future()
        self._calls.put(lambda: _answer(call, result, loop))
        try:
            async with asyncio.timeout(self.timeout):
                value, error = await result
        except TimeoutError:
            self.hanging.append(self._thread)
            self.close()
            raise GrpcRefusal(Code.DEADLINE_EXCEEDED, f"{self.name} did not answer within {self.timeout:g} s") from None
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the thread after its call. A later call starts another one."""
        self._calls.put(None)
        self._calls, self._thread = queue.SimpleQueue(), None


def _work(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Make calls until there is None in their place."""
    while (call := calls.get()) is not None:
        call()


def _answer(call: Callable[[], Any], result: asyncio.Future, loop: asyncio.AbstractEventLoop) -> None:
    """Make a call, and set its result in the thread of the server."""
    value, error = None, None
    try:
        value = call()
    except BaseException as raised:  # also exit() of the user's code: the thread goes on
        error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__} was raised")
    with contextlib.suppress(RuntimeError):  # the server has ended
        loop.call_soon_threadsafe(_set, result, (value, error))


def _set(result: asyncio.Future, value: Any) -> None:
    if not result.done():  # nobody waits any more
        result.set_result(value)


@dataclasses.dataclass(eq=False)
class Job:
    """Calls of one request."""

    method: Callable  # of an engine
    calls: list[tuple]
    results: list[Any]  # of the first calls
    is_over: asyncio.Future


class EnvironmentPlayer:
    """Plays calls of an environment for all clients: in each turn of the thread some calls of every client that waits.

    Args:
        engine: of the environment.
        is_bulk: whether it works on several calls at once.
        lane: the thread.
    """

    def __init__(self, engine: Engine, is_bulk: bool, lane: Lane):
        self.engine, self.is_bulk, self.lane = engine, is_bulk, lane
        self._jobs: list[Job] = []
        self._work: asyncio.Task | None = None

    async def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[Any]:
        """Return the first states and observations of episodes, or a `Fault` or an error."""
        return await self._play(self.engine.reset, list(zip(tasks, seeds, strict=True)))

    async def step(self, states: Sequence[Any], messages: Texts, seeds: Sequence[int]) -> list[Any]:
        """Return the results of joint actions, or a `Fault` or an error."""
        return await self._play(self.engine.step, list(zip(states, messages, seeds, strict=True)))

    async def _play(self, method: Callable, calls: list[tuple]) -> list[Any]:
        job = Job(method, calls, [], asyncio.get_running_loop().create_future())
        if not calls:
            return []
        self._jobs.append(job)
        if self._work is None:
            self._work = asyncio.create_task(self._play_all())
        await job.is_over
        return job.results

    async def _play_all(self) -> None:
        """Play calls until none waits."""
        while self._jobs:
            method = self._jobs[0].method
            calls = [(job, call) for job in self._jobs if job.method == method for call in job.calls[len(job.results) :]]
            calls = calls[:MAX_AT_ONCE]
            results = await self._results(method, [call for _, call in calls])
            for (job, _), result in zip(calls, results, strict=False):
                job.results.append(result)
            self._put_last({id(job): job for job, _ in calls[: len(results)]}.values())
        self._work = None

    def _put_last(self, jobs: Iterable[Job]) -> None:
        """Let other jobs go before these, which have had some of their calls played; end those that have had all."""
        for job in jobs:
            self._jobs.remove(job)
            if len(job.results) < len(job.calls):
                self._jobs.append(job)
            else:
                job.is_over.set_result(None)

    async def _results(self, method: Callable, calls: list[tuple]) -> list[Any]:
        """Return the results of the first calls, or in place of a result the error that a call raised."""
        results: list[Any] = []
        try:
            await self.lane.run(lambda: some_results(method, calls, self.is_bulk, results))
        except GrpcRefusal as refused:
            hangs = refused.code is Code.DEADLINE_EXCEEDED and not self.is_bulk  # the first one without a result
            return [*results, *[refused] * (1 if hangs else len(calls) - len(results))]
        except Exception as error:
            return [error] * len(calls)
        return results

    def close(self) -> None:
        """End the thread, and the processes of a pool."""
        self.lane.close()
        engine = self.engine.engine if isinstance(self.engine, Processed) else self.engine
        if isinstance(engine, Pool):
            engine.close()
