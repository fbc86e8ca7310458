"""The plays of a batch: what each of them asks a server next, and how their requests are put into messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jmarl.remote import environments_pb2 as pb
from jmarl.remote.client.calls import RemoteServer
from jmarl.remote.client.connection import client_name
from jmarl.remote.client.episodes import RemoteHistory, RemoteSession
from jmarl.remote.values import checked_text, to_map

MAX_BATCH = 256  # calls in a request
BATCH_SHARE = 0.9  # of a message that calls may fill

_numbers = itertools.count()  # of requests of this process


class Play:
    """A call on its way: an episode that begins (no move), or a joint action in one."""

    def __init__(
        self, history: RemoteHistory, session: RemoteSession | None = None, move: tuple[tuple[str, ...], int] | None = None
    ):
        self.history, self.session = history, session
        self.moves = history.moves if move is None else (*history.moves, move)
        self.begins = move is None
        self.server: RemoteServer | None = None if session is None else session.server
        self.result: Any = None
        self.lost, self.avoid = 0, set[RemoteServer]()
        self.repeats = 0  # of the request, after deadlines
        self.together = MAX_BATCH  # calls in a request with this one, at most
        self.doubted: dict[str, RemoteServer] = {}  # what is wrong with a reward -> who gave it
        self.request: pb.ResetRequest | pb.StepRequest | None = None  # the next one; the same object when it is repeated

    def leave(self) -> None:
        """Give the session up: the play begins again."""
        self.session, self.server, self.request, self.repeats = None, None, None, 0


def divided(plays: Sequence[Play], start: pb.ResetRequest) -> Iterator[tuple[RemoteServer, str, Any, list[Play]]]:
    """Group the next requests of plays by server and method, and divide them by the limits of the server.

    start: what all resets have in common."""
    groups: dict[tuple[RemoteServer, str], list[Play]] = {}
    for play in plays:
        assert play.server is not None  # see `RemoteEngine._place`
        play.request = play.request or next_request(play, start)
        groups.setdefault((play.server, "BatchReset" if play.session is None else "BatchStep"), []).append(play)
    for (server, method), group in groups.items():
        limit = min(server.limits.batch or MAX_BATCH, MAX_BATCH)
        room = BATCH_SHARE * (server.limits.message_bytes or 4 * 2**20)
        kind = pb.BatchResetRequest if method == "BatchReset" else pb.BatchStepRequest
        chunk, size, most = [], 0, limit
        for play in group:
            assert play.request is not None
            own = play.request.ByteSize() + 8
            if chunk and (len(chunk) >= min(most, play.together) or size + own > room):
                yield server, method, kind(calls=[x.request for x in chunk]), chunk
                chunk, size, most = [], 0, limit
            chunk.append(play)
            size, most = size + own, min(most, play.together)
        yield server, method, kind(calls=[x.request for x in chunk]), chunk


def next_request(play: Play, start: pb.ResetRequest) -> pb.ResetRequest | pb.StepRequest:
    """Return the next request of a play: a reset where it has no session, otherwise a step."""
    if play.session is None:
        task = to_map(play.history.task, "task")
        request = pb.ResetRequest(task=task, seed=play.history.seed, request_id=request_id())
        request.MergeFrom(start)
        return request
    texts, seed = play.moves[play.session.step]
    messages = [checked_text(text, f"the message of agent {n}") for n, text in enumerate(texts)]
    return pb.StepRequest(
        session=play.session.name, step=play.session.step, messages=messages, seed=seed, request_id=request_id()
    )


def request_id() -> str:
    """Return a name that no other request has."""
    return f"{client_name()}-{next(_numbers)}"
