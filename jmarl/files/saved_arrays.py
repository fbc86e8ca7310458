"""The arrays of a checkpoint: a pytree stored flat, path -> array, beside a list of paths, shapes and dtypes.

So every container works (NamedTuple, `flax.struct`, dict), and an error names the paths whose shapes differ from the state of
the run.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Spec = dict[str, list[Any]]  # path -> [shape, dtype name]
MAX_PATHS = 8  # largest number of differing paths in an error message


def nbytes(state: Any) -> int:
    """Return the number of bytes of the arrays of a state, which is about the size of its checkpoint."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def flatten(state: Any) -> dict[str, Any]:
    """Return path -> leaf, in the order of `jax.tree.leaves`. Raises an error for a leaf that cannot be stored."""
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


def describe(leaf: Any) -> list[Any]:
    """Return the shape and the name of the dtype of a leaf, as JSON."""
    return [list(leaf.shape), str(leaf.dtype)]


def sharding_of(leaf: Any) -> jax.sharding.Sharding | None:
    """Return the sharding of a leaf; None if it is not committed to devices."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def differences(saved: Spec, arrays: dict[str, Any]) -> list[str]:
    """Return a line for each path whose shape or dtype differs or that only one side has, at most MAX_PATHS, and hints."""

    def text(spec: list[Any]) -> str:
        return f"{spec[1]}{spec[0]}"

    here = {name: describe(leaf) for name, leaf in arrays.items()}
    changed = [name for name in saved if name in here and saved[name] != here[name]]
    lines = [f"{name}: checkpoint {text(saved[name])}, this run {text(here[name])}" for name in changed]
    lines += [f"{name}: only in the checkpoint, {text(spec)}" for name, spec in saved.items() if name not in here]
    lines += [f"{name}: only in this run, {text(spec)}" for name, spec in here.items() if name not in saved]
    more = [f"... and {len(lines) - MAX_PATHS} more"] if len(lines) > MAX_PATHS else []
    axis0 = changed and all(saved[n][1] == here[n][1] and saved[n][0][1:] == here[n][0][1:] for n in changed)
    hint = ["only axis 0 of these differs, which is the agent axis: was the number of agents changed?"] if axis0 else []
    return [*lines[:MAX_PATHS], *more, *hint]
