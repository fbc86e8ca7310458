"""Describe each weight of a decoder once; all else follows from `WEIGHTS`.

Shapes and initial values (`decoder`), the axes that a mesh divides (`sharding`), the tensors of files (`hub.hf_format`,
`hub.gguf`), the layers that can have adapters (`lora`, `hub.peft`) and the number of parameters. No jax: the loader reads it.

Letters: V vocabulary, D model, F feed-forward, E experts, M feed-forward of an expert, K key-value heads, Q queries per
key-value head, P = Q + 2 (the queries, the key and the value of a key-value head), h size of a head. Letters without a space
between them are one axis: ``D KPh`` is a matrix [D, K * P * h].
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
    initial: str = "normal"  # 0.02 times normal | zeros | norm: what changes nothing
    exists: Callable[[ModelConfig], bool] = lambda cfg: True
    layers: str = "all"  # | dense | routed: those that have it


def _norm(name: str, exists: Callable[[ModelConfig], bool] = lambda cfg: True, axes: str = "D") -> Weight:
    return Weight(axes, {name: axes}, "norm", exists)


WEIGHTS: dict[str, Weight] = {
    "embed": Weight("V D", {"embed": "V D"}),
    "final_norm": _norm("final_norm"),
    "layers.attn_norm": _norm("attn_norm", lambda cfg: cfg.norms_before),
    "layers.qkv": Weight("D KPh", {"q": "KQh D", "k": "Kh D", "v": "Kh D"}),
    "layers.qkv_bias": Weight("KPh", {"q": "KQh", "k": "Kh", "v": "Kh"}, "zeros", lambda cfg: cfg.qkv_bias),
    "layers.q_norm": _norm("q_norm", lambda cfg: cfg.qk_norm and not cfg.qk_norm_of_all, "h"),
    "layers.k_norm": _norm("k_norm", lambda cfg: cfg.qk_norm and not cfg.qk_norm_of_all, "h"),
    "layers.q_norm_of_all": Weight("KQh", {"q_norm": "KQh"}, "norm", lambda cfg: cfg.qk_norm_of_all),
    "layers.k_norm_of_all": Weight("Kh", {"k_norm": "Kh"}, "norm", lambda cfg: cfg.qk_norm_of_all),
    "layers.out": Weight("KQh D", {"o": "D KQh"}),
    "layers.out_bias": Weight("D", {"o": "D"}, "zeros", lambda cfg: cfg.out_bias),
    "layers.attn_out_norm": _norm("attn_out_norm", lambda cfg: cfg.norms_after),
    "layers.mlp_norm": _norm("mlp_norm", lambda cfg: cfg.norms_before),
    "layers.gate": Weight("D F", {"gate": "F D"}, layers="dense"),
    "layers.gate_bias": Weight("F", {"gate": "F"}, "zeros", lambda cfg: cfg.mlp_bias, "dense"),
    "layers.up": Weight("D F", {"up": "F D"}, layers="dense"),
    "layers.up_bias": Weight("F", {"up": "F"}, "zeros", lambda cfg: cfg.mlp_bias, "dense"),
    "layers.down": Weight("F D", {"down": "D F"}, layers="dense"),
    "layers.down_bias": Weight("D", {"down": "D"}, "zeros", lambda cfg: cfg.mlp_bias, "dense"),
    "layers.router": Weight("D E", {"router": "E D"}, layers="routed"),
    "layers.expert_gate": Weight("E D M", {"expert_gate": "E M D"}, layers="routed"),
    "layers.expert_up": Weight("E D M", {"expert_up": "E M D"}, layers="routed"),
    "layers.expert_down": Weight("E M D", {"expert_down": "E D M"}, layers="routed"),
    "layers.mlp_out_norm": _norm("mlp_out_norm", lambda cfg: cfg.norms_after),
    "lm_head": Weight("D V", {"lm_head": "V D"}, exists=lambda cfg: not cfg.tie_embeddings),
}


def has(cfg: ModelConfig, name: str, layer: int = 0) -> bool:
    """Return whether an architecture has a weight, of those of layers in this one."""
    weight = WEIGHTS[name]
    return weight.exists(cfg) and (weight.layers == "all" or (weight.layers == "dense") == cfg.is_dense(layer))


def layers_with(cfg: ModelConfig, name: str) -> list[int]:
    """Return the numbers of the layers that have a weight."""
    return [n for n in range(cfg.num_layers) if has(cfg, name, n)]


def weights_of(cfg: ModelConfig) -> dict[str, Weight]:
    """Return the weights that an architecture has."""
    return {name: weight for name, weight in WEIGHTS.items() if layers_with(cfg, name)}


def sizes_of(cfg: ModelConfig) -> dict[str, int]:
    """Return the size that each letter stands for."""
    heads = {"K": cfg.num_kv_heads, "Q": cfg.queries_per_kv, "P": cfg.queries_per_kv + 2, "h": cfg.head_dim}
    experts = {"E": cfg.num_experts, "M": cfg.expert_size}
    return {"V": cfg.vocab_size, "D": cfg.hidden_size, "F": cfg.intermediate_size} | heads | experts


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
    if name.startswith(LAYERS) and " " in axes and weight.layers != "routed"
}
