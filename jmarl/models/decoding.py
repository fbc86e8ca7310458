"""Decoding with the decoder of one agent: prompts computed once, then one token at a time for every row of their groups.

A `Prefix` is what was computed before a prompt's completions, a `Cache` what its rows wrote. `Kept` is both, after decoding:
a prompt of a later turn that follows a row begins with its `prefix_of`, so nothing is computed twice.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmarl.models.config import ModelConfig
from jmarl.models.cpu import Panels, cut_panels, split_panels
from jmarl.models.decoder import (
    MASKED,
    Attention,
    Block,
    Params,
    cast,
    exact,
    logits,
    product,
    rms_norm,
    rope,
    run_layers,
    stream,
)


class Prefix(NamedTuple):
    """Tokens that were computed: keys and values of S places before each of P rows, of which some may be empty."""

    keys: jax.Array  # [L, K, P, h, S]
    values: jax.Array  # [L, K, P, S, h]
    seen: jax.Array  # [P, S] bool: places that hold a token; as many stand before the next one


def prefill(params: Params, cfg: ModelConfig, prompts: jax.Array, lengths: jax.Array, before: Prefix | None = None) -> Prefix:
    """Prompts [P, S], of which the first lengths [P] ids are real, behind what came before them; in the embedding's dtype."""
    p, s = prompts.shape
    seen = jnp.zeros((p, 0), bool) if before is None else before.seen
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((s, s), bool)), (p, s, s))
    mask = jnp.concatenate([jnp.broadcast_to(seen[:, None], (p, s, seen.shape[1])), causal], -1)

    def of_prompt(q, k, v, mask, *past):
        def extend(k, v):
            if past:
                k, v = jnp.concatenate([past[0], k], -1), jnp.concatenate([past[1], v], -2)
            return (k, v, mask), (k, v)

        return stream(extend)(q, k, v)

    def attention(q, k, v, *past):
        past = [jnp.swapaxes(x, 0, 1) for x in past]  # rows first
        heads, kept = jax.vmap(of_prompt)(*(x.reshape(p, s, *x.shape[1:]) for x in (q, k, v)), mask, *past)
        return heads.reshape(q.shape), jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), kept)

    positions = (seen.sum(-1)[:, None] + jnp.arange(s)).reshape(-1)
    past = () if before is None else (before.keys, before.values)
    _, (keys, values) = run_layers(params, cfg, params["embed"][prompts.reshape(-1)], positions, attention, before=past)
    return Prefix(keys, values, jnp.concatenate([seen, jnp.arange(s) < lengths[:, None]], 1))


Cache = list[tuple[jax.Array, jax.Array]]  # of each layer: keys [K, R, h, T] and values [K, R, T, h] of R = P * G rows


class Kept(NamedTuple):
    """What a group of completions leaves for the next turn: the prompts' prefixes and, behind each, its R = P * G rows."""

    prefix: Prefix  # of P prompts
    keys: jax.Array  # [L, K, R, h, T]
    values: jax.Array  # [L, K, R, T, h]
    count: jax.Array  # [R]: tokens that each row has in the cache


def keep(prefix: Prefix, cache: Cache, count: jax.Array) -> Kept:
    """`Kept` of a cache after decoding, with count [R] tokens of each row in it."""
    keys, values = (jnp.stack(part) for part in zip(*cache, strict=True))
    return Kept(prefix, keys, values, count)


def prefix_of(kept: Kept, rows: jax.Array) -> Prefix:
    """The prefixes of prompts that follow rows [P] of what was kept: that row and its prompt."""
    of_prompts, capacity = kept.prefix, kept.keys.shape[-1]
    prompts = rows // (kept.count.shape[0] // of_prompts.seen.shape[0])
    keys = jnp.concatenate([of_prompts.keys[:, :, prompts], kept.keys[:, :, rows]], -1)
    values = jnp.concatenate([of_prompts.values[:, :, prompts], kept.values[:, :, rows]], -2)
    written = jnp.arange(capacity) < kept.count[rows][:, None]
    return Prefix(keys, values, jnp.concatenate([of_prompts.seen[prompts], written], 1))


def decode_view(params: Params, cfg: ModelConfig, dtype, prefix: Prefix, capacity: int, numbers, cut: bool = False):
    """What the decode loop reads, for one agent and in `dtype`: the parameters with their layers apart, each with the keys and
    values of the prefix; and rotary angles for `capacity` tokens more.

    numbers: 0 to L - 1; as numbers that XLA cannot know, they let it compile one kernel that slices a layer, not L of them.
    cut: weights in `panels`. Made once a call, outside the loop: slicing or cutting inside it would copy the weights at every
    token.
    """
    rest = cast({name: w for name, w in params.items() if name != "layers"}, dtype)
    stacked = params["layers"], (prefix.keys, prefix.values)

    def layer(i):
        w, kv = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False).astype(dtype), stacked)
        return {name: cut_panels(x) if cut and not isinstance(x, dict) and x.ndim == 2 else x for name, x in w.items()}, kv

    view = rest | {"layers": [layer(i) for i in numbers], "seen": prefix.seen, "head": None}
    if cut and isinstance(head := cut_panels(rest["lm_head"] if "lm_head" in rest else rest["embed"].T), Panels):
        view["head"] = split_panels(head)
    return view | {"rope": rope(cfg, jnp.arange(prefix.seen.shape[1] + capacity))}


def view_axes(axes: Params, cfg: ModelConfig) -> Params:
    """The agent axis of each part of a `decode_view` for all agents: 0, or None where `axes` says so of a parameter, which the
    agents then share."""
    rest = {name: axis for name, axis in axes.items() if name != "layers"}
    of_head = axes["lm_head"] if "lm_head" in axes else axes["embed"]
    return rest | {"layers": [(axes["layers"], 0)] * cfg.num_layers, "seen": 0, "rope": 0, "head": of_head}


def init_cache(cfg: ModelConfig, rows: int, capacity: int, dtype: jax.typing.DTypeLike) -> Cache:
    """Zeros for `rows` rows of up to `capacity` tokens."""
    k, h = cfg.num_kv_heads, cfg.head_dim
    keys, values = jnp.zeros((k, rows, h, capacity), dtype), jnp.zeros((k, rows, capacity, h), dtype)
    return [(keys, values) for _ in range(cfg.num_layers)]


@jax.custom_batching.custom_vmap
def _write(cache: jax.Array, new: jax.Array, t: jax.Array) -> jax.Array:
    """The cache with new, which has size 1 in one of the last two axes, at index t of that axis. Under vmap over cache and new
    it stays what it is: jax would make a scatter of it, which XLA does not do in place."""
    return lax.dynamic_update_slice_in_dim(cache, new, t, -1 if new.shape[-1] == 1 else -2)


@_write.def_vmap
def _(_, batched, cache, new, t):
    if batched != [True, True, False]:
        raise NotImplementedError(f"a cache is written for all agents at one index t, not with axes {batched}")
    return _write(cache, new, t), True


def _token_attention(prompt: tuple, row: tuple, mask: jax.Array, t: jax.Array) -> Attention:
    """The attention of one token of each of R = P * G rows: to itself, its prompt (keys [K, P, h, S], values [K, P, S, h]) and
    its row before it (of a `Cache`); mask [R, 1, S + T].

    The cache is written before it is read, and in the shape in which it is read: then XLA writes it in place.
    """
    (prompt_k, prompt_v), (row_k, row_v) = prompt, row
    k_heads, p, h, s = prompt_k.shape

    def attention(q, k, v):
        q, k, v = (jnp.swapaxes(x, 0, 1) for x in (q, k, v))  # heads first: both products batch over them
        r, n = q.shape[1:3]
        keys, values = _write(row_k, k[..., None], t), _write(row_v, v[:, :, None], t)
        together = (k_heads, p, r // p * n, -1)  # the queries of a prompt's rows, as rows of one matrix
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=exact(q))
        of_prompt = product("kpmh,kphs->kpms", q.reshape(together), prompt_k).reshape(k_heads, r, n, s)
        # Padded and added, not joined: XLA fuses this with what follows, into one kernel for all layers.
        right, left = (((0, 0),) * 3 + (pad,) for pad in ((0, keys.shape[-1]), (s, 0)))
        scores = jnp.pad(of_prompt, right) + jnp.pad(product("krqh,krht->krqt", q, keys), left)
        scores = jnp.where(mask, scores / math.sqrt(h), MASKED)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        weights = weights.astype(q.dtype)
        out = product("kpms,kpsh->kpmh", weights[..., :s].reshape(together), prompt_v).reshape(q.shape)
        out = out + product("krqt,krth->krqh", weights[..., s:], values)
        return jnp.swapaxes(out / total, 0, 1).astype(q.dtype), (keys, values)

    return attention


def decode_step(view: Params, cfg: ModelConfig, cache: Cache, tokens: jax.Array, t: jax.Array) -> tuple[jax.Array, Cache]:
    """Feed tokens [P, G], one a row, at index t [] after their prefixes; of one agent.

    Returns float32 logits [P, G, V] and the cache with the tokens in it; it is the caller's cache, written in place.
    """
    (p, g), capacity = tokens.shape, cache[0][0].shape[-1]
    written = jnp.broadcast_to(jnp.arange(capacity) <= t, (p * g, capacity))
    mask = jnp.concatenate([jnp.repeat(view["seen"], g, 0), written], 1)[:, None]
    cos, sin = (table[jnp.repeat(view["seen"].sum(-1) + t, g)] for table in view["rope"])
    x, new = view["embed"][tokens.reshape(-1)], []

    @jax.jit  # traced once, not once a layer
    def layer(x, w, prompt, row, cos, sin, mask, t):
        return Block(cfg).apply({"params": w}, x, cos, sin, _token_attention(prompt, row, mask, t))

    for (w, prompt), row in zip(view["layers"], cache, strict=True):
        x, kv = layer(x, w, prompt, row, cos, sin, mask, t)
        new.append(kv)
    x = rms_norm(x, view["final_norm"], cfg.rms_eps)
    out = logits(view, x) if view["head"] is None else product(x, view["head"])
    return out.reshape(p, g, -1), new
