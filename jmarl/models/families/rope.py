"""Read and write the rotary embedding of a ``config.json``, in transformers' old and new spelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jmarl.models.config import ModelConfig, RopeScaling

ROPE_FIELDS = {  # kind of `RopeScaling` -> its fields, and their keys
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_positions": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "original_max_positions": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "amplitude": "attention_factor",
        "query_beta": "llama_4_scaling_beta",
    },
    "longrope": {
        "short_factors": "short_factor",
        "long_factors": "long_factor",
        "original_max_positions": "original_max_position_embeddings",
        "amplitude": "attention_factor",
    },
}
OPTIONAL = {"beta_fast", "beta_slow", "truncate", "amplitude", "query_beta"}  # fields of `RopeScaling`


def need(hf: Mapping[str, Any], key: str) -> Any:
    """Return a field of a config.json. Raises ValueError if it has none."""
    if hf.get(key) is None:
        raise ValueError(f"config.json has no {key!r}")
    return hf[key]


def partial_rotary(hf: Mapping[str, Any]) -> float:
    """Return the share of a head that is rotated."""
    return {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}.get(
        "partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)
    )


def read_rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return theta and the scaling, of layers that do not slide."""
    rope = dict(hf.get("rope_parameters") or {})
    rope = {**(hf.get("rope_scaling") or {}), **rope.get("full_attention", rope)}
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if hf["model_type"] == "phi3" and kind in ("su", "yarn"):  # older names of it
        kind = "longrope"
    if kind not in ROPE_FIELDS:
        known = ", ".join(map(repr, ("default", *ROPE_FIELDS)))
        raise ValueError(f"rope type {kind!r} is not supported: jmarl knows {known}")
    rope = {"original_max_position_embeddings": hf.get("original_max_position_embeddings"), **rope}
    if rope.get("factor") is None and rope["original_max_position_embeddings"]:
        rope["factor"] = need(hf, "max_position_embeddings") / rope["original_max_position_embeddings"]
    fields = {}
    for ours, theirs in ROPE_FIELDS[kind].items():
        if ours not in OPTIONAL or rope.get(theirs) is not None:
            value = need(rope, theirs)
            fields[ours] = tuple(value) if isinstance(value, list) else value
    if "amplitude" not in fields and kind in ("yarn", "longrope"):
        fields["amplitude"] = _amplitude(kind, rope)
    return theta, RopeScaling(kind, **fields)


def _amplitude(kind: str, rope: Mapping[str, Any]) -> float:
    """Return what cosines and sines are multiplied by, where a config.json does not say it."""
    factor = rope["factor"]
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(rope["original_max_position_embeddings"]))

    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return of(rope["mscale"]) / of(rope["mscale_all_dim"])
    return of(1.0)


def scaled_sliding(hf: Mapping[str, Any]) -> dict[str, bool]:
    """Return, for `Family.refuses`, whether the rotary embedding of sliding layers is scaled."""
    sliding = (hf.get("rope_parameters") or {}).get("sliding_attention") or {}
    return {"a scaled rotary embedding in sliding layers": sliding.get("rope_type", "default") != "default"}


def write_rope(cfg: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config.json that `read_rope` reads, in the old spelling."""
    fields: dict[str, Any] = {"rope_theta": cfg.rope_theta, "rope_scaling": write_scaling(cfg)}
    return fields if cfg.rotary_dim is None else fields | {"partial_rotary_factor": cfg.rotary_dim / cfg.head_dim}


def write_scaling(cfg: ModelConfig) -> dict[str, Any] | None:
    """Return the field `rope_scaling` of a config.json."""
    if (scaling := cfg.rope_scaling) is None:
        return None
    values = {theirs: getattr(scaling, ours) for ours, theirs in ROPE_FIELDS[scaling.kind].items()}
    values = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
        if value is False or value != 0.0
    }
    return {"rope_type": scaling.kind} | values


def write_rope_parameters(cfg: ModelConfig) -> dict[str, Any]:
    """Return `rope_parameters` of full layers, as transformers 5 writes it."""
    return {"rope_type": "default", "rope_theta": cfg.rope_theta} | (write_scaling(cfg) or {})


def write_ropes_of_layers(cfg: ModelConfig) -> dict[str, Any]:
    """Return `rope_parameters` for full and sliding layers, as transformers 5 writes it."""
    full = write_rope_parameters(cfg)
    sliding = {"rope_type": "default", "rope_theta": cfg.sliding_rope_theta}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
