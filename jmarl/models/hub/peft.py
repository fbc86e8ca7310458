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

from jmarl.config.paths import expand_home
from jmarl.models.config import ModelConfig
from jmarl.models.families import FAMILIES
from jmarl.models.weights import ADAPTERS, LAYERS, PARTS, WEIGHTS, layers_with, shape_of, sizes_of


def adapters(params: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield target, a [L, D, rank] and b [L, rank, F] of each adapter."""
    for name in ADAPTERS:
        if name in params["layers"]:
            pair = params["layers"][name]
            yield name, np.asarray(pair["a"], np.float32), np.asarray(pair["b"], np.float32)


def merge(cfg: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's parameters W + alpha / rank * a b of one agent, all layers in stacks; without adapters W."""
    changed = {ADAPTERS[name].leaf for name, *_ in adapters(params)}
    own = {name: leaf for name, leaf in params["layers"].items() if name not in ADAPTERS}
    layers = {name: np.stack(leaf) if isinstance(leaf, tuple) else leaf for name, leaf in own.items()}
    if not changed:
        return {**params, "layers": layers}
    alpha, sizes = layers.pop("lora_alpha")[0], sizes_of(cfg)
    layers |= {leaf: layers[leaf].astype(np.float32, copy=layers[leaf] is own[leaf]) for leaf in changed}
    for name, a, b in adapters(params):
        leaf, module, *_ = ADAPTERS[name]
        letters = WEIGHTS[LAYERS + leaf].axes.replace(" ", "")
        view = layers[leaf].reshape(-1, *(sizes[letter] for letter in letters))
        part = tuple(PARTS[module] if letter == "P" else slice(None) for letter in letters)
        view[(slice(None), *part)] += ((alpha / a.shape[-1]) * (a @ b)).reshape(view[(slice(None), *part)].shape)
    return {**params, "layers": layers}


def fused_adapters(cfg: ModelConfig, params: Mapping[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray, int]]:
    """Return a [L, D, ranks], b [L, ranks, F] and the number of adapters of each module of Hugging Face's files.

    L: the layers that have it.

    Adapters of weights that are one tensor there become one, which computes the same: its a has the columns of theirs, its b
    their rows in blocks.
    """
    pairs = {name: (a, b) for name, a, b in adapters(params)}
    fused = {}
    modules = {name: FAMILIES[cfg.family].module(adapter.module) for name, adapter in ADAPTERS.items()}
    for module in dict.fromkeys(modules.values()):
        names = [name for name in ADAPTERS if modules[name] == module]
        own = [name for name in names if name in pairs]
        if not own:
            continue
        rows = []
        for name in own:
            a, b = pairs[name]
            blocks = [b if x == name else np.zeros((*b.shape[:2], *shape_of(cfg, ADAPTERS[x].outputs)), b.dtype) for x in names]
            rows.append(np.concatenate(blocks, -1))
        fused[module] = np.concatenate([pairs[name][0] for name in own], -1), np.concatenate(rows, 1), len(own)
    return fused


def save_adapter(directory: str | os.PathLike, cfg: ModelConfig, params: Mapping[str, Any], alpha: float) -> None:
    """Write the adapters of one agent as ``adapter_config.json`` and ``adapter_model.safetensors``."""
    from safetensors.numpy import save_file

    rank = next(a.shape[-1] for _, a, _ in adapters(params))
    fused, tensors, several = fused_adapters(cfg, params), {}, {}
    leaves = {FAMILIES[cfg.family].module(x.module): LAYERS + x.leaf for x in ADAPTERS.values()}
    for module, (a, b, count) in fused.items():
        if count > 1:
            several[module.rpartition(".")[2]] = count
        for place, layer in enumerate(layers_with(cfg, leaves[module])):
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(a[place].T)
            tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(b[place].T)
    alpha = int(alpha) if alpha == int(alpha) else alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: count * rank for name, count in several.items()},
        "alpha_pattern": {name: count * alpha for name, count in several.items()},
        "lora_dropout": 0.0,  # used in training only
        "target_modules": [module.rpartition(".")[2] for module in fused],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    directory = Path(expand_home(directory))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    # safetensors creates files that only their owner can read
    shutil.copymode(directory / "adapter_config.json", directory / "adapter_model.safetensors")
