"""Two language models learn to tell a story together: agent 0 writes a short setup, agent 1 a story 2 to 3 times as long.

Claim: the prompts ask for a setup and a story and never name the ratio; the agents learn it from the joint reward alone.
Command: python -m experiments.story_length            (flags: --help)
Reward: 1 if the story has 2 to 3 times as many characters as the setup, else exp(-distance of the ratio from [2, 3]). Joint
    mode cross combines each setup with all stories of its prompt and each story with all setups, so that the mean over partners
    removes the noise of a single partner's length.
Expected: reward 0.89 to 0.94 in updates 31 to 40 and 0.89 to 0.94 on held-out topics (seeds 0 to 2), in 10 minutes on 2 cores.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Self

from experiments.report import command, last_rewards, with_interval
from experiments.start import TeamTraining, load_team
from jmarl.algorithms import find_row
from jmarl.config import Episodes, Optimizer, Range, Run, Sampling, check
from jmarl.envs.centralized import Centralized
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward, story_length_ratio
from jmarl.envs.writing.story import HELD_OUT, TOPICS, setup_prompt, story_prompt
from jmarl.runs.checks import check_seeds, check_settings
from jmarl.runs.records import TrainResult
from jmarl.runs.seeds import train_seeds
from jmarl.runs.train import train


@dataclasses.dataclass(frozen=True)
class StoryConfig(TeamTraining):
    """Two agents, one story."""

    joint_mode: Literal["auto", "aligned", "cross", "counterfactual"] = "auto"
    """auto: cross, or aligned for algorithms that cannot use it (madpo, madpo_iter, marlhf, marlhf_iter, c3)."""
    held_out: Annotated[int, Range(0, len(HELD_OUT))] = len(HELD_OUT)
    """Held-out topics to evaluate on before and after training; 0: none."""
    seeds: tuple[int, ...] = ()
    """Train one run per seed, all in one program (jmarl.runs.seeds), in output_dir/seed_0, …. Set lora_rank too, because
    otherwise each run has full weights of its own. Empty: one run, from `seed`."""
    centralized: bool = False
    """One model writes both texts, in tagged sections of one completion (jmarl.envs.centralized); give it the tokens of both.
    The default model wrote no section in 64 tries, so it earns and learns nothing: choose a larger one."""
    run: Run = Run(num_updates=40, output_dir="runs/story_length")
    episodes: Episodes = Episodes(num_prompts=2, num_generations=8, chat=True)
    sampling: Sampling = Sampling(max_new_tokens=64)
    optimizer: Optimizer = Optimizer(learning_rate=5e-05)

    def __post_init__(self) -> None:
        mode = self.joint_mode
        if mode == "auto":
            aligned = find_row(self.algorithm).data != "rollouts" or self.algorithm == "c3"  # c3 makes it counterfactual
            mode = "aligned" if aligned else "cross"
        object.__setattr__(self, "episodes", dataclasses.replace(self.episodes, joint_mode=mode))
        super().__post_init__()

    @property
    def num_agents(self) -> int:
        return 1 if self.centralized else 2

    def check_together(self) -> None:
        super().check_together()
        check("num_turns", self.episodes.num_turns, self.episodes.num_turns == 1, "1: a story has no later turns")

    def check_run(self) -> None:
        if self.seeds:
            check_seeds(self.seeds, self)
        else:
            check_settings(self)

    def for_seed(self, seed: int, **settings: Any) -> Self:
        """Return the settings of the run of one seed."""
        return super().for_seed(seed, seeds=(), **settings)


def run(cfg: StoryConfig) -> list[TrainResult]:
    """Train, and return one result per seed."""
    team, params = load_team(cfg.model, cfg.num_agents, cfg)
    items, held_out = ([{"prompt": topic} for topic in topics] for topics in (TOPICS, HELD_OUT[: cfg.held_out]))
    env = RewardEnvironment(make_reward(story_length_ratio, num_agents=2), [setup_prompt, story_prompt])
    env = Centralized(env, num_agents=2) if cfg.centralized else env
    if cfg.seeds:
        return train_seeds(team, env, items, cfg, params=params, seeds=cfg.seeds, eval_items=held_out)
    return [train(team, env, items, cfg, params=params, eval_items=held_out)]


def show(cfg: StoryConfig, results: list[TrainResult]) -> None:
    for seed, result in zip(cfg.seeds or [cfg.run.seed], results, strict=True):
        prefix = f"seed {seed}: " if cfg.seeds else ""
        if result.before:  # a resumed run has none
            print(f"{prefix}held-out reward before {with_interval(*result.before[:2])}")
        if result.after:
            print(f"{prefix}held-out reward after {with_interval(*result.after[:2])}")
        print(f"{prefix}{last_rewards(result)}")


if __name__ == "__main__":
    command(StoryConfig, run, show)
