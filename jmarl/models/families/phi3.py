"""Phi-3, Phi-3.5 and Phi-4-mini: one tensor for query, key and value, one for gate and up; longrope; partly rotated heads."""

from __future__ import annotations

from typing import Any

from jmarl.models.config import ModelConfig
from jmarl.models.families.family import Family, Fields, read_sliding
from jmarl.models.families.rope import partial_rotary


def _read(hf: Fields) -> dict[str, Any]:
    head_dim, share = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"], partial_rotary(hf)
    rotary = {} if share == 1.0 else {"rotary_dim": int(head_dim * share)}
    return rotary | read_sliding({**hf, "layer_types": None}, lambda n: True)


def _write(cfg: ModelConfig) -> dict[str, Any]:
    # transformers 4 and vLLM read it from here
    scaling = {"original_max_position_embeddings": cfg.rope_scaling.original_max_positions} if cfg.rope_scaling else {}
    return scaling | {"sliding_window": cfg.sliding_window}


PHI3 = Family(
    "Phi3ForCausalLM",
    read=_read,
    write=_write,
    defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    modules={
        **dict.fromkeys(("q", "k", "v"), "self_attn.qkv_proj"),
        **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
    },
    gguf="phi3",
)
