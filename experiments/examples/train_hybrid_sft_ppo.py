"""Two stages: imitate the environment's solver (SFT), then improve by PPO from there.

A small model hardly ever writes an answer in the form that is asked for, so PPO alone has no signal at first. Both trainers
share the policy, which has the trained weights after each stage.
Command: python -m experiments.examples.train_hybrid_sft_ppo [--quick]
"""

from __future__ import annotations

from experiments.examples.start import config, policy, quick_flag, train_and_show
from jmarl.mrlm.algorithms.ppo import PPOTrainer
from jmarl.mrlm.algorithms.sft import SFTTrainer
from jmarl.mrlm.config import PPOConfig, SFTConfig
from jmarl.mrlm.environments.math import MathProblemGenerator, MathReasoningEnvironment


def main(quick: bool) -> None:
    env = MathReasoningEnvironment(MathProblemGenerator(difficulty_range=(1, 1), topics=["arithmetic"]))
    policy_env = policy(quick, 48)
    imitation = SFTConfig(mode="behavioral_cloning", max_trajectories=16 if quick else 256)
    train_and_show("stage 1, SFT", SFTTrainer(policy_env, [env], config(quick, "sft", imitation, updates=64, batch_size=8)))
    train_and_show("stage 2, PPO", PPOTrainer(policy_env, [env], config(quick, "ppo", PPOConfig(), updates=50, batch_size=16)))


if __name__ == "__main__":
    main(quick_flag(__doc__))
