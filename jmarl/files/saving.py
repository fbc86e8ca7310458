"""When to checkpoint a run, and what to do if a checkpoint cannot be written: count the failure, train on and try again.

Left out: the pairs of preference rounds. A run cannot continue without them, so it stops if they cannot be written.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from safetensors import SafetensorError

from jmarl.config import Run
from jmarl.config.bounded_files import read_json
from jmarl.files.checkpoint import Checkpointer, CheckpointError, saved_steps
from jmarl.files.lock import keep
from jmarl.files.run_files import BEST_FILE, Best, shown
from jmarl.files.saved_arrays import nbytes
from jmarl.logs.terminal import say
from jmarl.processes import exchange
from jmarl.team import Team, policies, save_team, to_checkpoint
from jmarl.types import TeamState

MIN_INTERVAL = 20  # shortest interval between checkpoints by time, as a multiple of the time that one takes


class BestSoFar:
    """The evaluations of a run that were the best ones when they were made, in a file beside its checkpoints: so the best one
    up to each checkpoint is known, from whichever the run resumes.

    Args:
        checkpoints: the folder of checkpoints.
        run: settings; without keep_best the file of an earlier attempt still protects its checkpoints.
        step: where the run begins. Later evaluations are forgotten, because it repeats them.
    """

    def __init__(self, checkpoints: Path, run: Run, step: int):
        self.file, (self.column, self.smallest) = checkpoints / BEST_FILE, run.best_column
        content = read_json(self.file) if self.file.is_file() else {}
        if content and not run.keep_best:
            self.column, self.smallest = content["column"], content["smallest"]
        is_same = content and (content["column"], content["smallest"]) == (self.column, self.smallest)
        before = [tuple(entry) for entry in content["history"]] if is_same else []
        self.history: list[tuple[int, float]] = [entry for entry in before if entry[0] <= step]
        self.forgets = bool(content) and (not is_same or len(self.history) < len(before))  # what the file has

    def forget(self) -> None:
        """Write the file anew if it has evaluations that are forgotten."""
        if self.forgets:
            self._write()

    def up_to(self, step: int) -> int | None:
        """Return the number of updates of the best evaluation up to a step."""
        return max((updates for updates, _ in self.history if updates <= step), default=None)

    def add(self, updates: int, row: Mapping[str, float]) -> bool:
        """Add an evaluation, and return whether it is the best so far. row: its metrics; empty if not all episodes count."""
        if row and not updates and self.column not in row:
            names = ", ".join(name for name in row if not name.endswith("_ci95"))
            raise ValueError(f"keep_best={self.column!r} is no column of this run's evaluations: choose one of {names}")
        value, before = row.get(self.column, math.nan), [entry for entry in self.history if entry[0] < updates]
        best = before[-1][1] if before else math.inf if self.smallest else -math.inf
        is_best = math.isfinite(value) and (value < best if self.smallest else value > best)
        history = [*before, (updates, float(value))] if is_best else before
        if history != self.history or self.forgets:
            self.history = history
            self._write()
        return is_best

    def _write(self) -> None:
        content = {"column": self.column, "smallest": self.smallest, "history": self.history}
        with (temporary := self.file.with_name(f"{BEST_FILE}.tmp")).open("w", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.file)
        self.forgets = False


class Saves:
    """The checkpoints of a run, or of several runs that are trained together.

    Args:
        run: settings.
        savers: the checkpointer of each run, and the metadata of its checkpoints; empty: no checkpoints are written.
        to_save: state -> what a checkpoint of it holds, see `Source`.
        state_of: (state, i) -> the state of run i.
    """

    def __init__(
        self,
        run: Run,
        savers: Sequence[tuple[Checkpointer, dict]],
        to_save: Callable[[TeamState], TeamState] = lambda state: state,
        state_of: Callable[[TeamState, int], TeamState] = lambda state, _: state,
    ):
        self.run, self.savers, self.to_save, self.state_of = run, list(savers), to_save, state_of
        self.bests: list[BestSoFar] = []  # of each run; only in the first of several processes
        self.failed = 0  # checkpoints that could not be written so far
        self._last_error = ""
        self._last_time = time.monotonic()
        self._disk_full = False

    def check_room(self, state: TeamState) -> None:
        """Say what the checkpoints of keep_every take, and warn if the disk has no room for them and two more."""
        if not self.savers or not exchange.is_first():
            return
        free, size, count = self._free_bytes(), nbytes(to_checkpoint(self.to_save(state))), 2
        if every := self.run.keep_every:
            count += self.run.num_updates // every - int(state.step) // every
            if self.run.progress:
                say(f"{line_of_sizes(self.run, size)}, {gib(free)} are free")
        if free < count * size:
            fewer = "make fewer (a larger keep_every)" if every else "make no checkpoints (save_every=0)"
            number = "two" if count == 2 else count
            warnings.warn(
                f"{self.run.output_dir} has {gib(free)} free, and a checkpoint takes about {gib(size)}: {number} of them do "
                f"not fit. Training goes on; free some space, choose another directory, or {fewer}",
                stacklevel=3,
            )

    def open_best(self, step: int) -> None:
        """Read which evaluations were the best of runs that begin at a step, and protect the checkpoints of these."""
        if self.savers and exchange.is_first():
            self.bests = [BestSoFar(saver.directory, self.run, step) for saver, _ in self.savers]
            for best, (saver, _) in zip(self.bests, self.savers, strict=True):
                saver.protected = best.up_to
                try:
                    best.forget()
                except OSError as error:
                    self._count(f"the best evaluation cannot be recorded: {error}")

    def is_best(self, updates: int, scores: Sequence[Mapping[str, float]]) -> bool:
        """Add the evaluation of each run, and return whether one of them is the best of its run so far (setting keep_best)."""

        def add() -> bool:
            try:
                return any([best.add(updates, row) for best, row in zip(self.bests, scores, strict=True)])
            except OSError as error:
                self._count(f"the best evaluation cannot be recorded: {error}")
                return False

        return bool(self.run.keep_best) and exchange.from_first(add)

    def best_lines(self) -> list[str]:
        """Return lines that say which evaluation of each run is the best, and where its weights are."""
        if not self.run.keep_best:
            return []
        lines = []
        for best, (saver, _) in zip(self.bests, self.savers, strict=False):
            if not best.history:
                lines.append(f"keep_best: no evaluation of all episodes has a finite {best.column}, so nothing is kept")
                continue
            updates, value = best.history[-1]
            lines.append(
                f"best: {Best(updates, value, best.column)}, kept in {shown(str(saver.directory))}/{updates} (--best). It was "
                "chosen on these held-out tasks: expect worse on others"
            )
        return lines

    def is_due(self, updates: int) -> bool:
        """Whether to write a checkpoint after this number of updates; always after the last one."""
        if not self.savers or updates == self.run.num_updates:
            return bool(self.savers)
        if self.run.keep_every and updates % self.run.keep_every == 0:
            return True
        if self.run.save_every:
            return self._disk_full or updates % self.run.save_every == 0
        return exchange.from_first(self._time_is_over)

    def _time_is_over(self) -> bool:
        longest = max(saver.seconds for saver, _ in self.savers)
        return time.monotonic() - self._last_time >= max(60 * self.run.save_minutes, MIN_INTERVAL * longest)

    def check(self) -> int:
        """Return the number of checkpoints that could not be written so far, including background saves that have failed."""
        for saver, _ in self.savers:
            self._try(saver.check)
        return self.failed

    def save(self, updates: int, state: TeamState) -> None:
        """Start to save the state after this number of updates, if the disk has room for it."""
        if all([saver.latest_step() == updates for saver, _ in self.savers]):
            return
        state = self.to_save(state)
        if problem := exchange.from_first(self._take_place):
            self._count(problem)
            return
        if (free := exchange.from_first(self._free_bytes)) < (size := nbytes(to_checkpoint(state))):
            if not self._disk_full:
                self._count(f"{self.run.output_dir} has {gib(free)} free, and it takes about {gib(size)}")
            self._disk_full = True  # the checkpoint stays due until there is room
            return
        self._disk_full, self._last_time = False, time.monotonic()
        for i, (saver, meta) in enumerate(self.savers):
            self._try(saver.wait)  # count the failure of an earlier save here, so that it does not prevent this one
            self._try(partial(saver.save, updates, to_checkpoint(self.state_of(state, i)), meta))

    def finish(self, updates: int) -> str:
        """Wait for all saves. Returns why the checkpoint after this number of updates is missing; empty if it is there or no
        checkpoints are wanted."""
        for saver, _ in self.savers:
            self._try(saver.wait)
        if all([saver.latest_step() == updates for saver, _ in self.savers]):
            return exchange.from_first(self._lost_best)
        return self._last_error or f"the checkpoint after update {updates} was removed from {self.run.output_dir}"

    def _lost_best(self) -> str:
        """Return which best evaluation has no checkpoint; empty if all have one."""
        for best, (saver, _) in zip(self.bests, self.savers, strict=False):
            if self.run.keep_best and best.history and best.history[-1][0] not in saved_steps(saver.directory):
                return f"the weights of the best evaluation, after update {best.history[-1][0]}, are not in {saver.directory}"
        return ""

    def save_at_failure(self, state: TeamState) -> None:
        """Save the newest state of a failing run, unless the failed update has consumed it."""
        if not self.savers:
            return
        for saver, _ in self.savers:
            self._try(saver.wait)
        saved = min([saver.latest_step() for saver, _ in self.savers], key=lambda step: -1 if step is None else step)
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(to_checkpoint(self.to_save(state)))):
            since = "since the beginning" if saved is None else f"after update {saved}, the last checkpoint,"
            warnings.warn(f"everything learned {since} is lost: the failed update had consumed the weights", stacklevel=3)
            return
        updates = int(state.step)
        if updates and updates != saved:
            self.save(updates, state)
            if not self.finish(updates) and self.run.progress:
                say(f"stopped after update {updates} in {shown(self.run.output_dir)}: resume continues from there")

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except CheckpointError as error:
            self._count(error)

    def _count(self, error: object) -> None:
        self.failed, self._last_error = self.failed + 1, str(error)
        warnings.warn(f"checkpoint not saved, training goes on: {error}", stacklevel=4)

    def _take_place(self) -> str:
        """Make the directories of the checkpoints anew if they were removed. Returns why they must not be written there."""
        for saver, _ in self.savers:
            if not keep(saver.directory.parent):
                return f"{saver.directory.parent} was removed or replaced while the run went on, and is in use by another now"
            try:
                saver.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                return f"{saver.directory} was removed while the run went on, and cannot be made anew: {error}"
        return ""

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.savers[0][0].directory).free


def write_models(run: Run, team: Team, state: TeamState) -> str:
    """Write the trained agents to `models/` of the output directory, if the settings ask for it.

    Returns why they could not be written; empty if they were written or not wanted. After a failure the last checkpoint still
    holds them, and the models of an earlier run are unchanged.
    """
    if not (run.output_dir and run.save_models):
        return ""
    if not exchange.from_first(partial(keep, run.output_dir)):
        return f"models: {run.output_dir} was removed or replaced while the run went on, and is in use by another now"
    try:
        save_team(Path(run.output_dir) / "models", team, policies(state))
    except (OSError, SafetensorError) as error:
        warnings.warn(
            f"the models in {run.output_dir}/models could not be written: {error}. Free some space and resume the run, "
            "which writes them again",
            stacklevel=3,
        )
        return f"models: {error}"
    return ""


def line_of_sizes(run: Run, size: int) -> str:
    """Return what the checkpoints that keep_every keeps take in all. size: bytes of one."""
    count = run.num_updates // run.keep_every
    unit, name = (2**30, "GiB") if count * size >= 2**30 else (2**20, "MiB")
    sizes = f"{size / unit:.3g} {name} each, {count * size / unit:.3g} {name} in all"
    return f"keep_every={run.keep_every}: {count} checkpoints are kept, {sizes} beside the newest {run.save_total_limit}"


def gib(size: float) -> str:
    """Return a number of bytes in GiB, as text."""
    return f"{size / 2**30:.2f} GiB"
