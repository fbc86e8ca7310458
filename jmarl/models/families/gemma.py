"""Gemma 2, and Gemma 3 (its text models, and the text part of the others).

Weights of norms are stored less 1. Attention and feed-forward layer are normalized before and after. Some layers slide; in
Gemma 3 these have a rotary base of their own, and queries and keys are normalized.
"""

from __future__ import annotations

import math
from typing import Any

from jmarl.models.config import ModelConfig
from jmarl.models.families.family import Family, Fields, read_sliding, write_sliding
from jmarl.models.families.rope import scaled_sliding, write_ropes_of_layers

MODULES = {
    "mlp_norm": "pre_feedforward_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
DEFAULTS = {  # of transformers' classes, which published files leave out
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}


def _read(hf: Fields) -> dict[str, Any]:
    return {
        "norms_after": True,
        "norm_adds_one": True,
        "embed_scale": math.sqrt(hf["hidden_size"]),
        "attention_scale": hf["query_pre_attn_scalar"] ** -0.5,
        "attention_cap": hf.get("attn_logit_softcapping"),
        "logit_cap": hf.get("final_logit_softcapping"),
    }


def _write(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.attention_scale is not None
    scalar = round(cfg.attention_scale**-2, 6)
    return {
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": cfg.attention_cap,
        "final_logit_softcapping": cfg.logit_cap,
        **write_sliding(cfg),
    }


def _refuses(hf: Fields) -> dict[str, Any]:
    return {"use_bidirectional_attention": hf.get("use_bidirectional_attention", False)}


def _read3(hf: Fields) -> dict[str, Any]:
    pattern, ropes = hf.get("sliding_window_pattern", 6), hf.get("rope_parameters", {})
    local = ropes.get("sliding_attention", {}).get("rope_theta") or hf.get("rope_local_base_freq", 10_000.0)
    return {**_read(hf), "qk_norm": True, "sliding_rope_theta": local} | read_sliding(hf, lambda n: (n + 1) % pattern > 0)


GEMMA2 = Family(
    "Gemma2ForCausalLM",
    read=lambda hf: {**_read(hf), **read_sliding(hf, lambda n: n % 2 == 0)},
    write=_write,
    refuses=_refuses,
    defaults={**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    modules=MODULES,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    read=_read3,
    write=lambda cfg: {**_write(cfg), "rope_local_base_freq": cfg.sliding_rope_theta, **write_ropes_of_layers(cfg)},
    refuses=lambda hf: _refuses(hf) | scaled_sliding(hf),
    defaults={
        **DEFAULTS,
        "rope_theta": 1_000_000.0,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "max_position_embeddings": 131_072,
    },
    modules=MODULES,
)
