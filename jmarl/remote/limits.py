"""What the clients of a server may use. Apart from `grpc_server`, so that `jmarl serve --help` needs no gRPC."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """What clients may use. One client is whoever shows a certificate, without certificates a host: the processes of training
    on one host share what it may use, and so do hosts behind one address.

    Attributes:
        sessions: open sessions of one client.
        client_bytes: that the sessions of one client have, their tasks, messages and answers, and its requests under way. With
            half of them no new session is begun, so that those that are open can end.
        all_sessions: open sessions of all clients.
        idle_seconds: after which a session without a call ends.
        message_bytes: of a message.
        batch: calls in a batch.
        call_seconds: of one call of an environment or reward.
    """

    sessions: int = 32_768
    client_bytes: int = 1 << 30
    all_sessions: int = 65_536
    idle_seconds: float = 1800.0
    message_bytes: int = 16 << 20
    batch: int = 1024
    call_seconds: float = 600.0
