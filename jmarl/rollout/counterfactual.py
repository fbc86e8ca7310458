"""Fixed continuation: what an episode would have returned had one message been another and all later ones the same.

The environment alone is asked, nothing is sampled: an alternative is played on with the completions that were really written
in later turns (C3, arXiv 2603.06859). Host world. Left out: an episode that really ended with a message, where an alternative
would have gone on: there is nothing to go on with, so it ends there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs.base import Answer, Environment


class Said(NamedTuple):
    """One turn of P nodes and J joint actions each, of which the first was played on."""

    answer: Answer  # to all of them
    rewards: np.ndarray  # [P, J, N]
    texts: Sequence[Sequence[Sequence[str]]]  # [N][P][G]; completion 0 of each agent is the first joint action
    parents: np.ndarray  # [P] the joint action of the turn before that a node follows, in [P' * J]


def returns(turns: Sequence[Said], env: Environment, gamma: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Of each turn's joint actions [P, J, N]: reward plus gamma times what followed, or would have followed. NaN where a reward
    on the way is."""
    found = [np.array(turn.rewards, float) for turn in turns]
    for t in range(len(turns) - 2, -1, -1):
        actions = found[t].shape[1]
        node_of = {int(parent) // actions: node for node, parent in enumerate(turns[t + 1].parents)}
        for p, node in node_of.items():
            found[t][p, 0] += gamma * found[t + 1][node, 0] if gamma else 0  # which an invalid one is not, times 0
        forks = [
            (p, j)
            for p in node_of
            for j in range(1, actions)
            if not turns[t].answer.done[p * actions + j] and np.isfinite(turns[t].rewards[p, j]).all()
        ]
        after = [turns[t].answer.after[p * actions + j] for p, j in forks]
        later = _continued(after, [node_of[p] for p, _ in forks], turns[t + 1 :], env, gamma, rng)
        for (p, j), value in zip(forks, later, strict=True):
            found[t][p, j] += gamma * value if gamma else 0
    return found


def _continued(
    after: list[Any], nodes: list[int], turns: Sequence[Said], env: Environment, gamma: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """Returns [N] of answers [B] that are played on with what the nodes [B] of the next turn, and those after it, wrote."""
    if not after:
        return []
    states, prompts = env.observe(after)  # an agent that is not asked there says nothing, whatever it really wrote
    actions = [
        ["" if prompt is None else of_agent[node][0] for node, prompt in zip(nodes, asked, strict=True)]
        for of_agent, asked in zip(turns[0].texts, prompts, strict=True)
    ]
    answer = env.step(states, actions, rng)
    out = [np.array(reward, float) for reward in answer.result.rewards]
    if len(turns) == 1:
        return out
    width = turns[0].rewards.shape[1]
    next_of = {int(parent) // width: node for node, parent in enumerate(turns[1].parents)}
    on = [i for i, node in enumerate(nodes) if node in next_of and not answer.done[i] and np.isfinite(out[i]).all()]
    rest = [answer.after[i] for i in on], [next_of[nodes[i]] for i in on]
    for i, value in zip(on, _continued(*rest, turns[1:], env, gamma, rng), strict=True):
        out[i] = out[i] + (gamma * value if gamma else 0)
    return out
