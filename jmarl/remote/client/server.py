"""One server, as this process sees it: how it is called, and what is known of it."""

from collections import deque
from collections.abc import Callable, Sequence
from random import uniform
from time import monotonic, sleep
from typing import Any, NamedTuple

from jmarl.remote import environments_pb2 as pb
from jmarl.remote.client.connection import Connection, Credentials, grpc

RETRIES = 2  # of a call that did not reach a server or lost its answer (UNAVAILABLE), with the same request ids
RETRY_SECONDS = 0.1  # before the first of them, on average; then twice as many
REPEATS = 3  # of a request that had no answer in time, with the same request ids: the server goes on computing
# In what a server says to a client that calls too often or has too many calls at once (see `gate`), and gRPC if all clients
# have too many at once. The code has other reasons, too.
BUSY = ("calls a second", "calls at once", "Concurrent RPC limit exceeded")

# Codes for mistakes of the caller, which no server answers otherwise, and the errors that are raised for them.
FINAL: dict[grpc.StatusCode, type[Exception]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ValueError,
    grpc.StatusCode.UNIMPLEMENTED: NotImplementedError,
    grpc.StatusCode.UNAUTHENTICATED: PermissionError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionError,
}


class Server:
    """One server."""

    def __init__(self, target: str, weight: float, credentials: Credentials):
        self.target, self.weight = target, weight
        self.connection = Connection(target, credentials)
        self.limits = pb.Limits()
        self.listed = False  # among the addresses of the run
        self.ready = False  # takes new sessions
        self.generation = 0  # grows when its sessions are lost
        self.sessions: set[str] = set()  # of this process
        self.reserved = 0  # further ones that are about to be opened
        self.released: deque[str] = deque()  # sessions that nobody needs any more
        self.lost: set[str] = set()  # sessions to close if the server is back
        self.closing: list[grpc.Future] = []  # calls that close some
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

    server: Server
    method: str
    request: Any


def call_all(calls: Sequence[Call], seconds: float) -> list[Any]:
    """Return the reply to each call, or its `Failure`. Calls are made side by side, and each try has some seconds."""
    if len(calls) == 1:
        return [_answer(calls[0], lambda: calls[0].server.connection.call(*calls[0][1:], seconds), seconds)]
    futures = [call.server.connection.start(call.method, call.request, seconds) for call in calls]
    try:
        return [_answer(call, future.result, seconds) for call, future in zip(calls, futures, strict=True)]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _answer(call: Call, wait: Callable[[], Any], seconds: float) -> Any:
    """Return the reply to a call, or the failure of its last try. wait: returns the reply of the first one."""
    server, generation, answer = call.server, call.server.generation, reply_or_failure(wait)
    retries, end = 0, monotonic() + seconds
    while isinstance(answer, Failure) and server.generation == generation:
        if is_busy(answer) and monotonic() < end:
            sleep(RETRY_SECONDS * uniform(0.5, 1.5))
        elif answer.code is grpc.StatusCode.UNAVAILABLE and retries < RETRIES:
            sleep(RETRY_SECONDS * 2**retries * uniform(0.5, 1.5))
            retries += 1
        else:
            break
        answer = reply_or_failure(lambda: server.connection.call(call.method, call.request, seconds))
    return answer


def is_busy(failure: Failure) -> bool:
    """Return whether a server has refused a call because there were too many in a second, or at once."""
    return failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and any(text in failure.reason for text in BUSY)


def reply_or_failure(wait: Callable[[], Any]) -> Any:
    """Return the reply of a call, for which `wait` waits, or its failure."""
    try:
        return wait()
    except grpc.FutureCancelledError:
        return Failure(grpc.StatusCode.CANCELLED, "the connection was closed")
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or ""  # type: ignore[attr-defined]
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"it does not answer in time ({details})"
        elif details.startswith("failed to connect to all addresses"):  # and a chain of reasons
            details = f"it cannot be reached ({details.rpartition(': ')[2]})"
        return Failure(code, details)
