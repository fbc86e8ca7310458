"""A rollout of zeros, of which `make_batches.rollout_batches` makes batches as of others: to compile updates before a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmarl.config import Episodes
from jmarl.learning.setup import Setup
from jmarl.rl.returns import joint_actions
from jmarl.rollout.play import credit_completions
from jmarl.rollout.turns import Rollout, Turn
from jmarl.sampling.generate import Encoded, bucket
from jmarl.team import StackSpec, Team
from jmarl.types import Completions


def zeros(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Return zeros that take the memory of one: a batch too large for the device must fail while sampling, not here."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def zero_rollout(setup: Setup, widths: Sequence[int]) -> Rollout:
    """Return episodes with all turns and completions of full length, in which every later prompt holds the turns before.

    widths: length of the prompts of the first turn of each stack, as they are padded.
    """
    team, episodes, new = setup.team, setup.cfg.episodes, setup.cfg.sampling.max_new_tokens
    nodes, turns = episodes.num_prompts, list[Turn]()
    for t in range(episodes.num_turns):
        group = episodes.num_generations if t == 0 or episodes.branching == "tree" or episodes.forks else 1
        limits = [spec.config.context for spec in team.stacks]
        longest = [min(bucket(width + t * new), limit) for width, limit in zip(widths, limits, strict=True)]
        turns.append(zero_turn(team, episodes, nodes, group, longest if t else widths, new))
        nodes *= 1 if episodes.forks else len(turns[-1].joint)
    joint_returns = tuple(turn.rewards for turn in turns)
    returns = tuple(credit_completions(x, turn) for x, turn in zip(joint_returns, turns, strict=True))
    expected = returns if setup.algorithm.has_greedy_baseline else None
    return Rollout(episodes.num_turns, tuple(turns), joint_returns, returns, expected)


def zero_turn(team: Team, episodes: Episodes, nodes: int, group: int, widths: Sequence[int], new: int) -> Turn:
    """Return a turn at some nodes, with completions of full length."""
    joint = joint_actions(episodes.joint_mode, team.num_agents, group)
    return Turn(
        prompts=[[""] * nodes] * team.num_agents,
        acts=np.ones((team.num_agents, nodes), bool),
        texts=[[[""] * group] * nodes] * team.num_agents,
        joint=joint,
        rewards=np.zeros((nodes, *joint.shape)),
        parts={},
        invalid=0,
        fault="",
        parents=np.zeros(nodes, int),
        items=np.zeros(nodes, int),
        encoded=zero_prompts(team, nodes, widths),
        completions=tuple(zero_completions(spec, nodes, group, new) for spec in team.stacks),
        max_nodes=nodes,
    )


def zero_prompts(team: Team, nodes: int, widths: Sequence[int]) -> Encoded:
    """Return prompts of zeros of each stack."""
    shapes = [(len(spec.members), len(spec.members[0]) * nodes) for spec in team.stacks]
    pairs = zip(shapes, widths, strict=True)
    return tuple((zeros((*shape, width), np.int32), np.ones(shape, np.int32)) for shape, width in pairs)


def zero_completions(spec: StackSpec, nodes: int, group: int, new: int) -> Completions:
    """Return completions of full length of a stack."""
    rows = len(spec.members), len(spec.members[0]) * nodes, group
    numbers, steps = zeros((*rows, new)), np.full(rows[0], new, np.int32)
    arrays: list[Any] = [zeros((*rows, new), np.int32), zeros((*rows, new), bool), numbers, numbers, zeros(rows, bool), steps]
    return Completions(*arrays)
