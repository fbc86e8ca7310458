"""PPO on several devices, of one process or of several: they divide the rows of a batch, and with fsdp the weights and their
moments too.

On CPUs each core can be a device (JAX_NUM_CPU_DEVICES, which `experiments` sets); on GPUs the devices are there. It prints how
many bytes of the weights each device holds before and after training: with fsdp its share, with ddp all of them.
Command: python -m experiments.examples.train_distributed_ppo [--quick] [--strategy ddp]
Several processes: torchrun --nproc_per_node=2 experiments/examples/train_distributed_ppo.py --strategy fsdp
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # torchrun starts this file, not a module

import jax

import jmarl
from experiments.examples.start import config, policy, train_and_show
from jmarl.learning.choose import bytes_on_device
from jmarl.models.sharding import STRATEGIES
from jmarl.mrlm.algorithms.ppo import PPOTrainer
from jmarl.mrlm.config import PPOConfig
from jmarl.mrlm.environments.math import MathProblemGenerator, MathReasoningEnvironment


def show_bytes(when: str, params: Any) -> None:
    """Print the bytes of the weights, and how many of them one device holds."""
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    print(f"{when}: {whole:,} bytes of weights, {bytes_on_device(params):,} on each device", flush=True)


def main(quick: bool, strategy: str) -> None:
    env = MathReasoningEnvironment(MathProblemGenerator(difficulty_range=(1, 1)))
    count = 2 if quick and jax.process_count() == 1 else jax.device_count()
    if jax.device_count() < 2:
        raise SystemExit("this example needs 2 devices: on a CPU set JAX_NUM_CPU_DEVICES=2 before Python starts")
    mesh: dict[str, Any] = dict(mesh=f"data={count}", strategy=strategy)
    trainer = PPOTrainer(policy(quick, 96), env, config(quick, "ppo", PPOConfig(clip_range=0.2), 100, 8 * count, **mesh))
    print(f"{count} of {jax.device_count()} devices, strategy {strategy}")
    show_bytes("before training", trainer.params)
    train_and_show("math", trainer)
    show_bytes("after training", trainer.params)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny random model and two updates")
    parser.add_argument("--strategy", choices=STRATEGIES, default="fsdp", help="fsdp divides the weights, ddp replicates them")
    arguments = parser.parse_args()
    jmarl.join_processes()
    main(arguments.quick, arguments.strategy)
