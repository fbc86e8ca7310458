"""Fixed continuation: the return of an episode if one message had been another and all later ones the same.

Only the environment is called, nothing is sampled: an alternative is continued with the completions that were really written in
later turns (C3, arXiv 2603.06859). Host world. Left out: if the message that was really written ended its episode, an
alternative that would have continued has no later completions to continue with, so it ends there too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Answer, Environment


class Branches(NamedTuple):
    """One turn of P nodes and J joint actions each, of which only the first was continued."""

    answer: Answer  # to all of them
    rewards: np.ndarray  # [P, J, N]
    texts: Sequence[Sequence[Sequence[str]]]  # [N][P][G]; completion 0 of each agent is the first joint action
    parents: np.ndarray  # [P] the joint action of the turn before that a node follows, in [P' * J]

    def next_nodes(self, following: "Branches") -> dict[int, int]:
        """Return for each node of this turn that was continued the node of the following turn."""
        actions = self.rewards.shape[1]
        return {int(parent) // actions: node for node, parent in enumerate(following.parents)}


def returns(turns: Sequence[Branches], env: Environment, gamma: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Return the return of each joint action, per turn [P, J, N]: its reward plus gamma times what follows.

    Alternatives are continued with the completions of the joint action that was played. NaN if a reward on the way is NaN.
    """
    values = [np.array(turn.rewards, float) for turn in turns]
    for t in range(len(turns) - 2, -1, -1):
        actions, next_node = values[t].shape[1], turns[t].next_nodes(turns[t + 1])
        for p, node in next_node.items():
            values[t][p, 0] += gamma * values[t + 1][node, 0] if gamma else 0  # 0 * NaN would be NaN
        alternatives = [
            (p, j)
            for p in next_node
            for j in range(1, actions)
            if not turns[t].answer.done[p * actions + j] and np.isfinite(turns[t].rewards[p, j]).all()
        ]
        after = [turns[t].answer.after[p * actions + j] for p, j in alternatives]
        later = _continue(after, [next_node[p] for p, _ in alternatives], turns[t + 1 :], env, gamma, rng)
        for (p, j), value in zip(alternatives, later, strict=True):
            values[t][p, j] += gamma * value if gamma else 0
    return values


def _continue(
    after: list[Any], nodes: list[int], turns: Sequence[Branches], env: Environment, gamma: float, rng: np.random.Generator
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
    next_node = turns[0].next_nodes(turns[1])
    going = [i for i, p in enumerate(nodes) if p in next_node and not answer.done[i] and np.isfinite(values[i]).all()]
    after, nodes = [answer.after[i] for i in going], [next_node[nodes[i]] for i in going]
    for i, value in zip(going, _continue(after, nodes, turns[1:], env, gamma, rng), strict=True):
        values[i] = values[i] + (gamma * value if gamma else 0)
    return values
