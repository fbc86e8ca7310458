"""PPO on questions that need a calculator or a search, in several turns: call a tool, read its result, answer.

Command: python -m experiments.examples.train_tool_use_ppo [--quick]
"""

from __future__ import annotations

from experiments.examples.start import config, policy, quick_flag, train_and_show
from jmarl.mrlm.algorithms.ppo import PPOTrainer
from jmarl.mrlm.config import PPOConfig
from jmarl.mrlm.environments.tools import ToolUseEnvironment, create_default_tool_registry


def main(quick: bool) -> None:
    registry = create_default_tool_registry(["calculator", "web_search"])
    env = ToolUseEnvironment(registry, max_turns=2 if quick else 4)
    settings = config(quick, "ppo", PPOConfig(gamma=1.0, num_ppo_epochs=1), updates=100, batch_size=16)
    train_and_show("tools", PPOTrainer(policy(quick, 96), [env], settings))


if __name__ == "__main__":
    main(quick_flag(__doc__))
