"""The decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; for one agent.

Parameters of one agent (letters as in `ModelConfig`; Q = H/K queries per key-value head, L layers)::

    embed      [V, D]                      layers.attn_norm [L, D]            layers.mlp_norm         [L, D]
    final_norm [D]                         layers.qkv [L, D, K * (Q+2) * h]   layers.gate, layers.up  [L, D, F]
    lm_head    [D, V]  (untied only)       layers.out [L, K * Q * h, D]       layers.down             [L, F, D]
                                           layers.qkv_bias [L, K * (Q+2) * h] layers.out_bias         [L, D]
                                           layers.q_norm, layers.k_norm [L, h]

Query, key and value are one matrix: key-value heads outermost, so that a mesh that divides their number splits whole heads.
Every weight is a plain matrix, because XLA copies or transposes those with more axes, and their gradients. Layers are stacked:
training and prefill scan over them, so their compile time does not grow with depth; decoding is unrolled, and on CPU cores
with an agent each it reads the weights cut into panels (`models/cpu.py`).

Scoring (`groups`), prefill and decoding (`models/decoding.py`) are the same `Block` and differ in what its `attention` lets
each token see, which is why sampled and rescored log-probabilities agree. The prompt is computed once and shared by all
completions of its group.
With LoRA there are adapters among the layers' parameters, which `jmarl.models.lora` describes.
Left out: sliding windows, mixture of experts, biases in the feed-forward layer; `jmarl.models.hub.agents`
refuses such checkpoints by name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmarl.models.config import ModelConfig
from jmarl.models.cpu import Panels, panel_product

Params = dict[str, Any]
MASKED = -1e30  # finite: a query that sees nothing gives a finite result (masked later), not NaN

Extend = Callable[[jax.Array, jax.Array], tuple[tuple[jax.Array, jax.Array, jax.Array], Any]]
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
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    # Reversed, not concatenated: XLA for CPUs makes a loop with a branch of a concatenation.
    other = jnp.flip(pairs, -2) * jnp.array([[-1.0], [1.0]])
    return (pairs * cos[..., None, :] + other * sin[..., None, :]).reshape(x.shape).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm of x [..., D] (arXiv 1910.07467), computed in float32, times scale [D]."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return scale * y.astype(x.dtype)


def exact(x: jax.Array) -> lax.Precision | None:
    """The precision of a product with x: of float32 numbers that of float32 on GPUs too, where jax would round them to 10 bits
    (TF32), so that the learner's probabilities would not be the sampler's. jax's own setting goes before, where it is made:
    JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32."""
    chosen = x.dtype != jnp.float32 or jax.default_matmul_precision.value is not None
    return None if chosen else lax.Precision.HIGHEST


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention of q [K, Q, T, h] over keys k [K, h, S] (transposed, as the product reads them) and values v
    [K, S, h]; mask [T, S] bool: query t may see key s. Softmax in float32. Returns [K, Q, T, h]."""
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=exact(q))
    scores = product("kqth,khs->kqts", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(mask, scores, MASKED)
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    out = product("kqts,ksh->kqth", weights.astype(q.dtype), v)
    return (out / weights.sum(-1, keepdims=True)).astype(q.dtype)


def product(x: jax.Array, w: jax.Array | Panels) -> jax.Array:
    """x [N, D] times a weight [D, F], or its panels: [N, F]."""
    return panel_product(x, w, exact(x)) if isinstance(w, Panels) else jnp.matmul(x, w, precision=exact(x))


def stream(extend: Extend) -> Attention:
    """Attention of one stream of T tokens. `extend(k, v)` says what its queries see: it receives the new keys [K, h, T] and
    values [K, T, h] and returns the keys, values and mask of `attend`, and whatever should be kept of them (or nothing)."""

    def attention(q, k, v):
        seen, kept = extend(jnp.einsum("tkh->kht", k), jnp.einsum("tkh->kth", v))
        return jnp.einsum("kqth->tkqh", attend(jnp.einsum("tkqh->kqth", q), *seen)), kept

    return attention


class Block(nn.Module):
    """One layer, over any N tokens x [N, D] at positions of cos, sin [N, h/2]. `attention(q, k, v)` says which of them see
    which: it receives rotated queries [N, K, Q, h] and keys [N, K, h] and values [N, K, h], and returns the heads
    [N, K, Q, h] and whatever should be kept of the layer."""

    cfg: ModelConfig

    def weight(self, name: str, *shape: int) -> jax.Array | Panels:
        """A weight [D, F], or its panels (whose shape `self.param` would refuse)."""
        if self.is_initializing():
            return self.param(name, nn.initializers.normal(0.02), shape)
        return self.get_variable("params", name)

    def adapted(self, name: str, x: jax.Array, out: jax.Array) -> jax.Array:
        """`out`, which a weight made of x, and what the adapter of this name adds to it (`models.lora`), if there is one."""
        if not self.has_variable("params", name):
            return out
        w = self.get_variable("params", name)
        if "dropout" in w:
            kept, keep = jax.random.bernoulli(w["dropout"]["key"], w["dropout"]["keep"], x.shape), w["dropout"]["keep"]
            x = jnp.where(kept, x / keep, 0)
        narrow = product(x, w["a"]) * (self.get_variable("params", "lora_alpha") / w["a"].shape[-1])
        return out + product(narrow, w["b"]).reshape(out.shape)

    @nn.compact
    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, attention: Attention) -> tuple[jax.Array, Any]:
        c = self.cfg
        d, f, h, k, q = c.hidden_size, c.intermediate_size, c.head_dim, c.num_kv_heads, c.queries_per_kv
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        y = rms_norm(x, self.param("attn_norm", ones, (d,)), c.rms_eps)
        qkv = checkpoint_name(product(y, self.weight("qkv", d, k * (q + 2) * h)), "weight_product")
        if c.qkv_bias:
            qkv = qkv + self.param("qkv_bias", zeros, (k * (q + 2) * h,))
        qkv = qkv.reshape(-1, k, q + 2, h)
        queries, keys, values = jnp.split(qkv, (q, q + 1), axis=2)
        keys, values = self.adapted("k_proj", y, keys.squeeze(2)), self.adapted("v_proj", y, values.squeeze(2))
        queries = self.adapted("q_proj", y, queries)
        if c.qk_norm:
            queries = rms_norm(queries, self.param("q_norm", ones, (h,)), c.rms_eps)
            keys = rms_norm(keys, self.param("k_norm", ones, (h,)), c.rms_eps)
        cos, sin = cos[:, None], sin[:, None]
        heads, kept = attention(rotate(queries, cos[:, None], sin[:, None]), rotate(keys, cos, sin), values)
        heads = heads.reshape(-1, k * q * h)
        out = self.adapted("o_proj", heads, product(heads, self.weight("out", k * q * h, d)))
        x = x + out  # without a name: small, and cheap to make again
        if c.out_bias:
            x = x + self.param("out_bias", zeros, (d,))
        y = rms_norm(x, self.param("mlp_norm", ones, (d,)), c.rms_eps)
        gate, up = (
            checkpoint_name(self.adapted(f"{name}_proj", y, product(y, self.weight(name, d, f))), "weight_product")
            for name in ("gate", "up")
        )
        y = nn.silu(gate) * up
        return x + self.adapted("down_proj", y, product(y, self.weight("down", f, d))), kept


def init_params(cfg: ModelConfig, key: jax.Array) -> Params:
    """Random float32 parameters of one agent (normal, 0.02). The key is consumed."""
    k_embed, k_head, k_layers = jax.random.split(key, 3)
    x = jnp.zeros((1, cfg.hidden_size))
    cos, sin = rope(cfg, jnp.zeros(1, jnp.int32))

    def layer(k):
        return Block(cfg).init(k, x, cos, sin, stream(causal(1)))["params"]

    params = {
        "embed": 0.02 * jax.random.normal(k_embed, (cfg.vocab_size, cfg.hidden_size)),
        "layers": jax.vmap(layer)(jax.random.split(k_layers, cfg.num_layers)),
        "final_norm": jnp.ones(cfg.hidden_size),
    }
    if not cfg.tie_embeddings:
        params["lm_head"] = 0.02 * jax.random.normal(k_head, (cfg.hidden_size, cfg.vocab_size))
    return params


def cast(params: Params, dtype: jax.typing.DTypeLike) -> Params:
    """Parameters in the compute dtype; master weights stay as they are, and so do random keys."""
    return jax.tree.map(lambda w: w.astype(dtype) if jnp.issubdtype(w.dtype, jnp.floating) else w, params)


def causal(t: int) -> Extend:
    mask = jnp.tril(jnp.ones((t, t), bool))
    return lambda k, v: ((k, v, mask), (k, v))


REMAT = {  # what the backward pass keeps: everything | the large weight products | only each layer's input
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names("weight_product"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def run_layers(params: Params, cfg: ModelConfig, x, positions, attention: Callable, remat: str = "full", before: Any = ()):
    """All layers over x [N, D], scanned; `attention` gets each layer's part of `before` [L, ...] behind its other arguments.
    Returns hidden states [N, D] and what was kept of each layer, stacked [L, ...]."""
    cos, sin = rope(cfg, positions)

    def layer(x, inputs):  # one layer's weights are cast at a time
        w, before = inputs
        return Block(cfg).apply({"params": cast(w, x.dtype)}, x, cos, sin, lambda *qkv: attention(*qkv, *before))

    return lax.scan(jax.checkpoint(layer, policy=REMAT[remat], prevent_cse=False), x, (params["layers"], before))


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
    x, _ = run_layers(params, cfg, params["embed"][flat.reshape(-1)], positions.reshape(-1), attention, remat)
    x = x.reshape(p, s + g * t, -1)[:, s:].reshape(p, g, t, -1)
    return rms_norm(x, params["final_norm"], cfg.rms_eps)


def _group_attention(lengths: jax.Array, s: int, g: int, t: int) -> Attention:
    """The attention of `groups`: tokens are P times S prompt tokens and G rows of T."""
    before, of_prefix = jnp.tril(jnp.ones((t, t), bool)), stream(causal(s))

    def of_prompt(q, k, v, length):  # q [S + G * T, K, Q, h]; k, v [S + G * T, K, h]
        seen = jnp.concatenate([jnp.broadcast_to(jnp.arange(s) < length, (t, s)), before], 1)
        heads, (pk, pv) = of_prefix(q[:s], k[:s], v[:s])

        def extend(k, v):
            return (jnp.concatenate([pk, k], 2), jnp.concatenate([pv, v], 1), seen), None

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
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=exact(hidden))
    if "lm_head" in params:
        return product("...d,dv->...v", hidden, params["lm_head"])
    return product("...d,vd->...v", hidden, params["embed"])


def forward(params: Params, cfg: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Logits [T, V] of one plain sequence tokens [T]; no prefix. For parity tests and small uses."""
    t = tokens.shape[0]
    x, _ = run_layers(params, cfg, params["embed"][tokens], jnp.arange(t), stream(causal(t)))
    return logits(params, rms_norm(x, params["final_norm"], cfg.rms_eps))
