"""A rollout of zeros, of which the real code makes batches of the largest shapes: to compile updates before a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmarl.config import Episodes
from jmarl.learning.setup import Setup
from jmarl.rl.returns import joint_actions
from jmarl.rollout.critic_values import batches_with_values
from jmarl.rollout.make_batches import to_batches
from jmarl.rollout.play import credit_completions
from jmarl.rollout.turns import Rollout, Turn
from jmarl.sampling.generate import Encoded, bucket
from jmarl.team import StackSpec, Team
from jmarl.types import Batch, Batches, Completions, StackState, TeamState


def zeros(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Return zeros that take the memory of one: a batch too large for the device must fail while sampling, not here."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def zero_batches(setup: Setup, state: TeamState, widths: Sequence[int]) -> Batches:
    """Return the batches of an update after all turns with completions of full length. Left out: the batch of a central critic,
    whose prompts are texts.

    widths: length of the prompts of the first turn of each stack, as they are padded.
    """
    rollout, algorithm = zero_rollout(setup, widths), setup.algorithm
    if algorithm.has_greedy_baseline:
        rollout = rollout._replace(expected=rollout.returns)
    if algorithm.critic_kind == "central":
        return Batches(to_batches(setup.team, rollout, values=rollout.returns))
    return Batches(*batches_with_values(setup, state, rollout, zero_values, zero_penalty))


def zero_values(
    params: Any, spec: StackSpec, prompts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray, algorithm: Any
) -> np.ndarray:
    """Stand in for `critics.value_stack`."""
    return zeros(tokens.shape)


def zero_penalty(batch: Batch, stack: StackState, spec: StackSpec, algorithm: Any) -> Batch:
    """Stand in for `critics.with_penalty`."""
    return batch._replace(ref_logprobs=zeros(batch.tokens.shape), penalty=zeros(batch.tokens.shape))


def zero_rollout(setup: Setup, widths: Sequence[int]) -> Rollout:
    """Return episodes in which no episode ends early, and every later prompt holds the turns before."""
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
    return Rollout(episodes.num_turns, tuple(turns), joint_returns, returns)


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
