"""GRPO on math problems: the baseline of an answer is the mean over a group of answers to its question, so there is no critic.

Command: python -m experiments.examples.train_grpo_math [--quick]
"""

from __future__ import annotations

from experiments.examples.start import config, policy, quick_flag, train_and_show
from jmarl.mrlm.algorithms.grpo import GRPOTrainer
from jmarl.mrlm.config import GRPOConfig
from jmarl.mrlm.environments.math import MathProblemGenerator, MathReasoningEnvironment


def main(quick: bool) -> None:
    env = MathReasoningEnvironment(MathProblemGenerator(difficulty_range=(1, 2), topics=["arithmetic", "algebra"]))
    grpo = GRPOConfig(group_size=4 if quick else 8, normalize_rewards=True, temperature=1.0)
    train_and_show("math", GRPOTrainer(policy(quick, 96), [env], config(quick, "grpo", grpo, updates=100, batch_size=8)))


if __name__ == "__main__":
    main(quick_flag(__doc__))
