"""Qwen3 with experts (Qwen3-30B-A3B): each token goes to some of them; layers may be dense."""

from __future__ import annotations

from typing import Any

from jmarl.models.config import ModelConfig
from jmarl.models.families.family import Family, Fields, read_qwen_sliding, write_qwen_sliding


def _read(hf: Fields) -> dict[str, Any]:
    experts, chosen = hf.get("num_experts", hf.get("num_local_experts", 128)), hf.get("num_experts_per_tok", 8)
    if experts and not 1 <= chosen <= experts:
        raise ValueError(f"num_experts_per_tok={chosen} is not allowed: the model has num_experts={experts}")
    step, listed = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers", ())
    dense = tuple(not experts or n in listed or (n + 1) % step > 0 for n in range(hf["num_hidden_layers"]))
    fields = {"qk_norm": True, **read_qwen_sliding(hf)}
    if all(dense):
        return fields
    return fields | {
        "num_experts": experts,
        "experts_per_token": chosen,
        "expert_size": hf.get("moe_intermediate_size", 768),
        "norm_top_probs": hf.get("norm_topk_prob", False),
        "dense_layers": dense if any(dense) else (),
    }


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return write_qwen_sliding(cfg) | {
        "num_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "moe_intermediate_size": cfg.expert_size,
        "norm_topk_prob": cfg.norm_top_probs,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n in range(cfg.num_layers) if cfg.is_dense(n)],
    }


QWEN3_MOE = Family("Qwen3MoeForCausalLM", read=_read, write=_write)
