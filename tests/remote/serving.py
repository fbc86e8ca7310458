"""Several servers in processes of their own."""

from __future__ import annotations

import contextlib
import signal

from tests.remote.served import Process


@contextlib.contextmanager
def serving(environments, count=1):
    """Yield servers of environments."""
    with contextlib.ExitStack() as opened:
        servers = []
        for _ in range(count):
            servers.append(Process(environments=environments))
            opened.callback(servers[-1].close)
        yield servers


def kill(server):
    """End a server as the kernel does when memory is short."""
    server.signal(signal.SIGKILL)
    server.process.wait()


def again(server, environments):
    """Start another server at the address of one that has ended."""
    return Process("--port", server.address.rpartition(":")[2], environments=environments)
