"""PPO on several devices of one process: they divide the rows of a batch, and with fsdp the weights and moments too.

On CPUs each core can be a device (JAX_NUM_CPU_DEVICES, which `experiments` sets); on GPUs the devices are there. Several
processes or nodes are not in this version. Prints the bytes of the weights on each device before, and of all that the run
keeps there after it: with fsdp on 2 devices about half of what one would have.
Command: python -m experiments.examples.train_distributed_ppo [--quick]
"""

from __future__ import annotations

import jax

from experiments.examples.start import config, policy, quick_flag, train_and_show
from jmarl.mrlm.algorithms.ppo import PPOTrainer
from jmarl.mrlm.config import PPOConfig
from jmarl.mrlm.environments.math import MathProblemGenerator, MathReasoningEnvironment


def main(quick: bool) -> None:
    env = MathReasoningEnvironment(MathProblemGenerator(difficulty_range=(1, 1)))
    count = 2 if quick else jax.device_count()
    if jax.device_count() < 2:
        raise SystemExit("this example needs 2 devices: on a CPU set JAX_NUM_CPU_DEVICES=2 before Python starts")
    settings = config(quick, "ppo", PPOConfig(clip_range=0.2), updates=100, batch_size=8 * count, mesh=f"data={count}")
    trainer = PPOTrainer(policy(quick, 96), env, settings)
    devices = {device for x in jax.tree.leaves(trainer.params) for device in x.devices()}
    print(f"{count} of {jax.device_count()} devices: weights on {len(devices)}")
    train_and_show("math", trainer)


if __name__ == "__main__":
    main(quick_flag(__doc__))
