"""Serve a team over HTTP until SIGTERM or Ctrl+C: `jmarl serve --models RUN --http`.

SIGTERM drains: new requests get 503, those under way have `GRACE_S` seconds to finish. A second signal ends them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import uvicorn

from jmarl.config import TrainConfig
from jmarl.remote import Access, Door
from jmarl.serving import connections
from jmarl.serving.app import Guard, make_app
from jmarl.serving.service import TeamService
from jmarl.team import Team, moved, on_mesh

GRACE_S = 30.0
MAX_CONNECTIONS = 512  # that have shown the token
MAX_STRANGERS = 768  # that have not: of the 1024 open files that a process often has
ACCEPTED_AT_ONCE = 32  # connections, before those that are open
KEEP_ALIVE_S = 30
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Uvicorn(uvicorn.Server):
    """A server that leaves signals alone: uvicorn's own would refuse connections, and end this process by the signal again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ModelServer:
    """Answers requests for the agents of a team. Its port is open from the beginning.

    Args:
        service: the team.
        access: where to listen, and who may connect.
        grace_s: seconds that requests under way have after `drain`.
        log: prints a text about a request or an error.
    """

    def __init__(self, service: TeamService, access: Access, grace_s: float = GRACE_S, log: Callable[[str], None] = print):
        self.service, self.access, self.grace_s = service, access, grace_s
        self.socket: Any = Door.open(access, MAX_CONNECTIONS, MAX_STRANGERS)
        self.guard, self.deadline = Guard(make_app(service), access, self.socket, service.limits.body, log), 0.0
        tls = access.tls
        config = uvicorn.Config(
            self.guard,
            http=connections.HttpConnection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=ACCEPTED_AT_ONCE,
            limit_concurrency=MAX_CONNECTIONS + MAX_STRANGERS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,  # `drain` has waited already
            ssl_certfile=None if tls is None else tls.cert,
            ssl_keyfile=None if tls is None else tls.key,
            ssl_ca_certs=None if tls is None or tls.client_ca is None else str(tls.client_ca),
            ssl_cert_reqs=ssl.CERT_NONE if tls is None or tls.client_ca is None else ssl.CERT_REQUIRED,
        )
        try:
            config.load()
        except (ssl.SSLError, OSError) as error:
            self.socket.close()
            raise ValueError(
                f"--tls-cert and --tls-key cannot be used ({error}): give a certificate and its key as PEM"
            ) from error
        self.server = _Uvicorn(config)

    @property
    def address(self) -> str:
        """The address for clients, such as http://127.0.0.1:8000."""
        host, port = self.socket.getsockname()[:2]
        return f"{'http' if self.access.tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self, signals: bool = True, lines: Sequence[str] = ()) -> None:
        """Serve until `drain`.

        Args:
            signals: drain on SIGTERM and Ctrl+C too; for the main thread only.
            lines: what to print when the server can be called, and ended by a signal.
        """
        self.service.start()
        try:
            asyncio.run(self._serve(signals, lines))
        finally:
            self.service.stop()
            self.socket.close()
        if error := self.service.engine.failure:
            raise RuntimeError(f"the server has ended, because the thread that samples failed ({error!r})") from error

    def drain(self) -> None:
        """Answer new requests with 503, and end when those under way have, or after the grace; at once if called again. From
        any thread."""
        self.deadline = time.monotonic() + (0 if self.guard.draining else self.grace_s)
        self.guard.draining = True

    async def _serve(self, signals: bool, lines: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        if self.access.tls is not None:  # asyncio's limit is a minute, and uvicorn has no setting for it
            limited: Any = partial(loop.create_server, ssl_handshake_timeout=connections.HEADER_S)
            loop.create_server = limited
        for number in SIGNALS if signals else ():
            loop.add_signal_handler(number, self.drain)
        for line in lines:
            print(line, flush=True)
        ending = loop.create_task(self._end_when_drained())
        await self.server.serve([self.socket])
        ending.cancel()

    async def _end_when_drained(self) -> None:
        engine, guard = self.service.engine, self.guard
        while not engine.stopping and not (guard.draining and (not guard.running or time.monotonic() > self.deadline)):
            await asyncio.sleep(0.05)
        engine.end()  # requests that are left get an error, if the turn of the engine is short
        self.server.should_exit = True


def serve_models(
    team: Team,
    names: Sequence[str],
    cfg: TrainConfig,
    access: Access,
    *,
    slots: int = 8,
    max_waiting: int = 64,
    max_tokens: int | None = None,
    grace_s: float = GRACE_S,
) -> int:
    """Serve a team until SIGTERM or Ctrl+C, and return the exit code.

    Args:
        team: the team, with its agents.
        names: of the agents, for clients.
        cfg: settings of sampling and of the chat template, as those of the training.
        access: where to listen, and who may connect.
        slots: rows of each agent that are sampled side by side.
        max_waiting: requests that may wait.
        max_tokens: longest completion that a request may ask for; None: see `TeamService`.
        grace_s: seconds that requests under way have after a signal.
    """
    placed = on_mesh(team, cfg.run)
    if any(spec.mesh is not None and spec.mesh.shape["model"] > 1 for spec in placed.stacks):
        raise ValueError(
            f"mesh={cfg.run.mesh!r} divides the weights of an agent, which --http does not: give --mesh agent=1, or auto"
        )
    team, params = moved(team, None, cfg.run)
    service = TeamService(team, params, names, cfg, slots=slots, max_waiting=max_waiting, max_tokens=max_tokens, say=log)
    server = ModelServer(service, access, grace_s, log)
    server.run(lines=greeting(server, names))
    log("stopped; no request is under way")
    return 0


def greeting(server: ModelServer, names: Sequence[str]) -> list[str]:
    """Return lines that say where the server is and how to call it."""
    token = "" if server.access.token is None else "-H 'Authorization: Bearer TOKEN' "
    body = f'{{"model": "{names[0]}", "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'
    return [
        f"{server.address}/v1 serves {', '.join(names)}; Ctrl+C ends it",
        f"curl {token}-H 'Content-Type: application/json' {server.address}/v1/chat/completions -d '{body}'",
        f"openai.OpenAI(base_url='{server.address}/v1', api_key='{'TOKEN' if token else 'none'}')",
    ]


def log(text: str) -> None:
    """Print a text on standard error, at once."""
    print(f"jmarl: {text}", file=sys.stderr, flush=True)
