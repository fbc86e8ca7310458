"""`jmarl serve --environments`: start a server of environments, say what it serves, and end it without losing an episode.

SIGTERM or Ctrl+C begin the end: no new episodes, those that are played go on for the grace period, then exit code 0. A second
signal ends the server at once, with exit code 1 if episodes were cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging.handlers
import os
import queue
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from importlib import metadata

import grpc

from jmarl.remote.access import Access, Peer, Strangers, connection_of
from jmarl.remote.catalog import Catalog, Offer, read_offer
from jmarl.remote.gate import Gate, log, peer_of
from jmarl.remote.limits import ServerLimits
from jmarl.remote.service import EnvironmentService
from jmarl.remote.sessions import Sessions
from jmarl.remote.values import PROTOCOL

MAX_CONCURRENT = 4096  # calls at once, of all clients; others get RESOURCE_EXHAUSTED
MAX_STREAMS = 8  # calls at once of one connection; a client of gRPC lets others wait
MAX_RESET = 8  # further ones of it that are over and cost time yet, as those that are reset at once do
EXPERIMENT = "h2_max_deallocating_streams_headroom"  # of gRPC, without which it refuses clients with MAX_STREAMS calls at once
MAX_FILES, SPARE_FILES = 65_536, 256  # open files of this process, at most; those that are no connections
MAX_STRANGERS = 1024  # connections without a call that has the token: of gRPC, which needs about 80 kB for each
LOOK_S, SOON_S = 0.25, 0.05  # between looks for connections without the token; if there were too many
HANDSHAKE_MS = 10_000  # in which a connection must speak HTTP/2, and TLS before it; then those that are silent are closed
REAP_S = 5.0  # between looks for idle sessions, at most
DRAIN_S = 0.05  # between looks for unfinished episodes at the end
LAST_ANSWERS_S = 2.0  # in which calls that are answered at the end must be sent
LAST_LINES_S = 1.0  # in which the last lines of the log must be written
STDERR = 2  # file descriptor
MAX_LOG = 10_000  # entries that wait to be written
MAX_LINE = 10_000  # characters at the beginning and at the end of an entry; errors may hold what clients have sent
HEADROOM = 1 << 16  # bytes of a message besides what `message_bytes` allows: gRPC's own error says less than ours
EVERYWHERE = ("0.0.0.0", "::")  # addresses that listen on all others
EXPERIMENTS = "GRPC_EXPERIMENTS"  # read when this process first uses gRPC
ENDED, CUT_OFF = 0, 1  # exit codes


class EnvironmentServer:
    """A server of environments and rewards. `start` it in a running event loop, and `end` it there."""

    def __init__(self, offer: Offer, access: Access, limits: ServerLimits, workers: int = 0):
        version = metadata.version("jmarl")
        self.access, self.limits = access, limits
        self.catalog = Catalog(offer, workers, limits.call_seconds)
        self.sessions = Sessions(limits)
        self._service = EnvironmentService(self.catalog, self.sessions, version)
        self._strangers = GrpcStrangers()
        self._gate = Gate(self._service.methods, access, self._strangers, version, limits.message_bytes)

    async def start(self) -> int:
        """Listen, and return the port. Raises ValueError if the address cannot be used."""
        size = self.limits.message_bytes + HEADROOM
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", size),
                ("grpc.so_reuseport", 0),  # a second server on a port is an error
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                ("grpc.http.overload_protection", int(EXPERIMENT in os.environ.get(EXPERIMENTS, ""))),
                ("grpc.http2.max_deallocating_streams", MAX_RESET),
                ("grpc.max_allowed_incoming_connections", allow_connections()),
                ("grpc.keepalive_time_ms", 60_000),  # a client whose machine is gone frees its connection
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.max_connection_idle_ms", 3_600_000),
            ],
            maximum_concurrent_rpcs=MAX_CONCURRENT,
        )
        self._server.add_generic_rpc_handlers([self._gate])
        try:
            self.port = self._listen()
            await self._server.start()
        except BaseException:
            await self._server.stop(None)
            raise
        looks = [self._look()] if self.access.token is not None else []
        self._tasks = [asyncio.create_task(task) for task in (self._reap(), *looks)]
        return self.port

    def _listen(self) -> int:
        host = f"[{self.access.host}]" if ":" in self.access.host else self.access.host
        address = f"{host}:{self.access.port}"
        try:
            if self.access.tls is None:
                return self._server.add_insecure_port(address)
            cert, key, client_ca = self.access.tls.read()
            credentials = grpc.ssl_server_credentials([(key, cert)], client_ca, client_ca is not None)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError:  # what is wrong is only in the lines that gRPC writes
            files = "" if self.access.tls is None else ", or --tls-cert and --tls-key are not PEM files of one another"
            raise ValueError(
                f"{address} cannot be listened on: is another server there{files}? --port 0 takes a free port"
            ) from None

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(REAP_S, self.limits.idle_seconds / 4))
            if count := self.sessions.reap():
                log.info("%d sessions ended after %g s without a call", count, self.limits.idle_seconds)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(SOON_S if self._strangers.are_many else LOOK_S)
            await self._strangers.look(self.port)

    async def drain(self, grace: float) -> int:
        """Begin nothing new, wait until all is over or the grace period is, and return how many episodes are unfinished."""
        self.sessions.is_draining, self._gate.is_serving = True, False
        end = asyncio.get_running_loop().time() + grace
        while self.is_busy and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(DRAIN_S)
        return self.sessions.count_unfinished()

    @property
    def is_busy(self) -> bool:
        """Whether an episode is played, or the answer to a request is computed."""
        return self.sessions.count_unfinished() > 0 or self._service.is_working

    async def end(self) -> None:
        """Stop listening, and end threads and processes."""
        for task in self._tasks:
            task.cancel()
        await self._server.stop(LAST_ANSWERS_S)
        self.catalog.close()


class GrpcStrangers(Strangers):
    """Connections without a call that has the token. gRPC accepts connections itself and closes none, so `look` finds them
    among the open files of this process."""

    def __init__(self) -> None:
        super().__init__(MAX_STRANGERS)
        self._known: set[Peer] = set()
        self.are_many = False

    def remove(self, peer: Peer) -> None:
        self._known.add(peer)
        super().remove(peer)

    async def look(self, port: int) -> None:
        """Count the connections to a port, and close the oldest strangers if there are too many. Does nothing while this
        process has fewer open files than there may be strangers; the look at many takes long, so that a thread does it."""
        before = self._known.copy()
        least = self.most if len(before) < self.most else 0  # a look also forgets connections that are closed
        present = await asyncio.to_thread(connections, port, least)
        if present is None:
            self.are_many = False
            return
        for peer in self.waiting.keys() - present.keys():
            del self.waiting[peer]
        for peer in [peer for peer in present if peer not in self._known and peer not in self.waiting]:
            self.add(peer, present[peer])
        shown = self._known - before  # the token, since the look began
        self._known = shown | (present.keys() - self.waiting.keys())  # also those that are being closed
        self.are_many = len(self.waiting) >= self.most


def connections(port: int, least: int = 0) -> dict[Peer, int] | None:
    """Return the connections to a port of this process, and their file descriptors; None where fewer than `least` are open."""
    names = os.listdir("/dev/fd")
    if len(names) < least:
        return None
    present = {}
    for name in names:
        with contextlib.suppress(OSError), connection_of(int(name)) as connection:
            if connection.getsockname()[1:2] == (port,):
                host, number = connection.getpeername()[:2]
                present[peer_of(f"ip:[{host}]:{number}")] = int(name)
    return present


def allow_connections() -> int:
    """Allow this process as many open files as it may have, and return how many connections leave room for other files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, min(hard, MAX_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most - SPARE_FILES, most // 2)


def serve_environments(
    environments: str,
    rewards: str,
    config: str | None,
    access: Access,
    limits: ServerLimits,
    workers: int,
    grace: float,
) -> int:
    """Serve environments and rewards, as of `read_offer`, until a signal, and return the exit code.

    workers: processes of each environment; 0: none. grace: seconds that episodes may go on after the signal.
    """
    offer = read_offer(environments, rewards, config)
    os.environ[EXPERIMENTS] = ",".join(filter(None, (os.environ.get(EXPERIMENTS), EXPERIMENT)))
    with log_to_stderr():
        return asyncio.run(serve(offer, access, limits, workers, grace))


class LogQueue(logging.handlers.QueueHandler):
    """Gives lines of the log to the thread that writes them. What does not fit into the queue is left out."""

    def enqueue(self, record: logging.LogRecord) -> None:
        record.msg = f"{record.msg[:MAX_LINE]} ... {record.msg[-MAX_LINE:]}" if len(record.msg) > 2 * MAX_LINE else record.msg
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


@contextlib.contextmanager
def log_to_stderr() -> Iterator[None]:
    """Write the log of the server to stderr. A pipe that nobody reads, or a full disk, does not stop the server."""
    records: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_LOG)
    handler = LogQueue(records)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    writer = threading.Thread(target=_write_lines, args=(records,), daemon=True)
    writer.start()
    try:
        yield
    finally:
        log.removeHandler(handler)
        with contextlib.suppress(queue.Full):
            records.put_nowait(None)
        writer.join(LAST_LINES_S)


def _write_lines(records: queue.Queue[logging.LogRecord | None]) -> None:
    """Write lines until there is None in their place. Takes no lock of Python, which a write that blocks would keep."""
    while (record := records.get()) is not None:
        with contextlib.suppress(OSError):
            os.write(STDERR, f"{record.msg}\n".encode("utf-8", "backslashreplace"))


async def serve(offer: Offer, access: Access, limits: ServerLimits, workers: int, grace: float) -> int:
    """Say what is served, serve it until a signal, and return the exit code."""
    server = EnvironmentServer(offer, access, limits, workers)
    signals: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    try:
        server.catalog.build_all()
        port = await server.start()
    except BaseException:
        server.catalog.close()
        raise
    print(announcement(server, port), flush=True)
    name = await signals.get()
    log.info("%s: no new episodes, %d are played", name, server.sessions.count_unfinished())
    draining, second = asyncio.create_task(server.drain(grace)), asyncio.create_task(signals.get())
    await asyncio.wait([draining, second], return_when=asyncio.FIRST_COMPLETED)
    at_once = second.done()
    unfinished = server.sessions.count_unfinished()
    draining.cancel()
    second.cancel()
    if unfinished:
        log.warning("%d episodes are cut off%s", unfinished, "" if at_once else f" after {grace:g} s")
    await server.end()
    return CUT_OFF if at_once and unfinished else ENDED


def announcement(server: EnvironmentServer, port: int) -> str:
    """Return what is served where, and how a client uses it."""
    access, offer = server.access, server.catalog.offer
    host = socket.gethostname() if access.host in EVERYWHERE else access.host  # what clients elsewhere may call it
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    levels = server.catalog.levels()
    names = [f"{name} (programs run at level {levels[name]})" if name in levels else name for name in offer.environments]
    protections = [text for text, used in (("TLS", access.tls), ("a token", access.token)) if used]
    needs = [("token_file", "FILE", access.token), ("tls_ca", "FILE", access.tls)]
    needs += [(name, "FILE", access.tls and access.tls.client_ca) for name in ("tls_cert", "tls_key")]
    needed = {name: value for name, value, is_needed in needs if is_needed}
    protected = f"{', '.join(protections) or 'this machine only'}; protocol {PROTOCOL}"
    lines = [f"serving on {address} ({protected}, process {os.getpid()}, SIGTERM ends it)"]
    if names:
        first = next(iter(offer.environments))
        python = "".join(f', {name}="{value}"' for name, value in needed.items())
        yaml = "".join(f", {name}: {value}" for name, value in needed.items())
        lines += [
            f"  environments: {', '.join(names)}",
            f'  Python: jmarl.RemoteEnvironment("{address}", "{first}"{python})',
            f"  YAML:   task: {{env_type: {first}, remote: true, server_address: {address}{yaml}}}",
        ]
    if offer.rewards:
        lines.append(f"  rewards: {', '.join(offer.rewards)}")
    return "\n".join(lines)
