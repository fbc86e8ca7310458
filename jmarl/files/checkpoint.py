"""Save and restore the training state with Orbax.

A checkpoint of a step has the arrays of a pytree (`state`, see `saved_arrays`) and a JSON object (`meta`: settings and
fingerprints).

- Saving is asynchronous: `save` returns when the arrays are copied off the device, so the caller may donate them at once.
  If a background save fails, the next call of `check`, `save`, `wait` or `close` raises `CheckpointError`; training may catch
  it, continue and try again.
- A step is written to `STEP.saving`, then the manifest of its files (`manifest.json`), then the folder is renamed to `STEP`.
  So every listed step was complete, and a byte that changes later is detected (`find_damage`) before anything is restored.
- The next writer removes and logs the leftovers of an interrupted save or deletion. A `read_only` checkpointer changes nothing,
  so it may read the directory of a running job.
- Arrays are restored bit for bit, with the dtype and sharding of the leaf that they replace.

In several processes all call `save` and `restore`: each writes and reads its parts, and the first one all else. Left out: a
directory that not all of them see, typed PRNG keys (store `jax.random.key_data`) and arrays without elements. `lock` ensures
that a directory has only one writer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jmarl.config.bounded_files import read_json
from jmarl.files.manifest import NAME, find_damage, sync_directory, write_manifest
from jmarl.files.saved_arrays import describe, differences, flatten, sharding_of
from jmarl.processes import exchange

logger = logging.getLogger(__name__)

SAVING, DELETING, META = ".saving", ".deleting", "meta.json"
FORMAT = 2  # version of the names of saved arrays; raised when they change


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read, or does not fit the state of the run."""


def saved_steps(directory: str | Path) -> list[int]:
    """Return the complete steps in a directory, ascending; [] if it does not exist. A damaged one may lack one of two files."""
    folders = [p for p in Path(directory).glob("*") if p.name.isdecimal() and any((p / x).is_file() for x in (META, NAME))]
    return sorted(int(p.name) for p in folders)


class Checkpointer:
    """Saves and restores the newest checkpoints of a run. Use it as a context manager or close it, because a save that is
    running when the process ends is lost.

    Args:
        directory: created if missing. If it cannot be written, the error comes here and not at the first save.
        keep: number of newest steps to keep on disk.
        keep_every: also keep steps that are a multiple of this; 0: none.
        read_only: only restore; do not create, clean, move or delete anything.
    """

    def __init__(self, directory: str | Path, keep: int = 2, keep_every: int = 0, *, read_only: bool = False):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got keep={keep}")
        self.directory, self.keep, self.read_only = Path(directory).absolute(), keep, read_only
        self.keep_every = keep_every
        self.seconds = 0.0  # duration of the last save
        self._thread: threading.Thread | None = None  # of the running save, or of an ended one whose result was not checked
        self._error: BaseException | None = None
        self.protected: Callable[[int], int | None] = lambda step: None  # step -> an older one to keep as long as it
        self._intact: set[int] = set()  # steps whose files this object has checked
        self._orbax: ocp.StandardCheckpointer | None = None
        if read_only:
            if not self.directory.is_dir():
                raise CheckpointError(f"checkpoint directory {self.directory} does not exist")
        else:
            exchange.from_first(self._prepare)

    def _prepare(self) -> None:
        _require_writable(self.directory)
        self._remove_leftovers()

    def steps(self) -> list[int]:
        """Return the steps that are complete on disk, ascending. A running save is not listed."""
        return exchange.from_first(partial(saved_steps, self.directory))

    def latest_step(self) -> int | None:
        """Return the newest complete step, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> bool:
        """Wait for the save before, and start to save a step. Returns False, and does nothing, if the step is already saved."""
        if self.read_only:
            raise CheckpointError(f"checkpoint directory {self.directory} was opened read_only; nothing can be saved")
        self.wait()
        saved = self.steps()
        if step in saved:
            return False
        if saved and step < saved[-1]:
            raise CheckpointError(
                f"step {step} is older than step {saved[-1]} in {self.directory}: set the newer steps aside first (set_aside)"
            )
        arrays = {name: exchange.of_all(leaf) for name, leaf in flatten(state).items()}
        spec = {name: describe(leaf) for name, leaf in arrays.items()}
        content = {"format": FORMAT, "meta": _require_json(meta), "spec": spec}
        folder, began = self._folder(step, SAVING), time.monotonic()

        def begin() -> None:
            folder.mkdir()
            (folder / META).write_text(json.dumps(content), encoding="utf-8")

        try:
            exchange.from_first(begin)
            exchange.gather(lambda: self._writer().save(folder / "state", arrays))
        except Exception as error:
            raise self._failed(step, error) from error
        self._thread = threading.Thread(target=self._finish, args=(step, folder, began), name=f"save-{step}")
        self._thread.start()
        return True

    def _finish(self, step: int, folder: Path, began: float) -> None:
        """In a thread: wait for the arrays, write the manifest, and rename the folder so that the step is listed."""
        try:
            self._writer().wait_until_finished()
            if exchange.is_first():
                write_manifest(folder)
                folder.rename(self._folder(step))
                sync_directory(self.directory)
        except Exception as error:
            self._error = self._failed(step, error)
        else:
            if exchange.is_first():
                self._delete_old()
        self.seconds = time.monotonic() - began

    def check(self) -> None:
        """Raise the `CheckpointError` of a background save that has failed, once. Does not wait."""
        if self._thread is not None and not exchange.any_of(self._thread.is_alive()):
            self.wait()

    def wait(self) -> None:
        """Wait for the running save. Raises `CheckpointError` if it failed."""
        if self._thread is not None and not exchange.has_ended():  # else the thread may wait for a process that has failed
            self._thread.join()
            self._thread = None
            errors = exchange.gather(partial(str, self._error or ""))
            if self._error is None and (text := next(filter(None, errors), "")):
                self._error = CheckpointError(text)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def damage(self, step: int) -> str | None:
        """Return how the files of a step are damaged; None if they are intact. Reads all files, once per step."""
        return exchange.from_first(partial(self._damage, step))

    def _damage(self, step: int) -> str | None:
        if step not in self._intact:
            if (problem := find_damage(self._folder(step))) is not None:
                return problem
            self._intact.add(step)
        return None

    def newest_intact(self, strict: bool = False) -> int | None:
        """Return the newest intact step, or None. Damaged steps are handled as in `is_intact`."""
        for step in reversed(self.steps()):
            if self.is_intact(step, strict):
                return step
        return None

    def is_intact(self, step: int, strict: bool = False) -> bool:
        """Return whether a step is intact. A damaged one is logged and, unless read_only, set aside; strict: it raises."""
        if (problem := self.damage(step)) is None:
            return True
        text = f"checkpoint step {step} in {self.directory} is damaged: {problem}"
        if strict:
            raise CheckpointError(f"{text}. {self._others(step)}; without strict_checkpoints the newest intact one is used")
        logger.warning("%s; an older step is used", text)
        if not self.read_only:
            self.set_aside(step, "damaged")
        return False

    def set_aside(self, step: int, reason: str) -> Path:
        """Rename the folder of a step to `STEP.REASON`, so that it is not listed any more. Returns its new path."""
        target = self._folder(step, f".{reason}")

        def rename() -> None:
            if target.exists():
                shutil.rmtree(target)
            logger.warning("checkpoint step %d is now %s, which is not used and may be deleted", step, target)
            self._folder(step).rename(target)

        exchange.from_first(rename)
        return target

    def restore(
        self, state_like: Any, step: int | None = None, resized: str | None = None, unused: str | None = None
    ) -> tuple[Any, dict[str, Any], int]:
        """Return `(state, meta, step)` of a step (default: the newest intact one). Raises `CheckpointError` if it is damaged.

        state_like: a state of arrays or `jax.ShapeDtypeStruct` with the structure, dtypes and shardings to restore. A leaf that
            is not committed to devices is restored uncommitted.
        resized: leaves under this path may have been saved with another size of one axis, and are restored so.
        unused: leaves of the checkpoint under this path are left out.
        """
        content, step = self._read_meta(step)
        wanted = flatten(state_like)
        for name in [name for name in wanted if resized is not None and name.startswith(f"{resized}/")]:
            size, shape = content["spec"].get(name, [[]])[0], wanted[name].shape
            if len(size) == len(shape) and sum(x != y for x, y in zip(size, shape, strict=True)) == 1:
                wanted[name] = jax.ShapeDtypeStruct(tuple(size), wanted[name].dtype, sharding=sharding_of(wanted[name]))
        read = dict(wanted)
        for name, (shape, dtype) in content["spec"].items():
            if unused and name.startswith(f"{unused}/"):
                read[name] = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
        if lines := differences(content["spec"], read):
            first = f"checkpoint step {step} in {self.directory} does not fit the state of this run:"
            raise CheckpointError("\n  ".join([first, *lines]))
        default = exchange.sharding_of_small()
        targets = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(leaf) or default)
            for name, leaf in read.items()
        }
        try:
            with ocp.StandardCheckpointer() as reader:
                arrays = reader.restore(self._folder(step) / "state", targets)
        except Exception as error:
            raise self._unreadable(step, error) from error
        leaves = [arrays[n] if sharding_of(leaf) else jnp.array(np.asarray(arrays[n])) for n, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(state_like), leaves), content["meta"], step

    def read_arrays(self, step: int | None = None) -> tuple[dict[str, Any], dict[str, Any], int]:
        """Return `(path -> array, meta, step)` of a step, for callers that have no state of its structure."""
        content, step = self._read_meta(step)
        spec = content["spec"].items()
        like = {name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)) for name, (shape, dtype) in spec}
        return self.restore(like, step)

    def read_meta(self, step: int | None = None) -> tuple[dict[str, Any], int]:
        """Return `(meta, step)` without the arrays, to compare settings before a state is built."""
        content, step = self._read_meta(step)
        return content["meta"], step

    def close(self) -> None:
        """Wait for the running save and free the threads. Raises `CheckpointError` if the save failed."""
        try:
            self.wait()
        finally:
            self._close_writer()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.close()
        except (CheckpointError, exchange.FailedProcess) as failed:
            if error is None:
                raise
            logger.warning("%s", failed)  # the error of the context is raised

    def _folder(self, step: int, suffix: str = "") -> Path:
        return self.directory / f"{step}{suffix}"

    def _writer(self) -> ocp.StandardCheckpointer:
        if self._orbax is None:
            self._orbax = ocp.StandardCheckpointer()
        return self._orbax

    def _close_writer(self) -> None:
        """Close the Orbax checkpointer; the next save creates a new one."""
        writer, self._orbax = self._orbax, None
        if writer is not None:
            writer.close()

    def _delete_old(self) -> None:
        """Delete all but the newest steps, those that they protect and multiples of `keep_every`.

        Folders are renamed first, so none is listed in part."""
        steps = saved_steps(self.directory)
        needed = {x for step in steps[-self.keep :] for x in (step, self.protected(step))}
        needed |= {step for step in steps if self.keep_every and step % self.keep_every == 0}
        for step in [step for step in steps if step not in needed]:
            try:
                shutil.rmtree(self._folder(step).rename(self._folder(step, DELETING)))
            except OSError as error:
                logger.warning("checkpoint step %d in %s cannot be deleted: %s", step, self.directory, error)

    def _remove_leftovers(self) -> None:
        if leftovers := sorted(x for x in self.directory.iterdir() if x.suffix in (SAVING, DELETING) and x.stem.isdecimal()):
            logger.warning("removing interrupted saves in %s: %s", self.directory, ", ".join(x.name for x in leftovers))
        for path in leftovers:
            shutil.rmtree(path)

    def _read_meta(self, step: int | None) -> tuple[dict[str, Any], int]:
        self.wait()
        saved = self.steps()
        if step is None and (step := self.newest_intact()) is None:
            raise CheckpointError(f"no complete checkpoint in {self.directory}")
        if step not in saved:
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}; there are {saved}")
        if (problem := self.damage(step)) is not None:
            raise self._unreadable(step, problem)
        content = exchange.from_first(lambda: read_json(self._folder(step) / META))
        if (version := content.get("format", 1)) != FORMAT:
            raise CheckpointError(
                f"checkpoint step {step} in {self.directory} has format {version}, and this version of jmarl reads format "
                f"{FORMAT}: resume it with the version that wrote it, or start from its exported models"
            )
        return content, step

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        """Remove the files of a failed save, and return its error."""
        with contextlib.suppress(Exception):  # closing repeats `error`, which is raised
            self._close_writer()
        if exchange.is_first():
            shutil.rmtree(self._folder(step, SAVING), ignore_errors=True)  # the next writer tries again
        newest = max(saved_steps(self.directory), default=None)
        return CheckpointError(f"step {step} was not saved in {self.directory} (newest complete step: {newest}): {error}")

    def _unreadable(self, step: int, error: Exception | str) -> CheckpointError:
        return CheckpointError(f"checkpoint step {step} in {self.directory} cannot be read: {error}. {self._others(step)}")

    def _others(self, step: int) -> str:
        return f"Other steps there: {[s for s in saved_steps(self.directory) if s != step]}"


def _require_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"jmarl")
            probe.flush()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint directory {directory} cannot be written: {error}. Choose another run directory or free space."
        ) from error


def _require_json(meta: dict[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(meta))  # Python's JSON also has infinity, which settings may be
    except (TypeError, ValueError) as error:
        raise TypeError(f"meta must be a JSON object: {error}") from error
