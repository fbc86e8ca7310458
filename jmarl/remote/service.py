"""Answer the calls of the EnvironmentService: reset, step and fork sessions, alone and in batches (host code, no jax).

Everything here runs in the one thread of the server's event loop, so that sessions need no locks; environments and rewards are
called in threads of their own (`engines.Lane`). What a request starts goes on when its client goes away: the answer is stored,
and the same request again gets it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from google.protobuf.message import Message

from jmarl.envs.vector import Fault
from jmarl.remote import environments_pb2 as pb
from jmarl.remote.catalog import Built, Catalog, CatalogReward, check_fingerprint
from jmarl.remote.gate import Caller, Code, GrpcRefusal, Method, log
from jmarl.remote.limits import ServerLimits
from jmarl.remote.refusals import fault_of, refusal_of
from jmarl.remote.scoring import score
from jmarl.remote.sessions import FORK_BYTES, GrpcRequest, GrpcSession, Sessions, new_request, same
from jmarl.remote.values import from_map, to_map, to_observations, to_result

MAX_TASKS = 100_000  # that a client may ask for
FILL = 0.9  # of a message with tasks: the rest is for its other fields


class EnvironmentService:
    """The calls of environments.proto, each a coroutine (request, caller) -> reply that raises `GrpcRefusal`.

    Args:
        catalog: what is offered.
        sessions: the episodes.
        version: of jmarl.
    """

    def __init__(self, catalog: Catalog, sessions: Sessions, version: str):
        self.catalog, self.sessions, self.version = catalog, sessions, version
        self.limits: ServerLimits = sessions.limits
        self._work: set[asyncio.Task] = set()  # the event loop itself has only weak references

    @property
    def is_working(self) -> bool:
        """Whether the answer to a request is being computed."""
        return bool(self._work)

    @property
    def methods(self) -> dict[str, Method]:
        """What answers each call, by its name in environments.proto."""
        return {
            "List": self.list, "Describe": self.describe, "Tasks": self.tasks, "Reset": self.reset, "Observe": self.observe,
            "Step": self.step, "BatchReset": self.batch_reset, "BatchStep": self.batch_step, "Fork": self.fork,
            "Close": self.close, "Score": self.score,
        }  # fmt: skip

    async def list(self, request: pb.ListRequest, caller: Caller) -> pb.ListReply:
        self._check_serving()
        rewards = [reward.facts for reward in self.catalog.rewards.values()]
        return pb.ListReply(names=list(self.catalog.offer.environments), rewards=rewards, version=self.version)

    async def describe(self, request: pb.DescribeRequest, caller: Caller) -> pb.DescribeReply:
        self._check_serving()
        self.sessions.check_bytes(caller.origin, self.limits.client_bytes)
        built = await self._environment(request, request.num_turns, caller)
        reply, limits = pb.DescribeReply(), self.limits
        reply.CopyFrom(built.facts)
        reply.limits.CopyFrom(
            pb.Limits(
                sessions=limits.sessions,
                message_bytes=limits.message_bytes,
                batch=limits.batch,
                idle_seconds=limits.idle_seconds,
            )
        )
        return reply

    async def tasks(self, request: pb.TasksRequest, caller: Caller) -> pb.TasksReply:
        if not 0 <= request.count <= MAX_TASKS or request.first < 0:
            raise GrpcRefusal(
                Code.INVALID_ARGUMENT,
                f"count={request.count} and first={request.first}: give a count from 0 to {MAX_TASKS} and a first from 0",
            )
        self.sessions.check_bytes(caller.origin, self.limits.client_bytes)
        built = await self._environment(request, 0, caller)
        key = (request.split, request.count, request.seed)
        try:
            with built:  # also while this waits
                tasks = await self.catalog.turns(caller.origin).run(partial(tasks_of, built, key))
        except Exception as error:
            raise refusal_of(error, built, "tasks", caller) from error
        reply, size = pb.TasksReply(total=len(tasks)), 0
        for task in tasks[request.first :]:
            size += task.ByteSize() + 8
            if size > FILL * self.limits.message_bytes and reply.tasks:
                break
            reply.tasks.append(task)
        return reply

    async def observe(self, request: pb.ObserveRequest, caller: Caller) -> pb.ObserveReply:
        session = self.sessions.get(caller.client, request.session)
        return pb.ObserveReply(step=session.step, done=session.is_done, observations=session.observations)

    async def close(self, request: pb.CloseRequest, caller: Caller) -> pb.CloseReply:
        return pb.CloseReply(closed=sum(self.sessions.close(caller.client, session) for session in request.sessions))

    async def fork(self, request: pb.ForkRequest, caller: Caller) -> pb.ForkReply:
        self._check_batch(request.count, 1)
        if (stored := self.sessions.starts.repeated(caller.client, request)) is None:
            session = self.sessions.get(caller.client, request.session)
            check_step(session, request.step)
            size = session.own_bytes + FORK_BYTES
            self.sessions.reserve(caller.origin, request.count, request.count * size)
            stored = self.sessions.starts.remember(caller.client, request)
            of_session = session.built, session.state, session.observations, size, stored, session.step
            forks = [self.sessions.open(caller, *of_session) for _ in range(request.count)]
            stored.answer.set_result(pb.ForkReply(sessions=[fork.id for fork in forks]))
        return await answer_of(stored)

    async def reset(self, request: pb.ResetRequest, caller: Caller) -> pb.ResetReply:
        (answer,) = await self._resets([request], caller)
        return unless_refused(answer)

    async def batch_reset(self, request: pb.BatchResetRequest, caller: Caller) -> pb.BatchResetReply:
        self._check_batch(len(request.calls))
        make = pb.BatchResetReply.Answer
        answers = await self._resets(request.calls, caller)
        return pb.BatchResetReply(answers=[in_batch(make, answer, caller) for answer in answers])

    async def step(self, request: pb.StepRequest, caller: Caller) -> pb.StepReply:
        (answer,) = await self._steps([request], caller)
        return unless_refused(answer)

    async def batch_step(self, request: pb.BatchStepRequest, caller: Caller) -> pb.BatchStepReply:
        self._check_batch(len(request.calls))
        make = pb.BatchStepReply.Answer
        answers = await self._steps(request.calls, caller)
        return pb.BatchStepReply(answers=[in_batch(make, answer, caller) for answer in answers])

    async def score(self, request: pb.ScoreRequest, caller: Caller) -> pb.ScoreReply:
        reward = self.catalog.reward(request.reward, request.fingerprint)
        if (stored := self.sessions.scores.repeated(caller.client, request)) is None:
            self._check_serving()
            self.sessions.check_bytes(caller.origin, self.limits.client_bytes)
            stored = self.sessions.scores.remember(caller.client, request)
            self._start(self._score(reward, request, stored, caller), [stored], caller)
        return await answer_of(stored)

    # --- reset ---

    async def _resets(self, calls: Sequence[pb.ResetRequest], caller: Caller) -> list[Any]:
        """Return the replies of resets, or a `GrpcRefusal`, in their order."""
        answers: list[Any] = []
        groups: dict[tuple, list[tuple[pb.ResetRequest, dict, GrpcRequest]]] = defaultdict(list)
        for call in calls:
            try:
                if (stored := self.sessions.starts.repeated(caller.client, call)) is None:
                    self._check_serving()
                    task = read_map(call.task, "task")
                    self.sessions.reserve(caller.origin, 1)
                    stored = self.sessions.starts.remember(caller.client, call)
                    options = call.options.SerializeToString(deterministic=True)
                    key = (call.environment, options, call.num_turns, call.fingerprint)
                    groups[key].append((call, task, stored))
                answers.append(stored)
            except GrpcRefusal as refused:
                answers.append(refused.alone())
        for group in groups.values():
            self._start(self._play_resets(group, caller), [stored for *_, stored in group], caller)
        return await all_answers(answers)

    async def _play_resets(self, group: Sequence[tuple[pb.ResetRequest, dict, GrpcRequest]], caller: Caller) -> None:
        """Begin episodes of one environment with the same options."""
        client, reserved = caller.client, len(group)
        try:
            first = group[0][0]
            built = await self._environment(first, first.num_turns, caller, first.fingerprint)
            with built:
                results = await built.player.reset([task for _, task, _ in group], [call.seed for call, *_ in group])
                for result, (call, _, stored) in zip(results, group, strict=True):
                    answer, is_open = self._opened(result, built, call, stored, caller)
                    reserved -= is_open
                    self._finish(client, stored, answer)
        finally:
            if reserved:
                self.sessions.release(caller.origin, reserved)

    def _opened(
        self, result: Any, built: Built, call: pb.ResetRequest, stored: GrpcRequest, caller: Caller
    ) -> tuple[Message | GrpcRefusal, bool]:
        """Return the answer of a reset, and whether it opened a session."""
        if isinstance(result, Fault):
            return pb.ResetReply(fault=fault_of(result, built, caller)), False
        try:
            if isinstance(result, Exception):
                raise result
            observations = to_observations(result[1], built.name)
        except Exception as error:
            return refusal_of(error, built, "reset", caller), False
        size = call.ByteSize() + sum(observation.ByteSize() for observation in observations)
        session = self.sessions.open(caller, built, result[0], observations, size, stored)
        return pb.ResetReply(start=pb.Start(session=session.id, observations=observations)), True

    # --- step ---

    async def _steps(self, calls: Sequence[pb.StepRequest], caller: Caller) -> list[Any]:
        """Return the replies of steps, or a `GrpcRefusal`, in their order."""
        answers: list[Any] = []
        groups: dict[int, list[tuple[pb.StepRequest, GrpcSession, GrpcRequest]]] = defaultdict(list)
        for call in calls:
            try:
                session = self.sessions.get(caller.client, call.session)
                if (stored := same_step(session, call)) is None:
                    check_messages(session, call)
                    self.sessions.check_bytes(caller.origin, self.limits.client_bytes)
                    stored = session.answers[call.step] = new_request(call)
                    groups[id(session.built)].append((call, session, stored))
                answers.append(stored)
            except GrpcRefusal as refused:
                answers.append(refused.alone())
        for group in groups.values():
            self._start(self._play_steps(group, caller), [stored for *_, stored in group], caller)
        return await all_answers(answers)

    async def _play_steps(self, group: Sequence[tuple[pb.StepRequest, GrpcSession, GrpcRequest]], caller: Caller) -> None:
        """Play joint actions of one environment, all in one go."""
        built = group[0][1].built
        with built:
            states, messages = [session.state for _, session, _ in group], [list(call.messages) for call, *_ in group]
            try:
                results = await built.player.step(states, messages, [call.seed for call, *_ in group])
            except Exception as error:
                results = [error] * len(group)
        for result, (call, session, stored) in zip(results, group, strict=True):
            try:
                if isinstance(result, Exception):
                    raise result
                if isinstance(result, Fault):
                    answer: Message | GrpcRefusal = pb.StepReply(fault=fault_of(result, built, caller))
                    session.advance(None, None)
                else:
                    message = to_result(result, session.step + 1, built.name)
                    session.advance(result.state, message)
                    answer = pb.StepReply(step=message)
            except Exception as error:
                answer = refusal_of(error, built, "step", caller)
                session.answers.pop(session.step, None)  # the step was not played: it may be tried again
            session.called_at = self.sessions.clock()
            stored.answer.set_result(answer)
            if self.sessions.has(session):  # not closed meanwhile
                self.sessions.count_bytes(session, call.ByteSize())

    # --- what all calls share ---

    async def _score(self, reward: CatalogReward, request: pb.ScoreRequest, stored: GrpcRequest, caller: Caller) -> None:
        self._finish(caller.client, stored, await score(reward, request, caller))

    def _check_serving(self) -> None:
        """Raise `GrpcRefusal` while the server ends. Clients call `List` or `Describe` before they use one."""
        if self.sessions.is_draining:
            raise GrpcRefusal(Code.UNAVAILABLE, "this server is ending and begins no new episodes: try another one")

    async def _environment(self, request: Any, num_turns: int, caller: Caller, fingerprint: str = "") -> Built:
        """Return the environment that a request names. Raises `GrpcRefusal`, also for one with another fingerprint."""
        options, size = read_map(request.options, "options"), request.ByteSize()
        self.sessions.add_bytes(caller.origin, size)
        try:
            built = await self.catalog.environment(request.environment, options, num_turns, caller.origin)
            check_fingerprint(fingerprint, built.facts.fingerprint, request.environment)
            return built
        except GrpcRefusal as refused:
            if fingerprint and refused.code is Code.INVALID_ARGUMENT:  # a server that was here before took it
                raise GrpcRefusal(Code.FAILED_PRECONDITION, str(refused)) from None
            raise
        except Exception as error:
            log.error("request %s: %s cannot be built", caller.number, request.environment, exc_info=error)
            raise GrpcRefusal(
                Code.INTERNAL, f"the environment {request.environment} cannot be used here; the server's log says why"
            ) from error
        finally:
            self.sessions.add_bytes(caller.origin, -size)

    def _check_batch(self, count: int, least: int = 0) -> None:
        if not least <= count <= self.limits.batch:
            raise GrpcRefusal(
                Code.RESOURCE_EXHAUSTED if count >= least else Code.INVALID_ARGUMENT,
                f"{count} calls in a batch: this server takes {least} to {self.limits.batch}, send several batches",
            )

    def _start(self, work: Coroutine[Any, Any, None], requests: Sequence[GrpcRequest], caller: Caller) -> None:
        """Begin work that goes on when the client goes away. Whatever happens, the requests get an answer."""
        size = sum(request.num_bytes for request in requests)
        self.sessions.add_bytes(caller.origin, size)

        async def run() -> None:
            answer = GrpcRefusal(Code.INTERNAL, "the server failed; its log says why")
            try:
                await work
            except GrpcRefusal as refused:
                answer = refused.alone()
            except Exception:
                log.exception("request %s: the server failed", caller.number)
            self.sessions.add_bytes(caller.origin, -size)
            for request in requests:
                if not request.answer.done():
                    self._finish(caller.client, request, answer)

        task = asyncio.get_running_loop().create_task(run())
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _finish(self, client: str, request: GrpcRequest, answer: Message | GrpcRefusal) -> None:
        """Set the answer of a request. An error is not stored: the same request again is tried again."""
        if isinstance(answer, GrpcRefusal):
            self.sessions.starts.forget(client, request)
            self.sessions.scores.forget(client, request)
        request.answer.set_result(answer)


async def tasks_of(built: Built, key: tuple[str, int, int]) -> list[pb.Map]:
    """Return the tasks of an environment: those that it has made last, or others, which it makes. key: what `tasks` gets."""

    def make() -> list[pb.Map]:
        return [to_map(task, f"task {i} of {built.name}") for i, task in enumerate(built.env.tasks(*key))]

    if built.tasks is None or built.tasks[0] != key:
        with built:
            built.tasks = key, await built.player.lane.run(make)
    return built.tasks[1]


def read_map(values: pb.Map, name: str) -> dict[str, Any]:
    """Return the dict of a request. Raises `GrpcRefusal`."""
    try:
        return from_map(values)
    except ValueError as error:
        raise GrpcRefusal(Code.INVALID_ARGUMENT, f"the {name} cannot be read: {error}") from None


def same_step(session: GrpcSession, call: pb.StepRequest) -> GrpcRequest | None:
    """Return the stored request of a step, or None for the next step of a session. Raises `GrpcRefusal` for any other."""
    stored = session.answers.get(call.step)
    if stored is not None and stored.request_id == call.request_id:
        return same(stored, call)
    check_step(session, call.step, is_played=stored is not None)
    return None


def check_step(session: GrpcSession, step: int, is_played: bool = False) -> None:
    """Raise `GrpcRefusal` unless a step is the next one of a session that is not over."""
    at = f"the session is at step {session.step}{' and over' * session.is_done}"
    if is_played or step < session.step:
        raise GrpcRefusal(Code.FAILED_PRECONDITION, f"step {step} belongs to another request: {at}")
    if step != session.step or session.is_done:
        raise GrpcRefusal(Code.FAILED_PRECONDITION, f"step {step} cannot be played: {at}")


def check_messages(session: GrpcSession, call: pb.StepRequest) -> None:
    """Raise `GrpcRefusal` unless a step has one message for each agent."""
    roles = session.built.facts.roles
    if len(call.messages) != len(roles):
        wanted = f"a step of {session.built.name} has {len(roles)} messages, one for each agent"
        raise GrpcRefusal(Code.INVALID_ARGUMENT, f"{wanted}; this one has {len(call.messages)}")


async def answer_of(request: GrpcRequest) -> Any:
    """Return the answer of a request. Cancelling this leaves the work on it alone."""
    return unless_refused(await asyncio.shield(request.answer))


async def all_answers(requests: Sequence[GrpcRequest | GrpcRefusal]) -> list[Any]:
    """Return the answers of requests, or a `GrpcRefusal`."""
    return [await asyncio.shield(request.answer) if isinstance(request, GrpcRequest) else request for request in requests]


def unless_refused(answer: Any) -> Any:
    """Return an answer; raise it if it is a `GrpcRefusal`."""
    if isinstance(answer, GrpcRefusal):
        raise answer
    return answer


def in_batch(make: Callable[..., Any], answer: Message | GrpcRefusal, caller: Caller) -> Any:
    """Return the answer of a call in a batch."""
    return make(error=answer.to_error(caller.number)) if isinstance(answer, GrpcRefusal) else make(reply=answer)
