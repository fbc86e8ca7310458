"""Read the completions of runs for a report, and thin them out where they are too many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jmarl.logs.completions_file import NAME, TRAIN, finite, newest_records, read_completions, steps_of
from jmarl.report.load import RecordedRun

MAX_MEMORY = 5 * 10**8  # of the records of a report, which a browser must open; see `memory_of`
THINNED = 1 << 20  # of training steps every so many are shown before held-out records are thinned too
MAX_EVERY = THINNED << 20


def load_completions(runs: Sequence[RecordedRun], max_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """Return the records of all runs, each with the number of its run, and which part of the steps they are (1: all, 2: every
    second one, ...). See `completions_file` for records.

    max_bytes: size that compressed records may have together; unpacked, they may take MAX_MEMORY.
    """
    paths = {number: run.path / NAME for number, run in enumerate(runs) if (run.path / NAME).is_file()}
    sizes = {number: steps_of(path) for number, path in paths.items()}
    every = 1
    while every < MAX_EVERY:
        shown = [steps[i] for steps in sizes.values() for i in chosen(steps, every)]
        fits = every >= THINNED or sum(size for _, _, size, _ in shown) <= max_bytes
        if fits and sum(memory for *_, memory in shown) <= MAX_MEMORY:
            break
        every *= 2
    records = []
    for number, path in paths.items():
        read = read_completions(path, set(chosen(sizes[number], every)))
        records += [{"run": number, **finite(record)} for record in read]
    return records, every


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


def chosen(steps: Sequence[tuple[int, str, int, int]], every: int) -> list[int]:
    """Return the numbers of the records to show: each `every`-th step and the last one, and all held-out ones, but where even
    the fewest steps take too much memory.

    steps: of all records, see `steps_of`.
    """
    training, others = ([i for i, step in enumerate(steps) if (step[1] == TRAIN) is kind] for kind in (True, False))
    return sorted({*training[::every], *training[-1:], *others[:: -(-every // THINNED)], *others[-1:]})
