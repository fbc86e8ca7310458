"""Who may connect to a server: where it listens, its token and its certificate. The same for all servers of jmarl.

A server listens on the loopback interface unless told otherwise, and anywhere else only with TLS and a token. Left out: users
and rights. Whoever knows the token may do all that a server offers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import ipaddress
import os
import re
import selectors
import socket
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jmarl.config import check as check_setting
from jmarl.config.paths import expand_home

LOOPBACK = "127.0.0.1"
BEARER = "bearer"  # how HTTP and gRPC send a token: `authorization: Bearer TOKEN`
MAX_STRANGERS = 128  # connections that have not shown the token, where each may have a thread; clients need time to show it
TAKEN_AT_ONCE = 64  # connections, before those that have sent something
SEND_S = 10  # in which a client must take what is sent to it, where a thread waits for that

Peer = tuple[str, int]  # the address at the other end of a connection


@dataclasses.dataclass(frozen=True)
class Tls:
    """The files of a server's certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None  # who signs the certificates that clients must show; None: they show none

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Return the contents of the certificate, the key and `client_ca`."""
        return self.cert.read_bytes(), self.key.read_bytes(), None if self.client_ca is None else self.client_ca.read_bytes()


@dataclasses.dataclass(frozen=True)
class Access:
    """Where a server listens, and who may connect."""

    host: str = LOOPBACK
    port: int = 0  # 0: a free one
    token: str | None = dataclasses.field(default=None, repr=False)
    tls: Tls | None = None

    @classmethod
    def of(
        cls,
        host: str,
        port: int,
        token_file: str | Path | None,
        tls_cert: str | Path | None,
        tls_key: str | Path | None,
        tls_client_ca: str | Path | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> Access:
        """Return the access that the flags of a command describe. Raises ValueError for what is not allowed."""
        if (tls_cert is None) != (tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together: give both, the certificate and its private key")
        if tls_client_ca is not None and tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key: without TLS no client shows a certificate")
        tls = None
        if tls_cert is not None and tls_key is not None:
            cert, key, client_ca = map(expand_home, (tls_cert, tls_key, tls_client_ca))
            tls = Tls(Path(cert), Path(key), None if client_ca is None else Path(client_ca))
            tls.read()  # a missing file is an error before anything else is read
        token = None if token_file is None else read_token(token_file, warn)
        check_setting("port", port, 0 <= port < 1 << 16, "0, for a free one, or a number up to 65535")
        check(host, token, tls)
        return cls(host, port, token, tls)

    def allows(self, authorization: str | None) -> bool:
        """Return whether a request with this `authorization` (Bearer TOKEN) may do what the server offers."""
        if self.token is None:
            return True
        scheme, _, given = (authorization or "").partition(" ")
        return is_token(given.strip() if scheme.lower() == BEARER else "", self.token)


class Strangers:
    """Connections that have not shown the token, the oldest first. One more than `most` closes the oldest of them, so that who
    has no token takes no place from who has one. Used by several threads."""

    def __init__(self, most: int = MAX_STRANGERS):
        self.most, self.lock = most, threading.Lock()
        self.waiting: dict[Peer, int] = {}  # their file descriptors, which may belong to others by now

    def add(self, peer: Peer, fd: int) -> None:
        """Count a new connection, and close the oldest one if there are too many."""
        with self.lock:
            self.waiting.pop(peer, None)
            self.waiting[peer] = fd
            oldest = [*self.waiting.items()][: -self.most]
            for other, number in oldest:
                if shut(other, number, spare_unread=len(oldest) < self.most):
                    del self.waiting[other]

    def remove(self, peer: Peer) -> None:
        """Leave a connection alone: it has shown the token, or is closed."""
        with self.lock:
            self.waiting.pop(peer, None)


@contextlib.contextmanager
def connection_of(fd: int) -> Iterator[socket.socket]:
    """Yield the connection that a file descriptor of this process names. Raises OSError if it is none."""
    copy = os.dup(fd)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection


def shut(peer: Peer, fd: int, spare_unread: bool) -> bool:
    """Shut a connection of this process down if it is still open. Return False if it is spared: what the server has not read
    yet may be the token."""
    with contextlib.suppress(OSError), connection_of(fd) as connection:
        if connection.getpeername()[1:2] != peer[1:]:  # that one is closed
            return True
        if spare_unread and peek(fd):
            return False
        connection.shutdown(socket.SHUT_RDWR)
    return True


def peek(fd: int) -> bytes | None:
    """Return a byte that a connection has sent; None: none yet; empty: it is closed."""
    try:
        with connection_of(fd) as connection:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Door:
    """A listening socket that accepts connections when they have sent something, so that silent ones cost next to nothing.
    Can be polled, as a socket can."""

    def __init__(self, listening: socket.socket, most: int = MAX_STRANGERS):
        self.socket, self.strangers, self.wait_s = listening, Strangers(most), 0.1
        self._silent: dict[int, tuple[socket.socket, Any]] = {}  # by file descriptor
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        listening.setblocking(False)

    @classmethod
    def open(cls, access: Access, backlog: int, most: int) -> Door:
        """Return a socket that listens where `access` says. Raises ValueError if the address cannot be used."""
        return cls(open_socket(access, backlog), most)

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection that has sent something. Raises OSError when the socket is closed."""
        while self.socket.fileno() >= 0:
            for key, _ in self._selector.select(self.wait_s):
                if key.fileobj is self.socket:
                    self._take()
                    continue
                self._selector.unregister(key.fileobj)
                connection, address = self._silent.pop(key.fd)
                if peek(key.fd):
                    return connection, address
                connection.close()
            if not self.wait_s:
                raise BlockingIOError
        raise OSError("the socket is closed")

    def _take(self) -> None:
        """Take silent connections from the socket, some at a time."""
        with contextlib.suppress(OSError):
            for _ in range(TAKEN_AT_ONCE):
                connection, address = self.socket.accept()
                # a thread that writes to a client that reads nothing would keep the lock that closing its session needs
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
                self._silent[connection.fileno()] = connection, address
                self._selector.register(connection, selectors.EVENT_READ)
                self.strangers.add(address[:2], connection.fileno())

    def setblocking(self, flag: bool) -> None:
        """Let `accept` raise BlockingIOError where there is no connection."""
        self.wait_s = 0.1 if flag else 0.0

    def listen(self, backlog: int) -> None:
        """Do nothing: the socket listens."""

    def fileno(self) -> int:
        """Return what can be polled."""
        return self._selector.fileno() if self.socket.fileno() >= 0 else -1  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close the socket and the silent connections."""
        self.socket.close()
        for connection, _ in [*self._silent.values()]:
            connection.close()

    def __getattr__(self, name: str) -> Any:  # family, getsockname
        return getattr(self.socket, name)


def open_socket(access: Access, backlog: int = 128) -> socket.socket:
    """Return a socket that listens. Raises ValueError if the address cannot be used. backlog: of connections that wait."""
    family = socket.AF_INET6 if ":" in access.host else socket.AF_INET
    try:
        return socket.create_server((access.host, access.port), family=family, backlog=backlog)
    except OSError as error:
        raise ValueError(
            f"--host {access.host} --port {access.port} cannot be used: {error.strerror}; choose another port, or 0 for a free "
            "one"
        ) from error


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: nobody knows where it will point
        return False


def check(host: str, token: str | None, tls: Tls | None) -> None:
    """Raise ValueError if a server must not listen there."""
    if is_loopback(host):
        return
    missing = [flags for flags, given in (("--tls-cert and --tls-key", tls), ("--token-file", token)) if given is None]
    if missing:
        raise ValueError(
            f"--host {host} is not allowed without {' and '.join(missing)}: others reach this address. Give them, or listen on "
            f"{LOOPBACK}, which only programs on this machine reach"
        )


def read_token(path: str | Path, warn: Callable[[str], None] = warnings.warn) -> str:
    """Return the token in a file, without the white space around it.

    Warns if other users of the machine may read the file. Raises ValueError if there is no token in it, or one that cannot
    stand in a header.
    """
    path = Path(expand_home(path))
    token = path.read_bytes().decode("utf-8", "replace").strip()
    if not re.fullmatch(r"[!-~]+", token):  # the token itself is not in the message, which may be logged
        wrong = "has characters other than ASCII letters, digits and signs, or blanks" if token else "is empty"
        raise ValueError(f"--token-file {path} {wrong}: write one token, such as that of `openssl rand -hex 32`")
    if path.stat().st_mode & 0o077:
        warn(f"other users of this machine may read --token-file {path}: chmod 600 {path}")
    return token


def is_token(given: str, token: str) -> bool:
    """Return whether `given` is the token, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())
