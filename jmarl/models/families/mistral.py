"""Mistral 7B and its relatives, whose layers all slide or none; Ministral 8B, some of whose layers slide; Ministral 3.

In GGUF the first two are Llama."""

from __future__ import annotations

from jmarl.models.families.family import Family, read_sliding, write_sliding
from jmarl.models.families.rope import write_rope_parameters

ROPE = {  # of Ministral 3
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MISTRAL = Family(
    "MistralForCausalLM",
    read=lambda hf: read_sliding({**hf, "layer_types": None}, lambda n: True),
    write=lambda cfg: {"sliding_window": cfg.sliding_window},
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
MINISTRAL = Family(
    "MinistralForCausalLM",
    read=lambda hf: read_sliding(hf, lambda n: True),
    write=write_sliding,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
MINISTRAL3 = Family(
    "Ministral3ForCausalLM",
    read=lambda hf: read_sliding({**hf, "layer_types": None}, lambda n: True),
    write=lambda cfg: {"sliding_window": cfg.sliding_window, "rope_parameters": write_rope_parameters(cfg)},
    defaults={"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_parameters": ROPE},
    gguf="mistral3",
    neighbors_in_gguf=True,
    # of Mistral Small 3, too
    read_gguf=lambda meta: {"model_type": "ministral3" if meta.get("rope.scaling.type") == "yarn" else "mistral"},
)
