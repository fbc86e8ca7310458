"""Values of the completions of a rollout, by critics or by greedy completions, and the batches that critics learn from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import Algorithm
from jmarl.config import Episodes, TrainConfig
from jmarl.envs.base import Environment
from jmarl.learning.batches import concatenate_prompts, critic_positions, one_per_prompt, select_in_few_sizes, take_rows
from jmarl.learning.critics import check_context, penalizes_tokens, reuses_values, value_stack, with_penalty
from jmarl.learning.setup import Setup
from jmarl.models import lora
from jmarl.models.hub.tokenize import by_agent, decode, encode_prompts
from jmarl.randomness import GREEDY
from jmarl.rl.returns import credit, discounted
from jmarl.rollout.play import Rollout, Turn, credited, play, to_batches
from jmarl.sampling.generate import Sampler, bucket
from jmarl.team import StackSpec, Team
from jmarl.types import Batch, StackState, TeamState


def greedy_baseline(
    sample: Sampler, team: Team, items: Sequence[dict], env: Environment, cfg: TrainConfig, step: int, rollout: Rollout
) -> tuple[np.ndarray, ...]:
    """The baseline of ReMax (arXiv 2310.10505): of each turn of a rollout [N, P, G], what the greedy episode on a node's item
    returns from that turn on; 0 where it was over by then, NaN (no baseline: no advantage) where a reward of it was invalid. An
    environment whose `reset` is random starts it anew, so that the baseline is another draw's."""
    settings = dataclasses.replace(cfg.sampling, temperature=0.0)
    episodes = dataclasses.replace(cfg.episodes, branching="chain", joint_mode="aligned")
    how: dict[str, Any] = dict(seed=cfg.run.seed, step=step, group=1, purpose=GREEDY)
    greedy = play(sample, team, items, env, settings, episodes, **how)
    expected, invalid = [], np.zeros(len(items))
    for t, (turn, returns) in enumerate(zip(rollout.turns, rollout.returns, strict=True)):
        of_item = np.tile(invalid, (team.num_agents, 1))
        if t < len(greedy.turns):
            of_item[:, greedy.turns[t].items] = greedy.joint_returns[t][:, 0].T
            invalid = np.where(np.isfinite(of_item).all(0), 0, np.nan)  # also of the turns that it would have had
        expected.append(np.broadcast_to(of_item[:, turn.items, None], returns.shape))
    return tuple(expected)


def judge(setup: Setup, state: TeamState, rollout: Rollout) -> tuple[Sequence[Batch], Sequence[Batch]]:
    """Return the batches of the stacks and of the critics, with the expected return of every completion in them; without it
    where it is computed in the update of the critic (`reuses_values`)."""
    team, algorithm = setup.team, setup.algorithm
    row, kind = algorithm.row, algorithm.value_kind
    if row.critic is None:
        return to_batches(team, rollout, row.grouping, rollout.expected), ()
    if kind == "token":
        return judge_tokens(setup, state, rollout)
    if row.critic == "central":
        return judge_jointly(setup, state.critics[0], rollout)
    shared = algorithm.has_value_head
    judges, specs = (state.stacks, team.stacks) if shared else (state.critics, setup.critics.specs)
    values = [own_values(team, judges, specs, turn, algorithm) for turn in rollout.turns]
    played, _ = with_returns(rollout, [turn_values.mean(-1) for turn_values in values], setup)
    batches = to_batches(team, played, values=values)
    critic_batches = tuple(critic_positions(batch, kind, prompts_only=not shared) for batch in batches)
    return (critic_batches, ()) if shared else (batches, critic_batches)


def judge_tokens(setup: Setup, state: TeamState, rollout: Rollout) -> tuple[Sequence[Batch], Sequence[Batch]]:
    """`judge` for rows with a value of every token: critics and agents learn from the same batches."""
    team, algorithm = setup.team, setup.algorithm
    shared, batches = algorithm.has_value_head, []
    judges, specs = (state.stacks, team.stacks) if shared else (state.critics, setup.critics.specs)
    stacks = zip(specs, judges, team.stacks, state.stacks, to_batches(team, rollout), strict=True)
    for critic_spec, critic, spec, stack, batch in stacks:
        if reuses_values(algorithm):
            check_context(critic_spec, batch.prompt_lengths, batch.tokens)
        else:
            params = lora.model_of(critic)
            values = value_stack(params, critic_spec, batch.prompts, batch.prompt_lengths, batch.tokens, algorithm)
            batch = batch._replace(values=values)
        has_reference = stack.reference is not None or stack.base is not None  # a frozen stack has none
        if penalizes_tokens(algorithm) and has_reference:
            batch = with_penalty(batch, stack, spec, algorithm)
        batches.append(batch)
    return tuple(batches), () if shared else tuple(batches)


def judge_jointly(setup: Setup, critic: StackState, rollout: Rollout) -> tuple[Sequence[Batch], Sequence[Batch]]:
    """`judge` for a central critic, which reads what all agents read."""
    team, spec, kind = setup.team, setup.critics.specs[0], setup.algorithm.value_kind
    texts = [joint_text(team, spec, turn, kind, setup.cfg.episodes) for turn in rollout.turns]
    joint = [joint_values(critic, spec, text, setup.algorithm) for text in texts]
    values, nodes = _of_team(rollout, joint)
    played, targets = with_returns(rollout, nodes, setup)
    most = [turn.most for turn in rollout.turns]
    return to_batches(team, played, values=values), (central_batch(texts, targets, joint, most),)


def with_returns(rollout: Rollout, nodes: Sequence[np.ndarray], setup: Setup) -> tuple[Rollout, list[np.ndarray]]:
    """Return a rollout with lambda-returns over the values [N, P] of each turn's nodes, and the targets of its joint actions.
    Values of an agent that does not act are ignored."""
    row, lam = setup.algorithm.row, setup.algorithm.gae_lambda
    if row.critic == "central" and lam < 1:
        check_joint(rollout, lam)
    rewards, parents = [turn.rewards for turn in rollout.turns], [turn.parents for turn in rollout.turns]
    if row.critic == "own":
        nodes = [np.where(turn.acts, v, np.nan) for v, turn in zip(nodes, rollout.turns, strict=True)]
    targets = discounted(rewards, parents, setup.cfg.episodes.gamma, [v.T for v in nodes], lam)
    returns = [credited(joint, turn) for joint, turn in zip(targets, rollout.turns, strict=True)]
    return rollout._replace(returns=tuple(returns)), targets


def check_joint(rollout: Rollout, lam: float) -> None:
    """A central critic knows the team's mean return: in place of what follows for one agent it would be wrong."""
    rewards = [np.nan_to_num(turn.rewards) for turn in rollout.turns]
    if len(rewards) > 1 and any((of_turn != of_turn[..., :1]).any() for of_turn in rewards):
        raise ValueError(
            f"gae_lambda={lam} with a central critic, several turns and rewards that differ from agent to agent: its values "
            "are of the team's mean; set gae_lambda to 1, or choose a row with own critics"
        )


def own_values(
    team: Team, judges: Sequence[StackState], specs: Sequence[StackSpec], turn: Turn, algorithm: Algorithm
) -> np.ndarray:
    """Values [N, P, G] of a turn's completions by critics of the agents' own; for type v one number a prompt."""
    values, kind = np.zeros((team.num_agents, len(turn.items), len(turn.texts[0][0]))), algorithm.value_kind
    for i, (spec, of) in enumerate(zip(specs, judges, strict=True)):
        (prompts, lengths), done = turn.encoded[i], turn.completions[i]
        tokens = (
            jnp.zeros((*done.tokens.shape[:2], 1, 1), jnp.int32)
            if kind == "v"
            else jnp.pad(done.tokens, ((0, 0),) * 3 + ((0, 1),))
        )
        found = value_stack(lora.model_of(of), spec, prompts, lengths, tokens, algorithm)
        if kind == "q":
            found = jnp.take_along_axis(found, done.action_mask.sum(-1, keepdims=True), -1)
        found = jax.device_get(found[..., 0])  # [A, roles * P', G]
        values[spec.order] = found.reshape(len(spec.order), -1, found.shape[-1])[:, : len(turn.items)]
    return values


class JointText(NamedTuple):
    """What a central critic reads of a turn: P' nodes (those behind the first P are padding), J joint actions."""

    prompts: np.ndarray  # [1, P', S]
    lengths: np.ndarray  # [1, P']
    tokens: np.ndarray  # [1, P', J, T]
    counts: np.ndarray  # [1, P', J] tokens of each joint action; its value stands behind them
    nodes: int  # P


def joint_text(team: Team, spec: StackSpec, turn: Turn, kind: str, episodes: Episodes) -> JointText:
    """The prompts of all agents, and for a critic of type q their completions, as tokens of the central critic."""
    nodes, count = len(turn.items), min(bucket(len(turn.items), 1), turn.most)

    read = turn.prompts if episodes.history == "none" else conversations(team, turn)
    texts = [by_agent(of_node) for of_node in zip(*read, strict=True)]
    said: list[list[list[int]]] = [[[] for _ in turn.joint] for _ in range(nodes)]
    if kind == "q":
        for p in range(nodes):
            joint = ["\n" + by_agent(turn.texts[n][p][g] for n, g in enumerate(action)) for action in turn.joint]
            said[p] = [spec.tokenizer.encode(text, add_special_tokens=False) for text in joint]
    longest = max(len(row) for of_node in said for row in of_node)
    prompts = encode_prompts(spec.tokenizer, texts, 2**30)
    for p, row in enumerate(prompts):
        if len(row) + longest + 1 > spec.config.max_positions:
            raise ValueError(
                f"what the central critic reads at prompt {p} ({texts[p][:40]!r}...) has {len(row)} tokens"
                + (f" and up to {longest} of completions" if longest else "")
                + f", more than its context of {spec.config.max_positions}: give a critic of a longer context, shorter "
                "prompts, or history=none"
            )
    ids = np.zeros((count, min(bucket(max(map(len, prompts))), spec.config.max_positions)), np.int32)
    width = min(bucket(longest + 1, 1), spec.config.max_positions + 1 - max(map(len, prompts)))
    tokens = np.zeros((count, len(turn.joint), width), np.int32)
    lengths, counts = np.ones(count, np.int32), np.zeros(tokens.shape[:2], np.int32)
    for p, row in enumerate(prompts):
        ids[p, : len(row)], lengths[p] = row, len(row)
        for j, joint in enumerate(said[p]):
            tokens[p, j, : len(joint)], counts[p, j] = joint, len(joint)
    return JointText(ids[None], lengths[None], tokens[None], counts[None], nodes)


def conversations(team: Team, turn: Turn) -> list[list[str]]:
    """All that the agents read so far, [N][P]."""
    read: list[Any] = [None] * team.num_agents
    for spec, (ids, lengths) in zip(team.stacks, turn.encoded, strict=True):
        rows, sizes = ids.reshape(len(spec.order), -1, ids.shape[-1]), lengths.reshape(len(spec.order), -1)
        for agent, of_agent, n in zip(spec.order, rows, sizes, strict=True):
            ends = zip(of_agent[: len(turn.items)], n, strict=False)
            read[agent] = decode(spec.tokenizer, [row[:end].tolist() for row, end in ends])
    return read


def joint_values(of: StackState, spec: StackSpec, text: JointText, algorithm: Algorithm) -> np.ndarray:
    """A central critic's values [P, J] of a turn's joint actions; for type v one number a node."""
    tokens, at = (text.tokens[:, :, :1], text.counts[:, :, :1]) if algorithm.value_kind == "v" else (text.tokens, text.counts)
    found = value_stack(lora.model_of(of), spec, text.prompts, text.lengths, jnp.asarray(tokens), algorithm)
    found = jax.device_get(jnp.take_along_axis(found, at[..., None], -1)[0, : text.nodes, :, 0])
    return np.broadcast_to(found, (text.nodes, text.counts.shape[2]))


def _of_team(rollout: Rollout, of_joint: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of each turn: values [N, P, G] of completions and [N, P] of nodes, from those of joint actions [P, J]."""
    values, nodes = [], []
    for of_turn, turn in zip(of_joint, rollout.turns, strict=True):
        agents, group = turn.joint.shape[1], len(turn.texts[0][0])
        each = np.broadcast_to(of_turn[..., None], (*of_turn.shape, agents))
        values.append(credit(each, turn.joint, group))
        nodes.append(np.broadcast_to(of_turn.mean(-1), (agents, len(of_turn))))
    return values, nodes


def central_batch(
    texts: Sequence[JointText], targets: Sequence[np.ndarray], of_joint: Sequence[np.ndarray], most: Sequence[int]
) -> Batch:
    """What a central critic learns from: of each joint action [P, J] the mean of the agents' returns. most: nodes that each
    turn could have."""
    size, parts = max(text.tokens.shape[-1] for text in texts), []
    for text, of_turn, values in zip(texts, targets, of_joint, strict=True):
        filled = np.full(text.counts.shape, np.nan, np.float32)
        filled[0, : text.nodes] = of_turn.mean(-1)
        old = np.zeros(text.counts.shape, np.float32)
        old[0, : text.nodes] = values
        tokens = np.pad(text.tokens, ((0, 0),) * 3 + ((0, size - text.tokens.shape[-1]),))
        mask = np.arange(size) < text.counts[..., None]
        zeros, ended, groups = np.zeros(tokens.shape, np.float32), np.ones(filled.shape, bool), np.zeros(filled.shape, np.int32)
        part = Batch(text.prompts, text.lengths, tokens, mask, zeros, ended, filled, groups)  # type: ignore[arg-type]
        parts.append(part._replace(values=old[..., None]))
    ways = [1] * len(parts)
    if len({part.rewards.shape[2] for part in parts}) > 1:
        ways, parts = [part.rewards.shape[2] for part in parts], [one_per_prompt(part) for part in parts]
    each = zip(texts, ways, strict=True)
    used = np.concatenate([np.repeat(np.arange(text.lengths.shape[1]) < text.nodes, j) for text, j in each])[None]
    rows = select_in_few_sizes(used, sum(j * nodes for j, nodes in zip(ways, most, strict=True)), parts[0].rewards.shape[1])
    return take_rows(concatenate_prompts(parts) if len(parts) > 1 else parts[0], rows)
