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
