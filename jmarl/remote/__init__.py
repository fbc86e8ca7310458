"""Environments as services, over gRPC: the server, and what it shares with its clients. No jax: neither side needs it here.

The room imports `envs` and earlier rooms of the host. environments.proto says what servers and clients send each other.
Open `service.py` first: how a server answers the calls of that file. `client` is the side of training.

What each guarantee costs, in lines of code and in work for a call. A step that is called alone takes about 1 ms, most of it in
gRPC; in batches, as training plays, 0.13 ms (`experiments.bench.remote`). Where no work is named, it is less than 1 µs.

Of a server, 1,850 lines:

    values that arrive as they were, nothing pickled    130  `values`; 30 µs to write a step, 15 µs to read it
    episodes apart: sessions of one client, idle ones   180  `sessions`, `service`; one entry in a dict for each
    end; calls in batches
    the same request again is answered, not played      100  `sessions`, `service._start`; a digest, 6 µs, and the last 4
    again; work goes on when its client goes away            answers of a session are kept
    forks: a copy of a session                           15  `service.fork`; no work, since states never change
    room: sessions and bytes of a client and of all,     75  `sessions`, `gate`, `limits`; the size of each message, 1 µs.
    calls at once, messages, batches                         Sessions alone bound no memory: each may have long tasks
    a call that hangs, or a long batch, stops no one    165  `engines`; two changes of the thread, 0.1 ms a batch, and for
                                                             long batches one each 50 ms
    a listener on other interfaces only with TLS and    100  `access`; one comparison
    a token; files of certificates
    who has no token takes no place from who has one    140  `access.Door`, `access.Strangers`, `grpc_server`, `gate`; with
                                                             a token and 1,024 open files a look at them each 0.25 s
    clients set no path and learn none, nor a secret    150  `options`, `refusals`; once for an environment, and for an error
    servers that replace each other are equal            60  `catalog.fingerprint`; once for an environment
    environments and rewards by name, each built once   320  `catalog`, `scoring`, `engines`
    SIGTERM loses no episode; a log that nobody reads   115  `grpc_server`; nothing for a call
    stops no server
    (the rest: handlers of gRPC, replies, errors)

Of a client, 1,030 lines, of which a run on one server that never fails would need about 300:

    an episode can be played again on any server         75  `episodes`; each answer has a digest, 12 µs, and an episode
                                                             keeps its task, messages and seeds
    a server that dies, hangs or is full loses no       330  `remote_engine`, `calls`; nothing until it does
    episode, and a bounded number of tries
    several servers, added and removed while a run      280  `servers`, `addresses`; the file is read before each batch
    goes on; all gone: saved, and exit code 75
    garbage is not trained on                            60  `replies`; 15 µs for a step

The WebSockets of OpenEnv, 580 lines: a seat of an environment for its clients (325, with what other seats play and time limits)
and its environments here (255, of which 60 play an episode again, as its servers have one session by default and no forks).
"""

import os

from jmarl.lazy import face

# gRPC reads it when it is imported: otherwise it writes a line to stderr for each connection that fails, which `client.servers`
# says in a sentence, and a server for each client without a certificate.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__getattr__ = face(
    __name__,
    {
        "access": "Access Door",
        "limits": "ServerLimits",
        "grpc_server": "serve_environments",
        "openenv.seat": "Seat",
        "openenv.seat_server": "serve_seat",
        "client.environment": "RemoteEnvironment make_remote",
        "client.reward": "remote_reward",
        "pools.ray_pool": "RayPool",
    },
)
