"""Play many episodes on servers: batches of calls, sessions that branch, and episodes that are played again when one is lost.

A call of the engine is a `Play`. It needs a session that stands at the right step: the episode's own one, a copy of it (several
joint actions may continue from one state), or a new one in which the history is played again. All plays move on side by side,
a request each (see `plays`), until each of them has its result. A play that has lost its session too often has a `Fault` as
result, which masks the joint action and is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from time import monotonic, sleep
from typing import Any

from jmarl.envs.base import Observations, Step, TextEnvironment, Texts
from jmarl.envs.vector import Engine, Fault
from jmarl.processes.ending import Interrupted
from jmarl.remote import environments_pb2 as pb
from jmarl.remote.client.calls import REPEATS, Call, Failure, RemoteServer, call_all, is_busy
from jmarl.remote.client.connection import grpc
from jmarl.remote.client.episodes import RemoteEpisode, RemoteHistory, RemoteSession, digest_of
from jmarl.remote.client.plays import MAX_BATCH, Play, divided, request_id
from jmarl.remote.client.replies import Garbage, check_numbers, read_start, read_step
from jmarl.remote.client.servers import Servers, leave, tell

Code = grpc.StatusCode
FULL_SECONDS = 0.25  # in which a server that has said that it is full gets no calls
REPLAYS = 3  # of an episode in one call of the engine, after which it is a fault
MAX_LOST_BATCHES = 3  # batches in a row without one answer interrupt the run; where no episode begins, one does
ANSWER, FULL, AWAY, OTHER = "a play moves on", "a server has no room", "a server begins no episodes", "another failure"


class RemoteEngine(Engine):
    """Plays the episodes of an environment on servers.

    Args:
        env: the description of the environment.
        servers: of the environment.
    """

    def __init__(self, env: TextEnvironment, servers: Servers):
        self.env, self.servers = env, servers
        asked: pb.DescribeRequest = servers.question.request
        self._start = pb.ResetRequest(
            environment=asked.environment,
            options=asked.options,
            num_turns=asked.num_turns,
            fingerprint=servers.fingerprint,
        )
        self._sessions: weakref.WeakSet[RemoteSession] = weakref.WeakSet()
        self._batches, self._lost_batches = 0, 0  # so far; in a row
        self._seen: set[str] = set()  # what the replies to the last requests were, as far as it decides how to go on

    def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[tuple[Any, Observations] | Fault]:
        return self._play([Play(RemoteHistory(task, seed)) for task, seed in zip(tasks, seeds, strict=True)])

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
        waiting, full_since, away_since = plays, None, None
        while waiting:
            placed = self._place(waiting, away_since)
            self._seen = set()
            self._send(placed)
            waiting = [play for play in waiting if play.result is None]
            if placed:
                away_since = (away_since or monotonic()) if self._seen == {AWAY} else None
            if ANSWER in self._seen:
                full_since = None
            elif FULL in self._seen or not placed:
                full_since = full_since or monotonic()
                self._make_room(waiting, full_since)
        lost = sum(play.lost > REPLAYS for play in plays)
        self._lost_batches = self._lost_batches + 1 if plays and lost == len(plays) else 0
        if self._lost_batches >= (1 if plays and plays[0].begins else MAX_LOST_BATCHES):
            count = "a batch" if self._lost_batches == 1 else f"{self._lost_batches} batches in a row"
            reason = f"{count} had no answer from the servers of {self.servers.name!r}"
            tell(reason := f"{reason}: {plays[0].result.reason}")
            raise Interrupted(f"because {reason}")
        return [play.result for play in plays]

    def _fork(self, plays: Sequence[Play]) -> None:
        """Copy the sessions from which several plays continue: one session for each play."""
        by_session: dict[RemoteSession, list[Play]] = {}
        for play in plays:
            if play.session is not None:
                by_session.setdefault(play.session, []).append(play)
        calls, copies, origins = [], [], []
        for session, (_, *others) in by_session.items():
            limit = min(session.server.room(), session.server.limits.batch or MAX_BATCH)
            copied = others[: max(0, limit)]
            session.server.reserved += len(copied)
            for play in others:
                play.leave()
            if copied:
                request = pb.ForkRequest(session=session.name, step=session.step, count=len(copied), request_id=request_id())
                calls.append(Call(session.server, "Fork", request))
                copies.append(copied)
                origins.append(session)
        answers = call_all(calls, self.servers.timeout)
        for call, copied, session, answer in zip(calls, copies, origins, answers, strict=True):
            call.server.reserved = 0
            if not isinstance(answer, Failure) and not len({*answer.sessions}) == len(answer.sessions) == len(copied):
                answer = Failure(Code.UNKNOWN, "it answered a fork with another number of sessions")
            if isinstance(answer, Failure) and answer.code in (Code.NOT_FOUND, Code.FAILED_PRECONDITION):
                self._give_up(session, answer)  # only this one
                continue
            if isinstance(answer, Failure):
                self._failed(call.server, answer)
                continue
            for play, name in zip(copied, answer.sessions, strict=True):
                self._enter(play, RemoteSession(call.server, name, call.request.step))

    def _enter(self, play: Play, session: RemoteSession) -> None:
        play.session, play.server, play.request, play.repeats = session, session.server, None, 0
        self._sessions.add(session)

    def _place(self, plays: Sequence[Play], away_since: float | None) -> list[Play]:
        """Find a server for each play without one, as far as they have room. Returns the plays that have one.

        away_since: when servers began to say that they begin no episodes, if nothing else has happened since then."""
        self._drop_lost(plays)
        if any(play.session is None for play in plays):
            self.servers.refresh()
            self.servers.wait_for_one(away_since)
            self._drop_lost(plays)
        homeless = [play for play in plays if play.server is None]
        reserved: list[RemoteServer] = []
        for play in homeless:
            if (server := self.servers.choose(play.avoid)) is not None:
                play.server = server
                server.reserved += 1
                reserved.append(server)
        for server in reserved:  # until all have found one
            server.reserved = 0
        now = monotonic()
        return [play for play in plays if play.session or (play.server is not None and play.server.full_until <= now)]

    def _drop_lost(self, plays: Sequence[Play]) -> None:
        """Let plays begin again whose server has lost their sessions, or takes no new ones."""
        for play in plays:
            if play.session is None and play.server is not None and not play.server.ready:
                play.leave()
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
            servers = self.servers.all.values()
            room = ", ".join(f"{server.target} {server.limits.sessions}" for server in servers)
            why = "".join(f"; server {server.target}: {server.full_reason}" for server in servers if server.full_reason)
            raise RuntimeError(
                f"the servers of {self.servers.name!r} have had no room for new sessions for {self.servers.timeout:g} s (they "
                f"have so many of one client: {room}): start further ones, or let them have more{why}"
            )
        if not idle:
            sleep(FULL_SECONDS)
            return
        for server in self.servers.all.values():  # try at once, before further sessions are closed
            server.full_until = 0.0

    # Requests and replies

    def _send(self, plays: Sequence[Play]) -> None:
        """Make the next request of each play, and read the replies."""
        chunks = [*divided(plays, self._start)]
        calls = [Call(server, method, request) for server, method, request, _ in chunks]
        for (server, method, _, chunk), reply in zip(chunks, call_all(calls, self.servers.timeout), strict=True):
            self._read(server, method, chunk, reply)

    def _read(self, server: RemoteServer, method: str, plays: Sequence[Play], reply: Any) -> None:
        """Read the reply to a request of several plays."""
        if not isinstance(reply, Failure) and len(reply.answers) != len(plays):
            reply = Failure(Code.UNKNOWN, f"it answered {len(plays)} calls with {len(reply.answers)} answers")
        if isinstance(reply, Failure):
            self._unanswered(server, method, plays, reply)
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

    def _begun(self, play: Play, server: RemoteServer, reply: pb.ResetReply) -> None:
        """Read the reply to a reset."""
        start = read_start(reply, self.env)
        self._seen.add(ANSWER)
        if isinstance(start, Fault):
            play.result = start
            return
        name, observations = start
        self._enter(play, session := RemoteSession(server, name, 0))
        session.used = self._batches
        digest = digest_of(reply.start)
        if play.begins:
            play.result = RemoteEpisode(play.history._replace(digests=(digest,)), session), observations
        elif digest != play.history.digests[0]:
            self._differs(play, session)

    def _moved(self, play: Play, server: RemoteServer, reply: pb.StepReply) -> None:
        """Read the reply to a step. What two servers say is right, also if it is a mistake of the environment."""
        session = play.session
        assert session is not None  # of a request BatchStep
        step = read_step(reply, session.step + 1, self.env)
        self._seen.add(ANSWER)
        if isinstance(step, Fault):
            session.release()
            play.result = step
            return
        try:
            check_numbers(step, self.env)
        except Garbage as error:
            if play.doubted.setdefault(str(error), server) is server:
                raise
        session.step, session.used = session.step + 1, self._batches
        play.request, play.repeats = None, 0
        if step.done:
            session.release()
        digest, history = digest_of(reply.step), play.history
        if session.step < len(history.digests):
            if digest != history.digests[session.step]:
                self._differs(play, session)
            return
        state = None
        if not step.done:
            state = RemoteEpisode(history._replace(moves=play.moves, digests=(*history.digests, digest)), session)
        play.result = step._replace(state=state)

    def _differs(self, play: Play, session: RemoteSession) -> None:
        """End a play whose episode is another one than before. Training on it would take its end for that of the first one."""
        session.release()
        play.result = Fault(
            f"{self.servers.name}: an episode was played again with another result at step {session.step}: the environment is "
            "no function of its task, messages and seeds"
        )

    # What went wrong

    def _unanswered(self, server: RemoteServer, method: str, plays: Sequence[Play], failure: Failure) -> None:
        """Decide how several plays go on whose request has no reply. Raises RuntimeError for a play that fits no message."""
        is_away = failure.code is Code.UNAVAILABLE and method == "BatchReset"
        self._seen.add(AWAY if is_away else OTHER)
        if failure.code is Code.RESOURCE_EXHAUSTED:  # too long, or too many: the answer, too
            if len(plays) == 1 or is_busy(failure):
                raise RuntimeError(f"server {server.target}: {failure.reason}")
            for play in plays:  # the same requests again, so that what was played is not lost
                play.together = (len(plays) + 1) // 2
            return
        is_late = failure.code is Code.DEADLINE_EXCEEDED and all(play.repeats < REPEATS for play in plays)
        if is_late and self.servers.is_there(server):
            for play in plays:  # also the same: the server goes on computing, and keeps the answers
                play.repeats += 1
            return
        self._failed(server, failure)
        for play in plays:
            if is_away:  # that was no try: the patience ends it
                play.leave()
            else:
                self._lose(play, server, failure)

    def _failed(self, server: RemoteServer, failure: Failure) -> None:
        """Note that a server has failed to answer a request."""
        if failure.code is Code.RESOURCE_EXHAUSTED:
            self._full(server, failure)
        elif failure.code is not Code.CANCELLED:  # another failure has closed the connection
            self.servers.lose(server, failure.reason)

    def _full(self, server: RemoteServer, failure: Failure) -> None:
        """Note that a server has no room for another session."""
        self._seen.add(FULL)
        server.full_until, server.full_reason = monotonic() + FULL_SECONDS, failure.reason

    def _refused(self, play: Play, server: RemoteServer, failure: Failure) -> None:
        """Read the error of one play. Raises what the environment raised."""
        match failure.code:
            case Code.RESOURCE_EXHAUSTED:
                self._full(server, failure)
                if play.session is None:
                    play.leave()
                return
            case Code.UNAVAILABLE:
                if server.ready:
                    self.servers.put_aside(server, failure.reason)
                if play.session is None:  # that was no try: the patience ends it
                    self._seen.add(AWAY)
                    play.leave()
                    return
            case Code.FAILED_PRECONDITION if play.session is None:  # another server has taken its place
                self.servers.lose(server, failure.reason)
                self._seen.add(AWAY)
                play.leave()
                return
            case Code.INVALID_ARGUMENT:
                raise ValueError(failure.reason)
            case Code.INTERNAL if play.lost >= REPLAYS or not self.servers.others({*play.avoid, server}):
                raise RuntimeError(failure.reason)
        self._give_up(play.session, failure)
        self._lose(play, server, failure)

    def _give_up(self, session: RemoteSession | None, failure: Failure) -> None:
        """Leave a session after a failure: close it if the server still has it."""
        if session is not None and failure.code is Code.NOT_FOUND:
            session.gone()
        elif session is not None:
            session.release()

    def _lose(self, play: Play, server: RemoteServer, failure: Failure) -> None:
        """Let a play begin again elsewhere, or end it."""
        self._seen.add(OTHER)
        play.leave()
        play.lost += 1
        play.avoid.add(server)
        if play.lost > REPLAYS:
            play.result = Fault(f"{self.servers.name}: server {server.target}: {failure.reason}, after {play.lost} tries")


def code_of(number: int) -> grpc.StatusCode:
    """Return a code of gRPC by its number."""
    return next((code for code in Code if code.value[0] == number), Code.UNKNOWN)
