"""Dynamic sampling (DAPO, arXiv 2503.14476): replace prompts that teach nothing by others in the same update.

If all returns of each group of a prompt are equal, for every agent and in all turns, the advantages of a group baseline are 0.
Such prompts are left out, and further ones are played in their place: `num_prompts` per round, so a round runs the same
programs as the step itself. Those of them that are informative fill the empty places in order. Places that are still empty
after the last round keep their first prompts.

The further prompts follow from (seed, step): the data set in a new order, the step's own items last. So only the step number
goes from one update to the next. With several turns whole episodes are exchanged: a prompt is an item with all nodes that
follow from it. Left out: the KL penalty of kl_in="reward" and completions that are masked as overlong, which change advantages
later; and informative prompts of a round beyond the empty places, which are thrown away as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jmarl.objectives.policy import has_own_groups
from jmarl.randomness import FURTHER
from jmarl.rl.advantages import EPS
from jmarl.rollout.turns import Rollout, Turn, join_turns, take_nodes
from jmarl.team import Team


def further_items(step: int, draw: int, own: Sequence[int], num_items: int, seed: int) -> list[int]:
    """Return the items that round `draw` (1, 2, ...) of a step plays, as many as the step's `own`.

    If the data set has no others left, items are played once more.
    """
    order = np.random.default_rng((seed, step, FURTHER)).permutation(num_items)
    own_last = order[np.argsort(np.isin(order, own), kind="stable")]
    return [int(own_last[p % num_items]) for p in range((draw - 1) * len(own), draw * len(own))]


def informative(rollout: Rollout, grouping: str) -> np.ndarray:
    """Return which items [P] have a group of returns that are not all equal. grouping: as in `to_batches`."""
    differs = np.zeros(len(rollout.turns[0].items), bool)
    groups: dict[tuple, list[np.ndarray]] = {}
    for t, (turn, returns) in enumerate(zip(rollout.turns, rollout.returns, strict=True)):
        by_item = has_own_groups(grouping, returns.shape[-1])
        for node, item in enumerate(turn.items):
            key = (item, "episode" if grouping == "episode" else t, None if by_item else node)
            groups.setdefault(key, []).append(returns[:, node])
    for (item, *_), parts in groups.items():
        for values in np.concatenate(parts, -1).astype(np.float32):  # of each agent
            valid = values[np.isfinite(values)]
            differs[item] |= valid.size > 0 and (valid - valid.max()).std() > EPS
    return differs


def replace_uninformative(
    team: Team, first: Rollout, play_round: Callable[[int], Rollout], rounds: int, grouping: str
) -> Rollout:
    """Replace the prompts of a rollout that are not informative, as far as further rounds have informative ones.

    Args:
        team: the agents.
        first: the rollout of the step.
        play_round: plays the items of round 1, 2, ...
        rounds: the largest number of rounds.
        grouping: as in `to_batches`.

    Returns:
        The rollout. Its notes have the share of prompts replaced, the rounds used, and the mean return of all that was played.
    """
    played, places = [first], [(0, p) for p in range(len(first.turns[0].items))]
    missing = [int(p) for p in np.flatnonzero(~informative(first, grouping))]
    while missing and len(played) <= rounds:
        played.append(play_round(len(played)))
        for p in np.flatnonzero(informative(played[-1], grouping))[: len(missing)]:
            places[missing.pop(0)] = (len(played) - 1, int(p))
    replaced = sum(r > 0 for r, _ in places)
    returns = np.concatenate([rollout.joint_returns[0].ravel() for rollout in played])
    mean = returns[np.isfinite(returns)].mean() if np.isfinite(returns).any() else np.nan
    notes = {"dynamic/replaced": replaced / len(places), "dynamic/rounds": len(played) - 1.0, "dynamic/return": float(mean)}
    names = {name for rollout in played for name in rollout.notes}
    counts = {name: sum(rollout.notes.get(name, 0.0) for rollout in played) for name in names}
    return (select(team, played, places) if replaced else first)._replace(notes=counts | notes)


def select(team: Team, rollouts: Sequence[Rollout], items: Sequence[tuple[int, int]]) -> Rollout:
    """Return the rollout of some items, given as (rollout, item), of several rollouts of one team with equal settings."""
    turns: list[Turn] = []
    joint_returns, returns = [], []
    before: dict[tuple[int, int], int] = {}  # (rollout, node) of the turn before -> its new number
    max_nodes = len(items)
    for t in range(max(len(rollout.turns) for rollout in rollouts)):
        places = [(r, int(n), p) for p, (r, item) in enumerate(items) for n in nodes_of(rollouts[r], t, item)]
        if not places:
            break
        nodes = [(r, n) for r, n, _ in places]
        parents = np.arange(len(nodes))
        if t:
            size = len(turns[-1].joint)
            old = [(r, *divmod(int(rollouts[r].turns[t].parents[n]), size)) for r, n in nodes]
            parents = np.array([before[r, parent] * size + joint for r, parent, joint in old])
        turn = select_turn(team, {r: rollouts[r].turns[t] for r in sorted({r for r, _ in nodes})}, nodes, max_nodes)
        turns.append(turn._replace(parents=parents, items=np.array([p for *_, p in places])))
        joint_returns.append(np.stack([rollouts[r].joint_returns[t][n] for r, n in nodes]))
        returns.append(np.stack([rollouts[r].returns[t][:, n] for r, n in nodes], 1))
        before, max_nodes = {node: p for p, node in enumerate(nodes)}, max_nodes * len(turn.joint)
    return Rollout(rollouts[0].num_turns, tuple(turns), tuple(joint_returns), tuple(returns))


def nodes_of(rollout: Rollout, t: int, item: int) -> np.ndarray:
    """Return the nodes of turn t that follow from an item; none if the turn was not played."""
    return np.flatnonzero(rollout.turns[t].items == item) if t < len(rollout.turns) else np.zeros(0, int)


def select_turn(team: Team, turns: dict[int, Turn], nodes: Sequence[tuple[int, int]], max_nodes: int) -> Turn:
    """Return the turn of some nodes, given as (rollout, node).

    turns: the turn of each rollout that has any of the nodes; max_nodes: as in `Turn`.
    """
    starts = dict(zip(turns, np.cumsum([0, *(len(turn.items) for turn in turns.values())]), strict=False))
    return take_nodes(team, join_turns(team, [*turns.values()]), np.array([starts[r] + n for r, n in nodes]), max_nodes)
