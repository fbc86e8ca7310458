"""Environments as services, over gRPC: the server, and what it shares with its clients. No jax: neither side needs it here.

The room imports `envs` and earlier rooms of the host. environments.proto says what servers and clients send each other.
Open `service.py` first: how a server answers the calls of that file. `client` is the side of training.
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
