"""Save and restore the training state: one thin module over Orbax.

A checkpoint is one step: the arrays of a pytree (`state`) and a JSON object (`meta`: configuration, data position). The
pytree is stored flat, path -> array, beside a list of its paths, shapes and dtypes. So any container works (NamedTuple,
`flax.struct`, dict), and a run whose state has another shape is told which path differs instead of failing deep inside.

- Saving is asynchronous: `save` returns when the arrays are copied off the device (the caller may donate them at once).
  A background save that failed raises `CheckpointError` from the next call of `check`, `save`, `wait` or `close`; training may
  catch it, go on and try again.
- A step is written to `STEP.saving`, then a manifest of its files (`manifest.json`), then the folder is renamed to `STEP`. So
  whatever is listed was complete, and a byte that changes later is found (`find_damage`) before anything is restored.
- The next writer removes and logs what an interrupted save or deletion left. A `read_only` checkpointer changes nothing, so it
  may look into the directory of a running job.
- Arrays come back bit-equal, with the dtype and sharding of the leaf they replace.

Left out: several hosts, typed PRNG keys (store `jax.random.key_data`), and arrays without elements. One writer a directory is
what `lock` sees to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jmarl.training.files.manifest import find_damage, sync_directory, write_manifest

logger = logging.getLogger(__name__)

Spec = dict[str, list[Any]]  # path -> [shape, dtype name]
SHOWN = 8  # differing paths in an error message
SAVING, DELETING, META = ".saving", ".deleting", "meta.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found or fitted to the state of this run."""


def saved_steps(directory: str | Path) -> list[int]:
    """The steps that were completely written to a directory, ascending; none where there is no such directory."""
    path = Path(directory)
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdecimal() and p.is_dir()) if path.is_dir() else []


class Checkpointer:
    """Keeps the newest `keep` checkpoints of a run in `directory`. Use it as a context, or close it: a save that is under way
    when the process ends is lost.

    Args:
      directory: made if missing; a directory that cannot be written raises here, not at the first save.
      keep: how many of the newest steps stay on disk.
      read_only: only restores; neither makes, cleans, moves nor deletes anything.
    """

    def __init__(self, directory: str | Path, keep: int = 2, *, read_only: bool = False):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got keep={keep}")
        self.directory, self.keep, self.read_only = Path(directory).absolute(), keep, read_only
        self.seconds = 0.0  # that the last save took from beginning to end
        self._thread: threading.Thread | None = None  # of the save under way, or of one whose end was not looked at
        self._error: BaseException | None = None
        self._intact: set[int] = set()  # steps whose files this object has found to be whole
        self._orbax: ocp.StandardCheckpointer | None = None
        if read_only:
            if not self.directory.is_dir():
                raise CheckpointError(f"checkpoint directory {self.directory} does not exist")
        else:
            _require_writable(self.directory)
            self._remove_leftovers()

    def steps(self) -> list[int]:
        """The steps that are complete on disk, ascending; a save still under way is not listed."""
        return saved_steps(self.directory)

    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> bool:
        """Begin to save a step, once the save before it has ended. Returns False, and does nothing, for one that is saved."""
        if self.read_only:
            raise CheckpointError(f"checkpoint directory {self.directory} was opened read_only; nothing can be saved")
        self.wait()
        saved = self.steps()
        if step in saved:
            return False
        if saved and step < saved[-1]:
            raise CheckpointError(
                f"step {step} is older than step {saved[-1]}, which {self.directory} already holds: set_aside the newer steps"
            )
        arrays = _flatten(state)
        content = {"meta": _require_json(meta), "spec": {name: _describe(leaf) for name, leaf in arrays.items()}}
        folder, began = self._folder(step, SAVING), time.monotonic()
        try:
            folder.mkdir()
            (folder / META).write_text(json.dumps(content), encoding="utf-8")
            self._writer().save(folder / "state", arrays)
        except Exception as error:
            raise self._failed(step, error) from error
        self._thread = threading.Thread(target=self._finish, args=(step, folder, began), name=f"save-{step}")
        self._thread.start()
        return True

    def _finish(self, step: int, folder: Path, began: float) -> None:
        """In a thread: wait for the arrays, write the manifest, and give the folder the name by which it counts as saved."""
        try:
            self._writer().wait_until_finished()
            write_manifest(folder)
            folder.rename(self._folder(step))
            sync_directory(self.directory)
        except Exception as error:
            self._error = self._failed(step, error)
        else:
            self._delete_old()
        self.seconds = time.monotonic() - began

    def check(self) -> None:
        """Raise the `CheckpointError` of a background save that has failed, once; does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Block until the save under way has ended; raises `CheckpointError` if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def damage(self, step: int) -> str | None:
        """What is wrong with the files of a step; None if all are as they were written. Reads all of them, once."""
        if step not in self._intact:
            if (problem := find_damage(self._folder(step))) is not None:
                return problem
            self._intact.add(step)
        return None

    def newest_intact(self, strict: bool = False) -> int | None:
        """The newest step that is whole; None if there is none. A damaged one is logged and set aside (by a `read_only`
        checkpointer passed over), or, if strict, raises."""
        for step in reversed(self.steps()):
            if self.is_intact(step, strict):
                return step
        return None

    def is_intact(self, step: int, strict: bool = False) -> bool:
        """Whether a step is whole; if not, it is logged and set aside, or, if strict, raises."""
        if (problem := self.damage(step)) is None:
            return True
        text = f"checkpoint step {step} in {self.directory} is damaged: {problem}"
        if strict:
            others = [s for s in self.steps() if s != step]
            raise CheckpointError(
                f"{text}. Other steps there: {others}; without strict_checkpoints the newest whole one is used"
            )
        logger.warning("%s; an older step is used", text)
        if not self.read_only:
            self.set_aside(step, "damaged")
        return False

    def set_aside(self, step: int, why: str) -> Path:
        """Rename the folder of a step to `STEP.WHY`, under which it does not count any more. Returns its new path."""
        target = self._folder(step, f".{why}")
        if target.exists():
            shutil.rmtree(target)
        logger.warning("checkpoint step %d is now %s, which is not used and may be deleted", step, target)
        return self._folder(step).rename(target)

    def restore(self, state_like: Any, step: int | None = None) -> tuple[Any, dict[str, Any], int]:
        """Read a step (default: the newest that is whole) as `(state, meta, step)`; a damaged one raises `CheckpointError`.

        Args:
          state_like: the state of this run, of arrays or `jax.ShapeDtypeStruct`; gives structure, dtypes, shardings.
            A leaf with no sharding of its own (not committed to devices) comes back uncommitted too.
        """
        content, step = self._read_meta(step)
        wanted = _flatten(state_like)
        _require_same(content["spec"], wanted, f"checkpoint step {step} in {self.directory}")
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        targets = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf) or default)
            for name, leaf in wanted.items()
        }
        try:
            with ocp.StandardCheckpointer() as reader:
                arrays = reader.restore(self._folder(step) / "state", targets)
        except Exception as error:
            raise self._unreadable(step, error) from error
        leaves = [arrays[n] if _sharding(leaf) else jnp.array(np.asarray(arrays[n])) for n, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(state_like), leaves), content["meta"], step

    def read_meta(self, step: int | None = None) -> tuple[dict[str, Any], int]:
        """Read only `(meta, step)`: to compare configurations before a state is built."""
        content, step = self._read_meta(step)
        return content["meta"], step

    def close(self) -> None:
        """Wait for the save under way and free the threads; raises `CheckpointError` if it failed."""
        try:
            self.wait()
        finally:
            self._close_writer()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            logger.warning("%s", failed)  # the error that is on its way is the one to raise

    def _folder(self, step: int, suffix: str = "") -> Path:
        return self.directory / f"{step}{suffix}"

    def _writer(self) -> ocp.StandardCheckpointer:
        if self._orbax is None:
            self._orbax = ocp.StandardCheckpointer()
        return self._orbax

    def _close_writer(self) -> None:
        """After a failure the writer is made anew."""
        writer, self._orbax = self._orbax, None
        if writer is not None:
            writer.close()

    def _delete_old(self) -> None:
        """Renamed first: a folder that is deleted in part is no checkpoint."""
        for step in self.steps()[: -self.keep]:
            try:
                shutil.rmtree(self._folder(step).rename(self._folder(step, DELETING)))
            except OSError as error:
                logger.warning("checkpoint step %d in %s cannot be deleted: %s", step, self.directory, error)

    def _remove_leftovers(self) -> None:
        leftovers = sorted(path for path in self.directory.iterdir() if path.suffix in (SAVING, DELETING))
        if leftovers:
            names = ", ".join(path.name for path in leftovers)
            logger.warning("removing interrupted saves in %s: %s", self.directory, names)
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
        return json.loads((self._folder(step) / META).read_text(encoding="utf-8")), step

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        """Remove what a failed save has left, and word its error."""
        with contextlib.suppress(Exception):  # closing repeats `error`, which is raised
            self._close_writer()
        shutil.rmtree(self._folder(step, SAVING), ignore_errors=True)  # the next writer tries again
        return CheckpointError(
            f"step {step} was not saved in {self.directory} (newest complete step: {self.latest_step()}): {error}"
        )

    def _unreadable(self, step: int, error: Exception | str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint step {step} in {self.directory} cannot be read: {error}. Other steps there: "
            f"{[s for s in self.steps() if s != step]}"
        )


def nbytes(state: Any) -> int:
    """Bytes of the arrays of a state: about what its checkpoint takes on disk."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


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
        return json.loads(json.dumps(meta))  # settings may be infinite, which Python's JSON reads back
    except (TypeError, ValueError) as error:
        raise TypeError(f"meta must be a JSON object: {error}") from error


def _flatten(state: Any) -> dict[str, Any]:
    """Path -> leaf in the order of `jax.tree.leaves`; refuses what cannot be stored, with its path."""
    flat: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            raise TypeError(f"state leaf {name} is a {type(leaf).__name__}; make it an array, or put it into meta")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(f"state leaf {name} is a typed PRNG key; store jax.random.key_data of it")
        if 0 in leaf.shape:
            raise ValueError(f"state leaf {name} has shape {tuple(leaf.shape)}, no elements; leave it out of the state")
        if name in flat:
            raise ValueError(f"two state leaves have the path {name}; rename the key that contains '/'")
        flat[name] = leaf
    return flat


def _describe(leaf: Any) -> list[Any]:
    return [list(leaf.shape), str(leaf.dtype)]


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """The sharding a leaf asks for; None if it leaves the choice to JAX."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def _require_same(saved: Spec, wanted: dict[str, Any], what: str) -> None:
    """Raises with each path whose shape or dtype differs, or that only one side has."""

    def show(spec: list[Any]) -> str:
        return f"{spec[1]}{spec[0]}"

    here = {name: _describe(leaf) for name, leaf in wanted.items()}
    changed = [name for name in saved if name in here and saved[name] != here[name]]
    lines = [f"{name}: checkpoint {show(saved[name])}, this run {show(here[name])}" for name in changed]
    lines += [f"{name}: only in the checkpoint, {show(spec)}" for name, spec in saved.items() if name not in here]
    lines += [f"{name}: only in this run, {show(spec)}" for name, spec in here.items() if name not in saved]
    if not lines:
        return
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    axis0 = changed and all(saved[n][1] == here[n][1] and saved[n][0][1:] == here[n][0][1:] for n in changed)
    hint = ["only axis 0 of these differs, which is the agent axis: was the number of agents changed?"] if axis0 else []
    raise CheckpointError("\n  ".join([f"{what} does not fit the state of this run:", *lines[:SHOWN], *more, *hint]))
