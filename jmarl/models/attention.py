"""Attend: softmax attention of one token stream, and of groups of completions to their prompts.

Two forms of `group_attention`. In XLA's form scores are arrays [query, key] in float32, which a CPU handles well. On a GPU in
bfloat16, cuDNN's kernel (`gpu.py`) never writes them to memory.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmarl.models.gpu import Sizes, matmul_precision
from jmarl.models.platforms import attend_groups

MASKED = -1e30  # finite: a query that may see no key gives a finite result (masked later), not NaN


class KeyValues(NamedTuple):
    """Keys and values in the layouts that attention reads, behind any leading axes."""

    keys: Array  # [..., h, S]
    values: Array  # [..., S, h]


Queries = Float[Array, "token kv_head query head_dim"]  # also the heads that attention returns
Keys = Float[Array, "token kv_head head_dim"]  # also values

# From rotated queries, rotated keys and values to heads, and a pytree that the layer returns too, such as its keys and values.
Attention = Callable[[Queries, Keys, Keys], tuple[Queries, Any]]


def einsum_float32(subscripts: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the einsum of two arrays, accumulated and returned in float32."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32, precision=matmul_precision(x))


def attend(
    q: Float[Array, "kv_head query token head_dim"],
    keys: Float[Array, "kv_head head_dim key"],
    values: Float[Array, "kv_head key head_dim"],
    mask: Bool[Array, "token key"],
) -> Float[Array, "kv_head query token head_dim"]:
    """Return softmax attention, with the softmax in float32. mask: whether a token may see a key."""
    scores = einsum_float32("kqth,khs->kqts", q, keys) / math.sqrt(q.shape[-1])
    scores = jnp.where(mask, scores, MASKED)
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    out = einsum_float32("kqts,ksh->kqth", weights.astype(q.dtype), values)
    return (out / weights.sum(-1, keepdims=True)).astype(q.dtype)


def attend_stream(
    q: Queries, k: Keys, v: Keys, past: KeyValues | None, mask: Bool[Array, "token key"]
) -> tuple[Queries, KeyValues]:
    """Return the attention of one token stream to `past` and to itself, and the keys and values of both.

    mask: which keys a token may see, those of `past` first.
    """
    keys, values = jnp.einsum("tkh->kht", k), jnp.einsum("tkh->kth", v)
    if past is not None:
        keys, values = jnp.concatenate([past.keys, keys], -1), jnp.concatenate([past.values, values], -2)
    heads = attend(jnp.einsum("tkqh->kqth", q), keys, values, mask)
    return jnp.einsum("kqth->tkqh", heads), KeyValues(keys, values)


def causal_mask(num_tokens: int) -> Bool[Array, "token token"]:
    """Return the mask by which a token sees itself and all tokens before it."""
    return jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


def causal_attention(num_tokens: int) -> Attention:
    """Return causal attention within one stream."""
    return functools.partial(attend_stream, past=None, mask=causal_mask(num_tokens))


def group_attention(lengths: Int[Array, " prompt"], s: int, g: int, t: int, fused: bool = True) -> Attention:
    """Return the attention of `completion_states`, whose tokens are P times S prompt tokens and G rows of T."""

    def attend_group(q: Queries, k: Keys, v: Keys, length: Int[Array, ""]) -> Queries:
        mask = jnp.concatenate([jnp.broadcast_to(jnp.arange(s) < length, (t, s)), causal_mask(t)], 1)
        heads, past = attend_stream(q[:s], k[:s], v[:s], None, causal_mask(s))

        def attend_row(q: Queries, k: Keys, v: Keys) -> Queries:
            return attend_stream(q, k, v, past, mask)[0]

        row_heads = jax.vmap(attend_row)(*(x[s:].reshape(g, t, *x.shape[1:]) for x in (q, k, v)))
        return jnp.concatenate([heads, row_heads.reshape(g * t, *heads.shape[1:])])

    plain = jax.vmap(attend_group)

    def attention(q: Queries, k: Keys, v: Keys) -> tuple[Queries, None]:
        shape, groups = q.shape, (lengths.shape[0], s + g * t)
        q, k, v = (x.reshape(*groups, *x.shape[1:]) for x in (q, k, v))
        heads = attend_groups(plain, Sizes(s, g, t), q, k, v, lengths) if fused else plain(q, k, v, lengths)
        return heads.reshape(shape), None

    return attention
