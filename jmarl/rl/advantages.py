"""Advantage estimators: return minus baseline. R: the return of a completion's joint actions.

A group is any set of rows with one number: the completions of a prompt, or, in episodes that do not branch, what an agent
wrote in one turn of all episodes of a task. Scaling is a separate switch that only divides: subtracting the mean again would
make all of a group's estimators the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jmarl.rl import masked
from jmarl.types import Named, Running

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


ESTIMATORS = Named(
    {
        "raw": raw,
        "group_mean": group_mean,
        "leave_one_out": leave_one_out,
        "max_baseline": max_baseline,
        "greedy_baseline": raw,  # of returns minus what was expected, and so are the next two
        "ema_baseline": raw,
        "value_baseline": raw,
    }
)


def spread(x: jax.Array, same: jax.Array) -> jax.Array:
    """Population standard deviation (ddof 0) of x [M] over each row's set of rows, [M]; 0 where fewer than two are valid."""
    return jnp.sqrt(masked.mean(group_mean(x, same) ** 2, same, -1))


def divide(advantages: jax.Array, by: jax.Array) -> jax.Array:
    """Advantages over a spread. One below 1e-6 means equal returns: 0, not a division by almost nothing."""
    return jnp.where(by > EPS, advantages / jnp.maximum(by, EPS), 0)


def estimate(
    estimator: str,
    how: str,
    returns: jax.Array,
    groups: jax.Array | None = None,
    *,
    expected: jax.Array | float = 0.0,
    roles: jax.Array | None = None,
    running_std: jax.Array | float = 1.0,
) -> jax.Array:
    """Advantages [P, G] of returns [P, G]. A NaN return marks an invalid row: its advantage is 0 and it counts in no baseline.

    groups: [P, G] integers; None: each prompt's completions are a group. expected: [P, G], a baseline from elsewhere, which is
    subtracted first: the return of the greedy completion (ReMax, arXiv 2310.10505), a moving average of the role's returns
    (RAE, arXiv 2506.24119), a critic's value of the prompt (IAC, MAAC, arXiv 2601.21972). how: divide by nothing (`none`) or by
    the population std of the returns minus what was expected: of the group (`std`), of the role in the batch (`batch_std`;
    roles [P, G], None: one), or of the returns of all updates so far (`running_std`, given).
    """
    if groups is None:
        groups = jnp.broadcast_to(jnp.arange(returns.shape[0])[:, None], returns.shape)
    flat = (returns - expected).reshape(-1)
    same = members(flat, groups.reshape(-1))
    of_role = members(flat, jnp.zeros(flat.shape, jnp.int32) if roles is None else roles.reshape(-1))
    flat = jnp.nan_to_num(flat, nan=0.0)
    advantages = ESTIMATORS[estimator](flat, same)
    if how == "running_std":
        advantages = divide(advantages, jnp.asarray(running_std))
    elif how != "none":
        advantages = divide(advantages, spread(flat, same if how == "std" else of_role))
    return jnp.where(jnp.isfinite(returns), advantages.reshape(returns.shape), 0)


def gae(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, gamma: float = 1.0, lam: float = 1.0, after: jax.Array | float = 0.0
) -> jax.Array:
    """Generalised advantages along the last axis (arXiv 1506.02438): A_t = delta_t + gamma lam A_(t+1) with
    delta_t = r_t + gamma V_(t+1) - V_t. All arrays [..., T]; tokens outside mask are passed over and have A = 0.

    after [...]: the value behind the last token: 0 where the episode ended there; where it was only cut off (truncated), what
    is expected of the rest. lam = 1 gives return - value; lam = 0 the TD error.
    """

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
    """Rewards [..., T] of returns [...]: all of it at the last token of mask [..., T]."""
    last = mask & (jnp.cumsum(mask, -1) == mask.sum(-1, keepdims=True))
    return jnp.where(last, jnp.nan_to_num(returns)[..., None], 0)


def nothing_remembered(agents: int, roles: int, kl_coef: float) -> Running:
    """What agents [A, ...] know before their first update."""
    count, mean, squares = (jnp.zeros(agents) for _ in range(3))  # an array each: they are donated
    # A dtype of its own: a weak one would make the update that first moves the coefficient another program.
    return Running(jnp.zeros((agents, roles)), count, mean, squares, jnp.full(agents, kl_coef, jnp.float32))


def remember(running: Running, returns: jax.Array, roles: jax.Array, decay: float) -> Running:
    """What an agent remembers after returns [P, G] (NaN: invalid) of its roles [P, G].

    Baseline: b <- decay b + (1 - decay) mean R of each role that played, from 0 on (RAE, arXiv 2506.24119, which moves it after
    every episode; here the mean of a batch counts as one). Moments: those of both parts joined (Chan et al., 1979).
    """
    valid = jnp.isfinite(returns)
    mine = (roles == jnp.arange(running.baseline.shape[0])[:, None, None]) & valid  # [R, P, G]
    moved = decay * running.baseline + (1 - decay) * masked.mean(returns, mine, (1, 2))
    here, mean = valid.sum().astype(jnp.float32), masked.mean(returns, valid)
    count, off = running.count + here, mean - running.mean
    part = here / jnp.maximum(count, 1)
    squares = running.squares + masked.total((returns - mean) ** 2, valid) + off**2 * running.count * part
    return running._replace(
        baseline=jnp.where(mine.any((1, 2)), moved, running.baseline),
        count=count,
        mean=running.mean + off * part,
        squares=squares,
    )


def running_std(running: Running) -> jax.Array:
    """Population standard deviation of all returns so far, those of this batch too."""
    return jnp.sqrt(running.squares / jnp.maximum(running.count, 1))
