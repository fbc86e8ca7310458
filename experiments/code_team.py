"""Two language models learn to write programs together: agent 0 writes a helper, agent 1 the function that may call it.

Claim: rewards come from running all tests of every program in a sandbox, and the team's reward rises.
Command: python -m experiments.code_team            (flags: --help)
Reward: `jmarl.envs.code.generation`, from 0 to 4, or with `--reward simple` `jmarl.envs.code.execution`, from -0.5 to 2.
Problems: generated from templates at difficulty 1 (`jmarl.envs.code.problems`; the split `eval` is held out), or `--dataset
    humaneval`, …
Expected: on held-out problems the reward rises from 1.0 to 1.6 and pass@1 from 0.01 to 0.12, at 20 s per update; see
    experiments/README.md.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from experiments.report import command, report
from experiments.start import TeamTraining, load_and_train
from jmarl.config import Count, Episodes, Optimizer, Positive, Range, Run, Sampling, check
from jmarl.envs.code import problems as code_problems
from jmarl.envs.code.completion import CodeCompletion
from jmarl.envs.code.data import SOURCES, load_items
from jmarl.envs.code.execution import CodeExecution
from jmarl.envs.code.generation import CodeGeneration
from jmarl.runs.records import TrainResult
from jmarl.sandbox import Limits, Sandbox
from jmarl.sandbox.client import AUTO, UNSAFE

NUM_PROBLEMS = 500  # generated, to train on


@dataclasses.dataclass(frozen=True)
class CodeConfig(TeamTraining):
    """A team writes programs."""

    agents: Count = 2
    """Agents of the team: the last one writes the function, those before it write helpers."""
    reward: Literal["levels", "simple"] = "levels"
    """levels (0 to 4) or simple (-0.5 to 2)."""
    dataset: str = "problems"
    """problems (generated from templates), humaneval, coophumaneval, mbpp, mbpp_sanitized, mbpp_openmlrl, or classeval, where
    the agents complete classes for a reward from 0 to 6."""
    data_path: str = ""
    """A JSON Lines file with the fields of the data set, to use instead of a download from the Hub."""
    eval_path: str = ""
    """The same for held-out items; empty: the last items of the data set are held out."""
    difficulty: Annotated[int, Range(1, 3)] = 1
    """Difficulty of generated problems, 1 to 3."""
    feedback: Literal["plain", "passed", "level_passed", "level_feedback"] = "level_feedback"
    """What agents read about their programs in later turns."""
    sandbox: str = "auto"
    """How programs are confined: auto (the first of S4, S3, S2 that this machine supports), one of these levels, or
    unsafe-process (not at all)."""
    wall_s: Positive = 2.0
    """Seconds that a program may take for all its tests."""
    run: Run = Run(num_updates=120, eval_temperature=0.2, output_dir="runs/code_team")
    episodes: Episodes = Episodes(num_prompts=2, num_generations=8, sample_parts=2, chat=True)
    sampling: Sampling = Sampling(max_new_tokens=96, temperature=0.7)
    optimizer: Optimizer = Optimizer(learning_rate=2e-05)

    @property
    def num_agents(self) -> int:
        return self.agents

    def check_together(self) -> None:
        super().check_together()
        check("dataset", self.dataset, self.dataset in ("problems", *SOURCES), ", ".join(("problems", *SOURCES)))
        levels = ("auto", *AUTO, UNSAFE)
        check("sandbox", self.sandbox, self.sandbox in levels, ", ".join(levels))


def load_problems(cfg: CodeConfig) -> tuple[list[dict], list[dict]]:
    """Return the items to train on, and the held-out ones."""
    if cfg.dataset == "problems":
        grade, held_out = (cfg.difficulty, cfg.difficulty), []
        if cfg.held_out:
            held_out = code_problems.generate_problems(cfg.held_out, split="eval", difficulty=grade)
        return code_problems.generate_problems(NUM_PROBLEMS, seed=cfg.run.seed, difficulty=grade), held_out
    items = load_items(cfg.dataset, path=cfg.data_path or None)
    if cfg.eval_path:
        return items, load_items(cfg.dataset, path=cfg.eval_path, limit=cfg.held_out)
    return items[: len(items) - cfg.held_out], items[len(items) - cfg.held_out :]


def run(cfg: CodeConfig) -> TrainResult:
    kind = CodeGeneration if cfg.reward == "levels" else CodeExecution
    if cfg.dataset == "classeval":
        kind = CodeCompletion
    with Sandbox(cfg.sandbox) as sandbox:
        print(f"programs run in the sandbox at level {sandbox.level}")
        env = kind(cfg.agents, feedback=cfg.feedback, limits=Limits(wall_s=cfg.wall_s), sandbox=sandbox)
        return load_and_train(cfg, env, *load_problems(cfg))


if __name__ == "__main__":
    command(CodeConfig, run, report)
