"""Play many episodes on servers: batches of calls, sessions that branch, and episodes that are played again when one is lost.

A call of the engine is a `Play`. It needs a session that stands at the right step: the episode's own one, a copy of it (several
joint actions may continue from one state), or a new one in which the history is played again. All plays move on side by side,
a request each, until each of them has its result. A play that has lost its session too often has a `Fault` as result, which
masks the joint action and is counted.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from time import monotonic, sleep
from typing import Any

from jmarl.envs.base import Observations, Step, TextEnvironment, Texts
from jmarl.envs.vector import Engine, Fault
from jmarl.processes.ending import Interrupted
from jmarl.remote import environments_pb2 as pb
from jmarl.remote.client.connection import client_name, grpc
from jmarl.remote.client.episodes import Episode, History, Session
from jmarl.remote.client.replies import Garbage, check_numbers, read_start, read_step
from jmarl.remote.client.server import Call, Failure, Server, call_all
from jmarl.remote.client.servers import Servers, leave, tell
from jmarl.remote.values import checked_text, to_map

Code = grpc.StatusCode
FULL_SECONDS = 0.25  # in which a server that has said that it is full gets no calls
REPLAYS = 3  # of an episode in one call of the engine, after which it is a fault
MAX_LOST_BATCHES = 3  # batches in a row without one answer interrupt the run
MAX_BATCH = 256  # calls in a request
BATCH_SHARE = 0.9  # of a message that calls may fill

_numbers = itertools.count()  # of requests of this process


class Play:
    """A call on its way: an episode that begins (no move), or a joint action in one."""

    def __init__(self, history: History, session: Session | None = None, move: tuple[tuple[str, ...], int] | None = None):
        self.history, self.session = history, session
        self.moves = history.moves if move is None else (*history.moves, move)
        self.begins = move is None
        self.server: Server | None = None if session is None else session.server
        self.result: Any = None
        self.lost, self.avoid = 0, set[Server]()
        self.doubted: dict[str, Server] = {}  # what is wrong with a reward -> who gave it
        self.request: pb.ResetRequest | pb.StepRequest | None = None  # the next one; the same object when it is repeated

    def leave(self) -> None:
        """Give the session up: the play begins again."""
        self.session, self.server, self.request = None, None, None


class RemoteEngine(Engine):
    """Plays the episodes of an environment on servers.

    Args:
        env: the description of the environment.
        servers: of the environment.
    """

    def __init__(self, env: TextEnvironment, servers: Servers):
        self.env, self.servers = env, servers
        self._described: pb.DescribeRequest = servers.question.request
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._batches, self._lost_batches = 0, 0  # so far; in a row

    def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[tuple[Any, Observations] | Fault]:
        return self._play([Play(History(task, seed)) for task, seed in zip(tasks, seeds, strict=True)])

    def step(self, states: Sequence[Any], messages: Texts, seeds: Sequence[int]) -> list[Step | Fault]:
        calls = zip(states, messages, seeds, strict=True)
        return self._play([Play(state.history, state.own_session(), (tuple(texts), seed)) for state, texts, seed in calls])

    def close(self) -> None:
        """Close sessions and connections. Later calls open others."""
        leave(self.servers.all)

    # The plays of a batch

    def _play(self, plays: list[Play]) -> list[Any]:
        """Return the results of plays."""
        self._batches += 1
        self.servers.refresh()
        self._fork(plays)
        waiting, full_since = plays, monotonic()
        while waiting:
            placed = self._place(waiting)
            if placed:
                full_since = monotonic()
            else:
                self._make_room(waiting, full_since)
            self._send(placed)
            waiting = [play for play in waiting if play.result is None]
        lost = sum(play.lost > REPLAYS for play in plays)
        self._lost_batches = self._lost_batches + 1 if plays and lost == len(plays) else 0
        if self._lost_batches >= MAX_LOST_BATCHES:
            reason = f"{self._lost_batches} batches in a row had no answer from the servers of {self.servers.name!r}"
            tell(reason := f"{reason}: {plays[0].result.reason}")
            raise Interrupted(f"because {reason}")
        return [play.result for play in plays]

    def _fork(self, plays: Sequence[Play]) -> None:
        """Copy the sessions from which several plays continue: one session for each play."""
        by_session: dict[Session, list[Play]] = {}
        for play in plays:
            if play.session is not None:
                by_session.setdefault(play.session, []).append(play)
        calls, copies = [], []
        for session, (_, *others) in by_session.items():
            copied = others[: max(0, session.server.room())]
            session.server.reserved += len(copied)
            for play in others:
                play.leave()
            if copied:
                request = pb.ForkRequest(session=session.name, step=session.step, count=len(copied), request_id=request_id())
                calls.append(Call(session.server, "Fork", request))
                copies.append(copied)
        for call, copied, answer in zip(calls, copies, call_all(calls, self.servers.timeout), strict=True):
            call.server.reserved = 0
            if not isinstance(answer, Failure) and not len({*answer.sessions}) == len(answer.sessions) == len(copied):
                answer = Failure(Code.UNKNOWN, "it answered a fork with another number of sessions")
            if isinstance(answer, Failure):
                self._failed(call.server, answer)
                continue
            for play, name in zip(copied, answer.sessions, strict=True):
                self._enter(play, Session(call.server, name, call.request.step))

    def _enter(self, play: Play, session: Session) -> None:
        play.session, play.server, play.request = session, session.server, None
        self._sessions.add(session)

    def _place(self, plays: Sequence[Play]) -> list[Play]:
        """Find a server for each play without one, as far as they have room. Returns the plays that have one."""
        self._drop_lost(plays)
        homeless = [play for play in plays if play.server is None]
        if homeless:
            self.servers.refresh()
            self.servers.wait_for_one()
        reserved: list[Server] = []
        for play in homeless:
            if (server := self.servers.choose(play.avoid)) is not None:
                play.server = server
                server.reserved += 1
                reserved.append(server)
        for server in reserved:  # until all have found one
            server.reserved = 0
        return [play for play in plays if play.server is not None and play.server.full_until <= monotonic()]

    def _drop_lost(self, plays: Sequence[Play]) -> None:
        """Let plays begin again whose server has lost its sessions."""
        for play in plays:
            if play.session is not None and not play.session.is_open():
                play.leave()

    def _make_room(self, waiting: Sequence[Play], since: float) -> None:
        """Close sessions that wait for a later batch: they are played again then. Raises RuntimeError if that does not help."""
        own = {play.session for play in waiting}
        idle = sorted((s for s in self._sessions if s.is_open() and s not in own), key=lambda s: s.used)
        for session in idle[: len(waiting)]:
            session.release()
        self.servers.close_released(wait=True)
        if monotonic() - since > self.servers.timeout:
            room = ", ".join(f"{server.target} {server.limits.sessions}" for server in self.servers.all.values())
            raise RuntimeError(
                f"the servers of {self.servers.name!r} have had no room for new sessions for {self.servers.timeout:g} s (they "
                f"have so many of one client: {room}): start further ones, or let them have more"
            )
        if not idle:
            sleep(FULL_SECONDS)

    # Requests and replies

    def _send(self, plays: Sequence[Play]) -> None:
        """Make the next request of each play, and read the replies."""
        chunks = [*self._chunks(plays)]
        calls = [Call(server, method, request) for server, method, request, _ in chunks]
        for (server, method, _, chunk), reply in zip(chunks, call_all(calls, self.servers.timeout), strict=True):
            self._read(server, method, chunk, reply)

    def _chunks(self, plays: Sequence[Play]) -> Iterator[tuple[Server, str, Any, list[Play]]]:
        """Group the next requests by server and method, and divide them by the limits of the server."""
        groups: dict[tuple[Server, str], list[Play]] = {}
        for play in plays:
            assert play.server is not None  # see `_place`
            play.request = play.request or self._request(play)
            groups.setdefault((play.server, "BatchReset" if play.session is None else "BatchStep"), []).append(play)
        for (server, method), group in groups.items():
            most = min(server.limits.batch or MAX_BATCH, MAX_BATCH)
            room = BATCH_SHARE * (server.limits.message_bytes or 4 * 2**20)
            kind = pb.BatchResetRequest if method == "BatchReset" else pb.BatchStepRequest
            chunk, size = [], 0
            for play in group:
                assert play.request is not None
                own = play.request.ByteSize() + 8
                if chunk and (len(chunk) == most or size + own > room):
                    yield server, method, kind(calls=[x.request for x in chunk]), chunk
                    chunk, size = [], 0
                chunk.append(play)
                size += own
            yield server, method, kind(calls=[x.request for x in chunk]), chunk

    def _request(self, play: Play) -> pb.ResetRequest | pb.StepRequest:
        if play.session is None:
            return pb.ResetRequest(
                environment=self._described.environment,
                options=self._described.options,
                num_turns=self._described.num_turns,
                task=to_map(play.history.task, "task"),
                seed=play.history.seed,
                request_id=request_id(),
            )
        texts, seed = play.moves[play.session.step]
        messages = [checked_text(text, f"the message of agent {n}") for n, text in enumerate(texts)]
        return pb.StepRequest(
            session=play.session.name, step=play.session.step, messages=messages, seed=seed, request_id=request_id()
        )

    def _read(self, server: Server, method: str, plays: Sequence[Play], reply: Any) -> None:
        """Read the reply to a request of several plays."""
        if not isinstance(reply, Failure) and len(reply.answers) != len(plays):
            reply = Failure(Code.UNKNOWN, f"answered {len(plays)} calls with {len(reply.answers)} answers")
        if isinstance(reply, Failure):
            self._failed(server, reply)
            for play in plays:
                self._lose(play, server, reply)
            return
        for play, answer in zip(plays, reply.answers, strict=True):
            try:
                match answer.WhichOneof("kind"):
                    case "error":
                        self._refused(play, server, Failure(code_of(answer.error.code), answer.error.message))
                    case "reply" if method == "BatchReset":
                        self._begun(play, server, answer.reply)
                    case "reply":
                        self._moved(play, server, answer.reply)
                    case _:
                        raise Garbage("answered a call with nothing")
            except Garbage as error:
                failure = Failure(Code.UNKNOWN, f"it {error}")
                self._failed(server, failure)
                self._lose(play, server, failure)

    def _begun(self, play: Play, server: Server, reply: pb.ResetReply) -> None:
        """Read the reply to a reset."""
        start = read_start(reply, self.env)
        if isinstance(start, Fault):
            play.result = start
            return
        name, observations = start
        self._enter(play, session := Session(server, name, 0))
        session.used = self._batches
        if play.begins:
            play.result = Episode(play.history, session), observations

    def _moved(self, play: Play, server: Server, reply: pb.StepReply) -> None:
        """Read the reply to a step. What two servers say is right, also if it is a mistake of the environment."""
        session = play.session
        assert session is not None  # of a request BatchStep
        step = read_step(reply, session.step + 1, self.env)
        if isinstance(step, Fault):
            session.release()
            play.result = step
            return
        try:
            check_numbers(step, self.env)
        except Garbage as error:
            if play.doubted.setdefault(str(error), server) is server:
                raise
        session.step, session.used, play.request = session.step + 1, self._batches, None
        if step.done:
            session.release()
        if session.step == len(play.moves):
            state = None if step.done else Episode(play.history._replace(moves=play.moves), session)
            play.result = step._replace(state=state)
        elif step.done:
            play.result = Fault(
                f"{self.servers.name}: an episode was played again and ended after {session.step} steps, and it had "
                f"{len(play.history.moves)} before: the environment is no function of its task, messages and seeds"
            )

    # What went wrong

    def _failed(self, server: Server, failure: Failure) -> None:
        """Note that a server has failed to answer a request."""
        if failure.code is Code.RESOURCE_EXHAUSTED:
            server.full_until = monotonic() + FULL_SECONDS
        elif failure.code is not Code.CANCELLED:  # another failure has closed the connection
            self.servers.lose(server, failure.reason)

    def _refused(self, play: Play, server: Server, failure: Failure) -> None:
        """Read the error of one play. Raises what the environment raised."""
        match failure.code:
            case Code.RESOURCE_EXHAUSTED:
                server.full_until = monotonic() + FULL_SECONDS
                if play.session is None:
                    play.leave()
                return
            case Code.UNAVAILABLE if server.ready:
                self.servers.put_aside(server, failure.reason)
            case Code.INVALID_ARGUMENT:
                raise ValueError(failure.reason)
            case Code.INTERNAL if not self.servers.others({*play.avoid, server}):
                raise RuntimeError(failure.reason)
        if play.session is not None:
            play.session.gone()
        self._lose(play, server, failure)

    def _lose(self, play: Play, server: Server, failure: Failure) -> None:
        """Let a play begin again elsewhere, or end it."""
        if failure.code is Code.RESOURCE_EXHAUSTED:
            return
        play.leave()
        play.lost += 1
        play.avoid.add(server)
        if play.lost > REPLAYS:
            play.result = Fault(f"{self.servers.name}: server {server.target}: {failure.reason}, after {play.lost} tries")


def request_id() -> str:
    """Return a name that no other request has."""
    return f"{client_name()}-{next(_numbers)}"


def code_of(number: int) -> grpc.StatusCode:
    """Return a code of gRPC by its number."""
    return next((code for code in Code if code.value[0] == number), Code.UNKNOWN)
