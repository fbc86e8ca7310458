"""The addresses of servers: as given, or in a file that is read again when it changes.

    127.0.0.1:50051                       one server
    [node1:50051, "node2:50051=2"]        several; the second one gets twice as many episodes
    servers.txt                           a file with one of them on each line; # begins a comment

Servers can be added, replaced and removed while a run goes on: edit the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from jmarl.config.paths import expand_home

ADDRESS = re.compile(r"(?P<target>(?:unix:\S+)|(?:\[[0-9a-fA-F:.]+\]|[\w.-]+):(?P<port>\d{1,5}))(?:=(?P<weight>\S+))?")
ALLOWED = "give HOST:PORT, HOST:PORT=WEIGHT, a list of them, or a file with one on each line"


def parse(text: str) -> tuple[str, float]:
    """Return the target and the weight of an address. Raises a ValueError for what is none."""
    match = ADDRESS.fullmatch(text.strip())
    try:
        weight = float(match["weight"] or 1) if match else 0.0
    except ValueError:
        weight = 0.0
    if not match or not 0 < weight < float("inf") or int(match["port"] or 1) not in range(1, 1 << 16):
        raise ValueError(f"{text!r:.80} is no address of a server: {ALLOWED}; a weight is a number above 0")
    return match["target"], weight


class Addresses:
    """The addresses and weights of the servers of a run, which may change.

    Args:
        given: see the module docstring.
        tell: shows a line about a file that cannot be read.
    """

    def __init__(self, given: str | os.PathLike | Sequence[str], tell: Callable[[str], None]):
        self.tell, self.file = tell, None
        self._seen: bytes | None = None  # what the file held when it was last read
        if isinstance(given, str) and ADDRESS.fullmatch(given.strip()):
            given = [given]
        if isinstance(given, str | os.PathLike):
            self.file = Path(expand_home(given))
            self._seen = _content(self.file)
            self.current = _read(self.file, self._seen)
            return
        if not isinstance(given, list | tuple) or not given or not all(isinstance(x, str) for x in given):
            raise ValueError(f"{given!r:.80} are no addresses of servers: {ALLOWED}")
        self.current = _table(given)

    def changed(self) -> bool:
        """Read the file again, and return whether its addresses have changed. What cannot be read changes nothing."""
        if self.file is None or (content := _content(self.file)) == self._seen:
            return False
        self._seen, before = content, self.current
        try:
            self.current = _read(self.file, content)
        except (OSError, ValueError) as error:
            self.tell(f"{error}; the servers stay as they are until the file is right")
        return self.current != before


def _content(file: Path) -> bytes | None:
    """Return what a file holds; None if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return None


def _read(file: Path, content: bytes | None) -> dict[str, float]:
    """Return the weight of each address in a file."""
    if content is None:
        raise FileNotFoundError(f"the servers {str(file)!r} are no address and no file that can be read: {ALLOWED}")
    try:
        texts = [text for line in content.decode().splitlines() if (text := line.partition("#")[0].strip())]
        if not texts:
            raise ValueError("it names no server: write one HOST:PORT on each line")
        return _table(texts)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _table(texts: Sequence[str]) -> dict[str, float]:
    """Return the weight of each address, in their order."""
    table = dict(map(parse, texts))
    if len(table) != len(texts):
        raise ValueError(f"{', '.join(texts)} name a server twice: give it a weight instead, HOST:PORT=2")
    return table
