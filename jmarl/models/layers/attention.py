"""Attend: rotary positions, softmax attention of one token stream, and of groups of completions to their prompts.

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

from jmarl.models.config import ModelConfig, RopeScaling
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
# Of models with sliding layers `run_layers` adds the argument `slides`: whether this layer is one.
Attention = Callable[..., tuple[Queries, Any]]


def einsum_float32(subscripts: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the einsum of two arrays, accumulated and returned in float32."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32, precision=matmul_precision(x))


def capped(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """Return numbers that stay within the cap, by tanh; without one unchanged."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def in_window(
    mask: Bool[Array, "*shape"], distance: Int[Array, "*#shape"], window: int | None, slides: Bool[Array, ""] | None
) -> Bool[Array, "*shape"]:
    """Return which keys a token may see in a layer. distance: from a key to the token. slides: whether it slides; None: no."""
    return mask if slides is None or window is None else mask & ((distance < window) | ~slides)


def attend(
    q: Float[Array, "kv_head query token head_dim"],
    keys: Float[Array, "kv_head head_dim key"],
    values: Float[Array, "kv_head key head_dim"],
    mask: Bool[Array, "token key"],
    cap: float | None = None,
) -> Float[Array, "kv_head query token head_dim"]:
    """Return softmax attention, with the softmax in float32.

    mask: whether a token may see a key. cap: see `capped`.
    """
    scores = capped(einsum_float32("kqth,khs->kqts", q, keys) / math.sqrt(q.shape[-1]), cap)
    scores = jnp.where(mask, scores, MASKED)
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    out = einsum_float32("kqts,ksh->kqth", weights.astype(q.dtype), values)
    return (out / weights.sum(-1, keepdims=True)).astype(q.dtype)


def attend_stream(
    q: Queries, k: Keys, v: Keys, past: KeyValues | None, mask: Bool[Array, "token key"], cap: float | None = None
) -> tuple[Queries, KeyValues]:
    """Return the attention of one token stream to `past` and to itself, and the keys and values of both.

    mask: which keys a token may see, those of `past` first. cap: see `capped`.
    """
    keys, values = jnp.einsum("tkh->kht", k), jnp.einsum("tkh->kth", v)
    if past is not None:
        keys, values = jnp.concatenate([past.keys, keys], -1), jnp.concatenate([past.values, values], -2)
    heads = attend(jnp.einsum("tkqh->kqth", q), keys, values, mask, cap)
    return jnp.einsum("kqth->tkqh", heads), KeyValues(keys, values)


def causal_mask(num_tokens: int) -> Bool[Array, "token token"]:
    """Return the mask by which a token sees itself and all tokens before it."""
    return jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


def causal_attention(num_tokens: int, cfg: ModelConfig | None = None) -> Attention:
    """Return causal attention within one stream. cfg: None: without windows and caps."""
    window, cap = (None, None) if cfg is None else (cfg.sliding_window, cfg.attention_cap)
    distance = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)

    def attention(q: Queries, k: Keys, v: Keys, slides: Bool[Array, ""] | None = None) -> tuple[Queries, KeyValues]:
        return attend_stream(q, k, v, None, in_window(causal_mask(num_tokens), distance, window, slides), cap)

    return attention


def group_attention(lengths: Int[Array, " prompt"], s: int, g: int, t: int, cfg: ModelConfig) -> Attention:
    """Return the attention of `completion_states`, whose tokens are P times S prompt tokens and G rows of T."""
    cap, fused = cfg.attention_cap, cfg.placement.fused_attention and cfg.attention_cap is None
    window = cfg.sliding_window if cfg.sliding_window and cfg.sliding_window < s + t else None  # else it hides nothing

    def attend_group(window: int | None, q: Queries, k: Keys, v: Keys, length: Int[Array, ""]) -> Queries:
        row, prompt = jnp.arange(t)[:, None], jnp.arange(s)
        before, prompt_mask, row_mask = jnp.broadcast_to(prompt < length, (t, s)), causal_mask(s), causal_mask(t)
        if window is not None:
            before = before & (length + row - prompt < window)
            prompt_mask = prompt_mask & (prompt[:, None] - prompt < window)
            row_mask = row_mask & (row - row.T < window)
        heads, past = attend_stream(q[:s], k[:s], v[:s], None, prompt_mask, cap)
        mask = jnp.concatenate([before, row_mask], 1)

        def attend_row(q: Queries, k: Keys, v: Keys) -> Queries:
            return attend_stream(q, k, v, past, mask, cap)[0]

        row_heads = jax.vmap(attend_row)(*(x[s:].reshape(g, t, *x.shape[1:]) for x in (q, k, v)))
        return jnp.concatenate([heads, row_heads.reshape(g * t, *heads.shape[1:])])

    def of_window(window: int | None, *arrays: Array) -> Array:
        plain = jax.vmap(functools.partial(attend_group, window))
        return attend_groups(plain, Sizes(s, g, t, window), *arrays) if fused else plain(*arrays)

    def attention(q: Queries, k: Keys, v: Keys, slides: Bool[Array, ""] | None = None) -> tuple[Queries, None]:
        shape, groups = q.shape, (lengths.shape[0], s + g * t)
        arrays = *(x.reshape(*groups, *x.shape[1:]) for x in (q, k, v)), lengths
        if slides is None or window is None or all(cfg.sliding_layers):
            heads = of_window(None if slides is None else window, *arrays)
        else:
            heads = lax.cond(slides, *(functools.partial(of_window, x) for x in (window, None)), *arrays)
        return heads.reshape(shape), None

    return attention


# --- rotary positions --------------------------------------------------------------------------------------------------


class Angles(NamedTuple):
    """Cosines and sines of the rotary embedding, for half of the rotated numbers of a head."""

    cos: Float[Array, "token half"]
    sin: Float[Array, "token half"]
    query_scale: Float[Array, " token"] | None = None  # see `RopeScaling.query_beta`


def rope_kinds(cfg: ModelConfig) -> list[str]:
    """Return the kind of rotation of each layer: full, sliding or none."""
    sliding = cfg.sliding_layers if cfg.sliding_rope_theta is not None else ()
    kinds = ["full"] * cfg.num_layers
    for name, layers in (("sliding", sliding), ("none", cfg.plain_layers)):
        kinds = [name if n < len(layers) and layers[n] else kind for n, kind in enumerate(kinds)]
    return kinds


def rope(cfg: ModelConfig, positions: Int[Array, " token"]) -> dict[str, Angles]:
    """Return the angles of the rotary embedding (arXiv 2104.09864) of each kind of `rope_kinds` that the model has."""

    def angles(kind: str) -> Angles:
        angle = positions.astype(jnp.float32)[:, None] * rope_frequencies(cfg, kind)
        amplitude = cfg.rope_scaling.amplitude if cfg.rope_scaling and kind == "full" else 1.0
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        if amplitude != 1.0:
            cos, sin = cos * amplitude, sin * amplitude
        if (scaling := cfg.rope_scaling) is None or not scaling.query_beta:
            return Angles(cos, sin)
        return Angles(cos, sin, 1 + scaling.query_beta * jnp.log1p(positions // scaling.original_max_positions))

    return {kind: angles(kind) for kind in sorted(set(rope_kinds(cfg)))}


def rope_frequencies(cfg: ModelConfig, kind: str = "full") -> Float[Array, " half"]:
    """Return the angular frequencies of a kind of `rope_kinds`."""
    size = cfg.rotary_dim or cfg.head_dim
    exponents = jnp.arange(0, size, 2, dtype=jnp.float32) / size
    if kind == "none":
        return jnp.zeros_like(exponents)  # an angle of 0 changes nothing
    if kind == "sliding" and cfg.sliding_rope_theta is not None:
        return 1.0 / cfg.sliding_rope_theta**exponents
    if cfg.rope_scaling is None:
        return 1.0 / cfg.rope_theta**exponents
    if cfg.rope_scaling.kind == "longrope":
        factors = cfg.rope_scaling.long_factors if cfg.placement.long_context else cfg.rope_scaling.short_factors
        return 1.0 / (jnp.array(factors) * cfg.rope_theta**exponents)
    return SCALED[cfg.rope_scaling.kind](cfg.rope_scaling, cfg.rope_theta, exponents)


def _llama3(s: RopeScaling, theta: float, exponents: Array) -> Array:
    freq = 1.0 / theta**exponents
    turns = s.original_max_positions * freq / (2 * math.pi)  # full turns within the original context
    smooth = jnp.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return freq * (smooth + (1 - smooth) / s.factor)


def _linear(s: RopeScaling, theta: float, exponents: Array) -> Array:
    return 1.0 / theta**exponents / s.factor


def _dynamic(s: RopeScaling, theta: float, exponents: Array) -> Array:
    """As transformers at a length of up to `max_positions`, which no row exceeds: theta is not scaled there."""
    return 1.0 / theta**exponents


def _yarn(s: RopeScaling, theta: float, exponents: Array) -> Array:
    size = 2 * exponents.shape[0]

    def dimension(turns: float) -> float:
        """Return which frequency makes these turns within the original context."""
        return size * math.log(s.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = jnp.clip((jnp.arange(size // 2) - low) / ((high - low) or 0.001), 0, 1)
    freq = 1.0 / theta**exponents
    return freq / s.factor * ramp + freq * (1 - ramp)


SCALED = {"llama3": _llama3, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn}


def rotate(
    x: Float[Array, "*batch head_dim"], cos: Float[Array, "*#batch half"], sin: Float[Array, "*#batch half"]
) -> Float[Array, "*batch head_dim"]:
    """Apply the rotary embedding to the first numbers of each head. Their two halves are the pairs, as in Hugging Face's
    layout."""
    size = 2 * cos.shape[-1]
    if size < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :size], cos, sin), x[..., size:]], -1)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    # Reversed, not concatenated: XLA for CPUs compiles a concatenation to a loop with a branch.
    other = jnp.flip(pairs, -2) * jnp.array([[-1.0], [1.0]])
    return (pairs * cos[..., None, :] + other * sin[..., None, :]).reshape(x.shape).astype(x.dtype)
