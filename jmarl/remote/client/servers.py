"""The servers that play one environment: which of them can be used, and which one gets the next episode.

A server is used after it has described the environment as the first one did: the fingerprints must be equal. One that dies,
hangs or answers garbage loses its sessions and is put aside; it is asked again after a while, later and later. The list of
servers may change between two batches (see `addresses`).
"""

import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from jmarl.processes.ending import Interrupted, NoServer
from jmarl.remote import environments_pb2 as pb
from jmarl.remote.client.addresses import Addresses
from jmarl.remote.client.calls import FINAL, JITTER, REPEATS, Call, Failure, RemoteServer, call_all, reply_or_failure
from jmarl.remote.client.connection import Credentials, grpc

DESCRIBE_SECONDS = 5.0  # in which a server must say that it is there
START_SECONDS = 10.0  # in which one must, when a run begins
ASIDE_SECONDS, MAX_ASIDE_SECONDS = 1.0, 60.0  # for which a server is put aside after its first failure, and at most
MAX_DOUBLINGS = 10  # of these seconds: a float has no room for those of a day of failures
LEAVE_SECONDS = 2.0  # in which a server must close the sessions of a client that ends
TRUSTED_SECONDS = 60.0  # without a failure, after which the next one counts as the first


class Question(NamedTuple):
    """What a server is asked before it is used."""

    name: str  # of the environment or reward
    method: str
    request: Any
    fingerprint: Callable[[Any], str]  # of the answer. Raises a ValueError if the server does not have what is asked for


class Servers:
    """The servers of one environment or reward, for one process.

    Args:
        addresses: of the servers.
        credentials: for all of them.
        question: what each of them is asked.
        timeout: seconds in which a batch of calls must be answered, or be asked for again.
        patience: seconds without any server after which the run is interrupted.
    """

    def __init__(self, addresses: Addresses, credentials: Credentials, question: Question, timeout: float, patience: float):
        self.addresses, self.credentials, self.question, self.name = addresses, credentials, question, question.name
        self.timeout, self.patience = timeout, patience
        self.all: dict[str, RemoteServer] = {}
        self._list()
        weakref.finalize(self, leave, self.all)  # also when Python ends
        self.described = self._first_description()

    # Which servers there are

    def refresh(self) -> None:
        """Read the addresses again, close sessions, and see who can be used. Called between two batches."""
        if self.addresses.changed():
            for target in self._list():
                tell(f"{self.name!r}: server {target} comes")
        for server in self.all.values():
            if not server.listed:  # it is not asked again whether it is back
                server.released.extend(server.lost)
                server.lost.clear()
        self.close_released()
        now = time.monotonic()
        self._ask(server for server in self.all.values() if server.listed and server.not_before <= now)
        for server in [*self.all.values()]:
            if not (server.listed or server.sessions or server.closing):
                server.connection.close()
                del self.all[server.target]
            if server.asked is not None and server.asked.done():
                self._use_if_equal(server, self._answer_of(server))

    def wait_for_one(self, since: float | None = None) -> None:
        """Return when a server takes new sessions. Raises Interrupted if none does for a while.

        since: when the first of the last calls failed because no server was there: one may say that it is ready, and begin
        nothing; None: now."""
        end = (time.monotonic() if since is None else since) + self.patience
        while True:
            if time.monotonic() > end:
                tell(why := f"no server of {self.name!r} answers ({self._reasons()})")
                raise Interrupted(f"because {why}")
            if any(server.ready for server in self.all.values()):
                return
            for server in self.all.values():
                server.not_before = min(server.not_before, time.monotonic() + ASIDE_SECONDS)
            self.refresh()
            time.sleep(0.01)

    def choose(self, avoid: Collection[RemoteServer] = ()) -> RemoteServer | None:
        """Return the server that gets the next session, by weight; None if none has room. One of `avoid` only if no other is
        ready."""
        ready = [server for server in self.all.values() if server.ready]
        candidates = [server for server in ready if server not in avoid] or ready
        now = time.monotonic()
        free = [server for server in candidates if server.full_until <= now and server.room() > 0]
        return min(free, key=lambda server: (server.load() + 1) / server.weight, default=None)

    def is_there(self, server: RemoteServer) -> bool:
        """Return whether a server that has not answered in time answers at all: then it computes for long."""
        if not (server.ready or server.sessions):  # another request has found out
            return False
        question = Call(server, self.question.method, self.question.request)
        (answer,) = call_all([question], DESCRIBE_SECONDS)
        return not (isinstance(answer, Failure) and answer.code is grpc.StatusCode.DEADLINE_EXCEEDED)

    def others(self, avoid: Collection[RemoteServer]) -> bool:
        """Return whether there is a server to use that is not among `avoid`."""
        return any(server.ready and server not in avoid for server in self.all.values())

    def lose(self, server: RemoteServer, reason: str) -> None:
        """Put a server aside whose sessions are lost, unless that is known. If it comes back with them, they are closed."""
        if not (server.ready or server.sessions):
            return
        server.generation += 1
        server.lost.update(server.sessions, server.released)
        server.sessions.clear()
        server.released.clear()
        server.connection.close()
        self.put_aside(server, reason)

    def put_aside(self, server: RemoteServer, reason: str) -> None:
        """Begin no new sessions on a server until it has been asked again. Its own ones go on."""
        now = time.monotonic()
        server.failures = 1 if now - server.failed_at > TRUSTED_SECONDS else server.failures + 1
        seconds = ASIDE_SECONDS * 2 ** min(server.failures - 1, MAX_DOUBLINGS)
        seconds = min(MAX_ASIDE_SECONDS, seconds) * JITTER.uniform(0.75, 1.25)
        server.failed_at, server.not_before, server.reason = now, now + seconds, reason
        if server.ready:
            tell(f"{self.name!r}: server {server.target} is put aside: {reason}")
        server.ready = False

    def _list(self) -> list[str]:
        """Take the servers of the addresses, and return those that are new. One that is gone ends its episodes."""
        new = []
        for target, weight in self.addresses.current.items():
            server = self.all.setdefault(target, RemoteServer(target, weight, self.credentials))
            new += [] if server.listed else [target]
            server.weight, server.listed = weight, True
        for target, server in self.all.items():
            if server.listed and target not in self.addresses.current:
                tell(f"{self.name!r}: server {target} goes")
                server.listed = server.ready = False
        return new

    def _reasons(self) -> str:
        return "; ".join(f"{server.target}: {server.reason}" for server in self.all.values() if server.listed)

    # Descriptions

    def _first_description(self) -> Any:
        """Return the answer of the first server, in the order of the addresses, that gives one.

        Raises ValueError if that server does not have what is asked for, and NoServer if none answers."""
        end = time.monotonic() + min(self.patience, START_SECONDS)
        while True:
            self._ask(self.all.values())
            answers = {server: self._answer_of(server) for server in self.all.values()}
            for server, answer in answers.items():
                if isinstance(answer, Failure) and answer.code in FINAL:
                    raise FINAL[answer.code](f"server {server.target}: {answer.reason}")
                if not isinstance(answer, Failure):
                    try:
                        self.fingerprint = self.question.fingerprint(answer)
                    except ValueError as error:
                        raise ValueError(f"server {server.target}: {error}") from None
                    for other, others_answer in answers.items():
                        self._use_if_equal(other, others_answer)
                    return answer
                server.reason = answer.reason
                server.connection.close()
            if time.monotonic() > end:
                raise NoServer(f"no server of {self.name!r} answers ({self._reasons()}): start one there with jmarl serve")
            time.sleep(0.2)

    def _ask(self, servers: Iterable[RemoteServer]) -> None:
        """Ask servers that are not used for their description."""
        for server in servers:
            if server.asked is None and not server.ready:
                server.asked = server.connection.start(self.question.method, self.question.request, DESCRIBE_SECONDS)

    def _answer_of(self, server: RemoteServer) -> Any:
        """Wait for the description of a server that was asked, and return it."""
        assert server.asked is not None
        answer, server.asked = reply_or_failure(server.asked.result), None
        return answer

    def _use_if_equal(self, server: RemoteServer, answer: Any) -> None:
        """Use a server if it has answered as the first one."""
        why = ""
        try:
            if not isinstance(answer, Failure) and (its := self.question.fingerprint(answer)) != self.fingerprint:
                why = f"its {self.name!r} is another one (fingerprint {its}, and the run has {self.fingerprint})"
        except ValueError as error:
            why = str(error)
        if isinstance(answer, Failure) and answer.code in FINAL:
            why = answer.reason
        if why or isinstance(answer, Failure):
            reason = why or answer.reason
            if server.reason != reason if why else not server.failures:
                tell(f"{self.name!r}: server {server.target} is not used: {reason}")
            self.put_aside(server, reason)
            if all(future.done() for future in server.closing):  # it may answer all but this
                server.connection.close()  # the next one begins at once, without a waiting time
            return
        server.ready = server.listed
        server.released.extend(server.lost)  # it may have them still
        server.lost.clear()
        if self.question.method == "Describe":
            server.limits = answer.limits
        if server.failures and server.ready:
            tell(f"{self.name!r}: server {server.target} is back")

    # Calls that need no session

    def call(self, method: str, request: Any) -> Any:
        """Return the reply of any server to a call. Raises what the environment or the reward raised.

        One that computes for long is asked again a few times. After an error of the environment or the reward each of the
        other servers is tried once. Other failures are those of servers that are not there, which are waited for."""
        tried: set[RemoteServer] = set()
        repeats, away_since = 0, None
        while True:
            self.refresh()
            self.wait_for_one(away_since)
            ready = [server for server in self.all.values() if server.ready]
            server = next((server for server in ready if server not in tried), ready[0])
            (answer,) = call_all([Call(server, method, request)], self.timeout)
            if not isinstance(answer, Failure):
                return answer
            match answer.code:
                case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.UNIMPLEMENTED as code:
                    raise FINAL[code](answer.reason)
                case grpc.StatusCode.RESOURCE_EXHAUSTED:  # a message that is too long is so everywhere
                    raise RuntimeError(f"server {server.target}: {answer.reason}")
                case grpc.StatusCode.DEADLINE_EXCEEDED if repeats < REPEATS:
                    repeats, away_since = repeats + 1, None
                    continue
                case code if code not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL):
                    away_since = away_since or time.monotonic()
                    self.put_aside(server, answer.reason)
                    continue
            repeats, away_since = 0, None
            if not self.others({*tried, server}):
                raise RuntimeError(answer.reason)
            tried.add(server)
            if answer.code is not grpc.StatusCode.INTERNAL:  # of the environment or the reward
                self.put_aside(server, answer.reason)

    def close_released(self, wait: bool = False) -> None:
        """Close the sessions that nobody needs any more. wait: until the servers have done so."""
        for server in self.all.values():
            for future in [future for future in server.closing if future.done()]:
                sessions = server.closing.pop(future)
                if server.listed and isinstance(reply_or_failure(future.result), Failure):
                    server.lost.update(sessions)
            sessions = [server.released.popleft() for _ in range(len(server.released))]
            server.sessions.difference_update(sessions)
            if sessions:
                future = server.connection.start("Close", pb.CloseRequest(sessions=sessions), self.timeout)
                server.closing[future] = sessions
        for server in self.all.values() if wait else ():
            for future in server.closing:
                reply_or_failure(future.result)


def leave(servers: dict[str, RemoteServer]) -> None:
    """Close all sessions and connections: servers that end wait for open sessions."""
    futures = []
    for server in servers.values():
        if names := server.sessions.union(server.lost, *server.closing.values()):
            futures.append(server.connection.start("Close", pb.CloseRequest(sessions=names), LEAVE_SECONDS))
    for future in futures:
        reply_or_failure(future.result)
    for server in servers.values():
        server.generation += 1
        for sessions in (server.sessions, server.lost, server.closing, server.released):
            sessions.clear()
        server.connection.close()


def tell(line: str) -> None:
    """Print a line about the servers, also into the log of the run. A closed stream stops no run."""
    logging.getLogger("jmarl.console").info(line)
    with contextlib.suppress(OSError, ValueError):
        print(f"jmarl: {line}", file=sys.stderr, flush=True)
