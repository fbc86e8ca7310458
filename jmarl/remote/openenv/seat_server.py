"""Offer one seat of an environment to clients of OpenEnv: `jmarl serve --openenv ENV`. A session is one WebSocket, at /ws.

The client sends {type, data}: reset (data: seed and episode_id, both optional), step (data: message), state, close. The replies
are observation (observation: prompt and messages; reward; done), state (episode_id, step_count) and error (message, code,
request_id). GET /health needs no token. Left out: tools (MCP), and tasks that clients choose by more than a seed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import ssl
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from jmarl.envs.base import Unanswered
from jmarl.remote.access import Access, Door, open_socket
from jmarl.remote.openenv.seat import Seat, SeatEpisode, Seen, fields_of

MAX_MESSAGE = 1 << 20  # bytes
MAX_SESSIONS = 16  # by default: each has a thread
OPENING_S = 5.0  # in which a client must ask for one; its connection, one of at most `MAX_STRANGERS`, has a thread
CLOSE_S = 5.0  # in which sessions must be closed at the end
QUIET = logging.getLogger(__name__)  # the library logs a traceback for each client that speaks another protocol
QUIET.setLevel(logging.CRITICAL)
FIELDS = {"reset": {"seed": int, "episode_id": str}, "step": {"message": str}}  # of data; None is allowed in reset
TYPES = (*FIELDS, "state", "close")


class OpenEnvRefusal(Exception):
    """An error that the client is told of."""

    def __init__(self, code: str, message: str, **more: Any):
        super().__init__(message)
        self.code, self.more = code, more


class SeatServer:
    """Answers clients of OpenEnv, each in a thread. Its port is open from the beginning.

    Args:
        seat: what is offered.
        access: where to listen, and who may connect.
        max_sessions: clients at once.
        idle_s: seconds without a message after which a session is ended.
        log: prints a text about an error.
    """

    def __init__(
        self,
        seat: Seat,
        access: Access,
        max_sessions: int = MAX_SESSIONS,
        idle_s: float = 600.0,
        log: Callable[[str], None] = print,
    ):
        self.seat, self.access, self.max_sessions, self.idle_s, self.log = seat, access, max_sessions, idle_s, log
        self.sessions: set[ServerConnection] = set()
        self.playing: set[ServerConnection] = set()  # those with an episode that is not over
        self.lock, self.is_draining = threading.Lock(), False
        self.server: Server = serve(
            self._session,
            sock=open_socket(access),
            ssl=context_of(access),
            process_request=self._check,
            origins=[None],  # no page of a browser, which could reach the loopback interface
            compression=None,
            max_size=MAX_MESSAGE,
            server_header=None,
            logger=QUIET,
            open_timeout=OPENING_S,
            close_timeout=2,
        )
        self.door = Door(self.server.socket)
        self.server.socket = self.door  # type: ignore[assignment]
        self.port: int = self.door.getsockname()[1]
        host = f"[{access.host}]" if ":" in access.host else access.host
        self.url = f"{'ws' if access.tls is None else 'wss'}://{host}:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, name="openenv", daemon=True)
        self.thread.start()

    def __enter__(self) -> SeatServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def drain(self, grace_s: float) -> None:
        """Refuse new sessions and episodes, and wait until the others are over, at most `grace_s` seconds."""
        self.is_draining, end = True, time.monotonic() + grace_s
        while self.playing and time.monotonic() < end:
            time.sleep(0.05)

    def close(self) -> None:
        """End all sessions and close the port. Threads that hang in calls of the environment are left to themselves."""
        self.is_draining = True
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        for connection in list(self.sessions):
            with contextlib.suppress(OSError):  # closed already
                connection.socket.shutdown(socket.SHUT_RDWR)  # ends sending to a client that reads nothing
        self.thread.join()

    def _close(self) -> None:
        self.server.shutdown()  # waits for the threads of sessions
        for connection in list(self.sessions):  # that older versions of the library leave open
            connection.close(1001, "the server ends")

    def _check(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer what is no session: health, a wrong token or path, and everything while the server drains."""
        path, _, query = request.path.partition("?")
        if path == "/health":
            status, text = (HTTPStatus.SERVICE_UNAVAILABLE, "ending") if self.is_draining else (HTTPStatus.OK, "healthy")
            return connection.respond(status, json.dumps({"status": text}))
        if not self.access.allows(request.headers.get("Authorization")):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "send the token of this server: Authorization: Bearer TOKEN\n")
        self.door.strangers.remove(connection.remote_address[:2])
        if path != "/ws" or query:
            return connection.respond(HTTPStatus.NOT_FOUND, "sessions are at /ws, without parameters\n")
        if self.is_draining:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "the server ends\n")
        return None

    def _session(self, connection: ServerConnection) -> None:
        """Answer the messages of a client until it goes."""
        with self.lock:
            has_room = len(self.sessions) < self.max_sessions
            if has_room:
                self.sessions.add(connection)
        try:
            with contextlib.suppress(ConnectionClosed):
                if has_room:
                    self._answer_all(connection)
                else:
                    refusal = OpenEnvRefusal(
                        "CAPACITY_REACHED", f"this server has {self.max_sessions} sessions, and no room for more"
                    )
                    connection.send(error_reply(refusal))
        finally:
            with self.lock:
                self.sessions.discard(connection)
                self.playing.discard(connection)

    def _answer_all(self, connection: ServerConnection) -> None:
        episode, state = self.seat.episode(), {"episode_id": None, "step_count": 0}
        while True:
            try:
                raw = connection.recv(self.idle_s)
            except TimeoutError:
                connection.send(
                    error_reply(OpenEnvRefusal("SESSION_ERROR", f"the session was idle for {self.idle_s:g} s and is over"))
                )
                return
            self.playing.add(connection)  # also while the last answer is sent
            reply = self._reply(raw, episode, state)
            if reply is None:
                return
            connection.send(reply)
            if episode.done:
                self.playing.discard(connection)

    def _reply(self, raw: str | bytes, episode: SeatEpisode, state: dict[str, Any]) -> str | None:
        """Return the answer to a message; None: the client wants to go."""
        try:
            kind, data = read(raw)
            if kind == "close":
                return None
            if kind == "state":
                return json.dumps({"type": "state", "data": state})
            if kind == "reset" and self.is_draining:
                raise OpenEnvRefusal("SESSION_ERROR", "this server is ending and begins no new episodes: try another one")
            if kind == "reset":
                seen = episode.reset(data.get("seed"))
                state["episode_id"] = data.get("episode_id") or uuid.uuid4().hex
            elif episode.done:
                raise OpenEnvRefusal(
                    "EXECUTION_ERROR", "there is no episode to act in: send reset first, also after the last step"
                )
            else:
                seen = episode.step(data["message"])
            state["step_count"] = episode.steps
            return observation_reply(seen)
        except OpenEnvRefusal as refusal:
            return error_reply(refusal)
        except TimeoutError as error:
            episode.done = True
            self.log(f"the environment did not answer in time: {error}")
            return error_reply(
                OpenEnvRefusal("EXECUTION_ERROR", "the environment did not answer in time, and the episode is over")
            )
        except Exception as error:  # clients get no traceback, path or answer: they may be in the message
            episode.done = True
            name = uuid.uuid4().hex[:8]
            has_reward = "there is no reward for this step" if isinstance(error, Unanswered) else "the environment failed"
            self.log(f"request {name}: {traceback.format_exc()}")
            return error_reply(OpenEnvRefusal("EXECUTION_ERROR", f"{has_reward}, and the episode is over", request_id=name))


def serve_seat(seat: Seat, access: Access, max_sessions: int, idle_s: float, log: Callable[[str], None], grace_s: float) -> int:
    """Serve until SIGTERM or Ctrl+C, and return the exit code. Then sessions under way have `grace_s` seconds to end; a second
    signal ends them at once. Other arguments are those of `SeatServer`."""
    server, ended = SeatServer(seat, access, max_sessions, idle_s, log), threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        signal.signal(number, lambda *_: ended.set())
    with server:
        print(f"serving at {server.url}", flush=True)
        ended.wait()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        server.is_draining = True  # before the line below says so
        print(f"ending; {len(server.playing)} sessions have {grace_s:g} s to finish", flush=True)
        server.drain(grace_s)
    return 0


def context_of(access: Access) -> ssl.SSLContext | None:
    """Return the TLS settings of a server; None: without TLS. Raises ValueError for files that cannot be used."""
    if access.tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # a client in threads may write while it reads a ticket, which some versions of Python get wrong
    try:
        context.load_cert_chain(access.tls.cert, access.tls.key)
        if access.tls.client_ca is not None:
            context.load_verify_locations(access.tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        raise ValueError(f"--tls-cert and --tls-key cannot be used ({error}): give a certificate and its key as PEM") from error
    return context


def read(raw: str | bytes) -> tuple[str, dict[str, Any]]:
    """Return the type and the data of a message. Raises OpenEnvRefusal for what is none."""
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError):
        raise OpenEnvRefusal("INVALID_JSON", "a message is a JSON object {type, data}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise OpenEnvRefusal("VALIDATION_ERROR", "a message is a JSON object {type, data}")
    kind, data = message["type"], message.get("data", {})
    if kind not in TYPES:
        raise OpenEnvRefusal("UNKNOWN_TYPE", f"the types of messages are {', '.join(TYPES)}")
    fields: Mapping[str, type] = FIELDS.get(kind, {})
    if not isinstance(data, dict) or message.keys() - {"type", "data"}:
        raise OpenEnvRefusal("VALIDATION_ERROR", "a message has type and data, an object, and nothing else")
    if unknown := data.keys() - fields.keys() - {"metadata"}:  # metadata: every action of OpenEnv has it
        known = ", ".join(fields) or "no fields"
        raise OpenEnvRefusal("VALIDATION_ERROR", f"data of {kind} has {known}, and not {min(unknown)[:40]!r}")
    data = {name: value for name, value in data.items() if name in fields and (value is not None or kind == "step")}
    wrong = [name for name, x in data.items() if not isinstance(x, fields[name]) or isinstance(x, bool)]
    if wrong or (kind == "step" and not data):
        name = (wrong or ["message"])[0]
        raise OpenEnvRefusal(
            "VALIDATION_ERROR", f"{name} of {kind} must be {'a text' if fields[name] is str else 'a whole number'}"
        )
    seed: Any = data.get("seed", 0)
    if not 0 <= seed < 1 << 63:
        raise OpenEnvRefusal("VALIDATION_ERROR", "seed of reset must be at least 0 and below 2^63")
    return kind, data


def observation_reply(seen: Seen) -> str:
    data = {"observation": fields_of(seen.prompt), "reward": seen.reward, "done": seen.done}
    return json.dumps({"type": "observation", "data": data})


def error_reply(refusal: OpenEnvRefusal) -> str:
    return json.dumps({"type": "error", "data": {"message": str(refusal), "code": refusal.code} | refusal.more})
