"""Masked reductions; every mean over tokens or rows goes through here, so that an empty mask is 0 and never NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def total(x: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
    """Sum of x where mask; what is masked may be NaN or infinite."""
    return jnp.sum(jnp.where(mask, x, 0), axis=axis)


def mean(x: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
    """Mean of x where mask; 0 where the mask is empty."""
    return total(x, mask, axis) / jnp.maximum(jnp.sum(mask, axis=axis), 1)


def centre(x: jax.Array, mask: jax.Array, axis: int = -1) -> jax.Array:
    """x minus its mean where mask along one axis, 0 elsewhere; exactly 0 where all of it is equal.

    The largest is subtracted first: the mean of equal numbers need not be that number in floating point.
    """
    top = jnp.max(jnp.where(mask, x, -jnp.inf), axis, keepdims=True)
    shifted = jnp.where(mask, x - jnp.where(jnp.isfinite(top), top, 0), 0)
    return jnp.where(mask, shifted - jnp.expand_dims(mean(shifted, mask, axis), axis), 0)


def std(x: jax.Array, mask: jax.Array, axis: int = -1) -> jax.Array:
    """Population standard deviation (ddof 0) of x where mask along one axis; 0 where fewer than two are left."""
    return jnp.sqrt(mean(centre(x, mask, axis) ** 2, mask, axis))
