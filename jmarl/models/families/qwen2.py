"""Qwen2 and Qwen2.5: biases of queries, keys and values only; the last layers may slide."""

from __future__ import annotations

from jmarl.models.families.family import Family, read_qwen_sliding, write_qwen_sliding

QWEN2 = Family(
    "Qwen2ForCausalLM",
    read=lambda hf: {"qkv_bias": True, "out_bias": False, **read_qwen_sliding(hf)},
    write=write_qwen_sliding,
    gguf="qwen2",
)
