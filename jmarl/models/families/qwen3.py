"""Qwen3 (dense): norms of queries and keys."""

from __future__ import annotations

from jmarl.models.families.family import Family, read_qwen_sliding, write_qwen_sliding

QWEN3 = Family(
    "Qwen3ForCausalLM",
    read=lambda hf: {"qk_norm": True, **read_qwen_sliding(hf)},
    write=write_qwen_sliding,
    defaults={"head_dim": 128},
    gguf="qwen3",
)
