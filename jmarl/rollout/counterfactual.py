"""Fixed continuation: the return of an episode if one message had been another and all later ones the same.

Only the environment is called, nothing is sampled: an alternative is continued with the completions that were really written in
later turns (C3, arXiv 2603.06859). Host world. Left out: if the message that was really written ended its episode, an
alternative that would have continued has no later completions to continue with, so it ends there too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmarl.envs.base import Answer, Environment

Turn = Any  # `rollout.turns.Turn`, which needs jax


def returns(
    turns: Sequence[Turn], answers: Sequence[Answer], env: Environment, gamma: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the return of each joint action, per turn [P, J, N]: its reward plus gamma times what follows.

    Only the first joint action of a node was continued. Alternatives are continued with the completions of the one that was
    played. NaN if a reward on the way is NaN.
    """
    values = [np.array(turn.rewards, float) for turn in turns]
    for t in range(len(turns) - 2, -1, -1):
        actions, next_node = values[t].shape[1], next_nodes(turns[t], turns[t + 1])
        for p, node in next_node.items():
            values[t][p, 0] += gamma * values[t + 1][node, 0] if gamma else 0  # 0 * NaN would be NaN
        alternatives = [
            (p, j)
            for p in next_node
            for j in range(1, actions)
            if not answers[t].done[p * actions + j] and np.isfinite(turns[t].rewards[p, j]).all()
        ]
        after = [answers[t].after[p * actions + j] for p, j in alternatives]
        later = _continue(after, [next_node[p] for p, _ in alternatives], turns[t + 1 :], env, gamma, rng)
        for (p, j), value in zip(alternatives, later, strict=True):
            values[t][p, j] += gamma * value if gamma else 0
    return values


def next_nodes(turn: Turn, following: Turn) -> dict[int, int]:
    """Return for each node of a turn that was continued the node of the following turn."""
    return {int(parent) // turn.rewards.shape[1]: node for node, parent in enumerate(following.parents)}


def _continue(
    after: list[Any], nodes: list[int], turns: Sequence[Turn], env: Environment, gamma: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the returns [N] of answers [B] that continue with the completions of nodes [B] of the next turn, and later
    ones."""
    if not after:
        return []
    states, prompts = env.observe(after)  # an agent without a prompt in this turn writes nothing, whatever it really wrote
    actions = [
        ["" if prompt is None else texts[node][0] for node, prompt in zip(nodes, row, strict=True)]
        for texts, row in zip(turns[0].texts, prompts, strict=True)
    ]
    answer = env.step(states, actions, rng)
    values = [np.array(reward, float) for reward in answer.result.rewards]
    if len(turns) == 1:
        return values
    next_node = next_nodes(turns[0], turns[1])
    going = [i for i, p in enumerate(nodes) if p in next_node and not answer.done[i] and np.isfinite(values[i]).all()]
    after, nodes = [answer.after[i] for i in going], [next_node[nodes[i]] for i in going]
    for i, value in zip(going, _continue(after, nodes, turns[1:], env, gamma, rng), strict=True):
        values[i] = values[i] + (gamma * value if gamma else 0)
    return values
