"""What a model of each family needs on an H100: a published size, two agents with LoRA, compiled and not timed.

Sizes are the defaults of the family's class in transformers, changed by `PUBLISHED` where these are no published model's. For
each, the settings with which a step fits (as `jmarl plan --fit` finds them), the peak memory of a device, and the best times of
its sampling and its update by the GPU's peak rates: 4 prompts x 8 completions x 256 tokens, prompts of 256 tokens, bfloat16,
adapters of rank 16, on one H100 or on the two of `MESHES`.
Command: python -m experiments.bench.families [--families phi3]. Needs the wheels of jax[cuda12], no GPU; about 40 minutes on 2
cores. Expected: the table of experiments/README.md.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jmarl.config import TrainConfig
from jmarl.models.config import ModelConfig
from jmarl.models.families import FAMILIES
from jmarl.models.hub.config_json import config_from_hf
from jmarl.models.weights import num_params
from jmarl.plan.devices import GIB, GPUS
from jmarl.plan.fit import prove
from jmarl.plan.plan import describe_team

STEP = dict(num_prompts=4, num_generations=8, max_new_tokens=256, compute_dtype="bfloat16", lora_rank=16)
MESHES = {"qwen3_moe": "model=2"}  # its weights take 57 GiB
OLMO = {"vocab_size": 100352}
PUBLISHED = {  # sizes whose numbers of parameters are the published ones; no config.json was at hand
    "llama": dict(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8),  # Llama 3.1 8B
    "qwen2": dict(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4,
    ),  # Qwen2.5 7B
    "qwen3": dict(intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8),  # Qwen3 8B
    "qwen3_moe": dict(num_hidden_layers=48, head_dim=128, norm_topk_prob=True),  # Qwen3 30B A3B
    "gemma3_text": dict(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, layer_types=None, sliding_window=1024
    ),  # Gemma 3 4B
    "olmo2": OLMO,  # OLMo 2 7B
    "olmo3": OLMO,  # OLMo 3 7B
    "granite": dict(vocab_size=49155, intermediate_size=12800, num_hidden_layers=40, num_key_value_heads=8,
        tie_word_embeddings=True),  # Granite 3.1 8B
}  # fmt: skip


def model_of(family: str) -> ModelConfig:
    """Return the architecture of a family's model."""
    from transformers import AutoConfig

    return config_from_hf(AutoConfig.for_model(family, **PUBLISHED.get(family, {})).to_dict())


def row(family: str) -> str:
    """Return a line of the table."""
    model = model_of(family)
    size = f"{num_params(model) / 1e9:.2f}B, {model.num_layers} layers of {model.hidden_size}"
    team, mesh = describe_team([(family, model, None)] * 2, shared_weights=False), MESHES.get(family, "auto")
    cfg, devices = TrainConfig.of(**STEP, mesh=mesh), 2 if family in MESHES else 1
    *_, (settings, plan, fits) = prove(team, cfg, GPUS["h100"], 256, 0, devices)
    assert fits, f"{family}: {settings} needs {plan.peak.peak / GIB:.1f} GiB"
    names = " ".join(f"{name}={x}" for name, x in settings.items() if name != "compute_dtype")
    sampling, update = (sum(x.time for x in plan.programs if kind in x.name) for kind in ("sampling", "update"))
    where = f"{mesh}: {names}" if family in MESHES else names
    return f"| {family} | {size} | {where} | {plan.peak.peak / GIB:.1f} GiB | {sampling:.2f} s | {update:.2f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="of " + ", ".join(FAMILIES))
    options = parser.parse_args()
    print(
        "| family | size | fits with | peak a device | sampling at best | update at best |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for family in options.families.split(","):
        print(row(family), flush=True)


if __name__ == "__main__":
    main()
