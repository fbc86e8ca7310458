"""One policy learns code, math and tools at the same time: a mixture with equal weights and results for each.

Command: python -m experiments.examples.train_multi_environment [--quick]
"""

from __future__ import annotations

from experiments.examples.start import config, policy, quick_flag
from jmarl.mrlm.algorithms.grpo import GRPOTrainer
from jmarl.mrlm.config import GRPOConfig
from jmarl.mrlm.environments.code import CodeExecutionEnvironment, CodeProblemGenerator
from jmarl.mrlm.environments.math import MathProblemGenerator, MathReasoningEnvironment
from jmarl.mrlm.environments.tools import ToolUseEnvironment, create_default_tool_registry


def main(quick: bool) -> None:
    eval_envs = [
        CodeExecutionEnvironment(CodeProblemGenerator(difficulty_range=(1, 1))),
        MathReasoningEnvironment(MathProblemGenerator(difficulty_range=(1, 1))),
        ToolUseEnvironment(create_default_tool_registry(["calculator"]), max_turns=2),
    ]
    settings = config(quick, "grpo", GRPOConfig(group_size=2 if quick else 8), updates=200, batch_size=12)
    trainer = GRPOTrainer(policy(quick, 160), eval_envs, settings)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    for column in [c for c in after if c == "eval/reward" or c.endswith("/reward")]:
        print(f"{column.removeprefix('eval/')}: {before[column]:.3f} -> {after[column]:.3f}", flush=True)


if __name__ == "__main__":
    main(quick_flag(__doc__))
