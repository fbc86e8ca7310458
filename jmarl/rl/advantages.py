"""Advantage estimators: return minus baseline.

An estimator is a function of one group: `f(returns [G], valid [G]) -> advantages [G]`. Its result at rows that are not valid is
ignored. A group is the set of rows that are compared with each other: the completions of a prompt or, in episodes that do not
branch, what an agent wrote in one turn of all episodes of a task. `estimate` lifts an estimator to a batch.

Scaling is a separate step that only divides. Subtracting the mean there would make all estimators of a group the same.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jmarl.rl import masked
from jmarl.types import Running

EPS = 1e-6  # a group with less spread than this carries no signal: its advantages are exactly 0
ROWS_AT_ONCE = 256  # rows whose groups are compared at once, where groups are not prompts

Estimator = Callable[[jax.Array, jax.Array], jax.Array]


def best(returns: jax.Array, valid: jax.Array) -> jax.Array:
    """Return the largest valid return [] of a group; 0 if none is valid."""
    top = jnp.max(jnp.where(valid, returns, -jnp.inf))
    return jnp.where(jnp.isfinite(top), top, 0)


def raw(returns: jax.Array, valid: jax.Array) -> jax.Array:
    """A = R (REINFORCE, Williams 1992)."""
    del valid
    return returns


def group_mean(returns: jax.Array, valid: jax.Array) -> jax.Array:
    """A = R - mean(R): MAGRPO (arXiv 2508.04652), and GRPO (arXiv 2402.03300) without its scaling.

    Exactly 0 in a group of equal returns: the best is subtracted first, because in floating point the mean of equal numbers
    need not be that number."""
    shifted = returns - best(returns, valid)
    return shifted - masked.mean(shifted, valid)


def leave_one_out(returns: jax.Array, valid: jax.Array) -> jax.Array:
    """A = R - mean of the others = (R - mean R) G / (G - 1): RLOO (arXiv 2402.14740). A group of one gives 0."""
    count = valid.sum()
    return group_mean(returns, valid) * (count / jnp.maximum(count - 1, 1))


def max_baseline(returns: jax.Array, valid: jax.Array) -> jax.Array:
    """A = R - max(R): the best of the group is the baseline (CoMLRL's MAReMax)."""
    return returns - best(returns, valid)


def spread(x: jax.Array, valid: jax.Array) -> jax.Array:
    """Return the population standard deviation [] (ddof 0) of the valid x [G]; 0 if fewer than two are valid."""
    return jnp.sqrt(masked.mean(group_mean(x, valid) ** 2, valid))


def per_group(f: Estimator, x: jax.Array, valid: jax.Array, groups: jax.Array | None) -> jax.Array:
    """Apply a function of one group (x [G], valid [G]) -> [G] or [] to every group of x [P, G]; returns [P, G].

    groups [P, G]: rows with equal numbers are a group; None: the completions of each prompt are. In the first case a row's
    group is all rows with a mask, for some rows at a time: sums then have one order, unlike scattered ones, so that a step can
    be repeated bit for bit, and memory stays linear in the number of rows."""
    if groups is None:
        return jax.vmap(lambda x, valid: jnp.broadcast_to(f(x, valid), x.shape))(x, valid)
    flat, flat_valid, flat_groups = x.reshape(-1), valid.reshape(-1), groups.reshape(-1)

    def one_row(row: jax.Array) -> jax.Array:
        result = f(flat, flat_valid & (flat_groups == flat_groups[row]))
        return jnp.broadcast_to(result, flat.shape)[row]

    return lax.map(one_row, jnp.arange(flat.size), batch_size=ROWS_AT_ONCE).reshape(x.shape)


def role_spread(x: jax.Array, valid: jax.Array, roles: jax.Array, num_roles: int) -> jax.Array:
    """Return, for each entry of x, the standard deviation of the valid entries of the same role. All arrays have one shape."""

    def one_role(role: jax.Array) -> jax.Array:
        return spread(x.reshape(-1), (valid & (roles == role)).reshape(-1))

    return jax.vmap(one_role)(jnp.arange(num_roles))[roles]


def divide(advantages: jax.Array, std: jax.Array) -> jax.Array:
    """Divide advantages by a standard deviation. One below 1e-6 means equal returns: the result is 0."""
    return jnp.where(std > EPS, advantages / jnp.maximum(std, EPS), 0)


def estimate(
    estimator: Estimator,
    returns: jax.Array,
    groups: jax.Array | None = None,
    *,
    scale: str = "none",
    roles: jax.Array | None = None,
    num_roles: int = 1,
    running_std: jax.Array | float = 1.0,
) -> jax.Array:
    """Return advantages [P, G] of returns [P, G], from which a baseline from elsewhere may have been subtracted.

    A NaN return marks an invalid row: its advantage is 0 and it counts in no baseline.

    groups: see `per_group`. scale: divide by nothing (`none`), or by the population std of the returns: of the group (`std`),
    of the role in the batch (`batch_std`; roles [P, G] in 0..num_roles - 1), or of all updates so far (`running_std`, an
    argument)."""
    valid = jnp.isfinite(returns)
    returns = jnp.nan_to_num(returns, nan=0.0)
    advantages = per_group(estimator, returns, valid, groups)
    if scale == "std":
        advantages = divide(advantages, per_group(spread, returns, valid, groups))
    elif scale == "batch_std":
        roles = jnp.zeros(returns.shape, jnp.int32) if roles is None else roles
        advantages = divide(advantages, role_spread(returns, valid, roles, num_roles))
    elif scale == "running_std":
        advantages = divide(advantages, jnp.asarray(running_std))
    return jnp.where(valid, advantages, 0)


def gae(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, gamma: float = 1.0, lam: float = 1.0, after: jax.Array | float = 0.0
) -> jax.Array:
    """Return generalized advantages along the last axis (GAE, arXiv 1506.02438).

    A_t = delta_t + gamma lam A_(t+1) with delta_t = r_t + gamma V_(t+1) - V_t. All arrays are [..., T]; tokens outside mask are
    skipped and have A = 0. lam = 1 gives return - value, lam = 0 the TD error.

    after [...]: the value after the last token. 0 where the episode ended there; the expected return of the remainder where it
    was truncated."""

    def step(carry, token):
        value_next, advantage_next = carry
        reward, value, here = token
        advantage = reward + gamma * value_next - value + gamma * lam * advantage_next
        carry = jnp.where(here, value, value_next), jnp.where(here, advantage, advantage_next)
        return carry, jnp.where(here, advantage, 0)

    start = jnp.broadcast_to(after, rewards.shape[:-1]).astype(rewards.dtype)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), (rewards, values, mask))
    _, advantages = lax.scan(step, (start, jnp.zeros_like(start)), tokens, reverse=True)
    return jnp.moveaxis(advantages, 0, -1)


def at_the_end(returns: jax.Array, mask: jax.Array) -> jax.Array:
    """Return rewards [..., T] that place the return [...] at the last token of mask [..., T]."""
    last = mask & (jnp.cumsum(mask, -1) == mask.sum(-1, keepdims=True))
    return jnp.where(last, jnp.nan_to_num(returns)[..., None], 0)


def initial_running(agents: int, roles: int, kl_coef: float) -> Running:
    """Return the statistics of agents [A, ...] before their first update."""
    count, mean, squares = (jnp.zeros(agents) for _ in range(3))  # one array each, because they are donated
    # An explicit dtype: a weak one would compile the update again once the coefficient has moved.
    return Running(jnp.zeros((agents, roles)), count, mean, squares, jnp.full(agents, kl_coef, jnp.float32))


def update_running(running: Running, returns: jax.Array, roles: jax.Array, decay: float) -> Running:
    """Return an agent's statistics after returns [P, G] (NaN: invalid) of its roles [P, G].

    Baseline of each role that played: b <- decay b + (1 - decay) mean R, from 0 on (RAE, arXiv 2506.24119, which updates it
    after every episode; here the mean of a batch counts as one). Moments: those of the union (Chan et al., 1979)."""
    valid = jnp.isfinite(returns)
    role_mask = (roles == jnp.arange(running.baseline.shape[0])[:, None, None]) & valid  # [R, P, G]
    new_baseline = decay * running.baseline + (1 - decay) * masked.mean(returns, role_mask, (1, 2))
    new_count, mean = valid.sum().astype(jnp.float32), masked.mean(returns, valid)
    count, difference = running.num_returns + new_count, mean - running.mean
    weight = new_count / jnp.maximum(count, 1)
    squares = running.squares + masked.total((returns - mean) ** 2, valid) + difference**2 * running.num_returns * weight
    return running._replace(
        baseline=jnp.where(role_mask.any((1, 2)), new_baseline, running.baseline),
        num_returns=count,
        mean=running.mean + difference * weight,
        squares=squares,
    )


def running_std(running: Running) -> jax.Array:
    """Return the population standard deviation of all returns so far."""
    return jnp.sqrt(running.squares / jnp.maximum(running.num_returns, 1))
