"""An environment on servers, which is trained on as if it were in this process.

    env = RemoteEnvironment(["node1:50051", "node2:50051"], "math", {"difficulty_range": [1, 2]})
    train(team, env, env.tasks(), cfg)

In a YAML file and in `make`, `servers` is an option of any environment: `options: {servers: [node1:50051, node2:50051]}`.

Seeds are drawn here and sent with each call, so episodes, rewards and parameters are those of the same environment in this
process. `problems` are read here. Tasks hold their answers, where they have any: who may call a server may read them. Left out:
`solve`, which no server offers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from jmarl.envs.base import TextEnvironment
from jmarl.envs.options import OwnTasks
from jmarl.envs.rows import read_rows
from jmarl.envs.vector import LockStep
from jmarl.remote import environments_pb2 as pb
from jmarl.remote.client.addresses import Addresses
from jmarl.remote.client.connection import Credentials
from jmarl.remote.client.remote_engine import RemoteEngine
from jmarl.remote.client.servers import Question, Servers, tell
from jmarl.remote.values import from_map, to_map

ARGUMENTS = ("address", "token_file", "tls_ca", "tls_cert", "tls_key", "timeout", "patience")  # of `servers` in `make`


class DescribedEnvironment(TextEnvironment):
    """An environment as its servers describe it. `RemoteEngine` calls it."""

    def __init__(self, servers: Servers):
        self.servers, described = servers, servers.described
        self.roles = tuple(described.roles)
        self.reward_range = (described.lowest_reward, described.highest_reward)
        self.max_turns = described.max_turns
        self.data_sets, self.special_tokens = tuple(described.data_sets), tuple(described.special_tokens)

    @property
    def class_name(self) -> str:
        return self.servers.described.class_name

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        asked = self.servers.question.request
        request = pb.TasksRequest(environment=asked.environment, options=asked.options, split=split, count=count, seed=seed)
        tasks: list[dict] = []
        while True:
            request.first = len(tasks)
            reply = self.servers.call("Tasks", request)
            tasks += map(from_map, reply.tasks)
            if not reply.tasks or len(tasks) >= reply.total:
                return tasks

    def describe(self) -> dict[str, Any]:
        described = self.servers.described
        level = {"sandbox": described.sandbox} if described.sandbox else {}
        return from_map(described.description) | {"fingerprint": described.fingerprint} | level


class RemoteEnvironment(LockStep):
    """An environment on one or several servers.

    Args:
        address: HOST:PORT, a list of such, each with a weight if wanted (HOST:PORT=2), or a file with one on each line, which
            is read again when it changes.
        name: of the environment on the servers.
        options: keyword arguments of its constructor there, and those of `envs.options`.
        token_file: holds the token of the servers.
        tls_ca: who signs the certificates of the servers; None: no TLS.
        tls_cert, tls_key: the certificate of this client, for servers that ask for one.
        timeout: seconds in which a batch of calls must be answered. Then it is asked for three more times, because the server
            goes on computing, and after that the server is put aside.
        patience: seconds without any server, after which the run saves and ends.
        num_turns: of the run, for an environment that declares no `max_turns`; 0: not known. `train` sets it.
    """

    def __init__(
        self,
        address: str | os.PathLike | Sequence[str],
        name: str,
        options: Mapping[str, Any] | None = None,
        *,
        token_file: str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        timeout: float = 60.0,
        patience: float = 60.0,
        num_turns: int = 0,
    ):
        credentials = Credentials(token_file, tls_ca, tls_cert, tls_key)
        self._again = (address, name, options), {**vars(credentials), "timeout": timeout, "patience": patience}
        self._num_turns = num_turns
        self.name, self.options = name, {key: value for key, value in (options or {}).items() if key != "problems"}
        self.own_tasks = OwnTasks(read_rows(options["problems"])) if options and "problems" in options else None
        request = pb.DescribeRequest(environment=name, options=to_map(self.options, "options"), num_turns=num_turns)
        servers = connected(address, credentials, Question(name, "Describe", request, fingerprint_of), timeout, patience)
        super().__init__(RemoteEngine(DescribedEnvironment(servers), servers))

    def within(self, num_turns: int) -> RemoteEnvironment:
        if num_turns == self._num_turns:
            return self
        arguments, settings = self._again
        return RemoteEnvironment(*arguments, **settings, num_turns=num_turns)

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return (self.own_tasks or self.env).tasks(split, count, seed)

    def describe(self) -> dict[str, Any]:
        return super().describe() | (self.own_tasks.describe() if self.own_tasks else {})


def fingerprint_of(described: pb.DescribeReply) -> str:
    """Return the fingerprint in a description."""
    return described.fingerprint


def connected(address: Any, credentials: Credentials, question: Question, timeout: float, patience: float) -> Servers:
    """Return the servers at some addresses. Raises ValueError for times that are none."""
    if not (timeout > 0 and patience > 0):
        raise ValueError(f"timeout={timeout}, patience={patience}: give seconds above 0")
    return Servers(Addresses(address, tell), credentials, question, timeout, patience)


def make_remote(name: str, servers: Any, options: Mapping[str, Any]) -> RemoteEnvironment:
    """Return an environment on servers, for `jmarl.make`.

    servers: an address, or a dict of the arguments of `RemoteEnvironment`."""
    arguments = dict(servers) if isinstance(servers, Mapping) else {"address": servers}
    if wrong := arguments.keys() - {*ARGUMENTS} or {"address"} - arguments.keys():
        raise ValueError(
            f"servers={servers!r:.80}: the key {min(map(str, wrong))!r} is unknown or missing; give an address, or a dict with "
            f"{', '.join(ARGUMENTS)}"
        )
    return RemoteEnvironment(arguments.pop("address"), name, options, **arguments)
