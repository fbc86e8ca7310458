"""Which models fit on 1, 2 and 8 H100 of one host: two agents, full weights and LoRA, compiled and not timed.

For each case `jmarl plan --fit`'s search finds mesh, strategy, remat and micro-batches; the table has the peak memory of a
device, the best step time by the GPU's peak rates, and the bytes that a device receives from others in a step. 8 prompts x 8
completions x 512 tokens, prompts of 256 tokens, bfloat16 with float32 master weights, LoRA of rank 16.
Command: python -m experiments.bench.sizes [--models 0.5B,7B] [--devices 1,8]. Needs the wheels of jax[cuda12], no GPU; about
10 minutes on 2 cores. Expected: the table of notebooks/08.
"""

from __future__ import annotations

import argparse
import functools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jmarl.config import TrainConfig
from jmarl.models.config import ModelConfig
from jmarl.plan.devices import GIB, GPUS
from jmarl.plan.fit import prove
from jmarl.plan.plan import Plan, describe_team

QWEN = functools.partial(
    ModelConfig, family="qwen2", vocab_size=151936, max_positions=32768, rope_theta=1e6, qkv_bias=True, num_kv_heads=2
)
MODELS = {
    "0.5B": QWEN(hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, head_dim=64),
    "1.5B": QWEN(hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12, head_dim=128),
    "7B": QWEN(
        hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4, head_dim=128,
        tie_embeddings=False,
    ),
}  # fmt: skip
STEP = dict(num_prompts=8, num_generations=8, max_new_tokens=512, compute_dtype="bfloat16")


def row(model: str, lora_rank: int, devices: int) -> str:
    """Return a line of the table."""
    team = describe_team([(model, MODELS[model], None)] * 2, shared_weights=False)
    cfg, weights = TrainConfig.of(**STEP, lora_rank=lora_rank), "LoRA" if lora_rank else "full"
    tried = list(prove(team, cfg, GPUS["h100"], 256, 0, devices))
    if not tried or not tried[-1][2]:
        least = min((plan.peak.peak for _, plan, _ in tried), default=None)
        need = "the state alone is larger" if least is None else f"{least / GIB:.1f} GiB at least"
        return f"| {model}, {weights} | {devices} | no | {need} | | |"
    settings, plan, _ = tried[-1]
    names = " ".join(f"{name}={x}" for name, x in settings.items() if name != "compute_dtype")
    figures = f"{plan.peak.peak / GIB:.1f} GiB | {step_time(plan):.1f} s | {sent(plan)}"
    return f"| {model}, {weights} | {devices} | {names} | {figures} |"


def step_time(plan: Plan) -> float:
    """Return the best time of a step in seconds."""
    return sum(program.time for program in plan.programs)


def sent(plan: Plan) -> str:
    """Return the bytes that a device receives in a step."""
    total = sum(program.cost.exchanged for program in plan.programs if program.cost)
    return f"{total / 1e9:.1f} GB" if total else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--devices", default="1,2,8", help="numbers of H100")
    options = parser.parse_args()
    print("| model, trained | H100 | fits with | peak a device | step at best | received a step |\n|---|---|---|---|---|---|")
    for model in options.models.split(","):
        for lora_rank in (0, 16):
            for devices in map(int, options.devices.split(",")):
                print(row(model, lora_rank, devices), flush=True)


if __name__ == "__main__":
    main()
