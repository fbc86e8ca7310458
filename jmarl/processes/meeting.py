"""Wait until all processes of a run are there, before JAX connects them.

JAX is silent while it waits, and ends a process that has waited in vain with a trace of C++. So the processes meet first:
process 0 listens at the coordinator's address, each other one says its number there, and once all have come they hand the port
over to JAX. Left out: everything else. Exchange, barriers and heartbeats are JAX's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from jmarl.processes.place import Place

EVERY = 10.0  # seconds between two lines
RETRY = 0.2  # seconds
HELLO = "jmarl process {} of {}\n"
GO = b"go\n"


def meet(place: Place, timeout: float, say: Callable[[str], None]) -> str:
    """Return when all processes are there: the address of this host that the others reach, of process 0's own if it listens.

    say: prints a line, every 10 seconds.

    Raises:
        RuntimeError: not all were there in time, or they do not agree on their number.
    """
    deadline = Deadline(timeout, say)
    return _listen(place, deadline) if place.process == 0 else _visit(place, deadline)


class Deadline:
    """The seconds that are left, and the lines about what is waited for."""

    def __init__(self, timeout: float, say: Callable[[str], None]):
        self.start = self.last = time.monotonic()
        self.timeout, self.say = timeout, say

    def has_time(self, text: str) -> bool:
        """Return whether there is time left. text: what is waited for."""
        now = time.monotonic()
        if now - self.last >= EVERY:
            self.last = now
            self.say(f"{text} for {now - self.start:.0f} s, at most {self.timeout:.0f} s")
        return now - self.start < self.timeout


def _listen(place: Place, deadline: Deadline) -> str:
    """Wait at the coordinator's port for all other processes."""
    port = int(place.address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=place.count
        )
    except OSError as error:
        raise RuntimeError(
            f"process 0 cannot listen at port {port}: {os.strerror(error.errno or 0)}; choose another port"
        ) from error
    guests: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        server.settimeout(RETRY)
        try:
            while len(guests) < place.count - 1:
                if not deadline.has_time(f"process 0 waits at {place.address}: {_here(guests, place)}"):
                    raise RuntimeError(
                        f"only {_here(guests, place)} at {place.address} within {deadline.timeout:.0f} s: "
                        f"{_what_to_check(place)}"
                    )
                for number in [number for number, guest in guests.items() if not _is_open(guest)]:
                    guests.pop(number).close()
                with contextlib.suppress(TimeoutError):
                    guest = stack.enter_context(server.accept()[0])
                    if (number := _greeted(guest, place, guests)) is not None:
                        guests[number] = guest
        except RuntimeError as error:
            for guest in guests.values():
                _send(guest, f"no {error}\n".encode())
            raise
        server.close()
        own = guests[1].getsockname()[0] if guests else "127.0.0.1"
        for guest in guests.values():
            _send(guest, GO)
        for guest in guests.values():  # they close first, so that nothing of these connections remains at the port
            with contextlib.suppress(OSError):
                guest.recv(1)
    return own.removeprefix("::ffff:")


def _greeted(guest: socket.socket, place: Place, guests: dict[int, socket.socket]) -> int | None:
    """Return the number of the process that has come; None for who is no process of jmarl's."""
    guest.settimeout(2.0)
    words = _line(guest).split()
    if words[:2] != ["jmarl", "process"] or len(words) != 5 or not (words[2].isdecimal() and words[4].isdecimal()):
        return None
    number, count = int(words[2]), int(words[4])
    if count != place.count:
        _send(guest, f"no process 0 is one of {place.count}\n".encode())
        raise RuntimeError(f"process 0 is one of {place.count} processes, and process {number} says that there are {count}")
    if number in guests and _is_open(guests[number]):
        _send(guest, f"no another process {number} came before\n".encode())
        raise RuntimeError(f"two processes say that they are process {number} of {count}")
    return number


def _visit(place: Place, deadline: Deadline) -> str:
    """Go to process 0, and wait there for the others."""
    host, _, port = place.address.rpartition(":")
    reason = ""
    while True:
        if not deadline.has_time(f"process {place.process} of {place.count} waits for process 0 at {place.address} ({reason})"):
            raise RuntimeError(
                f"process {place.process} of {place.count} did not reach process 0 at {place.address} within "
                f"{deadline.timeout:.0f} s ({reason}): {_what_to_check(place)}"
            )
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=3.0) as connection:
                connection.sendall(HELLO.format(place.process, place.count).encode())
                connection.settimeout(RETRY)
                answer = _answer(connection, place, deadline)
                if answer == GO:
                    return connection.getsockname()[0].removeprefix("::ffff:")
                if answer:
                    raise RuntimeError(
                        f"process {place.process} of {place.count}: {answer.decode().removeprefix('no ').strip()}"
                    )
            reason = "it listens and does not answer"  # such as JAX's coordinator of an attempt that has not ended yet
        except OSError as error:
            reason = str(error.strerror or error)
        time.sleep(RETRY)


def _answer(connection: socket.socket, place: Place, deadline: Deadline) -> bytes:
    """Return what process 0 answers; nothing if it has gone."""
    text = b""
    while not text.endswith(b"\n"):
        if not deadline.has_time(f"process {place.process} of {place.count} is at {place.address} and waits for others"):
            raise RuntimeError(
                f"process {place.process} of {place.count} reached process 0 at {place.address}, and others did not within "
                f"{deadline.timeout:.0f} s: {_what_to_check(place)}"
            )
        with contextlib.suppress(TimeoutError):
            part = connection.recv(4096)
            if not part:
                return b""
            text += part
    return text


def _here(guests: dict[int, socket.socket], place: Place) -> str:
    missing = [str(n) for n in range(1, place.count) if n not in guests]
    text = ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
    return f"{len(guests) + 1} of {place.count} processes are there (missing: {text})"


def _what_to_check(place: Place) -> str:
    """Return what to look at. A name that is the host itself, as Debian's 127.0.1.1, leads the others nowhere."""
    host = place.address.rpartition(":")[0].strip("[]")
    try:
        ip = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return f"the name {host} is not known on this host"
    where = f"{host} is {ip} on this host" if host != ip else host
    where += ", which only processes of the same host reach" if is_loopback(ip) else ""
    return f"{where}; see whether all processes run, and whether a firewall closes the port"


def is_loopback(ip: str) -> bool:
    """Return whether an address leads to the host itself."""
    return ip.startswith("127.") or ip == "::1"


def _line(connection: socket.socket) -> str:
    text = b""
    with contextlib.suppress(OSError):
        while not text.endswith(b"\n") and len(text) < 200:
            part = connection.recv(200)
            if not part:
                break
            text += part
    return text.decode(errors="replace")


def _is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.0)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.settimeout(2.0)


def _send(connection: socket.socket, text: bytes) -> None:
    with contextlib.suppress(OSError):  # it has gone
        connection.sendall(text)
