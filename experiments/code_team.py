"""Two language models learn to write programs together: agent 0 a helper, agent 1 the function that may call it.

Claim: rewards come from real executions of all tests in a sandbox, and the team's reward rises.
Command: python -m experiments.code_team            (flags: --help)
Reward: `jmarl.envs.code.generation`, from 0 to 4, or with `--reward simple` `jmarl.envs.code.execution`, from -0.5 to 2.
Problems: made from templates at difficulty 1 (`jmarl.envs.code.problems`, `eval` held out), or `--dataset humaneval`, …
Expected: from 1.0 to 1.6 on held-out problems, pass@1 from 0.01 to 0.12, 20 s an update: see experiments/README.md.
"""

from __future__ import annotations

import dataclasses

from experiments.report import command, report
from jmarl.config import Episodes, Optimizer, Run, Sampling, TrainConfig, check
from jmarl.envs.code import problems as code_problems
from jmarl.envs.code.completion import CodeCompletion
from jmarl.envs.code.data import SOURCES, load_items
from jmarl.envs.code.execution import CodeExecution
from jmarl.envs.code.generation import CodeGeneration
from jmarl.learning.per_agent import check_agents
from jmarl.models.hub.agents import load_agent
from jmarl.sandbox import Limits, Sandbox
from jmarl.sandbox.client import AUTO, UNSAFE
from jmarl.team import make_team
from jmarl.training.checks import check_settings
from jmarl.training.records import TrainResult
from jmarl.training.train import train

REWARDS = {"levels": CodeGeneration, "simple": CodeExecution}
PROBLEMS = 500  # made, for training


@dataclasses.dataclass(frozen=True)
class CodeConfig(TrainConfig):
    """A team writes programs."""

    model: str = "smollm2-135m-instruct"
    """Model of all agents: a name, a directory, a .gguf file or a hub id."""
    agents: int = 2
    """Writers: the last writes the function, those before it helpers."""
    reward: str = "levels"
    """levels (0 to 4) or simple (-0.5 to 2)."""
    dataset: str = "problems"
    """problems (made from templates), humaneval, coophumaneval, mbpp, mbpp_sanitized, mbpp_openmlrl, or classeval, of which the
    agents complete classes for a reward from 0 to 6."""
    data_path: str = ""
    """A JSON Lines file with the data set's fields, in place of the hub."""
    eval_path: str = ""
    """The same for held-out items; empty: the last ones of those above are held out."""
    difficulty: int = 1
    """Of made problems, 1 to 3."""
    feedback: str = "level_feedback"
    """What later turns read: plain, passed, level_passed or level_feedback."""
    held_out: int = 32
    """Held-out items that are played before and after training; 0: none."""
    sandbox: str = "auto"
    """How programs are confined: auto (S4, S3 or S2, whichever holds first), one of these, or unsafe-process."""
    wall_s: float = 2.0
    """Seconds that a program may take with all its tests."""
    run: Run = Run(num_updates=120, eval_temperature=0.2, output_dir="runs/code_team")
    episodes: Episodes = Episodes(num_prompts=2, num_generations=8, sample_parts=2, chat=True)
    sampling: Sampling = Sampling(max_new_tokens=96, temperature=0.7)
    optimizer: Optimizer = Optimizer(learning_rate=2e-05)

    def __post_init__(self):
        super().__post_init__()
        check("reward", self.reward, self.reward in REWARDS, " or ".join(REWARDS))
        check("dataset", self.dataset, self.dataset in ("problems", *SOURCES), ", ".join(("problems", *SOURCES)))
        kinds = ("plain", "passed", "level_passed", "level_feedback")
        check("feedback", self.feedback, self.feedback in kinds, ", ".join(kinds))
        check("difficulty", self.difficulty, self.difficulty in (1, 2, 3), "1, 2 or 3")
        levels = ("auto", *AUTO, UNSAFE)
        check("sandbox", self.sandbox, self.sandbox in levels, ", ".join(levels))
        check("held_out", self.held_out, self.held_out >= 0, "0 or more")
        check_settings(self)
        check_agents(self, self.agents)


def items_of(cfg: CodeConfig) -> tuple[list[dict], list[dict]]:
    """To train on, and held out."""
    if cfg.dataset == "problems":
        grade = (cfg.difficulty, cfg.difficulty)
        made = code_problems.generate_problems(PROBLEMS, seed=cfg.run.seed, difficulty=grade)
        return made, code_problems.generate_problems(cfg.held_out, split="eval", difficulty=grade) if cfg.held_out else []
    items = load_items(cfg.dataset, path=cfg.data_path or None)
    if cfg.eval_path:
        return items, load_items(cfg.dataset, path=cfg.eval_path, limit=cfg.held_out)
    return items[: len(items) - cfg.held_out], items[len(items) - cfg.held_out :]


def run(cfg: CodeConfig) -> TrainResult:
    kind = CodeCompletion if cfg.dataset == "classeval" else REWARDS[cfg.reward]
    with Sandbox(cfg.sandbox) as box:
        print(f"programs are confined at level {box.level}")
        env = kind(cfg.agents, feedback=cfg.feedback, limits=Limits(wall_s=cfg.wall_s), sandbox=box)
        items, held_out = items_of(cfg)
        agent = load_agent(cfg.model)
        team, params = make_team([agent] * cfg.agents, lora=cfg.lora.lora_rank > 0)
        return train(team, env, items, cfg, params=params, eval_items=held_out)


def main() -> None:
    command(CodeConfig, run, report)


if __name__ == "__main__":
    main()
