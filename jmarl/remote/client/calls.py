"""One server, as this process sees it: how it is called, and what is known of it."""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from time import monotonic, sleep
from typing import Any, NamedTuple

from jmarl.remote import environments_pb2 as pb
from jmarl.remote.client.connection import Credentials, GrpcConnection, grpc

RETRIES = 2  # of a call that did not reach a server or lost its answer (UNAVAILABLE), with the same request ids
RETRY_SECONDS = 0.1  # before the first of them, on average; then twice as many
REPEATS = 3  # of a request that had no answer in time, with the same request ids: the server goes on computing
# In what a server says to a client that has too many calls at once (see `gate`), and gRPC if all clients have. The code has
# other reasons, too.
BUSY = ("calls at once", "Concurrent RPC limit exceeded")

CLOSED = "Channel closed!"  # what gRPC says of calls whose channel this process has closed
JITTER = Random()  # waiting draws no numbers of the user's own functions, which may share those of Python

# Codes for mistakes of the caller, which no server answers otherwise, and the errors that are raised for them.
FINAL: dict[grpc.StatusCode, type[Exception]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ValueError,
    grpc.StatusCode.UNIMPLEMENTED: NotImplementedError,
    grpc.StatusCode.UNAUTHENTICATED: PermissionError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionError,
}


class RemoteServer:
    """One server."""

    def __init__(self, target: str, weight: float, credentials: Credentials):
        self.target, self.weight = target, weight
        self.connection = GrpcConnection(target, credentials)
        self.limits = pb.Limits()
        self.listed = False  # among the addresses of the run
        self.ready = False  # takes new sessions
        self.generation = 0  # grows when its sessions are lost
        self.sessions: set[str] = set()  # of this process
        self.reserved = 0  # further ones that are about to be opened
        self.released: deque[str] = deque()  # sessions that nobody needs any more
        self.lost: set[str] = set()  # sessions to close if the server is back
        self.closing: dict[grpc.Future, list[str]] = {}  # calls that close some
        self.asked: grpc.Future | None = None  # for its description
        self.failures, self.reason = 0, "it has not answered yet"  # in a row; of the last one
        self.failed_at = self.not_before = self.full_until = 0.0  # on the monotonic clock
        self.full_reason = ""  # what it said when it had no room for a session

    def room(self) -> int:
        """Return how many more sessions of this process the server may have."""
        return (self.limits.sessions or 1 << 30) - self.load()

    def load(self) -> int:
        """Return how many sessions this process has there, or is about to open."""
        return len(self.sessions) + self.reserved


class Failure(NamedTuple):
    """Why a call has no reply."""

    code: grpc.StatusCode
    reason: str  # goes on after the name of the server


class Call(NamedTuple):
    """A call of a method of a server."""

    server: RemoteServer
    method: str
    request: Any


def call_all(calls: Sequence[Call], seconds: float) -> list[Any]:
    """Return the reply to each call, or its `Failure`. Calls are made side by side, and each try has some seconds.

    Those whose server was not reached are tried again RETRIES times, those that were too many for some seconds."""
    answers, retries, end = _try(calls, seconds), 0, monotonic() + seconds
    while True:
        failed = [i for i, answer in enumerate(answers) if isinstance(answer, Failure)]
        away = [i for i in failed if answers[i].code is grpc.StatusCode.UNAVAILABLE and retries < RETRIES]
        busy = [i for i in failed if is_busy(answers[i]) and monotonic() < end]
        if not (again := away + busy):
            return answers
        sleep(RETRY_SECONDS * (2**retries if away else 1) * JITTER.uniform(0.5, 1.5))
        retries += bool(away)
        for i, answer in zip(again, _try([calls[i] for i in again], seconds), strict=True):
            answers[i] = answer


def _try(calls: Sequence[Call], seconds: float) -> list[Any]:
    """Make calls once."""
    if len(calls) == 1:
        ((server, method, request),) = calls
        return [reply_or_failure(lambda: server.connection.call(method, request, seconds))]
    futures = [call.server.connection.start(call.method, call.request, seconds) for call in calls]
    try:
        return [reply_or_failure(future.result) for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def is_busy(failure: Failure) -> bool:
    """Return whether a server has refused a call because there were too many at once."""
    return failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and any(text in failure.reason for text in BUSY)


def reply_or_failure(wait: Callable[[], Any]) -> Any:
    """Return the reply of a call, for which `wait` waits, or its failure."""
    try:
        return wait()
    except grpc.FutureCancelledError:
        return Failure(grpc.StatusCode.CANCELLED, "the connection was closed")
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or ""  # type: ignore[attr-defined]
        if code is grpc.StatusCode.CANCELLED and details != CLOSED:  # the server has too much to do, or ends
            code, details = grpc.StatusCode.UNAVAILABLE, f"it has cancelled the call ({details})"
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"it does not answer in time ({details})"
        elif details.startswith("failed to connect to all addresses"):  # and a chain of reasons
            details = f"it cannot be reached ({details.rpartition(': ')[2]})"
        elif details.startswith("Exception deserializing"):
            code, details = grpc.StatusCode.UNKNOWN, "its answer is no message of this method"
        return Failure(code, details)
