"""Attend with one token of each of many rows: to its prompt, its row and itself, whose keys and values it writes first."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmarl.models.layers.attention import MASKED, Attention, Keys, KeyValues, Queries, capped, einsum_float32
from jmarl.models.platforms import attend_token

Mask = Bool[Array, "row 1 key"]


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


def token_attention(prompt: KeyValues, row: KeyValues, mask: Mask, t: Int[Array, ""], cap: float | None = None) -> Attention:
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


def mask_of_token(
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


def fused_token_attention(prompt: KeyValues, row: KeyValues, lengths: Int[Array, " prompt"], t: Int[Array, "..."]) -> Attention:
    """Return `token_attention` by one kernel. lengths: number of tokens of each prompt; there are none behind them. t: [R] if
    each row has an index of its own."""

    def write(cache: Array, new: Array) -> Array:
        return cache.at[jnp.arange(len(new)), t].set(new, unique_indices=True) if t.ndim else _write(cache, new[:, None], t)

    def attention(q: Queries, k: Keys, v: Keys) -> tuple[Queries, KeyValues]:
        keys, values = write(row.keys, k), write(row.values, v)
        written = jnp.broadcast_to(t + 1, q.shape[:1])
        return attend_token(q, *prompt, lengths, keys, values, written), KeyValues(keys, values)

    return attention
