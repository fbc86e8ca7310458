"""Describe each weight of a decoder once; all else follows from `WEIGHTS`.

Shapes and initial values (`decoder`), the axes that a mesh divides (`sharding`), the tensors of files (`hub.hf_format`,
`hub.gguf`), the layers that can have adapters (`lora`, `hub.peft`), what weight decay shrinks (`learning.optimizer`) and the
number of parameters. No jax: the loader reads it.

Letters: V vocabulary, D model, F feed-forward, E experts, M feed-forward of an expert, K key-value heads, Q queries per
key-value head, U these and their gates (2 Q, where attention is gated), P = U + 2 (also the key and the value of a key-value
head), h size of a head. Of recurrent layers: C channels, W tokens that a convolution reads, N heads, v size of a value. Letters
without a space between them are one axis: ``D KPh`` is a matrix [D, K * P * h].
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jmarl.models.config import ModelConfig

LAYERS = "layers."  # begins the names of weights of layers; their first axis is that of the layers that have them
PARTS = {"q": slice(None, -2), "k": -2, "v": -1}  # of the axis P


class Weight(NamedTuple):
    """A leaf of the parameters."""

    axes: str
    modules: Mapping[str, str]  # module -> the axes of its tensor in Hugging Face's files; a family names the modules
    initial: str = "normal"  # 0.02 times normal | zeros | ones | norm: what changes nothing | log_rate: of decays
    exists: Callable[[ModelConfig], bool] = lambda cfg: True
    layers: str = "all"  # | dense | routed | attention | recurrent: those that have it
    suffix: str = ".weight"  # of its names in files


def _norm(name: str, exists: Callable[[ModelConfig], bool] = lambda cfg: True, axes: str = "D", layers: str = "all") -> Weight:
    return Weight(axes, {name: axes}, "norm", exists, layers)


WEIGHTS: dict[str, Weight] = {
    "embed": Weight("V D", {"embed": "V D"}),
    "final_norm": _norm("final_norm"),
    "layers.attn_norm": _norm("attn_norm", lambda cfg: cfg.norms_before),
    "layers.qkv": Weight("D KPh", {"q": "KUh D", "k": "Kh D", "v": "Kh D"}, layers="attention"),
    "layers.qkv_bias": Weight(
        "KPh", {"q": "KUh", "k": "Kh", "v": "Kh"}, "zeros", lambda cfg: cfg.qkv_bias, "attention", ".bias"
    ),
    "layers.q_norm": _norm("q_norm", lambda cfg: cfg.qk_norm and not cfg.qk_norm_of_all, "h", "attention"),
    "layers.k_norm": _norm("k_norm", lambda cfg: cfg.qk_norm and not cfg.qk_norm_of_all, "h", "attention"),
    "layers.q_norm_of_all": Weight("KQh", {"q_norm": "KQh"}, "norm", lambda cfg: cfg.qk_norm_of_all, "attention"),
    "layers.k_norm_of_all": Weight("Kh", {"k_norm": "Kh"}, "norm", lambda cfg: cfg.qk_norm_of_all, "attention"),
    "layers.out": Weight("KQh D", {"o": "D KQh"}, layers="attention"),
    "layers.out_bias": Weight("D", {"o": "D"}, "zeros", lambda cfg: cfg.out_bias, "attention", ".bias"),
    "layers.delta_qkv": Weight("D C", {"delta_qkv": "C D"}, layers="recurrent"),
    "layers.delta_gate": Weight("D Nv", {"delta_gate": "Nv D"}, layers="recurrent"),
    "layers.delta_beta": Weight("D N", {"delta_beta": "N D"}, layers="recurrent"),
    "layers.delta_decay": Weight("D N", {"delta_decay": "N D"}, layers="recurrent"),
    "layers.delta_conv": Weight("W 1C", {"delta_conv": "C 1 W"}, layers="recurrent"),
    "layers.delta_rate": Weight("N", {"delta_rate": "N"}, "log_rate", layers="recurrent", suffix=""),
    "layers.delta_bias": Weight("N", {"delta_bias": "N"}, "ones", layers="recurrent", suffix=""),
    "layers.delta_norm": Weight("v", {"delta_norm": "v"}, "ones", layers="recurrent"),
    "layers.delta_out": Weight("Nv D", {"delta_out": "D Nv"}, layers="recurrent"),
    "layers.attn_out_norm": _norm("attn_out_norm", lambda cfg: cfg.norms_after),
    "layers.mlp_norm": _norm("mlp_norm", lambda cfg: cfg.norms_before),
    "layers.gate": Weight("D F", {"gate": "F D"}, layers="dense"),
    "layers.gate_bias": Weight("F", {"gate": "F"}, "zeros", lambda cfg: cfg.mlp_bias, "dense", ".bias"),
    "layers.up": Weight("D F", {"up": "F D"}, layers="dense"),
    "layers.up_bias": Weight("F", {"up": "F"}, "zeros", lambda cfg: cfg.mlp_bias, "dense", ".bias"),
    "layers.down": Weight("F D", {"down": "D F"}, layers="dense"),
    "layers.down_bias": Weight("D", {"down": "D"}, "zeros", lambda cfg: cfg.mlp_bias, "dense", ".bias"),
    "layers.router": Weight("D E", {"router": "E D"}, layers="routed"),
    "layers.expert_gate": Weight("E D M", {"expert_gate": "E M D"}, layers="routed"),
    "layers.expert_up": Weight("E D M", {"expert_up": "E M D"}, layers="routed"),
    "layers.expert_down": Weight("E M D", {"expert_down": "E D M"}, layers="routed"),
    "layers.mlp_out_norm": _norm("mlp_out_norm", lambda cfg: cfg.norms_after),
    "lm_head": Weight("D V", {"lm_head": "V D"}, exists=lambda cfg: not cfg.tie_embeddings),
}


# Leaves that are not rounded to the compute dtype. They are small: exponents, and what files in bfloat16 have in float32, too.
FLOAT32 = ("delta_rate", "delta_bias", "delta_norm")


def decays(name: str) -> bool:
    """Return whether weight decay shrinks a leaf, by its name among the trained parameters, e.g. ``layers.down``: matrices do,
    also those of adapters and the value head; vectors (norms, biases, rates of recurrences) do not. The axis of layers is none
    of a weight's own."""
    return name != "value_bias" and (name not in WEIGHTS or " " in WEIGHTS[name].axes)


def is_of(cfg: ModelConfig, kind: str, layer: int) -> bool:
    """Return whether a layer is one of those that `Weight.layers` names."""
    if kind in ("dense", "routed"):
        return (kind == "dense") == cfg.is_dense(layer)
    return kind == "all" or (kind == "recurrent") == cfg.is_recurrent(layer)


def has(cfg: ModelConfig, name: str, layer: int = 0) -> bool:
    """Return whether an architecture has a weight, of those of layers in this one."""
    return WEIGHTS[name].exists(cfg) and is_of(cfg, WEIGHTS[name].layers, layer)


def layers_with(cfg: ModelConfig, name: str) -> list[int]:
    """Return the numbers of the layers that have a weight."""
    return [n for n in range(cfg.num_layers) if has(cfg, name, n)]


def weights_of(cfg: ModelConfig) -> dict[str, Weight]:
    """Return the weights that an architecture has."""
    return {name: weight for name, weight in WEIGHTS.items() if layers_with(cfg, name)}


def sizes_of(cfg: ModelConfig) -> dict[str, int]:
    """Return the size that each letter stands for."""
    both = cfg.queries_per_kv * (1 + cfg.attention_gate)
    heads = {"K": cfg.num_kv_heads, "Q": cfg.queries_per_kv, "U": both, "P": both + 2, "h": cfg.head_dim}
    sizes = {"V": cfg.vocab_size, "D": cfg.hidden_size, "F": cfg.intermediate_size} | heads
    sizes |= {"E": cfg.num_experts, "M": cfg.expert_size}
    if (d := cfg.delta) is not None:
        sizes |= {"C": d.channels, "W": d.width, "N": d.heads, "v": d.value_size, "1": 1}
    return sizes


def shape_of(cfg: ModelConfig, axes: str) -> tuple[int, ...]:
    """Return the shape of an array with these axes."""
    sizes = sizes_of(cfg)
    return tuple(math.prod(sizes[letter] for letter in word) for word in axes.split())


def param_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every leaf of the parameters of one agent, e.g. ``layers.down`` -> [L, F, D]."""
    layers = {name: (len(layers_with(cfg, name)),) if name.startswith(LAYERS) else () for name in WEIGHTS}
    return {name: (*layers[name], *shape_of(cfg, weight.axes)) for name, weight in weights_of(cfg).items()}


def num_params(cfg: ModelConfig) -> int:
    """Return the number of parameters of one agent; a tied embedding counts once."""
    return sum(map(math.prod, param_shapes(cfg).values()))


# --- adapters ----------------------------------------------------------------------------------------------------------


class Adapter(NamedTuple):
    """A linear layer that can have an adapter."""

    leaf: str  # the weight, among those of a layer
    module: str  # the part of it
    inputs: str  # axes
    outputs: str


# By Hugging Face's names, in the order of `config.LORA_TARGETS`
ADAPTERS: dict[str, Adapter] = {
    f"{module}_proj": Adapter(name.removeprefix(LAYERS), module, axes.split()[1], axes.split()[0])
    for name, weight in WEIGHTS.items()
    for module, axes in weight.modules.items()
    if name.startswith(LAYERS) and " " in axes and weight.layers not in ("routed", "recurrent")
}
