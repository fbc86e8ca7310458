"""Gemma 3: its text models, and the text part of the others.

Sliding layers have a rotary base of their own, and queries and keys are normalized.
"""

from __future__ import annotations

from typing import Any

from jmarl.models.families.family import Family, Fields, read_sliding
from jmarl.models.families.gemma import DEFAULTS, MODULES, read, read_gguf, refuses, write
from jmarl.models.families.rope import scaled_sliding, write_ropes_of_layers


def _read(hf: Fields) -> dict[str, Any]:
    pattern, ropes = hf.get("sliding_window_pattern", 6), hf.get("rope_parameters", {})
    local = ropes.get("sliding_attention", {}).get("rope_theta") or hf.get("rope_local_base_freq", 10_000.0)
    return {**read(hf), "qk_norm": True, "sliding_rope_theta": local} | read_sliding(hf, lambda n: (n + 1) % pattern > 0)


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    read=_read,
    write=lambda cfg: {**write(cfg), "rope_local_base_freq": cfg.sliding_rope_theta, **write_ropes_of_layers(cfg)},
    refuses=lambda hf: refuses(hf) | scaled_sliding(hf),
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
    gguf="gemma3",
    read_gguf=read_gguf,
)
