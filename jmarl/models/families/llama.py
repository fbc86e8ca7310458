"""Llama 2 and 3, SmolLM2, and the many models of this architecture."""

from __future__ import annotations

from jmarl.models.families.family import Family

LLAMA = Family(
    "LlamaForCausalLM",
    read=lambda hf: {"mlp_bias": hf.get("mlp_bias", False)},
    write=lambda cfg: {"mlp_bias": cfg.mlp_bias},
    gguf="llama",
    neighbors_in_gguf=True,
)
