"""Gemma 2, and what Gemma 3 has in common with it.

Weights of norms are stored less 1. Attention and feed-forward layer are normalized before and after. Some layers slide.
"""

from __future__ import annotations

import math
from typing import Any

from jmarl.models.config import ModelConfig
from jmarl.models.families.family import Family, Fields, read_sliding, write_sliding

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
LAYERS_27B = (46, 62)  # of Gemma 2 and 3


def read(hf: Fields) -> dict[str, Any]:
    return {
        "norms_after": True,
        "norm_adds_one": True,
        "embed_scale": math.sqrt(hf["hidden_size"]),
        "attention_scale": hf["query_pre_attn_scalar"] ** -0.5,
        "attention_cap": hf.get("attn_logit_softcapping"),
        "logit_cap": hf.get("final_logit_softcapping"),
    }


def write(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.attention_scale is not None
    scalar = round(cfg.attention_scale**-2, 6)
    return {
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": cfg.attention_cap,
        "final_logit_softcapping": cfg.logit_cap,
        **write_sliding(cfg),
    }


def refuses(hf: Fields) -> dict[str, Any]:
    return {"use_bidirectional_attention": hf.get("use_bidirectional_attention", False)}


def read_gguf(meta: Fields) -> dict[str, Any]:
    """Return what a GGUF file does not say of the scale of attention, as llama.cpp knows it: by the number of layers."""
    heads, hidden = meta["attention.head_count"], meta["embedding_length"]
    scalar = hidden // heads if meta["block_count"] in LAYERS_27B else meta["attention.key_length"]
    caps = {"attn_logit_softcapping", "final_logit_softcapping"} & {*meta}
    return {"query_pre_attn_scalar": scalar, **{cap: meta[cap] for cap in caps}}


GEMMA2 = Family(
    "Gemma2ForCausalLM",
    read=lambda hf: {**read(hf), **read_sliding(hf, lambda n: n % 2 == 0)},
    write=write,
    refuses=refuses,
    defaults={**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    modules=MODULES,
    gguf="gemma2",
    read_gguf=lambda meta: {"sliding_window": meta.get("attention.sliding_window", 4096), **read_gguf(meta)},
)
