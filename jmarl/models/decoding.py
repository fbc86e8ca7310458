"""Decode with a KV cache, for one agent: prompts are computed once, then one token at a time for every row of their groups.

A `Prefix` holds the keys and values of prompts, a `Cache` those of the rows that are being written. `GroupCache` holds both
after decoding: a prompt of a later turn that follows a row starts from its `prefix_of_rows`, so nothing is computed twice.
Recurrent layers have a state in their place: a row begins with that of its prompt, and its own contains it.
"""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmarl.models.config import ModelConfig
from jmarl.models.cpu import Panels, cut_panels, split_panels
from jmarl.models.decoder import (
    Block,
    Hidden,
    Params,
    cast,
    embedded,
    final_states,
    logits,
    run_layers,
)
from jmarl.models.layers.attention import (
    Angles,
    Keys,
    KeyValues,
    Queries,
    attend_stream,
    capped,
    causal_mask,
    in_window,
    rope,
    rope_kinds,
)
from jmarl.models.layers.delta import DeltaState, empty_state, prompts_delta, tokens_delta
from jmarl.models.layers.kinds import place_of
from jmarl.models.layers.products import product
from jmarl.models.layers.token_attention import fused_token_attention, mask_of_token, token_attention
from jmarl.models.lora import join_axes_by_input, join_by_input
from jmarl.models.sharding import gather

# Of R = P * G rows. Per layer: keys [K, R, h, T] and values [K, R, T, h]; fused: both [R, T, K, h]. Recurrent: a state [R, ...]
Cache = list[KeyValues | DeltaState]
OfPrompts = KeyValues | tuple[()]  # of one layer; () if recurrent


class Prefix(NamedTuple):
    """Keys and values of S positions before each of P rows; some positions may be empty."""

    cache: KeyValues  # keys [L, K, P, h, S], values [L, K, P, S, h]
    mask: Array  # [P, S] bool: positions that hold a token; their number is the position of the next token
    delta: DeltaState | None = None  # [L, P, ...] of recurrent layers


class GroupCache(NamedTuple):
    """Keys and values of P prompts and their R = P * G completions, from which prompts of the next turn continue."""

    prefix: Prefix  # of P prompts
    rows: KeyValues  # keys [L, K, R, h, T], values [L, K, R, T, h]
    lengths: Array  # [R]: number of tokens of each row in the cache
    delta: DeltaState | None = None  # [L, R, ...] of recurrent layers, after prompt and row


class DecodeView(NamedTuple):
    """The arrays that the decode loop of one agent reads."""

    params: Params  # all parameters but the layers
    # Per layer: parameters, and of prompts keys [K, P, h, S] and values [K, P, S, h]; fused: both [P, S, K, h].
    layers: list[tuple[Params, OfPrompts]]
    prefix_mask: Array  # [P, S] bool, as in `Prefix`
    rope: dict[str, Angles]  # for S + T positions, of each kind of layer
    output_panels: Panels | None  # the output weight, if it is read cut into panels


def prefill(
    params: Params,
    cfg: ModelConfig,
    prompts: Int[Array, "prompt position"],
    lengths: Int[Array, " prompt"],
    before: Prefix | None = None,
) -> Prefix:
    """Return the prefix of prompts, which follow the rows of `before`; it has the dtype of the embedding.

    Args:
      prompts: padded on the right.
      lengths: number of tokens of each prompt.
      before: what stands before each prompt, if anything.
    """
    p, s = prompts.shape
    before_mask = jnp.zeros((p, 0), bool) if before is None else before.mask
    causal = jnp.broadcast_to(causal_mask(s), (p, s, s))
    mask = jnp.concatenate([jnp.broadcast_to(before_mask[:, None], (p, s, before_mask.shape[1])), causal], -1)
    positions = before_mask.sum(-1)[:, None] + jnp.arange(s)
    key_positions = jnp.concatenate([jnp.cumsum(before_mask, -1) - 1, positions], -1)
    distance = positions[:, :, None] - key_positions[:, None]

    def attention(
        q: Queries, k: Keys, v: Keys, past: KeyValues | None = None, slides: Array | None = None
    ) -> tuple[Queries, KeyValues]:
        shape, seen = q.shape, in_window(mask, distance, cfg.sliding_window, slides)
        q, k, v = (x.reshape(p, s, *x.shape[1:]) for x in (q, k, v))
        attend = partial(attend_stream, cap=cfg.attention_cap)
        heads, cache = jax.vmap(attend, (0, 0, 0, 1, 0), (0, 1))(q, k, v, past, seen)
        return heads.reshape(shape), cache

    past, delta_past = (None, None) if before is None else (before.cache, before.delta)
    x, delta = embedded(params, cfg, prompts.reshape(-1)), prompts_delta(lengths, cfg.delta)
    _, states, _ = run_layers(params, cfg, x, positions.reshape(-1), attention, None, past, delta=delta, delta_past=delta_past)
    return Prefix(states.attention, jnp.concatenate([before_mask, jnp.arange(s) < lengths[:, None]], 1), states.delta)


def group_cache(prefix: Prefix, cache: Cache, lengths: Int[Array, " row"], fused: bool = False) -> GroupCache:
    """Return the `GroupCache` after decoding. lengths: number of tokens of each row in the cache."""
    rows, states = [x for x in cache if isinstance(x, KeyValues)], [x for x in cache if isinstance(x, DeltaState)]
    if fused:
        rows = [KeyValues(jnp.einsum("rtkh->krht", x.keys), jnp.einsum("rtkh->krth", x.values)) for x in rows]
    delta = jax.tree.map(lambda *layers: jnp.stack(layers), *states) if states else None
    return GroupCache(prefix._replace(delta=None), jax.tree.map(lambda *layers: jnp.stack(layers), *rows), lengths, delta)


def prefix_of_rows(group: GroupCache, rows: Int[Array, " row"]) -> Prefix:
    """Return the prefixes of prompts that follow these rows of a group cache: the row's prompt, then the row."""
    prompts, written = group.prefix, group.rows
    of_row = rows // (group.lengths.shape[0] // prompts.mask.shape[0])  # the number of each row's prompt
    keys = jnp.concatenate([prompts.cache.keys[:, :, of_row], written.keys[:, :, rows]], -1)
    values = jnp.concatenate([prompts.cache.values[:, :, of_row], written.values[:, :, rows]], -2)
    mask = jnp.arange(keys.shape[-1] - prompts.mask.shape[1]) < group.lengths[rows][:, None]
    delta = jax.tree.map(lambda x: x[:, rows], group.delta)
    return Prefix(KeyValues(keys, values), jnp.concatenate([prompts.mask[of_row], mask], 1), delta)


def decode_view(
    params: Params,
    cfg: ModelConfig,
    dtype: jax.typing.DTypeLike,
    prefix: Prefix,
    capacity: int,
    layer_numbers: Sequence[Int[Array, ""] | int],
    cut: bool = False,
    fused: bool = False,
) -> DecodeView:
    """Return what the decode loop reads. Call it once, outside the loop: inside, it would copy the weights at every token.

    Args:
      dtype: compute dtype.
      capacity: number of tokens that a row may have.
      layer_numbers: 0 to L - 1. As traced numbers they let XLA compile one kernel that slices a layer, instead of L kernels.
      cut: whether weights are cut into panels (`models/cpu.py`).
      fused: whether a token attends by one kernel (`models/gpu.py`), which reads keys and values in a layout of its own. LoRA
        adapters of one input are then joined too, for fewer kernels; a CPU gains nothing.
    """
    rest = cast({name: w for name, w in params.items() if name != "layers"}, dtype)

    def of_prompts(cache: KeyValues) -> KeyValues:
        return KeyValues(jnp.einsum("kphs->pskh", cache.keys), jnp.einsum("kpsh->pskh", cache.values)) if fused else cache

    def take(tree: Any, i: int) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer_numbers[i], 0, keepdims=False), tree)

    def weight(leaf: Any, i: int) -> Any:
        return leaf[i] if isinstance(leaf, tuple) else take(leaf, i)  # a base has an array for each layer: nothing is copied

    def layer(n: int) -> tuple[Params, OfPrompts]:
        places = {name: place_of(cfg, name, n) for name in params["layers"]}
        w = cast({name: weight(params["layers"][name], i) for name, i in places.items() if i is not None}, dtype)
        w = gather(w, cfg)  # after the slice: whole layers are then in memory once
        w = join_by_input(w, cfg) if fused else w
        products = {name for name, x in w.items() if not isinstance(x, dict) and x.ndim == 2 and name != "delta_conv"}
        w = {name: cut_panels(x) if cut and name in products else x for name, x in w.items()}
        place = place_of(cfg, "past", n)
        return w, () if place is None else of_prompts(KeyValues(*(x.astype(dtype) for x in take(prefix.cache, place))))

    layers, panels = [layer(n) for n in range(cfg.num_layers)], None
    if cut and isinstance(head := cut_panels(rest["lm_head"] if "lm_head" in rest else rest["embed"].T), Panels):
        panels = split_panels(head)
    return DecodeView(rest, layers, prefix.mask, rope(cfg, jnp.arange(prefix.mask.shape[1] + capacity)), panels)


def view_axes(axes: Params, cfg: ModelConfig, fused: bool = False) -> DecodeView:
    """Return the agent axes of a `DecodeView` of several agents.

    axes: 0 for each parameter, or None for parameters that the agents share.
    """
    rest = {name: axis for name, axis in axes.items() if name != "layers"}
    output = axes["lm_head"] if "lm_head" in axes else axes["embed"]

    def layer(n: int) -> Params:
        own = {name: x for name, x in axes["layers"].items() if place_of(cfg, name, n) is not None}
        return join_axes_by_input(own, cfg) if fused else own

    return DecodeView(rest, [(layer(n), 0) for n in range(cfg.num_layers)], 0, 0, output)  # pyright: ignore[reportArgumentType]


def empty_keys(cfg: ModelConfig, rows: int, capacity: int, dtype: jax.typing.DTypeLike, fused: bool = False) -> list[OfPrompts]:
    """Return an empty place for `capacity` keys and values of rows, of each layer that attends."""
    k, h = cfg.num_kv_heads, cfg.head_dim
    if fused:
        empty = [KeyValues(*(jnp.zeros((rows, capacity, k, h), dtype) for _ in range(2))) for _ in range(cfg.num_layers)]
    else:
        keys, values = jnp.zeros((k, rows, h, capacity), dtype), jnp.zeros((k, rows, capacity, h), dtype)
        empty = [KeyValues(keys, values) for _ in range(cfg.num_layers)]
    return [() if cfg.is_recurrent(n) else x for n, x in enumerate(empty)]


def first_states(cfg: ModelConfig, prefix: Prefix) -> list[DeltaState | None]:
    """Return the states of prompts, [P, ...] of each recurrent layer; None of the others."""
    places = [place_of(cfg, "delta_past", n) for n in range(cfg.num_layers)]
    return [None if place is None else jax.tree.map(itemgetter(place), prefix.delta) for place in places]


def init_cache(
    cfg: ModelConfig, prefix: Prefix, group: int, capacity: int, dtype: jax.typing.DTypeLike, fused: bool = False
) -> Cache:
    """Return the cache of rows of up to `capacity` tokens, of which none is written; some rows follow each prompt."""
    keys = empty_keys(cfg, prefix.mask.shape[0] * group, capacity, dtype, fused)
    states = first_states(cfg, prefix)
    return [
        empty if state is None else jax.tree.map(lambda x: jnp.repeat(x, group, 0), state)
        for empty, state in zip(keys, states, strict=True)
    ]  # pyright: ignore[reportReturnType]


def empty_cache(cfg: ModelConfig, rows: int, capacity: int, dtype: jax.typing.DTypeLike, fused: bool = False) -> Cache:
    """Return a cache of the same shapes, of rows that have no prompts yet."""
    keys = empty_keys(cfg, rows, capacity, dtype, fused)
    if cfg.delta is None:
        return keys  # pyright: ignore[reportReturnType]
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), empty_state(cfg.delta, dtype))
    return [state if cfg.is_recurrent(n) else x for n, x in enumerate(keys)]  # pyright: ignore[reportReturnType]


def roll(cache: Cache, places: Int[Array, ""]) -> Cache:
    """Return a cache, of one or several agents, whose tokens are moved by some places, those at the end to the beginning."""
    return [
        KeyValues(jnp.roll(x.keys, places, -1), jnp.roll(x.values, places, -2)) if isinstance(x, KeyValues) else x
        for x in cache
    ]


def resize(prompts: Sequence[OfPrompts], width: int, fused: bool = False) -> list[OfPrompts]:
    """Return the prompts of a `DecodeView`, of one or several agents, cut or padded to this number of positions."""

    def resized(x: Array, axis: int) -> Array:
        axis += x.ndim
        x = lax.slice_in_dim(x, 0, min(width, x.shape[axis]), axis=axis)
        return jnp.pad(x, [(0, width - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])

    keys, values = (-3, -3) if fused else (-1, -2)
    return [KeyValues(resized(x.keys, keys), resized(x.values, values)) if isinstance(x, KeyValues) else x for x in prompts]


def decode_step(
    view: DecodeView,
    cfg: ModelConfig,
    cache: Cache,
    tokens: Int[Array, "prompt group"],
    t: Int[Array, "..."],
    clock: Int[Array, ""] | None = None,
    fused: bool = False,
    live: Bool[Array, " row"] | None = None,
) -> tuple[Float[Array, "prompt group vocabulary"], Cache]:
    """Feed one token per row, at index t after their prefixes.

    Args:
      t: index of the token in every row; with `clock` in each row, [P * G].
      clock: None, or the place of the tokens in the cache, modulo its capacity: rows that began at different times still write
        at one place, because attention does not depend on the order of keys. A fused step writes at index t of each row.
      fused: see `decode_view`.
      live: rows that have not ended; the states of the others stay as they are. None: all.

    Returns float32 logits and the cache with the tokens; it is the caller's cache, written in place.
    """
    (p, g), lengths = tokens.shape, view.prefix_mask.sum(-1)
    at, kinds = jnp.repeat(lengths, g) + t, rope_kinds(cfg)
    angles = jax.tree.map(lambda table: table[at], view.rope)
    x, new_cache = embedded(view.params, cfg, tokens.reshape(-1)), []

    @partial(jax.jit, static_argnums=0)  # traced once for each kind, not once per layer
    def layer(
        number: int, x: Hidden, w: Params, prompt: OfPrompts, row: Any, angles: Angles, seen: Any, t: Int[Array, "..."]
    ) -> tuple[Hidden, Any]:
        attention: Any = fused_token_attention if fused else partial(token_attention, cap=cfg.attention_cap)
        mix = tokens_delta(row, seen) if cfg.is_recurrent(number) else attention(prompt, row, seen, t)
        out: Any = Block(cfg, number).apply({"params": w}, x, angles, mix)
        return out[0], out[1][0]

    capacity = next(x.keys.shape[-1] for x in cache if isinstance(x, KeyValues))  # unless fused
    sliding = cfg.sliding_layers or (False,) * cfg.num_layers
    masks = {
        slides: lengths
        if fused
        else mask_of_token(view.prefix_mask, g, capacity, t, clock, cfg.sliding_window if slides else None)
        for slides in set(sliding)
    }
    place = t if fused or clock is None else clock % capacity
    for n, ((w, prompt), row) in enumerate(zip(view.layers, cache, strict=True)):
        seen = live if cfg.is_recurrent(n) else masks[sliding[n]]
        x, layer_cache = layer(n % cfg.period, x, w, prompt, row, angles[kinds[n]], seen, place)
        new_cache.append(layer_cache)
    x = final_states(view.params, cfg, x)
    if view.output_panels is None:
        out = logits(view.params, x, cfg.logit_cap)
    else:
        out = capped(product(x, view.output_panels), cfg.logit_cap)
    return out.reshape(p, g, -1), new_cache
