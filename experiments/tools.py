"""Language models learn to answer questions with tools: one agent, or a planner and a caller.

Claim: tools, tasks and rewards run with one command and nothing downloaded; what a call returns is read in the next turn.
Command: python -m experiments.tools --environment tools        (or tools_team, tools_sandbox; flags: --help)
Reward: `jmarl.envs.tool_use`, from -1 to 1.6 an episode. Tasks: made (`jmarl.envs.tool_tasks`, `eval` held out).
Seen so far: only that it runs (tools, 2 updates of 4 episodes of 2 turns with 24 tokens, 3.5 minutes on 2 shared cores).
Untrained, SmolLM2-135M earns 0.02 ± 0.07 on 10 held-out tasks (4 episodes of 2 turns with 48 tokens each) and solves none; with
its chat template it makes hardly a call. A wrong answer at once earns 0.2, a right one that was looked up at least 1.2. A
learning curve is not yet there.
"""

from __future__ import annotations

import dataclasses

import tyro

from experiments.report import report
from jmarl.config import TrainConfig, check
from jmarl.envs import make
from jmarl.envs.tool_tasks import MAKERS
from jmarl.learners import check_agents
from jmarl.lockstep import LockStep
from jmarl.sandbox import SandboxUnavailable, default_sandbox
from jmarl.team import make_team
from jmarl.train import TrainResult, check_settings, train
from jmarl.weights import load_agent

AGENTS = {"tools": 1, "tools_team": 2, "tools_sandbox": 1}
TASKS = 500  # made, for training


@dataclasses.dataclass(frozen=True)
class ToolsConfig(TrainConfig):
    """Questions, and tools to answer them."""

    environment: str = "tools"
    """tools (calculator and search), tools_team (the same with a planner and a caller), or tools_sandbox (one agent that also
    has Python and files)."""
    model: str = "smollm2-135m-instruct"
    """Model of all agents: a name, a directory, a .gguf file or a hub id."""
    kinds: tuple[str, ...] = ()
    """Kinds of task, such as arithmetic lookup; empty: all that the tools suffice for."""
    held_out: int = 32
    """Held-out tasks that are played before and after training; 0: none."""
    num_updates: int = 120
    num_prompts: int = 2
    num_generations: int = 8
    num_turns: int = 4
    branching: str = "chain"
    max_new_tokens: int = 64
    chat: bool = False
    """Put prompts into the tokenizer's chat template. Small models take up the prompt's examples better without it."""
    temperature: float = 0.7
    eval_temperature: float = 0.2
    learning_rate: float = 2e-5
    output_dir: str = "runs/tools"

    def __post_init__(self):
        super().__post_init__()
        check("environment", self.environment, self.environment in AGENTS, ", ".join(AGENTS))
        agents = AGENTS[self.environment]
        check("num_turns", self.num_turns, self.num_turns % agents == 0, "even: planner and caller take turns")
        check("kinds", self.kinds, set(self.kinds) <= set(MAKERS), f"some of {', '.join(MAKERS)}")
        check("held_out", self.held_out, self.held_out >= 0, "0 or more")
        check_settings(self)
        check_agents(self, agents)


def run(cfg: ToolsConfig) -> TrainResult:
    if cfg.environment == "tools_sandbox":  # now, not at the first call in the middle of a run
        print(f"programs are confined at level {default_sandbox().level}")
    env = make(cfg.environment, max_turns=cfg.num_turns, kinds=cfg.kinds or None)
    team, params = make_team([load_agent(cfg.model)] * env.num_agents, lora=cfg.lora_rank > 0)
    items, held_out = env.tasks("train", TASKS, cfg.seed), env.tasks("eval", cfg.held_out)
    return train(team, params, LockStep(env), items, cfg, eval_items=held_out)


def main() -> None:
    try:
        report(run(tyro.cli(ToolsConfig)))
    except SandboxUnavailable as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
