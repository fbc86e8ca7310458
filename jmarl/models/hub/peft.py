"""Export the adapters of one agent (`jmarl.models.lora`): merged into its weights, or as files that `peft` loads onto the base.

Host world: numpy and files. PEFT stores transposes: its lora_A [rank, D] is our a, its lora_B [F, rank] our b.
Left out: reading PEFT directories.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jmarl.config import LORA_TARGETS
from jmarl.models.config import ModelConfig

# Target -> the decoder's weight; the other targets are parts of qkv.
LEAVES = {"o_proj": "out", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def adapters(params: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield target, a [L, D, rank] and b [L, rank, F] of each adapter."""
    for name in LORA_TARGETS:
        if name in params["layers"]:
            pair = params["layers"][name]
            yield name, np.asarray(pair["a"], np.float32), np.asarray(pair["b"], np.float32)


def merge(cfg: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's parameters W + alpha / rank * a b of one agent; parameters without adapters unchanged."""
    if not any(adapters(params)):
        return params
    layers = {name: leaf for name, leaf in params["layers"].items() if name not in LORA_TARGETS}
    alpha = layers.pop("lora_alpha")[0]
    k, q, h = cfg.num_kv_heads, cfg.queries_per_kv, cfg.head_dim
    qkv = np.array(layers["qkv"], np.float32).reshape(*layers["qkv"].shape[:-1], k, q + 2, h)
    part = {"q_proj": slice(0, q), "k_proj": slice(q, q + 1), "v_proj": slice(q + 1, q + 2)}
    for name, a, b in adapters(params):
        change = (alpha / a.shape[-1]) * (a @ b)
        if name in part:
            qkv[..., part[name], :] += change.reshape(*change.shape[:-1], k, -1, h)
        else:
            layers[LEAVES[name]] = layers[LEAVES[name]] + change
    return {**params, "layers": {**layers, "qkv": qkv.reshape(layers["qkv"].shape)}}


def save_adapter(directory: str | os.PathLike, params: Mapping[str, Any], alpha: float) -> None:
    """Write the adapters of one agent as ``adapter_config.json`` and ``adapter_model.safetensors``."""
    from safetensors.numpy import save_file

    tensors, ranks, targets = {}, set(), []
    for name, a, b in adapters(params):
        ranks.add(a.shape[-1])
        targets.append(name)
        block = "self_attn" if name in LORA_TARGETS[:4] else "mlp"
        for layer in range(len(a)):
            prefix = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(a[layer].T)
            tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(b[layer].T)
    (rank,) = ranks
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,  # used in training only
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    # safetensors creates files that only their owner can read
    shutil.copymode(directory / "adapter_config.json", directory / "adapter_model.safetensors")
