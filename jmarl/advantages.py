"""Advantage estimators: return minus baseline over a group of rows. R: the joint action's return.

A group is any set of rows with one number: the completions of a prompt, or, in episodes that do not branch, what an agent
wrote in one turn of all episodes of a task. Scaling is a separate switch that only divides: subtracting the mean again would
make all four estimators the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jmarl import masked

EPS = 1e-6  # below this spread a group carries no signal: its advantages are exactly 0


def members(returns: jax.Array, groups: jax.Array) -> jax.Array:
    """[M, M]: whether row j counts in the group of row i: those of its number in groups [M] with a valid return [M]. Sums over
    it have one order, unlike scattered ones, so a step can be repeated bit for bit."""
    return (groups[:, None] == groups) & jnp.isfinite(returns)


def best(returns: jax.Array, same: jax.Array) -> jax.Array:
    """The largest return [M] of each row's group; 0 where it is empty."""
    top = jnp.max(jnp.where(same, returns, -jnp.inf), -1)
    return jnp.where(jnp.isfinite(top), top, 0)


def raw(returns: jax.Array, same: jax.Array) -> jax.Array:
    """A = R (REINFORCE)."""
    del same
    return returns


def group_mean(returns: jax.Array, same: jax.Array) -> jax.Array:
    """A = R - mean(R): MAGRPO (arXiv 2508.04652), GRPO (arXiv 2402.03300) without its scaling.

    Exactly 0 in a group of equal returns. The best is subtracted first: the mean of equal numbers need not be that number in
    floating point.
    """
    shifted = returns - best(returns, same)
    return shifted - masked.mean(shifted, same, -1)


def leave_one_out(returns: jax.Array, same: jax.Array) -> jax.Array:
    """A = R - mean of the others = (G R - sum R) / (G - 1) = (R - mean R) G / (G - 1): RLOO (arXiv 2402.14740).

    A group of one gives 0.
    """
    count = same.sum(-1)
    return group_mean(returns, same) * (count / jnp.maximum(count - 1, 1))


def max_baseline(returns: jax.Array, same: jax.Array) -> jax.Array:
    """A = R - max(R): the group's best as the baseline (CoMLRL's MAReMax)."""
    return returns - best(returns, same)


ESTIMATORS = {
    "raw": raw,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "max_baseline": max_baseline,
}


def spread(returns: jax.Array, same: jax.Array) -> jax.Array:
    """Population standard deviation (ddof 0) of the returns of each row's group, [M]; 0 where fewer than two are valid."""
    return jnp.sqrt(masked.mean(group_mean(returns, same) ** 2, same, -1))


def scale(advantages: jax.Array, returns: jax.Array, same: jax.Array, how: str) -> jax.Array:
    """Divide advantages [M] by the population std of the returns: of the group (`std`), or of all valid ones (`batch_std`).

    A spread below 1e-6 means equal returns: 0, not a division by almost nothing.
    """
    if how == "none":
        return advantages
    by = spread(returns, same if how == "std" else jnp.broadcast_to(same.any(0), same.shape))
    return jnp.where(by > EPS, advantages / jnp.maximum(by, EPS), 0)


def estimate(estimator: str, how: str, returns: jax.Array, groups: jax.Array | None = None) -> jax.Array:
    """Advantages [P, G] of returns [P, G]; groups [P, G] integers, None: each prompt's completions are a group. A NaN return
    marks an invalid row: its advantage is 0 and it counts in no baseline."""
    if groups is None:
        groups = jnp.broadcast_to(jnp.arange(returns.shape[0])[:, None], returns.shape)
    flat = returns.reshape(-1)
    same = members(flat, groups.reshape(-1))
    flat = jnp.nan_to_num(flat, nan=0.0)
    advantages = scale(ESTIMATORS[estimator](flat, same), flat, same, how)
    return jnp.where(jnp.isfinite(returns), advantages.reshape(returns.shape), 0)
