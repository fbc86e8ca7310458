"""Sample completions for all agents of a stack in one program.

Each prompt is prefilled once, and its group shares the keys and values. A `while_loop` decodes one token for every row of every
agent and stops when all rows have ended. Of long completions, those that go on when most have ended move into fewer slots
(`slots.py`). Each row has its own random key, so its random numbers depend neither on its neighbors, nor on the batch size, nor
on its place in the batch.

Left out: beam and contrastive search, which do not sample from the policy that is trained, and speculative decoding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Integer, Key, UInt32

from jmarl.config import Sampling as Sampling  # part of the signature of `sample`
from jmarl.hardware import dtype_on
from jmarl.models import decoding, platforms
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import Params
from jmarl.models.sharding import gather
from jmarl.models.stack import is_shared, own_leaves
from jmarl.sampling.choice import next_token, random_bits
from jmarl.sampling.slots import Decoder, Slots, fewer_slots, finish_in_fewer_slots, num_live
from jmarl.types import PLAIN, Completions, Vocabulary

Numbers = Integer[Array | np.ndarray, "..."] | int


class RowIds(NamedTuple):
    """The numbers that identify the rows of a stack. Random keys follow from them. They are traced, so that one program serves
    all seeds and steps."""

    seed: Numbers  # [], or [A * R] (R roles per parameter set) if agents belong to several runs
    step: Numbers  # []
    purpose: Numbers  # [], see `jmarl.randomness`
    stack: Numbers  # [] number of the stack in its team, or [A] (with R = 1) if agents belong to several teams
    agents: Int[Array | np.ndarray, "*agent_role"]  # numbers of the agents in their team; [A] where each has one role
    prompt_ids: Integer[Array | np.ndarray, "... prompt"]  # [P], or [A * R, P] if they differ by agent
    turn: Numbers = 0  # []
    alike: Bool[Array | np.ndarray, " agent_role"] | None = None  # completions of a prompt have one key; None: nobody's


class SampleInputs(NamedTuple):
    """The prompts of a stack and what else its completions depend on."""

    prompts: Int[Array, "agent prompt prompt_token"]  # padded on the right
    lengths: Int[Array, "agent prompt"]  # at least 1
    keys: Key[Array, "agent prompt group"]  # one per row, consumed
    stop: Int[Array, "*agent_prompt stop"]  # ids that end a row: [A, P, E], or [E] if they are the same for all
    before: Any = None
    """The `decoding.Prefix` that each prompt follows, of rows of an earlier call. The prompt then begins with the last token of
    that row, which was sampled but is not in the cache."""
    vocabulary: Vocabulary = PLAIN


class DecodeState(NamedTuple):
    """The state of the decode loop."""

    t: Int[Array, ""]  # index of the next token
    token: Int[Array, "agent prompt group"]  # last token of each row
    done: Bool[Array, "agent prompt group"]  # rows that have ended
    cache: Any  # keys and values of the tokens decoded so far
    seen: Bool[Array, "agent prompt group vocab"] | None  # ids in each row; None without a repetition penalty
    text: Int[Array, "agent prompt group"] | None  # the state of each row in the automaton of stop texts; None without them
    out: Completions


def sample(
    params: Params,
    cfg: ModelConfig,
    sampling: Sampling,
    inputs: SampleInputs,
    *,
    panels: bool = False,
    fused: bool = False,
    steps: int = 1,
    chunk: int = 0,
    keep_cache: bool = False,
) -> Completions:
    """Sample the completions [A, P, G, T] of a stack.

    Args:
        params: parameters [A, ...] of the agents.
        cfg: architecture.
        sampling: the sampling settings.
        inputs: prompts, random keys and stop ids.
        panels: read the weights cut into panels, see `models.cpu`.
        fused: attend by one kernel, see `models.gpu`; not with `before`.
        steps: decode steps between two looks whether all rows have ended; must divide the number of new tokens.
        chunk: the same for rows that have moved into fewer slots; 0: they never move.
        keep_cache: return the cache too, for prompts that follow these completions (`SampleInputs.before`).
    """
    keys, new = inputs.keys, sampling.max_new_tokens
    (a, p, g), vocab = keys.shape, cfg.vocab_size
    stop = stop_of_rows(inputs)
    decoder = prepare(params, cfg, sampling, inputs, panels, fused)
    seen = ids_in_prompts(inputs, vocab) if sampling.repetition_penalty != 1 else None
    text = None if inputs.vocabulary.stops is None else jnp.zeros((a, p, g), jnp.int32)
    fewer = fewer_slots(p * g, new, p, inputs.prompts.shape[-1]) if chunk and not keep_cache else ()
    limit = fewer[0] if fewer else 0

    def body(state: DecodeState) -> DecodeState:
        t, _, done, cache, seen, text, out = state
        logits, cache = decoder.decode(decoder.view, cache, state.token, t, None, ~done)
        bits = decoder.bits[t].reshape(a, p, g, 2)
        (token, logp, truncated), ended, seen, text = next_token(logits, bits, t, seen, text, stop, sampling, inputs.vocabulary)
        token = jnp.where(done, stop[..., 0], token)
        out = out._replace(
            tokens=out.tokens.at[..., t].set(token),
            action_mask=out.action_mask.at[..., t].set(~done),
            logprobs=out.logprobs.at[..., t].set(jnp.where(done, 0, logp)),
            truncated_logprobs=out.truncated_logprobs.at[..., t].set(jnp.where(done, 0, truncated)),
        )
        return DecodeState(t + 1, token, done | ended, cache, seen, text, out)

    def several(state: DecodeState) -> DecodeState:
        return body(state) if steps == 1 else lax.fori_loop(0, steps, lambda _, state: body(state), state)

    def goes_on(state: DecodeState) -> Array:
        some_live = num_live(~state.done.reshape(a, -1)) > limit if limit else ~jnp.all(state.done)
        return (state.t < new) & some_live

    nothing_done, empty = jnp.zeros((a, p, g), bool), empty_completions((a, p, g, new), inputs.stop)
    start = DecodeState(jnp.int32(0), decoder.first_tokens, nothing_done, decoder.cache, seen, text, empty)
    end = lax.while_loop(goes_on, several, start)
    out = end.out._replace(ended=end.done, steps=jnp.full(a, end.t))
    if fewer:
        out = _finish(decoder, end, out, fewer, chunk)
    return out._replace(cache=decoder.export(end.cache, out.action_mask)) if keep_cache else out


def _finish(decoder: Decoder, end: DecodeState, out: Completions, fewer: tuple[int, ...], chunk: int) -> Completions:
    """Return the completions of all rows, of which some have not ended yet."""
    shape, new = out.tokens.shape, out.tokens.shape[-1]
    a, rows = shape[0], shape[1] * shape[2]
    numbers = jnp.broadcast_to(jnp.arange(rows), (a, rows))
    slots = Slots(
        row=numbers,
        t=jnp.full_like(numbers, end.t),
        token=end.token.reshape(a, rows),
        live=~end.done.reshape(a, rows) & (end.t < new),
        clock=end.t,
        cache=end.cache,
        prompts=[prompts for _, prompts in decoder.view.layers],
        prompt_mask=decoder.view.prefix_mask,
        seen=None if end.seen is None else end.seen.reshape(a, rows, -1),
        text=None if end.text is None else end.text.reshape(a, rows),
    )
    flat = jax.tree.map(lambda x: x.reshape(a, rows, *x.shape[3:]), out._replace(steps=None))
    slots, flat = finish_in_fewer_slots(decoder, slots, flat, fewer, chunk)
    out = jax.tree.map(lambda x: x.reshape(*shape[:3], *x.shape[2:]), flat)
    return out._replace(steps=jnp.full(a, jnp.minimum(slots.clock, new)))


def stop_of_rows(inputs: SampleInputs) -> Int[Array, "agent prompt group stop"]:
    """Return the ids that end each row."""
    (a, p, g), width = inputs.keys.shape, inputs.stop.shape[-1]
    return jnp.broadcast_to(jnp.broadcast_to(inputs.stop, (a, p, width))[:, :, None], (a, p, g, width))


def empty_completions(shape: tuple[int, ...], stop: Int[Array, "*agent_prompt stop"]) -> Completions:
    """Return completions of shape [A, P, G, T] that contain no token. stop: as in `SampleInputs`."""
    first = jnp.asarray(stop, jnp.int32)[..., :1]
    return Completions(
        tokens=jnp.broadcast_to(jnp.expand_dims(first, -2), shape),
        action_mask=jnp.zeros(shape, bool),
        logprobs=jnp.zeros(shape),
        truncated_logprobs=jnp.zeros(shape),
        ended=jnp.zeros(shape[:3], bool),
        steps=jnp.zeros(shape[0], jnp.int32),
    )


def prepare(
    params: Params,
    cfg: ModelConfig,
    sampling: Sampling,
    inputs: SampleInputs,
    panels: bool,
    fused: bool,
    bits: UInt32[Array, "token agent row 2"] | None = None,
) -> Decoder:
    """Prefill the prompts, and return the decoder of their completions.

    bits: with which rows choose their tokens; None: those of the keys, which are consumed.
    """
    prompts, lengths, keys, _, before, vocabulary = inputs
    (a, p, g), new = keys.shape, sampling.max_new_tokens
    dtype = jnp.dtype(dtype_on(platforms.platform_of(params), sampling.compute_dtype))
    # A single agent has no agent axis here: XLA drops an axis of 1 from some shapes only, and then copies the cache per token.
    drop_axis = partial(jax.tree.map, lambda x: x[0]) if a == 1 else lambda tree: tree
    over_agents = (lambda f, *_: f) if a == 1 else jax.vmap
    numbers = platforms.layer_numbers(cfg.num_layers, lengths)
    own, restore_shared = own_leaves((params, prompts, lengths, before))
    # Shared parameters stay one array in the view too; without these axes, vmap would copy them for each agent.
    axes = decoding.view_axes(jax.tree.map(lambda x: None if is_shared(x) else 0, params, is_leaf=is_shared), cfg, fused)

    def prefill(own: list[Any]) -> tuple[Any, Any, Any, Any]:
        params, prompts, lengths, before = restore_shared(own)
        ends = {name: params[name].astype(dtype) for name in ("embed", "lm_head") if name in params}
        params = params | gather(ends, cfg)  # layers stay divided, see `decoding.decode_view`
        prefix = decoding.prefill(params, cfg, prompts, lengths - 1, before)
        view = decoding.decode_view(params, cfg, dtype, prefix, new, numbers, panels, fused)
        cache = decoding.init_cache(cfg, prefix, g, new, dtype, fused)
        return view, cache, prefix, decoding.first_states(cfg, prefix)

    view, cache, prefix, states = over_agents(prefill, 0, (axes, 0, 0, 0))(drop_axis(own))

    def decode(view: Any, cache: Any, tokens: Array, t: Array, clock: Array | None, live: Array) -> tuple[Array, Any]:
        step = over_agents(partial(_step, cfg, fused), (axes, 0, 0, 0 if t.ndim else None, None, 0))
        logits, cache = step(view, cache, drop_axis(tokens), drop_axis(t) if t.ndim else t, clock, drop_axis(live))
        return logits.reshape(*tokens.shape, -1), cache

    def per_agent(f: Callable) -> Callable:
        return lambda caches, rows: over_agents(f)(caches, drop_axis(rows))

    def export(cache: Any, action_mask: Array) -> Any:
        counts = action_mask.sum(-1).reshape(a, p * g)  # cached: the prompt's last token and the completion's but its last
        out = over_agents(partial(decoding.group_cache, fused=fused))(prefix, cache, drop_axis(counts))
        return jax.tree.map(lambda x: x[None], out) if a == 1 else out

    last = jnp.take_along_axis(prompts, lengths[..., None] - 1, -1)  # [A, P, 1]
    first_tokens = jnp.broadcast_to(last, (a, p, g))
    if bits is None:
        # Before the loop: in it, XLA for CPUs would run random numbers and a scatter as loops, at every token.
        bits = random_bits(keys.reshape(-1), new).reshape(new, a, p * g, 2)
    stop = stop_of_rows(inputs).reshape(a, p * g, -1)
    return Decoder(view, decode, per_agent, export, cache, states, first_tokens, fused, bits, stop, sampling, vocabulary)


def _step(
    cfg: ModelConfig, fused: bool, view: Any, cache: Any, tokens: Array, t: Array, clock: Array | None, live: Array
) -> tuple[Array, Any]:
    return decoding.decode_step(view, cfg, cache, tokens, t, clock, fused, live.reshape(-1))


def ids_in_prompts(inputs: SampleInputs, vocab: int) -> Bool[Array, "agent prompt group {vocab}"]:
    """Return which ids occur in the prompt of each row."""
    real = jnp.arange(inputs.prompts.shape[-1]) < inputs.lengths[..., None]
    seen = jax.vmap(jax.vmap(lambda ids, ok: jnp.zeros(vocab, bool).at[ids].max(ok)))(inputs.prompts, real)
    return jnp.broadcast_to(seen[:, :, None], (*inputs.keys.shape, vocab))


def row_keys(ids: RowIds, group: int) -> Key[Array, "agent prompt {group}"]:
    """Return the random key of each row.

    The key of the seed is folded with step, purpose, turn, stack, agent, prompt and index in the group. There is no running
    split, so a row's key, and with it its completion, follows from these numbers alone.

    Args:
        ids: the numbers that identify the rows. The prompt axis has all prompts of the agent's first role, then of the next.
        group: completions per prompt.
    """
    seeds, stacks, agents = jnp.broadcast_arrays(*map(jnp.asarray, (ids.seed, ids.stack, ids.agents.reshape(-1))))
    keys = jax.vmap(jax.random.key)(seeds)
    for number in (ids.step, ids.purpose, ids.turn):
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    for numbers in (stacks, agents):
        keys = jax.vmap(jax.random.fold_in)(keys, numbers)
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    prompts, completions = jnp.asarray(ids.prompt_ids), jnp.arange(group)
    if ids.alike is not None:
        completions = jnp.where(jnp.asarray(ids.alike)[:, None], 0, completions)
    keys = jax.vmap(fold)(keys, jnp.broadcast_to(prompts, (len(keys), prompts.shape[-1])))
    keys = jax.vmap(jax.vmap(fold, (0, None)))(keys, jnp.broadcast_to(completions, (len(keys), group)))
    return keys.reshape(ids.agents.shape[0], -1, group)
