"""Run the decoder of one agent: RMSNorm, rotary positions, grouped-query attention, SwiGLU, and what families add to them.

The parameters are nested dicts of the arrays that `models/weights.py` describes; those of all layers are stacked [L, ...] under
the name layers.

Query, key and value are one matrix: key-value heads outermost, so that a mesh that divides their number splits between heads.
Every weight is a plain matrix, because XLA copies or transposes weights with more axes, and their gradients. Layers are
stacked: training and prefill scan over them, so compile time does not grow with depth. Decoding is unrolled; on CPUs with one
core per agent it reads the weights cut into panels (`models/cpu.py`). A base that nobody trains has tuples of arrays in place
of stacks (`types.Shared`): decoding reads them where they lie, and a scan copies one layer at a time.

Scoring (`completion_states`), prefill and decoding (`models/decoding.py`) run the same `Block`. They differ only in its
`attention` argument, which is why sampled and rescored log-probabilities agree. Each prompt is computed once for all
completions of its group. LoRA adapters are further parameters of the layers (`models/lora.py`).

Layers may be of several kinds, whose weights are stacked by themselves; kinds repeat after `ModelConfig.period` layers. Some
mix tokens by a recurrence (`models/layers/delta.py`) in place of attention: of these a row keeps a state, not keys and values.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jmarl.models.config import ModelConfig
from jmarl.models.layers.attention import (
    Angles,
    Attention,
    KeyValues,
    Queries,
    capped,
    causal_attention,
    einsum_float32,
    group_attention,
    rope,
    rope_kinds,
    rotate,
)
from jmarl.models.layers.delta import Delta, DeltaState, causal_delta, gated_norm, groups_delta, log_decay
from jmarl.models.layers.embedding import embed
from jmarl.models.layers.experts import Load, apply_experts, load_of, route
from jmarl.models.layers.kinds import by_period, join_kinds, join_layers, layer_of_base, layers_of_period
from jmarl.models.layers.products import ACTIVATIONS, drop, normalize, product, scaled
from jmarl.models.sharding import gather
from jmarl.models.stack import name_of
from jmarl.models.weights import FLOAT32, LAYERS, WEIGHTS, Weight, has, shape_of, weights_of

Params = dict[str, Any]


Hidden = Float[Array, "token dim"]


def initial(cfg: ModelConfig, weight: Weight) -> nn.initializers.Initializer:
    """Return the function that draws the initial values of a weight."""
    if weight.initial == "normal":
        return nn.initializers.normal(0.02)
    if weight.initial == "log_rate":
        return lambda key, shape: jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0))
    if weight.initial == "ones":
        return nn.initializers.ones
    return nn.initializers.zeros if weight.initial == "zeros" or cfg.norm_adds_one else nn.initializers.ones


class Block(nn.Module):
    """One layer of the decoder, for any N tokens; `attention` or `Delta` decides which tokens see or follow which."""

    cfg: ModelConfig
    number: int = 0  # of a layer of its kind

    def has(self, name: str) -> bool:
        """Return whether the layer has a weight."""
        return has(self.cfg, LAYERS + name, self.number)

    def weight(self, name: str) -> Any:
        """Return a weight, or its panels (whose shape `self.param` would refuse)."""
        if self.is_initializing():
            weight = WEIGHTS[LAYERS + name]
            return self.param(name, initial(self.cfg, weight), shape_of(self.cfg, weight.axes))
        return self.get_variable("params", name)

    def linear(self, name: str, x: Float[Array, "token d"]) -> Float[Array, "token f"]:
        """Return the product of x and a weight, with the bias if there is one."""
        out = product(x, self.weight(name))
        return out + self.weight(f"{name}_bias") if self.has(f"{name}_bias") else out

    def norm(self, name: str, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """Return x normalized; unchanged if the architecture has no such norm."""
        return normalize(self.cfg, x, self.weight(name)) if self.has(name) else x

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
    def __call__(
        self, x: Hidden, angles: Angles, attention: Attention | Delta, counted: Bool[Array, " token"] | None = None
    ) -> tuple[Hidden, tuple[Any, Load | None]]:
        """Return the layer's output, what `attention` returned beside the heads, and the load of its experts by `counted`."""
        y = self.norm("attn_norm", x)
        recurrent = self.cfg.is_recurrent(self.number)
        out, state = self.recur(y, attention) if recurrent else self.attend(y, angles, attention)
        x = self.add(x, self.norm("attn_out_norm", out))
        y, load = self.norm("mlp_norm", x), None
        if self.has("router"):
            y, load = self.experts(y, counted)
        else:
            y = self.feed_forward(y)
        return self.add(x, self.norm("mlp_out_norm", y)), (state, load)

    def add(self, x: Hidden, out: Hidden) -> Hidden:
        """Add the output of attention or feed-forward layer to the hidden states."""
        return x + out if self.cfg.residual_scale == 1.0 else x + scaled(out, self.cfg.residual_scale)

    def attend(self, y: Hidden, angles: Angles, attention: Attention) -> tuple[Hidden, Any]:
        """Return the output of attention for normalized hidden states, and what `attention` returned beside the heads."""
        c = self.cfg
        h, k, q = c.head_dim, c.num_kv_heads, c.queries_per_kv
        wide = q * (1 + c.attention_gate)
        qkv = checkpoint_name(product(y, self.weight("qkv")), "weight_product")
        if self.has("qkv_bias"):
            qkv = qkv + self.weight("qkv_bias")
        qkv = self.add_adapter("qkv_adapter", y, qkv).reshape(-1, k, wide + 2, h)
        queries, keys, values = jnp.split(qkv, (wide, wide + 1), axis=2)
        keys, values = self.add_adapter("k_proj", y, keys.squeeze(2)), self.add_adapter("v_proj", y, values.squeeze(2))
        queries, gates = self.add_adapter("q_proj", y, queries), None
        if c.attention_gate:
            queries, gates = jnp.moveaxis(queries.reshape(-1, k, q, 2, h), 3, 0)
        queries, keys = self.norm("q_norm", queries), self.norm("k_norm", keys)
        if c.qk_norm_of_all:
            queries = self.norm("q_norm_of_all", queries.reshape(-1, k * q * h)).reshape(queries.shape)
            keys = self.norm("k_norm_of_all", keys.reshape(-1, k * h)).reshape(keys.shape)
        cos, sin = angles.cos[:, None], angles.sin[:, None]
        queries = rotate(queries, cos[:, None], sin[:, None])
        if angles.query_scale is not None:
            queries = queries * angles.query_scale[:, None, None, None].astype(queries.dtype)
        if c.attention_scale is not None and (scale := c.attention_scale * math.sqrt(h)) != 1.0:
            queries = scaled(queries, scale)  # attention divides by sqrt(h)
        heads, state = attention(queries, rotate(keys, cos, sin), values)
        if gates is not None:
            heads = heads * jax.nn.sigmoid(gates)
        heads = heads.reshape(-1, k * q * h)
        out = self.add_adapter("o_proj", heads, self.linear("out", heads))
        return out, state  # no checkpoint_name: small, and cheap to compute again

    def recur(self, y: Hidden, delta: Delta) -> tuple[Hidden, Any]:
        """Return the output of a recurrent layer for normalized hidden states, and the states that `delta` returned."""
        x, gate = (checkpoint_name(product(y, self.weight(f"delta_{name}")), "weight_product") for name in ("qkv", "gate"))
        decay = log_decay(product(y, self.weight("delta_decay")), self.weight("delta_rate"), self.weight("delta_bias"))
        beta = jax.nn.sigmoid(product(y, self.weight("delta_beta")))
        out, state = delta(x, decay, beta, self.weight("delta_conv"))
        out = checkpoint_name(out, "attention")
        out = gated_norm(out, gate.reshape(out.shape), self.weight("delta_norm"), self.cfg.rms_eps)
        return product(out.reshape(len(y), -1), self.weight("delta_out")), state

    def feed_forward(self, y: Hidden) -> Hidden:
        """Return the output of the feed-forward layer for normalized hidden states (SwiGLU, arXiv 2002.05202)."""
        gate, up = (
            checkpoint_name(self.add_adapter(f"{name}_proj", y, self.linear(name, y)), "weight_product")
            for name in ("gate", "up")
        )
        if self.has_variable("params", "gate_up_adapter"):
            both = self.add_adapter("gate_up_adapter", y, jnp.stack([gate, up], 1))
            gate, up = both[:, 0], both[:, 1]
        y = ACTIVATIONS[self.cfg.activation](gate) * up
        return self.add_adapter("down_proj", y, self.linear("down", y))

    def experts(self, y: Hidden, counted: Bool[Array, " token"] | None) -> tuple[Hidden, Load | None]:
        """Return what each token's experts return for normalized hidden states, and their load."""
        c = self.cfg
        routes = route(y, self.weight("router"), c.experts_per_token, c.norm_top_probs)
        gate, up, down = (self.weight(f"expert_{name}") for name in ("gate", "up", "down"))
        out = apply_experts(y, routes, gate, up, down, ACTIVATIONS[c.activation])
        return out, None if counted is None else load_of(routes, counted)


def init_params(cfg: ModelConfig, key: PRNGKeyArray) -> Params:
    """Return random float32 parameters of one agent (normal, 0.02). The key is consumed."""
    k_embed, k_head, k_layers = jax.random.split(key, 3)
    x = jnp.zeros((1, cfg.hidden_size))
    angles = next(iter(rope(cfg, jnp.zeros(1, jnp.int32)).values()))

    def init_layer(number: int, key: PRNGKeyArray) -> Params:
        mix = causal_delta(1, cfg.delta) if cfg.is_recurrent(number) else causal_attention(1)
        variables: Any = Block(cfg, number).init(key, x, angles, mix)
        return variables["params"]

    keys = {"embed": k_embed, "lm_head": k_head, "final_norm": key}
    weights = {name: weight for name, weight in weights_of(cfg).items() if not name.startswith(LAYERS)}
    params: Params = {name: initial(cfg, w)(keys[name], shape_of(cfg, w.axes)) for name, w in weights.items()}
    layer_keys = jax.random.split(k_layers, cfg.num_layers)
    kinds = [jax.vmap(functools.partial(init_layer, n))(layer_keys[n :: cfg.period]) for n in range(cfg.period)]
    return params | {"layers": join_kinds(kinds)}


def cast(params: Params, dtype: jax.typing.DTypeLike) -> Params:
    """Cast the parameters to the compute dtype, except `FLOAT32` and arrays that are not floating, such as random keys."""

    def cast_leaf(path: tuple[Any, ...], w: Array) -> Array:
        stays = not jnp.issubdtype(w.dtype, jnp.floating) or name_of(path) in FLOAT32
        return w if stays else w.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast_leaf, params)


REMAT = {  # what is saved for the backward pass: everything | the large weight products | only each layer's input
    "none": lambda primitive, *_, **__: primitive.name != "all_gather",  # weights that a mesh divides are gathered again
    "dots": jax.checkpoint_policies.save_only_these_names("weight_product", "attention"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def compute_weights(params: Params, cfg: ModelConfig, dtype: jax.typing.DTypeLike) -> Params:
    """Return the parameters in the compute dtype. On a mesh that divides them, those of the layers stay divided until
    `run_layers` reads them, and the others are whole."""
    return gather(cast(params, dtype), cfg, ("embed", "lm_head"))


class States(NamedTuple):
    """What the layers returned beside their outputs, stacked [layer, ...] by kind; None if there are no such layers."""

    attention: Any
    delta: Any


def run_layers(
    params: Params,
    cfg: ModelConfig,
    x: Hidden,
    positions: Int[Array, " token"],
    attention: Callable[..., tuple[Queries, Any]],
    remat: str | None = "full",
    past: KeyValues | None = None,
    counted: Bool[Array, " token"] | None = None,
    delta: Delta | None = None,
    delta_past: DeltaState | None = None,
) -> tuple[Hidden, States, Load | None]:
    """Scan over all layers. Return hidden states, what `attention` and `delta` returned beside the heads, and the load of
    experts.

    Args:
      attention: an `Attention`; with `past`, stacked [L, ...], it gets each layer's part as an argument of that name, and of a
        model with sliding layers `slides`.
      delta: of recurrent layers, in place of attention; it gets the parts of `delta_past` as an argument `past`.
      remat: a key of `REMAT`. None: no gradient is taken. Layers are then read by their number, because for several agents XLA
        would transpose what a scan reads, and copy all weights.
      counted: which tokens count in the load of experts. None: there is none.
    """
    kinds, angles = rope_kinds(cfg), rope(cfg, positions)
    several = len(angles) > 1
    tables = jax.tree.map(lambda *x: jnp.stack(x), *angles.values()) if several else angles[kinds[0]]
    base = {name: w for name, w in params["layers"].items() if isinstance(w, tuple)}
    inputs = {name: w for name, w in params["layers"].items() if name not in base}
    if several:
        inputs["rope kind"] = jnp.array([list(angles).index(kind) for kind in kinds])
    given = {"past": past, "delta_past": delta_past}
    arguments: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    if any(cfg.sliding_layers):
        arguments["slides"] = jnp.array(cfg.sliding_layers)
    inputs = by_period(inputs | arguments, cfg)

    def layer(number: int, i: Array, x: Hidden, w: Params) -> tuple[Hidden, Any]:
        w = w | layer_of_base(base, cfg, number, i)
        kind = w.pop("rope kind", None)
        own = {name.removeprefix("delta_"): w.pop(name) for name in arguments if name in w}
        w = gather(cast(w, x.dtype), cfg)  # of one layer at a time
        rotation = tables if kind is None else jax.tree.map(lambda table: table[kind], tables)
        mix: Any = delta if cfg.is_recurrent(number) else attention
        return Block(cfg, number).apply({"params": w}, x, rotation, functools.partial(mix, **own), counted)

    def period(x: Hidden, numbered: tuple[Array, Params]) -> tuple[Hidden, list[Any]]:
        (i, inputs), outs = numbered, []
        for number, w in enumerate(layers_of_period(inputs, cfg)):
            run = functools.partial(layer, number)
            x, out = (run if remat is None else jax.checkpoint(run, policy=REMAT[remat], prevent_cse=False))(i, x, w)
            outs.append(out)
        return x, outs

    numbers = jnp.arange(cfg.num_layers // cfg.period)
    if remat is None:
        take = functools.partial(lax.dynamic_index_in_dim, axis=0, keepdims=False)
        x, outs = lax.scan(lambda x, i: period(x, (i, jax.tree.map(lambda w: take(w, i), inputs))), x, numbers)
    else:
        x, outs = lax.scan(period, x, (numbers, inputs))
    loads = [load for _, load in outs if load is not None]
    states = [
        join_layers([state for n, (state, _) in enumerate(outs) if cfg.is_recurrent(n) == recurrent])
        for recurrent in (False, True)
    ]
    return x, States(*states), join_layers(loads)


def embedded(params: Params, cfg: ModelConfig, tokens: Int[Array, " token"]) -> Hidden:
    """Return the hidden states that enter the first layer."""
    x = embed(jnp.asarray(params["embed"]), tokens)
    return x if cfg.embed_scale == 1.0 else x * jnp.asarray(cfg.embed_scale, x.dtype)


def final_states(params: Params, cfg: ModelConfig, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """Return the hidden states that `logits` reads, from those that leave the last layer."""
    x = normalize(cfg, x, params["final_norm"])
    return x if cfg.logit_divisor == 1.0 else x / jnp.asarray(cfg.logit_divisor, x.dtype)


def completion_states(
    params: Params,
    cfg: ModelConfig,
    prompts: Int[Array, "prompt position"],
    lengths: Int[Array, " prompt"],
    tokens: Int[Array, "prompt group token"],
    remat: str = "full",
    counted: Bool[Array, "prompt position_and_token"] | None = None,
) -> tuple[Float[Array, "prompt group token dim"], Load | None]:
    """Return the final hidden states of completions, where each token sees its prompt and the tokens of its row up to itself,
    and the load of experts.

    Prompts and rows go through every layer together: the weights are read once, every product is of one matrix of all tokens,
    and only attention separates them. Each prompt is computed once per group, also in the backward pass.

    Args:
      prompts: padded on the right.
      lengths: number of tokens of each prompt.
      remat: a key of `REMAT`.
      counted: as of `run_layers`, of each prompt's S positions and its rows.
    """
    (p, s), (_, g, t) = prompts.shape, tokens.shape
    flat = jnp.concatenate([prompts, tokens.reshape(p, g * t)], 1)
    row_positions = jnp.broadcast_to((lengths[:, None] + jnp.arange(t))[:, None], (p, g, t)).reshape(p, g * t)
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(s), (p, s)), row_positions], 1)
    attention = group_attention(lengths, s, g, t, cfg)
    x, counted = embedded(params, cfg, flat.reshape(-1)), None if counted is None else counted.reshape(-1)
    delta = groups_delta(lengths, s, g, cfg.delta)
    x, _, load = run_layers(params, cfg, x, positions.reshape(-1), attention, remat, counted=counted, delta=delta)
    x = x.reshape(p, s + g * t, -1)[:, s:].reshape(p, g, t, -1)
    return final_states(params, cfg, x), load


def output_weight(params: Params) -> Params:
    """Return the part of the parameters that `logits` reads."""
    name = "lm_head" if "lm_head" in params else "embed"
    return {name: params[name]}


def logits(params: Params, hidden: Float[Array, "*batch dim"], cap: float | None = None) -> Float[Array, "*batch vocabulary"]:
    """Return next-token logits, in float32, of final hidden states. cap: `ModelConfig.logit_cap`."""
    if "lm_head" in params:
        return capped(einsum_float32("...d,dv->...v", hidden, params["lm_head"]), cap)
    return capped(einsum_float32("...d,vd->...v", hidden, params["embed"]), cap)


def logits_gradients(
    params: Params,
    hidden: Float[Array, "token dim"],
    d_logits: Float[Array, "token vocabulary"],
    logits: Float[Array, "token vocabulary"],
    cap: float | None = None,
) -> tuple[Params, Float[Array, "token dim"]]:
    """Return the gradients of `logits` with respect to its weight, in float32, and to the hidden states.

    Both products read the compute dtype; autodiff would convert the weight to float32 instead. logits, cap: if they are capped.
    """
    if cap is not None:
        d_logits = d_logits * (1 - jnp.square(logits / cap))
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
    x, delta = embedded(params, cfg, tokens), causal_delta(t, cfg.delta)
    x, *_ = run_layers(params, cfg, x, jnp.arange(t), causal_attention(t, cfg), delta=delta)
    return logits(params, final_states(params, cfg, x), cfg.logit_cap)
