"""Sample for all requests that wait: the agents of a stack in one program, rows of several requests side by side.

A thread takes turns: it puts waiting requests into free slots (`rows.admit`), decodes some tokens of all rows
(`rows.advance`), and delivers them. Prompts and limits are rounded up to a few sizes, and the rows of one size are a pool with
arrays and two programs of its own. A pool opens for its first row and closes after its last. Its programs are compiled in
another thread, while other rows go on.

Requests of an agent and a size begin in the order in which they came. Left out: taking a slot from a row under way, sharing
the keys of equal prompts between requests, meshes that divide more than the agents.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np

from jmarl.config import Sampling
from jmarl.hardware import dtype_on
from jmarl.models.platforms import platform_of
from jmarl.models.sharding import place_agents
from jmarl.sampling.generate import bucket
from jmarl.sampling.stack_program import SampleProgram
from jmarl.sampling.stop_texts import vocabulary
from jmarl.serving.errors import HttpRefusal, stopping
from jmarl.serving.records import OpenPool, Programs, Row, SamplingRequest, Size, Update
from jmarl.serving.requests import MAX_TOP
from jmarl.serving.rows import Joining, PoolProgram, RowPool, admit, advance, empty_pool, likeliest
from jmarl.team import Team

SMALLEST_WIDTH, SMALLEST_CAPACITY = 64, 256  # tokens of the smallest pool: longest prompt, longest completion
SLOT_TOKENS = 2048  # prompt and completion of a slot; pools of longer ones have fewer slots, for the same memory
MAX_POOLS = 4  # open at the same time; each has the keys and values of all its slots in memory


class SamplingEngine:
    """Samples for requests of the agents of a team.

    Args:
        team: the team, on one device or on a mesh that splits only agents.
        params: parameters [A, ...] of each stack.
        settings: of sampling; those that a request has of its own, and max_new_tokens, are not read.
        slots: rows of each parameter set in a pool; fewer in pools of long prompts, see `slots_of`.
        max_waiting: requests that may wait.
        say: prints a line.
    """

    def __init__(
        self,
        team: Team,
        params: Sequence[Any],
        settings: Sampling,
        slots: int = 8,
        max_waiting: int = 64,
        say: Callable[[str], None] = print,
    ):
        self.team, self.params, self.slots, self.max_waiting, self.say = team, params, slots, max_waiting, say
        self.settings = dataclasses.replace(settings, temperature=1.0, top_p=1.0, min_new_tokens=0, stop=())
        self.places = {
            agent: (i, a) for i, spec in enumerate(team.stacks) for a, roles in enumerate(spec.members) for agent in roles
        }  # agent -> number of its stack, and of its parameter set there
        self.waiting = list[SamplingRequest]()
        self.beginning = list[SamplingRequest]()  # neither waiting nor in a slot yet
        self.pools = dict[Size, OpenPool]()
        self.programs = dict[Size, Future[Programs]]()
        self.calls = 0  # of `advance`
        self.changed = threading.Condition()
        self.scoring = threading.Lock()  # one completion at a time: each needs a copy of an agent's weights
        self.stopping = self.has_news = False
        self.failure: BaseException | None = None  # that ended the thread
        self.compiler = ThreadPoolExecutor(1, "compiling")
        self.thread = threading.Thread(target=self.run, name="sampling", daemon=True)

    # --- for other threads ---------------------------------------------------------------------------------------------

    def submit(self, request: SamplingRequest) -> None:
        """Let a request wait for its turn. Raises `HttpRefusal` if too many do, or if the engine stops."""
        with self.changed:
            if self.stopping:
                raise stopping()
            if len(self.waiting) >= self.max_waiting:
                text = f"{len(self.waiting)} requests wait already, which is the limit: try again later"
                raise HttpRefusal(429, text, "too_many_requests", headers={"retry-after": "1"})
            self.waiting.append(request)
            self.has_news = True
            self.changed.notify()

    def num_rows(self) -> int:
        """Return the number of rows under way."""
        return sum(len(pool.places()) for pool in [*self.pools.values()])

    def size_of(self, agent: int, prompt: int, limit: int) -> Size:
        """Return the size of the pool for a prompt and a completion of so many tokens."""
        stack, _ = self.places[agent]
        capacity, context = SMALLEST_CAPACITY, self.team.stacks[stack].config.context
        while capacity < limit:  # in steps of 4: a step of decoding reads little more, and there are fewer programs
            capacity *= 4
        return Size(stack, min(bucket(prompt, SMALLEST_WIDTH), context), min(capacity, context))

    def slots_of(self, size: Size) -> int:
        """Return the number of slots of each parameter set in a pool."""
        return max(1, min(self.slots, self.slots * SLOT_TOKENS // (size.width + size.capacity)))

    def compile(self, size: Size) -> Future[Programs]:
        """Let the programs of a pool be compiled in another thread, unless they are."""
        if size not in self.programs:
            self.programs[size] = future = self.compiler.submit(self._compile, size)
            future.add_done_callback(lambda _: self._wake())
        return self.programs[size]

    def likeliest(self, request: SamplingRequest, ids: Sequence[int], first: int, count: int) -> list[dict[int, float]]:
        """Return the likeliest ids in the place of each token of a completion from `first` on, with their log-probabilities."""
        (stack, a), size = self.places[request.agent], self.size_of(request.agent, len(request.ids), len(ids))
        model = self.team.stacks[stack].config
        prompts, tokens = np.zeros((1, size.width), np.int32), np.zeros((1, 1, size.capacity), np.int32)
        prompts[0, : len(request.ids)], tokens[0, 0, : len(ids)] = request.ids, ids
        arrays = prompts, np.array([len(request.ids)]), tokens, request.temperature or 1.0
        dtype = dtype_on(platform_of(self.params[stack]), self.settings.compute_dtype)
        with self.scoring:
            best = likeliest(self.params[stack], a, *arrays, model=model, dtype=dtype, count=min(MAX_TOP, model.vocab_size))
            logprobs, highest = (x[first : len(ids), :count].tolist() for x in jax.device_get(best))
        return [dict(zip(*row, strict=True)) for row in zip(highest, logprobs, strict=True)]

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def end(self) -> None:
        """Let the thread end after its turn. Requests under way get a `HttpRefusal`."""
        with self.changed:
            self.stopping = True
            self.changed.notify()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self.end()
        self.thread.join()
        self.compiler.shutdown(cancel_futures=True)

    def _wake(self) -> None:
        with self.changed:
            self.has_news = True
            self.changed.notify()

    # --- the thread ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Take turns until `end`. Whatever ends the thread, no request is left without an answer."""
        try:
            self._take_turns()
        except BaseException as error:
            self.failure = error
        finally:
            self.end()
            self._fail_all(stopping(), self.waiting)

    def _take_turns(self) -> None:
        """Take turns; wait while there is nothing to do."""
        while not self.stopping:
            self.has_news = False
            try:
                busy = self.turn()
            except Exception as error:  # such as a lack of memory: these rows are lost, the next ones may fit
                if not self._fail_all(error):
                    raise  # none was under way: the next turn would fail too
                continue
            with self.changed:
                if not (busy or self.has_news or self.stopping):
                    self.changed.wait(1.0)  # a second: clients of requests that wait may have gone

    def turn(self) -> bool:
        """Put waiting requests into free slots, and decode some tokens of all rows. Return whether there were any."""
        self._forget_unwanted()
        while joining := self._choose_joining():
            for size, requests in joining.items():
                self._admit(size, requests)
        for size, pool in [*self.pools.items()]:
            if pool.places():
                self._advance(size, pool)
            if not pool.places():
                del self.pools[size]
        return bool(self.pools)

    def _forget_unwanted(self) -> None:
        with self.changed:
            self.waiting = [request for request in self.waiting if not request.is_cancelled]
        for pool in self.pools.values():
            for a, slot, row in pool.places():
                if row.choice in row.request.unwanted:
                    pool.rows[a][slot] = None

    def _choose_joining(self) -> dict[Size, list[SamplingRequest]]:
        """Return the requests that take slots now, at most one of each parameter set in each pool."""
        chosen, blocked = dict[Size, list[SamplingRequest]](), set[tuple[Size, int]]()
        with self.changed:
            waiting = [*self.waiting]
        for request in waiting:
            size, (_, a) = self.size_of(request.agent, len(request.ids), request.limit), self.places[request.agent]
            if (size, a) in blocked:
                continue
            blocked.add((size, a))  # the next one of this set waits until this one has its slots
            programs = self.compile(size)
            if not programs.done():
                continue
            if error := programs.exception():
                del self.programs[size]  # the next request tries again
                failed = RuntimeError(f"the programs of {size} could not be compiled")
                failed.__cause__ = error
                self._leave_line(request).deliver(failed)
            elif self._has_room(size, a, request.n, others=len({*chosen} - {*self.pools})):
                chosen.setdefault(size, []).append(self._leave_line(request))
                self.beginning.append(request)
            elif size not in self.pools:
                break  # no later one overtakes: a pool has to close first
        return chosen

    def _leave_line(self, request: SamplingRequest) -> SamplingRequest:
        with self.changed:
            self.waiting.remove(request)
        return request

    def _has_room(self, size: Size, a: int, count: int, others: int) -> bool:
        """Return whether so many slots of a parameter set are free. others: pools that are about to open."""
        if size in self.pools:
            return int((~self.pools[size].taken[a]).sum()) >= count
        return len(self.pools) + others < MAX_POOLS

    def _admit(self, size: Size, requests: Sequence[SamplingRequest]) -> None:
        if size not in self.pools:
            members = self.team.stacks[size.stack].members
            self.pools[size] = OpenPool(self._new_pool(size), [[None] * self.slots_of(size) for _ in members])
        pool, joining = self.pools[size], self._no_joining(size)
        for request in requests:
            _, a = self.places[request.agent]
            free = np.flatnonzero(~pool.taken[a])[: request.n]
            joining.ids[a, 0, : len(request.ids)], joining.lengths[a] = request.ids, len(request.ids)
            joining.takes[a, free], joining.choice[a, free] = True, np.arange(request.n)
            joining.seed[a], joining.number[a] = request.seed, request.agent
            joining.temperature[a], joining.top_p[a] = request.temperature, request.top_p
            joining.stop[a, 0] = self._stop_of(size.stack, request.agent)
            for choice, slot in enumerate(free):
                pool.rows[a][slot] = Row(request, choice)
            self.beginning.remove(request)
        spec = self.team.stacks[size.stack]
        programs = self.programs[size].result()
        pool.arrays = programs.admit(self.params[size.stack], pool.arrays, joining, vocabulary(spec, ()))

    def _advance(self, size: Size, pool: OpenPool) -> None:
        spec, programs = self.team.stacks[size.stack], self.programs[size].result()
        self.calls += 1
        pool.arrays = programs.advance(self.params[size.stack], pool.arrays, ~pool.taken, vocabulary(spec, ()))
        out, live = jax.device_get((pool.arrays.out, pool.arrays.slots.live))
        written = out.action_mask.sum(-1)
        for a, slot, row in pool.places():
            count = min(int(written[a, slot]), row.request.limit)
            last = not live[a, slot] or count == row.request.limit
            new = slice(row.sent, count)
            ids, logprobs = out.tokens[a, slot, new].tolist(), out.logprobs[a, slot, new].tolist()
            ended = bool(out.ended[a, slot]) and count == int(written[a, slot])
            row.sent = count
            if last:
                pool.rows[a][slot] = None
            row.request.deliver(Update(row.choice, ids, logprobs, ended, last))

    def _fail_all(self, error: Exception, others: Sequence[SamplingRequest] = ()) -> bool:
        """End all rows under way, whose arrays may be lost, and other requests. Return whether there were any."""
        rows = [row for pool in self.pools.values() for _, _, row in pool.places()]
        requests = dict.fromkeys([*self.beginning, *(row.request for row in rows), *others])
        self.pools.clear()
        self.beginning.clear()
        for request in requests:
            request.deliver(error)
        return bool(requests)

    # --- programs ------------------------------------------------------------------------------------------------------

    def _program(self, size: Size) -> PoolProgram:
        spec, settings = self.team.stacks[size.stack], dataclasses.replace(self.settings, max_new_tokens=size.capacity)
        sample = SampleProgram.of(spec, settings, 1, self.params[size.stack])
        return PoolProgram(sample, size.stack, self.slots_of(size), size.width)

    def _new_pool(self, size: Size) -> RowPool:
        spec = self.team.stacks[size.stack]
        pool = _empty_pool(len(spec.members), spec.stops.shape[-1], self._program(size))
        return place_agents(pool, spec.mesh)

    def _no_joining(self, size: Size) -> Joining:
        """Return arrays of no new prompts."""
        spec = self.team.stacks[size.stack]
        a, numbers = len(spec.members), np.zeros((len(spec.members), self.slots_of(size)), np.int32)
        ids, stop = np.zeros((a, 1, size.width), np.int32), np.zeros((a, 1, spec.stops.shape[-1]), np.int32)
        seed, number, ones = np.zeros(a, np.uint32), np.zeros(a, np.int32), np.ones(a, np.float32)
        return Joining(ids, np.ones((a, 1), np.int32), numbers > 0, numbers, seed, number, stop, ones, ones.copy())

    def _stop_of(self, stack: int, agent: int) -> np.ndarray:
        spec = self.team.stacks[stack]
        return spec.stops.reshape(-1, spec.stops.shape[-1])[spec.order.index(agent)]

    def _compile(self, size: Size) -> Programs:
        start, spec, program = time.monotonic(), self.team.stacks[size.stack], self._program(size)
        text = f"programs for prompts up to {size.width} tokens and completions up to {size.capacity}"
        self.say(f"compiling the {text} ...")
        pool, params = self._new_pool(size), self.params[size.stack]
        free = np.zeros((len(spec.members), self.slots_of(size)), bool)
        arguments = partial(admit.lower, params, pool, self._no_joining(size)), partial(advance.lower, params, pool, free)
        programs = Programs(*(lower(vocabulary(spec, ()), program=program).compile() for lower in arguments))
        self.say(f"compiled the {text} in {time.monotonic() - start:.1f} s")
        return programs


_empty_pool = jax.jit(empty_pool, static_argnums=(0, 1, 2))
