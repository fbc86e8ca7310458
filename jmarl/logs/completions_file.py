"""Keep the completions of every step in `completions.jsonl.gz`, beside `metrics.jsonl`.

Each step is one gzip member with one line of JSON, so that `zcat` reads the whole file and a kill damages the last member only.
A record has `step`, the number of updates made, as in `metrics.jsonl`; `kind`, "train" or "eval"; `tasks`, one per item (empty
for held-out items and where dynamic sampling has replaced some); `updates`, of an evaluation; and `turns`. P nodes, N agents, G
completions, J joint actions per node:

    prompts [N][P]         acts [N][P]            completions [N][P][G]    joint [J][N], the completion of each agent
    rewards [P][J][N]      parts {name: [P][J]}   measures {name: [P][J]}
    parents [P]            items [P], see `rollout.turns.Turn`
    returns [N][P][G]      lengths [N][P][G], in tokens; 0 where the agent does not act
    cut [N][P][G], true where a completion has no end because it is as long as it may be; left out where none is
    advantages [N][P][G]   that the update trained on, in its first pass: before weights of importance sampling; with values of
                           tokens (ippo, ppo, mappo) the mean over the completion
    masked [N][P][G], true where the update ignored a completion: no advantage; left out where these are those of agents that
                           do not act
    fault                  what was wrong with a reward, as a text; left out where nothing was
    tokens [N][P][G]       with `log_tokens`, of the first completions: {ids, texts, logprobs}, lists with an entry for each
                           token, the one that ends included; logprobs over the whole vocabulary at the sampling temperature,
                           when it was sampled; null of the others

Evaluations have no advantages, nor turns of which no agent learned (see `frozen_agents`, `update_order`). Returns are those of
rewards, also where a critic replaces them by lambda-returns. Files of older versions have none of the last seven names; still
older ones have no `measures`, their `parts` hold all numbers, and they count steps from 0.

Numbers that are not finite are null. When the file reaches its largest size, every second step is dropped, then three of four,
and so on, so that what remains is spread over the whole run; held-out completions are dropped last. While the disk is full, up
to 16 MB wait in memory, and later records are lost. A record that takes more than MAX_MEMORY is neither written nor read,
because a small file may unpack to any size; one that is in the file stays there when the run is resumed.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import math
import os
import re
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jmarl.config.bounded_files import memory_of, open_file, parse_json, printable
from jmarl.config.paths import expand_home
from jmarl.logs.log_file import LogFile

logger = logging.getLogger(__name__)

NAME = "completions.jsonl.gz"
TRAIN, EVAL = "train", "eval"
MAX_WAITING = 16 * 10**6  # bytes
MAX_MEMORY = 2**28  # of a record, see `memory_of`
_CHUNK = 1 << 14  # compressed bytes, which may become a thousand times as many
_TAIL = 32 * 10**6  # bytes at the end that `newest_records` reads, and in which the member after a damaged one must begin
MAX_DAMAGED = 20  # places behind which members are looked for: each may take long to be found damaged
_HEADER = gzip.compress(b"", 6, mtime=0)[:8]  # with which every member begins, whichever version of Python wrote it
_START = re.compile(rb'\{"step": (\d{1,15}), "kind": "(\w+)"')


class _Member(NamedTuple):
    step: int
    kind: str
    data: bytes  # compressed
    memory: int  # that its record takes, see `memory_of`


class CompletionsFile:
    """Appends one member per step. Records of `start_step` and later are dropped first.

    Args:
        path: the file; created if missing.
        start_step: first step of this process.
        max_bytes: largest size of the file.
    """

    def __init__(self, path: Path, start_step: int, max_bytes: int):
        self.path, self.max_bytes = path, max_bytes
        members = _counted(_members(path), path) if path.exists() else []
        earlier = [member for member in members if member.step < start_step]
        steps = [member.step for member in earlier if member.kind == TRAIN]
        # The smallest distance: where a record is damaged, others are further apart.
        self.every = max(min((later - step for step, later in zip(steps, steps[1:], strict=False)), default=1), 1)
        if path.exists():
            data = b"".join(member.data for member in earlier)
            with open_file(path) as file:
                is_same = file.read(len(data) + 1) == data
            if not is_same:
                self._replace(earlier)
        self.file = LogFile(path, MAX_WAITING)

    def write(self, step: int, kind: str, record: Mapping[str, Any]) -> None:
        """Append the record of a step."""
        if kind == TRAIN and step % self.every:
            return
        _, _, member, memory = _member(step, kind, record)
        if memory > MAX_MEMORY:
            logger.warning("%s: the record of step %d is left out: it takes %d MB", self.path, step, memory >> 20)
            return
        if self.file.end + len(member) > self.max_bytes:
            self._thin(step, len(member))
            if (kind == TRAIN and step % self.every) or self.file.end + len(member) > self.max_bytes:
                return
        self.file.write(member)

    def _thin(self, step: int, room: int) -> None:
        """Drop steps until there is room for the member of a step, or no step but the first is left."""
        self.file.flush()
        members, first = list(_members(self.path)), self.every == 1
        last = max([step, *(member.step for member in members)])
        while sum(len(member.data) for member in members) + room > self.max_bytes and self.every <= last:
            self.every *= 2
            members = [member for member in members if member.kind != TRAIN or member.step % self.every == 0]
        if first:
            size = self.max_bytes / 1e6
            logger.warning("%s has %g MB (max_completions_mb): only some steps are kept from now on", self.path, size)
        self._replace(members)  # if the disk is full, the old file stays open
        self.file.close()
        self.file = LogFile(self.path, MAX_WAITING)

    def _replace(self, members: list[_Member]) -> None:
        temporary = self.path.with_suffix(".gz.tmp")
        temporary.write_bytes(b"".join(member.data for member in members))
        temporary.replace(self.path)

    def sync(self) -> None:
        self.file.sync()

    def close(self) -> None:
        self.file.close()


def read_completions(path: str | Path, numbers: Container[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, without damaged ones. numbers: of those to yield, from 0; None: all."""
    from_zero, path = False, Path(expand_home(path))
    for number, member in enumerate(_readable(path)):
        is_wanted = numbers is None or number in numbers
        if not is_wanted and (member.step or member.kind != TRAIN):  # others tell whether the file counts from 0
            continue
        if (record := _record(gzip.decompress(member.data), path)) is None:
            continue
        from_zero |= _is_first_of_zero(record)
        if is_wanted:
            yield record | {"step": _updates_of(record)} if from_zero else record


def newest_records(path: str | Path, after: int, most: int = 5) -> list[dict[str, Any]]:
    """Return up to `most` of the last intact records from step `after` on, in order. Reads the end of the file only, so that a
    page that follows a run can ask every few seconds."""
    path = Path(path)
    with open_file(path, path.parent) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL, 0))
        data = file.read()
    records: list[dict[str, Any]] = []
    at, tail = len(data), io.BytesIO(data)
    while len(records) < most and (at := data.rfind(_HEADER, 0, at)) >= 0:
        line, _ = _line_at(tail, at, MAX_MEMORY)
        head = _START.match(line)
        if head is None:  # half-written, or these bytes inside a member
            continue
        if int(head[1]) < after:
            break
        if memory_of(line) <= MAX_MEMORY and (record := _record(line, path)) is not None:
            records.append(record)
    return records[::-1]


def finite(value: Any) -> Any:
    """Return JSON values with null in place of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(x) for key, x in value.items()}
    return [finite(x) for x in value] if isinstance(value, list | tuple) else value


def steps_of(path: str | Path) -> list[tuple[int, str, int, int]]:
    """Return the step, the kind, the compressed size in bytes and the memory of each record."""
    return [(member.step, member.kind, len(member.data), member.memory) for member in _readable(Path(expand_home(path)))]


def _record(line: bytes, path: Path) -> dict[str, Any] | None:
    """Return the record in a line; None, with a warning, if it is damaged."""
    try:
        return parse_json(line)
    except ValueError as error:
        logger.warning("%s: a record is damaged (%.100s) and left out", printable(path), error)
        return None


def _is_first_of_zero(record: Mapping[str, Any]) -> bool:
    """Whether a record is that of the first update in a file that counts from 0. An evaluation before it has step 0 anyway."""
    return record["kind"] == TRAIN and record["step"] == 0 and "tasks" in record


def _updates_of(record: Mapping[str, Any]) -> int:
    """Return the number of updates of a record of a file that counts from 0."""
    return record.get("updates", record["step"] + 1)


def _counted(members: Iterable[_Member], path: Path) -> list[_Member]:
    """Return members with the number of updates as their step, also those of a file that counts from 0."""
    members = [*members]
    first = next((member for member in members if member.kind == TRAIN), None)
    record = None if first is None or first.step or first.memory > MAX_MEMORY else _record(gzip.decompress(first.data), path)
    if record is None or not _is_first_of_zero(record):
        return members
    return [member if member.memory > MAX_MEMORY else _recounted(member, path) for member in members]


def _recounted(member: _Member, path: Path) -> _Member:
    """Return a member of a file that counts from 0 with the number of updates as its step; itself if it cannot be read."""
    record = _record(gzip.decompress(member.data), path)
    return member if record is None else _member(_updates_of(record), record.pop("kind"), record)


def _member(step: int, kind: str, record: Mapping[str, Any]) -> _Member:
    rest = {name: x for name, x in record.items() if name != "step"}
    text = json.dumps({"step": int(step), "kind": kind, **rest}, default=str, ensure_ascii=False) + "\n"
    line = text.encode("utf-8", "replace")
    return _Member(int(step), kind, gzip.compress(line, 6, mtime=0), memory_of(line))


def _readable(path: Path) -> Iterator[_Member]:
    """Yield the intact members in order but those that take more than MAX_MEMORY."""
    for number, member in enumerate(_members(path, MAX_MEMORY), 1):
        if member.memory <= MAX_MEMORY:
            yield member
        else:
            logger.warning("%s: record %d is too large and left out", printable(path), number)


def _members(path: Path, most: float = math.inf) -> Iterator[_Member]:
    """Yield the intact members in order, without those that are damaged or whose end is not within `most` bytes."""
    start = damaged = 0
    with open_file(path, path.parent) as file:
        for number in count(1):
            if start >= os.fstat(file.fileno()).st_size:
                return
            line, end = _line_at(file, start, most)
            head, memory = _START.match(line), memory_of(line)
            if head is None:
                logger.warning("%s: record %d is damaged or too large and left out", printable(path), number)
                file.seek(start + 1)
                distance = file.read(_TAIL).find(_HEADER) + 1  # 0: no other member begins there
                if not distance or (damaged := damaged + 1) == MAX_DAMAGED:
                    return
                start += distance
                continue
            del line
            file.seek(start)
            yield _Member(int(head[1]), head[2].decode(), file.read(end - start), memory)
            start = end


def _line_at(file: BinaryIO, start: int, most: float) -> tuple[bytes, int]:
    """Return the content of the member at `start`, of a large one just more than MAX_MEMORY, and its end. The content is empty
    if the member is damaged or its end is not within `most` bytes. It is read in chunks, because what a decompressor does not
    use is copied."""
    reader, parts, size = zlib.decompressobj(31), [], 0
    file.seek(start)
    try:
        while not reader.eof and size <= most and (chunk := file.read(_CHUNK)):
            part = reader.decompress(chunk)
            parts += [part] if size <= MAX_MEMORY else []
            size += len(part)
    except zlib.error:
        return b"", start
    return b"".join(parts) if reader.eof else b"", file.tell() - len(reader.unused_data)
