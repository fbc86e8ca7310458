"""Make the batches that the stacks learn from out of a rollout. With critics `critic_values` makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import Algorithm
from jmarl.lazy import Table
from jmarl.learning.batches import (
    concatenate_prompts,
    make_batch,
    one_per_prompt,
    round_up_to_quarter,
    select_in_few_sizes,
    take_rows,
)
from jmarl.learning.setup import Setup
from jmarl.objectives.policy import has_own_groups
from jmarl.rl.advantages import estimate
from jmarl.rollout.turns import Rollout, Turn
from jmarl.team import Team, to_agents, to_stacks
from jmarl.types import Batch, Batches, TeamState

VALUES = Table[Callable[..., Any]](  # what gives the expected return of a completion
    {"critic": "jmarl.rollout.critic_values:batches_with_values", "greedy": "jmarl.rollout.critic_values:greedy_baseline"}
)


def rollout_batches(setup: Setup, state: TeamState, rollout: Rollout) -> Batches:
    """Return the batches of the stacks and of the critics."""
    if setup.algorithm.critic_kind is not None:
        return VALUES["critic"](setup, state, rollout)
    row, values = setup.algorithm.row, rollout.expected
    if row.across_turns and rollout.num_turns > 1:
        values = added_to_advantages(setup.algorithm, rollout, setup.cfg.episodes.gamma)
    return Batches(to_batches(setup.team, rollout, row.grouping, values))


_estimate = jax.jit(estimate, static_argnums=0)  # one program, not one per operation


def added_to_advantages(algorithm: Algorithm, rollout: Rollout, gamma: float) -> list[np.ndarray]:
    """Return what `across_turns` of a row adds to the advantages of completions, per turn [N, P, G].

    An agent has an advantage in every turn of an episode: what followed for it from there on, compared with the group. This
    is that of its own completion in turns in which agents act at once. In turns in which only one agent acts it says what the
    action of this agent was worth to both, so what the other did to an agent counts in the agent's past."""
    (nodes, group, agents), num_turns = rollout.joint_returns[0].shape, rollout.num_turns
    returns = np.full((num_turns, nodes * group, agents), np.nan)
    episodes = [np.arange(nodes * group)]  # of the joint actions of each turn
    for t, turn in enumerate(rollout.turns):
        episodes += [episodes[-1][turn.parents]] if t else []
        returns[t, episodes[t]] = rollout.joint_returns[t].reshape(-1, agents)
    by_agent = np.moveaxis(returns, -1, 0)  # [N, T, P * G]
    values = _estimate(algorithm.row.estimator, jnp.asarray(by_agent.reshape(-1, group), jnp.float32))
    assert algorithm.row.across_turns is not None
    terms = algorithm.row.across_turns(np.asarray(values).reshape(by_agent.shape), gamma, algorithm.loss.align_coef or 0.0)
    shapes = [(agents, len(turn.items), turn.group_size) for turn in rollout.turns]
    return [terms[:, t, rows].reshape(shape) for t, (rows, shape) in enumerate(zip(episodes, shapes, strict=True))]


def to_batches(
    team: Team, rollout: Rollout, grouping: str = "turn", values: Sequence[np.ndarray] | None = None
) -> tuple[Batch, ...]:
    """Return what each stack learns from: the completions of all turns.

    If later turns are chains, no two of their completions have a prompt in common: every row is then a node of its own.

    Args:
        team: the agents.
        rollout: the episodes.
        grouping: `turn` compares the completions that an agent wrote in one turn, `episode` those in all turns on an item.
        values: per turn [N, P, G], the expected return of each completion.
    """
    turns, num_items = rollout.turns, len(rollout.turns[0].items)
    single = len({turn.group_size for turn in turns}) > 1  # a row is a single completion
    returns = [pad_nodes(team, turn, x, np.nan) for turn, x in zip(turns, rollout.returns, strict=True)]
    expected = [pad_nodes(team, turn, x, 0) for turn, x in zip(turns, values or (), strict=values is not None)]
    used = used_rows(team, turns, single)
    batches = []
    for i, spec in enumerate(team.stacks):
        roles, parts, start = len(spec.members[0]), [], 0
        steps = max(int(turn.completions[i].steps.max()) for turn in turns)
        size = round_up_to_quarter(steps, turns[0].completions[i])
        for t, turn in enumerate(turns):
            groups = start + group_numbers(turn, grouping, roles, num_items)
            start = 0 if grouping == "episode" else groups.max() + 1
            part = make_batch(
                turn.encoded[i],
                turn.completions[i],
                returns[t][i],
                groups,
                size,
                roles=roles,
                values=expected[t][i] if expected else None,
            )
            parts.append(one_per_prompt(part) if single else part)
        batches.append(take_rows(concatenate_prompts(parts) if len(parts) > 1 else parts[0], used[i]))
    return tuple(batches)


def group_numbers(turn: Turn, grouping: str, roles: int, num_items: int) -> np.ndarray:
    """Return for each node [R * P'] the number of its group. Nodes of different roles are in different groups."""
    groups = np.zeros((roles, turn.padded_size), np.int32)
    by_item = has_own_groups(grouping, turn.group_size)
    groups[:, : len(turn.items)] = turn.items if by_item else np.arange(len(turn.items))
    groups += np.arange(roles)[:, None] * (num_items if grouping == "episode" else groups.max() + 1)
    return groups.reshape(-1)


def used_rows(team: Team, turns: Sequence[Turn], single: bool) -> list[np.ndarray | None]:
    """Return for each stack the rows [A, rows] of its batch that its agents learn from; None: all.

    These are the nodes that were played and at which the agents act; at least as many as in the first turn, so that
    micro-batches have rows. single: a row is one completion.
    """
    rows_per_node = [turn.group_size if single else 1 for turn in turns]
    max_nodes = sum(turn.max_nodes * n for turn, n in zip(turns, rows_per_node, strict=True))
    acts = [pad_nodes(team, turn, turn.acts, False) for turn in turns]
    rows: list[np.ndarray | None] = []
    for i, spec in enumerate(team.stacks):
        used = [np.repeat(acts[t][i], n, 1) for t, n in enumerate(rows_per_node)]
        rows.append(select_in_few_sizes(np.concatenate(used, 1), len(spec.members[0]) * max_nodes, used[0].shape[1]))
    return rows


def to_turns(team: Team, turns: Sequence[Turn], stacks: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """Return numbers of completions per turn [N, P, G] from those of the rows of batches: the inverse of `to_batches`.

    NaN where a completion has no row.

    Args:
        team: the agents.
        turns: of the rollout that the batches were made of.
        stacks: of each stack [A, rows, G], which may have more rows, as batches of several seeds; None: it has no numbers.
    """
    single, by_stack = len({turn.group_size for turn in turns}) > 1, list[list[np.ndarray]]()
    group, sizes = 1 if single else turns[0].group_size, [turn.padded_size * turn.group_size for turn in turns]
    for spec, numbers, rows in zip(team.stacks, stacks, used_rows(team, turns, single), strict=True):
        count, roles = len(spec.members), len(spec.members[0])
        full = np.full((count, roles * sum(sizes) // group + 1, group), np.nan)  # the last row takes the padding, row -1
        rows = np.tile(np.arange(full.shape[1] - 1), (count, 1)) if rows is None else rows
        if numbers is not None:
            own = numbers.reshape(count, -1)[:, : rows.shape[1] * group].reshape(count, -1, group)
            np.put_along_axis(full, rows[..., None], own, 1)
        parts = np.split(full[:, :-1].reshape(count, -1), np.cumsum(sizes)[:-1] * roles, 1)
        by_stack.append([x.reshape(count, -1, turn.group_size) for x, turn in zip(parts, turns, strict=True)])
    by_turn = zip(turns, zip(*by_stack, strict=True), strict=True)
    return [np.array(to_agents(team, parts))[:, : len(turn.items)] for turn, parts in by_turn]


def pad_nodes(team: Team, turn: Turn, x: np.ndarray, fill: float) -> tuple[np.ndarray, ...]:
    """Return values [N, P, ...] of a turn as an array [A, R * P', ...] of each stack, with `fill` at the padding."""
    padding = ((0, 0), (0, turn.padded_size - x.shape[1])) + ((0, 0),) * (x.ndim - 2)
    return to_stacks(team, np.pad(x, padding, constant_values=fill))
