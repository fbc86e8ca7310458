"""Compute the values of a rollout's completions, by critics or by greedy completions, and make the batches of the critics."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import Algorithm
from jmarl.config import Episodes, TrainConfig
from jmarl.envs.base import Environment
from jmarl.learning.batches import (
    concatenate_prompts,
    critic_batch,
    critic_positions,
    one_per_prompt,
    select_in_few_sizes,
    take_rows,
)
from jmarl.learning.critics import check_context, value_stack, with_penalty
from jmarl.learning.setup import Setup
from jmarl.memory import are_shapes
from jmarl.models import lora
from jmarl.models.hub.tokenize import by_agent, decode, encode_answer, encode_prompts
from jmarl.models.stack import to_host
from jmarl.objectives.policy import penalizes_tokens
from jmarl.randomness import GREEDY, Randomness
from jmarl.rl.returns import credit, discounted
from jmarl.rollout.make_batches import to_batches
from jmarl.rollout.play import credit_completions, play
from jmarl.rollout.turns import Rollout, Turn
from jmarl.sampling.generate import NO_LIMIT, Sampler, bucket
from jmarl.team import StackSpec, Team, to_agents
from jmarl.types import Batches, CriticBatch, StackState, TeamState


def greedy_baseline(
    sample: Sampler, team: Team, items: Sequence[dict], env: Environment, cfg: TrainConfig, step: int, rollout: Rollout
) -> tuple[np.ndarray, ...]:
    """Return the baseline of ReMax (arXiv 2310.10505), per turn [N, P, G].

    It is the return of the greedy episode on a node's item from that turn on: 0 if that episode was over by then, NaN (no
    baseline: no advantage) if one of its rewards was invalid. An environment with a random `reset` starts it anew, so that the
    baseline is of another draw.
    """
    settings = dataclasses.replace(cfg.sampling, temperature=0.0)
    episodes = dataclasses.replace(cfg.episodes, branching="chain", joint_mode="aligned")
    greedy = play(sample, team, items, env, settings, episodes, 1, Randomness(cfg.run.seed, step, GREEDY))
    baseline, invalid = [], np.zeros(len(items))
    for t, (turn, returns) in enumerate(zip(rollout.turns, rollout.returns, strict=True)):
        by_item = np.tile(invalid, (team.num_agents, 1))
        if t < len(greedy.turns):
            by_item[:, greedy.turns[t].items] = greedy.joint_returns[t][:, 0].T
            invalid = np.where(np.isfinite(by_item).all(0), 0, np.nan)  # also in turns that the greedy episode did not reach
        baseline.append(np.broadcast_to(by_item[:, turn.items, None], returns.shape))
    return tuple(baseline)


def batches_with_values(setup: Setup, state: TeamState, rollout: Rollout) -> Batches:
    """Return the batches of the stacks and of the critics, with the values of all completions.

    Values that are computed in the update of the critic (`reuses_values`) are left out. Of a state of shapes all values are 0,
    and the batch of a central critic is left out: its prompts are texts.
    """
    team, algorithm = setup.team, setup.algorithm
    kind = algorithm.value_kind
    if kind == "token":
        return batches_with_token_values(setup, state, rollout)
    if algorithm.critic_kind == "central":
        if are_shapes(state.critics):
            return Batches(to_batches(team, rollout, values=rollout.returns))
        return batches_with_joint_values(setup, state.critics[0], rollout)
    values = [own_values(setup, state, turn) for turn in rollout.turns]
    played, _ = with_returns(rollout, [x.mean(-1) for x in values], setup)
    batches = to_batches(team, played, values=values)
    if algorithm.critic_kind == "head":
        return Batches(tuple(critic_positions(batch, kind, prompts_only=False) for batch in batches))
    return Batches(batches, tuple(critic_positions(critic_batch(batch), kind, prompts_only=True) for batch in batches))


def own_critics(setup: Setup, state: TeamState) -> Iterable[tuple[StackSpec, StackState]]:
    """Return the stacks of critics of the agents' own: the agents themselves if they have value heads."""
    if setup.algorithm.critic_kind == "head":
        return zip(setup.team.stacks, state.stacks, strict=True)
    return zip(setup.critics, state.critics, strict=True)


def batches_with_token_values(setup: Setup, state: TeamState, rollout: Rollout) -> Batches:
    """Return `batches_with_values` for critics with a value of every token: agents and critics learn from the same batches."""
    team, algorithm, batches = setup.team, setup.algorithm, []
    stacks = zip(own_critics(setup, state), team.stacks, state.stacks, to_batches(team, rollout), strict=True)
    for (critic_spec, critic), spec, stack, batch in stacks:
        if algorithm.reuses_values:
            check_context(critic_spec, batch.prompt_lengths, batch.tokens)
        else:
            params = lora.model_of(critic)
            values = value_stack(params, critic_spec, batch.prompts, batch.prompt_lengths, batch.tokens, algorithm)
            batch = batch._replace(values=values)
        if penalizes_tokens(algorithm) and stack.frozen is not None:  # a stack that never learns has no reference
            batch = with_penalty(batch, stack, spec, algorithm)
        batches.append(batch)
    return Batches(tuple(batches), () if algorithm.critic_kind == "head" else tuple(map(critic_batch, batches)))


def batches_with_joint_values(setup: Setup, critic: StackState, rollout: Rollout) -> Batches:
    """Return `batches_with_values` for a central critic, which reads the prompts of all agents."""
    team, spec, kind = setup.team, setup.critics[0], setup.algorithm.value_kind
    texts = [joint_text(team, spec, turn, kind, setup.cfg.episodes) for turn in rollout.turns]
    action_values = [joint_values(critic, spec, text, setup.algorithm) for text in texts]
    values, node_values = values_of_agents(rollout, action_values)
    played, targets = with_returns(rollout, node_values, setup)
    max_nodes = [turn.max_nodes for turn in rollout.turns]
    return Batches(to_batches(team, played, values=values), (central_batch(texts, targets, action_values, max_nodes),))


def with_returns(rollout: Rollout, node_values: Sequence[np.ndarray], setup: Setup) -> tuple[Rollout, list[np.ndarray]]:
    """Return a rollout with lambda-returns, and the targets of its joint actions, per turn [P, J, N].

    node_values: per turn [N, P]. Values of inactive agents are ignored.
    """
    central, lam = setup.algorithm.critic_kind == "central", setup.algorithm.gae_lambda
    if central and lam < 1:
        check_joint(rollout, lam)
    rewards, parents = [turn.rewards for turn in rollout.turns], [turn.parents for turn in rollout.turns]
    if not central:
        node_values = [np.where(turn.acts, x, np.nan) for x, turn in zip(node_values, rollout.turns, strict=True)]
    targets = discounted(rewards, parents, setup.cfg.episodes.gamma, [x.T for x in node_values], lam)
    returns = [credit_completions(x, turn) for x, turn in zip(targets, rollout.turns, strict=True)]
    return rollout._replace(returns=tuple(returns)), targets


def check_joint(rollout: Rollout, lam: float) -> None:
    """Raise ValueError if agents have different rewards in several turns: a central critic knows the team's mean return, which
    is not what follows for one agent."""
    rewards = [np.nan_to_num(turn.rewards) for turn in rollout.turns]
    if len(rewards) > 1 and any((x != x[..., :1]).any() for x in rewards):
        raise ValueError(
            f"gae_lambda={lam} with a central critic, several turns and rewards that differ from agent to agent: its values "
            "are of the team's mean; set gae_lambda to 1, or start a new run of an algorithm with own critics"
        )


def own_values(setup: Setup, state: TeamState, turn: Turn) -> np.ndarray:
    """Return the values [N, P, G] of a turn's completions by the agents' own critics; for type v all G are equal."""
    stacks, algorithm, kind = [], setup.algorithm, setup.algorithm.value_kind
    critics = zip(own_critics(setup, state), turn.encoded, turn.completions, strict=True)
    for (spec, critic), (prompts, lengths), done in critics:
        if kind == "v":
            tokens = jnp.zeros((*done.tokens.shape[:2], 1, 1), jnp.int32)
        else:
            tokens = jnp.pad(done.tokens, ((0, 0),) * 3 + ((0, 1),))
        values = value_stack(lora.model_of(critic), spec, prompts, lengths, tokens, algorithm)
        if kind == "q":
            values = jnp.take_along_axis(values, done.action_mask.sum(-1, keepdims=True), -1)
        stacks.append(to_host(values[..., 0]))  # [A, R * P', G]
    values = np.array(to_agents(setup.team, stacks), float)[:, : len(turn.items)]
    return np.broadcast_to(values, (*values.shape[:2], turn.group_size))


class JointText(NamedTuple):
    """What a central critic reads of a turn: P' nodes (the last P' - P are padding), J joint actions."""

    prompts: np.ndarray  # [1, P', S]
    lengths: np.ndarray  # [1, P']
    tokens: np.ndarray  # [1, P', J, T]
    counts: np.ndarray  # [1, P', J] tokens of each joint action; its value is read after them
    nodes: int  # P


def joint_text(team: Team, spec: StackSpec, turn: Turn, kind: str, episodes: Episodes) -> JointText:
    """Return the prompts of all agents, and for a critic of type q their completions, as tokens of the central critic."""
    read = turn.prompts if episodes.history == "none" else conversations(team, turn)
    texts = [by_agent(node) for node in zip(*read, strict=True)]
    prompts = encode_prompts(
        spec.tokenizer, texts, NO_LIMIT, special=[()] * len(texts), stop=spec.stop
    )  # agents may have written them
    actions: list[list[list[int]]] = [[[] for _ in turn.joint] for _ in prompts]
    if kind == "q":
        for p in range(len(prompts)):
            joint = ["\n" + by_agent(turn.texts[n][p][g] for n, g in enumerate(action)) for action in turn.joint]
            actions[p] = [encode_answer(spec.tokenizer, text, special=()) for text in joint]
    longest, room = max(len(row) for node in actions for row in node), spec.config.context
    for p, row in enumerate(prompts):
        if len(row) + longest + 1 > room:
            raise ValueError(
                f"what the central critic reads at prompt {p} ({texts[p][:40]!r}...) has {len(row)} tokens"
                + (f" and up to {longest} of completions" if longest else "")
                + f", more than its context of {room}: write shorter prompts, set history=none, or start a new run with a "
                "critic of a longer context"
            )
    ids = np.zeros((turn.padded_size, min(bucket(max(map(len, prompts))), room)), np.int32)
    width = min(bucket(longest + 1, 1), room + 1 - max(map(len, prompts)))
    tokens = np.zeros((len(ids), len(turn.joint), width), np.int32)
    lengths, counts = np.ones(len(ids), np.int32), np.zeros(tokens.shape[:2], np.int32)
    for p, row in enumerate(prompts):
        ids[p, : len(row)], lengths[p] = row, len(row)
        for j, action in enumerate(actions[p]):
            tokens[p, j, : len(action)], counts[p, j] = action, len(action)
    return JointText(ids[None], lengths[None], tokens[None], counts[None], len(prompts))


def conversations(team: Team, turn: Turn) -> list[list[str]]:
    """Return all that the agents have read so far, [N][P]."""
    agents = to_agents(team, turn.encoded)
    rows = [[ids[p, : lengths[p]].tolist() for p in range(len(turn.items))] for ids, lengths in agents]
    return [decode(spec.tokenizer, ids) for spec, ids in zip(team.agent_specs, rows, strict=True)]


def joint_values(critic: StackState, spec: StackSpec, text: JointText, algorithm: Algorithm) -> np.ndarray:
    """Return a central critic's values [P, J] of a turn's joint actions; for type v all J are equal."""
    tokens, counts = text.tokens, text.counts
    if algorithm.value_kind == "v":
        tokens, counts = tokens[:, :, :1], counts[:, :, :1]
    values = value_stack(lora.model_of(critic), spec, text.prompts, text.lengths, jnp.asarray(tokens), algorithm)
    values = to_host(jnp.take_along_axis(values, counts[..., None], -1)[0, : text.nodes, :, 0])
    return np.broadcast_to(values, (text.nodes, text.counts.shape[2]))


def values_of_agents(rollout: Rollout, action_values: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return per turn the values [N, P, G] of completions and [N, P] of nodes, from those of joint actions [P, J]."""
    values, node_values = [], []
    for x, turn in zip(action_values, rollout.turns, strict=True):
        agents = turn.joint.shape[1]
        values.append(credit(np.broadcast_to(x[..., None], (*x.shape, agents)), turn.joint, turn.group_size))
        node_values.append(np.broadcast_to(x.mean(-1), (agents, len(x))))
    return values, node_values


def central_batch(
    texts: Sequence[JointText], targets: Sequence[np.ndarray], values: Sequence[np.ndarray], max_nodes: Sequence[int]
) -> CriticBatch:
    """Return what a central critic learns from: the target of a joint action is the mean of the agents' returns.

    Args:
        texts: what it reads, per turn.
        targets: per turn [P, J, N].
        values: per turn [P, J], its values before the update.
        max_nodes: per turn the largest number of nodes.
    """
    size, parts = max(text.tokens.shape[-1] for text in texts), []
    for text, target, value in zip(texts, targets, values, strict=True):
        rewards = np.full(text.counts.shape, np.nan, np.float32)
        rewards[0, : text.nodes] = target.mean(-1)
        old = np.zeros(text.counts.shape, np.float32)
        old[0, : text.nodes] = value
        tokens = np.pad(text.tokens, ((0, 0),) * 3 + ((0, size - text.tokens.shape[-1]),))
        mask, no_penalty = np.arange(size) < text.counts[..., None], np.zeros((*old.shape, 1), np.float32)
        parts.append(CriticBatch(text.prompts, text.lengths, tokens, mask, rewards, old[..., None], no_penalty))
    rows_per_node = [1] * len(parts)
    if len({part.rewards.shape[2] for part in parts}) > 1:
        rows_per_node, parts = [part.rewards.shape[2] for part in parts], [one_per_prompt(part) for part in parts]
    played = [np.arange(text.lengths.shape[1]) < text.nodes for text in texts]
    used = np.concatenate([np.repeat(x, n) for x, n in zip(played, rows_per_node, strict=True)])[None]
    largest = sum(n * nodes for n, nodes in zip(rows_per_node, max_nodes, strict=True))
    rows = select_in_few_sizes(used, largest, parts[0].rewards.shape[1])
    return take_rows(concatenate_prompts(parts) if len(parts) > 1 else parts[0], rows)
