"""PPO on programming problems: an answer is run against hidden tests in the sandbox.

The reward is the share of tests passed, 1 more if all pass, and 0.5 less for an answer that is no Python or raises; syntax and
functionality are parts of their own.
Command: python -m experiments.examples.train_code_ppo [--quick]
"""

from __future__ import annotations

from experiments.examples.start import config, policy, quick_flag, train_and_show
from jmarl.mrlm.algorithms.ppo import PPOTrainer
from jmarl.mrlm.config import PPOConfig
from jmarl.mrlm.environments.code import CodeExecutionEnvironment, CodeProblemGenerator


def main(quick: bool) -> None:
    env = CodeExecutionEnvironment(CodeProblemGenerator(difficulty_range=(1, 1)))
    settings = config(quick, "ppo", PPOConfig(clip_range=0.2, num_ppo_epochs=2), updates=100, batch_size=16)
    train_and_show("code", PPOTrainer(policy(quick, 192, system_prompt="Answer with Python code."), env, settings))


if __name__ == "__main__":
    main(quick_flag(__doc__))
