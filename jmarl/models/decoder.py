"""Run the decoder of one agent: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Parameters of one agent (letters as in `ModelConfig`; Q = H/K queries per key-value head, L layers)::

    embed      [V, D]                      layers.attn_norm [L, D]            layers.mlp_norm         [L, D]
    final_norm [D]                         layers.qkv [L, D, K * (Q+2) * h]   layers.gate, layers.up  [L, D, F]
    lm_head    [D, V]  (untied only)       layers.out [L, K * Q * h, D]       layers.down             [L, F, D]
                                           layers.qkv_bias [L, K * (Q+2) * h] layers.out_bias         [L, D]
                                           layers.q_norm, layers.k_norm [L, h]

Query, key and value are one matrix: key-value heads outermost, so that a mesh that divides their number splits between heads.
Every weight is a plain matrix, because XLA copies or transposes weights with more axes, and their gradients. Layers are
stacked: training and prefill scan over them, so compile time does not grow with depth. Decoding is unrolled; on CPUs with one
core per agent it reads the weights cut into panels (`models/cpu.py`).

Scoring (`completion_states`), prefill and decoding (`models/decoding.py`) run the same `Block`. They differ only in its
`attention` argument, which is why sampled and rescored log-probabilities agree. Each prompt is computed once for all
completions of its group. LoRA adapters are further parameters of the layers (`models/lora.py`).

Left out: sliding windows, mixtures of experts, biases in the feed-forward layer; `jmarl.models.hub.hf_format` raises an
error for such checkpoints.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jmarl.models.attention import (
    Attention,
    KeyValues,
    Queries,
    causal_attention,
    einsum_float32,
    group_attention,
)
from jmarl.models.config import ModelConfig
from jmarl.models.cpu import Panels, panel_product
from jmarl.models.gpu import matmul_precision
from jmarl.models.platforms import sum_by_token
from jmarl.models.sharding import gather

Params = dict[str, Any]


Hidden = Float[Array, "token dim"]
Angles = Float[Array, "token half_head_dim"]  # cosines or sines


def rope_frequencies(cfg: ModelConfig) -> Float[Array, " half_head_dim"]:
    """Return angular frequencies of the rotary embedding (arXiv 2104.09864), with Llama 3's scaling if configured."""
    freq = 1.0 / cfg.rope_theta ** (jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim)
    s = cfg.rope_scaling
    if s is None:
        return freq
    turns = s.original_max_positions * freq / (2 * math.pi)  # full turns within the original context
    smooth = jnp.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return freq * (smooth + (1 - smooth) / s.factor)


def rope(cfg: ModelConfig, positions: Int[Array, " token"]) -> tuple[Angles, Angles]:
    """Return the cosines and sines of the rotary embedding."""
    angle = positions.astype(jnp.float32)[:, None] * rope_frequencies(cfg)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "*batch head_dim"], cos: Float[Array, "*#batch half_head_dim"], sin: Float[Array, "*#batch half_head_dim"]
) -> Float[Array, "*batch head_dim"]:
    """Apply the rotary embedding. The two halves of a head are the pairs, as in Hugging Face's layout."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    # Reversed, not concatenated: XLA for CPUs compiles a concatenation to a loop with a branch.
    other = jnp.flip(pairs, -2) * jnp.array([[-1.0], [1.0]])
    return (pairs * cos[..., None, :] + other * sin[..., None, :]).reshape(x.shape).astype(x.dtype)


def rms_norm(x: Float[Array, "*batch dim"], scale: Float[Array, " dim"], eps: float) -> Float[Array, "*batch dim"]:
    """Normalize by the root mean square (arXiv 1910.07467), computed in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return scale * y.astype(x.dtype)


def product(x: Float[Array, "token d"], w: Float[Array, "d f"] | Panels) -> Float[Array, "token f"]:
    """Return x times a weight, which may be cut into panels."""
    precision = matmul_precision(x)
    return panel_product(x, w, precision) if isinstance(w, Panels) else jnp.matmul(x, w, precision=precision)


def drop(
    x: Float[Array, "token d"],
    key: PRNGKeyArray,
    keep_rate: Float[Array, ""],
    tokens: Int[Array, " token"] | None = None,
    whole: Float[Array, "all_token 0"] | None = None,
) -> Float[Array, "token d"]:
    """Return x with some of its numbers 0 and the others larger. The key is consumed. For tokens and whole see `lora`."""
    shape = x.shape if whole is None else (whole.shape[0], x.shape[1])
    keep = jax.random.bernoulli(key, keep_rate, shape)
    return jnp.where(keep if tokens is None else keep[tokens], x / keep_rate, 0)


class Block(nn.Module):
    """One layer of the decoder, for any N tokens; `attention` decides which tokens see which."""

    cfg: ModelConfig

    def weight(self, name: str, *shape: int) -> Float[Array, "d f"] | Panels:
        """Return a weight or its panels (whose shape `self.param` would refuse)."""
        if self.is_initializing():
            return self.param(name, nn.initializers.normal(0.02), shape)
        return self.get_variable("params", name)

    def add_adapter(self, target: str, x: Float[Array, "token d"], out: Float[Array, "token ..."]) -> Float[Array, "token ..."]:
        """Add the target's LoRA adapter (`models/lora.py`), if there is one, to `out`, the product of x and its weight."""
        if not self.has_variable("params", target):
            return out
        adapter = self.get_variable("params", target)
        if "dropout" in adapter:
            x = drop(x, **adapter["dropout"])
        joined = "scale" in adapter  # of several targets, see `lora.join_by_input`
        scale = adapter["scale"] if joined else self.get_variable("params", "lora_alpha") / adapter["a"].shape[-1]
        return out + product(product(x, adapter["a"]) * scale, adapter["b"]).reshape(out.shape)

    @nn.compact
    def __call__(self, x: Hidden, cos: Angles, sin: Angles, attention: Attention) -> tuple[Hidden, Any]:
        """Return the layer's output, and what `attention` returned beside the heads."""
        c = self.cfg
        d, f, h, k, q = c.hidden_size, c.intermediate_size, c.head_dim, c.num_kv_heads, c.queries_per_kv
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        y = rms_norm(x, self.param("attn_norm", ones, (d,)), c.rms_eps)
        qkv = checkpoint_name(product(y, self.weight("qkv", d, k * (q + 2) * h)), "weight_product")
        if c.qkv_bias:
            qkv = qkv + self.param("qkv_bias", zeros, (k * (q + 2) * h,))
        qkv = self.add_adapter("qkv_adapter", y, qkv).reshape(-1, k, q + 2, h)
        queries, keys, values = jnp.split(qkv, (q, q + 1), axis=2)
        keys, values = self.add_adapter("k_proj", y, keys.squeeze(2)), self.add_adapter("v_proj", y, values.squeeze(2))
        queries = self.add_adapter("q_proj", y, queries)
        if c.qk_norm:
            queries = rms_norm(queries, self.param("q_norm", ones, (h,)), c.rms_eps)
            keys = rms_norm(keys, self.param("k_norm", ones, (h,)), c.rms_eps)
        cos, sin = cos[:, None], sin[:, None]
        heads, state = attention(rotate(queries, cos[:, None], sin[:, None]), rotate(keys, cos, sin), values)
        heads = heads.reshape(-1, k * q * h)
        out = self.add_adapter("o_proj", heads, product(heads, self.weight("out", k * q * h, d)))
        x = x + out  # no checkpoint_name: small, and cheap to compute again
        if c.out_bias:
            x = x + self.param("out_bias", zeros, (d,))
        y = rms_norm(x, self.param("mlp_norm", ones, (d,)), c.rms_eps)
        gate, up = (
            checkpoint_name(self.add_adapter(f"{name}_proj", y, product(y, self.weight(name, d, f))), "weight_product")
            for name in ("gate", "up")
        )
        if self.has_variable("params", "gate_up_adapter"):
            both = self.add_adapter("gate_up_adapter", y, jnp.stack([gate, up], 1))
            gate, up = both[:, 0], both[:, 1]
        y = nn.silu(gate) * up
        return x + self.add_adapter("down_proj", y, product(y, self.weight("down", f, d))), state


def init_params(cfg: ModelConfig, key: PRNGKeyArray) -> Params:
    """Return random float32 parameters of one agent (normal, 0.02). The key is consumed."""
    k_embed, k_head, k_layers = jax.random.split(key, 3)
    x = jnp.zeros((1, cfg.hidden_size))
    cos, sin = rope(cfg, jnp.zeros(1, jnp.int32))

    def init_layer(key: PRNGKeyArray) -> Params:
        variables: Any = Block(cfg).init(key, x, cos, sin, causal_attention(1))
        return variables["params"]

    params = {
        "embed": 0.02 * jax.random.normal(k_embed, (cfg.vocab_size, cfg.hidden_size)),
        "layers": jax.vmap(init_layer)(jax.random.split(k_layers, cfg.num_layers)),
        "final_norm": jnp.ones(cfg.hidden_size),
    }
    if not cfg.tie_embeddings:
        params["lm_head"] = 0.02 * jax.random.normal(k_head, (cfg.hidden_size, cfg.vocab_size))
    return params


def cast(params: Params, dtype: jax.typing.DTypeLike) -> Params:
    """Cast the parameters to the compute dtype, except arrays that are not floating, such as random keys."""
    return jax.tree.map(lambda w: w.astype(dtype) if jnp.issubdtype(w.dtype, jnp.floating) else w, params)


REMAT = {  # what is saved for the backward pass: everything | the large weight products | only each layer's input
    "none": lambda primitive, *_, **__: primitive.name != "all_gather",  # weights that a mesh divides are gathered again
    "dots": jax.checkpoint_policies.save_only_these_names("weight_product", "attention"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def compute_weights(params: Params, cfg: ModelConfig, dtype: jax.typing.DTypeLike) -> Params:
    """Return the parameters in the compute dtype. On a mesh that divides them, those of the layers stay divided until
    `run_layers` reads them, and the others are whole."""
    return gather(cast(params, dtype), cfg, ("embed", "lm_head"))


def run_layers(
    params: Params,
    cfg: ModelConfig,
    x: Hidden,
    positions: Int[Array, " token"],
    attention: Callable[..., tuple[Queries, Any]],
    remat: str | None = "full",
    past: KeyValues | None = None,
) -> tuple[Hidden, Any]:
    """Scan over all layers. Return hidden states, and what `attention` returned beside the heads, stacked [L, ...].

    Args:
      attention: an `Attention`; with `past`, stacked [L, ...], it gets each layer's part as an argument of that name.
      remat: a key of `REMAT`. None: no gradient is taken. Layers are then read by their number, because for several agents XLA
        would transpose what a scan reads, and copy all weights.
    """
    cos, sin = rope(cfg, positions)

    def layer(x: Hidden, inputs: tuple[Params, KeyValues | None]) -> tuple[Hidden, Any]:
        w, past = inputs
        layer_attention = attention if past is None else functools.partial(attention, past=past)
        w = gather(cast(w, x.dtype), cfg)  # of one layer at a time
        return Block(cfg).apply({"params": w}, x, cos, sin, layer_attention)

    inputs = params["layers"], past
    if remat is None:
        take = functools.partial(lax.dynamic_index_in_dim, axis=0, keepdims=False)
        return lax.scan(lambda x, i: layer(x, jax.tree.map(lambda w: take(w, i), inputs)), x, jnp.arange(cfg.num_layers))
    return lax.scan(jax.checkpoint(layer, policy=REMAT[remat], prevent_cse=False), x, inputs)


@jax.custom_vjp
def embed(table: Float[Array, "vocabulary dim"], tokens: Int[Array, " token"]) -> Hidden:
    """Return the embeddings of tokens. In the gradient, rows of equal tokens are added in float32."""
    return table[tokens]


def _embed_forward(table: Array, tokens: Array) -> tuple[Hidden, tuple[Array, Array]]:
    return table[tokens], (table, tokens)


def _embed_backward(saved: tuple[Array, Array], d_out: Hidden) -> tuple[Array, None]:
    table, tokens = saved
    return sum_by_token(tokens, d_out, table.shape[0]).astype(table.dtype), None


embed.defvjp(_embed_forward, _embed_backward)


def completion_states(
    params: Params,
    cfg: ModelConfig,
    prompts: Int[Array, "prompt position"],
    lengths: Int[Array, " prompt"],
    tokens: Int[Array, "prompt group token"],
    remat: str = "full",
) -> Float[Array, "prompt group token dim"]:
    """Return the final hidden states of completions; each token sees its prompt and the tokens of its row up to itself.

    Prompts and rows go through every layer together: the weights are read once, every product is of one matrix of all tokens,
    and only attention separates them. Each prompt is computed once per group, also in the backward pass.

    Args:
      prompts: padded on the right.
      lengths: number of tokens of each prompt.
      remat: a key of `REMAT`.
    """
    (p, s), (_, g, t) = prompts.shape, tokens.shape
    flat = jnp.concatenate([prompts, tokens.reshape(p, g * t)], 1)
    row_positions = jnp.broadcast_to((lengths[:, None] + jnp.arange(t))[:, None], (p, g, t)).reshape(p, g * t)
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(s), (p, s)), row_positions], 1)
    attention = group_attention(lengths, s, g, t, cfg.fused_attention)
    x, _ = run_layers(
        params, cfg, embed(jnp.asarray(params["embed"]), flat.reshape(-1)), positions.reshape(-1), attention, remat
    )
    x = x.reshape(p, s + g * t, -1)[:, s:].reshape(p, g, t, -1)
    return rms_norm(x, params["final_norm"], cfg.rms_eps)


def output_weight(params: Params) -> Params:
    """Return the part of the parameters that `logits` reads."""
    name = "lm_head" if "lm_head" in params else "embed"
    return {name: params[name]}


def logits(params: Params, hidden: Float[Array, "*batch dim"]) -> Float[Array, "*batch vocabulary"]:
    """Return next-token logits, in float32, of final hidden states."""
    if "lm_head" in params:
        return einsum_float32("...d,dv->...v", hidden, params["lm_head"])
    return einsum_float32("...d,vd->...v", hidden, params["embed"])


def logits_gradients(
    params: Params, hidden: Float[Array, "token dim"], d_logits: Float[Array, "token vocabulary"]
) -> tuple[Params, Float[Array, "token dim"]]:
    """Return the gradients of `logits` with respect to its weight, in float32, and to the hidden states.

    Both products read the compute dtype; autodiff would convert the weight to float32 instead.
    """
    d_logits = d_logits.astype(hidden.dtype)
    (name,) = output_weight(params)
    weight_axes = "dv" if name == "lm_head" else "vd"
    d_weight = einsum_float32(f"nd,nv->{weight_axes}", hidden, d_logits)
    d_hidden = einsum_float32(f"nv,{weight_axes}->nd", d_logits, params[name])
    return {name: d_weight}, d_hidden.astype(hidden.dtype)


def forward(params: Params, cfg: ModelConfig, tokens: Int[Array, " token"]) -> Float[Array, "token vocabulary"]:
    """Return the logits of one plain sequence, for parity tests and small uses."""
    params = jax.tree.map(jnp.asarray, params)
    t = tokens.shape[0]
    x, _ = run_layers(params, cfg, params["embed"][tokens], jnp.arange(t), causal_attention(t))
    return logits(params, rms_norm(x, params["final_norm"], cfg.rms_eps))
