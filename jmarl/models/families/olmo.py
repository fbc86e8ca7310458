"""OLMo 2 and 3: norms after attention and feed-forward layer only, and of all queries and all keys. In OLMo 3 three layers of
four slide, without the scaling of the others' rotary embedding."""

from __future__ import annotations

from typing import Any

from jmarl.models.families.family import Family, Fields, read_sliding, write_sliding
from jmarl.models.families.rope import scaled_sliding, write_ropes_of_layers

NORMS = {"norms_before": False, "norms_after": True, "qk_norm_of_all": True}
MODULES = {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}


def _read3(hf: Fields) -> dict[str, Any]:
    sliding = read_sliding(hf, lambda n: (n + 1) % 4 > 0)
    ropes = hf.get("rope_parameters", {})
    theta = ropes.get("sliding_attention", ropes).get("rope_theta") or hf["rope_theta"]
    return NORMS | sliding | ({"sliding_rope_theta": theta} if sliding else {})


OLMO2 = Family(
    "Olmo2ForCausalLM",
    read=lambda hf: NORMS,
    defaults={"rms_norm_eps": 1e-5},
    modules=MODULES,
    gguf="olmo2",
    read_gguf=lambda meta: {"model_type": "olmo3" if meta.get("attention.sliding_window") else "olmo2"},
)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    read=_read3,
    refuses=scaled_sliding,
    write=lambda cfg: {**write_sliding(cfg), **(write_ropes_of_layers(cfg) if cfg.sliding_layers else {})},
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
    modules=MODULES,
)
