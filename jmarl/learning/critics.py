"""What completions were expected to get: values of critics, or the return of greedy completions; and what critics learn from.

A critic is a decoder with a second head (`objective.with_value_head`), trained like an agent but on the value loss alone.
`own`: one of every agent, beside it or as a head of the agent itself; it reads what the agent read. `central`: one of the team,
which reads the prompts of all agents ("[Agent 0] …", one a line) and as critic of type q their completions as well; it learns
the mean of the agents' returns and takes one step a batch.

Values are given once a completion, before it (v) or after it (q), or before each of its tokens (rows with the advantage `gae`).
Returns of several turns are lambda-returns over the values of the nodes (`returns.discounted`); within a completion the return
comes with its last token. Left out: own critics with another tokenizer than their agents'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import algorithm, option, shares_critic, value_kind
from jmarl.config import Learning, TrainConfig
from jmarl.envs.environment import Environment
from jmarl.learning.batches import chosen_rows, in_few_sizes, joined, one_a_prompt, positions
from jmarl.learning.objective import kl_penalty, logprobs_of, values_of, with_value_head
from jmarl.models import decoder, lora
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.tokenize import by_agent, decode, encode_prompts
from jmarl.models.sharding import apart, batch_shardings, mesh_of, over_agents
from jmarl.models.stack import COMPILER, map_own, part, per_agent, share_params, stack_params
from jmarl.randomness import GREEDY
from jmarl.rl.returns import credit, discounted
from jmarl.rollout.play import Rollout, Turn, credited, playing, to_batches
from jmarl.sampling.generate import Asking, bucket
from jmarl.sampling.scoring import hidden_states
from jmarl.team import StackSpec, Team
from jmarl.types import TRACES, Batch, StackState, TeamState


class Critics(NamedTuple):
    """What does not change about a team's critics."""

    specs: tuple[StackSpec, ...]  # of each stack its own, or one of the team; empty: there are none beside the agents
    learning: Learning


def make_critics(
    team: Team, params: Sequence[Any], learning: Learning, model: Agent | None = None, seed: int = 0
) -> tuple[Critics, list]:
    """The critics that an algorithm asks for, and the parameters of each stack of them: those of the agents, or of `model`,
    with a new head. params: the agents', which are copied; with LoRA their adapters are, and the base is shared. seed: of
    adapters over `model`."""
    row = algorithm(learning.algorithm)
    rate = learning.critic_learning_rate or learning.learning_rate
    once: dict[str, Any] = dict(num_epochs=1, num_minibatches=1) if row.critic == "central" else {}
    plain: dict[str, Any] = dict(kl_coef=0.0, kl_target=None, target_kl=None)
    of_critics = dataclasses.replace(learning, learning_rate=rate, **plain, **once)
    if row.critic is None or shares_critic(learning):
        if model is not None:
            raise ValueError(f"a critic model was given, but algorithm={learning.algorithm!r} has no critic beside its agents")
        return Critics((), of_critics), []
    if row.critic == "central":
        first = team.stacks[0]
        config, tokenizer = (first.config, first.tokenizer) if model is None else (model.config, model.tokenizer)
        weights = map_own(lambda x: part(x, slice(1)), params[0]) if model is None else of_model(model, 1, learning, seed)
        spec = StackSpec(config, tokenizer, (tuple(range(team.num_agents)),))
        return Critics((spec,), of_critics), [with_value_head(map_own(jnp.copy, weights))]
    if model is None:
        return Critics(team.stacks, of_critics), [with_value_head(map_own(jnp.copy, p)) for p in params]
    specs, weights = [], []
    for spec in team.stacks:
        if model.tokenizer.get_vocab() != spec.tokenizer.get_vocab():
            raise ValueError(
                f"the critic model {model.name!r} has another vocabulary than agents {spec.order}: an own critic reads its "
                "agent's tokens; a central one (maac, mappo) may be any model"
            )
        specs.append(dataclasses.replace(spec, config=model.config))
        weights.append(with_value_head(of_model(model, len(spec.members), learning, seed)))
    return Critics(tuple(specs), of_critics), weights


def of_model(model: Agent, count: int, learning: Learning, seed: int) -> Any:
    """Parameters [A, ...] of so many critics that start from a model; with LoRA new adapters over it."""
    if not learning.lora_rank:
        return stack_params([model.params] * count)
    params = [share_params([model.params])]
    return lora.models(params, [(model.config, count)], learning, seed, lora.OF_CRITICS)[0]


def trains(learning: Learning) -> str:
    """What an update of the agents trains, as `update.update_stack` names it."""
    return "both" if shares_critic(learning) else "policy"


@partial(jax.jit, static_argnames=("cfg", "dtype", "mode", "mesh"), compiler_options=COMPILER)
def _values(params, prompts, lengths, tokens, *, cfg, dtype, mode, mesh):
    TRACES["values"] += 1
    agents = tokens.shape[0]
    how = mode if mesh is None or apart(mesh, agents) else "vmap"

    def of_agent(params, prompts, lengths, tokens):
        weights = decoder.cast(params, jnp.dtype(dtype))
        return values_of(params, hidden_states(weights, cfg, prompts, lengths, tokens, "full")).reshape(tokens.shape)

    return over_agents(per_agent(of_agent, how), mesh, agents)(params, prompts, lengths, tokens)


def check_context(spec: StackSpec, lengths: np.ndarray, tokens: jax.Array) -> None:
    """Refuse more than a critic can read, which only one of another model than its agent's may be asked for."""
    longest, most = int(np.max(lengths)) + tokens.shape[-1] - 1, spec.config.max_positions
    if longest > most:
        raise ValueError(
            f"a critic reads up to {longest} tokens, more than its context of {most}: give one of a longer context"
        )


def value_stack(params: Any, spec: StackSpec, prompts, lengths, tokens, cfg: TrainConfig) -> jax.Array:
    """Values [A, P, G, T] by a stack of critics: before each of tokens [A, P, G, T] behind prompts [A, P, S]."""
    check_context(spec, lengths, tokens)
    mesh, arrays = mesh_of(params), (jnp.asarray(prompts), jnp.asarray(lengths), tokens)
    if mesh is not None:
        arrays = jax.device_put(arrays, batch_shardings(mesh, arrays))
    return _values(params, *arrays, cfg=spec.config, dtype=cfg.compute_dtype, mode=cfg.per_agent, mesh=mesh)


def judges_as_it_learns(learning: Learning) -> bool:
    """Whether the values of tokens are those of the pass in which their critic learns: where that is one step on the whole
    batch, without dropout. Own critics then learn first, and their agents from the values that they gave."""
    steps = learning.num_epochs * learning.num_minibatches * learning.micro_batches
    return value_kind(learning) == "token" and steps == 1 and not learning.lora_dropout


def penalises(learning: Learning) -> bool:
    """Whether the KL penalty of each token is a reward that a critic expects as well: in rows with values of tokens, as in
    InstructGPT (arXiv 2203.02155). Other rows take the sum of a completion's from its return, in the agent's advantage alone,
    which no value of a prompt biases."""
    return value_kind(learning) == "token" and learning.kl_coef > 0 and learning.kl_in == "reward"


@partial(jax.jit, static_argnames=("cfg", "learning", "mode", "mesh"), compiler_options=COMPILER)
def _penalised(reference, kl_coef, batch, *, cfg, learning, mode, mesh):
    TRACES["penalties"] += 1
    agents = batch.tokens.shape[0]
    how = mode if mesh is None or apart(mesh, agents) else "vmap"

    def of_agent(reference, kl_coef, batch):
        ref = logprobs_of(reference, batch, cfg, learning)
        return ref, kl_penalty(batch, ref, batch.action_mask & jnp.isfinite(batch.rewards)[..., None], kl_coef, learning)

    return over_agents(per_agent(of_agent, how), mesh, agents)(reference, kl_coef, batch)


def penalised(batch: Batch, stack: StackState, spec: StackSpec, cfg: TrainConfig) -> Batch:
    """A stack's batch with the reference's log-probabilities and the KL penalty of each token: made once, before the update, by
    the coefficient of the moment, for agents and critics alike."""
    mesh = mesh_of(stack.params)
    if mesh is not None:
        batch = jax.device_put(batch, batch_shardings(mesh, batch))
    static: dict[str, Any] = dict(cfg=spec.config, learning=cfg.learning(), mode=cfg.per_agent, mesh=mesh)
    reference = stack.reference if stack.base is None else stack.base  # LoRA's with its adapters off
    ref, penalty = _penalised(reference, stack.running.kl_coef, batch, **static)
    return batch._replace(ref_logprobs=ref, penalty=penalty)


def playing_greedily(
    team: Team, items: Sequence[dict], env: Environment, cfg: TrainConfig, step: int, rollout: Rollout
) -> Asking[tuple[np.ndarray, ...]]:
    """The baseline of ReMax (arXiv 2310.10505): of each turn of a rollout [N, P, G], what the greedy episode on a node's item
    returns from that turn on; 0 where it was over by then, NaN (no baseline: no advantage) where a reward of it was invalid. An
    environment whose `reset` is random starts it anew, so that the baseline is another draw's. A generator as `playing` is."""
    settings = dataclasses.replace(cfg.sampling(), temperature=0.0)
    episodes = dataclasses.replace(cfg.episodes(), branching="chain", joint_mode="aligned")
    how: dict[str, Any] = dict(seed=cfg.seed, step=step, group=1, purpose=GREEDY)
    greedy = yield from playing(team, items, env, settings, episodes, **how)
    expected, invalid = [], np.zeros(len(items))
    for t, (turn, returns) in enumerate(zip(rollout.turns, rollout.returns, strict=True)):
        of_item = np.tile(invalid, (team.num_agents, 1))
        if t < len(greedy.turns):
            of_item[:, greedy.turns[t].items] = greedy.joint_returns[t][:, 0].T
            invalid = np.where(np.isfinite(of_item).all(0), 0, np.nan)  # also of the turns that it would have had
        expected.append(np.broadcast_to(of_item[:, turn.items, None], returns.shape))
    return tuple(expected)


def judge(team: Team, critics: Critics, state: TeamState, rollout: Rollout, cfg: TrainConfig) -> tuple:
    """Batches of the stacks and of the critics, with what was expected of every completion in them; without it where critics
    say so as they learn (`judges_as_it_learns`)."""
    row, learning = algorithm(cfg.algorithm), cfg.learning()
    if row.critic is None:
        return to_batches(team, rollout, row.grouping, rollout.expected), ()
    if value_kind(learning) == "token":
        return judge_tokens(team, critics, state, rollout, cfg)
    if row.critic == "central":
        return judge_jointly(team, critics.specs[0], state.critics[0], rollout, cfg)
    shared, kind = shares_critic(learning), value_kind(learning)
    judges, specs = (state.stacks, team.stacks) if shared else (state.critics, critics.specs)
    values = [own_values(team, judges, specs, turn, kind, cfg) for turn in rollout.turns]
    played, _ = with_returns(rollout, [of_turn.mean(-1) for of_turn in values], cfg)
    batches = to_batches(team, played, values=values)
    read = tuple(positions(batch, kind, cut=not shared) for batch in batches)
    return (read, ()) if shared else (batches, read)


def judge_tokens(team: Team, critics: Critics, state: TeamState, rollout: Rollout, cfg: TrainConfig) -> tuple:
    """`judge` for rows with a value of every token: critics and agents learn from the same batches."""
    learning, batches = cfg.learning(), []
    shared = shares_critic(learning)
    judges, specs = (state.stacks, team.stacks) if shared else (state.critics, critics.specs)
    each = zip(specs, judges, team.stacks, state.stacks, to_batches(team, rollout), strict=True)
    for judge_spec, of, spec, own, batch in each:
        if judges_as_it_learns(learning):
            check_context(judge_spec, batch.prompt_lengths, batch.tokens)
        else:
            read = batch.prompts, batch.prompt_lengths, batch.tokens
            batch = batch._replace(values=value_stack(lora.model_of(of), judge_spec, *read, cfg))
        known = own.reference is not None or own.base is not None  # not of a frozen stack
        batches.append(penalised(batch, own, spec, cfg) if penalises(learning) and known else batch)
    return tuple(batches), () if shared else tuple(batches)


def judge_jointly(team: Team, spec: StackSpec, of: StackState, rollout: Rollout, cfg: TrainConfig) -> tuple:
    """`judge` for a central critic, which reads what all agents read."""
    kind = value_kind(cfg.learning())
    texts = [joint_text(team, spec, turn, kind, cfg) for turn in rollout.turns]
    of_joint = [joint_values(of, spec, text, kind, cfg) for text in texts]
    values, nodes = _of_team(rollout, of_joint)
    played, targets = with_returns(rollout, nodes, cfg)
    most = [turn.most for turn in rollout.turns]
    return to_batches(team, played, values=values), (central_batch(texts, targets, of_joint, most),)


def with_returns(rollout: Rollout, nodes: Sequence[np.ndarray], cfg: TrainConfig) -> tuple[Rollout, list[np.ndarray]]:
    """A rollout with lambda-returns over the values [N, P] of each turn's nodes, and the targets of its joint actions. Where an
    agent does not act its values say nothing."""
    row = algorithm(cfg.algorithm)
    lam = option("gae_lambda", cfg.gae_lambda, row)
    if row.critic == "central" and lam < 1:
        check_joint(rollout, lam)
    arrays = [turn.rewards for turn in rollout.turns], [turn.parents for turn in rollout.turns]
    if row.critic == "own":
        nodes = [np.where(turn.acts, v, np.nan) for v, turn in zip(nodes, rollout.turns, strict=True)]
    targets = discounted(*arrays, cfg.gamma, [v.T for v in nodes], lam)
    returns = [credited(of, turn) for of, turn in zip(targets, rollout.turns, strict=True)]
    return rollout._replace(returns=tuple(returns)), targets


def check_joint(rollout: Rollout, lam: float) -> None:
    """A central critic knows the team's mean return: in place of what follows for one agent it would be wrong."""
    rewards = [np.nan_to_num(turn.rewards) for turn in rollout.turns]
    if len(rewards) > 1 and any((of_turn != of_turn[..., :1]).any() for of_turn in rewards):
        raise ValueError(
            f"gae_lambda={lam} with a central critic, several turns and rewards that differ from agent to agent: its values "
            "are of the team's mean; set gae_lambda to 1, or choose a row with own critics"
        )


def own_values(team: Team, judges: Sequence[StackState], specs: Sequence[StackSpec], turn: Turn, kind: str, cfg) -> np.ndarray:
    """Values [N, P, G] of a turn's completions by critics of the agents' own; for type v one number a prompt."""
    values = np.zeros((team.num_agents, len(turn.items), len(turn.texts[0][0])))
    for i, (spec, of) in enumerate(zip(specs, judges, strict=True)):
        (prompts, lengths), done = turn.encoded[i], turn.completions[i]
        tokens = (
            jnp.zeros((*done.tokens.shape[:2], 1, 1), jnp.int32)
            if kind == "v"
            else jnp.pad(done.tokens, ((0, 0),) * 3 + ((0, 1),))
        )
        found = value_stack(lora.model_of(of), spec, prompts, lengths, tokens, cfg)
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


def joint_text(team: Team, spec: StackSpec, turn: Turn, kind: str, cfg: TrainConfig) -> JointText:
    """The prompts of all agents, and for a critic of type q their completions, as tokens of the central critic."""
    nodes, count = len(turn.items), min(bucket(len(turn.items), 1), turn.most)

    read = turn.prompts if cfg.history == "none" else conversations(team, turn)
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


def joint_values(of: StackState, spec: StackSpec, text: JointText, kind: str, cfg: TrainConfig) -> np.ndarray:
    """A central critic's values [P, J] of a turn's joint actions; for type v one number a node."""
    tokens, at = (text.tokens[:, :, :1], text.counts[:, :, :1]) if kind == "v" else (text.tokens, text.counts)
    found = value_stack(lora.model_of(of), spec, text.prompts, text.lengths, jnp.asarray(tokens), cfg)
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
        ways, parts = [part.rewards.shape[2] for part in parts], [one_a_prompt(part) for part in parts]
    each = zip(texts, ways, strict=True)
    used = np.concatenate([np.repeat(np.arange(text.lengths.shape[1]) < text.nodes, j) for text, j in each])[None]
    rows = in_few_sizes(used, sum(j * nodes for j, nodes in zip(ways, most, strict=True)), parts[0].rewards.shape[1])
    return chosen_rows(joined(parts) if len(parts) > 1 else parts[0], rows)
