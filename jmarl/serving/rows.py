"""Programs that sample rows which come and go: `admit` puts new prompts into free slots, `advance` decodes some tokens.

A `RowPool` has one row in each slot. A row writes the tokens that `generate` would sample for its prompt and seed: its random
numbers follow from its own seed, agent and number in the group, and the shapes of its pool from its own prompt and limit. So
its tokens depend neither on its slot nor on the rows beside it, but for the rounding of sums over keys in another order.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt32

from jmarl.config import Sampling
from jmarl.models import decoder
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import Params
from jmarl.models.platforms import COMPILER_OPTIONS, fuses_decoding, steps_per_chunk, use_panels
from jmarl.models.sharding import model_on, on_devices, state_specs
from jmarl.models.stack import own_leaves
from jmarl.randomness import EVAL
from jmarl.sampling.choice import RowSampling, random_bits
from jmarl.sampling.sampler import RowIds, SampleInputs, empty_completions, ids_in_prompts, prepare, row_keys
from jmarl.sampling.scoring import hidden_states
from jmarl.sampling.slots import (
    Decoder,
    Slots,
    begin,
    decode_chunk,
    empty_slots,
    for_decoder,
    from_decoder,
    prompts_of_view,
    select_slots,
)
from jmarl.sampling.stack_program import SampleProgram
from jmarl.types import PLAIN, TRACES, Completions, Vocabulary


class RowPool(NamedTuple):
    """Rows under way whose prompts and limits are of one size, one in each slot. All arrays have an agent axis."""

    slots: Slots  # row: the number of the slot
    out: Completions  # arrays [A, slot, T]: what the row in each slot has written
    bits: UInt32[Array, "agent token slot 2"]
    stop: Int[Array, "agent slot stop"]
    own: RowSampling  # [A, slot]


class Joining(NamedTuple):
    """One new prompt for each parameter set, and the slots that its rows take: none where a set has no new prompt.

    Arrays on the host, which the call of the program moves to its device.
    """

    ids: Any  # [A, 1, S] int32, padded on the right
    lengths: Any  # [A, 1] int32
    takes: Any  # [A, slot] bool
    choice: Any  # [A, slot] int32: number in the group of the row that takes the slot
    seed: Any  # [A] uint32
    number: Any  # [A] int32: of the agent in its team, the one of the set's roles that is asked
    stop: Any  # [A, 1, E] int32
    temperature: Any  # [A] float32
    top_p: Any  # [A] float32


class PoolProgram(NamedTuple):
    """The static settings of the programs of a pool."""

    sample: SampleProgram  # of one completion a prompt; max_new_tokens is the capacity of a row
    stack: int  # number of the stack in its team
    slots: int  # rows of each parameter set
    width: int  # longest prompt


def empty_pool(agents: int, num_stop: int, program: PoolProgram) -> RowPool:
    """Return a pool of which no slot is taken. agents: parameter sets. num_stop: ids that end a completion."""
    model, settings, a, count = program.sample.config, program.sample.settings, agents, program.slots
    new, fused = settings.max_new_tokens, fuses_decoding(program.sample.platform, settings.compute_dtype, model)
    slots = empty_slots(model, settings, settings.compute_dtype, fused, (a, count, count, program.width))
    row, clock = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (a, count)), jnp.zeros(a, jnp.int32)
    stop, zeros = jnp.zeros((a, count, num_stop), jnp.int32), jnp.zeros((a, count))
    bits = jnp.zeros((a, new, count, 2), jnp.uint32)
    return RowPool(slots._replace(row=row, clock=clock), _no_tokens(a, count, new), bits, stop, RowSampling(zeros, zeros))


def _no_tokens(agents: int, slots: int, capacity: int) -> Completions:
    out = empty_completions((agents, slots, 1, capacity), jnp.zeros(1, jnp.int32))
    return jax.tree.map(lambda x: x[:, :, 0], out._replace(steps=None))


@partial(jax.jit, static_argnames=("program",), donate_argnames=("pool",), compiler_options=COMPILER_OPTIONS)
def admit(params: Params, pool: RowPool, joining: Joining, vocabulary: Vocabulary = PLAIN, *, program: PoolProgram) -> RowPool:
    """Prefill new prompts and put their rows into slots, whatever was in them.

    Args:
        params: parameters [A, ...], on one device or on a mesh that splits only agents.
        pool: the rows under way, donated.
        joining: the new prompts.
        vocabulary: what the sampler knows of the tokens.
        program: the static settings.
    """
    TRACES["admit"] += 1
    return _on_devices(partial(_admit, program=program, vocabulary=vocabulary), program)(params, pool, joining)


@partial(jax.jit, static_argnames=("program",), donate_argnames=("pool",), compiler_options=COMPILER_OPTIONS)
def advance(
    params: Params,
    pool: RowPool,
    free: Bool[np.ndarray, "agent slot"],
    vocabulary: Vocabulary = PLAIN,
    *,
    program: PoolProgram,
) -> RowPool:
    """Decode some tokens of the rows in all slots. free: slots whose rows nobody waits for; otherwise as `admit`."""
    TRACES["advance"] += 1
    return _on_devices(partial(_advance, program=program, vocabulary=vocabulary), program)(params, pool, free)


def _on_devices(f: Any, program: PoolProgram) -> Any:
    """Return f of (params, pool, other arrays), such that each device of a mesh runs it on its agents."""
    mesh, agent = program.sample.mesh, P("agent")
    return lambda params, *arrays: on_devices(f, mesh, (state_specs(mesh, params), agent, agent), agent)(params, *arrays)


def _admit(params: Params, pool: RowPool, joining: Joining, *, program: PoolProgram, vocabulary: Vocabulary) -> RowPool:
    decoder, inputs, settings, model = _prepared(params, joining.ids, joining.lengths, pool, program)
    slots, (a, count) = for_decoder(pool.slots)._replace(clock=pool.slots.clock[0]), joining.takes.shape
    numbers = jnp.zeros((a, count), jnp.int32)
    prompts, mask = prompts_of_view(decoder, numbers)
    seen = None
    if slots.seen is not None:
        seen = jnp.broadcast_to(ids_in_prompts(inputs, model.vocab_size)[:, 0], slots.seen.shape)
    new = slots._replace(
        t=jnp.zeros_like(slots.t),
        token=jnp.broadcast_to(decoder.first_tokens[:, 0], (a, count)),
        live=jnp.ones_like(slots.live),
        cache=begin(decoder, slots.cache, numbers),
        prompts=prompts,
        prompt_mask=mask,
        seen=seen,
    )
    ids = RowIds(joining.seed, 0, EVAL, program.stack, joining.number[:, None], np.zeros(1, np.uint32))
    keys = row_keys(ids, count)[jnp.arange(a)[:, None], 0, joining.choice]
    capacity = settings.max_new_tokens
    bits = random_bits(keys.reshape(-1), capacity).reshape(capacity, a, count, 2)

    def put(x: Array, y: Array) -> Array:
        """Return x in the slots that are taken, else y."""
        return jnp.where(joining.takes.reshape(a, count, *[1] * (y.ndim - 2)), x, y)

    own = RowSampling(joining.temperature[:, None], joining.top_p[:, None])
    return RowPool(
        _with_clocks(select_slots(decoder, joining.takes, new, slots)),
        jax.tree.map(put, _no_tokens(a, count, capacity), pool.out),
        jnp.where(joining.takes[:, None, :, None], jnp.moveaxis(bits, 0, 1), pool.bits),
        put(joining.stop, pool.stop),
        jax.tree.map(put, own, pool.own),
    )


def _advance(
    params: Params, pool: RowPool, free: Bool[Array, "agent slot"], *, program: PoolProgram, vocabulary: Vocabulary
) -> RowPool:
    ids = jnp.zeros((len(free), 1, program.width), jnp.int32)
    # XLA removes the prefill of this empty prompt: nothing reads what follows from it.
    decoder, *_ = _prepared(params, ids, jnp.ones_like(ids[..., 0]), pool, program)
    decoder = decoder._replace(stop=pool.stop, vocabulary=vocabulary, own=pool.own)
    slots = for_decoder(pool.slots)._replace(clock=pool.slots.clock[0])
    slots = slots._replace(live=slots.live & ~free)
    slots, out = decode_chunk(decoder, slots, pool.out, steps_per_chunk(program.sample.platform))
    return pool._replace(slots=_with_clocks(slots), out=out)


def _prepared(
    params: Params, ids: Any, lengths: Any, pool: RowPool, program: PoolProgram
) -> tuple[Decoder, SampleInputs, Sampling, ModelConfig]:
    """Prefill one prompt of each parameter set, and return the decoder and what else the programs need."""
    sample = program.sample
    model, settings, mesh = model_on(sample.mesh, sample.config), sample.settings, sample.mesh
    inputs = SampleInputs(jnp.asarray(ids), jnp.asarray(lengths), jnp.zeros((*lengths.shape, 1)), jnp.zeros(1, jnp.int32))
    panels = use_panels(sample.platform, program.slots, settings.compute_dtype, mesh is not None and mesh.size > 1)
    fused = fuses_decoding(sample.platform, settings.compute_dtype, model)
    bits = jnp.moveaxis(pool.bits, 0, 1)
    return prepare(params, model, settings, inputs, panels, fused, bits), inputs, settings, model


def _with_clocks(slots: Slots) -> Slots:
    """Return slots of a decoder as a pool holds them: with a clock for each parameter set."""
    return from_decoder(slots)._replace(clock=jnp.full(len(slots.row), slots.clock))


@partial(jax.jit, static_argnames=("model", "dtype", "count"))
def likeliest(
    stack: Params,
    agent: int,
    prompts: Any,
    lengths: Any,
    tokens: Any,
    temperature: float,
    *,
    model: ModelConfig,
    dtype: str,
    count: int,
) -> tuple[Float[Array, "token count"], Int[Array, "token count"]]:
    """Return the highest log-probabilities at each token of one completion, as `score` computes them, and their ids.

    stack: parameters [A, ...], of which the agent's are read. Other arrays as of `hidden_states`, with one prompt and one
    completion."""
    own, with_shared = own_leaves(stack)
    params = decoder.cast(with_shared([x[agent] for x in own]), dtype)
    hidden, _ = hidden_states(params, model, prompts, lengths, tokens, "none")

    def highest(state: Array) -> tuple[Array, Array]:
        logits = decoder.logits(decoder.output_weight(params), state[None], model.logit_cap)[0]
        return jax.lax.top_k(jax.nn.log_softmax(logits / temperature), count)

    return jax.lax.map(highest, hidden, batch_size=128)
