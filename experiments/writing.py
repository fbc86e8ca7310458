"""Two language models learn to write texts that belong together: two summaries of a post, two paragraphs of an introduction,
or a story's setup and the story.

Claim: from the joint reward alone, the agents learn lengths, vocabulary and style that fit each other.
Command: python -m experiments.writing --environment tldr            (or arxiv, story; flags: --help)
Reward: `jmarl.envs.writing.tldr_arxiv`, from 0 to 2.98 (and logged as a share of 3.0); story: `jmarl.envs.writing.story`, from
    0 to 1.
Baseline: --single, one model that writes both texts; give it the tokens of both (--max-new-tokens).
Data: texts of this project, or --data hub, or --data FILE (JSON Lines) of `trl-lib/tldr` or `OpenMLRL/arXiv_abstract`.
Expected: `--num-prompts 1 --max-new-tokens 64 --temperature 0.8 --learning-rate 5e-5 --num-updates 24` on tldr, seed 0:
    held-out reward from 1.01 ± 0.31 to 2.71 ± 0.09 (90 % of 3.0), in 8 minutes of CPU time (13.5 minutes on two cores that also
    ran other work). The agents learn the reward and not to summarize: 23 of 24 short texts begin with "Another writer shares"
    and are hardly about the post; 17 of 24 long texts quote the prompt's list of transition words, and most copy the title or
    text of the post.
    arxiv with `--max-new-tokens 208 --held-out 6` and the other flags as above, seed 0: from 1.03 ± 0.31 to 2.14 ± 0.08 (71 %
    of 3.0), in 14 minutes. The first paragraph becomes fluent and leaves the topic; the second is about "transitions" and the
    abstract.
Published for two models of 1.7B parameters: 94.5 % of 3.0 on tldr, 93.1 % on arxiv; there a single model has 44.9 %.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from experiments.report import command, report
from experiments.start import TeamTraining, load_and_train
from jmarl.config import CountOrOff, Episodes, Optimizer, Run, Sampling, check
from jmarl.envs import make
from jmarl.runs.records import TrainResult

NUM_TASKS = 1000  # to train on, or as many as there are


@dataclasses.dataclass(frozen=True)
class WritingConfig(TeamTraining):
    """A team writes."""

    environment: Literal["tldr", "arxiv", "story"] = "tldr"
    """What the agents write: summaries of a post (tldr), an introduction (arxiv) or a story."""
    data: str = ""
    """hub, or a JSON Lines file with the fields of the data set; empty: texts of the project. Not for story."""
    single: bool = False
    """One model writes both texts, with [PARAGRAPH_SPLIT] between them."""
    held_out: CountOrOff = 16
    """Held-out tasks to evaluate on before and after training; fewer if the data have fewer."""
    run: Run = Run(num_updates=100, output_dir="runs/writing")
    episodes: Episodes = Episodes(num_prompts=2, num_generations=8, joint_mode="cross", chat=True)
    sampling: Sampling = Sampling(max_new_tokens=256)  # arxiv asks for 128 words or more
    optimizer: Optimizer = Optimizer(learning_rate=2e-05)

    @property
    def num_agents(self) -> int:
        return 1 if self.single else 2

    def check_together(self) -> None:
        super().check_together()
        check("data", self.data, not self.data or self.environment != "story", "left out for environment=story")
        check("num_turns", self.episodes.num_turns, self.episodes.num_turns == 1, "1: there are no later turns")


def run(cfg: WritingConfig) -> TrainResult:
    data = {"data": cfg.data} if cfg.data else {}
    env = make(cfg.environment, single=cfg.single, **data)
    items, held_out = env.tasks("train", NUM_TASKS, cfg.run.seed), env.tasks("eval", cfg.held_out)
    return load_and_train(cfg, env, items, held_out)


if __name__ == "__main__":
    command(WritingConfig, run, report)
