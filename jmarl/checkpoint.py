"""Saves and restores the training state: one thin module over Orbax's `CheckpointManager`.

A checkpoint is one step: the arrays of a pytree (`state`) and a JSON object (`meta`: configuration, data position). The
pytree is stored flat, path -> array, beside a list of its paths, shapes and dtypes. So any container works (NamedTuple,
`flax.struct`, dict), and a run whose state has another shape is told which path differs instead of failing deep inside.

- Saving is asynchronous: `save` returns when the arrays are copied off the device (the caller may donate them at once).
  A background save that failed raises `CheckpointError` from the next call of any method that looks at it; training may
  catch it, go on and try again.
- A step counts as saved once its folder has been renamed into place. `latest_step` and `steps` list only those. Folders
  of interrupted saves are logged and removed by the next writer; a `read_only` checkpointer removes nothing, so it
  may look into the directory of a running job.
- Arrays come back bit-equal, with the dtype and sharding of the leaf they replace.

Left out: checksums (a truncated or missing file is an error, but a flipped bit inside array data goes unseen), a lock
against a second writer on the same directory, several hosts, typed PRNG keys (store `jax.random.key_data`), and arrays
without elements.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

logger = logging.getLogger(__name__)

Spec = dict[str, list[Any]]  # path -> [shape, dtype name]
SHOWN = 8  # differing paths in an error message


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found or fitted to the state of this run."""


class Checkpointer:
    """Keeps the newest `keep` checkpoints of a run in `directory`, one every `every` steps.

    Args:
      directory: made if missing; a directory that cannot be written raises here, not at the first save.
      every: `save` acts on multiples of this step; `force=True` saves any step (the last one, or on a signal).
      keep: how many of the newest steps stay on disk.
      read_only: only restores; neither makes, cleans nor deletes anything.
    """

    def __init__(self, directory: str | Path, every: int = 1, keep: int = 3, *, read_only: bool = False):
        if every < 1 or keep < 1:
            raise ValueError(f"every and keep must be at least 1, got every={every}, keep={keep}")
        self.directory = Path(directory).absolute()
        self.every, self.keep, self.read_only = every, keep, read_only
        self._pending: int | None = None  # the step whose background save has not been looked at yet
        if read_only:
            if not self.directory.is_dir():
                raise CheckpointError(f"checkpoint directory {self.directory} does not exist")
        else:
            _require_writable(self.directory)
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        leftovers = [] if self.read_only else sorted(p.name for p in self.directory.iterdir() if _is_temporary(p))
        if leftovers:
            logger.warning("removing interrupted saves in %s: %s", self.directory, ", ".join(leftovers))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(self.keep),
            create=False,
            cleanup_tmp_directories=bool(leftovers),
            save_root_metadata=False,
            lightweight_initialize=True,  # a step folder that is half deleted must not stop the start
        )
        return ocp.CheckpointManager(self.directory, options=options)

    def steps(self) -> list[int]:
        """The steps that are complete on disk, ascending."""
        return sorted(found.step for found in ocp.path.step.standard_name_format().find_all(self.directory))

    def latest_step(self) -> int | None:
        """The newest complete step, or None. A save still under way is not listed."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: dict[str, Any], *, force: bool = False) -> bool:
        """Starts to save `step` if it is due; call it every step, so that a failed save is reported one step later.

        Returns whether a save was started: not between multiples of `every`, nor for a step that is saved already.
        """
        if self.read_only:
            raise CheckpointError(f"checkpoint directory {self.directory} was opened read_only; nothing can be saved")
        self._collect(block=False)
        if not force and step % self.every:
            return False
        self._collect(block=True)
        saved = self.steps()
        if step in saved:
            return False
        if saved and step < saved[-1]:
            raise CheckpointError(
                f"step {step} is older than step {saved[-1]}, which {self.directory} already holds. To go on from an "
                f"older step, copy that step's folder to a new directory and resume there."
            )
        arrays = _flatten(state)
        spec = {name: _describe(leaf) for name, leaf in arrays.items()}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays),
            meta=ocp.args.JsonSave({"meta": _require_json(meta), "spec": spec}),
        )
        self._pending = step
        try:
            return self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._failed(error) from error

    def restore(self, state_like: Any, step: int | None = None) -> tuple[Any, dict[str, Any], int]:
        """Reads a step (default: the newest) as `(state, meta, step)`.

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
        args = ocp.args.Composite(state=ocp.args.StandardRestore(targets))
        try:
            arrays = self._manager.restore(step, args=args)["state"]
        except Exception as error:
            raise self._unreadable(step, error) from error
        leaves = [arrays[n] if _sharding(leaf) else jnp.array(np.asarray(arrays[n])) for n, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(state_like), leaves), content["meta"], step

    def read_meta(self, step: int | None = None) -> tuple[dict[str, Any], int]:
        """Reads only `(meta, step)`: to compare configurations before a state is built."""
        content, step = self._read_meta(step)
        return content["meta"], step

    def wait(self) -> None:
        """Blocks until the save under way is complete; raises `CheckpointError` if it failed."""
        self._collect(block=True)

    def close(self) -> None:
        """Waits for the save under way and frees the threads."""
        try:
            self._collect(block=True)
        finally:
            self._manager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read_meta(self, step: int | None) -> tuple[dict[str, Any], int]:
        self._collect(block=True)
        saved = self.steps()
        if not saved:
            raise CheckpointError(f"no complete checkpoint in {self.directory}")
        step = saved[-1] if step is None else step
        if step not in saved:
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}; there are {saved}")
        try:
            args = ocp.args.Composite(meta=ocp.args.JsonRestore())
            content = self._manager.restore(step, args=args)["meta"]
        except Exception as error:
            raise self._unreadable(step, error) from error
        if content.keys() != {"meta", "spec"}:
            raise self._unreadable(step, f"its meta holds {sorted(content)} where ['meta', 'spec'] are written")
        return content, step

    def _collect(self, block: bool) -> None:
        """Looks at the background save: waits for it if `block`, and raises its error once."""
        if self._pending is None or (not block and self._manager.is_saving_in_progress()):
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self._pending = None

    def _failed(self, error: Exception) -> CheckpointError:
        """Opens the manager anew (it forgets steps when a save fails) and words the error."""
        step, self._pending = self._pending, None
        with contextlib.suppress(Exception):  # closing repeats `error`, which the caller raises
            self._manager.close()
        self._manager = self._open()
        return CheckpointError(
            f"step {step} was not saved in {self.directory} (newest complete step: {self.latest_step()}): {error}"
        )

    def _unreadable(self, step: int, error: Exception | str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint step {step} in {self.directory} cannot be read: {error}. Other steps there: "
            f"{[s for s in self.steps() if s != step]}"
        )


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
        return json.loads(json.dumps(meta, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(f"meta must be a JSON object of finite values: {error}") from error


def _is_temporary(path: Path) -> bool:
    return ".orbax-checkpoint-tmp" in path.name


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
