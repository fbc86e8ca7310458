"""Turn rewards of joint actions into returns of completions, for episodes of several turns (host code, no jax).

Letters: N agents, P nodes of a turn, G completions per agent and node, J joint actions per node. A node is the state in which
all agents act together: in the first turn a task, later the child of a joint action of the turn before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, Num

Returns = Float[np.ndarray, "node joint agent"]


def joint_actions(mode: str, num_agents: int, group: int) -> Int[np.ndarray, "joint agent"]:
    """Return the completion that each agent contributes to each joint action of a node.

    Args:
        mode: `aligned`: (g, g, ...), J = G. `cross`: all tuples, J = G^N. `counterfactual`: (0, 0, ...) and, for each agent,
            the same with its completion replaced by each of its others, J = 1 + N (G - 1).
        num_agents: N.
        group: G.
    """
    if mode == "aligned":
        return np.repeat(np.arange(group)[:, None], num_agents, 1)
    if mode == "counterfactual":
        forks = [np.arange(1, group)[:, None] * (np.arange(num_agents) == agent) for agent in range(num_agents)]
        return np.concatenate([np.zeros((1, num_agents), int), *forks])
    return np.array(list(itertools.product(range(group), repeat=num_agents)))


def episode_path(
    parents: Sequence[np.ndarray | Sequence[int]], num_joint: Sequence[int], node: int, joint: int, later: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Return the node and the joint action of each turn of the episode that begins with a joint action at a node.

    Args:
        parents: of each turn, as for `discounted`.
        num_joint: J of each turn.
        later: joint actions of the turns after the first one, where the episode branches; the first one where none is left.
    """
    path = [(node, joint)]
    for t, (count, before) in enumerate(zip(num_joint, parents[1:], strict=False)):
        node, joint = path[-1]
        (children,) = np.equal(before, node * count + joint).nonzero()
        if not children.size:
            break
        path.append((int(children[0]), later[t] if t < len(later) else 0))
    return path


def discounted(
    rewards: Sequence[np.ndarray],
    parents: Sequence[np.ndarray],
    gamma: float = 1.0,
    values: Sequence[np.ndarray] | None = None,
    lam: float = 1.0,
) -> list[np.ndarray]:
    """Return the discounted returns of joint actions, an array [P, J, N] per turn like the rewards.

    R_t = r_t + gamma ((1 - lam) V_(t+1) + lam mean R_(t+1)) if the joint action has a child, and R_t = r_t otherwise. The mean
    is over the joint actions of the child. Without values lam is 1; with them these are lambda-returns (arXiv 1506.02438), and
    TD(0) targets for lam = 0.

    Args:
        rewards: rewards [P, J, N] of each turn. NaN marks an invalid one, which counts in no mean. If all joint actions of the
            child are invalid, the return of the parent is NaN too.
        parents: for the nodes [P] of each turn, their joint action as an index into [P * J] of the turn before. Those of the
            first turn are not read.
        gamma: discount factor.
        values: a critic's values [P, N] of the nodes of each turn. NaN: the agent does not act there, and lam is 1.
        lam: weight of longer returns.
    """
    returns = [np.array(rewards[-1], float)]
    for t in range(len(rewards) - 2, -1, -1):
        valid = np.isfinite(returns[0])
        count = valid.sum(1)
        total = np.where(valid, returns[0], 0).sum(1)
        following = np.where(count > 0, total / np.maximum(count, 1), np.nan) if gamma else np.zeros(total.shape)
        if values is not None:
            known = np.isfinite(values[t + 1])
            following = np.where(known, lam * following + (1 - lam) * np.where(known, values[t + 1], 0), following)
        nodes, joint, agents = rewards[t].shape
        future = np.zeros((nodes * joint, agents))
        future[parents[t + 1]] = following
        returns.insert(0, rewards[t] + gamma * future.reshape(nodes, joint, agents))
    return returns


def credit(
    returns: Returns, joint: Int[np.ndarray, "joint agent"], group: int, rule: str = "mean"
) -> Float[np.ndarray, "agent node group"]:
    """Return the returns of completions from the returns of joint actions.

    Args:
        returns: return of each joint action; NaN if invalid.
        joint: the completions in each joint action, see `joint_actions`.
        group: G.
        rule: `mean` or `sum` of the valid joint actions that contain the completion (the sum grows with G^(N - 1)), or
            `counterfactual`: the joint action in which all other agents contribute their completion 0.

    Returns:
        The return of each completion; NaN if none of its joint actions is valid.
    """
    member = joint[:, :, None] == np.arange(group)  # [J, N, G]
    if rule == "counterfactual":
        deviating_others = (joint != 0).sum(1, keepdims=True) - (joint != 0)  # [J, N]
        member &= (deviating_others == 0)[:, :, None]
    valid = np.isfinite(returns)
    total = np.einsum("pjn,jng->npg", np.where(valid, returns, 0.0), member.astype(float))
    count = np.einsum("pjn,jng->npg", valid.astype(float), member.astype(float))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(count > 0, total if rule == "sum" else total / count, np.nan)


def pass_at_k(solved: Float[np.ndarray, "prompt sample"], k: int) -> Float[np.ndarray, " prompt"]:
    """Return the unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).

    Args:
        solved: whether each sample solves its prompt: 1, 0, or NaN if unknown. n counts the known ones, c the solved ones.
        k: number of samples of which one must be solved.

    Returns:
        pass@k of each prompt; NaN if fewer than k samples are known.
    """
    counts = zip(np.isfinite(solved).sum(-1), np.nansum(solved, -1).astype(int), strict=True)
    return np.array([1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan for n, c in counts])


def best_at_k(returns: Float[np.ndarray, "prompt sample"], k: int) -> Float[np.ndarray, " prompt"]:
    """Return the mean over all choices of k samples of the best return: the sum over i of C(i - 1, k - 1) / C(n, k) x_(i) for
    sorted returns x_(1) <= ... <= x_(n). Of returns that are 0 or 1 it is `pass_at_k`.

    Args:
        returns: of each sample; NaN if unknown. n counts the known ones.
        k: number of samples that the best is chosen from.

    Returns:
        The mean of each prompt; NaN if fewer than k samples are known.
    """
    known = np.isfinite(returns)
    rows, counts = np.sort(np.where(known, returns, np.inf)), known.sum(-1).tolist()
    shares = {n: [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)] for n in {*counts} if n >= k}
    best = [np.dot(shares[n], row[:n]) if n >= k else math.nan for row, n in zip(rows, counts, strict=True)]
    return np.array(best, float)


def majority_at_k(
    solved: Float[np.ndarray, "prompt sample"], choices: Num[np.ndarray, "prompt sample"], k: int
) -> Float[np.ndarray, " prompt"]:
    """Return how often the choice of most of k samples is right (arXiv 2203.11171): the mean over disjoint groups of k samples,
    in their order. It is a mean over the samples with this choice, and over the choices that equally many made.

    Args:
        solved: whether each sample solves its prompt: 1, 0, or NaN if unknown; those are in no group.
        choices: equal numbers for equal choices of a prompt.
        k: number of samples that vote.

    Returns:
        The mean of each prompt; NaN if fewer than k samples are known.
    """

    def vote(solved: np.ndarray, choices: np.ndarray) -> float:
        different, counts = np.unique(choices, return_counts=True)
        return float(np.mean([solved[choices == choice].mean() for choice in different[counts == counts.max()]]))

    means = []
    for row, chosen in zip(solved, choices, strict=True):
        (known,) = np.isfinite(row).nonzero()
        groups = known[: len(known) // k * k].reshape(-1, k)
        means.append(float(np.mean([vote(row[i], chosen[i]) for i in groups])) if len(groups) else math.nan)
    return np.array(means)
