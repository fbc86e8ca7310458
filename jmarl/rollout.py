"""Play one step: prompts to completions to rewards, and from there to the batches that the stacks learn from.

Here the device world (sampling) and the host world (text, rewards) meet. Left out: several turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl import sampling
from jmarl.config import Sampling
from jmarl.rewards import RewardFunction
from jmarl.sharding import apart, batch_shardings, mesh_of, over_agents
from jmarl.stack import COMPILER
from jmarl.team import Team
from jmarl.text import decode, encode_prompts
from jmarl.types import TRACES, Batch, Completions

Formatter = Callable[[dict], str]
TRAIN, EVAL = 0, 1  # purposes of random keys
FEW_ROWS = 8  # up to so many, agents that have a CPU core each decode faster from panels of weights


class Rollout(NamedTuple):
    """One step as the host sees it. N agents, P prompts, G completions a prompt, J joint actions."""

    prompts: list[list[str]]  # [N][P]
    texts: list[list[list[str]]]  # [N][P][G]
    joint: np.ndarray  # [J, N] which completion g of each agent; every prompt has J of them
    rewards: np.ndarray  # [P, J, N] after processing; NaN where invalid
    parts: dict[str, np.ndarray]  # reward function -> [P * J] raw values
    returns: np.ndarray  # [N, P, G] credited to each completion; NaN where invalid
    invalid: int  # joint actions whose reward was invalid
    fault: str  # what was wrong with the first of them, or with a value that was replaced; empty: nothing
    encoded: tuple[tuple[np.ndarray, np.ndarray], ...]  # per stack: prompts [A, roles * P, S] and lengths
    completions: tuple[Completions, ...]  # per stack, on the device


def bucket(n: int, smallest: int = 16) -> int:
    """The smallest power of two that holds n (at least `smallest`): few shapes, few compiles."""
    return max(smallest, 1 << (n - 1).bit_length())


@partial(jax.jit, static_argnames=("cfg", "settings", "roles", "group", "mesh"), compiler_options=COMPILER)
def sample_stack(
    params, prompts, lengths, step, agents, prompt_ids, stop, *, cfg, settings, seed, stack, roles, group, purpose, mesh=None
):
    """`sampling.sample` with keys made inside. prompts [A, roles * P, S] and their lengths [A, roles * P]; agents [A, roles]
    team indices; prompt_ids [P]; stop [n] ids. Returns `Completions` [A, roles * P, G, T].

    What only the keys depend on (seed, step, stack, purpose) is traced: another seed is no other program.
    """
    TRACES["sample"] += 1
    keys = sampling.row_keys(seed, step, stack, agents.reshape(-1), prompt_ids, group, purpose)
    keys = keys.reshape(prompts.shape[0], roles * prompt_ids.shape[0], group)
    if mesh is not None:  # rows over `data`, as in the update
        rows = (prompts, lengths, keys)
        prompts, lengths, keys = jax.lax.with_sharding_constraint(rows, batch_shardings(mesh, rows))

    few = prompts.shape[1] * group <= FEW_ROWS and settings.compute_dtype == "float32"
    spread = mesh is not None and mesh.size > 1 and apart(mesh, prompts.shape[0])  # a device alone has all cores
    cut = few and spread and jax.default_backend() == "cpu"

    def of_device(params, prompts, lengths, keys):
        return sampling.sample(params, cfg, settings, prompts, lengths, keys, stop, cut)

    return over_agents(of_device, mesh, prompts.shape[0])(params, prompts, lengths, keys)


def joint_actions(mode: str, num_agents: int, group: int) -> np.ndarray:
    """[J, N]: aligned (g, g, …), J = G; cross: all G^N tuples."""
    if mode == "aligned":
        return np.repeat(np.arange(group)[:, None], num_agents, 1)
    return np.array(list(itertools.product(range(group), repeat=num_agents)))


def credit(rewards: np.ndarray, joint: np.ndarray, group: int, how: str = "mean") -> np.ndarray:
    """Returns [N, P, G] of rewards [P, J, N]: of the joint actions that contain completion g of agent a, the mean (or the
    sum, which grows with G^(N-1)); invalid ones (NaN) do not count, and where all are invalid the result is NaN."""
    member = joint[:, :, None] == np.arange(group)  # [J, N, G]
    valid = np.isfinite(rewards)
    total = np.einsum("pjn,jng->npg", np.where(valid, rewards, 0.0), member.astype(float))
    count = np.einsum("pjn,jng->npg", valid.astype(float), member.astype(float))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(count > 0, total / count if how == "mean" else total, np.nan)


def encode(team: Team, prompts: Sequence[Sequence[str]], settings: Sampling, chat: bool) -> tuple:
    """Each stack's prompts [A, roles * P, S] and lengths [A, roles * P], padded on the right to a bucket."""
    encoded = []
    for spec in team.stacks:
        rows = [
            encode_prompts(spec.tokenizer, prompts[i], spec.config.max_positions, settings.max_new_tokens, chat)
            for i in spec.order
        ]
        flat = [row for agent in rows for row in agent]
        width = min(bucket(max(map(len, flat))), spec.config.max_positions)
        ids = np.full((len(flat), width), spec.stop[0], np.int32)
        for i, row in enumerate(flat):
            ids[i, : len(row)] = row
        lengths = np.array([len(row) for row in flat], np.int32)
        a = len(spec.members)
        encoded.append((ids.reshape(a, -1, width), lengths.reshape(a, -1)))
    return tuple(encoded)


def sample_team(
    team, params: Sequence[Any], encoded, settings, *, seed, step, group, prompt_ids, purpose=TRAIN, call: Any = sample_stack
):
    """Completions of every stack; prompt_ids [P] tell prompts apart in the random keys. call: `sample_stack`, or
    `sample_stack.lower` for the programs alone."""
    out = []
    for i, (spec, weights, (ids, lengths)) in enumerate(zip(team.stacks, params, encoded, strict=True)):
        agents = jnp.array(spec.members)
        static = dict(cfg=spec.config, settings=settings, seed=seed, stack=i, roles=agents.shape[1], group=group)
        stop = jnp.array(spec.stop, jnp.int32)
        arrays = (jnp.asarray(ids), jnp.asarray(lengths), step, agents, jnp.asarray(prompt_ids), stop)
        out.append(call(weights, *arrays, **static, purpose=purpose, mesh=mesh_of(weights)))
    return tuple(out)


def sample_items(team, params: Sequence[Any], items, formatters: Sequence[Formatter], settings: Sampling, *, chat: bool, **how):
    """`sample_team` on items: prompts [N][P], each stack's encoded prompts, and what `sample_team` returns."""
    prompts = [[formatter(dict(item)) for item in items] for formatter in formatters]
    encoded = encode(team, prompts, settings, chat)
    return prompts, encoded, sample_team(team, params, encoded, settings, prompt_ids=np.arange(len(items)), **how)


def texts_of(team: Team, completions: Sequence[Completions]) -> list[list[list[str]]]:
    """Texts [N][P][G]: the tokens each agent chose, decoded."""
    texts: list[Any] = [None] * team.num_agents
    for spec, done in zip(team.stacks, completions, strict=True):
        tokens, mask = jax.device_get((done.tokens, done.action_mask))
        a, _, g, t = tokens.shape
        tokens, mask = (x.reshape(len(spec.order), -1, g, t) for x in (tokens, mask))
        for i, agent in enumerate(spec.order):
            texts[agent] = [
                decode(spec.tokenizer, [row[m].tolist() for row, m in zip(rows, masks, strict=True)])
                for rows, masks in zip(tokens[i], mask[i], strict=True)
            ]
    return texts


def play(
    team: Team,
    params: Sequence[Any],
    items: Sequence[dict],
    reward: RewardFunction,
    formatters: Sequence[Formatter],
    settings: Sampling,
    *,
    seed: int,
    step: int,
    group: int,
    joint_mode: str = "aligned",
    cross_credit: str = "mean",
    chat: bool = False,
    purpose: int = TRAIN,
) -> Rollout:
    """Sample every agent's completions of the items and reward the joint actions. One call is one (single-turn) step."""
    how: dict[str, Any] = dict(chat=chat, seed=seed, step=step, group=group, purpose=purpose)
    prompts, encoded, completions = sample_items(team, params, items, formatters, settings, **how)
    texts = texts_of(team, completions)
    joint = joint_actions(joint_mode, team.num_agents, group)
    of_joint = [[texts[n][p][g] for p in range(len(items)) for g in joint[:, n]] for n in range(team.num_agents)]
    repeated = [item for item in items for _ in joint]
    rng = np.random.default_rng((seed, step, purpose))
    result = reward(of_joint, [item.get("prompt") for item in repeated], repeated, rng)
    rewards = result.rewards.reshape(len(items), len(joint), team.num_agents)
    returns = credit(rewards, joint, group, cross_credit)
    invalid, fault = int(result.invalid.sum()), next(iter(result.faults.values()), "")
    return Rollout(prompts, texts, joint, rewards, result.parts, returns, invalid, fault, encoded, completions)


def to_batches(team: Team, rollout: Rollout) -> tuple[Batch, ...]:
    """What each stack learns from."""
    batches = []
    for spec, done, prompts in zip(team.stacks, rollout.completions, rollout.encoded, strict=True):
        returns = np.stack([rollout.returns[i] for i in spec.order]).reshape(len(spec.members), -1, done.tokens.shape[2])
        batches.append(batch_of(prompts, done, returns))
    return tuple(batches)


def batch_of(encoded: tuple[np.ndarray, np.ndarray], done: Completions, returns: np.ndarray) -> Batch:
    """A stack's batch, from its prompts [A, P, S] and their lengths, and returns [A, P, G]. Token axes are cut to the longest
    completion, in quarters of max_new_tokens."""
    size = done.tokens.shape[-1]
    t = next(q for q in (-(-size * k // 4) for k in (1, 2, 3, 4)) if q >= int(done.steps.max()))
    ids, lengths = encoded
    return Batch(
        prompts=jnp.asarray(ids),
        prompt_lengths=jnp.asarray(lengths),
        tokens=done.tokens[..., :t],
        action_mask=done.action_mask[..., :t],
        old_logprobs=done.logprobs[..., :t],
        rewards=jnp.asarray(returns, jnp.float32),
    )
