"""Dynamic sampling (DAPO, arXiv 2503.14476): prompts that teach nothing make room for others in the same update.

Where all returns of each group of a prompt are equal, for every agent and in all turns, a group baseline leaves nothing: its
advantages are 0. Such prompts are left out, and further ones are played in their place: `num_prompts` a round, so a round runs
the programs of the step itself. Those of them that teach something fill the empty places in order. What is still missing after
the last round stays as it was.

The further prompts follow from (seed, step): the data set in a new order, the step's own items last. So nothing but the step
number goes from one update to the next. Of several turns, whole episodes are exchanged: a prompt is an item with all nodes that
came of it. Left out: the KL penalty of kl_in="reward" and completions that are masked as overlong, which change advantages
later on; and what a round has beyond the empty places, which is thrown away as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jmarl.randomness import FURTHER
from jmarl.rl.advantages import EPS
from jmarl.rollout.play import Rollout, Turn
from jmarl.sampling.generate import bucket
from jmarl.team import StackSpec, Team
from jmarl.types import Completions

Nodes = list[tuple[int, int]]  # (rollout, item or node of it)


def further_items(step: int, draw: int, own: Sequence[int], num_items: int, seed: int) -> list[int]:
    """Indices of the items that round `draw` (1, 2, …) of a step plays, as many as the step's `own`. Where the data set has no
    others left, items are played once more."""
    order = np.random.default_rng((seed, step, FURTHER)).permutation(num_items)
    own_last = order[np.argsort(np.isin(order, own), kind="stable")]
    return [int(own_last[p % num_items]) for p in range((draw - 1) * len(own), draw * len(own))]


def informative(rollout: Rollout, grouping: str) -> np.ndarray:
    """Whether the items [P] of a rollout have a group of returns that are not all equal; grouping as for `to_batches`."""
    found = np.zeros(len(rollout.turns[0].items), bool)
    groups: dict[tuple, list[np.ndarray]] = {}
    for t, (turn, returns) in enumerate(zip(rollout.turns, rollout.returns, strict=True)):
        for node, item in enumerate(turn.items):
            together = grouping == "episode" or returns.shape[-1] == 1
            of_group = (item, "episode" if grouping == "episode" else t, None if together else node)
            groups.setdefault(of_group, []).append(returns[:, node])
    for (item, *_), parts in groups.items():
        for of_agent in np.concatenate(parts, -1).astype(np.float32):
            valid = of_agent[np.isfinite(of_agent)]
            found[item] |= valid.size > 0 and (valid - valid.max()).std() > EPS
    return found


def refill(team: Team, first: Rollout, play_round: Callable[[int], Rollout], rounds: int, grouping: str) -> Rollout:
    """The rollout of a step with its idle prompts replaced, as far as `rounds` further ones go, and notes of it for the log:
    the share of prompts replaced, the rounds used, and the mean return of everything that was played."""
    played, kept = [first], [(0, p) for p in range(len(first.turns[0].items))]
    missing = [int(p) for p in np.flatnonzero(~informative(first, grouping))]
    while missing and len(played) <= rounds:
        played.append(play_round(len(played)))
        for p in np.flatnonzero(informative(played[-1], grouping))[: len(missing)]:
            kept[missing.pop(0)] = (len(played) - 1, int(p))
    replaced = sum(r > 0 for r, _ in kept)
    returns = np.concatenate([of.joint_returns[0].ravel() for of in played])
    mean = returns[np.isfinite(returns)].mean() if np.isfinite(returns).any() else np.nan
    notes = {"dynamic/replaced": replaced / len(kept), "dynamic/rounds": len(played) - 1.0, "dynamic/return": float(mean)}
    counts = {name: sum(of.notes.get(name, 0.0) for of in played) for name in {name for of in played for name in of.notes}}
    return (select(team, played, kept) if replaced else first)._replace(notes=counts | notes)


def select(team: Team, rollouts: Sequence[Rollout], items: Nodes) -> Rollout:
    """The rollout of some items of several rollouts of one team and one kind."""
    turns, of_joint, credited = [], [], []
    before: Nodes = []
    most = len(items)
    for t in range(max(len(rollout.turns) for rollout in rollouts)):
        found = [(r, int(n), p) for p, (r, item) in enumerate(items) for n in nodes_of(rollouts[r], t, item)]
        if not found:
            break
        nodes = [(r, n) for r, n, _ in found]
        parents = np.arange(len(nodes))
        if t:
            size, where = len(turns[-1].joint), {node: p for p, node in enumerate(before)}
            ways = [(r, *divmod(int(rollouts[r].turns[t].parents[n]), size)) for r, n in nodes]
            parents = np.array([where[r, parent] * size + joint for r, parent, joint in ways])
        of_turn = [rollout.turns[t] if t < len(rollout.turns) else None for rollout in rollouts]
        turns.append(turn_of(team, of_turn, nodes, parents, np.array([p for *_, p in found]), most))
        of_joint.append(np.stack([rollouts[r].joint_returns[t][n] for r, n in nodes]))
        credited.append(np.stack([rollouts[r].returns[t][:, n] for r, n in nodes], 1))
        before, most = nodes, most * len(turns[-1].joint)
    return Rollout(rollouts[0].num_turns, tuple(turns), tuple(of_joint), tuple(credited))


def nodes_of(rollout: Rollout, t: int, item: int) -> np.ndarray:
    """The nodes of a turn that came of an item; none where the turn was not played."""
    return np.flatnonzero(rollout.turns[t].items == item) if t < len(rollout.turns) else np.zeros(0, int)


def turn_of(team: Team, turns: Sequence[Turn | None], nodes: Nodes, parents: np.ndarray, items: np.ndarray, most: int) -> Turn:
    """A turn of some nodes; padded as `play.play_turn` does it, where there could be `most` of them."""
    played = {r: turn for r, turn in enumerate(turns) if turn is not None and r in {r for r, _ in nodes}}
    some = next(iter(played.values()))
    rewards = np.stack([played[r].rewards[n] for r, n in nodes])
    parts = {}
    for name in dict.fromkeys(name for turn in played.values() for name in turn.parts):
        each = {r: turn.parts.get(name, np.full(turn.rewards[..., 0].size, np.nan)) for r, turn in played.items()}
        of_node = {r: each[r].reshape(len(turn.items), -1) for r, turn in played.items()}
        parts[name] = np.concatenate([of_node[r][n] for r, n in nodes])
    padded = nodes + nodes[:1] * (min(bucket(len(nodes), 1), most) - len(nodes))
    return Turn(
        prompts=[[played[r].prompts[agent][n] for r, n in nodes] for agent in range(team.num_agents)],
        acts=np.stack([played[r].acts[:, n] for r, n in nodes], 1),
        texts=[[played[r].texts[agent][n] for r, n in nodes] for agent in range(team.num_agents)],
        joint=some.joint,
        rewards=rewards,
        parts=parts,
        invalid=int(np.isnan(rewards).any(-1).sum()),
        fault=next((turn.fault for turn in played.values() if turn.fault), ""),
        parents=parents,
        items=items,
        encoded=tuple(prompts_of(spec, played, padded, i) for i, spec in enumerate(team.stacks)),
        completions=tuple(completions_of(spec, played, padded, i) for i, spec in enumerate(team.stacks)),
        most=most,
    )


def rows_of_nodes(spec: StackSpec, arrays: dict[int, np.ndarray], nodes: Nodes) -> np.ndarray:
    """The rows of some nodes [A, roles * P, ...] of each rollout's rows of one kind."""
    agents, roles = len(spec.members), len(spec.members[0])
    by_role = {r: x.reshape(agents, roles, -1, *x.shape[2:]) for r, x in arrays.items()}
    rows = np.stack([by_role[r][:, :, n] for r, n in nodes], 2)
    return rows.reshape(agents, -1, *rows.shape[3:])


def prompts_of(spec: StackSpec, played: dict[int, Turn], nodes: Nodes, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Stack i's prompts of some nodes and their lengths, as wide as the widest of the rollouts."""
    ids, lengths = ({r: turn.encoded[i][k] for r, turn in played.items()} for k in (0, 1))
    width = max(x.shape[-1] for x in ids.values())
    wide = {r: np.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1])), constant_values=spec.stop[0]) for r, x in ids.items()}
    return rows_of_nodes(spec, wide, nodes), rows_of_nodes(spec, lengths, nodes)


def completions_of(spec: StackSpec, played: dict[int, Turn], nodes: Nodes, i: int) -> Completions:
    """Stack i's completions of some nodes."""
    done = {r: turn.completions[i] for r, turn in played.items()}
    steps = np.max([of.steps for of in done.values()], 0)
    fields = ("tokens", "action_mask", "logprobs", "truncated_logprobs", "ended")
    rows: dict[str, Any] = {
        name: rows_of_nodes(spec, {r: getattr(of, name) for r, of in done.items()}, nodes) for name in fields
    }
    return Completions(**rows, steps=steps)
