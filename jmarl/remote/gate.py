"""What every call of a server passes: its token and version, its message, and the sentence that an error becomes.

Clients get a code, a sentence and the number of the request. The log has the rest under this number: a traceback may name
paths, answers and secrets. Calls are read here and not by the generated servicer, because that reads without a time limit, and
answers what it cannot read with an internal error. Left out: what the calls do, see `service`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from jmarl.remote import environments_pb2 as pb
from jmarl.remote.access import Access, Peer, Strangers
from jmarl.remote.values import PROTOCOL

Code = grpc.StatusCode
CLIENT, VERSION, TOKEN = "jmarl-client", "jmarl-protocol", "authorization"  # metadata of a call
RECEIVE_S = 20.0  # in which the message of a call must be there
HEALTH_S = 3.0  # the same of a question about health, which needs no token
MAX_HEALTH = 64  # questions about health at once, so that those who have no token leave room for other calls
MAX_CALLS = 2048  # calls at once of one client, which leave room for those of others
HEALTH = "/grpc.health.v1.Health/Check"  # its `Watch` is unimplemented: it would hold a place for as long as a client likes
MAX_SENTENCE = 2000  # bytes: a status travels in headers of at most 8192, where each may need three
MAX_CLIENT_NAME = 128
SERVICE = pb.DESCRIPTOR.services_by_name["EnvironmentService"]

log = logging.getLogger("jmarl.remote")


class GrpcRefusal(Exception):
    """An answer that is an error: a code of gRPC and a sentence for the client."""

    def __init__(self, code: grpc.StatusCode, sentence: str):
        super().__init__(sentence)
        self.code = code

    def alone(self) -> GrpcRefusal:
        """Return it without its traceback, if it is kept: the request, which has megabytes, would be there until Python looks
        for cycles."""
        return self.with_traceback(None)

    def to_error(self, number: str) -> pb.Error:
        """Return the message of a call in a batch. number: of the request."""
        return pb.Error(code=self.code.value[0], message=self.sentence(number))

    def sentence(self, number: str) -> str:
        """Return what the client reads."""
        return f"{shortened(str(self))} (request {number})"


class Caller(NamedTuple):
    """Who makes a call."""

    client: str  # its certificate and its own name; sessions belong to it
    origin: str  # its certificate, else its host: limits are counted by it, since clients choose their names
    number: str  # of the request, in the log


Method = Callable[[Any, Caller], Awaitable[Message]]


class Gate(grpc.GenericRpcHandler):
    """Handles the calls of the EnvironmentService, and those that ask whether the server serves.

    Args:
        methods: what answers each call, by its name in environments.proto.
        access: who may call.
        strangers: connections without a call that has the token.
        version: of jmarl.
        max_bytes: of an answer.
        receive_s: seconds in which the message of a call must be there.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        access: Access,
        strangers: Strangers,
        version: str,
        max_bytes: int,
        receive_s: float = RECEIVE_S,
    ):
        self.access, self.strangers, self.version = access, strangers, version
        self.max_bytes, self.receive_s = max_bytes, receive_s
        self._handlers = {
            f"/{SERVICE.full_name}/{name}": grpc.stream_unary_rpc_method_handler(self._handler(method, _request_class(name)))
            for name, method in methods.items()
        }
        self._refusals = {
            known: grpc.stream_unary_rpc_method_handler(partial(refuse_token, known)) for known in ("a wrong token", "no token")
        }
        self._handlers[HEALTH] = grpc.stream_unary_rpc_method_handler(self._health)
        self.is_serving, self.health_s = True, HEALTH_S
        self._calls: Counter[str] = Counter()  # at once, by origin

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        handler, metadata = self._handlers.get(method), handler_call_details.invocation_metadata
        token = next((value for key, value in metadata or () if key == TOKEN and isinstance(value, str)), None)
        if handler is None or method == HEALTH or self.access.allows(token):
            return handler
        return self._refusals["a wrong token" if token else "no token"]  # here, where a call costs least

    def _handler(self, method: Method, request_class: type[Message]) -> Callable[..., Awaitable[bytes]]:
        """Return a handler of raw messages. A client that sends one message cannot tell it from one of a unary call."""

        async def handle(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
            number = secrets.token_hex(6)
            answer = await answered(context, number)
            if isinstance(answer, bytes):
                return answer
            await context.abort(answer.code, answer.sentence(number))  # gRPC keeps this frame for a while, but not the request
            raise AssertionError("abort raises")

        async def answered(context: grpc.aio.ServicerContext, number: str) -> bytes | GrpcRefusal:
            try:
                caller = self._admit(context, number)
                with self._counted(caller.origin, MAX_CALLS, "calls at once of one client"):
                    request = await read(context, request_class, self.receive_s)
                    return self._written(await method(request, caller))
            except GrpcRefusal as refused:
                return refused.alone()
            except Exception:
                log.exception("request %s: the server failed in %s", number, method.__name__)
                return GrpcRefusal(Code.INTERNAL, "the server failed; its log says why")

        return handle

    def _admit(self, context: grpc.aio.ServicerContext, number: str) -> Caller:
        """Return who calls, with the token. Raises `GrpcRefusal` with another version."""
        given = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        if self.access.token is not None:
            self.strangers.remove(peer_of(context.peer()))
        name = given.get(CLIENT, "")
        if not 0 < len(name) <= MAX_CLIENT_NAME:  # clients without a name would share their sessions
            raise GrpcRefusal(Code.INVALID_ARGUMENT, f"{CLIENT} has {len(name)} characters, 1 to {MAX_CLIENT_NAME} are allowed")
        certificate = repr(identities) if (identities := context.peer_identities()) else ""
        caller = Caller(repr((certificate, name)), certificate or host_of(context.peer()), number)
        if (theirs := given.get(VERSION, "")) != PROTOCOL:
            spoken = f"protocol {theirs:.20}" if theirs else f"no protocol (metadata {VERSION})"
            raise GrpcRefusal(
                Code.INVALID_ARGUMENT,
                f"the client speaks {spoken}, and this server protocol {PROTOCOL}, of jmarl {self.version}: install the same "
                "version of jmarl on both sides",
            )
        return caller

    async def _health(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        """Answer whether the server serves, without a token, and nothing else: not what it serves."""
        try:
            with self._counted("", MAX_HEALTH, "questions about health at once"):
                request = await read(context, health_pb2.HealthCheckRequest, self.health_s)
            if request.service:
                raise GrpcRefusal(Code.NOT_FOUND, "only the whole server has a health")
        except GrpcRefusal as refused:
            await context.abort(refused.code, str(refused))
        states = health_pb2.HealthCheckResponse.ServingStatus
        status = states.SERVING if self.is_serving else states.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status).SerializeToString()

    @contextlib.contextmanager
    def _counted(self, origin: str, most: int, what: str) -> Iterator[None]:
        """Count a call while it is answered. Raises `GrpcRefusal` if there are too many. origin: of a client; empty: all
        without a token."""
        if self._calls[origin] >= most:
            raise GrpcRefusal(Code.RESOURCE_EXHAUSTED, f"more than {most} {what}: wait")
        self._calls[origin] += 1
        try:
            yield
        finally:
            self._calls[origin] -= 1
            if not self._calls[origin]:
                del self._calls[origin]

    def _written(self, reply: Message) -> bytes:
        """Return the bytes of an answer."""
        size = reply.ByteSize()
        if size > self.max_bytes:
            raise GrpcRefusal(
                Code.RESOURCE_EXHAUSTED,
                f"the answer has {size} bytes, and messages of this server have at most {self.max_bytes}: ask for less at once",
            )
        return reply.SerializeToString()


async def refuse_token(known: str, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    """Answer a call without the token. known: of it."""
    refused = GrpcRefusal(Code.UNAUTHENTICATED, f"this call has {known}: give the one in the server's --token-file")
    context.set_code(refused.code)
    context.set_details(refused.sentence(secrets.token_hex(6)))


def host_of(peer: str) -> str:
    """Return the host in what gRPC calls a peer, such as ipv4:10.0.0.1:4711; of IPv6 the network of 64 bits, all of which one
    host may use."""
    host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # no address of IP
        return peer
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


def peer_of(peer: str) -> Peer:
    """Return the host and the port in what gRPC calls a peer."""
    return host_of(peer), int(port) if (port := peer.rpartition(":")[2]).isdecimal() else 0


async def read(context: grpc.aio.ServicerContext, request_class: type[Any], seconds: float) -> Any:
    """Return the message of a call. Raises `GrpcRefusal` if it is not there in time, or is another one."""
    try:
        async with asyncio.timeout(seconds):
            data = await context.read()  # the iterator of gRPC would keep the message
    except TimeoutError:
        raise GrpcRefusal(Code.DEADLINE_EXCEEDED, f"no message within {seconds:g} s") from None
    if not isinstance(data, bytes):  # the end of the stream
        raise GrpcRefusal(Code.INVALID_ARGUMENT, "a call without a message")
    try:
        return request_class.FromString(data)
    except DecodeError:
        raise GrpcRefusal(Code.INVALID_ARGUMENT, f"the message is no {request_class.DESCRIPTOR.name}") from None


def shortened(text: str) -> str:
    """Return the beginning of a text that fits into a status, without what UTF-8 does not hold."""
    return text.encode("utf-8", "replace")[:MAX_SENTENCE].decode("utf-8", "ignore")


def _request_class(method: str) -> type[Message]:
    return getattr(pb, SERVICE.methods_by_name[method].input_type.name)
