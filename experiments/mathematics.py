"""A team learns to answer mathematical questions: a solver alone, a solver with a verifier, or a planner and a solver.

Claim: rewards come from exact checks of the answers, and no prompt holds an answer.
Command: python -m experiments.mathematics --environment math_verifier            (flags: --help)
Reward: `jmarl.envs.math.reasoning`: 1 correct, 0 wrong, -0.3 no answer that can be read; what each agent gets stands there.
Problems: made from templates at one difficulty (`jmarl.envs.math.problems`, `eval` held out), or `--data gsm8k` or `svamp`.
Seen, seeds 0, 1, 2, held-out, with other work beside:
    TINY = `--model tiny --no-chat --topics arithmetic --demonstrations 4000 --tasks 12000 --imitation-batch-size 64
    --imitation-learning-rate 1e-3 --max-new-tokens 6 --learning-rate 3e-4 --num-prompts 32 --held-out 128 --per-agent vmap`
    `TINY --environment math --imitation-updates 2000 --num-updates 600`: random weights solve 0, 1, 0 %, after imitating 55,
    49, 47 %, after training 63, 56, 53 %, in 3 minutes.
    `TINY --environment math_planner --imitation-updates 2000 --num-updates 300` (seed 0): 0, 37, 46 %, in 5.5 minutes; the
    planner solves, and the solver copies the plan's answer (`plan_has_answer` equals `solved`).
    `TINY --environment math_verifier --model runs/mathematics/models/agent_0 --imitation-updates 800 --num-updates 100`, from
    the solver of the first line: right verdicts 59, 51, 58 % after imitating, 79, 57, 80 % after training, solved 58, 50, 56
    and 60, 57, 56 %, in 3 minutes. The verifier learns (with seed 1 only to say CORRECT); the solver makes nothing of a
    verdict.
    `--environment math --topics arithmetic --max-new-tokens 24 --eval-temperature 0.7 --learning-rate 5e-5 --num-updates 20`:
    SmolLM2-135M learns the form and no arithmetic: no answer that can be read 13 % -> 0, solved 2.3 ± 2.7 -> 0.8 ± 1.6 % (seed
    0). 320 demonstrations bring it to 8 %. Use a larger model.
"""

from __future__ import annotations

import dataclasses

from experiments.report import command, report
from experiments.start import Demonstrated, start
from experiments.tiny import random_agents, tokenizer
from jmarl.config import Episodes, Optimizer, Run, Sampling, check
from jmarl.envs import make
from jmarl.envs.base import TextEnvironment
from jmarl.envs.math.data import SOURCES
from jmarl.envs.math.problems import TOPICS, MathProblemGenerator
from jmarl.learning.per_agent import check_agents
from jmarl.training.checks import check_settings
from jmarl.training.records import TrainResult
from jmarl.training.train import train

PIECES = (*"0123456789", "+", "-", "×", "÷", "Answer: ", "CORRECT", "WRONG")  # that a tiny model reads and writes
TURNS = {"math": 1, "math_verifier": 3, "math_planner": 2}  # of an episode, if --num-turns does not say so


@dataclasses.dataclass(frozen=True)
class MathConfig(Demonstrated):
    """A team answers mathematical questions. One more model is `tiny`: random weights that read and write numbers and signs,
    for `--topics arithmetic --no-chat`."""

    environment: str = "math"
    """math (one solver; --num-turns attempts), math_verifier (solver, verifier, solver) or math_planner (planner, solver)."""
    difficulty: int = 1
    """Of made problems, 1 to 3."""
    topics: tuple[str, ...] = ()
    """Topics of made problems, such as arithmetic word; empty: all."""
    imitation_slips: float = 0.5
    """Of demonstrations of math_verifier: share of the messages in whose place that of an earlier task is played, so that the
    verifier also sees wrong answers."""
    data: str = "problems"
    """problems (made from templates), gsm8k or svamp."""
    data_path: str = ""
    """A JSON Lines file with the data set's fields, in place of the hub."""
    tasks: int = 500
    """To train on, as far as there are."""
    held_out: int = 32
    """Held-out tasks that are played before and after training; 0: none."""
    run: Run = Run(num_updates=120, eval_temperature=0.2, output_dir="runs/mathematics")
    episodes: Episodes = Episodes(num_prompts=4, num_generations=8, branching="chain", chat=True)
    sampling: Sampling = Sampling(max_new_tokens=96, temperature=0.7)
    optimizer: Optimizer = Optimizer(learning_rate=2e-05)

    def __post_init__(self):
        check("environment", self.environment, self.environment in TURNS, ", ".join(TURNS))
        fixed = TURNS[self.environment]
        turns = self.episodes.num_turns
        check("num_turns", turns, self.environment == "math" or turns in (1, fixed), f"{fixed} or left out")
        if turns == 1:
            object.__setattr__(self, "episodes", dataclasses.replace(self.episodes, num_turns=fixed))
        super().__post_init__()
        check("difficulty", self.difficulty, self.difficulty in (1, 2, 3), "1, 2 or 3")
        check("data", self.data, self.data in ("problems", *SOURCES), ", ".join(("problems", *SOURCES)))
        own = self.data == "problems"
        check("difficulty", self.difficulty, own or self.difficulty == 1, "left out: it is of made problems")
        known = own and set(self.topics) <= TOPICS.keys()
        check("topics", self.topics, known or not self.topics, f"of made problems, and some of {', '.join(TOPICS)}")
        slips = self.imitation_slips
        check(
            "imitation_slips",
            slips,
            slips == MathConfig.imitation_slips or self.environment == "math_verifier",
            "left out: it is of math_verifier",
        )
        check("imitation_slips", slips, 0 <= slips <= 1, "in [0, 1]")
        if self.model == "tiny":
            check("difficulty", self.difficulty, self.difficulty == 1, "1 for model=tiny, which knows whole numbers only")
            rank = self.lora.lora_rank
            check("lora_rank", rank, not rank, "0 for model=tiny, each of whose agents has other weights")
            check("chat", self.episodes.chat, not self.episodes.chat, "off for model=tiny, which has no template")
            check("topics", self.topics, self.topics == ("arithmetic",), "arithmetic for model=tiny, which reads nothing else")
        check("data_path", self.data_path, not (own and self.data_path), f"of --data {' or '.join(SOURCES)}")
        check("tasks", self.tasks, self.tasks >= 1, "1 or more")
        check("held_out", self.held_out, self.held_out >= 0, "0 or more")
        check_settings(self)
        check_agents(self, environment_of(self, plain=True).num_agents)


def environment_of(cfg: MathConfig, plain: bool = False) -> TextEnvironment:
    """plain: without reading data, for what does not depend on them."""
    options: dict = {"max_turns": cfg.episodes.num_turns} if cfg.environment == "math" else {}
    if cfg.data == "problems" or plain:
        made = MathProblemGenerator((cfg.difficulty, cfg.difficulty), cfg.topics or tuple(TOPICS))
        return make(cfg.environment, generator=made, **options)
    return make(cfg.environment, data=cfg.data, data_path=cfg.data_path or None, **options)


def run(cfg: MathConfig) -> TrainResult:
    env = environment_of(cfg)
    items, held_out = env.tasks("train", cfg.tasks, cfg.run.seed), env.tasks("eval", cfg.held_out, 0)
    tiny = random_agents("tiny", tokenizer(PIECES), env.num_agents, cfg.run.seed, width=128) if cfg.model == "tiny" else None
    slips = cfg.imitation_slips if cfg.environment == "math_verifier" else 0.0
    team, params = start(cfg, env, items, held_out, tiny, slips)
    return train(team, env, items, cfg, params=params, eval_items=held_out)


def main() -> None:
    command(MathConfig, run, report)


if __name__ == "__main__":
    main()
