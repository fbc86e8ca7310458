"""A team learns to answer mathematical questions: a solver alone, a solver with a verifier, or a planner and a solver.

Claim: rewards come from exact checks of the answers, and no prompt contains an answer.
Command: python -m experiments.mathematics --environment math_verifier            (flags: --help)
Reward: `jmarl.envs.math.reasoning`: 1 for a correct answer, 0 for a wrong one, -0.3 if no answer can be read; that file says
    what each agent of a team gets.
Problems: generated from templates at one difficulty (`jmarl.envs.math.problems`; the split `eval` is held out), or `--data
    gsm8k` or `svamp`.
Expected (seeds 0, 1, 2, on held-out tasks; times on two cores that also ran other work):
    TINY = `--model tiny --no-chat --topics arithmetic --demonstrations 4000 --tasks 12000 --imitation-batch-size 64
    --imitation-learning-rate 1e-3 --max-new-tokens 6 --learning-rate 3e-4 --num-prompts 32 --held-out 128 --per-agent vmap`
    `TINY --environment math --imitation-updates 2000 --num-updates 600`: random weights solve 0, 1, 0 %, after imitating 55,
    49, 47 %, after training 63, 56, 53 %, in 3 minutes.
    `TINY --environment math_planner --imitation-updates 2000 --num-updates 300` (seed 0): 0, 37, 46 %, in 5.5 minutes; the
    planner solves the problem, and the solver copies the answer from the plan (`plan_has_answer` equals `solved`).
    `TINY --environment math_verifier --model runs/mathematics/models/agent_0 --imitation-updates 800 --num-updates 100`,
    starting from the solver of the first line: correct verdicts 59, 51, 58 % after imitating, 79, 57, 80 % after training;
    solved 58, 50, 56 % and 60, 57, 56 %; in 3 minutes. The verifier learns (with seed 1 only to write CORRECT); the solver does
    not use its verdict.
    `--environment math --topics arithmetic --max-new-tokens 24 --eval-temperature 0.7 --learning-rate 5e-5 --num-updates 20`
    (seed 0): SmolLM2-135M learns the format and no arithmetic: no readable answer 13 % -> 0, solved 2.3 ± 2.7 -> 0.8 ± 1.6 %.
    320 demonstrations bring it to 8 %. Use a larger model.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from experiments.report import command, report
from experiments.start import ImitationConfig, imitate_and_train
from experiments.tiny import random_agents, tokenizer
from jmarl.config import Count, Episodes, Optimizer, Range, Run, Sampling, Share, check, check_fields
from jmarl.envs import make
from jmarl.envs.base import TextEnvironment
from jmarl.envs.math.data import SOURCES
from jmarl.envs.math.problems import TOPICS, MathProblemGenerator
from jmarl.runs.records import TrainResult

PIECES = (*"0123456789", "+", "-", "×", "÷", "Answer: ", "CORRECT", "WRONG")  # the vocabulary of --model tiny
TURNS = {"math": 1, "math_verifier": 3, "math_planner": 2}  # turns of an episode without --num-turns


@dataclasses.dataclass(frozen=True)
class MathConfig(ImitationConfig):
    """A team answers mathematical questions. `--model tiny` is a model of random weights that reads and writes digits and signs
    only; use it with `--topics arithmetic --no-chat`."""

    environment: Literal["math", "math_verifier", "math_planner"] = "math"
    """math (one solver; --num-turns attempts), math_verifier (solver, verifier, solver) or math_planner (planner, solver)."""
    difficulty: Annotated[int, Range(1, 3)] = 1
    """Difficulty of generated problems, 1 to 3."""
    topics: tuple[str, ...] = ()
    """Topics of generated problems, such as arithmetic word; empty: all."""
    imitation_slips: Share = 0.5
    """In demonstrations of math_verifier, the share of messages that are replaced by that of an earlier task, so that the
    verifier also sees wrong answers."""
    data: str = "problems"
    """problems (generated from templates), gsm8k or svamp."""
    data_path: str = ""
    """A JSON Lines file with the fields of the data set, to use instead of a download from the Hub."""
    tasks: Count = 500
    """Tasks to train on; fewer if the data have fewer."""
    run: Run = Run(num_updates=120, eval_temperature=0.2, output_dir="runs/mathematics")
    episodes: Episodes = Episodes(num_prompts=4, num_generations=8, branching="chain", chat=True)
    sampling: Sampling = Sampling(max_new_tokens=96, temperature=0.7)
    optimizer: Optimizer = Optimizer(learning_rate=2e-05)

    def __post_init__(self) -> None:
        check_fields(self, ["environment"])
        if self.episodes.num_turns == 1:
            episodes = dataclasses.replace(self.episodes, num_turns=TURNS[self.environment])
            object.__setattr__(self, "episodes", episodes)
        super().__post_init__()

    @property
    def num_agents(self) -> int:
        return 1 if self.environment == "math" else 2

    def check_together(self) -> None:
        super().check_together()
        turns, expected = self.episodes.num_turns, TURNS[self.environment]
        check("num_turns", turns, self.environment == "math" or turns == expected, f"{expected} or left out")
        check("data", self.data, self.data in ("problems", *SOURCES), ", ".join(("problems", *SOURCES)))
        generated = self.data == "problems"
        check("difficulty", self.difficulty, generated or self.difficulty == 1, "left out: only generated problems have it")
        fits = not self.topics or (generated and set(self.topics) <= TOPICS.keys())
        check("topics", self.topics, fits, f"some of {', '.join(TOPICS)}, and left out unless data=problems")
        slips = self.imitation_slips
        fits = slips == MathConfig.imitation_slips or self.environment == "math_verifier"
        check("imitation_slips", slips, fits, "left out: only math_verifier uses it")
        check("data_path", self.data_path, not (generated and self.data_path), f"left out unless data={' or '.join(SOURCES)}")
        if self.model == "tiny":
            rank, chat = self.lora.lora_rank, self.episodes.chat
            check("difficulty", self.difficulty, self.difficulty == 1, "1 for model=tiny, which reads only whole numbers")
            check("lora_rank", rank, not rank, "0 for model=tiny, whose agents start from different weights")
            check("chat", chat, not chat, "off (--no-chat) for model=tiny, which has no chat template")
            check("topics", self.topics, self.topics == ("arithmetic",), "arithmetic for model=tiny, which reads no words")


def environment_of(cfg: MathConfig) -> TextEnvironment:
    """Return the environment of the settings."""
    options: dict[str, Any] = {"max_turns": cfg.episodes.num_turns} if cfg.environment == "math" else {}
    if cfg.data == "problems":
        generator = MathProblemGenerator((cfg.difficulty, cfg.difficulty), cfg.topics or tuple(TOPICS))
        return make(cfg.environment, generator=generator, **options)
    return make(cfg.environment, data=cfg.data, data_path=cfg.data_path or None, **options)


def run(cfg: MathConfig) -> TrainResult:
    env, tiny = environment_of(cfg), None
    if cfg.model == "tiny":
        tiny = random_agents("tiny", tokenizer(PIECES), env.num_agents, cfg.run.seed, width=128)
    slips = cfg.imitation_slips if cfg.environment == "math_verifier" else 0.0
    return imitate_and_train(cfg, env, cfg.tasks, tiny, slips)


if __name__ == "__main__":
    command(MathConfig, run, report)
