"""Masked reductions. Every mean over tokens or rows is computed here, so that the mean over an empty mask is 0, not NaN."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

Axis = int | tuple[int, ...] | None


def total(x: Shaped[Array, "..."], mask: Bool[Array, "..."], axis: Axis = None) -> Shaped[Array, "..."]:
    """Return the sum of x where mask is true. Entries outside the mask may be NaN or infinite."""
    return jnp.sum(jnp.where(mask, x, 0), axis=axis)


def mean(x: Shaped[Array, "..."], mask: Bool[Array, "..."], axis: Axis = None) -> Float[Array, "..."]:
    """Return the mean of x where mask is true; 0 where no entry is."""
    return total(x, mask, axis) / jnp.maximum(jnp.sum(mask, axis=axis), 1)
