"""The logs that `metrics_writer` writes to: their common base, TensorBoard, and Weights & Biases.

TensorBoard events are written here, not by tensorboardX's `SummaryWriter`: if its background thread dies on a full disk, its
queue fills up and the next call blocks forever; and its record writer leaves partial records.
"""

from __future__ import annotations

import abc
import importlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jmarl.logs.log_file import LogFile
from jmarl.logs.tables import escape
from jmarl.shadows import explaining

WANDB_ID = "wandb_id.txt"  # in the run directory
STEP = "jmarl/step"  # column of rows in a W&B run that a script began
REWARD_TAG = "reward/mean"  # shown by the progress bar and TensorBoard's HPARAMS tab


class Sink(abc.ABC):
    """One log. Its `errors` are counted and do not stop the run."""

    errors: tuple[type[BaseException], ...] = (OSError,)

    @abc.abstractmethod
    def write(self, step: int, row: dict[str, float]) -> None:
        """Write a row of metrics by their tags."""

    def text(self, step: int, name: str, markdown: str) -> None:
        return None

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        return None

    def completions(self, step: int, kind: str, record: Mapping[str, Any]) -> None:
        return None

    def lost_file(self) -> Path | None:
        """Return its file if that was removed or replaced while the run writes to it."""
        return None

    def sync(self) -> None:
        return None

    def close(self) -> None:
        return None


class TensorBoard(Sink):
    """An event file in the run directory, whose name TensorBoard shows as the name of the run."""

    def __init__(self, run_dir: Path, hparams: Mapping[str, Any], start_step: int):
        # Imported here, because tensorboardX imports torch (two seconds) if it is installed.
        with explaining():
            from tensorboardX import summary
            from tensorboardX.proto import event_pb2, summary_pb2
            from tensorboardX.record_writer import masked_crc32c

        event: Any = event_pb2  # generated modules, whose classes a type checker does not see
        protos: Any = summary_pb2
        self.summary, self.protos, self.event, self.checksum = summary, protos, event.Event, masked_crc32c
        # TensorBoard reads the files of a run in the order of their names; nanoseconds separate two of the same second.
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{now}.{os.getpid()}"
        self.file = LogFile(run_dir / name)
        self._add(file_version="brain.Event:2")
        restart = event.SessionLog(status=event.SessionLog.START)
        self._add(step=start_step, session_log=restart)  # TensorBoard hides earlier events from this step on
        experiment, start, self.end = summary.hparams(dict(hparams), {REWARD_TAG: 0.0})
        rows = "\n".join(f"| {escape(name)} | {escape(str(value))} |" for name, value in hparams.items())
        for item in (experiment, start, summary.text("hparams", f"| name | value |\n| --- | --- |\n{rows}")):
            self._add(step=start_step, summary=item)

    def _add(self, **fields: Any) -> None:
        """Append an event as a record of the TFRecord format: length, its checksum, data, their checksum."""
        data = self.event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = (struct.pack("<I", self.checksum(part)) for part in (length, data))
        self.file.write(b"".join((length, next(sums), data, next(sums))))

    def write(self, step: int, row: dict[str, float]) -> None:
        values = [self.protos.Summary.Value(tag=tag, simple_value=value) for tag, value in row.items()]
        self._add(step=step, summary=self.protos.Summary(value=values))

    def text(self, step: int, name: str, markdown: str) -> None:
        self._add(step=step, summary=self.summary.text(name, markdown))

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        self._add(step=step, summary=self.summary.histogram(name, values, bins="auto", max_bins=64))

    def lost_file(self) -> Path | None:
        return self.file.lost_file()

    def close(self) -> None:
        try:
            self._add(summary=self.end)
        finally:
            self.file.close()


class Wandb(Sink):
    """One W&B run for all attempts of a run: its id is in the run directory, written before the first attempt begins.

    Where a script or a sweep has begun a run of W&B itself, rows go into that run, which stays open. The script logs there too,
    so the steps of W&B are not those of jmarl: each row has its step in the column `STEP`, by which W&B draws it. A run with
    another id, or with `reinit`, is one beside it.

    Rows of repeated updates are not sent again, because steps of W&B never go back; they are equal, or in `metrics.jsonl`.

    Args:
        num_logged: steps whose rows earlier attempts have written, where W&B does not say it: offline, or in a script's run.
    """

    def __init__(self, run_dir: Path, hparams: Mapping[str, Any], config: Mapping[str, Any], num_logged: int = 0):
        try:
            with explaining():
                self.wandb = importlib.import_module("wandb")
                self.errors = (OSError, self.wandb.Error)
        except ModuleNotFoundError as error:
            raise ImportError("wandb_config was given, but W&B is not installed: pip install 'jmarl[wandb]'") from error
        file = run_dir / WANDB_ID
        before = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        settings = dict(hparams) | dict(config.get("config") or {})
        active = getattr(self.wandb, "run", None)
        self.is_own = active is None or "reinit" in config or config.get("id", active.id) != active.id
        run_id = str(config.get("id") or before or secrets.token_hex(4)) if self.is_own else str(active.id)
        if run_id != before:
            temporary = file.with_suffix(".tmp")
            temporary.write_text(f"{run_id}\n", encoding="utf-8")
            temporary.replace(file)
        if self.is_own:
            own = {"dir": str(run_dir), "id": run_id, "resume": "allow"} | ({} if active is None else {"reinit": "create_new"})
            self.run = self.wandb.init(**own | dict(config) | {"config": settings})
            self.first = max(int(self.run.step), num_logged if self.run.offline and run_id == before else 0)
        else:
            self.run, self.first = active, num_logged if run_id == before else 0
            self.run.config.update({"jmarl": settings}, allow_val_change=True)
            self.run.define_metric(STEP)
        self._defined = {STEP}

    def write(self, step: int, row: dict[str, float]) -> None:
        if step >= self.first or "eval/updates" in row:  # an evaluation has its number of updates in its row
            self._log(step, row)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        if step >= self.first:
            self._log(step, {name: self.wandb.Histogram(values)})

    def close(self) -> None:
        if self.is_own:
            self.run.finish()

    def _log(self, step: int, row: dict[str, Any]) -> None:
        if self.is_own:  # rewards may have logged there too, with later steps
            self.run.log(row, step=max(step, self.first, int(self.run.step)))
            return
        for name in row.keys() - self._defined:
            self.run.define_metric(name, step_metric=STEP)
            self._defined.add(name)
        self.run.log(row | {STEP: step})
