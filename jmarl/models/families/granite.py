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
)
