"""Credit of single messages: how much better a message is than alternatives by the same agent, with all others unchanged.

Each agent's message of each turn is sampled k times in one batch (its prompt is computed once, and in later turns continues
from the cached keys and values). The first ones are the episode. Every other one is rewarded in place of the first, with the
other agents' first messages and the later turns unchanged (`counterfactual`). The advantage of a message is its return minus
the mean of its alternatives' returns: counterfactual, leave one out (C3, arXiv 2603.06859). The algorithm `c3` trains on it.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jmarl.config import Episodes, Sampling, check
from jmarl.envs.base import Environment, TextEnvironment
from jmarl.envs.vector import vectorize
from jmarl.randomness import Randomness
from jmarl.rollout.play import play
from jmarl.rollout.turns import Rollout
from jmarl.sampling.generate import sample_team
from jmarl.team import Team


class MessageCredit(NamedTuple):
    """Credit of messages. N agents, P episodes, k messages, of which number 0 was played on."""

    rollout: Rollout  # texts, tokens, rewards and returns
    advantages: tuple[np.ndarray, ...]  # per turn [N, P, k]; 0 if a reward was invalid or there is no alternative


def message_credit(
    team: Team,
    params: Sequence[Any],
    items: Sequence[dict],
    env: Environment | TextEnvironment,
    settings: Sampling,
    episodes: Episodes | None = None,
    *,
    k: int,
    seed: int,
) -> MessageCredit:
    """Play one episode on each item and compare every message of it with k - 1 alternatives.

    Args:
        team: the agents.
        params: parameters [A, ...] of each stack.
        items: what the episodes are about.
        env: writes the prompts and rewards joint actions.
        settings: how messages are sampled.
        episodes: turns and history. Its joint mode and branching are not read.
        k: messages that an agent writes in each turn, at least 2.
        seed: all random numbers follow from it.
    """
    check("k", k, k >= 2, ">= 2: a message is compared with others")
    forked = dataclasses.replace(episodes or Episodes(), joint_mode="counterfactual", branching="chain")
    world, sample = vectorize(env, forked.num_turns), partial(sample_team, team, params)
    rollout = play(sample, team, items, world, settings, forked, k, Randomness(seed, step=0))
    return MessageCredit(rollout, tuple(leave_one_out(returns) for returns in rollout.returns))


def leave_one_out(returns: np.ndarray) -> np.ndarray:
    """Return each return minus the mean of the others along the last axis; NaN counts nowhere and gets 0."""
    valid = np.isfinite(returns)
    count, filled = valid.sum(-1, keepdims=True), np.where(valid, returns, 0)
    mean_of_others = (filled.sum(-1, keepdims=True) - filled) / np.maximum(count - 1, 1)
    return np.where(valid & (count > 1), filled - mean_of_others, 0)
