"""Language models learn to answer questions with tools: one agent, or a planner and a caller.

Claim: all runs with one command and nothing downloaded; shown 32 solved tasks, SmolLM2-135M learns to use tools.
Command: python -m experiments.tools --environment tools        (or tools_team, tools_sandbox; flags: --help)
Reward: `jmarl.envs.tools.tool_use`, from -1 to 1.6 an episode. Tasks: made (`jmarl.envs.tools.tasks`, `eval` held out).
Seen (seed 0, held-out, with other work beside; untrained -> after imitating the solver -> after training):
    tools `--kinds arithmetic lookup --num-turns 2 --demonstrations 32 --imitation-updates 12 --imitation-batch-size 4
    --num-prompts 1 --temperature 0.8 --eval-temperature 0.5 --learning-rate 1e-5 --num-updates 14 --held-out 12
    --eval-generations 2 --max-new-tokens 128`: 0.14 ± 0.13 -> 0.48 ± 0.29 -> 0.93 ± 0.24 of 1.2, solved 0 -> 25 -> 58 %, in
    13.6 minutes. The agent asks the right tool in the first turn and answers with what it read in the second.
    tools_sandbox `--kinds file` and the rest alike, `--max-new-tokens 96 --held-out 8`: -0.12 ± 0.07 -> 1.13 ± 0.16, solved
    0 -> 94 %, by imitation alone.
    tools_team `--kinds arithmetic lookup --num-turns 4 --demonstrations 64 --imitation-updates 16 --num-prompts 1
    --max-new-tokens 64 --eval-temperature 0.5 --temperature 0.8 --learning-rate 2e-5 --num-updates 16 --held-out 12
    --eval-generations 2`: -0.09 ± 0.08 -> 0.99 ± 0.15, solved 0 -> 58 %, by imitation; broken off in training after 40 minutes.
    From rewards alone it learns to answer without tools: `--kinds arithmetic lookup --num-turns 1 --num-prompts 1
    --max-new-tokens 48 --eval-temperature 0.7 --learning-rate 5e-5 --num-updates 18 --held-out 12`: -0.01 ± 0.04 -> 0.19 ± 0.01
    in 7 minutes, and no task solved. A wrong answer at once is worth 0.2, whatever else is written; all completions of a group
    then earn the same, so nothing better is found.
With its chat template SmolLM2-135M makes hardly a call.
"""

from __future__ import annotations

import dataclasses

from experiments.report import command, report
from experiments.start import Demonstrated, start
from jmarl.config import Episodes, Optimizer, Run, Sampling, check
from jmarl.envs import make
from jmarl.envs.tools.tasks import MAKERS
from jmarl.envs.vector import LockStep
from jmarl.learning.per_agent import check_agents
from jmarl.sandbox import default_sandbox
from jmarl.training.checks import check_settings
from jmarl.training.records import TrainResult
from jmarl.training.train import train

AGENTS = {"tools": 1, "tools_team": 2, "tools_sandbox": 1}
TASKS = 500  # made, for training


@dataclasses.dataclass(frozen=True)
class ToolsConfig(Demonstrated):
    """Questions, and tools to answer them."""

    environment: str = "tools"
    """tools (calculator and search), tools_team (the same with a planner and a caller), or tools_sandbox (one agent that also
    has Python and files)."""
    kinds: tuple[str, ...] = ()
    """Kinds of task, such as arithmetic lookup; empty: all that the tools suffice for."""
    held_out: int = 32
    """Held-out tasks that are played before and after training; 0: none."""
    run: Run = Run(num_updates=120, eval_temperature=0.2, output_dir="runs/tools")
    # Small models follow the examples of the prompt better without a chat template.
    episodes: Episodes = Episodes(num_prompts=2, num_generations=8, num_turns=4, branching="chain", chat=False)
    sampling: Sampling = Sampling(max_new_tokens=96, temperature=0.7)
    optimizer: Optimizer = Optimizer(learning_rate=2e-05)

    def __post_init__(self):
        super().__post_init__()
        check("environment", self.environment, self.environment in AGENTS, ", ".join(AGENTS))
        agents = AGENTS[self.environment]
        turns = self.episodes.num_turns
        check("num_turns", turns, turns % agents == 0, "even: planner and caller take turns")
        check("kinds", self.kinds, set(self.kinds) <= set(MAKERS), f"some of {', '.join(MAKERS)}")
        check("held_out", self.held_out, self.held_out >= 0, "0 or more")
        check_settings(self)
        check_agents(self, agents)


def run(cfg: ToolsConfig) -> TrainResult:
    if cfg.environment == "tools_sandbox":  # now, not at the first call in the middle of a run
        print(f"programs are confined at level {default_sandbox().level}")
    env = make(cfg.environment, max_turns=cfg.episodes.num_turns, kinds=cfg.kinds or None)
    items, held_out = env.tasks("train", TASKS, cfg.run.seed), env.tasks("eval", cfg.held_out)
    team, params = start(cfg, env, items, held_out)
    return train(team, LockStep(env), items, cfg, params=params, eval_items=held_out)


def main() -> None:
    command(ToolsConfig, run, report)


if __name__ == "__main__":
    main()
