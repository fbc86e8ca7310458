"""Write the metrics of a run to `metrics.jsonl`, TensorBoard, Weights & Biases, trackio and the terminal.

`metrics.jsonl` is the source of truth: one JSON object per line with its `step`, flushed at once. NaN and infinities are the
strings "NaN", "Infinity", "-Infinity", so that any JSON reader can read the file. The step of a row is the number of updates
made, in all logs: 1 in the row of the first update, 0 in that of the evaluation before it. A run that starts at `start_step`
first drops the rows from that step on (the file is replaced atomically) and tells TensorBoard to do the same, so that resuming
repeats no row. Files of earlier versions count from 0, and an evaluation has the step of the update before it; they are read
and resumed as if they counted updates.

Errors of logs do not stop training. Rows that do not fit on a full disk wait in memory and are written with the next row that
fits (`log_file`); nothing more is shown on a terminal that has closed. Each failed write is counted in `log_errors`, and the
first of each log is reported. Only a run directory that cannot be written at the start is an error.

Left out: texts and histograms in `metrics.jsonl`, texts in W&B and trackio, system metrics, averages (values are written
unchanged).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jmarl.columns import valid
from jmarl.config.bounded_files import bounded_text, printable
from jmarl.config.paths import expand_home
from jmarl.lazy import Table
from jmarl.logs import completions_file
from jmarl.logs.log_file import LogFile, Sink
from jmarl.logs.samples import Samples
from jmarl.logs.terminal import Terminal

logger = logging.getLogger(__name__)

COUNTS = ("step", "eval/updates")  # columns that are whole numbers
TRACKERS = Table[Callable[..., Sink]](
    {"TensorBoard": "jmarl.logs.sinks:TensorBoard", "W&B": "jmarl.logs.sinks:Wandb", "trackio": "jmarl.logs.sinks:Trackio"}
)


class MetricsWriter:
    """Writes each row to all logs that are on.

    Args:
        run_dir: directory of `metrics.jsonl` and the TensorBoard event files; created if missing.
            Empty: only progress is shown.
        hparams: the settings, a nested mapping; shown in TensorBoard (HPARAMS and TEXT), W&B and trackio.
        total_steps: number of steps of the whole run.
        start_step: first step of this process; existing rows from it on are dropped. 0 drops all.
        tensorboard: whether to write TensorBoard events.
        progress: whether to print lines about the steps, on a terminal with a bar below them.
        wandb_config: keyword arguments of `wandb.init` (`project`, `mode="offline"`, ...); None: no W&B.
        trackio: `project` and `trace_every` of `sinks.Trackio`; None: no trackio.
        max_completions_mb: largest size of `completions.jsonl.gz`; 0: it is not written.
        phase: returns what the run does now and for how many seconds; shown as progress.

    Attributes:
        log_errors: number of failed writes.
        evaluated: the evaluations of a resumed run so far, their rows by the number of updates before them.
    """

    def __init__(
        self,
        run_dir: str | Path,
        hparams: Mapping[str, Any],
        *,
        total_steps: int,
        start_step: int = 0,
        tensorboard: bool = True,
        progress: bool = True,
        wandb_config: Mapping[str, Any] | None = None,
        trackio: Mapping[str, Any] | None = None,
        max_completions_mb: int = 0,
        phase: Callable[[], tuple[str, float]] = lambda: ("idle", 0.0),
    ):
        self.log_errors = 0
        self._warned: set[str] = set()
        self._lost: list[Path] = []
        hparams = {valid(name): valid(x) if isinstance(x, str) else x for name, x in flatten(hparams)}
        self.evaluated: dict[int, Mapping[str, Any]] = {}
        self._sinks: dict[str, Sink] = {}
        if run_dir:
            self._open_files(Path(run_dir), hparams, start_step, tensorboard, wandb_config, trackio, max_completions_mb)
        if progress:
            with self._counting("progress", Terminal.errors):
                self._sinks["progress"] = Terminal(total_steps, start_step, phase)
            self._sinks["samples"] = Samples()

    def _open_files(
        self,
        run_dir: Path,
        hparams: Mapping[str, Any],
        start_step: int,
        tensorboard: bool,
        wandb_config: Mapping[str, Any] | None,
        trackio: Mapping[str, Any] | None,
        max_completions_mb: int,
    ) -> None:
        rows = _Jsonl(run_dir, start_step)
        self.evaluated = rows.evaluated
        self._sinks["metrics.jsonl"] = rows
        if max_completions_mb:
            self._sinks[completions_file.NAME] = _Completions(run_dir, start_step, max_completions_mb)
        if wandb_config is not None:
            self._sinks["W&B"] = TRACKERS["W&B"](run_dir, hparams, wandb_config, rows.num_logged)
        if trackio is not None:
            with self._counting("trackio", (OSError, sqlite3.Error)):
                self._sinks["trackio"] = TRACKERS["trackio"](run_dir, hparams, rows.num_logged, **trackio)
        if tensorboard:
            with self._counting("TensorBoard", Sink.errors):
                self._sinks["TensorBoard"] = TRACKERS["TensorBoard"](run_dir, hparams, start_step)

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write one row. Its values are numbers or arrays of one element, its tags are names such as `agent_0/loss`."""
        row = {valid(tag): np.asarray(value) for tag, value in scalars.items()}
        shapes = {tag: value.shape for tag, value in row.items() if value.size != 1}
        if shapes:
            raise ValueError(f"a metric must be one number, but there are arrays of shape {shapes}: log a mean or each element")
        self._call("write", step, {tag: float(value.item()) for tag, value in row.items()})
        self.find_lost_files()

    def find_lost_files(self) -> list[Path]:
        """Return the files of logs that were removed or replaced while the run wrote to them, and warn of each once."""
        lost = [path for sink in self._sinks.values() if (path := sink.lost_file()) and path not in self._lost]
        self._lost += lost
        for path in lost:
            warnings.warn(
                f"{path} was removed or replaced while the run writes to it: what is logged from now on is lost, and training "
                "goes on",
                stacklevel=4,
            )
        return self._lost

    def text(self, step: int, name: str, markdown: str) -> None:
        """Write a Markdown text to TensorBoard."""
        self._call("text", step, valid(name), valid(markdown))

    def completions(self, step: int, kind: str, record: Mapping[str, Any]) -> None:
        """Write the completions of a step or an evaluation to `completions.jsonl.gz`, see `completions_file`, and some to
        trackio, and print a sample of them, see `samples`."""
        self._call("completions", step, kind, record)

    def histogram(self, step: int, name: str, values: Any) -> None:
        """Write the distribution of the finite values to TensorBoard, W&B and trackio, if there are any."""
        flat = np.asarray(values, np.float64).ravel()
        flat = flat[np.isfinite(flat)]
        if flat.size:
            self._call("histogram", step, valid(name), flat)

    def sync(self) -> None:
        """Flush `metrics.jsonl` to the disk, so that its rows are not behind a checkpoint that follows."""
        self._call("sync")

    def close(self) -> None:
        """Flush and close all logs. Later writes have no effect."""
        self._call("close")
        self._sinks = {}

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, method: str, *args: Any) -> None:
        for name, sink in self._sinks.items():
            with self._counting(name, sink.errors):
                getattr(sink, method)(*args)

    @contextlib.contextmanager
    def _counting(self, name: str, errors: tuple[type[BaseException], ...]) -> Iterator[None]:
        """Count errors of a log, and report the first one."""
        try:
            yield
        except errors as error:
            self.log_errors += 1
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("%s cannot be written: %s. Training goes on; log_errors counts further errors.", name, error)


class _Jsonl(Sink):
    """Rows as lines of a file. evaluated: the evaluations before `start_step`, see `MetricsWriter`. num_logged: steps up to the
    last row that was there."""

    def __init__(self, run_dir: Path, start_step: int):
        path = run_dir / "metrics.jsonl"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            earlier, self.num_logged = _truncate_rows(path, start_step)
            self.evaluated: dict[int, Mapping[str, Any]] = {
                int(row["eval/updates"]): row for row in earlier if "eval/updates" in row
            }
            self.file = LogFile(path)
        except OSError as error:
            raise OSError(f"run directory {run_dir} cannot be written: {error}. Choose another one.") from error

    def write(self, step: int, row: dict[str, float]) -> None:
        line = json.dumps({"step": int(step)} | {tag: _jsonable(value) for tag, value in row.items()}) + "\n"
        self.file.write(line.encode())

    def lost_file(self) -> Path | None:
        return self.file.lost_file()

    def sync(self) -> None:
        self.file.sync()

    def close(self) -> None:
        self.file.close()


class _Completions(Sink):
    def __init__(self, run_dir: Path, start_step: int, max_mb: int):
        self.file = completions_file.CompletionsFile(run_dir / completions_file.NAME, start_step, max_mb * 10**6)
        self.completions, self.sync, self.close = self.file.write, self.file.sync, self.file.close

    def write(self, step: int, row: dict[str, float]) -> None:
        """Do nothing: numbers are in `metrics.jsonl`."""

    def lost_file(self) -> Path | None:
        return self.file.file.lost_file()


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a `metrics.jsonl`, with "NaN" and infinities as floats. Damaged lines are logged and left out; the last
    one is left out silently if it is half-written, because the run may be going on."""
    path = Path(expand_home(path))
    text = bounded_text(path, errors="replace")
    lines = text.splitlines()
    if lines and not text.endswith(("\n", "}")):
        lines.pop()
    return [row for _, row in _counted(_parse(lines, path))]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield `(a/b, value)` for each leaf of a nested mapping. Values other than numbers and strings become `str(value)`."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value if isinstance(value, (bool, int, float, str)) else str(value)


def _truncate_rows(path: Path, start_step: int) -> tuple[list[dict[str, Any]], int]:
    """Drop rows with `step >= start_step` and damaged lines by replacing the file atomically. Returns the other rows, and how
    many steps were there."""
    if not path.exists():
        return [], 0
    text = bounded_text(path, errors="replace")
    lines = text.splitlines()
    intact = _counted(_parse(lines, path))
    num_logged = max((row["step"] + 1 for _, row in intact), default=0)
    earlier = [(line, row) for line, row in intact if row["step"] < start_step]
    rows, dropped = [row for _, row in earlier], len(lines) - len(earlier)
    if lines == [line for line, _ in earlier] and text.endswith("\n"):
        return rows, num_logged
    logger.warning("%s: dropped %d of %d rows, the run starts at step %d", path, dropped, len(lines), start_step)
    temporary = path.with_suffix(".jsonl.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line, _ in earlier)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return rows, num_logged


def _counted(parsed: Iterable[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Return lines and rows with the number of updates as their step, also those of a file that counts from 0."""
    lines_and_rows = [*parsed]
    if not any(row["step"] == 0 and "time/step_s" in row for _, row in lines_and_rows):  # of an update
        return lines_and_rows
    counted = []
    for line, row in lines_and_rows:
        step = int(row.get("eval/updates", row["step"] + 1))
        counted.append((re.sub(r'"step": *\d+', f'"step": {step}', line, count=1), row | {"step": step}))
    return counted


def _parse(lines: list[str], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            row = {sys.intern(name): _step(x) if name in COUNTS else float(x) for name, x in row.items()}
            yield line, {"step": row.pop("step")} | row
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            logger.warning("%s: line %d is damaged (%.100s) and left out", printable(path), number, error)


def _step(value: Any) -> int:
    """Return a number of updates. Raises ValueError for what is none."""
    if not 0 <= int(value) < 2**53:
        raise ValueError("no number of updates")
    return int(value)


def _jsonable(value: float) -> float | str:
    """Return a number that any JSON reader accepts, or the name of one that JSON does not have."""
    return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
