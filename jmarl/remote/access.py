"""Who may connect to a server: where it listens, its token and its certificate. The same for all servers of jmarl.

A server listens on the loopback interface unless told otherwise, and anywhere else only with TLS and a token. Left out: users
and rights. Whoever knows the token may do all that a server offers.
"""

from __future__ import annotations

import dataclasses
import hmac
import ipaddress
import re
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

from jmarl.config import check as check_setting
from jmarl.config.paths import expand_home

LOOPBACK = "127.0.0.1"
BEARER = "bearer"  # how HTTP and gRPC send a token: `authorization: Bearer TOKEN`


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
