"""The smallest example: PPO on math problems.

Command: python -m experiments.examples.simple_ppo [--quick]
"""

from __future__ import annotations

from experiments.examples.start import policy, quick_flag, train_and_show
from jmarl.mrlm.algorithms.ppo import PPOTrainer
from jmarl.mrlm.config import ExperimentConfig, TrainingConfig
from jmarl.mrlm.environments.math import MathProblemGenerator, MathReasoningEnvironment


def main(quick: bool) -> None:
    eval_envs = [MathReasoningEnvironment(MathProblemGenerator()) for _ in range(4)]
    training = TrainingConfig(algorithm="ppo", num_epochs=2 if quick else 50, batch_size=2 if quick else 16, eval_episodes=4)
    trainer = PPOTrainer(policy(quick), eval_envs, ExperimentConfig(training, progress=not quick))
    train_and_show("math", trainer)


if __name__ == "__main__":
    main(quick_flag(__doc__))
