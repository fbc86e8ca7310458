"""The logs of other programs that `metrics_writer` writes to: TensorBoard, Weights & Biases and trackio.

TensorBoard events are written here, of TensorBoard's own protocol buffers: writers such as tensorboardX import torch if it is
installed (seconds, and 200 MB), and one whose background thread dies on a full disk blocks the run forever.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from huggingface_hub import constants

from jmarl.columns import valid
from jmarl.logs.completions_file import EVAL
from jmarl.logs.log_file import REWARD_TAG, LogFile, Sink
from jmarl.logs.tables import escape
from jmarl.models.hub.messages import ChatPrompt
from jmarl.rl.returns import episode_path
from jmarl.shadows import explaining

WANDB_ID, TRACKIO_NAME = "wandb_id.txt", "trackio_name.txt"  # in the run directory
STEP = "jmarl/step"  # column of rows in a W&B run that a script began
NUM_BINS = 64  # of histograms


class TensorBoard(Sink):
    """An event file in the run directory, whose name TensorBoard shows as the name of the run."""

    def __init__(self, run_dir: Path, hparams: Mapping[str, Any], start_step: int):
        with explaining():  # imported here, because few processes need it
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
            from tensorboard.plugins.text.summary_v2 import text_pb

        event: Any = event_pb2  # generated modules, whose classes a type checker does not see
        protos: Any = summary_pb2
        self.protos, self.event, self.text_pb, self.checksum = protos, event.Event, text_pb, masked_crc32c
        # TensorBoard reads the files of a run in the order of their names; nanoseconds separate two of the same second.
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{now}.{os.getpid()}"
        self.file = LogFile(run_dir / name)
        self._add(file_version="brain.Event:2")
        restart = event.SessionLog(status=event.SessionLog.START)
        self._add(step=start_step, session_log=restart)  # TensorBoard hides earlier events from this step on
        experiment, start, self.end = hparams_values(hparams)
        for value in (experiment, start):
            self._add(step=start_step, summary=protos.Summary(value=[value]))
        rows = "\n".join(f"| {escape(name)} | {escape(str(value))} |" for name, value in hparams.items())
        self.text(start_step, "hparams", f"| name | value |\n| --- | --- |\n{rows}")

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
        self._add(step=step, summary=self.text_pb(f"{name}/text_summary", markdown))

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        low, high = float(values.min()), float(values.max())
        is_one = high - low <= 1e-9 * max(abs(low), abs(high))  # numbers cannot divide so short a range
        counts, edges = np.histogram(values, 1 if is_one else NUM_BINS)
        moments = {"num": values.size, "sum": values.sum(), "sum_squares": (values**2).sum()}
        buckets = {"bucket_limit": edges[1:].tolist(), "bucket": counts.tolist()}
        histo = self.protos.HistogramProto(min=low, max=high, **moments, **buckets)
        self._add(step=step, summary=self.protos.Summary(value=[self.protos.Summary.Value(tag=name, histo=histo)]))

    def lost_file(self) -> Path | None:
        return self.file.lost_file()

    def close(self) -> None:
        try:
            self._add(summary=self.protos.Summary(value=[self.end]))
        finally:
            self.file.close()


def hparams_values(hparams: Mapping[str, Any]) -> list[Any]:
    """Return what TensorBoard's HPARAMS tab reads of a run: the names of the settings and the reward, the settings, its end."""
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    api, plugin, summary = (vars(module) for module in (api_pb2, plugin_data_pb2, summary_pb2))  # generated modules
    kinds = {bool: ("bool_value", "BOOL"), int: ("number_value", "FLOAT64"), float: ("number_value", "FLOAT64")}
    kinds |= {str: ("string_value", "STRING")}
    known = {name: (value, *kinds[type(value)]) for name, value in hparams.items() if type(value) in kinds}
    start = plugin["SessionStartInfo"]()
    for name, (value, field, _) in known.items():
        setattr(start.hparams[name], field, value)
    infos = [api["HParamInfo"](name=name, type=f"DATA_TYPE_{kind}") for name, (_, _, kind) in known.items()]
    reward = api["MetricInfo"](name=api["MetricName"](tag=REWARD_TAG))
    parts = {
        metadata.EXPERIMENT_TAG: {"experiment": api["Experiment"](hparam_infos=infos, metric_infos=[reward])},
        metadata.SESSION_START_INFO_TAG: {"session_start_info": start},
        metadata.SESSION_END_INFO_TAG: {"session_end_info": plugin["SessionEndInfo"](status="STATUS_SUCCESS")},
    }
    written = {tag: metadata.create_summary_metadata(plugin["HParamsPluginData"](**part)) for tag, part in parts.items()}
    tensor = metadata.NULL_TENSOR  # TensorBoard reads only the metadata
    return [summary["Summary"].Value(tag=tag, metadata=data, tensor=tensor) for tag, data in written.items()]


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
        self.run: Any
        active = cast(Any, getattr(self.wandb, "run", None))
        active_id = "" if active is None else str(active.id)
        self.is_own = active is None or "reinit" in config or config.get("id", active_id) != active_id
        run_id = str(config.get("id") or before or secrets.token_hex(4)) if self.is_own else active_id
        if run_id != before:
            write_line(file, run_id)
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


class Trackio(Sink):
    """One run of trackio for all attempts of a run: its name is in the run directory, written before the first attempt begins.

    It is a run beside the one that a script has begun. Rows that trackio has are not sent again. What trackio cannot write, it
    reports itself, as a warning.

    Args:
        num_logged: steps whose rows earlier attempts have written, where trackio does not say it: on network file systems, or
            if it sends them.
        project: in which the run is.
        trace_every: steps between those of which the best and the worst episode are written, as one `Trace` of each agent.
    """

    def __init__(self, run_dir: Path, hparams: Mapping[str, Any], num_logged: int, *, project: str, trace_every: int):
        try:
            with explaining():
                self.trackio: Any = importlib.import_module("trackio")
        except ModuleNotFoundError as error:
            raise ImportError(f"trackio={project!r} is given, but not installed: pip install 'jmarl[trackio]'") from error
        file, self.trace_every = run_dir / TRACKIO_NAME, trace_every
        if not file.is_file():
            num_logged = 0
            write_line(file, f"{run_dir.resolve().name}-{secrets.token_hex(4)}")
        name = file.read_text(encoding="utf-8").strip()
        last = self.trackio.sqlite_storage.SQLiteStorage.get_max_step_for_run(project, name)
        self.first = num_logged if last is None else last + 1
        given = {"project": project, "name": name, "config": dict(hparams), "resume": "allow"}
        with asking_nobody():
            # An empty context: trackio ends the run of the context in which it begins another.
            switches = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
            self.run = contextvars.Context().run(lambda: self.trackio.init(**given, **switches))
        self.run.id = name  # by which rows are of one run, also where trackio does not find those of earlier attempts yet

    def write(self, step: int, row: dict[str, float]) -> None:
        if step >= self.first or "eval/updates" in row:  # an evaluation has its number of updates in its row
            self.run.log(row, step=step)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        if step >= self.first:
            self.run.log({name: self.trackio.Histogram(values)}, step=step)

    def completions(self, step: int, kind: str, record: Mapping[str, Any]) -> None:
        if kind == EVAL or (step >= self.first and (step - 1) % self.trace_every == 0):
            traces = [self.trackio.Trace(*trace) for trace in traces_of(f"{kind} {step}", record["turns"])]
            self.run.log({f"{kind}/episodes": traces}, step=step)

    def close(self) -> None:
        self.run.finish()


@contextlib.contextmanager
def asking_nobody() -> Iterator[None]:
    """Keep trackio from asking the Hub for the name of the user, unless its variables say that the run is sent somewhere."""
    before, is_sent = constants.HF_HUB_OFFLINE, {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"} & os.environ.keys()
    constants.HF_HUB_OFFLINE = before or not is_sent
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def traces_of(name: str, turns: Sequence[Mapping[str, Any]]) -> list[tuple[list[dict[str, str]], dict[str, Any]]]:
    """Return the messages and the metadata of each agent in the episodes with the highest and the lowest sum of rewards.

    turns: see `completions_file`."""
    nodes, joint = range(len(turns[0]["items"])), range(len(turns[0]["joint"]))
    parents, counts = [turn["parents"] for turn in turns], [len(turn["joint"]) for turn in turns]
    paths = [episode_path(parents, counts, p, j) for p in nodes for j in joint]
    episodes = [[(turn, p, j) for turn, (p, j) in zip(turns, path, strict=False)] for path in paths]
    sums = [sum(x for turn, p, j in path for x in turn["rewards"][p][j] if x is not None) for path in episodes]
    traces = []
    for number in dict.fromkeys((int(np.argmax(sums)), int(np.argmin(sums)))):
        for agent in range(len(turns[0]["prompts"])):
            path = [(turn, p, j) for turn, p, j in episodes[number] if turn["acts"][agent][p]]
            messages = []
            for turn, p, j in path:
                text = turn["completions"][agent][p][turn["joint"][j][agent]]
                prompt = turn["prompts"][agent][p]
                messages += prompt.messages if isinstance(prompt, ChatPrompt) else ({"role": "user", "content": prompt},)
                messages.append({"role": "assistant", "content": text})
            messages = [{name: valid(x) for name, x in message.items()} for message in messages]
            rewards = [turn["rewards"][p][j][agent] for turn, p, j in path]
            metadata = {"session_id": f"{name}, episode {number}", "agent": agent, "rewards": rewards}
            traces += [(messages, metadata)] if messages else []
    return traces


def write_line(file: Path, text: str) -> None:
    """Replace a file by one line."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(f"{text}\n", encoding="utf-8")
    temporary.replace(file)
