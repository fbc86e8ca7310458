"""Sample completions: encode the prompts of every agent, and sample all agents of a stack in one program.

The host world meets the device world here: tokenizers on one side, `sampler.sample` on the other. A prompt of a later turn may
be the conversation so far followed by new text (`Past`). Then only the new tokens are computed; the keys and values of the
conversation are reused.
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
from jmarl.models.config import ModelConfig
from jmarl.models.hub.tokenize import cut_left, decode, encode_prompts, follow_ups
from jmarl.models.platforms import COMPILER_OPTIONS, platform_of, use_panels
from jmarl.models.sharding import batch_shardings, mesh_of, over_agents, splits_only_agents
from jmarl.models.stack import map_own, to_host
from jmarl.randomness import Randomness
from jmarl.sampling import sampler
from jmarl.team import StackSpec, Team, to_agents
from jmarl.types import TRACES, Completions

NO_LIMIT = 2**30  # in place of a context: rows of any length
Rows = list[list[list[int]]]  # [N][P] token ids
Prompts = tuple[np.ndarray, np.ndarray]  # of a stack: token ids [A, R * P, S], padded on the right, and lengths [A, R * P]
Encoded = tuple[Prompts, ...]  # per stack


def bucket(n: int, smallest: int = 16) -> int:
    """Return the smallest power of two that is at least `n` and `smallest`: few shapes, few compiles."""
    return max(smallest, 1 << (n - 1).bit_length())


class Past(NamedTuple):
    """The caches that the turn before left, and the row of them that each prompt follows."""

    caches: tuple[Any, ...]  # per stack, on the device
    rows: tuple[np.ndarray, ...]  # per stack [A, R, P]: an index into the rows [R * P, G] of the turn before

    def take(self, nodes: np.ndarray) -> Past:
        """Return the past of some nodes."""
        return self._replace(rows=tuple(rows[..., nodes] for rows in self.rows))


class RowKeys(NamedTuple):
    """The numbers that the random keys of a stack's rows follow from. They are traced: another seed needs no other program."""

    seed: Any  # [], or [A * R] if agents belong to several runs
    step: Any  # []
    purpose: Any  # []
    stack: Any  # [] number of the stack in its team, or [A] (with R = 1) if agents belong to several teams
    agents: Any  # [A, R] indices of the agents in their team
    prompt_ids: Any  # [P]
    turn: Any = 0  # []


class StackProgram(NamedTuple):
    """What the program that samples a stack is compiled for."""

    config: ModelConfig
    settings: Sampling
    roles: int
    group: int
    platform: str  # that the program is compiled for, see `models.platforms`
    keep: bool = False  # return the caches too, for prompts that follow
    mesh: Mesh | None = None


@partial(jax.jit, static_argnames=("program",), compiler_options=COMPILER_OPTIONS)
def sample_stack(
    params: Any,
    prompts: Prompts,
    row_keys: RowKeys,
    stop: Any,
    past: tuple[Any, Any] | None = None,
    acting: tuple[Any, Any] | None = None,
    *,
    program: StackProgram,
) -> Completions:
    """Sample the completions [A, R * P, G, T] of a stack, see `sampler.sample`.

    Args:
        params: parameters [A, ...].
        prompts: token ids [A, R * P, S] and lengths [A, R * P].
        row_keys: what the random keys follow from.
        stop: ids [n] that end a completion.
        past: the cache of the stack and the rows [A, R * P] of it, see `Past`.
        acting: indices of the parameter sets and of the roles to sample, see `acting_of`. Completions of the others are empty.
        program: the static settings.
    """
    TRACES["sample"] += 1
    (ids, lengths), n = prompts, row_keys
    a, rows, group = *ids.shape[:2], program.group
    keys = sampler.row_keys(n.seed, n.step, n.stack, n.agents.reshape(-1), n.prompt_ids, group, n.purpose, n.turn)
    keys = keys.reshape(a, rows, group)
    empty = sampler.unwritten(a, rows, group, program.settings.max_new_tokens, stop)
    if acting and not min(map(len, acting)):
        return empty
    if acting:
        params, ids, lengths, keys = _take_acting(params, (ids, lengths, keys), program.roles, *acting)
    if program.mesh is not None:  # rows over `data`, as in the update
        arrays = (ids, lengths, keys)
        ids, lengths, keys = lax.with_sharding_constraint(arrays, batch_shardings(program.mesh, arrays))
    own_core = program.mesh is not None and program.mesh.size > 1 and splits_only_agents(program.mesh, ids.shape[0])
    cut = use_panels(program.platform, ids.shape[1] * group, program.settings.compute_dtype, own_core)

    def sample_on_device(params, ids, lengths, keys, past):
        return sampler.sample(
            params, program.config, program.settings, ids, lengths, keys, stop, cut=cut, past=past, keep=program.keep
        )

    done = over_agents(sample_on_device, program.mesh, ids.shape[0])(params, ids, lengths, keys, past)
    return _place_acting(done, empty, program.roles, *acting) if acting else done


def _take_acting(params: Any, rows: tuple, num_roles: int, sets: jax.Array, roles: jax.Array) -> tuple:
    """Return the parameters of some sets, and of rows [A, R * P, ...] those of these sets and of some roles."""
    if len(sets) < len(rows[0]):  # in slices, which are copied as they lie: XLA for CPUs gathers number by number
        numbers = range(len(sets))
        params = map_own(lambda x: jnp.concatenate([lax.dynamic_slice_in_dim(x, sets[i], 1) for i in numbers]), params)
    by_role = [x.reshape(len(x), num_roles, -1, *x.shape[2:])[sets][:, roles] for x in rows]
    return params, *(x.reshape(len(sets), -1, *x.shape[3:]) for x in by_role)


def _place_acting(done: Completions, empty: Completions, num_roles: int, sets: jax.Array, roles: jax.Array) -> Completions:
    """Return the completions of all sets and roles: `done` for those that were sampled, `empty` for the others."""

    def place(x, y):
        by_role = y.reshape(len(y), num_roles, -1, *y.shape[2:])
        return by_role.at[sets[:, None], roles].set(x.reshape(len(sets), len(roles), *by_role.shape[2:])).reshape(y.shape)

    rows = jax.tree.map(place, done._replace(steps=None), empty._replace(steps=None))
    return rows._replace(steps=empty.steps.at[sets].set(done.steps))


class SampleRequest(NamedTuple):
    """What to sample in one turn: the arguments of `sample_team` except the models."""

    encoded: Encoded
    settings: Sampling
    randomness: Randomness
    group: int
    prompt_ids: np.ndarray  # [P] integers that tell prompts apart in the random keys
    turn: int = 0
    past: Past | None = None
    keep: bool = False  # whether the next turn continues from this one's caches
    acts: np.ndarray | None = None  # [N] bool: agents to sample; completions of the others are ignored. None: all


Sampler = Callable[[SampleRequest], tuple[Completions, ...]]  # returns the completions of each stack


def sample_team(
    team: Team, params: Sequence[Any], request: SampleRequest, call: Callable[..., Any] = sample_stack
) -> tuple[Any, ...]:
    """Return the completions of each stack.

    call: `sample_stack`, or `sample_stack.lower`, which returns the program without running it.
    """
    stacks = enumerate(zip(team.stacks, params, request.encoded, strict=True))
    return tuple(_call_stack(i, spec, weights, prompts, request, call) for i, (spec, weights, prompts) in stacks)


def _call_stack(
    i: int, spec: StackSpec, weights: Any, prompts: Prompts, request: SampleRequest, call: Callable[..., Any]
) -> Any:
    """Sample stack `i` of a team. The arguments stay on the host: the call moves them to where the weights are, once."""
    agents, past, mesh = np.array(spec.members), request.past, mesh_of(weights)
    seed, step, purpose, *_ = request.randomness
    seed = np.repeat(seed, agents.size // np.size(seed)) if np.ndim(seed) else seed
    numbers = RowKeys(seed, step, purpose, i, agents, request.prompt_ids, request.turn)
    cache = None if past is None else (past.caches[i], past.rows[i].reshape(len(spec.members), -1))
    acting = None if request.acts is None or request.keep else acting_of(spec, request.acts, mesh)
    program = StackProgram(
        spec.config, request.settings, agents.shape[1], request.group, platform_of(weights), request.keep, mesh
    )
    arguments = (weights, prompts, numbers, np.array(spec.stop, np.int32), cache, acting)
    if call is sample_stack:
        a, count, width = prompts[0].shape
        work = Program("sampling", a, count, request.group, width, request.settings.max_new_tokens)
        settings = (program, None if acting is None else tuple(map(len, acting)))
        starting(work, settings, partial(call.lower, *arguments, program=program))
    return call(*arguments, program=program)


def on_host(done: Completions) -> Completions:
    """Copy completions to the host, where cutting and joining them needs no programs. The caches stay on the device."""
    return to_host(done._replace(cache=None))._replace(cache=done.cache)


def acting_of(spec: StackSpec, acts: np.ndarray, mesh: Mesh | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the parameter sets of a stack, and their roles, to sample so that all agents in `acts` [N] are; None: all.

    If parameter sets are spread over devices, all of them are sampled: the devices of the others would be idle.
    """
    active = acts[np.array(spec.members)]  # [A, R]
    sets, roles = np.flatnonzero(active.any(1)), np.flatnonzero(active.any(0))
    if len(roles) and mesh is not None and mesh.shape["agent"] > 1:
        sets = np.arange(len(active))
    return None if (len(sets), len(roles)) == active.shape else (sets, roles)


def pad(team: Team, rows: Rows) -> Encoded:
    """Return each stack's prompts, padded on the right to a bucket, and their lengths."""
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
    """Return the token ids [N][P] of prompts [N][P].

    A prompt that leaves no room for a completion is an error, or with `whole` is returned as it is. A prompt that is None, of
    an agent that does not act, becomes one id: if the agent acts at other nodes, it is sampled here too, and that completion is
    ignored."""
    rows = []
    for i, spec in enumerate(team.agent_specs):
        limits, texts = (_context(spec, whole), settings.max_new_tokens), [text for text in prompts[i] if text is not None]
        encoded = iter(encode_prompts(spec.tokenizer, texts, *limits, chat, named=f"prompt {{}} of agent {i}"))
        rows.append([[spec.stop[0]] if text is None else next(encoded) for text in prompts[i]])
    return rows


def follow(
    team: Team, history: Rows, prompts: Sequence[Sequence[str]], settings: Sampling, chat: bool, whole: bool = False
) -> Rows:
    """Return the token ids [N][P] of conversations that go on: the history (prompt and completion so far) and the new prompt.

    whole: as in `tokenize`.
    """
    rows = []
    for i, spec in enumerate(team.agent_specs):
        limits, name = (_context(spec, whole), settings.max_new_tokens), f"prompt {{}} of a later turn of agent {i}"
        rows.append(follow_ups(spec.tokenizer, history[i], prompts[i], *limits, chat, named=name))
    return rows


def _context(spec: StackSpec, whole: bool) -> int:
    """Return the context of a stack; with `whole` no limit, for prompts that are cut or left out later."""
    return NO_LIMIT if whole else spec.config.max_positions


def cut_long(team: Team, rows: Rows, settings: Sampling, chat: bool) -> Rows:
    """Cut rows [N][P] that leave no room for a completion on the left, see `cut_left`."""
    cut = []
    for spec, agent_rows in zip(team.agent_specs, rows, strict=True):
        room = spec.config.max_positions - settings.max_new_tokens
        cut.append([row if len(row) <= room else cut_left(spec.tokenizer, row, room, chat) for row in agent_rows])
    return cut


def too_long(team: Team, rows: Rows, settings: Sampling) -> np.ndarray:
    """Return which rows leave no room for a completion, bool [N, P]."""
    rooms = [spec.config.max_positions - settings.max_new_tokens for spec in team.agent_specs]
    return np.array([[len(row) > room for row in agent_rows] for agent_rows, room in zip(rows, rooms, strict=True)])


def read(team: Team, prompts: Sequence[Sequence[str | None]], settings: Sampling, episodes: Episodes) -> Rows:
    """Return the token ids [N][P] of first prompts; long ones are cut if `long_prompts` is truncate_left."""
    if episodes.long_prompts != "truncate_left":
        return tokenize(team, prompts, settings, episodes.chat)
    return cut_long(team, tokenize(team, prompts, settings, episodes.chat, whole=True), settings, episodes.chat)


def encode(team: Team, prompts: Sequence[Sequence[str | None]], settings: Sampling, chat: bool) -> Encoded:
    """Tokenize prompts [N][P] and pad them to a bucket."""
    return pad(team, tokenize(team, prompts, settings, chat))


def tokens_of(team: Team, completions: Sequence[Completions], count: int) -> list[list[list[list[int]]]]:
    """Return the token ids [N][P][G] that each agent chose after the first `count` prompts. The prompts after them are
    padding."""
    agents = to_agents(team, [(np.asarray(done.tokens), np.asarray(done.action_mask)) for done in completions])
    groups = [zip(ids[:count], masks[:count], strict=True) for ids, masks in agents]
    return [[[row[mask].tolist() for row, mask in zip(*group, strict=True)] for group in prompts] for prompts in groups]


def texts_of(team: Team, tokens: Sequence[Sequence[Sequence[Sequence[int]]]]) -> list[list[list[str]]]:
    """Decode token ids [N][P][G] to texts [N][P][G] by each agent's tokenizer."""
    return [[decode(spec.tokenizer, group) for group in rows] for spec, rows in zip(team.agent_specs, tokens, strict=True)]
