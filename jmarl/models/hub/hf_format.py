"""Hugging Face's model format and ours: configs, and one table of where each tensor goes, read in both directions.

Pure functions of dicts and numpy arrays: files, the hub and the cache are in `jmarl.models.hub.agents`, GGUF in
`jmarl.models.hub.gguf`; both fill the same table. Left out because the decoder does not compute it, and refused by name:
sliding windows, biases in the feed-forward layer, rotary scalings other than Llama 3's, activations other than SiLU,
quantised safetensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jmarl.models.config import ModelConfig, RopeScaling

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
HEAD = "lm_head.weight"
NOT_WEIGHTS = ".rotary_emb.inv_freq"  # a constant that old Llama checkpoints carry along


# --- config.json -------------------------------------------------------------------------------------------------------


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a ``config.json``, in transformers' old (``rope_theta``) and new (``rope_parameters``) spelling."""
    family = hf.get("model_type")
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"unknown architecture {family!r} (model_type in config.json): jmarl knows {known}")
    _refuse_unsupported(hf)
    theta, scaling = _rope(hf)
    heads, hidden = _need(hf, "num_attention_heads"), _need(hf, "hidden_size")
    bias = bool(hf.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=_need(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_need(hf, "intermediate_size"),
        num_layers=_need(hf, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or (128 if family == "qwen3" else hidden // heads),
        max_positions=_need(hf, "max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=hf.get("rms_norm_eps", 1e-6),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bias,
        out_bias=family != "qwen2" and bias,
        qk_norm=family == "qwen3",
    )


def config_to_hf(cfg: ModelConfig, tokenizer: Any = None) -> dict[str, Any]:
    """The ``config.json`` of a config, in the old spelling, which transformers 4, transformers 5 and vLLM all read."""
    if cfg.family not in ARCHITECTURES:
        raise ValueError(f"family={cfg.family!r} has no Hugging Face layout: jmarl knows {', '.join(ARCHITECTURES)}")
    hf = {
        "architectures": [ARCHITECTURES[cfg.family]],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "max_position_embeddings": cfg.max_positions,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": _scaling_to_hf(cfg.rope_scaling),
        "rms_norm_eps": cfg.rms_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": cfg.out_bias,
        **({"mlp_bias": False} if cfg.family == "llama" else {"use_sliding_window": False}),
        "torch_dtype": "float32",
    }  # the special ids even when there are none: transformers would otherwise assume those of the original Llama
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        hf[key] = None if tokenizer is None else getattr(tokenizer, key)
    back = config_from_hf(hf)
    lost = [f.name for f in dataclasses.fields(cfg) if getattr(back, f.name) != getattr(cfg, f.name)]
    if lost:
        given = ", ".join(f"{name}={getattr(cfg, name)!r}" for name in lost)
        raise ValueError(f"Hugging Face's {cfg.family} layout cannot hold {given}; choose another family or drop it")
    return hf


def _need(hf: Mapping[str, Any], key: str) -> Any:
    if hf.get(key) is None:
        raise ValueError(f"config.json has no {key!r}")
    return hf[key]


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    if "layer_types" in hf and hf["layer_types"] is not None:
        sliding = any(kind != "full_attention" for kind in hf["layer_types"])
    else:
        windowed = bool(hf.get("use_sliding_window")) and hf.get("sliding_window") is not None
        sliding = windowed and hf.get("max_window_layers", 0) < _need(hf, "num_hidden_layers")
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    unsupported = {
        f"hidden_act={hf.get('hidden_act')!r} (only 'silu')": hf.get("hidden_act", "silu") != "silu",
        "mlp_bias=True": bool(hf.get("mlp_bias", False)),
        "a sliding window in use": sliding,
        f"partial_rotary_factor={partial}": partial != 1.0,
        "quantization_config (load the checkpoint in full precision)": hf.get("quantization_config") is not None,
    }
    for what, present in unsupported.items():
        if present:
            raise ValueError(f"this {hf['model_type']} checkpoint has {what}, which jmarl's decoder does not support")


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope type {kind!r} is not supported: jmarl knows 'default' and 'llama3'")
    return theta, RopeScaling(
        factor=_need(rope, "factor"),
        low_freq_factor=_need(rope, "low_freq_factor"),
        high_freq_factor=_need(rope, "high_freq_factor"),
        original_max_positions=_need(rope, "original_max_position_embeddings"),
    )


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }


# --- tensors -----------------------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """Where one Hugging Face tensor lives: ``leaf[index] == tensor.reshape(split).transpose(axes)``; leaves of query, key
    and value are indexed with their heads apart (`_heads_apart`)."""

    leaf: str  # "embed", "layers.qkv", ...
    index: tuple  # which part of the leaf
    shape: tuple[int, ...]  # of the Hugging Face tensor
    split: tuple[int, ...]  # the same numbers with the axes of the leaf apart
    axes: tuple[int, ...]  # the order the leaf has them in


class Tensor(NamedTuple):
    """One tensor of a checkpoint file, read when it is its turn."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def param_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every leaf of the decoder's parameters, e.g. ``layers.down`` -> [L, F, D]."""
    d, f, h, k, q = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim, cfg.num_kv_heads, cfg.queries_per_kv
    layer = {
        **{"attn_norm": (d,), "qkv": (d, k * (q + 2) * h), "out": (k * q * h, d)},
        **{"mlp_norm": (d,), "gate": (d, f), "up": (d, f), "down": (f, d)},
        **({"qkv_bias": (k * (q + 2) * h,)} if cfg.qkv_bias else {}),
        **({"out_bias": (d,)} if cfg.out_bias else {}),
        **({"q_norm": (h,), "k_norm": (h,)} if cfg.qk_norm else {}),
    }
    shapes = {"embed": (cfg.vocab_size, d), "final_norm": (d,)}
    shapes.update({f"layers.{name}": (cfg.num_layers, *shape) for name, shape in layer.items()})
    return shapes if cfg.tie_embeddings else {**shapes, "lm_head": (d, cfg.vocab_size)}


def _heads_apart(cfg: ModelConfig, leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Views of the leaves, query, key and value as [..., K, Q+2, h]."""
    heads = (cfg.num_kv_heads, cfg.queries_per_kv + 2, cfg.head_dim)
    apart = ("layers.qkv", "layers.qkv_bias")
    return {name: leaf.reshape(*leaf.shape[:-1], *heads) if name in apart else leaf for name, leaf in leaves.items()}


def tensor_slots(cfg: ModelConfig) -> dict[str, Slot]:
    """Every Hugging Face tensor of this architecture and where it lives in the decoder's parameters."""
    v, d = cfg.vocab_size, cfg.hidden_size
    slots = {
        "model.embed_tokens.weight": Slot("embed", (), (v, d), (v, d), (0, 1)),
        "model.norm.weight": Slot("final_norm", (), (d,), (d,), (0,)),
    }
    if not cfg.tie_embeddings:
        slots[HEAD] = Slot("lm_head", (), (v, d), (v, d), (1, 0))
    for layer in range(cfg.num_layers):
        slots.update({f"model.layers.{layer}.{name}": slot for name, slot in _layer_slots(cfg, layer)})
    return slots


def _layer_slots(cfg: ModelConfig, n: int) -> Iterator[tuple[str, Slot]]:
    d, f, h, k, q = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim, cfg.num_kv_heads, cfg.queries_per_kv
    every = slice(None)
    parts = {"q": (slice(None, q), (k, q, h)), "k": (q, (k, h)), "v": (q + 1, (k, h))}  # where in [Q+2], and its axes
    for name, (part, split) in parts.items():
        rows, axes = len(split), tuple(range(len(split)))
        size = k * q * h if name == "q" else k * h
        yield (
            f"self_attn.{name}_proj.weight",
            Slot("layers.qkv", (n, every, every, part), (size, d), (*split, d), (rows, *axes)),
        )
        if cfg.qkv_bias:
            yield f"self_attn.{name}_proj.bias", Slot("layers.qkv_bias", (n, every, part), (size,), split, axes)
    yield "self_attn.o_proj.weight", Slot("layers.out", (n,), (d, k * q * h), (d, k * q * h), (1, 0))
    yield "mlp.gate_proj.weight", Slot("layers.gate", (n,), (f, d), (f, d), (1, 0))
    yield "mlp.up_proj.weight", Slot("layers.up", (n,), (f, d), (f, d), (1, 0))
    yield "mlp.down_proj.weight", Slot("layers.down", (n,), (d, f), (d, f), (1, 0))
    vectors = {"input_layernorm.weight": ("attn_norm", d), "post_attention_layernorm.weight": ("mlp_norm", d)}
    if cfg.out_bias:
        vectors["self_attn.o_proj.bias"] = ("out_bias", d)
    if cfg.qk_norm:
        vectors |= {"self_attn.q_norm.weight": ("q_norm", h), "self_attn.k_norm.weight": ("k_norm", h)}
    for name, (leaf, size) in vectors.items():
        yield name, Slot(f"layers.{leaf}", (n,), (size,), (size,), (0,))


def params_from_tensors(cfg: ModelConfig, tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """Decoder parameters in float32 from a checkpoint's tensors, one tensor at a time; `where` names it in errors."""
    slots = tensor_slots(cfg)
    names = {name for name in tensors if not name.endswith(NOT_WEIGHTS)}
    surplus_head = cfg.tie_embeddings and HEAD in names
    check_names(names - {HEAD} if surplus_head else names, slots, where)
    for name, slot in slots.items():
        if tuple(tensors[name].shape) != slot.shape:
            raise ValueError(f"{where}: {name} has shape {tuple(tensors[name].shape)}, the config asks for {slot.shape}")
    leaves = {name: np.empty(shape, np.float32) for name, shape in param_shapes(cfg).items()}
    apart = _heads_apart(cfg, leaves)
    for name, slot in slots.items():
        array = np.asarray(tensors[name].read(), np.float32)
        apart[slot.leaf][slot.index] = array.reshape(slot.split).transpose(slot.axes)
    if surplus_head and not np.array_equal(np.asarray(tensors[HEAD].read(), np.float32), leaves["embed"]):
        raise ValueError(f"{where}: tie_word_embeddings is true, but {HEAD} differs from model.embed_tokens.weight")
    return _nest(leaves)


def tensors_from_params(cfg: ModelConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The inverse of `params_from_tensors`: Hugging Face tensors, float32 and contiguous, of one agent's parameters."""
    leaves = {name: np.asarray(leaf) for name, leaf in _flatten(params)}
    shapes = param_shapes(cfg)
    check_names(leaves, shapes, "params")
    for name, leaf in leaves.items():
        if leaf.shape != shapes[name]:
            raise ValueError(
                f"params: {name} has shape {leaf.shape}, the config asks for {shapes[name]} "
                "(of a stack of agents, export one agent at a time)"
            )
    tensors, apart = {}, _heads_apart(cfg, leaves)
    for name, slot in tensor_slots(cfg).items():
        part = apart[slot.leaf][slot.index].transpose(np.argsort(slot.axes))
        tensors[name] = np.ascontiguousarray(part, np.float32).reshape(slot.shape)
    return tensors


def check_names(given, expected, where: str) -> None:
    """Raise unless both hold the same names; say how many are missing or left over, and which."""
    given, expected = set(given), set(expected)
    for names, what in ((expected - given, "missing"), (given - expected, "unknown to this architecture")):
        if names:
            first = sorted(names)[:5]
            listed = ", ".join(first) + (", ..." if len(names) > len(first) else "")
            verb = "tensor is" if len(names) == 1 else "tensors are"
            raise ValueError(f"{where}: {len(names)} {verb} {what}: {listed} (expected {len(expected)}, found {len(given)})")


def _nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    layers = {name.removeprefix("layers."): leaf for name, leaf in leaves.items() if name.startswith("layers.")}
    return {**{name: leaf for name, leaf in leaves.items() if not name.startswith("layers.")}, "layers": layers}


def _flatten(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, leaf in params.items():
        if isinstance(leaf, Mapping):
            yield from ((f"{name}.{inner}", value) for inner, value in leaf.items())
        else:
            yield name, leaf
