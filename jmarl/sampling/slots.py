"""Decode rows that began at different times or have moved: each is in a slot of its own.

Rows end at different lengths, and a loop over all of them spends most of its work on rows that have ended. So rows still going
move into fewer slots (`finish_in_fewer_slots`), or new rows take the slots of those that have ended (`refill.py`). A row has
its own index of the next token, its own random numbers and its own copy of its prompt's keys, so its tokens depend neither on
its slot nor on its neighbors, but for the rounding of products of another shape.

Rows move and outputs are written between chunks of several steps. In a chunk nothing but the next tokens is computed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from jmarl.config import Sampling
from jmarl.models import decoding
from jmarl.models.config import ModelConfig
from jmarl.models.layers.delta import DeltaState
from jmarl.sampling.choice import RowSampling, next_token
from jmarl.types import Completions, Vocabulary

FEWEST_SLOTS = 4  # a step of fewer rows is hardly faster
FEWER = 4  # each move leaves a part of this size; a finer one costs more compiling than it saves
SHORTEST = 128  # completions shorter than this are decoded without moves


class Decoder(NamedTuple):
    """The functions of a decode loop, and what it begins with. Caches of a single agent have no agent axis."""

    view: decoding.DecodeView  # of all agents
    decode: Callable[..., tuple[Array, Any]]
    """(view, cache, tokens [A, P, G], t, clock, live) -> logits [A, P, G, V] and the cache, see `decoding.decode_step`"""
    per_agent: Callable[
        [Callable], Callable
    ]  # a function of one agent's caches, views and [n] arrays -> of those of all agents
    export: Callable[..., Any]  # (cache, action_mask [A, P, G, T]) -> the cache that later prompts can follow
    cache: Any  # empty
    states: Any  # per layer, the states of prompts that rows begin with; None of layers that attend
    first_tokens: Int[Array, "agent prompt group"]  # the prompts' last, which are not prefilled: `decode` gives all logits
    fused: bool
    bits: UInt32[Array, "token agent row 2"]  # with which rows choose their tokens
    stop: Int[Array, "agent row stop"]  # ids that end each row
    sampling: Sampling
    vocabulary: Vocabulary
    own: RowSampling | None = None  # [A, row] settings of each row; None: those of `sampling`


class Slots(NamedTuple):
    """The rows under way, one in each slot."""

    row: Int[Array, "agent slot"]  # its number
    t: Int[Array, "agent slot"]  # index of its next token
    token: Int[Array, "agent slot"]  # its last token
    live: Bool[Array, "agent slot"]  # False: it has ended, the slot is free
    clock: Any  # [] int32: place of the next tokens in the cache, modulo its capacity
    cache: Any  # keys and values of the rows' own tokens; states of recurrent layers
    prompts: Any  # per layer that attends, keys and values of P prompts; several slots in a row may read one prompt
    prompt_mask: Bool[Array, "..."]  # [A, P, S]; without A for a single agent
    seen: Bool[Array, "agent slot vocab"] | None  # ids in each row; None without a repetition penalty
    text: Int[Array, "agent slot"] | None  # state in the automaton of stop texts; None without them


def empty_slots(model: ModelConfig, settings: Sampling, dtype: str, fused: bool, shape: tuple[int, int, int, int]) -> Slots:
    """Return slots of which none is taken, without a clock; also a single agent has an agent axis.

    shape: numbers of agents, slots and prompts, and the length of a prompt."""
    a, count, prompts, width = shape

    def empty(make: Callable[..., Any], count: int, capacity: int) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((a, *x.shape), x.dtype), make(model, count, capacity, dtype, fused))

    numbers = jnp.zeros((a, count), jnp.int32)
    return Slots(
        row=numbers,
        t=numbers,
        token=numbers,
        live=numbers > 0,
        clock=None,
        cache=empty(decoding.empty_cache, count, settings.max_new_tokens),
        prompts=empty(decoding.empty_keys, prompts, width),
        prompt_mask=jnp.zeros((a, prompts, width), bool),
        seen=jnp.zeros((a, count, model.vocab_size), bool) if settings.repetition_penalty != 1 else None,
        text=numbers if settings.stop else None,
    )


def for_decoder(slots: Slots) -> Slots:
    """Return slots as a decoder reads them: caches of a single agent have no agent axis."""
    caches = slots.cache, slots.prompts, slots.prompt_mask
    cache, prompts, mask = jax.tree.map(lambda x: x[0], caches) if len(slots.row) == 1 else caches
    return slots._replace(cache=cache, prompts=prompts, prompt_mask=mask)


def from_decoder(slots: Slots) -> Slots:
    """Invert `for_decoder`."""
    caches = slots.cache, slots.prompts, slots.prompt_mask
    cache, prompts, mask = jax.tree.map(lambda x: x[None], caches) if len(slots.row) == 1 else caches
    return slots._replace(cache=cache, prompts=prompts, prompt_mask=mask)


def fewer_slots(rows: int, new_tokens: int, prompts: int, width: int) -> tuple[int, ...]:
    """Return the numbers of slots that an agent's rows move to one after the other, while they end; () if none is worth it.

    A slot has a copy of its prompt's keys. Where prompts are long and shared by many rows, a step of all rows reads less than
    one of few slots, and they stay.

    Args:
        rows: rows of the agent.
        new_tokens: longest completion.
        prompts: copies of prompts that a step of all rows reads.
        width: length of a prompt.
    """
    if new_tokens < SHORTEST:
        return ()
    numbers = [rows // FEWER**i for i in range(1, rows.bit_length()) if rows // FEWER**i >= FEWEST_SLOTS]
    most = prompts * width + rows * new_tokens
    return tuple(n for n in numbers if n * (width + new_tokens) <= most)


def decode_chunk(decoder: Decoder, slots: Slots, out: Completions, steps: int) -> tuple[Slots, Completions]:
    """Decode some tokens of the rows in all slots, and write them to `out`, whose arrays are [A, row, ...]."""
    capacity, agents = len(decoder.bits), jnp.arange(len(slots.row))[:, None]
    layers = [(weights, prompts) for (weights, _), prompts in zip(decoder.view.layers, slots.prompts, strict=True)]
    view = decoder.view._replace(layers=layers, prefix_mask=slots.prompt_mask)
    places = slots.t + jnp.arange(steps)[:, None, None]
    bits, stop = decoder.bits[jnp.minimum(places, capacity - 1), agents, slots.row], decoder.stop[agents, slots.row]
    own = jax.tree.map(lambda x: x[agents, slots.row], decoder.own)

    def add_token(slots: Slots, bits: Array) -> tuple[Slots, tuple[Array, ...]]:
        _, t, token, live, clock, cache, _, _, seen, text = slots
        logits, cache = decoder.decode(view, cache, token[..., None], t, clock, live)
        (chosen, logp, truncated), ended, seen, text = next_token(
            logits[:, :, 0], bits, t, seen, text, stop, decoder.sampling, decoder.vocabulary, own
        )
        ended &= live
        following = slots._replace(
            t=jnp.minimum(t + 1, capacity - 1),
            token=chosen,
            live=live & ~ended & (t + 1 < capacity),
            clock=clock + 1,
            cache=cache,
            seen=seen,
            text=text,
        )
        return following, (chosen, logp, truncated, live, ended)

    moving, (chosen, logp, truncated, live, ended) = lax.scan(add_token, slots._replace(prompts=(), prompt_mask=()), bits)
    beyond = out.ended.shape[1]
    at = agents, jnp.where(live, slots.row, beyond), places  # tokens of rows that have ended are dropped
    out = out._replace(
        tokens=out.tokens.at[at].set(chosen, mode="drop"),
        action_mask=out.action_mask.at[at].set(True, mode="drop"),
        logprobs=out.logprobs.at[at].set(logp, mode="drop"),
        truncated_logprobs=out.truncated_logprobs.at[at].set(truncated, mode="drop"),
        ended=out.ended.at[agents, jnp.where(ended.any(0), slots.row, beyond)].set(True, mode="drop"),
    )
    return moving._replace(prompts=slots.prompts, prompt_mask=slots.prompt_mask), out


def finish_in_fewer_slots(
    decoder: Decoder,
    slots: Slots,
    out: Completions,
    numbers: Sequence[int],
    steps: int,
    goes_on: Callable[[Slots], Array] = lambda slots: jnp.any(slots.live),
) -> tuple[Slots, Completions]:
    """Decode rows, which fit into the first of these numbers of slots; whenever they fit into the next, they move there.

    steps: steps of a chunk. goes_on: whether to decode another chunk.
    """
    n, following = numbers[0], numbers[1:]
    limit = following[0] if following else 0

    def some_live(state: tuple[Slots, Completions]) -> Array:
        return goes_on(state[0]) & (num_live(state[0].live) > limit)

    def finish(fewer: Slots, out: Completions) -> tuple[Slots, Completions]:
        last, out = finish_in_fewer_slots(decoder, fewer, out, following, steps, goes_on)
        return put_slots(decoder, last, fewer), out

    fewer = take_slots(decoder, slots, jnp.argsort(~slots.live, axis=1)[:, :n])  # stable: in the order of their rows
    fewer, out = lax.while_loop(some_live, lambda state: decode_chunk(decoder, *state, steps), (fewer, out))
    if following:
        fewer, out = lax.cond(goes_on(fewer), finish, lambda *state: state, fewer, out)
    return fewer, out


def num_live(live: Bool[Array, "agent slot"]) -> Int[Array, ""]:
    """Return the largest number of rows of an agent that have not ended."""
    return live.sum(1).max()


def take_slots(decoder: Decoder, slots: Slots, chosen: Int[Array, "agent slot"]) -> Slots:
    """Return some slots, each with a copy of its prompt's keys."""
    count = slots.row.shape[1]

    def take(axis: int, chosen: Array, x: Array) -> Array:
        return jnp.take(x, chosen * x.shape[axis] // count, axis, mode="clip")

    return _map_slots(decoder, take, chosen, slots)


def put_slots(decoder: Decoder, fewer: Slots, slots: Slots) -> Slots:
    """Return slots of which the first are `fewer`, and the others are free."""

    def put(axis: int, _: Array, x: Array, y: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(y, x, 0, axis)

    free = slots._replace(live=jnp.zeros_like(slots.live))
    return _map_slots(decoder, put, fewer.row, fewer, free)


def select_slots(decoder: Decoder, chosen: Bool[Array, "agent slot"], new: Slots, old: Slots) -> Slots:
    """Return the chosen slots of one, and the others of another, which have the same clock."""

    def select(axis: int, chosen: Array, x: Array, y: Array) -> Array:
        return jnp.where(chosen.reshape([-1 if i == axis else 1 for i in range(x.ndim)]), x, y)

    return _map_slots(decoder, select, chosen, new, old)


def prompts_of_view(decoder: Decoder, chosen: Int[Array, "agent slot"]) -> tuple[Any, Array]:
    """Return the keys and values of the prefilled prompts with these numbers, one for each slot, and their masks."""
    return take_prompts(decoder, [prompts for _, prompts in decoder.view.layers], decoder.view.prefix_mask, chosen)


def take_prompts(decoder: Decoder, prompts: Any, masks: Array, chosen: Int[Array, "agent slot"]) -> tuple[Any, Array]:
    """Return the keys and values of the prompts with these numbers, one for each slot, and their masks."""

    def take(caches: tuple[Any, Array], chosen: Array) -> tuple[Any, Array]:
        return _by_slots(decoder, lambda axis, x: jnp.take(x, chosen, axis, mode="clip"), caches[0]), caches[1][chosen]

    return decoder.per_agent(take)((prompts, masks), chosen)


def begin(decoder: Decoder, cache: Any, chosen: Int[Array, "agent slot"]) -> Any:
    """Return a cache whose rows have the states of the prefilled prompts with these numbers. Keys and values stay: masks hide
    those of the rows before."""

    def take(caches: tuple[Any, Any], chosen: Array) -> Any:
        return [
            old if state is None else jax.tree.map(lambda x: jnp.take(x, chosen, 0, mode="clip"), state)
            for old, state in zip(*caches, strict=True)
        ]

    return decoder.per_agent(take)((cache, decoder.states), chosen)


def _by_slots(decoder: Decoder, f: Callable[..., Array], *caches: Any) -> Any:
    """Apply f to the arrays of caches of one agent. f: (axis of the slots, arrays) -> array."""

    def apply(first: Any, *others: Any) -> Any:
        axis = 0 if decoder.fused or isinstance(first, DeltaState) else 1
        return jax.tree.map(partial(f, axis), first, *others)

    return jax.tree.map(apply, *caches, is_leaf=lambda x: isinstance(x, DeltaState))


def _map_slots(decoder: Decoder, f: Callable[..., Array], chosen: Array, *slots: Slots) -> Slots:
    """Apply f to all arrays of slots but the clock. f: (axis of the slots, chosen [slot], arrays of one agent) -> array."""

    def of_agent(parts: Sequence[tuple[Any, Array]], chosen: Array) -> tuple[Any, Array]:
        caches, masks = zip(*parts, strict=True)
        return _by_slots(decoder, lambda axis, *x: f(axis, chosen, *x), *caches), f(0, chosen, *masks)

    def of_rows(chosen: Array, *rows: Any) -> Any:
        return jax.tree.map(partial(f, 0, chosen), *rows)

    parts = ((x.row, x.t, x.token, x.live, x.seen, x.text) for x in slots)
    row, t, token, live, seen, text = jax.vmap(of_rows)(chosen, *parts)
    (cache, prompts), mask = decoder.per_agent(of_agent)([((x.cache, x.prompts), x.prompt_mask) for x in slots], chosen)
    return Slots(row, t, token, live, slots[0].clock, cache, prompts, mask, seen, text)
