"""Two language models learn to write texts that belong together: two summaries of a post, two paragraphs of an introduction,
or a story's setup and the story.

Claim: the pair learns lengths, vocabulary and style that fit each other from the joint reward alone.
Command: python -m experiments.writing --environment tldr            (or arxiv, story; flags: --help)
Reward: `jmarl.envs.writing.tldr_arxiv`, from 0 to 2.98, told as a share of 3.0 too; story:
`jmarl.envs.writing.story`, from 0 to 1.
Baseline: --single, one model that writes both texts: give it the tokens of both.
Data: texts of this project's own, or --data hub, or --data FILE (JSON Lines) of `trl-lib/tldr` or `OpenMLRL/arXiv_abstract`.
Expected: `--num-prompts 1 --max-new-tokens 64 --temperature 0.8 --learning-rate 5e-5 --num-updates 24` on tldr, seed 0: held
    out from 1.01 ± 0.31 to 2.71 ± 0.09 (90 % of 3.0), 8 minutes of CPU time (13.5 minutes on two cores with other work). What
    is learned is the reward, not to summarise: 23 of 24 concise texts begin "Another writer shares", which is short and hardly
    about the post, and 17 of 24 long ones quote the prompt's own list of transition words; most copy the post's title or text.
    arxiv with `--max-new-tokens 208 --held-out 6` and the rest alike, seed 0: from 1.03 ± 0.31 to 2.14 ± 0.08 (71 % of 3.0), 14
    minutes. The first paragraph becomes fluent and leaves the topic, the second talks of "transitions" and of the abstract.
Published for two models of 1.7B: 94.5 % of 3.0 on tldr, 93.1 % on arxiv, single model 44.9 % there.
"""

from __future__ import annotations

import dataclasses

from experiments.report import command, report
from jmarl.config import Episodes, Optimizer, Run, Sampling, TrainConfig, check
from jmarl.envs import make
from jmarl.envs.vector import LockStep
from jmarl.learning.per_agent import check_agents
from jmarl.models.hub.agents import load_agent
from jmarl.team import make_team
from jmarl.training.checks import check_settings
from jmarl.training.records import TrainResult
from jmarl.training.train import train

ENVIRONMENTS = ("tldr", "arxiv", "story")
TASKS = 1000  # to train on, as far as there are


@dataclasses.dataclass(frozen=True)
class WritingConfig(TrainConfig):
    """A team writes."""

    model: str = "smollm2-135m-instruct"
    """Model of all agents: a name, a directory, a .gguf file or a hub id."""
    environment: str = "tldr"
    """tldr, arxiv or story."""
    data: str = ""
    """hub, or a JSON Lines file with the data set's fields; empty: texts of the project's own. Not of story."""
    single: bool = False
    """One model writes both texts, with [PARAGRAPH_SPLIT] between them."""
    held_out: int = 16
    """Held-out tasks that are played before and after training, as far as there are; 0: none."""
    run: Run = Run(num_updates=100, output_dir="runs/writing")
    episodes: Episodes = Episodes(num_prompts=2, num_generations=8, joint_mode="cross", chat=True)
    sampling: Sampling = Sampling(max_new_tokens=256)  # arxiv asks for 128 words or more
    optimizer: Optimizer = Optimizer(learning_rate=2e-05)

    def __post_init__(self):
        super().__post_init__()
        check("environment", self.environment, self.environment in ENVIRONMENTS, f"one of {ENVIRONMENTS}")
        check("data", self.data, not self.data or self.environment != "story", "empty for environment=story")
        check("held_out", self.held_out, self.held_out >= 0, "0 or more")
        check("num_turns", self.episodes.num_turns, self.episodes.num_turns == 1, "1: there are no later turns")
        check_settings(self)
        check_agents(self, 1 if self.single else 2)


def run(cfg: WritingConfig) -> TrainResult:
    data = {"data": cfg.data} if cfg.data else {}
    env = make(cfg.environment, single=cfg.single, **data)
    items, held_out = env.tasks("train", TASKS, cfg.run.seed), env.tasks("eval", cfg.held_out)
    agent = load_agent(cfg.model)
    team, params = make_team([agent] * env.num_agents, lora=cfg.lora.lora_rank > 0)
    return train(team, LockStep(env), items, cfg, params=params, eval_items=held_out)


def main() -> None:
    command(WritingConfig, run, report)


if __name__ == "__main__":
    main()
