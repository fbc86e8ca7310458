"""When a run is checkpointed, and what happens where that fails: training goes on, the failure is counted, and it is tried
again. Left out: pairs of preference rounds, which a run cannot go on without: where they cannot be written, it stops."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from safetensors import SafetensorError

from jmarl.config import Run
from jmarl.team import Team, policies, save_team, to_checkpoint
from jmarl.training.files.checkpoint import Checkpointer, CheckpointError, nbytes
from jmarl.training.logs.metrics_writer import say
from jmarl.types import TeamState

MIN_TIMES = 20  # where checkpoints are made by time, at least so many times the duration of one lies between two


class Saves:
    """The checkpoints of a run, or of several that are trained together.

    savers: of each run its checkpoints and what they say beside the state; empty: none are made. part: the state of run i.
    failed: checkpoints that could not be written so far.
    """

    def __init__(
        self,
        run: Run,
        savers: Sequence[tuple[Checkpointer, dict]],
        part: Callable[[TeamState, int], TeamState] = lambda state, _: state,
    ):
        self.run, self.savers, self.part = run, list(savers), part
        self.failed = 0
        self._why = ""
        self._last = time.monotonic()
        self._no_room = False

    def begin(self, state: TeamState) -> None:
        """Say so where the disk has not room for two checkpoints."""
        if self.savers:
            free, size = free_bytes(self.savers[0][0].directory), nbytes(to_checkpoint(state))
            if free < 2 * size:
                warnings.warn(
                    f"{self.run.output_dir} has {gib(free)} free, and a checkpoint takes about {gib(size)}: two of them do not "
                    "fit. Training goes on; free some space, choose another output_dir, or make no checkpoints (save_every=0)",
                    stacklevel=3,
                )

    def is_due(self, updates: int) -> bool:
        """Whether a checkpoint is to be made after so many updates; after the last one always."""
        if not self.savers:
            return False
        if updates == self.run.num_updates:
            return True
        if self.run.save_every:
            return self._no_room or updates % self.run.save_every == 0
        longest = max(saver.seconds for saver, _ in self.savers)
        return time.monotonic() - self._last >= max(60 * self.run.save_minutes, MIN_TIMES * longest)

    def check(self) -> int:
        """Return how many checkpoints could not be written so far, those in the background included."""
        for saver, _ in self.savers:
            self._try(saver.check)
        return self.failed

    def save(self, updates: int, state: TeamState) -> None:
        """Begin to save the state after so many updates, if the disk has room for it."""
        if all(saver.latest_step() == updates for saver, _ in self.savers):
            return
        size = nbytes(to_checkpoint(state))
        if (free := free_bytes(self.savers[0][0].directory)) < size:
            if not self._no_room:
                self._count(f"{self.run.output_dir} has {gib(free)} free, and it takes about {gib(size)}")
            self._no_room = True  # it stays due, and is made as soon as there is room
            return
        self._no_room, self._last = False, time.monotonic()
        for i, (saver, meta) in enumerate(self.savers):
            self._try(saver.wait)  # an earlier save that failed is counted here, and does not cost this one
            self._try(lambda saver=saver, meta=meta, i=i: saver.save(updates, to_checkpoint(self.part(state, i)), meta))

    def finish(self, updates: int) -> str:
        """Wait until all is on the disk. Returns why the checkpoint after so many updates is not there; empty: it is, or none
        is wanted."""
        for saver, _ in self.savers:
            self._try(saver.wait)
        return self._why if any(saver.latest_step() != updates for saver, _ in self.savers) else ""

    def save_at_failure(self, state: TeamState) -> None:
        """Keep what a run that fails has learned since its last checkpoint, unless an update that failed has consumed it."""
        if not self.savers:
            return
        for saver, _ in self.savers:
            self._try(saver.wait)
        saved = min((saver.latest_step() for saver, _ in self.savers), key=lambda step: -1 if step is None else step)
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(to_checkpoint(state))):
            since = "since the beginning" if saved is None else f"after update {saved}, the last checkpoint,"
            warnings.warn(f"what was learned {since} is lost: the update that failed had consumed the weights", stacklevel=3)
            return
        updates = int(state.step)
        if not updates or updates == saved:
            return
        self.save(updates, state)
        if not self.finish(updates) and self.run.progress:
            say(f"stopped after update {updates} in {self.run.output_dir}: resume continues from there")

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except CheckpointError as error:
            self._count(error)

    def _count(self, why: object) -> None:
        self.failed, self._why = self.failed + 1, str(why)
        warnings.warn(f"checkpoint not saved, training goes on: {why}", stacklevel=4)


def write_models(run: Run, team: Team, state: TeamState) -> str:
    """Write the trained agents to `models/` of the output directory. Returns why they could not be written; empty: they were.
    They then are in the last checkpoint, and what lay there before is as it was."""
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


def free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
