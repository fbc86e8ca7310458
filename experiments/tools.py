"""Language models learn to answer questions with tools: one agent, or a planner and a caller.

Claim: everything runs with one command and no download; SmolLM2-135M learns to use tools from 32 solved tasks.
Command: python -m experiments.tools --environment tools        (or tools_team, tools_sandbox; flags: --help)
Reward: `jmarl.envs.tools.tool_use`, from -1 to 1.6 per episode. Tasks: generated (`jmarl.envs.tools.tasks`; the split `eval` is
    held out).
Expected (seed 0, mean return on held-out tasks: untrained -> after imitating the solver -> after training; times on two cores
that also ran other work):
    tools `--kinds arithmetic lookup --num-turns 2 --demonstrations 32 --imitation-updates 12 --imitation-batch-size 4
    --num-prompts 1 --temperature 0.8 --eval-temperature 0.5 --learning-rate 1e-5 --num-updates 14 --held-out 12
    --eval-generations 2 --max-new-tokens 128`: 0.14 ± 0.13 -> 0.48 ± 0.29 -> 0.93 ± 0.24 of 1.2, solved 0 -> 25 -> 58 %, in
    13.6 minutes. The agent calls the right tool in the first turn and answers with its result in the second.
    tools_sandbox `--kinds file`, `--max-new-tokens 96 --held-out 8` and the other flags as above: -0.12 ± 0.07 -> 1.13 ± 0.16,
    solved 0 -> 94 %, by imitation alone.
    tools_team `--kinds arithmetic lookup --num-turns 4 --demonstrations 64 --imitation-updates 16 --num-prompts 1
    --max-new-tokens 64 --eval-temperature 0.5 --temperature 0.8 --learning-rate 2e-5 --num-updates 16 --held-out 12
    --eval-generations 2`: -0.09 ± 0.08 -> 0.99 ± 0.15, solved 0 -> 58 %, by imitation; training was stopped after 40 minutes.
    Rewards without demonstrations teach the agent to answer without tools: `--kinds arithmetic lookup --num-turns 1
    --num-prompts 1 --max-new-tokens 48 --eval-temperature 0.7 --learning-rate 5e-5 --num-updates 18 --held-out 12`: -0.01 ±
    0.04 -> 0.19 ± 0.01 in 7 minutes, and no task is solved. Any immediate answer earns 0.2, also a wrong one. Soon all
    completions of a group earn the same, which leaves nothing to learn from.
With its chat template, SmolLM2-135M writes hardly any call.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from experiments.report import command, report
from experiments.start import ImitationConfig, imitate_and_train
from jmarl.config import Episodes, Optimizer, Run, Sampling, check
from jmarl.envs import make
from jmarl.envs.tools.tasks import MAKERS
from jmarl.runs.records import TrainResult
from jmarl.sandbox import default_sandbox

NUM_TASKS = 500  # generated, to train on


@dataclasses.dataclass(frozen=True)
class ToolsConfig(ImitationConfig):
    """Questions, and tools to answer them."""

    environment: Literal["tools", "tools_team", "tools_sandbox"] = "tools"
    """tools (calculator and search), tools_team (the same, with a planner and a caller), or tools_sandbox (one agent that also
    has Python and files)."""
    kinds: tuple[str, ...] = ()
    """Kinds of task, such as arithmetic lookup; empty: all that can be solved with the tools."""
    run: Run = Run(num_updates=120, eval_temperature=0.2, output_dir="runs/tools")
    # Small models follow the examples of the prompt better without a chat template.
    episodes: Episodes = Episodes(num_prompts=2, num_generations=8, num_turns=4, branching="chain", chat=False)
    sampling: Sampling = Sampling(max_new_tokens=96, temperature=0.7)
    optimizer: Optimizer = Optimizer(learning_rate=2e-05)

    @property
    def num_agents(self) -> int:
        return 2 if self.environment == "tools_team" else 1

    def check_together(self) -> None:
        super().check_together()
        turns = self.episodes.num_turns
        check("num_turns", turns, turns % self.num_agents == 0, "even: planner and caller take turns")
        check("kinds", self.kinds, set(self.kinds) <= set(MAKERS), f"some of {', '.join(MAKERS)}")


def run(cfg: ToolsConfig) -> TrainResult:
    if cfg.environment == "tools_sandbox":  # start it before training, so that a missing sandbox is reported at once
        print(f"programs run in the sandbox at level {default_sandbox().level}")
    env = make(cfg.environment, max_turns=cfg.episodes.num_turns, kinds=cfg.kinds or None)
    return imitate_and_train(cfg, env, NUM_TASKS)


if __name__ == "__main__":
    command(ToolsConfig, run, report)
