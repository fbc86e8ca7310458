"""Advantage estimators: return minus baseline.

An estimator is a function of one group: `estimator(returns, valid) -> advantages`. Its result for invalid rows is ignored. A
group is a set of rows that are compared with each other: the completions of one prompt or, in episodes that do not branch, the
completions that one agent writes in the same turn of all episodes of a task. `estimate` lifts an estimator to a batch.

Scaling is a separate step that only divides. If it subtracted the mean as well, all estimators of a group would be the same.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmarl.rl import masked

EPS = 1e-6  # returns with a smaller standard deviation count as equal: their scaled advantages are exactly 0
ROWS_AT_ONCE = 256  # number of rows processed at once by `per_group` if the groups are not prompts

Estimator = Callable[[Array, Array], Array]
AcrossTurns = Callable[[np.ndarray, float, float], np.ndarray]  # such as `alignment`


def max_return(returns: Float[Array, " group"], valid: Bool[Array, " group"]) -> Float[Array, ""]:
    """Return the largest valid return of a group; 0 if none is valid."""
    top = jnp.max(jnp.where(valid, returns, -jnp.inf))
    return jnp.where(jnp.isfinite(top), top, 0)


def raw(returns: Float[Array, " group"], valid: Bool[Array, " group"]) -> Float[Array, " group"]:
    """Return A = R, without a baseline (REINFORCE, Williams 1992)."""
    del valid
    return returns


def group_mean(returns: Float[Array, " group"], valid: Bool[Array, " group"]) -> Float[Array, " group"]:
    """Return A = R - mean(R).

    The estimator of MAGRPO (arXiv 2508.04652), and of GRPO (arXiv 2402.03300) before scaling. The result is exactly 0 if all
    returns are equal. Therefore the largest return is subtracted first: the floating-point mean of equal numbers may differ
    from that number.

    Args:
        returns: return of each completion.
        valid: completions whose return counts in the mean.

    Returns:
        The advantage of each completion.
    """
    shifted = returns - max_return(returns, valid)
    return shifted - masked.mean(shifted, valid)


def leave_one_out(returns: Float[Array, " group"], valid: Bool[Array, " group"]) -> Float[Array, " group"]:
    """Return A_i = R_i - mean of the other returns = (R_i - mean(R)) G / (G - 1) (RLOO, arXiv 2402.14740).

    A group with one valid return gives 0. Arguments as for `group_mean`.
    """
    count = valid.sum()
    return group_mean(returns, valid) * (count / jnp.maximum(count - 1, 1))


def max_baseline(returns: Float[Array, " group"], valid: Bool[Array, " group"]) -> Float[Array, " group"]:
    """Return A = R - max(R) (MAReMax in CoMLRL). Arguments as for `group_mean`."""
    return returns - max_return(returns, valid)


def group_std(x: Float[Array, " group"], valid: Bool[Array, " group"]) -> Float[Array, ""]:
    """Return the population standard deviation (ddof 0) of the valid entries; 0 if fewer than two are valid."""
    return jnp.sqrt(masked.mean(group_mean(x, valid) ** 2, valid))


def per_group(
    f: Estimator,
    x: Float[Array, "prompt group"],
    valid: Bool[Array, "prompt group"],
    groups: Int[Array, "prompt group"] | None,
) -> Float[Array, "prompt group"]:
    """Apply a function of one group to every group of a batch.

    Args:
        f: function (x [G], valid [G]) -> [G] or []. A scalar is repeated for all rows of its group.
        x: values of all rows.
        valid: rows that count.
        groups: rows with equal numbers form a group. None: the completions of each prompt form a group.

    Returns:
        The result for each row.
    """
    if groups is None:
        return jax.vmap(lambda x, valid: jnp.broadcast_to(f(x, valid), x.shape))(x, valid)
    # Each row masks the whole batch by its group. Unlike a scatter, this sums in a fixed order, so that a step is reproducible
    # bit for bit. Only some rows are processed at once, so memory is linear in the number of rows.
    flat, flat_valid, flat_groups = x.reshape(-1), valid.reshape(-1), groups.reshape(-1)

    def one_row(row: Int[Array, ""]) -> Float[Array, ""]:
        result = f(flat, flat_valid & (flat_groups == flat_groups[row]))
        return jnp.broadcast_to(result, flat.shape)[row]

    return lax.map(one_row, jnp.arange(flat.size), batch_size=ROWS_AT_ONCE).reshape(x.shape)


def role_std(
    x: Float[Array, "*shape"], valid: Bool[Array, "*shape"], roles: Int[Array, "*shape"], num_roles: int
) -> Float[Array, "*shape"]:
    """Return for each entry the standard deviation of the valid entries of its role.

    Args:
        x: values of the whole batch.
        valid: entries that count.
        roles: role of each entry, in 0..num_roles - 1.
        num_roles: number of roles.
    """

    def one_role(role: Int[Array, ""]) -> Float[Array, ""]:
        return group_std(x.reshape(-1), (valid & (roles == role)).reshape(-1))

    return jax.vmap(one_role)(jnp.arange(num_roles))[roles]


def divide(advantages: Float[Array, "*shape"], std: Float[Array, "*#shape"]) -> Float[Array, "*shape"]:
    """Divide advantages by a standard deviation; the result is 0 where it is below `EPS`, because the returns are equal."""
    return jnp.where(std > EPS, advantages / jnp.maximum(std, EPS), 0)


def estimate(
    estimator: Estimator,
    returns: Float[Array, "prompt group"],
    groups: Int[Array, "prompt group"] | None = None,
    *,
    scale: str = "none",
    roles: Int[Array, "prompt group"] | None = None,
    num_roles: int = 1,
    running_std: Float[Array, ""] | float = 1.0,
) -> Float[Array, "prompt group"]:
    """Return the advantages of a batch, scaled by a standard deviation.

    Args:
        estimator: advantages of one group.
        returns: return of each completion, or return minus a baseline computed elsewhere. NaN marks an invalid row: its
            advantage is 0 and it counts in no baseline.
        groups: groups of rows, see `per_group`.
        scale: divide by nothing (`none`), or by the population standard deviation of the returns of the group (`std`), of the
            role within the batch (`batch_std`), or of all updates so far (`running_std`).
        roles: role of each row, read by `batch_std`. None: a single role.
        num_roles: number of roles.
        running_std: standard deviation of all updates so far, see `moments_std`.

    Returns:
        The advantage of each completion.
    """
    valid = jnp.isfinite(returns)
    returns = jnp.nan_to_num(returns, nan=0.0)
    advantages = per_group(estimator, returns, valid, groups)
    if scale == "std":
        advantages = divide(advantages, per_group(group_std, returns, valid, groups))
    elif scale == "batch_std":
        roles = jnp.zeros(returns.shape, jnp.int32) if roles is None else roles
        advantages = divide(advantages, role_std(returns, valid, roles, num_roles))
    elif scale == "running_std":
        advantages = divide(advantages, jnp.asarray(running_std))
    return jnp.where(valid, advantages, 0)


def alignment(
    advantages: Float[np.ndarray, "agent turn *rows"], gamma: float, coef: float
) -> Float[np.ndarray, "agent turn *rows"]:
    """Return what advantage alignment adds to the advantages of two agents (arXiv 2406.14662; 2511.19405 for language models).

        A*_t = A_t + beta (sum_(k<t) gamma^(t-k) A_k) A'_t

    with A' the advantage of the other agent: an action that is good for the other becomes more likely after turns that were
    good for the agent itself, and less likely after bad ones. The code of both papers multiplies the sum by gamma once more,
    which a smaller beta does too.

    Args:
        advantages: of both agents in all turns of each episode; 0 where an episode has ended.
        gamma: discount factor.
        coef: beta.
    """
    turns = np.arange(advantages.shape[1])
    distance = turns[:, None] - turns  # t - k
    weights = np.where(distance > 0, gamma ** np.maximum(distance, 0).astype(float), 0)
    return coef * np.einsum("tk,nk...->nt...", weights, advantages) * advantages[::-1]


def gae(
    rewards: Float[Array, "*batch token"],
    values: Float[Array, "*batch token"],
    mask: Bool[Array, "*batch token"],
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Float[Array, "*#batch"] | float = 0.0,
) -> Float[Array, "*batch token"]:
    """Return generalized advantages (GAE, arXiv 1506.02438).

    A_t = delta_t + gamma lam A_(t+1) with delta_t = r_t + gamma V_(t+1) - V_t. lam = 1 gives return - value, lam = 0 the TD
    error.

    Args:
        rewards: reward of each token.
        values: value before each token.
        mask: tokens that count. Other tokens are skipped and have advantage 0.
        gamma: discount factor.
        lam: weight of longer returns.
        bootstrap: value after the last token: 0 if the episode ended there, the expected remaining return if it was truncated.

    Returns:
        The advantage of each token.
    """

    def step(carry: tuple[Array, Array], token: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        next_value, next_advantage = carry
        reward, value, counts = token
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = jnp.where(counts, value, next_value), jnp.where(counts, advantage, next_advantage)
        return carry, jnp.where(counts, advantage, 0)

    start = jnp.broadcast_to(bootstrap, rewards.shape[:-1]).astype(rewards.dtype)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), (rewards, values, mask))
    _, advantages = lax.scan(step, (start, jnp.zeros_like(start)), tokens, reverse=True)
    return jnp.moveaxis(advantages, 0, -1)


def terminal_rewards(returns: Float[Array, "*batch"], mask: Bool[Array, "*batch token"]) -> Float[Array, "*batch token"]:
    """Return token rewards that are the return at the last token of the mask, and 0 at all others. A NaN return counts as 0."""
    last = mask & (jnp.cumsum(mask, -1) == mask.sum(-1, keepdims=True))
    return jnp.where(last, jnp.nan_to_num(returns)[..., None], 0)


def moving_baseline(
    baseline: Float[Array, " role"], returns: Float[Array, "prompt group"], roles: Int[Array, "prompt group"], decay: float
) -> Float[Array, " role"]:
    """Return the moving average of each role's returns after another batch.

    The baseline of each role that played is b <- decay b + (1 - decay) mean(R), from b = 0 (RAE, arXiv 2506.24119, which
    updates after every episode; here once per batch).

    Args:
        baseline: the baselines so far.
        returns: return of each completion; NaN if invalid.
        roles: role of each completion.
        decay: decay of the baseline.
    """
    valid = jnp.isfinite(returns)
    role_mask = (roles == jnp.arange(baseline.shape[0])[:, None, None]) & valid  # [R, P, G]
    new_baseline = decay * baseline + (1 - decay) * masked.mean(returns, role_mask, (1, 2))
    return jnp.where(role_mask.any((1, 2)), new_baseline, baseline)


def merge_moments(
    count: Float[Array, ""], mean: Float[Array, ""], squares: Float[Array, ""], returns: Float[Array, "*shape"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Return count, mean and sum of squared deviations of all returns so far, merged with those of another batch (Chan et al.,
    1979). NaN marks an invalid return."""
    valid = jnp.isfinite(returns)
    new_count, new_mean = valid.sum().astype(jnp.float32), masked.mean(returns, valid)
    total, difference = count + new_count, new_mean - mean
    weight = new_count / jnp.maximum(total, 1)
    squares = squares + masked.total((returns - new_mean) ** 2, valid) + difference**2 * count * weight
    return total, mean + difference * weight, squares


def moments_std(count: Float[Array, "..."], squares: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the population standard deviation of all returns so far, from their number and squared deviations."""
    return jnp.sqrt(squares / jnp.maximum(count, 1))
