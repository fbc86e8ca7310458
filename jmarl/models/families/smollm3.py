"""SmolLM3: every fourth layer does not rotate."""

from __future__ import annotations

from typing import Any

from jmarl.models.config import ModelConfig
from jmarl.models.families.family import Family, Fields, read_sliding, write_sliding


def _read(hf: Fields) -> dict[str, Any]:
    interval = hf.get("no_rope_layer_interval", 4)
    rotates = hf.get("no_rope_layers") or [(n + 1) % interval > 0 for n in range(hf["num_hidden_layers"])]
    if not hf.get("use_sliding_window"):
        hf = {**hf, "sliding_window": None}
    plain = tuple(not x for x in rotates)
    biases = {"mlp_bias": hf.get("mlp_bias", False)}
    return biases | {"plain_layers": plain if any(plain) else ()} | read_sliding(hf, lambda n: plain[n])


def _write(cfg: ModelConfig) -> dict[str, Any]:
    plain = cfg.plain_layers or (False,) * cfg.num_layers
    sliding = {"use_sliding_window": any(cfg.sliding_layers), **write_sliding(cfg)}
    return {"mlp_bias": cfg.mlp_bias, "no_rope_layers": [int(not x) for x in plain], **sliding}


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    read=_read,
    write=_write,
    defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0, "num_key_value_heads": 4},
    gguf="smollm3",
    neighbors_in_gguf=True,
)
