"""Prompts to completions: every agent's prompts as token ids, and all agents of a stack sampled in one program.

Here text meets the device: tokenizers on one side, `sampling.sample` on the other. A prompt of a later turn may be the
conversation so far and new text behind it (`Past`): then only the new tokens are computed, the others' keys and values are
still there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jmarl.config import Episodes, Sampling
from jmarl.memory import Program, starting
from jmarl.models.hub.tokenize import cut_left, decode, encode_prompts, follow_ups
from jmarl.models.platforms import COMPILER_OPTIONS, platform_of, use_panels
from jmarl.models.sharding import apart, batch_shardings, mesh_of, over_agents
from jmarl.models.stack import fetched, map_own
from jmarl.randomness import TRAIN
from jmarl.sampling import sampler as sampling
from jmarl.team import StackSpec, Team
from jmarl.types import TRACES, Completions

NO_LIMIT = 2**30  # in place of a context: rows of any length
Rows = list[list[list[int]]]  # [N][P] token ids
Encoded = tuple[tuple[np.ndarray, np.ndarray], ...]  # per stack: prompts [A, roles * P, S] and their lengths [A, roles * P]


def bucket(n: int, smallest: int = 16) -> int:
    """The smallest power of two that holds n (at least `smallest`): few shapes, few compiles."""
    return max(smallest, 1 << (n - 1).bit_length())


class Past(NamedTuple):
    """What a turn goes on from: the stacks' caches that the turn before left, and the row there that each prompt follows."""

    caches: tuple[Any, ...]  # per stack, on the device
    rows: tuple[np.ndarray, ...]  # per stack [A, roles, P]: an index into the rows [roles * P, G] of the turn before

    def padded(self, nodes: np.ndarray) -> Past:
        """Of these nodes."""
        return self._replace(rows=tuple(rows[..., nodes] for rows in self.rows))


@partial(
    jax.jit,
    static_argnames=("cfg", "settings", "roles", "group", "keep", "mesh", "platform"),
    compiler_options=COMPILER_OPTIONS,
)
def sample_stack(
    params,
    prompts,
    lengths,
    step,
    agents,
    prompt_ids,
    stop,
    turn=0,
    past=None,
    rows=None,
    acting=None,
    *,
    cfg,
    settings,
    seed,
    stack,
    roles,
    group,
    purpose,
    keep=False,
    mesh=None,
    platform,
):
    """`sampling.sample` with keys made inside. prompts [A, roles * P, S] and their lengths [A, roles * P]; agents [A, roles]
    team indices; prompt_ids [P]; stop [n] ids; past, rows: see `Past`. Returns `Completions` [A, roles * P, G, T].
    stack: its number, or with one role [A] that of each agent in its own team, see `crossplay`; seed: one for all, or of each
    agent [A * roles]. acting: indices of the parameter sets and of the roles that are sampled, see `acting_of`; the others'
    completions are empty.

    platform: the one that the program is compiled for, see `models.platforms`.

    What only the keys depend on (seed, step, stack, purpose, turn) is traced: another seed is no other program.
    """
    TRACES["sample"] += 1
    keys = sampling.row_keys(seed, step, stack, agents.reshape(-1), prompt_ids, group, purpose, turn)
    keys = keys.reshape(prompts.shape[0], roles * prompt_ids.shape[0], group)
    a, rows_of_agent, new = prompts.shape[0], prompts.shape[1], settings.max_new_tokens
    empty = sampling.unwritten(a, rows_of_agent, group, new, stop)
    if acting and not min(map(len, acting)):
        return empty
    if acting:
        params, prompts, lengths, keys = _chosen(params, (prompts, lengths, keys), roles, *acting)
    if mesh is not None:  # rows over `data`, as in the update
        of_rows = (prompts, lengths, keys)
        prompts, lengths, keys = jax.lax.with_sharding_constraint(of_rows, batch_shardings(mesh, of_rows))

    own_core = mesh is not None and mesh.size > 1 and apart(mesh, prompts.shape[0])
    cut = use_panels(platform, prompts.shape[1] * group, settings.compute_dtype, own_core)

    def of_device(params, prompts, lengths, keys, past):
        return sampling.sample(params, cfg, settings, prompts, lengths, keys, stop, cut=cut, past=past, keep=keep)

    done = over_agents(of_device, mesh, prompts.shape[0])(params, prompts, lengths, keys, past and (past, rows))
    return _placed(done, empty, roles, *acting) if acting else done


def _chosen(params: Any, rows: tuple, num_roles: int, sets: jax.Array, roles: jax.Array) -> tuple:
    """The parameters of some sets, and of rows [A, num_roles * P, ...] those of these sets and of some roles."""
    if len(sets) < len(rows[0]):  # in slices, which are copied as they lie: XLA for CPUs gathers number by number
        each = range(len(sets))
        params = map_own(lambda x: jnp.concatenate([lax.dynamic_slice_in_dim(x, sets[i], 1) for i in each]), params)
    by_role = [x.reshape(len(x), num_roles, -1, *x.shape[2:])[sets][:, roles] for x in rows]
    return params, *(x.reshape(len(sets), -1, *x.shape[3:]) for x in by_role)


def _placed(done: Completions, empty: Completions, num_roles: int, sets: jax.Array, roles: jax.Array) -> Completions:
    """Completions of all sets and roles, of which some wrote `done`: the others' are `empty`."""

    def place(x, y):
        by_role = y.reshape(len(y), num_roles, -1, *y.shape[2:])
        return by_role.at[sets[:, None], roles].set(x.reshape(len(sets), len(roles), *by_role.shape[2:])).reshape(y.shape)

    rows = jax.tree.map(place, done._replace(steps=None), empty._replace(steps=None))
    return rows._replace(steps=empty.steps.at[sets].set(done.steps))


class SampleRequest(NamedTuple):
    """What to sample in one turn: the arguments of `sample_team` except the models."""

    encoded: Encoded
    settings: Sampling
    seed: Any  # one number; or [K] of the runs of which the stacks hold agents, as many of each
    step: int
    group: int
    prompt_ids: np.ndarray  # [P]: tell prompts apart in the random keys
    purpose: int = TRAIN
    turn: int = 0
    past: Past | None = None
    keep: bool = False  # whether the next turn goes on from this one's caches
    acts: np.ndarray | None = None  # [N] bool: these agents write; what the others do is nobody's, and may be empty. None: all


Sampler = Callable[[SampleRequest], tuple[Completions, ...]]  # returns the completions of each stack


def pad(team: Team, rows: Rows) -> Encoded:
    """Each stack's prompts [A, roles * P, S], padded on the right to a bucket, and their lengths [A, roles * P]."""
    encoded = []
    for spec in team.stacks:
        flat = [row for agent in spec.order for row in rows[agent]]
        width = min(bucket(max(map(len, flat))), spec.config.max_positions)
        ids = np.full((len(flat), width), spec.stop[0], np.int32)
        for i, row in enumerate(flat):
            ids[i, : len(row)] = row
        a = len(spec.members)
        encoded.append((ids.reshape(a, -1, width), np.array([len(row) for row in flat], np.int32).reshape(a, -1)))
    return tuple(encoded)


def tokenize(team: Team, prompts: Sequence[Sequence[str | None]], settings: Sampling, chat: bool, whole: bool = False) -> Rows:
    """Token ids [N][P] of prompts [N][P]; one that leaves no room for a completion is an error, or (`whole`) comes as it is. In
    place of None, of an agent that does not act, one id: if it acts at other nodes it is sampled with them, and what it writes
    here is nobody's."""
    rows: list[Any] = [None] * team.num_agents
    for spec in team.stacks:
        for i in spec.order:
            of, limits = f"prompt {{}} of agent {i}", (context_of(spec, whole), settings.max_new_tokens)
            found = iter(encode_prompts(spec.tokenizer, [p for p in prompts[i] if p is not None], *limits, chat, named=of))
            rows[i] = [[spec.stop[0]] if text is None else next(found) for text in prompts[i]]
    return rows


def context_of(spec: StackSpec, whole: bool) -> int:
    """The longest prompt and completion that a stack reads; whole: no limit, for prompts that are cut or left out later."""
    return NO_LIMIT if whole else spec.config.max_positions


def cut_long(team: Team, rows: Rows, settings: Sampling, chat: bool) -> Rows:
    """Rows [N][P], of which those that leave no room for a completion are cut on the left, see `cut_left`."""
    cut: list[Any] = [None] * team.num_agents
    for spec in team.stacks:
        room = spec.config.max_positions - settings.max_new_tokens
        for i in spec.order:
            cut[i] = [row if len(row) <= room else cut_left(spec.tokenizer, row, room, chat) for row in rows[i]]
    return cut


def too_long(team: Team, rows: Rows, settings: Sampling) -> np.ndarray:
    """Which rows leave no room for a completion, bool [N, P]."""
    contexts = {i: spec.config.max_positions for spec in team.stacks for i in spec.order}
    return np.array([[len(row) + settings.max_new_tokens > contexts[i] for row in of] for i, of in enumerate(rows)])


def read(team: Team, prompts: Sequence[Sequence[str | None]], settings: Sampling, episodes: Episodes) -> Rows:
    """Token ids [N][P] of first prompts as agents read them: `tokenize`, with long prompts cut where `long_prompts` says so."""
    if episodes.long_prompts != "truncate_left":
        return tokenize(team, prompts, settings, episodes.chat)
    return cut_long(team, tokenize(team, prompts, settings, episodes.chat, whole=True), settings, episodes.chat)


def encode(team: Team, prompts: Sequence[Sequence[str | None]], settings: Sampling, chat: bool) -> Encoded:
    """Each stack's prompts [A, roles * P, S] and lengths [A, roles * P], padded on the right to a bucket."""
    return pad(team, tokenize(team, prompts, settings, chat))


def follow(
    team: Team, said: Rows, prompts: Sequence[Sequence[str]], settings: Sampling, chat: bool, whole: bool = False
) -> Rows:
    """Token ids [N][P] of conversations that go on: `said`, prompt and completion so far, then the new prompt. whole: as for
    `tokenize`."""
    rows: list[Any] = [None] * team.num_agents
    for spec in team.stacks:
        for i in spec.order:
            of, limits = f"prompt {{}} of a later turn of agent {i}", (context_of(spec, whole), settings.max_new_tokens)
            rows[i] = follow_ups(spec.tokenizer, said[i], prompts[i], *limits, chat, named=of)
    return rows


def sample_team(team: Team, params: Sequence[Any], request: SampleRequest, call: Any = sample_stack) -> tuple:
    """`Completions` of every stack. call: `sample_stack`, or `sample_stack.lower` for the programs alone."""
    out = []
    for i, (spec, weights, (ids, lengths)) in enumerate(zip(team.stacks, params, request.encoded, strict=True)):
        agents, past = np.array(spec.members), request.past  # of the host: the call takes them to where the weights lie, once
        seed = np.repeat(request.seed, agents.size // np.size(request.seed)) if np.ndim(request.seed) else request.seed
        static = dict(
            cfg=spec.config, settings=request.settings, seed=seed, stack=i, roles=agents.shape[1], group=request.group
        )
        stop = np.array(spec.stop, np.int32)
        arrays = (ids, lengths, request.step, agents, request.prompt_ids, stop, request.turn)
        before = (None, None) if past is None else (past.caches[i], past.rows[i].reshape(len(spec.members), -1))
        mesh = mesh_of(weights)
        acting = None if request.acts is None or request.keep else acting_of(spec, request.acts, mesh)
        static |= dict(purpose=request.purpose, keep=request.keep, mesh=mesh, platform=platform_of(weights))
        if call is sample_stack:
            a, prompts, width = ids.shape
            work = Program("sampling", a, prompts, request.group, width, request.settings.max_new_tokens)
            others = (spec.config, request.settings, request.keep, mesh, None if acting is None else tuple(map(len, acting)))
            starting(work, others, partial(call.lower, weights, *arrays, *before, acting, **static))
        out.append(call(weights, *arrays, *before, acting, **static))
    return tuple(out)


def on_host(done: Completions) -> Completions:
    """Completions on the host, where cutting and joining them needs no programs; what a next turn goes on from stays."""
    return fetched(done._replace(kept=None))._replace(kept=done.kept)


def acting_of(spec: StackSpec, acts: np.ndarray, mesh: Mesh | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Which parameter sets of a stack, and which of their roles, are to be sampled so that all agents in `acts` [N] are; None:
    all. Where sets lie on devices of their own, all sets are: those of others would leave their device idle."""
    writes = acts[np.array(spec.members)]  # [A, R]
    sets, roles = np.flatnonzero(writes.any(1)), np.flatnonzero(writes.any(0))
    if len(roles) and mesh is not None and mesh.shape["agent"] > 1:
        sets = np.arange(len(writes))
    return None if (len(sets), len(roles)) == writes.shape else (sets, roles)


def tokens_of(team: Team, completions: Sequence[Completions], prompts: int) -> list[list[list[list[int]]]]:
    """Token ids [N][P][G] that each agent chose after the first `prompts` prompts (those behind are padding)."""
    chosen: list[Any] = [None] * team.num_agents
    for spec, done in zip(team.stacks, completions, strict=True):
        tokens, mask = np.asarray(done.tokens), np.asarray(done.action_mask)
        shape = (len(spec.order), -1, *tokens.shape[2:])
        for agent, ids, masks in zip(spec.order, tokens.reshape(shape), mask.reshape(shape), strict=True):
            pairs = zip(ids[:prompts], masks[:prompts], strict=True)
            chosen[agent] = [[row[m].tolist() for row, m in zip(*pair, strict=True)] for pair in pairs]
    return chosen


def texts_of(team: Team, tokens: Sequence[Sequence[Sequence[Sequence[int]]]]) -> list[list[list[str]]]:
    """Texts [N][P][G] of token ids [N][P][G], by each agent's tokenizer."""
    tokenizers = {agent: spec.tokenizer for spec in team.stacks for agent in spec.order}
    return [[decode(tokenizers[agent], group) for group in of_agent] for agent, of_agent in enumerate(tokens)]
