"""Granite 3 (dense): multipliers of embedding, residuals, attention and logits."""

from __future__ import annotations

from jmarl.models.families.family import Family

GRANITE = Family(
    "GraniteForCausalLM",
    read=lambda hf: {
        "mlp_bias": hf.get("mlp_bias", False),
        "embed_scale": hf.get("embedding_multiplier", 1.0),
        "residual_scale": hf.get("residual_multiplier", 1.0),
        "attention_scale": hf.get("attention_multiplier", 1.0),
        "logit_divisor": hf.get("logits_scaling", 1.0),
    },
    write=lambda cfg: {
        "mlp_bias": cfg.mlp_bias,
        "embedding_multiplier": cfg.embed_scale,
        "residual_multiplier": cfg.residual_scale,
        "attention_multiplier": cfg.attention_scale,
        "logits_scaling": cfg.logit_divisor,
    },
    refuses=lambda hf: {"position_embedding_type='nope'": hf.get("position_embedding_type") == "nope"},
    gguf="granite",
    neighbors_in_gguf=True,
    read_gguf=lambda meta: {
        "embedding_multiplier": meta["embedding_scale"],
        "residual_multiplier": meta["residual_scale"],
        "attention_multiplier": meta["attention.scale"],
        "logits_scaling": meta["logit_scale"],
        "position_embedding_type": "rope" if meta.get("rope.scaling.finetuned", True) else "nope",  # its switch of llama.cpp
    },
)
