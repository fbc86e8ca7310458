"""Play an environment of an OpenEnv server: `OpenEnv("ws://localhost:8000", max_turns=8)`, a `TextEnvironment` of one agent.

In YAML: `environment: jmarl.remote.openenv.client:OpenEnv` and `options: {url: ..., max_turns: 8}`. The server holds an episode
in a session, one for each WebSocket. A state here is a handle: the data of `reset` and the actions since then. An episode that
branches, or whose session is lost or taken by another episode, is played again from its handle, and every answer must be that
of the first time; otherwise that is an error. A call that takes too long drops the socket, because replies have no ids, and
raises `Unanswered`: the joint action is masked.

An observation has a reward or none. None counts as 0 before the end of an episode; at its end the joint action is masked.
Left out: tools (MCP), and starting servers in containers.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from jmarl.envs import import_object
from jmarl.envs.base import Step, TextEnvironment, Unanswered
from jmarl.models.hub.tokenize import as_prompt
from jmarl.remote.access import is_loopback, read_token

CLOSED, ENDED, FULL, FAILED = "", "SESSION_ERROR", "CAPACITY_REACHED", "EXECUTION_ERROR"  # codes of errors of a server
TEXT_FIELDS = ("prompt", "text", "message", "content", "observation", "instruction", "output", "stdout", "echoed_message")
MAX_MESSAGE, CONNECT_S = 100 << 20, 10.0  # bytes and seconds, as OpenEnv's own client
CODES = {  # codes of errors that are mistakes of the caller
    "VALIDATION_ERROR": "set action so that its fields are those of the environment, and the task to what reset takes",
    "UNKNOWN_TYPE": "this is no OpenEnv server of version 0.10",
    "INVALID_JSON": "this is no OpenEnv server of version 0.10",
}


class Handle(NamedTuple):
    """The state of an episode: enough to play it again."""

    episode: str  # id of the session that is there; others play it again
    data: dict  # of reset
    actions: tuple  # since then, as JSON
    answers: tuple  # digests of the answers to reset and the actions


class OpenEnvError(Unanswered):
    """The server answered with an error, whose code this is, or closed the connection: CLOSED."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class OpenEnvSession:
    """A socket, and where the episode behind it stands."""

    def __init__(self, connecting: Any):
        self._open = contextlib.ExitStack()
        self.socket = self._open.enter_context(connecting)
        self.close = self._open.close
        self.episode, self.steps = "", 0  # "": none

    def stands_at(self, handle: Handle) -> bool:
        """Return whether the next action of an episode can be sent here."""
        return self.episode == handle.episode and self.steps == len(handle.actions)


class OpenEnv(TextEnvironment):
    """An environment of an OpenEnv server, for a team of one agent.

    A task is the data of `reset`: {"seed": 3}, and what else the environment takes. Its own tasks are seeds, even ones for the
    split train and odd ones for eval.

    Args:
        url: of the server: ws://, wss://, http:// or https://.
        max_turns: steps after which an episode is truncated.
        action: the field of the action that gets the message, or module:function or a function that makes an action (a dict) of
            a message.
        observation: the field of the observation that the agent reads, or module:function or a function that makes a text or
            chat messages of an observation (a dict). None: the first of TEXT_FIELDS that is there.
        reward_range: lowest and highest reward of one step.
        sessions: sockets that are open at once. Fewer than episodes side by side means that they are played again. A server
            that allows fewer is content with those.
        timeout: seconds that one call may take.
        token_file: file with a token, sent as `authorization: Bearer TOKEN`.
    """

    roles = ("agent",)

    def __init__(
        self,
        url: str,
        max_turns: int,
        action: str | Callable[[str], dict] = "message",
        observation: str | Callable[[dict], Any] | None = None,
        reward_range: Sequence[float] = (-math.inf, math.inf),
        sessions: int = 16,
        timeout: float = 60.0,
        token_file: str | None = None,
    ):
        if max_turns < 1 or sessions < 1 or timeout <= 0:
            raise ValueError(
                f"max_turns={max_turns}, sessions={sessions}, timeout={timeout}: needs max_turns >= 1, sessions >= 1, "
                "timeout > 0"
            )
        try:
            importlib.import_module("websockets")
        except ImportError as error:
            raise ImportError("environments of OpenEnv need the websockets package: pip install 'jmarl[serve]'") from error
        token = None if token_file is None else read_token(token_file)
        self._url = socket_url(url, token)  # no option: a run may resume with another server
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.max_turns, self.reward_range = max_turns, (float(reward_range[0]), float(reward_range[1]))
        self.action, self.observation = action, observation
        self._sessions: list[OpenEnvSession] = []  # the one that was used last is the last one
        self._most, self._timeout = sessions, timeout
        self._make_action, self._read = function_of("action", action), function_of("observation", observation)
        self._field = None if callable(observation) else observation

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_sessions": []}  # each process has its own sockets

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        if split not in ("train", "eval"):
            raise ValueError(f"split={split!r} is not allowed: OpenEnv has train and eval")
        return [{"seed": 2 * (seed * 1_000_003 + i) % (1 << 31) + (split == "eval")} for i in range(count)]

    def describe(self) -> dict[str, Any]:
        names = {"action": self.action, "observation": self.observation}
        return super().describe() | {
            key: x if isinstance(x, str | None) else getattr(x, "__qualname__", "") for key, x in names.items()
        }

    def close(self) -> None:
        """Close all sockets."""
        while self._sessions:
            self._drop(self._sessions[-1])

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[Handle, list[Any]]:
        data = {"seed": int(rng.integers(1 << 31))} | task  # a seed, so that the episode can be played again
        handle, answer = self._twice(lambda: self._begin(data))
        if answer["done"]:
            raise Unanswered(f"{self._url} ended the episode of {data} at its reset")
        return handle, [self._text(answer)]

    def step(self, state: Handle, messages: Sequence[str], rng: np.random.Generator) -> Step:
        action = self._make_action(messages[0]) if self._make_action else {self.action: messages[0]}
        if not isinstance(action, Mapping):
            raise TypeError(f"action returned {action!r:.80}: return a dict with the fields of the action")
        state, answer = self._twice(lambda: self._step(state, dict(action)))
        truncated = not answer["done"] and len(state.actions) >= self.max_turns
        done, reward = answer["done"] or truncated, answer["reward"]
        if done and reward is None:
            raise Unanswered(f"{self._url} gave no reward at the end of an episode")
        text = None if done else self._text(answer)
        return Step(state, [text], 0.0 if reward is None else reward, done, truncated=truncated)

    def _text(self, answer: dict) -> Any:
        fields = answer["observation"]
        return as_prompt(self._read(fields) if self._read else field_of(fields, self._field))

    # --- episodes ------------------------------------------------------------------------------------------------------

    def _begin(self, data: dict) -> tuple[Handle, dict]:
        """Begin an episode in a session that no episode needs, or in the one whose episode waits longest."""
        session, episode = self._session(), uuid.uuid4().hex
        session.episode = ""
        answer = self._call(session, {"type": "reset", "data": data})
        session.episode, session.steps = episode, 0
        return Handle(episode, data, (), (digest(answer),)), answer

    def _step(self, handle: Handle, action: dict) -> tuple[Handle, dict]:
        """Play an action; if no session stands there, play the episode again first."""
        if not any(session.stands_at(handle) for session in self._sessions):
            handle = self._play_again(handle)
        session = next(session for session in self._sessions if session.stands_at(handle))
        self._use(session)
        answer = self._call(session, {"type": "step", "data": action})
        session.episode, session.steps = "" if answer["done"] else handle.episode, session.steps + 1
        return handle._replace(actions=(*handle.actions, action), answers=(*handle.answers, digest(answer))), answer

    def _play_again(self, handle: Handle) -> Handle:
        """Play an episode up to a handle in a new session. Raises RuntimeError if the server answers otherwise."""
        again, _ = self._begin(handle.data)
        for action in handle.actions:
            if again.answers != handle.answers[: len(again.answers)]:
                break
            again, _ = self._step(again, action)
        if again.answers != handle.answers:
            raise RuntimeError(
                f"{self._url} answers otherwise when an episode is played again with the same seed and actions, after "
                f"{len(again.actions)} of {len(handle.actions)} actions. Episodes of this server can neither branch nor share "
                "sessions: set num_generations=1, and sessions to the number of tasks of a step"
            )
        return again

    def _twice(self, call: Callable[[], Any]) -> Any:
        """Call again if the connection was closed: servers end sessions that are idle."""
        try:
            return call()
        except OpenEnvError as error:
            if error.code not in (CLOSED, ENDED):
                raise
            for session in [session for session in self._sessions if not session.episode]:
                self._drop(session)
            return call()

    # --- sockets -------------------------------------------------------------------------------------------------------

    def _session(self) -> OpenEnvSession:
        """Return a session for a new episode."""
        session = next((session for session in self._sessions if not session.episode), None)
        if session is None and len(self._sessions) < self._most:
            session = self._connect()
        session = session or self._sessions[0]
        self._use(session)
        return session

    def _use(self, session: OpenEnvSession) -> None:
        """Put a session to the end of the list: the first one waits longest."""
        self._sessions.remove(session)
        self._sessions.append(session)

    def _connect(self) -> OpenEnvSession | None:
        """Open a socket. Returns None if the server has no room for one more beside those of this object."""
        from websockets.exceptions import InvalidStatus, WebSocketException

        try:
            session = self._open()
        except InvalidStatus as error:
            if error.response.status_code >= 500:  # one that is started, behind a proxy
                raise Unanswered(f"{self._url} cannot be reached: {error}") from error
            raise RuntimeError(f"{self._url} refused the connection: {error}. Is the token right (token_file)?") from error
        except (OSError, TimeoutError, WebSocketException) as error:
            raise Unanswered(f"{self._url} cannot be reached: {error}") from error
        self._sessions.append(session)
        try:
            self._call(session, {"type": "state"}, kind="state")  # a full server says so only now
        except OpenEnvError as error:
            if error.code == FULL and self._sessions:
                self._most = len(self._sessions)
                return None
            raise
        return session

    def _open(self) -> OpenEnvSession:
        """Open a socket; again where that hangs, as it sometimes does with TLS: Python reads and writes in two threads."""
        from websockets.sync.client import connect

        options: dict[str, Any] = dict(max_size=MAX_MESSAGE, compression=None, proxy=None, close_timeout=2)
        for is_last in (False, False, True):
            try:
                return OpenEnvSession(connect(self._url, additional_headers=self._headers, open_timeout=CONNECT_S, **options))
            except TimeoutError:
                if is_last:
                    raise
        raise AssertionError  # not reached

    def _drop(self, session: OpenEnvSession) -> None:
        self._sessions.remove(session)
        session.close()

    def _call(self, session: OpenEnvSession, message: dict, kind: str = "observation") -> dict:
        """Send a message and return the data of the answer. Drops the socket unless the answer came and is one."""
        from websockets.exceptions import ConnectionClosed

        try:
            with contextlib.suppress(ConnectionClosed):  # a server that refuses a session has said why before
                session.socket.send(json.dumps(message))
            return checked(json.loads(session.socket.recv(self._timeout)), kind)
        except OpenEnvError as error:
            session.episode = ""
            if error.code != FAILED:
                self._drop(session)
            if error.code in CODES:
                raise RuntimeError(f"{self._url} refused {message['type']}: {error}; {CODES[error.code]}") from error
            raise OpenEnvError(error.code, f"{self._url} answered {message['type']} with {error}") from error
        except BaseException as error:
            self._drop(session)
            if isinstance(error, TimeoutError):
                raise Unanswered(f"{self._url} did not answer within {self._timeout:g} s") from error
            if isinstance(error, ConnectionClosed):
                raise OpenEnvError(CLOSED, f"{self._url} closed the connection") from error
            if isinstance(error, ValueError | OSError | RecursionError | OverflowError):
                raise Unanswered(f"{self._url} answered with what is no message: {error}") from error
            raise


def socket_url(url: str, token: str | None) -> str:
    """Return the address of the WebSocket of a server. Raises ValueError for what is not allowed."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme not in ("ws", "wss") or not parts.hostname:
        raise ValueError(f"url={url!r} is not allowed: give ws://HOST:PORT, wss://, http:// or https://")
    if scheme == "ws" and token is not None and not is_loopback(parts.hostname):
        raise ValueError(f"url={url!r} is not allowed with token_file: others can read a token without TLS; use wss://")
    return f"{scheme}://{parts.netloc}{parts.path.removesuffix('/').removesuffix('/ws')}/ws"


def function_of(setting: str, value: Any) -> Callable | None:
    """Return the function that a setting is or names; None for the name of a field."""
    if isinstance(value, str) and ":" in value:
        try:
            value = import_object(value)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{setting}={value!r} cannot be imported: {error}") from error
    if callable(value):
        return value
    if not isinstance(value, str | None) or value == "":
        raise ValueError(f"{setting}={value!r:.60} is not allowed: give a field's name, module:function or a function")
    return None


def field_of(fields: Mapping[str, Any], name: str | None) -> Any:
    """Return the text or the chat messages of an observation."""
    known = [key for key in ([name] if name else TEXT_FIELDS) if isinstance(fields.get(key), str)]
    if known:
        return fields[known[0]]
    if name and isinstance(fields.get(name), list):
        return fields[name]
    asked = f"no text {name!r}" if name else f"none of {', '.join(TEXT_FIELDS)}"
    raise ValueError(
        f"an observation has {asked}, but {', '.join(fields) or 'no field'}: set observation to the field that the agent "
        "reads, or to module:function, which makes a text of the observation"
    )


def digest(answer: dict) -> str:
    """Return what two equal answers have in common, without metadata, which may have times."""
    fields = {key: x for key, x in answer["observation"].items() if key != "metadata"}
    text = json.dumps([fields, answer["reward"], answer["done"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def checked(reply: Any, kind: str) -> dict:
    """Return the data of a reply. Raises OpenEnvError for an error of the server, and ValueError for anything else."""
    data = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(data, dict):
        raise ValueError(f"a message without data, {reply!r:.80}")
    if reply.get("type") == "error":
        raise OpenEnvError(code := str(data.get("code")), f"{data.get('message')} ({code})")
    if reply.get("type") != kind:
        raise ValueError(f"a message of type {reply.get('type')!r:.40} in place of {kind}")
    if kind == "state":
        return data
    answer = {"observation": data.get("observation"), "reward": data.get("reward"), "done": data.get("done", False)}
    is_number = answer["reward"] is None or isinstance(answer["reward"], int | float)
    if not isinstance(answer["observation"], dict) or not isinstance(answer["done"], bool) or not is_number:
        raise ValueError(f"an observation that is none, {data!r:.80}")
    return answer | {"reward": None if answer["reward"] is None else float(answer["reward"])}
