"""A reward function on servers, which is called as if it were in this process.

    reward = remote_reward("node1:50051", "length")
    train(team, make_reward(reward, num_agents=2), items, cfg)

It is called once with the joint actions of a whole step, and its random numbers continue those of the run, so rewards are those
of the same function here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from jmarl.remote import environments_pb2 as pb
from jmarl.remote.client.connection import Credentials
from jmarl.remote.client.environment import connected
from jmarl.remote.client.plays import request_id
from jmarl.remote.client.servers import Question, Servers
from jmarl.remote.values import from_map, from_value, to_map


class RemoteReward:
    """A reward function on servers. See `remote_reward`.

    Args:
        servers: that have it.
        name: of the function there.
        fingerprint: of its source.
    """

    def __init__(self, servers: Servers, name: str, fingerprint: str):
        self.servers, self.name, self.fingerprint = servers, name, fingerprint
        self.__name__ = name  # in the log

    def __call__(self, *completions: Sequence[str], batch_items: Sequence[dict], rng: np.random.Generator) -> Any:
        request = pb.ScoreRequest(
            reward=self.name,
            completions=[pb.Texts(texts=texts) for texts in completions],
            items=[to_map(item, f"item {j}") for j, item in enumerate(batch_items)],
            random=to_map(rng.bit_generator.state, "rng"),
            request_id=request_id(),
            fingerprint=self.fingerprint,
        )
        reply = self.servers.call("Score", request)
        rng.bit_generator.state = from_map(reply.random)
        return from_value(reply.rewards)


class AsyncRemoteReward(RemoteReward):
    """A reward that is an `async def` on the servers: it gets random numbers of its own, as here."""

    async def __call__(self, *completions: Sequence[str], batch_items: Sequence[dict], rng: np.random.Generator) -> Any:
        return super().__call__(*completions, batch_items=batch_items, rng=rng)


def remote_reward(
    address: str | os.PathLike | Sequence[str],
    name: str,
    *,
    token_file: str | None = None,
    tls_ca: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    timeout: float = 60.0,
    patience: float = 60.0,
) -> RemoteReward:
    """Return a reward function by its name on servers. The arguments are those of `RemoteEnvironment`."""
    question = Question(name, "List", pb.ListRequest(), partial(fingerprint_in, name))
    servers = connected(address, Credentials(token_file, tls_ca, tls_cert, tls_key), question, timeout, patience)
    served = next(reward for reward in servers.described.rewards if reward.name == name)
    return (AsyncRemoteReward if served.is_async else RemoteReward)(servers, name, served.fingerprint)


def fingerprint_in(name: str, listed: pb.ListReply) -> str:
    """Return the fingerprint of a reward in a list. Raises ValueError if it is not there."""
    for reward in listed.rewards:
        if reward.name == name:
            return reward.fingerprint
    raise ValueError(f"it has no reward {name!r}, but {', '.join(reward.name for reward in listed.rewards) or 'none'}")
