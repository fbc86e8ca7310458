"""Mistral 7B and its relatives, whose layers may all slide, and Ministral 3 (also the text part of Mistral 3)."""

from __future__ import annotations

from jmarl.models.families.family import Family, read_sliding

MISTRAL = Family(
    "MistralForCausalLM",
    read=lambda hf: read_sliding(hf, lambda n: True),
    write=lambda cfg: {"sliding_window": cfg.sliding_window},
)
MINISTRAL3 = Family(
    "Ministral3ForCausalLM",
    read=lambda hf: read_sliding(hf, lambda n: True),
    write=lambda cfg: {"sliding_window": cfg.sliding_window},
    defaults={"head_dim": 128},
)
