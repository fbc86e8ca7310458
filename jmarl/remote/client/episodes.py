"""What a client knows of an episode on a server: how it came to where it stands, and the session that stands there.

An environment is a function of the task, the messages and the seeds. So a `RemoteEpisode` can be played again on any server,
and whoever trains sees no difference. Where it is no such function, the digests of what it said differ.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from jmarl.remote import environments_pb2 as pb
from jmarl.remote.client.calls import RemoteServer


class RemoteHistory(NamedTuple):
    """All that the state of an episode follows from, and what the environment said on the way."""

    task: dict
    seed: int  # of `reset`
    moves: tuple[tuple[tuple[str, ...], int], ...] = ()  # joint actions [N], and the seed of each `step`
    digests: tuple[bytes, ...] = ()  # of what `reset` said, and each `step`


class RemoteSession:
    """The state of an episode in a server. It moves on with each step, and is closed when nobody refers to it."""

    def __init__(self, server: RemoteServer, name: str, step: int):
        self.server, self.name, self.step = server, name, step
        self.generation, self.used = server.generation, 0
        self._open = True
        server.sessions.add(name)

    def is_open(self) -> bool:
        """Return whether the server has the session, as far as is known here."""
        return self._open and self.server.generation == self.generation

    def gone(self) -> None:
        """Note that the server does not have the session any more."""
        if self.is_open():
            self.server.sessions.discard(self.name)
        self._open = False

    def release(self) -> None:
        """Let the session be closed with the next calls. May be called in any thread."""
        if self.is_open():
            self.server.released.append(self.name)
        self._open = False

    def __del__(self) -> None:
        self.release()


class RemoteEpisode:
    """An episode after some steps, which never changes. Its session may have moved on: then its history is played again.

    Another process gets it without the session: who plays an episode owns its session.
    """

    __slots__ = ("history", "session")

    def __init__(self, history: RemoteHistory, session: RemoteSession | None):
        self.history, self.session = history, session

    def own_session(self) -> RemoteSession | None:
        """Return the session if it stands where the episode does."""
        at_hand = self.session is not None and self.session.is_open() and self.session.step == len(self.history.moves)
        return self.session if at_hand else None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteEpisode, (self.history, None)

    def __repr__(self) -> str:
        return f"RemoteEpisode({self.history!r})"


def digest_of(result: pb.Start | pb.Result) -> bytes:
    """Return a digest of the observations, rewards and end in an answer. Info and parts may tell of times."""
    said = pb.Result(observations=result.observations)
    if isinstance(result, pb.Result):
        said.reward.CopyFrom(result.reward)
        said.done = result.done
    return hashlib.blake2b(said.SerializeToString(deterministic=True), digest_size=8).digest()
