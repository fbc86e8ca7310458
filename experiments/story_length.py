"""Two language models learn to tell a story together: agent 0 writes a compact setup, agent 1 a version 2-3 times as long.

Claim: the prompts ask for a setup and for a story and never name the ratio; the pair finds it from the joint reward alone.
Command: python -m experiments.story_length            (flags: --help)
Reward: 1 where len2 / len1 is in [2, 3] characters, else exp(-distance). Joint mode cross judges each setup with all stories
of its prompt, and each story with all setups, so that the partner's chance length averages out of a completion's return.
Expected: 0.89 to 0.94 in updates 31 to 40 and 0.89 to 0.94 on held-out topics (seeds 0 to 2), in 10 minutes on 2 cores.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

from experiments.report import command, end_of, with_interval
from jmarl.algorithms import find_row
from jmarl.config import Episodes, Optimizer, Run, Sampling, TrainConfig, check
from jmarl.envs.centralized import Centralized
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward, story_length_ratio
from jmarl.envs.writing.story import HELD_OUT, TOPICS, setup_prompt, story_prompt
from jmarl.learning.per_agent import check_agents
from jmarl.models.hub.agents import load_agent
from jmarl.team import make_team
from jmarl.training.checks import check_settings
from jmarl.training.records import TrainResult
from jmarl.training.seeds import check_seeds, train_seeds
from jmarl.training.train import train


@dataclasses.dataclass(frozen=True)
class StoryConfig(TrainConfig):
    """Two agents, one story."""

    joint_mode: Literal["auto", "aligned", "cross", "counterfactual"] = "auto"
    """auto: cross, or aligned for algorithms that do not take it (madpo, madpo_iter, marlhf, marlhf_iter, c3)."""
    model: str = "smollm2-135m-instruct"
    """Model of both agents: a name, a directory, a .gguf file or a hub id."""
    run: Run = Run(num_updates=40, output_dir="runs/story_length")
    episodes: Episodes = Episodes(num_prompts=2, num_generations=8, chat=True)
    sampling: Sampling = Sampling(max_new_tokens=64)
    optimizer: Optimizer = Optimizer(learning_rate=5e-05)
    held_out: int = len(HELD_OUT)
    """Held-out topics that are played before and after training; 0: none."""
    seeds: tuple[int, ...] = ()
    """Train from each of these seeds, all in one program (jmarl.training.seeds), in output_dir/seed_0, …; best with lora_rank,
    because else every run has all weights. Empty: one run from `seed`."""
    centralized: bool = False
    """One model writes both texts, in tagged sections of one completion (jmarl.envs.centralized): give it the tokens of both.
    The default model never wrote a section in 64 tries, so that it earns and learns nothing: choose a larger one."""

    def __post_init__(self):
        mode = self.joint_mode
        if mode == "auto":
            pairs = find_row(self.algorithm).data != "rollouts" or self.algorithm == "c3"
            mode = "aligned" if pairs else "cross"
        object.__setattr__(self, "episodes", dataclasses.replace(self.episodes, joint_mode=mode))
        super().__post_init__()
        check("held_out", self.held_out, 0 <= self.held_out <= len(HELD_OUT), f"in 0..{len(HELD_OUT)}")
        check("num_turns", self.episodes.num_turns, self.episodes.num_turns == 1, "1: a story has no later turns")
        if self.seeds:
            check_seeds(self.seeds, self)
        else:
            check_settings(self)
        check_agents(self, 1 if self.centralized else 2)

    def for_seed(self, seed: int, **settings: Any) -> Self:
        """Return the settings of one run, which has no other seeds."""
        return super().for_seed(seed, seeds=(), **settings)


def run(cfg: StoryConfig) -> list[TrainResult]:
    """One result a seed."""
    agent = load_agent(cfg.model)
    team, params = make_team([agent] if cfg.centralized else [agent, agent], lora=cfg.lora.lora_rank > 0)
    items, held_out = ([{"prompt": topic} for topic in topics] for topics in (TOPICS, HELD_OUT[: cfg.held_out]))
    reward = make_reward(story_length_ratio, num_agents=2)
    env = RewardEnvironment(reward, [setup_prompt, story_prompt])
    env = Centralized(env, num_agents=2) if cfg.centralized else env
    if cfg.seeds:
        return train_seeds(team, env, items, cfg, params=params, seeds=cfg.seeds, eval_items=held_out)
    return [train(team, env, items, cfg, params=params, eval_items=held_out)]


def show(cfg: StoryConfig, results: list[TrainResult]) -> None:
    for seed, result in zip(cfg.seeds or [cfg.run.seed], results, strict=True):
        which = f"seed {seed}: " if cfg.seeds else ""
        if result.before:  # not of a resumed run
            print(f"{which}held-out reward before {with_interval(*result.before[:2])}")
        if result.after:
            print(f"{which}held-out reward after {with_interval(*result.after[:2])}")
        print(f"{which}{end_of(result)}")


def main() -> None:
    command(StoryConfig, run, show)


if __name__ == "__main__":
    main()
