"""Credit of single messages: what a team would have got, had one agent written something else and all others the same.

Each agent's message of each turn is written k times in one batch (its prompt is computed once, and in later turns goes on from
the keys and values that are there). The first ones are the episode; every other one is judged in place of the first, with the
others' first messages and the later turns as they were (`replay`). The advantage of a message is its return minus the mean of
its alternatives': counterfactual, leave one out (C3, arXiv 2603.06859). The row `c3` trains on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jmarl.config import Episodes, Sampling, check
from jmarl.envs.environment import Environment
from jmarl.envs.vector import TextEnvironment, side_by_side
from jmarl.rollout.play import Rollout, play
from jmarl.sampling.generate import sample_team
from jmarl.team import Team


class MessageCredit(NamedTuple):
    """Credit of messages; of each turn N agents, P episodes, k messages, of which number 0 is the one that was played on."""

    rollout: Rollout  # texts, tokens, rewards and returns
    advantages: tuple[np.ndarray, ...]  # of each turn [N, P, k]; 0 where a reward was invalid or there is no other


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
    """Play one episode on each item and weigh every message of it against k - 1 others. params: of each stack [A, ...]; seed
    gives the random numbers."""
    check("k", k, k >= 2, ">= 2: a message is compared with others")
    forked = dataclasses.replace(episodes or Episodes(), joint_mode="counterfactual", branching="chain")
    world = side_by_side(env, forked.num_turns)
    rollout = play(partial(sample_team, team, params), team, items, world, settings, forked, seed=seed, step=0, group=k)
    return MessageCredit(rollout, tuple(leave_one_out(returns) for returns in rollout.returns))


def leave_one_out(returns: np.ndarray) -> np.ndarray:
    """R - mean of the others along the last axis; NaN returns count nowhere and get 0."""
    valid = np.isfinite(returns)
    count, filled = valid.sum(-1, keepdims=True), np.where(valid, returns, 0)
    others = (filled.sum(-1, keepdims=True) - filled) / np.maximum(count - 1, 1)
    return np.where(valid & (count > 1), filled - others, 0)
