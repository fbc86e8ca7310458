"""Advantage estimators: return minus baseline over the last axis, the group. R: the joint action's return.

Scaling is a separate switch that only divides: subtracting the mean again would make all four estimators the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jmarl import masked

EPS = 1e-6  # below this spread a group carries no signal: its advantages are exactly 0


def raw(returns: jax.Array, mask: jax.Array) -> jax.Array:
    """A = R (REINFORCE)."""
    return jnp.where(mask, returns, 0)


def group_mean(returns: jax.Array, mask: jax.Array) -> jax.Array:
    """A = R - mean(R): MAGRPO (arXiv 2508.04652), GRPO (arXiv 2402.03300) without its scaling."""
    return masked.centre(returns, mask, -1)


def leave_one_out(returns: jax.Array, mask: jax.Array) -> jax.Array:
    """A = R - mean of the others = (G R - sum R) / (G - 1) = (R - mean R) G / (G - 1): RLOO (arXiv 2402.14740).

    A group of one gives 0.
    """
    count = mask.sum(-1, keepdims=True)
    return masked.centre(returns, mask, -1) * (count / jnp.maximum(count - 1, 1))


def max_baseline(returns: jax.Array, mask: jax.Array) -> jax.Array:
    """A = R - max(R): the group's best as the baseline (CoMLRL's MAReMax)."""
    best = jnp.max(jnp.where(mask, returns, -jnp.inf), -1, keepdims=True)
    return jnp.where(mask, returns - jnp.where(jnp.isfinite(best), best, 0), 0)


ESTIMATORS = {"raw": raw, "group_mean": group_mean, "leave_one_out": leave_one_out, "max_baseline": max_baseline}


def scale(advantages: jax.Array, returns: jax.Array, mask: jax.Array, how: str) -> jax.Array:
    """Divide advantages [..., P, G] by the population std of the returns: of the group, or of the batch (P and G).

    A spread below 1e-6 means equal returns: 0, not a division by almost nothing.
    """
    if how == "none":
        return advantages
    if how == "std":
        spread = masked.std(returns, mask, -1)[..., None]
    else:
        flat = (*returns.shape[:-2], -1)
        spread = masked.std(returns.reshape(flat), mask.reshape(flat), -1)[..., None, None]
    return jnp.where(spread > EPS, advantages / jnp.maximum(spread, EPS), 0)


def estimate(estimator: str, how: str, returns: jax.Array) -> jax.Array:
    """Advantages [..., P, G] of returns [..., P, G]; a NaN return marks an invalid row: its advantage is 0 and it counts in
    no baseline."""
    mask = jnp.isfinite(returns)
    returns = jnp.where(mask, returns, 0)
    return scale(ESTIMATORS[estimator](returns, mask), returns, mask, how)
