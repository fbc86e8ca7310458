"""SFT: imitate the solver of the tool environment, and predict what the environment answers (a world model).

Half of the weight is on the solver's calls and answers, half on the results of the tools and the ends of episodes.
Command: python -m experiments.examples.train_sft_world_model [--quick]
"""

from __future__ import annotations

from experiments.examples.start import config, policy, quick_flag, train_and_show
from jmarl.mrlm.algorithms.sft import SFTTrainer
from jmarl.mrlm.config import SFTConfig
from jmarl.mrlm.environments.tools import ToolUseEnvironment, create_default_tool_registry


def main(quick: bool) -> None:
    env = ToolUseEnvironment(create_default_tool_registry(["calculator"]))
    sft = SFTConfig(
        mode="combined",
        bc_weight=0.5,
        world_model_weight=0.5,
        filter_low_reward=True,
        min_reward_threshold=1.0,
        max_trajectories=8 if quick else 256,
    )
    trainer = SFTTrainer(policy(quick, 96), [env], config(quick, "sft", sft, updates=64, batch_size=8))
    print(f"{len(trainer.data)} messages of the solver, such as {trainer.data[0].actions[0]!r:.90}")
    train_and_show("tools", trainer)


if __name__ == "__main__":
    main(quick_flag(__doc__))
