"""Convert the architecture of a model from and to Hugging Face's ``config.json``: what all families have in common.

`models.families` has what differs. Of a model of text and images the text part is read. What the decoder does not compute is an
error that names it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from jmarl.models.config import ModelConfig
from jmarl.models.families import FAMILIES, Family
from jmarl.models.families.rope import need, partial_rotary, read_rope, write_rope

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings")  # fmt: skip
WHOLE = {  # fields of all families that are whole numbers -> the smallest and the largest one
    **dict.fromkeys((
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "original_max_position_embeddings", "sliding_window_pattern", "full_attention_interval",
        "no_rope_layer_interval", "decoder_sparse_step", "linear_num_key_heads",
        "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
    ), (1, 2**31)),
    **dict.fromkeys(
        ("head_dim", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"), (0, 2**31)
    ),
    "num_hidden_layers": (1, 10_000),
}  # fmt: skip
POSITIVE = (  # other numbers, also of rotary embeddings
    "rms_norm_eps", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping", "embedding_multiplier", "residual_multiplier", "attention_multiplier",
    "logits_scaling", "factor",
)  # fmt: skip
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # 0 is as null
ONLY_OF = {  # fields of the above -> how the families begin that use them; those of others may have any value
    **dict.fromkeys((*CAPS, "query_pre_attn_scalar"), "gemma"),
    **dict.fromkeys(("sliding_window_pattern", "rope_local_base_freq"), "gemma3"),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), "granite"),
    **dict.fromkeys(("decoder_sparse_step", "moe_intermediate_size", *(x for x in WHOLE if "expert" in x)), "qwen3_moe"),
    **dict.fromkeys(("full_attention_interval", *(x for x in WHOLE if x.startswith("linear_"))), "qwen3_5"),
    "no_rope_layer_interval": "smollm3",
}
OUTER = ("tie_word_embeddings", "quantization_config")  # that a model of text and images has outside its text part
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # ours -> Hugging Face's


def config_from_hf(fields: Mapping[str, Any]) -> ModelConfig:
    """Convert a ``config.json``, in transformers' old (``rope_theta``) or new (``rope_parameters``) spelling. Raises ValueError
    for one that is broken."""
    try:
        return _read(fields)
    except KeyError as error:
        raise ValueError(f"config.json has no {error}") from error
    except (LookupError, TypeError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"config.json has a field of a wrong type: get it again ({error})") from error


def _read(fields: Mapping[str, Any]) -> ModelConfig:
    kind = None
    if isinstance(fields.get("text_config"), Mapping) and fields.get("model_type") not in FAMILIES:
        kind, tied = fields.get("model_type"), {key: fields[key] for key in OUTER if fields.get(key) is not None}
        fields = {**fields["text_config"], **tied}
    family = family_of(fields)
    hf = {**family.defaults, **fields}
    hf = {key: value for key, value in hf.items() if value is not None and (value != 0 or key not in CAPS)}  # no default either
    for key in REQUIRED:
        need(hf, key)
    _check_numbers(hf)
    own = family.read(hf)
    _refuse_unsupported(hf, family, own)
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    if not (head_dim := hf.get("head_dim") or hidden // heads):
        raise ValueError(f"config.json has num_attention_heads={heads}, more than hidden_size={hidden}")
    theta, scaling = read_rope(hf)
    bias = bool(hf.get("attention_bias", False))
    common = {
        "family": hf["model_type"],
        "vocab_size": hf["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": hf["intermediate_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "max_positions": hf["max_position_embeddings"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_eps": hf.get("rms_norm_eps", 1e-6),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "qkv_bias": bias,
        "out_bias": bias,
        "activation": {theirs: ours for ours, theirs in ACTIVATIONS.items()}[_activation(hf)],
    }
    if kind is not None:
        warnings.warn(f"{kind}: only the text part is loaded, images are left out", stacklevel=2)
    return ModelConfig(**common | own)


def config_to_hf(cfg: ModelConfig, token_ids: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a ``config.json`` in the old spelling, which transformers 4, transformers 5 and vLLM read.

    token_ids: bos_token_id, eos_token_id (one or a list) and pad_token_id; other fields are ignored.
    """
    if cfg.family not in FAMILIES:
        raise ValueError(f"family={cfg.family!r} has no Hugging Face layout: jmarl knows {', '.join(FAMILIES)}")
    family, cfg = FAMILIES[cfg.family], cfg.in_context(long=False)  # a choice of runs, not of files
    activation = ACTIVATIONS[cfg.activation]
    hf = {
        "architectures": [family.architecture],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "max_position_embeddings": cfg.max_positions,
        **write_rope(cfg),
        "rms_norm_eps": cfg.rms_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act": activation,
        "attention_bias": cfg.out_bias,
        "torch_dtype": "float32",
        **family.write(cfg),
    }
    # Write special ids even if they are None: without them transformers assumes those of the original Llama.
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        hf[key] = (token_ids or {}).get(key)
    expected, actual = dataclasses.asdict(cfg), dataclasses.asdict(config_from_hf(hf))
    lost = ", ".join(f"{name}={getattr(cfg, name)!r}" for name in expected if actual[name] != expected[name])
    if lost:
        raise ValueError(f"Hugging Face's {cfg.family} layout cannot hold {lost}; choose another family or drop it")
    return hf


def family_of(hf: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raises ValueError if there is none, and names the nearest."""
    name = hf.get("model_type")
    if name in FAMILIES:
        return FAMILIES[str(name)]
    known = {name.removesuffix("_text"): name for name in FAMILIES}
    near = difflib.get_close_matches(str(name).removesuffix("_text"), known, n=1)
    nearest = f"; the nearest is {known[near[0]]}" if near else ""
    known_names = ", ".join(FAMILIES)
    raise ValueError(f"unknown architecture {name!r:.40} (model_type in config.json): jmarl knows {known_names}{nearest}")


def _check_numbers(hf: Mapping[str, Any]) -> None:
    """Raise ValueError for a number that no model has. `read_sliding` checks the window, which a switch may leave unused."""
    hf = {key: value for key, value in hf.items() if hf["model_type"].startswith(ONLY_OF.get(key, ""))}
    for name, (low, high) in WHOLE.items():
        value = hf.get(name, low)
        if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
            raise ValueError(f"config.json has {name}={value!r:.40}: it is a whole number from {low} to {high}")
    ropes = [hf.get("rope_scaling"), rope := hf.get("rope_parameters"), *(rope.values() if isinstance(rope, Mapping) else ())]
    for fields in (hf, *(x for x in ropes if isinstance(x, Mapping))):
        for name in POSITIVE:
            value = fields.get(name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < float(value) < math.inf):
                raise ValueError(f"config.json has {name}={value!r:.40}: it is a number above 0")


def _activation(hf: Mapping[str, Any]) -> str:
    return hf.get("hidden_activation") or hf.get("hidden_act", "silu")


def _refuse_unsupported(hf: Mapping[str, Any], family: Family, own: Mapping[str, Any]) -> None:
    """Raise ValueError for what no model of a family has. own: the fields that the family read."""
    activation, share = _activation(hf), partial_rotary(hf)
    slides = hf.get("sliding_window") is not None and {*hf.get("layer_types", ())} - {"full_attention"}
    known = " or ".join(map(repr, ACTIVATIONS.values()))
    unsupported = {
        f"hidden_act={activation!r} (only {known})": activation not in ACTIVATIONS.values(),
        f"partial_rotary_factor={share}": share != 1.0 and "rotary_dim" not in own,
        "mlp_bias=True": bool(hf.get("mlp_bias")) and "mlp_bias" not in own,
        "sliding layers": bool(slides) and "sliding_layers" not in own,
        "quantization_config (load the checkpoint in full precision)": hf.get("quantization_config") is not None,
        **family.refuses(hf),
    }
    refuse(unsupported, f"this {hf['model_type']} checkpoint", "jmarl's decoder does not support")


def refuse(features: Mapping[str, bool], checkpoint: str, reason: str) -> None:
    """Raise ValueError for the first feature that a checkpoint has; `checkpoint` and `reason` are parts of the message."""
    for feature, present in features.items():
        if present:
            raise ValueError(f"{checkpoint} has {feature}, which {reason}")
