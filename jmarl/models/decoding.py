"""Decode with a KV cache, for one agent: prompts are computed once, then one token at a time for every row of their groups.

A `Prefix` holds the keys and values of prompts, a `Cache` those of the rows that are being written. `GroupCache` holds both
after decoding: a prompt of a later turn that follows a row starts from its `prefix_of_rows`, so nothing is computed twice.
"""

import math
from collections.abc import Sequence
from functools import partial
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
    MASKED,
    Angles,
    Attention,
    Keys,
    KeyValues,
    Queries,
    attend_stream,
    capped,
    causal_mask,
    einsum_float32,
    in_window,
    rope,
    rope_kinds,
)
from jmarl.models.layers.kinds import place_of
from jmarl.models.layers.products import product
from jmarl.models.lora import join_axes_by_input, join_by_input
from jmarl.models.platforms import attend_token
from jmarl.models.sharding import gather

Mask = Bool[Array, "row 1 key"]
Cache = list[KeyValues]  # per layer: keys [K, R, h, T] and values [K, R, T, h] of R = P * G rows; fused: both [R, T, K, h]


class Prefix(NamedTuple):
    """Keys and values of S positions before each of P rows; some positions may be empty."""

    cache: KeyValues  # keys [L, K, P, h, S], values [L, K, P, S, h]
    mask: Array  # [P, S] bool: positions that hold a token; their number is the position of the next token


class GroupCache(NamedTuple):
    """Keys and values of P prompts and their R = P * G completions, from which prompts of the next turn continue."""

    prefix: Prefix  # of P prompts
    rows: KeyValues  # keys [L, K, R, h, T], values [L, K, R, T, h]
    lengths: Array  # [R]: number of tokens of each row in the cache


class DecodeView(NamedTuple):
    """The arrays that the decode loop of one agent reads."""

    params: Params  # all parameters but the layers
    # Per layer: parameters, and of prompts keys [K, P, h, S] and values [K, P, S, h]; fused: both [P, S, K, h].
    layers: list[tuple[Params, KeyValues]]
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

    past = None if before is None else before.cache
    x = embedded(params, cfg, prompts.reshape(-1))
    _, cache, _ = run_layers(params, cfg, x, positions.reshape(-1), attention, None, past)
    return Prefix(cache, jnp.concatenate([before_mask, jnp.arange(s) < lengths[:, None]], 1))


def group_cache(prefix: Prefix, cache: Cache, lengths: Int[Array, " row"], fused: bool = False) -> GroupCache:
    """Return the `GroupCache` after decoding. lengths: number of tokens of each row in the cache."""
    if fused:
        cache = [KeyValues(jnp.einsum("rtkh->krht", x.keys), jnp.einsum("rtkh->krth", x.values)) for x in cache]
    return GroupCache(prefix, jax.tree.map(lambda *layers: jnp.stack(layers), *cache), lengths)


def prefix_of_rows(group: GroupCache, rows: Int[Array, " row"]) -> Prefix:
    """Return the prefixes of prompts that follow these rows of a group cache: the row's prompt, then the row."""
    prompts, written = group.prefix, group.rows
    of_row = rows // (group.lengths.shape[0] // prompts.mask.shape[0])  # the number of each row's prompt
    keys = jnp.concatenate([prompts.cache.keys[:, :, of_row], written.keys[:, :, rows]], -1)
    values = jnp.concatenate([prompts.cache.values[:, :, of_row], written.values[:, :, rows]], -2)
    mask = jnp.arange(keys.shape[-1] - prompts.mask.shape[1]) < group.lengths[rows][:, None]
    return Prefix(KeyValues(keys, values), jnp.concatenate([prompts.mask[of_row], mask], 1))


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
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer_numbers[i], 0, keepdims=False).astype(dtype), tree)

    def layer(n: int) -> tuple[Params, KeyValues]:
        places = {name: place_of(cfg, name, n) for name in params["layers"]}
        w, cache = {name: take(params["layers"][name], i) for name, i in places.items() if i is not None}, take(prefix.cache, n)
        w = gather(w, cfg)  # after the slice: whole layers are then in memory once
        w = join_by_input(w, cfg) if fused else w
        w = {name: cut_panels(x) if cut and not isinstance(x, dict) and x.ndim == 2 else x for name, x in w.items()}
        return w, of_prompts(cache)

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
    layer = join_axes_by_input(axes["layers"], cfg) if fused else axes["layers"]
    layers = [({name: x for name, x in layer.items() if place_of(cfg, name, n) is not None}, 0) for n in range(cfg.num_layers)]
    return DecodeView(rest, layers, 0, 0, output)  # pyright: ignore[reportArgumentType]


def init_cache(cfg: ModelConfig, rows: int, capacity: int, dtype: jax.typing.DTypeLike, fused: bool = False) -> Cache:
    """Return an empty cache for rows of up to `capacity` tokens."""
    k, h = cfg.num_kv_heads, cfg.head_dim
    if fused:
        return [KeyValues(*(jnp.zeros((rows, capacity, k, h), dtype) for _ in range(2))) for _ in range(cfg.num_layers)]
    keys, values = jnp.zeros((k, rows, h, capacity), dtype), jnp.zeros((k, rows, capacity, h), dtype)
    return [KeyValues(keys, values) for _ in range(cfg.num_layers)]


@jax.custom_batching.custom_vmap
def _write(
    cache: Float[Array, "*batch d e f"], new: Float[Array, "*batch m n o"], t: Int[Array, ""] | int
) -> Float[Array, "*batch d e f"]:
    """Write `new`, which has size 1 in one of the last three axes, into the cache at index t of that axis.

    Under vmap over cache and new it stays one slice update: jax would make a scatter, which XLA does not do in place.
    """
    axis = next((axis for axis in (-1, -2, -3) if new.shape[axis] != cache.shape[axis]), -1)
    return lax.dynamic_update_slice_in_dim(cache, new, t, axis)


@_write.def_vmap
def _write_for_all_agents(
    num_agents: int, batched: Sequence[bool], cache: Float[Array, "..."], new: Float[Array, "..."], t: Int[Array, "..."] | int
) -> tuple[Float[Array, "..."], bool]:
    if batched != [True, True, False]:
        raise NotImplementedError(f"a cache is written for all agents at one index t; got (cache, new, t) batched {batched}")
    return _write(cache, new, t), True


def _token_attention(prompt: KeyValues, row: KeyValues, mask: Mask, t: Int[Array, ""], cap: float | None = None) -> Attention:
    """Return the attention of one token of each of R = P * G rows: to its prompt, its row and itself.

    The cache is written before it is read, and in the layout in which it is read: then XLA writes it in place.

    Args:
      prompt: keys [K, P, h, S] and values [K, P, S, h].
      row: one layer of a `Cache`; the attention returns it with the new tokens.
      mask: which of S + T positions a row's token may see.
      t: the index of the tokens in the cache.
      cap: see `attention.capped`.
    """
    k_heads, p, h, s = prompt.keys.shape

    def attention(q: Queries, k: Keys, v: Keys) -> tuple[Queries, KeyValues]:
        q, k, v = (jnp.swapaxes(x, 0, 1) for x in (q, k, v))  # heads first: both products batch over them
        r, n = q.shape[1:3]
        keys, values = _write(row.keys, k[..., None], t), _write(row.values, v[:, :, None], t)
        merged = (k_heads, p, r // p * n, -1)  # the queries of all rows of a prompt as rows of one matrix
        prompt_scores = einsum_float32("kpmh,kphs->kpms", q.reshape(merged), prompt.keys).reshape(k_heads, r, n, s)
        # Padded and added, not concatenated: XLA fuses this with what follows, into one kernel for all layers.
        right, left = (((0, 0),) * 3 + (pad,) for pad in ((0, keys.shape[-1]), (s, 0)))
        scores = jnp.pad(prompt_scores, right) + jnp.pad(einsum_float32("krqh,krht->krqt", q, keys), left)
        scores = jnp.where(mask, capped(scores / math.sqrt(h), cap), MASKED)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        weights = weights.astype(q.dtype)
        out = einsum_float32("kpms,kpsh->kpmh", weights[..., :s].reshape(merged), prompt.values).reshape(q.shape)
        out = out + einsum_float32("krqt,krth->krqh", weights[..., s:], values)
        return jnp.swapaxes(out / total, 0, 1).astype(q.dtype), KeyValues(keys, values)

    return attention


def _mask_of_token(
    prefix_mask: Bool[Array, "prompt position"],
    group: int,
    capacity: int,
    t: Int[Array, "..."],
    clock: Int[Array, ""] | None,
    window: int | None = None,
) -> Mask:
    """Return which positions of its prompt and its row token t of each row may see. t, clock: see `decode_step`.

    window: how many tokens a sliding layer sees. None: all of them.
    """
    rows = prefix_mask.shape[0] * group
    if clock is None:
        age = jnp.broadcast_to(t - jnp.arange(capacity), (rows, capacity))
        written = jnp.broadcast_to(jnp.arange(capacity) <= t, (rows, capacity))
    else:
        age = (clock - jnp.arange(capacity)) % capacity  # of each place of the ring
        written = age <= t[:, None]
    prompt = jnp.repeat(prefix_mask, group, 0)
    if window is not None:
        written = written & (age < window)
        since = jnp.repeat(prefix_mask.sum(-1, keepdims=True) - jnp.cumsum(prefix_mask, -1) + 1, group, 0)
        prompt = prompt & (since + jnp.reshape(t, (-1, 1)) < window)
    return jnp.concatenate([prompt, written], 1)[:, None]


def _fused_token_attention(
    prompt: KeyValues, row: KeyValues, lengths: Int[Array, " prompt"], t: Int[Array, "..."]
) -> Attention:
    """Return `_token_attention` by one kernel. lengths: number of tokens of each prompt; there are none behind them. t: [R] if
    each row has an index of its own."""

    def write(cache: Array, new: Array) -> Array:
        return cache.at[jnp.arange(len(new)), t].set(new, unique_indices=True) if t.ndim else _write(cache, new[:, None], t)

    def attention(q: Queries, k: Keys, v: Keys) -> tuple[Queries, KeyValues]:
        keys, values = write(row.keys, k), write(row.values, v)
        written = jnp.broadcast_to(t + 1, q.shape[:1])
        return attend_token(q, *prompt, lengths, keys, values, written), KeyValues(keys, values)

    return attention


def roll(cache: Cache, places: Int[Array, ""]) -> Cache:
    """Return a cache, of one or several agents, whose tokens are moved by some places, those at the end to the beginning."""
    return [KeyValues(jnp.roll(x.keys, places, -1), jnp.roll(x.values, places, -2)) for x in cache]


def resize(prompts: Sequence[KeyValues], width: int, fused: bool = False) -> list[KeyValues]:
    """Return the prompts of a `DecodeView`, of one or several agents, cut or padded to this number of positions."""

    def resized(x: Array, axis: int) -> Array:
        axis += x.ndim
        x = lax.slice_in_dim(x, 0, min(width, x.shape[axis]), axis=axis)
        return jnp.pad(x, [(0, width - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])

    keys, values = (-3, -3) if fused else (-1, -2)
    return [KeyValues(resized(x.keys, keys), resized(x.values, values)) for x in prompts]


def decode_step(
    view: DecodeView,
    cfg: ModelConfig,
    cache: Cache,
    tokens: Int[Array, "prompt group"],
    t: Int[Array, "..."],
    clock: Int[Array, ""] | None = None,
    fused: bool = False,
) -> tuple[Float[Array, "prompt group vocabulary"], Cache]:
    """Feed one token per row, at index t after their prefixes.

    Args:
      t: index of the token in every row; with `clock` in each row, [P * G].
      clock: None, or the place of the tokens in the cache, modulo its capacity: rows that began at different times still write
        at one place, because attention does not depend on the order of keys. A fused step writes at index t of each row.
      fused: see `decode_view`.

    Returns float32 logits and the cache with the tokens; it is the caller's cache, written in place.
    """
    (p, g), lengths = tokens.shape, view.prefix_mask.sum(-1)
    at, kinds = jnp.repeat(lengths, g) + t, rope_kinds(cfg)
    angles = jax.tree.map(lambda table: table[at], view.rope)
    x, new_cache = embedded(view.params, cfg, tokens.reshape(-1)), []

    @partial(jax.jit, static_argnums=0)  # traced once for each kind, not once per layer
    def layer(
        number: int, x: Hidden, w: Params, prompt: KeyValues, row: KeyValues, angles: Angles, seen: Array, t: Int[Array, "..."]
    ) -> tuple[Hidden, KeyValues]:
        token_attention = _fused_token_attention if fused else partial(_token_attention, cap=cfg.attention_cap)
        out: Any = Block(cfg, number).apply({"params": w}, x, angles, token_attention(prompt, row, seen, t))
        return out[0], out[1][0]

    capacity = cache[0].keys.shape[-1]  # unless fused
    sliding = cfg.sliding_layers or (False,) * cfg.num_layers
    masks = {
        slides: lengths
        if fused
        else _mask_of_token(view.prefix_mask, g, capacity, t, clock, cfg.sliding_window if slides else None)
        for slides in set(sliding)
    }
    place = t if fused or clock is None else clock % capacity
    for n, ((w, prompt), row) in enumerate(zip(view.layers, cache, strict=True)):
        x, layer_cache = layer(n % cfg.period, x, w, prompt, row, angles[kinds[n]], masks[sliding[n]], place)
        new_cache.append(layer_cache)
    x = final_states(view.params, cfg, x)
    if view.output_panels is None:
        out = logits(view.params, x, cfg.logit_cap)
    else:
        out = capped(product(x, view.output_panels), cfg.logit_cap)
    return out.reshape(p, g, -1), new_cache
