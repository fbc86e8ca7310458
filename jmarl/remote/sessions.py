"""The episodes that a server plays: one state per session, of one client, with the answers that it may ask for again.

A session belongs to the client that opened it; to all others it is unknown. A step is known by its session, its number and the
number of its request: the same request again gets the stored answer, and waits for it where it is not there yet. States are
never changed, so a fork shares that of its origin. Left out: saving sessions. A client plays the episodes of a server that has
ended again on another one.
"""

import asyncio
import dataclasses
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from jmarl.remote import environments_pb2 as pb
from jmarl.remote.catalog import Built
from jmarl.remote.gate import Caller, Code, GrpcRefusal
from jmarl.remote.limits import ServerLimits

KEPT_ANSWERS = 4  # of the last steps of a session: a client repeats only the last request
REMEMBERED = 10_000  # sessions that ended without a call, and resets without a result
FORK_BYTES = 256  # of a session in memory, for its name in the answer of the fork that opened it and in tables
MAX_SCORES, SCORE_BYTES = 64, 1 << 28  # answers of rewards, which are long, and the bytes of all of them
MAX_ID = 64  # characters of the number of a request


class GrpcRequest(NamedTuple):
    """A request that may come again, and its answer."""

    request_id: str
    digest: bytes  # of its content
    num_bytes: int
    answer: asyncio.Future  # a message, or a `GrpcRefusal`


@dataclasses.dataclass(eq=False)
class GrpcSession:
    """An episode."""

    id: str
    client: str
    origin: str  # of the client, see `gate.Caller`
    built: Built
    state: Any
    observations: Sequence[pb.Observation]  # what each agent reads
    called_at: float
    start: GrpcRequest  # the reset or fork that opened it
    step: int = 0  # joint actions so far
    is_done: bool = False
    answers: dict[int, GrpcRequest] = dataclasses.field(default_factory=dict)  # by the number of the step
    own_bytes: int = 0  # of its task and messages, which its state may contain
    num_bytes: int = 0  # these, and those of its answers

    @property
    def is_played(self) -> bool:
        """Whether a step is being computed."""
        return any(not request.answer.done() for request in self.answers.values())

    def advance(self, state: Any, result: pb.Result | None) -> None:
        """Take the result of a step; None: it has none, and the episode is over."""
        self.step += 1
        self.is_done = result is None or result.done
        self.state = None if self.is_done else state
        self.observations = [] if result is None else result.observations
        self.answers.pop(self.step - 1 - KEPT_ANSWERS, None)


class Sessions:
    """All sessions of a server.

    Args:
        limits: how many there may be.
        clock: seconds that do not go back.
    """

    def __init__(self, limits: ServerLimits, clock: Callable[[], float] = time.monotonic):
        self.limits, self.clock = limits, clock
        self.is_draining = False
        self._sessions: dict[str, GrpcSession] = {}
        self._reserved: dict[str, int] = {}  # origin -> sessions that it has or is opening
        self._bytes: dict[str, int] = {}  # origin -> bytes of its sessions and requests
        self._reaped: OrderedDict[str, str] = OrderedDict()  # session -> client
        self.starts = Requests(REMEMBERED + limits.all_sessions)  # resets and forks
        self.scores = Requests(MAX_SCORES, SCORE_BYTES)

    def __len__(self) -> int:
        return len(self._sessions)

    def count_unfinished(self) -> int:
        """Return how many episodes are neither done nor closed, with those that are being opened."""
        return sum(self._reserved.values()) - sum(session.is_done for session in self._sessions.values())

    def reserve(self, origin: str, count: int, num_bytes: int = 0) -> None:
        """Count sessions that a client opens. Raises `GrpcRefusal` if there are too many; `release` those that are not opened.

        num_bytes: that they have, where this is known."""
        self.check_bytes(origin, self.limits.client_bytes // 2, num_bytes)
        own, total = self._reserved.get(origin, 0), sum(self._reserved.values())
        for limit, used, whose in (
            (self.limits.sessions, own, "of one client"),
            (self.limits.all_sessions, total, "of all clients"),
        ):
            if used + count > limit:
                raise GrpcRefusal(
                    Code.RESOURCE_EXHAUSTED,
                    f"this server has at most {limit} open sessions {whose}, and {used} are open: close some, or add a server",
                )
        self._reserved[origin] = own + count

    def release(self, origin: str, count: int) -> None:
        """Take back what `reserve` counted."""
        self._reserved[origin] -= count
        if not self._reserved[origin]:
            del self._reserved[origin]

    def check_bytes(self, origin: str, most: int, more: int = 0) -> None:
        """Raise `GrpcRefusal` if the sessions and requests of a client have more bytes. more: of what is about to be opened."""
        if (used := self._bytes.get(origin, 0) + more) > most:
            raise GrpcRefusal(
                Code.RESOURCE_EXHAUSTED,
                f"requests, tasks, messages and answers of the sessions of one client have {used} bytes, and {most} are "
                "allowed: close some, or add a server",
            )

    def add_bytes(self, origin: str, more: int) -> None:
        """Count bytes of a client's sessions, and of its requests while they are worked on."""
        self._bytes[origin] = self._bytes.get(origin, 0) + more
        if not self._bytes[origin]:
            del self._bytes[origin]

    def count_bytes(self, session: GrpcSession, more: int = 0) -> None:
        """Count the bytes of a session. more: of what its state contains from now on."""
        session.own_bytes += more
        answers = [request.answer.result() for request in session.answers.values() if request.answer.done()]
        now = session.own_bytes + sum(answer.ByteSize() for answer in answers if isinstance(answer, Message))
        self.add_bytes(session.origin, now - session.num_bytes)
        session.num_bytes = now

    def open(
        self,
        caller: Caller,
        built: Built,
        state: Any,
        observations: Sequence[pb.Observation],
        num_bytes: int,
        start: GrpcRequest,
        step: int = 0,
    ) -> GrpcSession:
        """Return a new session, one of those that were reserved.

        num_bytes: of what its state may contain. start: the request that opens it, and perhaps others too; its answer is
        forgotten with the first of them."""
        name, now = secrets.token_urlsafe(18), self.clock()
        session = GrpcSession(name, caller.client, caller.origin, built, state, observations, now, start, step)
        self._sessions[session.id] = session
        self.count_bytes(session, num_bytes)
        built.users += 1
        return session

    def get(self, client: str, session_id: str) -> GrpcSession:
        """Return a session of a client. Raises `GrpcRefusal` if it has none of this name."""
        session = self._sessions.get(session_id)
        if session is not None and session.client == client:
            session.called_at = self.clock()
            return session
        if self._reaped.get(session_id) == client:
            idle = f"{self.limits.idle_seconds:g} s without a call"
            raise GrpcRefusal(Code.NOT_FOUND, f"session {session_id!r:.80} ended after {idle}: play the episode again")
        raise GrpcRefusal(Code.NOT_FOUND, f"there is no session {session_id!r:.80} of this client: play the episode again")

    def has(self, session: GrpcSession) -> bool:
        """Return whether a session is open."""
        return self._sessions.get(session.id) is session

    def close(self, client: str, session_id: str) -> bool:
        """End a session; return whether there was one."""
        session = self._sessions.get(session_id)
        if session is None or session.client != client:
            return False
        self._end(session)
        return True

    def reap(self) -> int:
        """End sessions that had no call for too long, and return how many."""
        latest = self.clock() - self.limits.idle_seconds
        idle = [session for session in self._sessions.values() if session.called_at < latest and not session.is_played]
        for session in idle:
            self._end(session)
            self._reaped[session.id] = session.client
        while len(self._reaped) > REMEMBERED:
            self._reaped.popitem(last=False)
        return len(idle)

    def _end(self, session: GrpcSession) -> None:
        del self._sessions[session.id]
        session.built.users -= 1
        self.release(session.origin, 1)
        self.add_bytes(session.origin, -session.num_bytes)
        self.starts.forget(session.client, session.start)


class Requests:
    """Requests that may come again, and their answers; the oldest ones are forgotten.

    Args:
        limit: how many are remembered.
        max_bytes: of their answers; None: no limit.
    """

    def __init__(self, limit: int, max_bytes: int | None = None):
        self.limit, self.max_bytes = limit, max_bytes
        self._requests: OrderedDict[tuple[str, str], GrpcRequest] = OrderedDict()  # by client and number

    def __len__(self) -> int:
        return len(self._requests)

    def repeated(self, client: str, request: Any) -> GrpcRequest | None:
        """Return a request of the same number that came before, or None for a new one, which `remember` is called with."""
        check_request_id(request.request_id)
        return same(self._requests.get((client, request.request_id)), request)

    def remember(self, client: str, request: Any) -> GrpcRequest:
        """Return a new request, whose answer is to be set."""
        new = new_request(request)
        self._requests[client, request.request_id] = new
        while len(self._requests) > 1 and (len(self._requests) > self.limit or self._are_large()):
            self._requests.popitem(last=False)
        return new

    def _are_large(self) -> bool:
        """Return whether the answers have too many bytes."""
        if self.max_bytes is None:
            return False
        answers = [request.answer.result() for request in self._requests.values() if request.answer.done()]
        return sum(answer.ByteSize() for answer in answers if isinstance(answer, Message)) > self.max_bytes

    def forget(self, client: str, request: GrpcRequest) -> None:
        """Forget a request, so that it can be tried again."""
        if self._requests.get((client, request.request_id)) is request:
            del self._requests[client, request.request_id]


def check_request_id(request_id: str) -> None:
    """Raise `GrpcRefusal` for an empty or long number of a request."""
    if not 0 < len(request_id) <= MAX_ID:
        raise GrpcRefusal(
            Code.INVALID_ARGUMENT,
            f"request_id has {len(request_id)} characters: give 1 to {MAX_ID}, others for each request",
        )


def same(stored: GrpcRequest | None, request: Any) -> GrpcRequest | None:
    """Return a stored request if there is one. Raises `GrpcRefusal` if a request of the same number has another content."""
    if stored is not None and stored.digest != digest(request):
        raise GrpcRefusal(
            Code.INVALID_ARGUMENT,
            f"request_id {request.request_id!r} was used with another content: give each request its own number",
        )
    return stored


def new_request(request: Any) -> GrpcRequest:
    """Return a request without an answer."""
    return GrpcRequest(request.request_id, digest(request), request.ByteSize(), asyncio.get_running_loop().create_future())


def digest(request: Message) -> bytes:
    """Return a digest of the content of a request."""
    return hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()
