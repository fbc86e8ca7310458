"""Read the files of a directory that may come from a stranger, such as one with a run: none makes its reader wait for ever,
fills the memory, or puts a file of the reader into what the reader then passes on.

What is read is a regular file (opening a pipe or a device may never end), within its limit of size, and JSON within DEPTH.

Links: the directory that the user names may be a link, and so may its `checkpoints`, on scratch for example, and `attempts` in
a run of this account. Its files with texts (rows, completions, settings, logs) must lie in it, because reports and model cards
show them; so must the files of agents that are copied. A run writes through no link to a file (`files.own_files`).

Left out: weights. The directory of a model may consist of links, as in Hugging Face's cache, but not in a run from elsewhere.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

LIMITS = {"metrics.jsonl": 2**30, "tokenizer.json": 2**28}  # bytes; of `completions.jsonl.gz` each record has one
LIMIT = 2**24  # of other files
DEPTH = 100  # of nested lists and mappings
VALUE = 60  # bytes of memory that a number, list or short text takes at least
_PART = 2**20  # bytes of a JSON text that are looked at together
TAIL = 2**20  # bytes of a long log that are read
KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFLNK: "a link",
}  # fmt: skip


def kind_of(mode: int) -> str:
    """Return what there is in place of a regular file; empty if it is one. mode: of its status."""
    return KINDS.get(stat.S_IFMT(mode), "")


def open_file(path: Path, inside: Path | None = None) -> BufferedReader:
    """Open a regular file for reading. Raises OSError if it cannot be opened, and ValueError if it is none or lies outside.

    inside: directory in which it must be after all links are followed. None: anywhere.
    """
    if inside is not None:
        check_inside(path, inside)
    if kind := kind_of(path.stat().st_mode):  # opening a pipe waits
        raise ValueError(f"{printable(path)} is {kind}, not a file: move it away")
    return path.open("rb")


def check_inside(path: Path, directory: Path) -> None:
    """Raise ValueError if links lead from a path in a directory out of it, and OSError if they lead in a circle."""
    path.stat()
    real = path.resolve()
    if not real.is_relative_to(directory.resolve()):
        raise ValueError(
            f"{printable(path)} is a link to {printable(real)}, out of {printable(directory)}, and is not read, because that "
            "may be anyone's file: put a copy in its place if you trust it"
        )


def bounded_text(path: Path, inside: Path | None = None, errors: str = "strict") -> str:
    """Return the text of a file. Raises as `open_file`, and ValueError if it is too large or not UTF-8.

    inside: see `open_file`; default: its folder. errors: as of `bytes.decode`.
    """
    with open_file(path, inside or path.parent) as file:
        data = file.read(checked_size(path, file))
    try:
        return data.decode("utf-8", errors).removeprefix("\ufeff")  # some editors begin a file with this mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{printable(path)} is not UTF-8 text: {error}") from error


def checked_size(path: Path, file: BufferedReader) -> int:
    """Return the size of an open file. Raises ValueError if it is too large."""
    size, limit = os.fstat(file.fileno()).st_size, LIMITS.get(path.name, LIMIT)
    if size > limit:
        raise ValueError(f"{printable(path)} has {size} bytes, and at most {limit} are read: move it away")
    return size


def read_tail(path: Path, inside: Path) -> str:
    """Return the last TAIL bytes of a text, with a line that says what is left out. Raises as `open_file`."""
    with open_file(path, inside) as file:
        file.seek(before := max(file.seek(0, os.SEEK_END) - TAIL, 0))
        return f"... {before} bytes ...\n" * (before > 0) + file.read(TAIL).decode("utf-8", "replace")


def read_json(path: Path, inside: Path | None = None) -> Any:
    """Return the value in a JSON file. Raises as `bounded_text`, and ValueError for what `parse_json` refuses."""
    text = bounded_text(path, inside)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{printable(path)} is damaged: {error}") from error


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is none, or is nested deeper than DEPTH."""
    try:
        value = json.loads(text)
    except RecursionError:
        value = None
    else:
        level = [value]
        for _ in range(DEPTH):
            inner = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
            level = [*itertools.chain.from_iterable(inner)]
            if not level:
                return value
    raise ValueError(f"it is nested deeper than {DEPTH}")


def memory_of(text: bytes) -> int:
    """Return about how many bytes the values of a JSON text need in memory."""
    bare, values, is_inside = text.replace(rb"\\", b"").replace(rb"\"", b""), 0, False
    for at in range(0, len(bare), _PART):
        parts = bare[at : at + _PART].split(b'"')
        outside = b"".join(parts[is_inside::2])  # of strings
        values += sum(map(outside.count, (b",", b"[", b"{")))
        is_inside ^= len(parts) % 2 == 0
    return len(text) + VALUE * values


def printable(path: Path) -> str:
    """Return a path without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(path))
