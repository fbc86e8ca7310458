"""The decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; for one agent and one stream of tokens.

Parameters of one agent (letters as in `ModelConfig`; Q = H/K queries per key-value head, L layers)::

    embed      [V, D]                      layers.attn_norm [L, D]            layers.mlp_norm         [L, D]
    final_norm [D]                         layers.qkv [L, D, K * (Q+2) * h]   layers.gate, layers.up  [L, D, F]
    lm_head    [D, V]  (untied only)       layers.out [L, K * Q * h, D]       layers.down             [L, F, D]
                                           layers.qkv_bias [L, K * (Q+2) * h] layers.out_bias         [L, D]
                                           layers.q_norm, layers.k_norm [L, h]

Query, key and value are one matrix: key-value heads outermost, so that a mesh that divides their number splits whole heads.
Every weight is a plain matrix, because XLA copies or transposes those with more axes, and their gradients. Layers are stacked:
training scans over them, so compile time does not grow with depth.

Prefill, scoring (`groups`) and decoding are the same `Block` and differ in what its `attention` lets each token see, which
is why sampled and rescored log-probabilities agree. The prompt is computed once and shared by all completions of its group.
Left out: sliding windows, mixture of experts, biases in the feed-forward layer; `jmarl.weights`
refuses such checkpoints by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmarl.models.config import ModelConfig

Params = dict[str, Any]
MASKED = -1e30  # finite: a query that sees nothing gives a finite result (masked later), not NaN


class Segment(NamedTuple):
    """Keys and values that queries may look at."""

    k: jax.Array  # [K, h, S]: transposed, as the product with the queries reads it
    v: jax.Array  # [K, S, h]
    mask: jax.Array  # [T, S] bool: query t may see key s


class Prefix(NamedTuple):
    """The prompt's keys and values in every layer, shared by its group."""

    kv: Any  # a list of L pairs (k [K, h, S], v [K, S, h]); stacked on L where the layers are
    length: jax.Array  # [] int32: how many of the S positions are real


Extend = Callable[[jax.Array, jax.Array], tuple[list[Segment], Any]]
Attention = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def rope_frequencies(cfg: ModelConfig) -> jax.Array:
    """Angular frequencies [h/2] of the rotary embedding (arXiv 2104.09864), with Llama 3's scaling if configured."""
    freq = 1.0 / cfg.rope_theta ** (jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim)
    s = cfg.rope_scaling
    if s is None:
        return freq
    turns = s.original_max_positions * freq / (2 * math.pi)  # full turns within the original context
    smooth = jnp.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return freq * (smooth + (1 - smooth) / s.factor)


def rope(cfg: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [T, h/2] at positions [T]."""
    angle = positions.astype(jnp.float32)[:, None] * rope_frequencies(cfg)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [..., h] by cos, sin [..., h/2]; the two halves of h are the pairs, as in Hugging Face's layout."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis (arXiv 1910.07467), computed in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return scale * y.astype(x.dtype)


def attend(q: jax.Array, segments: list[Segment]) -> jax.Array:
    """Softmax attention of q [K, Q, T, h] over all segments together; softmax in float32. Returns [K, Q, T, h]."""
    scale = 1.0 / math.sqrt(q.shape[-1])
    scores = [
        jnp.where(s.mask, jnp.einsum("kqth,khs->kqts", q, s.k, preferred_element_type=jnp.float32) * scale, MASKED)
        for s in segments
    ]
    top = lax.stop_gradient(jnp.stack([s.max(-1) for s in scores]).max(0))[..., None]
    weights = [jnp.exp(s - top) for s in scores]
    total = jnp.sum(jnp.stack([w.sum(-1) for w in weights]), 0)[..., None]
    out = sum(
        jnp.einsum("kqts,ksh->kqth", w.astype(q.dtype), s.v, preferred_element_type=jnp.float32)
        for w, s in zip(weights, segments, strict=True)
    )
    return (out / total).astype(q.dtype)


def stream(extend: Extend) -> Attention:
    """Attention of one stream of T tokens. `extend(k, v)` says what its queries see: it receives the new keys [K, h, T] and
    values [K, T, h] and returns the segments to attend to and whatever should be kept of them (a cache, or nothing)."""

    def attention(q, k, v):
        segments, kept = extend(jnp.einsum("tkh->kht", k), jnp.einsum("tkh->kth", v))
        return jnp.einsum("kqth->tkqh", attend(jnp.einsum("tkqh->kqth", q), segments)), kept

    return attention


class Block(nn.Module):
    """One layer, over any N tokens x [N, D] at positions of cos, sin [N, h/2]. `attention(q, k, v)` says which of them see
    which: it receives rotated queries [N, K, Q, h] and keys [N, K, h] and values [N, K, h], and returns the heads
    [N, K, Q, h] and whatever should be kept of the layer."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, attention: Attention) -> tuple[jax.Array, Any]:
        c = self.cfg
        d, f, h, k, q = c.hidden_size, c.intermediate_size, c.head_dim, c.num_kv_heads, c.queries_per_kv
        ones, zeros, normal = nn.initializers.ones, nn.initializers.zeros, nn.initializers.normal(0.02)
        y = rms_norm(x, self.param("attn_norm", ones, (d,)), c.rms_eps)
        qkv = checkpoint_name(y @ self.param("qkv", normal, (d, k * (q + 2) * h)), "weight_product")
        if c.qkv_bias:
            qkv = qkv + self.param("qkv_bias", zeros, (k * (q + 2) * h,))
        qkv = qkv.reshape(-1, k, q + 2, h)
        qk, v = qkv[:, :, :-1], qkv[:, :, -1]
        if c.qk_norm:
            scales = [self.param("q_norm", ones, (h,))] * q + [self.param("k_norm", ones, (h,))]
            qk = rms_norm(qk, jnp.stack(scales), c.rms_eps)
        qk = rotate(qk, cos[:, None, None], sin[:, None, None])
        heads, kept = attention(qk[:, :, :-1], qk[:, :, -1], v)
        heads = heads.reshape(-1, k * q * h)
        x = x + heads @ self.param("out", normal, (k * q * h, d))  # without a name: small, and cheap to make again
        if c.out_bias:
            x = x + self.param("out_bias", zeros, (d,))
        y = rms_norm(x, self.param("mlp_norm", ones, (d,)), c.rms_eps)
        gate, up = (checkpoint_name(y @ self.param(name, normal, (d, f)), "weight_product") for name in ("gate", "up"))
        return x + (nn.silu(gate) * up) @ self.param("down", normal, (f, d)), kept


def init_params(cfg: ModelConfig, key: jax.Array) -> Params:
    """Random float32 parameters of one agent (normal, 0.02). The key is consumed."""
    k_embed, k_head, k_layers = jax.random.split(key, 3)
    x = jnp.zeros((1, cfg.hidden_size))
    cos, sin = rope(cfg, jnp.zeros(1, jnp.int32))

    def layer(k):
        return Block(cfg).init(k, x, cos, sin, stream(_causal(1)))["params"]

    params = {
        "embed": 0.02 * jax.random.normal(k_embed, (cfg.vocab_size, cfg.hidden_size)),
        "layers": jax.vmap(layer)(jax.random.split(k_layers, cfg.num_layers)),
        "final_norm": jnp.ones(cfg.hidden_size),
    }
    if not cfg.tie_embeddings:
        params["lm_head"] = 0.02 * jax.random.normal(k_head, (cfg.hidden_size, cfg.vocab_size))
    return params


def cast(params: Params, dtype: jax.typing.DTypeLike) -> Params:
    """Parameters in the compute dtype; master weights stay as they are."""
    return jax.tree.map(lambda w: w.astype(dtype), params)


def _causal(t: int) -> Extend:
    mask = jnp.tril(jnp.ones((t, t), bool))
    return lambda k, v: ([Segment(k, v, mask)], (k, v))


REMAT = {  # what the backward pass keeps: everything | the large weight products | only each layer's input
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names("weight_product"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def _run_layers(params: Params, cfg: ModelConfig, x, positions, attention_of, extra=None, remat: str = "full"):
    """All layers over x [N, D]; `attention_of(layer_extra)` makes each layer's `Attention`. Returns hidden states [N, D] and
    what was kept.

    Stacked layers are scanned (training); a list of layers (`decode_view`) is unrolled and `extra` is then a list too.
    """
    if "rope" in params:
        cos, sin = (table[positions] for table in params["rope"])
    else:
        cos, sin = rope(cfg, positions)

    def layer(x, inputs):
        w, layer_extra = inputs
        return Block(cfg).apply({"params": w}, x, cos, sin, attention_of(layer_extra))

    layers = params["layers"]
    if isinstance(layers, list):
        kept = []
        for inputs in zip(layers, extra or [None] * len(layers), strict=True):
            x, k = layer(x, inputs)
            kept.append(k)
        return x, kept
    layer = jax.checkpoint(layer, policy=REMAT[remat], prevent_cse=False)
    return lax.scan(layer, x, (layers, extra))


def prefill(params: Params, cfg: ModelConfig, tokens: jax.Array, length: jax.Array) -> Prefix:
    """Keys and values of one prompt. tokens [S] padded on the right; the first `length` of them are real."""
    t = tokens.shape[0]
    _, kv = _run_layers(params, cfg, params["embed"][tokens], jnp.arange(t), lambda _: stream(_causal(t)))
    return Prefix(kv, length)


def groups(params: Params, cfg: ModelConfig, prompts, lengths, tokens, remat: str = "full") -> jax.Array:
    """Final hidden states [P, G, T, D] of tokens [P, G, T] that follow prompts [P, S], of which the first lengths [P] ids are
    real; each token sees its prompt and the tokens of its row before it.

    Prompt and rows go through every layer together: the weights are read once, and every product is of one matrix of all
    tokens; only attention tells them apart. The prompt is computed once a group, also in the backward pass.
    """
    (p, s), (_, g, t) = prompts.shape, tokens.shape
    flat = jnp.concatenate([prompts, tokens.reshape(p, g * t)], 1)
    after = jnp.broadcast_to((lengths[:, None] + jnp.arange(t))[:, None], (p, g, t)).reshape(p, g * t)
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(s), (p, s)), after], 1)
    attention = _group_attention(lengths, s, g, t)
    x, _ = _run_layers(params, cfg, params["embed"][flat.reshape(-1)], positions.reshape(-1), lambda _: attention, None, remat)
    x = x.reshape(p, s + g * t, -1)[:, s:].reshape(p, g, t, -1)
    return rms_norm(x, params["final_norm"], cfg.rms_eps)


def _group_attention(lengths: jax.Array, s: int, g: int, t: int) -> Attention:
    """The attention of `groups`: tokens are P times S prompt tokens and G rows of T."""
    causal, of_prefix = jnp.tril(jnp.ones((t, t), bool)), stream(_causal(s))

    def of_prompt(q, k, v, length):  # q [S + G * T, K, Q, h]; k, v [S + G * T, K, h]
        seen = jnp.concatenate([jnp.broadcast_to(jnp.arange(s) < length, (t, s)), causal], 1)
        heads, (pk, pv) = of_prefix(q[:s], k[:s], v[:s])

        def extend(k, v):  # one segment of prompt and row: one product, and half the operations of two
            return [Segment(jnp.concatenate([pk, k], 2), jnp.concatenate([pv, v], 1), seen)], None

        rows = (x[s:].reshape(g, t, *x.shape[1:]) for x in (q, k, v))
        of_rows, _ = jax.vmap(stream(extend))(*rows)
        return jnp.concatenate([heads, of_rows.reshape(g * t, *heads.shape[1:])])

    def attention(q, k, v):
        qp, kp, vp = (x.reshape(lengths.shape[0], s + g * t, *x.shape[1:]) for x in (q, k, v))
        heads = jax.vmap(of_prompt)(qp, kp, vp, lengths)
        return heads.reshape(q.shape), None

    return attention


def head(params: Params) -> Params:
    """The part of the parameters that `logits` reads."""
    name = "lm_head" if "lm_head" in params else "embed"
    return {name: params[name]}


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Next-token logits [..., V] in float32 of final hidden states [..., D]."""
    if "lm_head" in params:
        return jnp.einsum("...d,dv->...v", hidden, params["lm_head"], preferred_element_type=jnp.float32)
    return jnp.einsum("...d,vd->...v", hidden, params["embed"], preferred_element_type=jnp.float32)


def forward(params: Params, cfg: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Logits [T, V] of one plain sequence tokens [T]; no prefix. For parity tests and small uses."""
    t = tokens.shape[0]
    x, _ = _run_layers(params, cfg, params["embed"][tokens], jnp.arange(t), lambda _: stream(_causal(t)))
    return logits(params, rms_norm(x, params["final_norm"], cfg.rms_eps))


# --- decoding: one token at a time -------------------------------------------------------------------------------------


def decode_view(params: Params, cfg: ModelConfig, dtype: jax.typing.DTypeLike, max_positions: int) -> Params:
    """The parameters as the decode loop reads them: layers apart, the output matrix [D, V], a table of rotary angles, all
    in the compute dtype.

    Made once a call, outside the loop: slicing a stacked layer inside it would copy its weights at every token.
    """
    params = cast(params, dtype)
    layers = [jax.tree.map(lambda w, i=i: w[i], params["layers"]) for i in range(cfg.num_layers)]
    head = params["lm_head"] if "lm_head" in params else params["embed"].T
    table = rope(cfg, jnp.arange(max_positions))
    rest = {"embed": params["embed"], "final_norm": params["final_norm"]}
    return {"layers": layers, "lm_head": head, "rope": table, **rest}


def init_cache(cfg: ModelConfig, max_tokens: int, dtype: jax.typing.DTypeLike) -> list[tuple[jax.Array, jax.Array]]:
    """Empty keys and values of one row: a pair [K, T, h] for each layer."""
    k, h = cfg.num_kv_heads, cfg.head_dim
    return [(jnp.zeros((k, h, max_tokens), dtype), jnp.zeros((k, max_tokens, h), dtype)) for _ in range(cfg.num_layers)]


def decode_step(view: Params, cfg: ModelConfig, prefix: Prefix, cache: list, token: jax.Array, t: jax.Array):
    """Feed one token [] at index t after the prefix.

    Returns float32 logits [V] and the token's own keys and values, a pair ([K, h, 1], [K, 1, h]) for each layer. The
    caller writes them into the cache after the step: written inside, XLA would copy the whole cache at every token.
    """
    s, capacity = prefix.kv[0][1].shape[1], cache[0][1].shape[1]
    seen, before = (jnp.arange(s) < prefix.length)[None], (jnp.arange(capacity) < t)[None]
    itself = jnp.ones((1, 1), bool)

    def attention_of(inputs):
        (pk, pv), (ck, cv) = inputs
        return stream(lambda k, v: ([Segment(pk, pv, seen), Segment(ck, cv, before), Segment(k, v, itself)], (k, v)))

    extra = list(zip(prefix.kv, cache, strict=True))
    x, new = _run_layers(view, cfg, view["embed"][token][None], (prefix.length + t)[None], attention_of, extra)
    return logits(view, rms_norm(x, view["final_norm"], cfg.rms_eps))[0], new
