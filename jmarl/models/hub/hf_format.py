"""Convert between Hugging Face's model format and ours: configs, and tensors by one table that serves both directions.

Pure functions of dicts and numpy arrays: files, the hub and the cache are in `jmarl.models.hub.agents`, GGUF in
`jmarl.models.hub.gguf`. Left out because the decoder does not compute it (an error names it): sliding windows, biases in the
feed-forward layer, rotary scalings other than Llama 3's, activations other than SiLU, quantized safetensors.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jmarl.models.config import ModelConfig, RopeScaling

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
HEAD = "lm_head.weight"
ROPE_SCALING = {  # field of `RopeScaling` -> key in config.json
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}
NOT_WEIGHTS = ".rotary_emb.inv_freq"  # a constant in old Llama checkpoints


# --- config.json -------------------------------------------------------------------------------------------------------


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Convert a ``config.json``, in transformers' old (``rope_theta``) or new (``rope_parameters``) spelling."""
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


def config_to_hf(cfg: ModelConfig, token_ids: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a ``config.json`` in the old spelling, which transformers 4, transformers 5 and vLLM read.

    token_ids: bos_token_id, eos_token_id (one or a list) and pad_token_id; other fields are ignored.
    """
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
    }
    # Write special ids even if they are None: without them transformers assumes those of the original Llama.
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        hf[key] = (token_ids or {}).get(key)
    expected, actual = dataclasses.asdict(cfg), dataclasses.asdict(config_from_hf(hf))
    lost = ", ".join(f"{name}={getattr(cfg, name)!r}" for name in expected if actual[name] != expected[name])
    if lost:
        raise ValueError(f"Hugging Face's {cfg.family} layout cannot hold {lost}; choose another family or drop it")
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
    refuse(unsupported, f"this {hf['model_type']} checkpoint", "jmarl's decoder does not support")


def refuse(features: Mapping[str, bool], checkpoint: str, reason: str) -> None:
    """Raise ValueError for the first feature that a checkpoint has; `checkpoint` and `reason` are parts of the message."""
    for feature, present in features.items():
        if present:
            raise ValueError(f"{checkpoint} has {feature}, which {reason}")


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope type {kind!r} is not supported: jmarl knows 'default' and 'llama3'")
    return theta, RopeScaling(**{ours: _need(rope, theirs) for ours, theirs in ROPE_SCALING.items()})


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {"rope_type": "llama3"} | {theirs: getattr(scaling, ours) for ours, theirs in ROPE_SCALING.items()}


# --- tensors -----------------------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """The place of a Hugging Face tensor in the parameters: ``leaf[part] == tensor.reshape(split).transpose(axes)``.

    `part` indexes the views that `_split_heads` returns.
    """

    leaf: str  # "embed", "layers.qkv", ...
    part: tuple[Any, ...]  # an index of the leaf
    shape: tuple[int, ...]  # of the Hugging Face tensor
    split: tuple[int, ...]  # its shape with one axis per axis of the leaf
    axes: tuple[int, ...]  # the order of these axes in the leaf


class Tensor(NamedTuple):
    """A tensor of a checkpoint file, not read yet."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    file: str = ""  # for errors; empty: the checkpoint's name says it


def param_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every leaf of the decoder's parameters, e.g. ``layers.down`` -> [L, F, D]."""
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


def _split_heads(cfg: ModelConfig, leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return views of the leaves, those of query, key and value as [..., K, Q+2, h]."""
    heads = (cfg.num_kv_heads, cfg.queries_per_kv + 2, cfg.head_dim)
    qkv = ("layers.qkv", "layers.qkv_bias")
    return {name: leaf.reshape(*leaf.shape[:-1], *heads) if name in qkv else leaf for name, leaf in leaves.items()}


def tensor_slots(cfg: ModelConfig) -> dict[str, Slot]:
    """Return the slot of every Hugging Face tensor of an architecture."""
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
    parts = {"q": (slice(None, q), (k, q, h)), "k": (q, (k, h)), "v": (q + 1, (k, h))}  # index in [Q+2], shape in the leaf
    for name, (part, split) in parts.items():
        size, axes = math.prod(split), tuple(range(len(split)))
        weight = Slot("layers.qkv", (n, slice(None), slice(None), part), (size, d), (*split, d), (len(split), *axes))
        yield f"self_attn.{name}_proj.weight", weight
        if cfg.qkv_bias:
            yield f"self_attn.{name}_proj.bias", Slot("layers.qkv_bias", (n, slice(None), part), (size,), split, axes)
    matrices = {
        "self_attn.o_proj.weight": ("out", (d, k * q * h)),
        "mlp.gate_proj.weight": ("gate", (f, d)),
        "mlp.up_proj.weight": ("up", (f, d)),
        "mlp.down_proj.weight": ("down", (d, f)),
    }
    for name, (leaf, shape) in matrices.items():
        yield name, Slot(f"layers.{leaf}", (n,), shape, shape, (1, 0))
    vectors = {"input_layernorm.weight": ("attn_norm", d), "post_attention_layernorm.weight": ("mlp_norm", d)}
    if cfg.out_bias:
        vectors["self_attn.o_proj.bias"] = ("out_bias", d)
    if cfg.qk_norm:
        vectors |= {"self_attn.q_norm.weight": ("q_norm", h), "self_attn.k_norm.weight": ("k_norm", h)}
    for name, (leaf, size) in vectors.items():
        yield name, Slot(f"layers.{leaf}", (n,), (size,), (size,), (0,))


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLeaf:
    """A leaf of the decoder's parameters that stays in its files: `leaf[n]` reads a layer, `np.asarray(leaf)` all of it.

    What was read is not kept.
    """

    shape: tuple[int, ...]
    in_layers: bool  # its first axis is that of the layers
    read: Callable[[int], np.ndarray]  # returns layer n; of a leaf that has no layers, all of it
    dtype: ClassVar[np.dtype] = np.dtype(np.float32)

    @property
    def size(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    def __getitem__(self, n: int) -> np.ndarray:
        return self.read(n) if self.in_layers else np.asarray(self)[n]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not self.in_layers:
            return self.read(0).astype(dtype or self.dtype, copy=False)
        array = np.empty(self.shape, dtype or self.dtype)
        for n in range(len(array)):
            array[n] = self.read(n)
        return array


def params_from_tensors(cfg: ModelConfig, tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """Read a checkpoint's tensors, one at a time, to the decoder's parameters in float32. where: its name in errors."""
    return read_params(stored_params(cfg, tensors, where))


def read_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as numpy arrays: read those that are stored."""
    return _nest({name: np.asarray(leaf) for name, leaf in _flatten(params)})


def stored_params(cfg: ModelConfig, tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """Return the decoder's parameters as leaves that are read when they are needed, see `StoredLeaf`.

    Names and shapes are checked now; that all weights are finite is when they are read. where: as of `params_from_tensors`.
    """
    slots = tensor_slots(cfg)
    names = {name for name in tensors if not name.endswith(NOT_WEIGHTS)}
    redundant_head = cfg.tie_embeddings and HEAD in names
    check_names(names - {HEAD} if redundant_head else names, slots, where)
    parts: dict[str, dict[int, dict[str, Slot]]] = {}  # leaf -> layer -> its tensors
    for name, slot in slots.items():
        if tuple(tensors[name].shape) != slot.shape:
            raise ValueError(f"{where}: {name} has shape {tuple(tensors[name].shape)}, the config asks for {slot.shape}")
        parts.setdefault(slot.leaf, {}).setdefault(slot.part[0] if slot.part else 0, {})[name] = slot

    def read(leaf: str, shape: tuple[int, ...], n: int) -> np.ndarray:
        array = np.empty(shape, np.float32)
        view = _split_heads(cfg, {leaf: array})[leaf]
        for name, slot in parts[leaf][n].items():
            tensor = read_finite(tensors[name], name, where)
            view[slot.part[1:]] = tensor.reshape(slot.split).transpose(slot.axes)
        if leaf == "embed" and redundant_head and not np.array_equal(read_finite(tensors[HEAD], HEAD, where), array):
            raise ValueError(f"{where}: tie_word_embeddings is true, but {HEAD} differs from model.embed_tokens.weight")
        return array

    leaves = {}
    for leaf, shape in param_shapes(cfg).items():
        in_layers = leaf.startswith("layers.")
        leaves[leaf] = StoredLeaf(shape, in_layers, partial(read, leaf, shape[1:] if in_layers else shape))
    return _nest(leaves)


def read_finite(tensor: Tensor, name: str, where: str) -> np.ndarray:
    """Read a tensor in the type that it is stored in. Raises ValueError if a value is NaN or infinite.

    where: begins the message unless the tensor has a file."""
    array = tensor.read()
    if wrong := array.size - np.count_nonzero(np.isfinite(array)):
        raise ValueError(
            f"{tensor.file or where}: {name} has {wrong} of {array.size} weights that are NaN or infinite: it is damaged, "
            "or the training that wrote it diverged; get the file again or take an earlier checkpoint"
        )
    return array


def tensors_from_params(cfg: ModelConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return one agent's parameters as Hugging Face tensors, float32 and contiguous. Inverts `params_from_tensors`."""
    return {name: np.ascontiguousarray(view, np.float32) for name, view in tensor_views(cfg, params).items()}


def tensor_views(cfg: ModelConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return one agent's parameters as Hugging Face tensors. Arrays on the host are not copied, apart from those of
    query, key and value, whose rows lie apart."""
    leaves = {name: np.asarray(leaf) for name, leaf in _flatten(params)}
    shapes = param_shapes(cfg)
    check_names(leaves, shapes, "params")
    for name, leaf in leaves.items():
        if leaf.shape != shapes[name]:
            raise ValueError(
                f"params: {name} has shape {leaf.shape}, the config asks for {shapes[name]} "
                "(of a stack of agents, export one agent at a time)"
            )
    views = _split_heads(cfg, leaves)
    return {
        name: views[slot.leaf][slot.part].transpose(np.argsort(slot.axes)).reshape(slot.shape)
        for name, slot in tensor_slots(cfg).items()
    }


def check_names(names: Iterable[str], expected_names: Iterable[str], where: str) -> None:
    """Raise ValueError unless the names are the expected ones; `where` begins the message."""
    actual, expected = set(names), set(expected_names)
    for wrong, problem in ((expected - actual, "missing"), (actual - expected, "unknown to this architecture")):
        if wrong:
            listed = ", ".join(sorted(wrong)[:5]) + (", ..." if len(wrong) > 5 else "")
            verb = "tensor is" if len(wrong) == 1 else "tensors are"
            counts = f"(expected {len(expected)}, found {len(actual)})"
            raise ValueError(f"{where}: {len(wrong)} {verb} {problem}: {listed} {counts}")


def _nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {name: leaf for name, leaf in leaves.items() if not name.startswith("layers.")}
    params["layers"] = {name.removeprefix("layers."): leaf for name, leaf in leaves.items() if name.startswith("layers.")}
    return params


def _flatten(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, leaf in params.items():
        if isinstance(leaf, Mapping):
            yield from ((f"{name}.{inner}", value) for inner, value in leaf.items())
        else:
            yield name, leaf
