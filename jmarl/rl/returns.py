"""From rewards of joint actions to the returns of completions, over the trees or chains of several turns (host world, no jax).

Letters: N agents, P nodes of a turn (a node is what the agents read together: at the first turn an item), G completions an
agent and node, J joint actions a node. A joint action may have a child: a node of the next turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np


def joint_actions(mode: str, num_agents: int, group: int) -> np.ndarray:
    """[J, N]: aligned (g, g, …), J = G; cross: all G^N tuples; counterfactual: (0, 0, …), and that with one agent's completion
    exchanged for each of its others, J = 1 + N (G - 1)."""
    if mode == "aligned":
        return np.repeat(np.arange(group)[:, None], num_agents, 1)
    if mode == "counterfactual":
        forks = [np.arange(1, group)[:, None] * (np.arange(num_agents) == agent) for agent in range(num_agents)]
        return np.concatenate([np.zeros((1, num_agents), int), *forks])
    return np.array(list(itertools.product(range(group), repeat=num_agents)))


def discounted(
    rewards: Sequence[np.ndarray],
    parents: Sequence[np.ndarray],
    gamma: float = 1.0,
    values: Sequence[np.ndarray] | None = None,
    lam: float = 1.0,
) -> list[np.ndarray]:
    """Returns of joint actions, each turn's [P, J, N] like its rewards: r + gamma times what follows, and r where there is no
    child. What follows is the mean return of the child's joint actions; with a critic's values [P, N] of each turn's nodes it
    is lam times that and 1 - lam times the child's value: lambda-returns (arXiv 1506.02438), with lam = 0 TD(0) targets. A
    value that is NaN (of an agent that does not act there) is none, and lam is 1.

    parents: of each turn [P], the joint action of the turn before that a node is the child of, as an index into [P * J] (not
    read of the first). A reward that is NaN (invalid) counts nowhere; a child with nothing else makes its parent NaN too.
    """
    returns = [np.array(rewards[-1], float)]
    for t in range(len(rewards) - 2, -1, -1):
        now, below = rewards[t], parents[t + 1]
        valid = np.isfinite(returns[0])
        count = valid.sum(1)
        total = np.where(valid, returns[0], 0).sum(1)
        follows = np.where(count > 0, total / np.maximum(count, 1), np.nan) if gamma else np.zeros(total.shape)
        if values is not None:
            known = np.isfinite(values[t + 1])
            follows = np.where(known, lam * follows + (1 - lam) * np.where(known, values[t + 1], 0), follows)
        future = np.zeros((now.shape[0] * now.shape[1], now.shape[2]))
        future[below] = follows
        returns.insert(0, now + gamma * future.reshape(now.shape))
    return returns


def credit(returns: np.ndarray, joint: np.ndarray, group: int, how: str = "mean") -> np.ndarray:
    """Returns [N, P, G] of completions from those of joint actions [P, J, N]: of the joint actions that contain completion g of
    agent a, the mean (or the sum, which grows with G^(N-1)); invalid ones (NaN) do not count, and where all are invalid the
    result is NaN. how = counterfactual: of the one joint action in which all others wrote their completion 0."""
    member = joint[:, :, None] == np.arange(group)  # [J, N, G]
    if how == "counterfactual":
        others = (joint != 0).sum(1, keepdims=True) - (joint != 0)  # [J, N] agents beside this one that did not
        member &= (others == 0)[:, :, None]
    valid = np.isfinite(returns)
    total = np.einsum("pjn,jng->npg", np.where(valid, returns, 0.0), member.astype(float))
    count = np.einsum("pjn,jng->npg", valid.astype(float), member.astype(float))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(count > 0, total if how == "sum" else total / count, np.nan)


def pass_at_k(solved: np.ndarray, k: int) -> np.ndarray:
    """Of each prompt [P] the chance that one of k of its samples [P, n] is solved, without bias: 1 - C(n - c, k) / C(n, k) for
    c solved ones (arXiv 2107.03374). solved: 1, 0, or NaN where nobody knows, which does not count; NaN where fewer than k do.
    """
    count, right = np.isfinite(solved).sum(-1), np.nansum(solved, -1).astype(int)
    each = [1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan for n, c in zip(count, right, strict=True)]
    return np.array(each)
