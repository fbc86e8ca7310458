"""The records of a rollout, and how to join and select their nodes.

A node is what the agents read together in a turn: in the first turn an item, later the continuation of a joint action.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmarl.columns import MEASURES, REWARD, check_names
from jmarl.config import Episodes
from jmarl.envs.base import Answer
from jmarl.sampling.generate import Encoded, bucket
from jmarl.team import Team, to_agents, to_stacks
from jmarl.types import Completions


class Turn(NamedTuple):
    """One turn as the host sees it. N agents, P nodes, G completions, J joint actions per node."""

    prompts: list[list[str]]  # [N][P] what the agents read now, uncut; empty for agents that do not act
    acts: np.ndarray  # [N, P] bool: the agent acts at the node; completions of inactive agents are ignored
    texts: list[list[list[str]]]  # [N][P][G]; empty for agents that do not act
    joint: np.ndarray  # [J, N] the completion g of each agent; the same J joint actions at every node
    rewards: np.ndarray  # [P, J, N] after processing; NaN where invalid
    parts: dict[str, np.ndarray]  # name -> [P * J] terms of the reward, see `RewardResult`
    invalid: int  # joint actions whose reward was invalid
    fault: str  # what was wrong with the first of them, or with a value that was replaced; empty: nothing
    parents: np.ndarray  # [P] the joint action of the turn before that the node follows, in [P * J]; first turn: 0 to P - 1
    items: np.ndarray  # [P] the item of the node's episode
    encoded: Encoded  # per stack: prompts with their history [A, R * P', S] and lengths; the last P' - P nodes are padding
    completions: tuple[Completions, ...]  # per stack, of P' nodes; on the host
    max_nodes: int  # nodes if no episode had ended before this turn
    measures: dict[str, np.ndarray] = {}  # name -> [P * J] other numbers, see `RewardResult`

    @property
    def group_size(self) -> int:
        """G"""
        return len(self.texts[0][0])

    @property
    def padded_size(self) -> int:
        """P'"""
        return padded_size(len(self.items), self.max_nodes)


class Rollout(NamedTuple):
    """The episodes of one step. N agents, P nodes, G completions, J joint actions per node."""

    num_turns: int  # the largest number of turns that an episode may have
    turns: tuple[Turn, ...]
    joint_returns: tuple[np.ndarray, ...]  # per turn [P, J, N]: return of each joint action; NaN where invalid
    returns: tuple[np.ndarray, ...]  # per turn [N, P, G]: return of each completion; NaN where invalid or inactive
    expected: tuple[np.ndarray, ...] | None = None  # per turn [N, P, G]: the greedy baseline, for algorithms that have one
    notes: Mapping[str, float] = {}  # more columns for the log
    texts: Mapping[str, str] = {}  # Markdown for TensorBoard by name
    tasks: Sequence[dict] = ()  # of a training step: its items
    preparation_s: float = 0.0  # seconds not counted as time of the step, in which a reward model was trained


def fault_counts(answers: Sequence[Answer], num_long: int, episodes: Episodes) -> dict[str, float]:
    """Return for the log how many joint actions had a reward that raised or came late, how many episodes were truncated, and
    how many prompts were too long.

    The first two are left out if there are none, the last if long prompts are an error. Warns if prompts were too long.
    """
    counts = {}
    if raised := sum(answer.result.num_raised for answer in answers):
        counts["reward/raised"] = float(raised)
    if truncated := sum(answer.result.num_truncated for answer in answers):
        counts["reward/truncated"] = float(truncated)
    if episodes.long_prompts != "error":
        counts["long_prompts"] = float(num_long)
    if num_long:
        what = "cut on the left" if episodes.long_prompts == "truncate_left" else "not read: their episodes end there"
        warnings.warn(
            f"prompts longer than the context are {what} (long_prompts={episodes.long_prompts!r}); this warning appears once, "
            "`long_prompts` in the log counts such prompts in every update",
            stacklevel=3,
        )
    return counts


def check_columns(rollout: Rollout) -> None:
    """Raise a ValueError if a part of the reward or a measure has the name of a column of the library."""
    for prefix, what in ((REWARD, "part of the reward"), (MEASURES, "measure")):
        tables = [turn.parts if prefix == REWARD else turn.measures for turn in rollout.turns]
        check_names(prefix, dict.fromkeys(name for table in tables for name in table), what)


def padded_size(count: int, max_nodes: int) -> int:
    """Return the size of the arrays that hold `count` nodes: few sizes, few compiled programs. max_nodes: the largest count."""
    return min(bucket(count, 1), max_nodes)


def padded_nodes(count: int, max_nodes: int) -> np.ndarray:
    """Return the numbers of `count` nodes, followed by node 0 up to `padded_size`."""
    return np.concatenate([np.arange(count), np.zeros(padded_size(count, max_nodes) - count, int)])


def take_rows_of_nodes(team: Team, stacks: Sequence[Any], nodes: np.ndarray | slice) -> tuple[Any, ...]:
    """Return the rows of some nodes, from arrays [A, R * P, ...] of each stack, or pytrees of them such as prompts."""
    return to_stacks(team, [jax.tree.map(lambda x: x[nodes], agent) for agent in to_agents(team, stacks)])


def concatenate_nodes(team: Team, parts: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Concatenate arrays [A, R * P, ...] of each stack, or pytrees of them, along the nodes."""
    agents = zip(*(to_agents(team, stacks) for stacks in parts), strict=True)
    return to_stacks(team, [jax.tree.map(lambda *x: np.concatenate(x), *entries) for entries in agents])


def join_prompts(team: Team, parts: Sequence[Encoded]) -> Encoded:
    """Concatenate prompts along the nodes, padded to the widest of each stack."""
    widths = [max(ids.shape[-1] for ids, _ in stack) for stack in zip(*parts, strict=True)]

    def pad(i: int, ids: jax.Array | np.ndarray) -> np.ndarray:
        missing = widths[i] - ids.shape[-1]
        return np.pad(ids, ((0, 0), (0, 0), (0, missing)), constant_values=team.stacks[i].stop[0])

    padded = [[(pad(i, ids), lengths) for i, (ids, lengths) in enumerate(part)] for part in parts]
    return concatenate_nodes(team, padded)


def join_completions(team: Team, parts: Sequence[tuple[Completions, ...]]) -> tuple[Completions, ...]:
    """Concatenate completions along the nodes, without caches. A single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    joined = concatenate_nodes(team, [[done._replace(steps=None, cache=None) for done in part] for part in parts])
    steps = [np.max([done.steps for done in stack], 0) for stack in zip(*parts, strict=True)]
    return tuple(done._replace(steps=n) for done, n in zip(joined, steps, strict=True))


def take_completions(team: Team, completions: Sequence[Completions], nodes: np.ndarray | slice) -> tuple[Completions, ...]:
    """Return the completions of some nodes, without caches."""
    rows = take_rows_of_nodes(team, [done._replace(steps=None, cache=None) for done in completions], nodes)
    return tuple(row._replace(steps=done.steps) for row, done in zip(rows, completions, strict=True))


def join_turns(team: Team, turns: Sequence[Turn]) -> Turn:
    """Concatenate turns along the nodes, without padding. They have the same joint actions per node."""

    def join_rows(lists: Sequence[list[list[Any]]]) -> list[list[Any]]:
        return [sum(rows, []) for rows in zip(*lists, strict=True)]

    real = [slice(len(turn.items)) for turn in turns]
    sizes = [turn.rewards[..., 0].size for turn in turns]
    prompts = [take_rows_of_nodes(team, turn.encoded, nodes) for turn, nodes in zip(turns, real, strict=True)]
    completions = [take_completions(team, turn.completions, nodes) for turn, nodes in zip(turns, real, strict=True)]
    return Turn(
        prompts=join_rows([turn.prompts for turn in turns]),
        acts=np.concatenate([turn.acts for turn in turns], 1),
        texts=join_rows([turn.texts for turn in turns]),
        joint=turns[0].joint,
        rewards=np.concatenate([turn.rewards for turn in turns]),
        parts=concatenate_numbers([turn.parts for turn in turns], sizes),
        invalid=sum(turn.invalid for turn in turns),
        fault=next((turn.fault for turn in turns if turn.fault), ""),
        parents=np.concatenate([turn.parents for turn in turns]),
        items=np.concatenate([turn.items for turn in turns]),
        encoded=join_prompts(team, prompts),
        completions=join_completions(team, completions),
        max_nodes=sum(turn.max_nodes for turn in turns),
        measures=concatenate_numbers([turn.measures for turn in turns], sizes),
    )


def concatenate_numbers(tables: Sequence[Mapping[str, np.ndarray]], sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """Concatenate the numbers of joint actions by name; NaN where a table has none of this name. sizes: of the tables."""
    names = dict.fromkeys(name for table in tables for name in table)
    filled = {name: [table.get(name, np.full(n, np.nan)) for table, n in zip(tables, sizes, strict=True)] for name in names}
    return {name: np.concatenate(arrays) for name, arrays in filled.items()}


def take_nodes(team: Team, turn: Turn, nodes: np.ndarray, max_nodes: int) -> Turn:
    """Return a turn of some nodes, padded as a turn of up to `max_nodes` nodes. Parents and items do not change."""
    rewards, padded = turn.rewards[nodes], nodes[padded_nodes(len(nodes), max_nodes)]

    def take(numbers: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: x.reshape(len(turn.items), -1)[nodes].reshape(-1) for name, x in numbers.items()}

    return turn._replace(
        prompts=[[prompts[p] for p in nodes] for prompts in turn.prompts],
        acts=turn.acts[:, nodes],
        texts=[[texts[p] for p in nodes] for texts in turn.texts],
        rewards=rewards,
        parts=take(turn.parts),
        measures=take(turn.measures),
        invalid=int(np.isnan(rewards).any(-1).sum()),
        parents=turn.parents[nodes],
        items=turn.items[nodes],
        encoded=take_rows_of_nodes(team, turn.encoded, padded),
        completions=take_completions(team, turn.completions, padded),
        max_nodes=max_nodes,
    )
