"""Read the completions of runs for a report, and thin them out where they are too many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jmarl.logs.completions_file import NAME, TRAIN, newest_records, read_completions, steps_of
from jmarl.report.load import Run


def load_completions(runs: Sequence[Run], max_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """Return the records of all runs, each with the number of its run, and which part of the steps they are (1: all, 2: every
    second one, ...). See `completions_file` for records.

    max_bytes: size that compressed records may have together.
    """
    paths = {number: run.path / NAME for number, run in enumerate(runs) if (run.path / NAME).is_file()}
    sizes = {number: steps_of(path) for number, path in paths.items()}
    every = 1
    while every < 1 << 20 and sum(size for steps in sizes.values() for _, size in chosen(steps, every)) > max_bytes:
        every *= 2
    records = []
    for number, path in paths.items():
        numbers = {index for index, _ in chosen(sizes[number], every)}
        records += [{"run": number, **record} for i, record in enumerate(read_completions(path)) if i in numbers]
    return records, every


def new_completions(runs: Sequence[Run], after: Sequence[int]) -> list[dict[str, Any]]:
    """Return the newest records of runs from the given steps on, each with the number of its run. Those of the given step are
    among them, because a held-out record has the step of the update before it.

    after: one for each run, or fewer.
    """
    records = []
    for number, (run, step) in enumerate(zip(runs, after, strict=False)):
        if (path := run.path / NAME).is_file():
            records += [{"run": number, **record} for record in newest_records(path, step)]
    return records


def chosen(steps: Sequence[tuple[int, str, int]], every: int) -> list[tuple[int, int]]:
    """Return index and size of the records to show: each `every`-th step and the last one, and all held-out ones.

    steps: step, kind and size of each record.
    """
    training = [i for i, (_, kind, _) in enumerate(steps) if kind == TRAIN]
    shown = {*training[::every], *training[-1:]} | {i for i, (_, kind, _) in enumerate(steps) if kind != TRAIN}
    return [(i, steps[i][2]) for i in sorted(shown)]
