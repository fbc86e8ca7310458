"""Choose which steps of runs a report has in it, and pack their completions in parts that the page unpacks when it shows them.

All steps that the runs recorded are in an index; those that are in no part are read by `recorded_step` when a page that is
served asks for them.
"""

import base64
import functools
import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.config.bounded_files import open_file, parse_json
from jmarl.logs.completions_file import MAX_MEMORY as MAX_RECORD
from jmarl.logs.completions_file import NAME, TRAIN, finite, newest_records, read_completions, steps_of
from jmarl.report.evidence import MAX_RECORDS
from jmarl.report.load import RecordedRun

MAX_MEMORY = 4 * 10**9  # of the records in a page, which are read and packed one after the other; see `memory_of`
MAX_JUDGED = 5 * 10**8  # of those that the rules judge together, of all runs
PART = 10**6  # characters of records, as JSON, that the page unpacks together
THINNED = 1 << 20  # of training steps every so many are shown before held-out records are thinned too
MAX_EVERY = THINNED << 20
COLUMNS = ("run", "kind", "step", "part", "at", "reward")


class PackedSteps(NamedTuple):
    """The steps of a report."""

    # COLUMNS; part: -1 if in none; at: place in the part; reward: mean of the first turn, or null
    columns: dict[str, list[Any]]
    parts: list[str]  # see `pack`
    every: int  # 1: all steps are in parts, 2: every second one, ...
    judged: list[dict[str, Any]]  # records that the rules of `diagnosis.py` read


def pack_steps(runs: Sequence[RecordedRun], max_bytes: int, asked: Collection[int] = ()) -> PackedSteps:
    """Return the steps of all runs, and as many of their records as fit, each with the number of its run.

    Args:
        runs: the runs.
        max_bytes: size that compressed records may have together; unpacked, they may take MAX_MEMORY.
        asked: steps that are in parts in any case. Raises ValueError if no run recorded one of them.
    """
    paths = {number: run.path / NAME for number, run in enumerate(runs) if (run.path / NAME).is_file()}
    steps = {number: steps_of(path) for number, path in paths.items()}
    if missing := {*asked}.difference(step for rows in steps.values() for step, *_ in rows):
        raise ValueError(f"no run has completions of step {min(missing)}: leave it out of --steps")
    every = every_of([*steps.values()], max_bytes)
    packed = PackedSteps({name: [] for name in COLUMNS}, [], every, [])
    waiting: list[str] = []
    for number, path in paths.items():
        numbers = chosen(steps[number], every, asked)
        judged = judged_numbers(steps[number], numbers, len(paths))
        first, in_parts = len(packed.columns["run"]), {*numbers}
        for step, kind, *_ in steps[number]:
            for name, value in zip(COLUMNS, (number, kind, step, -1, 0, None), strict=True):
                packed.columns[name].append(value)
        for i, record in numbered(path, steps[number], in_parts):
            record = {"run": number, **record}
            text, record = as_json(record)
            packed.judged.extend([record] if i in judged else [])
            row = {"step": record["step"], "part": len(packed.parts), "at": len(waiting), "reward": first_reward(record)}
            for name, value in row.items():
                packed.columns[name][first + i] = value
            waiting.append(text)
            if sum(map(len, waiting)) > PART:
                flush(waiting, packed.parts)
    flush(waiting, packed.parts)
    return packed


def judged_numbers(steps: Sequence[tuple[int, str, int, int]], numbers: Collection[int], num_runs: int) -> set[int]:
    """Return which of the records with these numbers the rules judge: of training, evenly spaced. steps: see `steps_of`."""
    trained = [i for i in numbers if steps[i][1] == TRAIN]
    memory = sum(steps[i][3] for i in trained) * num_runs
    return {*trained[:: max(-(-len(trained) // MAX_RECORDS), -(-memory // MAX_JUDGED), 1)]}


def judged_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file that the rules judge; none where there is no file."""
    if not path.is_file():
        return []
    steps = steps_of(path)
    return [finite(record) for _, record in numbered(path, steps, judged_numbers(steps, range(len(steps)), 1))]


def every_of(steps: Sequence[Sequence[tuple[int, str, int, int]]], max_bytes: int) -> int:
    """Return of how many steps one fits. steps: of each run, see `steps_of`."""
    every = 1
    while every < MAX_EVERY:
        shown = [rows[i] for rows in steps for i in chosen(rows, every)]
        fits = every >= THINNED or sum(size for _, _, size, _ in shown) <= max_bytes
        if fits and sum(memory for *_, memory in shown) <= MAX_MEMORY:
            break
        every *= 2
    return every


def chosen(steps: Sequence[tuple[int, str, int, int]], every: int, asked: Collection[int] = ()) -> list[int]:
    """Return the numbers of the records to show: those asked for, each `every`-th step and the last one, and all held-out ones,
    but where even the fewest steps take too much memory.

    steps: of all records, see `steps_of`.
    """
    training, others = ([i for i, step in enumerate(steps) if (step[1] == TRAIN) is kind] for kind in (True, False))
    named = [i for i, step in enumerate(steps) if step[0] in asked]
    return sorted({*training[::every], *training[-1:], *others[:: -(-every // THINNED)], *others[-1:], *named})


def numbered(
    path: Path, steps: Sequence[tuple[int, str, int, int]], numbers: Collection[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records with these numbers that can be read. A file of an old version counts its steps from 0."""
    places = iter(sorted(numbers))
    for record in read_completions(path, numbers):
        for i in places:
            if steps[i][1] == record["kind"] and steps[i][0] in (record["step"], record["step"] - 1):
                yield i, record
                break


def as_json(record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a record as JSON, with null where a number is not finite, and as values."""
    try:
        return dump(record), record
    except ValueError:  # NaN or an infinite number, which a damaged file may have
        record = finite(record)
        return dump(record), record


def dump(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def pack(text: str) -> str:
    """Return a text, compressed, in base64."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()


def flush(waiting: list[str], parts: list[str]) -> None:
    """Pack waiting records as the next part."""
    if waiting:
        parts.append(pack(f"[{','.join(waiting)}]"))
        waiting.clear()


def first_reward(record: Mapping[str, Any]) -> float | None:
    """Return the mean reward of the first turn; None if there is none or the record has another form."""
    try:
        rewards = [x for node in record["turns"][0]["rewards"] for action in node for x in action if x is not None]
        return finite(float(f"{sum(rewards) / len(rewards):.4g}"))
    except (KeyError, IndexError, TypeError, ZeroDivisionError, OverflowError):
        return None


def new_completions(runs: Sequence[RecordedRun], after: Sequence[int]) -> list[dict[str, Any]]:
    """Return the newest records of runs from the given steps on, each with the number of its run. Those of the given step are
    among them, because a held-out record has the step of the update before it.

    after: one for each run, or fewer.
    """
    records = []
    for number, (run, step) in enumerate(zip(runs, after, strict=False)):
        if (path := run.path / NAME).is_file():
            records += [{"run": number, **finite(record)} for record in newest_records(path, step)]
    return records


@functools.lru_cache(8)
def places_of(path: Path, size: int, changed: int) -> list[tuple[int, str, int, int]]:
    """Return `steps_of` a file. size, changed: by which a file that grew or was thinned is another one."""
    return steps_of(path)


def recorded_step(path: Path, kind: str, step: int) -> dict[str, Any] | None:
    """Return the record of a step in a file; None if it has none."""
    status, start = path.stat(), 0
    for number, (own, of, size, _) in enumerate(places_of(path, status.st_size, status.st_mtime_ns)):
        if of == kind and own == step:
            with open_file(path, path.parent) as file:
                file.seek(start)
                data = file.read(size)
            try:
                record = parse_json(zlib.decompressobj(31).decompress(data, MAX_RECORD))  # of gzip
                if (record["step"], record["kind"]) == (step, kind):
                    return finite(record)
            except (OSError, EOFError, ValueError, zlib.error):  # a damaged record before it: look at all of them
                pass
            return next(map(finite, read_completions(path, {number})), None)
        start += size
    return None
