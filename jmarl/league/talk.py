"""Do agents that read each other's messages listen? The influence of messages on what is written after them.

In turns behind the first, what an agent reads differs between the episodes of a group by what was said in them. The influence
of a message m on a completion y is how much likelier m makes it than the messages m'_k of the K other episodes do, in nats:

    log pi(y|m) - log (1/K sum_k pi(y|m'_k))

Its mean over messages and completions estimates how much y tells about m (Lowe et al., arXiv 1903.05168, on why rewards do not
say whether agents communicate). No episode is played for it: the prompts with the other messages are those of the sibling
nodes, which are there. In a tree these have all but the last joint action in common; chains of an item have only the item in
common, so a message there is all that was said before. Where a prompt also has the reader's own earlier words or acts, these
count as said to it.

The swap loss is how much the mean return falls if the first messages are exchanged between the tasks of a step, while all
episodes are played again with the same random keys: who does not read, or reads nothing that matters, loses nothing.

Left out: truncated sampling (top_p, top_k), whose probabilities may be 0 under other messages; exchanges in later turns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jmarl.envs.base import Answer, Environment, Texts, special_tokens
from jmarl.learning.critics import on_stack
from jmarl.learning.setup import Setup
from jmarl.models.config import ModelConfig
from jmarl.models.stack import to_host
from jmarl.rollout.turns import Rollout, Turn
from jmarl.sampling.scoring import score
from jmarl.team import to_agents


def columns_of_talk(
    setup: Setup, params: Sequence[Any], rollout: Rollout, env: Environment, replay: Callable[[Environment], Rollout]
) -> dict[str, float]:
    """Return for the log the mean influence on the completions of each agent that reads messages and, with `talk_swap`, the
    swap loss.

    Args:
        setup: of the run.
        params: [A, ...] of each stack, which the rollout was sampled with.
        rollout: of a step.
        env: in which it was played.
        replay: plays its tasks with the same random keys in an environment.
    """
    columns = influence_of_agents(setup, params, rollout)
    if setup.cfg.run.talk_swap:
        if fault := fault_of_messages(rollout):
            warnings.warn(
                f"no talk/swap_loss in this step: its first turn {fault}; if all do, set talk_swap=False", stacklevel=2
            )
        else:
            columns["talk/swap_loss"] = swap_loss(rollout, env, replay)
    return columns


# --- swap loss ---------------------------------------------------------------------------------------------------------


class SwappedMessages:
    """An environment in which what is written in the first turn on a task is read on the next task of the step."""

    def __init__(self, env: Environment):
        self.env, self.special_tokens, self.first = env, special_tokens(env), 0

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Any], list[list[Any]]]:
        self.first = len(items)
        return self.env.reset(items, rng)

    def step(self, states: Sequence[Any], actions: Texts, rng: np.random.Generator) -> Answer:
        shift = len(states) // self.first if self.first else 0
        self.first = 0
        return self.env.step(states, [[*texts[-shift:], *texts[:-shift]] if shift else texts for texts in actions], rng)

    def observe(self, after: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        return self.env.observe(after)


def fault_of_messages(rollout: Rollout) -> str:
    """Return why what is written in the first turn is no message: it is an act. Its exchange says nothing of who reads it."""
    if len(rollout.turns) < 2:
        return "ends all episodes"
    return "earns rewards, so it is more than a message" if np.any(np.nan_to_num(rollout.turns[0].rewards)) else ""


def swap_loss(rollout: Rollout, env: Environment, replay: Callable[[Environment], Rollout]) -> float:
    """Return by how much the mean return falls if first messages are exchanged between tasks."""
    before, after = (float(np.nanmean(x.joint_returns[0])) for x in (rollout, replay(SwappedMessages(env))))
    return before - after


# --- influence ---------------------------------------------------------------------------------------------------------


def influence_of_agents(setup: Setup, params: Sequence[Any], rollout: Rollout) -> dict[str, float]:
    """Return the columns of the influence on agents that read messages."""
    values: list[list[np.ndarray]] = [[] for _ in range(setup.team.num_agents)]
    for before, turn in zip(rollout.turns, rollout.turns[1:], strict=False):
        others = siblings(before, turn)
        for agent, influence in enumerate(influences(setup, params, turn, others)):
            values[agent].append(influence[turn.acts[agent] & (others >= 0).any(1)].ravel())
    means = {agent: np.concatenate(x) for agent, x in enumerate(values) if x}
    return {f"talk/agent_{agent}/influence": float(x.mean()) for agent, x in means.items() if x.size}


def siblings(before: Turn, turn: Turn) -> Int[np.ndarray, "node sibling"]:
    """Return the other nodes with another message for each node of a turn; -1 where there are fewer than for others. In trees
    they follow the same node of the turn before, in chains they have the same item."""
    groups = turn.items if turn.group_size == 1 else turn.parents // len(before.joint)
    nodes = np.arange(len(groups))
    rows = [nodes[(groups == groups[p]) & (nodes != p)] for p in nodes]
    others = np.full((len(nodes), max(map(len, rows))), -1)
    for p, row in enumerate(rows):
        others[p, : len(row)] = row
    return others


def influences(setup: Setup, params: Sequence[Any], turn: Turn, others: np.ndarray) -> Float[np.ndarray, "agent node group"]:
    """Return the influence of what was read at each node on each completion there; 0 at nodes without siblings.

    It is exactly 0 where all messages are equal: the same prompt is not scored again, because rounding may depend on the place
    of a row in its batch."""
    nodes = np.arange(len(turn.items))
    own = logprobs_under(setup, params, turn, nodes)
    ratios = np.zeros(own.shape)  # sum of pi(y|m'_k) / pi(y|m)
    for other in others.T:
        rows = np.where(other >= 0, other, nodes)
        difference = logprobs_under(setup, params, turn, rows) - own
        for agent, (ids, lengths) in enumerate(to_agents(setup.team, turn.encoded)):
            width = np.arange(ids.shape[-1])
            read = np.where(width < np.asarray(lengths)[:, None], ids, -1)
            difference[agent, (read[rows] == read[nodes]).all(1)] = 0
        ratios += np.where(other[:, None] >= 0, np.exp(difference), 0)
    count = (others >= 0).sum(1)[:, None]
    with np.errstate(divide="ignore"):
        return np.where(count > 0, -np.log(np.where(count > 0, ratios, 1) / np.maximum(count, 1)), 0)


def logprobs_under(setup: Setup, params: Sequence[Any], turn: Turn, nodes: np.ndarray) -> Float[np.ndarray, "agent node group"]:
    """Return the log-probability of each completion under the prompt of another node, `nodes` [P]."""
    team, algorithm, count = setup.team, setup.algorithm, len(turn.items)
    padded = np.concatenate([nodes, np.zeros(turn.padded_size - count, int)])
    stacks = []
    for spec, weights, (ids, lengths), done in zip(team.stacks, params, turn.encoded, turn.completions, strict=True):
        rows = (np.arange(len(spec.members[0]))[:, None] * turn.padded_size + padded).reshape(-1)  # of all roles
        prompts = np.asarray(ids)[:, rows], np.asarray(lengths)[:, rows]
        logprobs = on_stack(logprobs_at(algorithm.temperature or 1.0), weights, spec, *prompts, done.tokens, algorithm)
        stacks.append(np.where(done.action_mask, to_host(logprobs), 0).astype(float).sum(-1))
    return np.array(to_agents(team, stacks))[:, :count]


@cache  # one object for a temperature, so that it is compiled once
def logprobs_at(temperature: float) -> Callable[..., Float[Array, "prompt group token"]]:
    """Return the log-probabilities of tokens at a temperature, as a function for `on_stack`."""

    def logprobs(params: Any, weights: Any, model: ModelConfig, *rows: Array) -> Array:
        del params
        return score(weights, model, *rows, temperature=temperature, remat="full").logprobs

    return logprobs
