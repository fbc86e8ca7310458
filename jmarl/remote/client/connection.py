"""A connection to one server, made when it is first used in a process: it never crosses a fork."""

from __future__ import annotations

import dataclasses
import os
import uuid
from pathlib import Path
from typing import Any

from jmarl.config.paths import expand_home
from jmarl.remote.access import is_loopback, read_token
from jmarl.remote.values import PROTOCOL

try:
    import grpc
except ImportError as error:  # an extra
    raise ImportError("environments on servers need grpcio: pip install 'jmarl[serve]'") from error

MAX_MESSAGE = 64 * 2**20  # bytes of a request or reply
OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.enable_retries", 0),  # retries are those of `servers`, with their own bound
    ("grpc.enable_http_proxy", 0),  # servers are near, and a proxy of the machine does not know them
    ("grpc.use_local_subchannel_pool", 1),  # a new channel begins without the waiting times of an old one
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
]

_client: tuple[int, str] = (0, "")  # the process, and the name under which it owns sessions


def client_name() -> str:
    """Return the name under which this process owns sessions: a random one, which no other client can guess."""
    global _client
    if _client[0] != os.getpid():
        _client = os.getpid(), uuid.uuid4().hex
    return _client[1]


@dataclasses.dataclass(frozen=True)
class Credentials:
    """How a client shows who it is, and knows a server. Files are read when a connection is made.

    token_file: holds the token of the servers. tls_ca: who signs their certificates; None: no TLS. tls_cert, tls_key: the
    certificate of this client, for servers that ask for one.
    """

    token_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both, the certificate and its private key")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("tls_cert needs tls_ca, the file of who signs the certificates of the servers")
        for path in (self.token_file, self.tls_ca, self.tls_cert, self.tls_key):
            if path is not None and not Path(expand_home(path)).is_file():
                raise FileNotFoundError(f"there is no file {path}, which token_file, tls_ca, tls_cert or tls_key names")

    def metadata(self) -> list[tuple[str, str]]:
        """Return what is sent with every call."""
        own = [("jmarl-protocol", PROTOCOL), ("jmarl-client", client_name())]
        return own + ([("authorization", f"Bearer {read_token(self.token_file)}")] if self.token_file else [])

    def channel(self, target: str) -> grpc.Channel:
        """Return a channel to a server. Raises ValueError if the token would be sent unencrypted over a network."""
        if self.tls_ca is not None:
            files = (self.tls_ca, self.tls_key, self.tls_cert)
            contents = [None if path is None else Path(expand_home(path)).read_bytes() for path in files]
            return grpc.secure_channel(target, grpc.ssl_channel_credentials(*contents), OPTIONS)
        if self.token_file is not None and not is_local(target):
            raise ValueError(
                f"the token in {self.token_file} would go to {target} unencrypted: give tls_ca, the file of who signs the "
                "certificate of the server"
            )
        return grpc.insecure_channel(target, OPTIONS)


def is_local(target: str) -> bool:
    """Return whether an address is on this machine."""
    return target.startswith("unix:") or is_loopback(target.rpartition(":")[0].strip("[]"))


class GrpcConnection:
    """Calls the methods of a server."""

    def __init__(self, target: str, credentials: Credentials):
        self.target, self.credentials = target, credentials
        self._process = 0
        self._channel: grpc.Channel | None = None
        self._stub: Any = None
        self._metadata: list[tuple[str, str]] = []

    def start(self, method: str, request: Any, seconds: float) -> grpc.Future:
        """Start a call, which is answered or fails within some seconds."""
        return self._method(method).future(request, timeout=seconds, metadata=self._metadata)

    def call(self, method: str, request: Any, seconds: float) -> Any:
        """Return the reply to a call. Takes half the time of `start`, for which gRPC starts a thread."""
        return self._method(method)(request, timeout=seconds, metadata=self._metadata)

    def _method(self, name: str) -> Any:
        if self._process != os.getpid():
            self._open()
        return getattr(self._stub, name)

    def close(self) -> None:
        """Close the channel; a later call opens another one."""
        if self._channel is not None and self._process == os.getpid():
            self._channel.close()
        self._process, self._channel, self._stub = 0, None, None

    def _open(self) -> None:
        from jmarl.remote.environments_pb2_grpc import EnvironmentServiceStub

        self._channel = self.credentials.channel(self.target)
        self._stub = EnvironmentServiceStub(self._channel)
        self._metadata, self._process = self.credentials.metadata(), os.getpid()
