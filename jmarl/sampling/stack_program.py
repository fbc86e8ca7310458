"""The program that samples a stack: on one device, or on a mesh of which each device has a part of the rows."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jmarl.config import Sampling
from jmarl.hardware import dtype_on
from jmarl.models import decoding
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import Params
from jmarl.models.layers.attention import KeyValues
from jmarl.models.platforms import COMPILER_OPTIONS, fuses_decoding, platform_of, steps_per_chunk, steps_per_look, use_panels
from jmarl.models.rows import divide, divided, divided_prompts, joined
from jmarl.models.sharding import DeviceMesh, model_on, on_devices, spec_of, state_specs
from jmarl.models.stack import map_own
from jmarl.sampling.sampler import RowIds, SampleInputs, empty_completions, row_keys, sample
from jmarl.team import StackSpec
from jmarl.types import PLAIN, TRACES, Completions, Vocabulary

Ids = Int[Array | np.ndarray, "agent row prompt_token"]  # row: all prompts of the agent's first role, then those of the next
Lengths = Int[Array | np.ndarray, "agent row"]
Prompts = tuple[Ids, Lengths]  # of a stack: token ids, padded on the right, and their number


class Acting(NamedTuple):
    """What to sample of a stack if not all of its agents act, or not everywhere."""

    sets: Int[Array | np.ndarray, " set"]  # indices into the agent axis
    roles: Int[Array | np.ndarray, " acting_role"]  # of all these sets
    rows: Int[Array | np.ndarray, "set row"] | None = None  # of those of these roles; None: all. A row may be there twice


# How a mesh divides what is sampled
_ROWS, _KEYS, _STATES = spec_of("agent", "row"), spec_of("agent", None, "K", "row"), spec_of("agent", None, "row")
COMPLETIONS = Completions(_ROWS, _ROWS, _ROWS, _ROWS, _ROWS, spec_of("agent"))
PREFIX = decoding.Prefix(KeyValues(_KEYS, _KEYS), _ROWS, _STATES)
GROUP_CACHE = decoding.GroupCache(PREFIX, KeyValues(_KEYS, _KEYS), _ROWS, _STATES)


class SampleProgram(NamedTuple):
    """The static settings of the program that samples a stack."""

    config: ModelConfig
    settings: Sampling  # with a compute_dtype that is not auto
    roles: int
    group: int
    platform: str  # that the program is compiled for, see `models.platforms`
    keep_cache: bool = False  # return the cache too, for prompts that follow
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, spec: StackSpec, settings: Sampling, group: int, weights: Any, keep_cache: bool = False) -> "SampleProgram":
        """Return the settings for a stack on the platform of its weights."""
        platform = platform_of(weights)
        settings = dataclasses.replace(settings, compute_dtype=dtype_on(platform, settings.compute_dtype))
        return cls(spec.config, settings, len(spec.members[0]), group, platform, keep_cache, spec.mesh)


@partial(jax.jit, static_argnames=("program",), compiler_options=COMPILER_OPTIONS)
def sample_stack(
    params: Params,
    prompts: Prompts,
    row_ids: RowIds,
    stop: Int[Array, "*agent_role stop"],
    past: tuple[Any, Int[Array, "agent row"]] | None = None,
    acting: Acting | None = None,
    vocabulary: Vocabulary = PLAIN,
    *,
    program: SampleProgram,
) -> Completions:
    """Sample the completions [A, R * P, G, T] of a stack, see `sampler.sample`.

    Args:
        params: parameters [A, ...].
        prompts: token ids and lengths.
        row_ids: the numbers that random keys follow from.
        stop: ids that end a completion: [A, R, E], or [E] if they are the same for all agents.
        past: the cache of the stack and the row of it that each prompt follows, see `Past`.
        acting: the agents and rows to sample. Completions of the others are empty. None: all.
        vocabulary: what the sampler knows of the tokens.
        program: the static settings.
    """
    TRACES["sample"] += 1
    ids, lengths = (jnp.asarray(x) for x in prompts)
    keys = row_keys(row_ids, program.group)
    stop = stop_of_prompts(stop, *ids.shape[:2])
    empty = empty_completions((*keys.shape, program.settings.max_new_tokens), stop)
    if acting is not None and not min(len(acting.sets), len(acting.roles)):
        return empty
    if acting is not None:
        params, ids, lengths, keys, stop = _take_acting(params, (ids, lengths, keys, stop), program.roles, acting)
    sampled = _sample_on_devices(params, (ids, lengths, keys, stop), past, vocabulary, program)
    return sampled if acting is None else _place_acting(sampled, empty, program.roles, acting)


def _sample_on_devices(
    params: Params, rows: tuple[Array, Array, Array, Array], past: Any, vocabulary: Vocabulary, program: SampleProgram
) -> Completions:
    """Sample rows, of which each device of a mesh has a part. rows: ids, lengths, keys and stop ids of all prompts."""
    model, mesh, settings = model_on(program.mesh, program.config), program.mesh, program.settings
    (count, group), dtype = rows[2].shape[1:], settings.compute_dtype
    row_parts = model.placement.row_parts
    d = divide(count, group, row_parts)
    whole = mesh is None or mesh.shape["model"] == 1  # no array of a row is divided
    own_core = mesh is not None and mesh.size > 1 and whole
    tokens = rows[0].shape[-1] + settings.max_new_tokens
    layouts: dict[str, Any] = {
        "panels": use_panels(program.platform, d.prompts * (group // d.over_group) // row_parts, dtype, own_core),
        "fused": past is None and whole and fuses_decoding(program.platform, dtype, model, tokens),
        "steps": steps_per_look(program.platform, settings.max_new_tokens),
        "chunk": steps_per_chunk(program.platform) if whole else 0,
        "keep_cache": program.keep_cache,
    }

    def sample_on_device(params: Params, ids: Array, lengths: Array, keys: Array, stop: Array, before: Any) -> Completions:
        out = sample(params, model, settings, SampleInputs(ids, lengths, keys, stop, before, vocabulary), **layouts)
        return out if row_parts == 1 else out._replace(steps=lax.pmax(out.steps, "data"))

    of_prompts, of_rows = (jax.vmap(partial(f, d=d)) for f in (divided_prompts, divided))
    ids, lengths, keys, stop = rows
    own = of_prompts(ids), jnp.maximum(of_prompts(lengths), 1), of_rows(keys), of_prompts(stop)
    before = None if past is None else jax.vmap(decoding.prefix_of_rows)(past[0], of_prompts(past[1]))
    inputs = state_specs(mesh, params), *[_ROWS] * len(own), None if past is None else PREFIX
    outputs = COMPLETIONS._replace(cache=GROUP_CACHE if program.keep_cache else None)
    out = on_devices(sample_on_device, mesh, inputs, outputs)(params, *own, before)
    join = jax.vmap(partial(joined, prompts=count, group=group))
    return jax.tree.map(join, out._replace(steps=None, cache=None))._replace(steps=out.steps, cache=out.cache)


def stop_of_prompts(
    stop: Int[Array | np.ndarray, "*agent_role stop"], agents: int, prompts: int
) -> Int[Array, "{agents} {prompts} stop"]:
    """Return the ids that end the completions of each prompt, from those of each role. All prompts of a role are neighbors."""
    by_role = jnp.broadcast_to(jnp.asarray(stop), (agents, *stop.shape[1:]) if stop.ndim > 1 else (agents, 1, *stop.shape))
    return jnp.repeat(by_role, prompts // by_role.shape[1], 1)


def _take_acting(params: Params, rows: tuple[Any, ...], num_roles: int, acting: Acting) -> tuple[Any, ...]:
    """Return the parameters of the acting sets, and of arrays [A, R * P, ...] the rows that act."""
    sets, roles, acting_rows = acting
    if len(sets) < len(rows[0]):  # slices, because XLA for CPUs runs a gather element by element
        numbers = range(len(sets))
        params = map_own(lambda x: jnp.concatenate([lax.dynamic_slice_in_dim(x, sets[i], 1) for i in numbers]), params)
    by_role = [x.reshape(len(x), num_roles, -1, *x.shape[2:])[sets][:, roles] for x in rows]
    taken = [x.reshape(len(sets), -1, *x.shape[3:]) for x in by_role]
    return params, *(taken if acting_rows is None else [jax.vmap(lambda own, i: own[i])(x, acting_rows) for x in taken])


def _place_acting(sampled: Completions, empty: Completions, num_roles: int, acting: Acting) -> Completions:
    """Return the completions of all sets and roles: `sampled` for rows that act, `empty` for the others."""
    sets, roles, rows = acting

    def place(x: Array, y: Array) -> Array:
        by_role = y.reshape(len(y), num_roles, -1, *y.shape[2:])
        if rows is not None:
            others = by_role[sets[:, None], roles].reshape(len(sets), -1, *y.shape[2:])
            x = jax.vmap(lambda to, i, own: to.at[i].set(own))(others, rows, x)
        return by_role.at[sets[:, None], roles].set(x.reshape(len(sets), len(roles), *by_role.shape[2:])).reshape(y.shape)

    placed = jax.tree.map(place, sampled._replace(steps=None), empty._replace(steps=None))
    return placed._replace(steps=empty.steps.at[sets].set(sampled.steps))
