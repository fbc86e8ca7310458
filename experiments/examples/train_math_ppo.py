"""PPO on math problems of the easiest kind, with a value head on the policy and several passes over each batch.

Command: python -m experiments.examples.train_math_ppo [--quick]
"""

from __future__ import annotations

from experiments.examples.start import config, policy, quick_flag, train_and_show
from jmarl.mrlm.algorithms.ppo import PPOTrainer
from jmarl.mrlm.config import PPOConfig
from jmarl.mrlm.environments.math import MathProblemGenerator, MathReasoningEnvironment


def main(quick: bool) -> None:
    env = MathReasoningEnvironment(MathProblemGenerator(difficulty_range=(1, 1)))
    ppo = PPOConfig(clip_range=0.2, gamma=0.99, gae_lambda=0.95, num_ppo_epochs=2, value_loss_coef=0.5, entropy_coef=0.01)
    settings = config(quick, "ppo", ppo, updates=100, batch_size=16)
    train_and_show("math", PPOTrainer(policy(quick, 96), [env], settings))


if __name__ == "__main__":
    main(quick_flag(__doc__))
