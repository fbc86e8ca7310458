"""Qwen3.5, text: layers of the gated delta rule beside layers of attention with a gate on its heads."""

from __future__ import annotations

from typing import Any

from jmarl.models.config import DeltaSizes, ModelConfig
from jmarl.models.families.family import Family, Fields
from jmarl.models.families.rope import partial_rotary

LINEAR, FULL = "linear_attention", "full_attention"
SIZES = {  # fields of `DeltaSizes` -> of a config.json, and their values if it leaves them out
    "key_heads": ("linear_num_key_heads", 16),
    "heads": ("linear_num_value_heads", 32),
    "key_size": ("linear_key_head_dim", 128),
    "value_size": ("linear_value_head_dim", 128),
    "width": ("linear_conv_kernel_dim", 4),
}


def _read(hf: Fields) -> dict[str, Any]:
    count, step = hf["num_hidden_layers"], hf.get("full_attention_interval", 4)
    kinds = hf.get("layer_types") or [LINEAR if (n + 1) % step else FULL for n in range(count)]
    if len(kinds) != count:
        raise ValueError(f"layer_types has {len(kinds)} layers, and num_hidden_layers is {count}")
    if unknown := {*kinds} - {LINEAR, FULL}:
        raise ValueError(f"layer_types has {sorted(unknown)}: of {hf['model_type']} jmarl knows {LINEAR} and {FULL}")
    head_dim = hf["head_dim"] or hf["hidden_size"] // hf["num_attention_heads"]
    fields = {
        "head_dim": head_dim,
        "num_heads": hf["num_attention_heads"],
        "num_kv_heads": hf["num_key_value_heads"],
        "qk_norm": True,
        "norm_adds_one": True,
        "attention_gate": True,
        "rotary_dim": int(head_dim * partial_rotary(hf)),
    }
    if LINEAR not in kinds:
        return fields
    sizes = DeltaSizes(**{ours: hf.get(*theirs) for ours, theirs in SIZES.items()})
    return fields | {"delta": sizes, "delta_layers": tuple(kind == LINEAR for kind in kinds)}


def _write(cfg: ModelConfig) -> dict[str, Any]:
    kinds = [LINEAR if cfg.is_recurrent(n) else FULL for n in range(cfg.num_layers)]
    sizes = {} if cfg.delta is None else {theirs: getattr(cfg.delta, ours) for ours, (theirs, _) in SIZES.items()}
    return {"layer_types": kinds, **sizes}


def _refuses(hf: Fields) -> dict[str, bool]:
    return {
        f"hidden_act={hf.get('hidden_act')!r} (only 'silu')": hf.get("hidden_act", "silu") != "silu",
        "attn_output_gate=false": not hf.get("attn_output_gate", True),
        f"output_gate_type={hf.get('output_gate_type')!r}": hf.get("output_gate_type", "silu") not in ("silu", "swish"),
    }


QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    read=_read,
    write=_write,
    refuses=_refuses,
    defaults={
        "head_dim": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 32768,
    },
    modules={
        "delta_qkv": "linear_attn.in_proj_qkv",
        "delta_gate": "linear_attn.in_proj_z",
        "delta_beta": "linear_attn.in_proj_b",
        "delta_decay": "linear_attn.in_proj_a",
        "delta_conv": "linear_attn.conv1d",
        "delta_rate": "linear_attn.A_log",
        "delta_bias": "linear_attn.dt_bias",
        "delta_norm": "linear_attn.norm",
        "delta_out": "linear_attn.out_proj",
    },
    ignores=("mtp.",),
)
