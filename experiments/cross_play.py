"""Combine the agents of finished runs of `story_length`: who can tell a story with whom?

Claim: the matrix shows whether agents also work with partners from other runs (self-play against zero-shot).
Command: python -m experiments.cross_play --runs runs/story_length-0 runs/story_length-1 --picture cross_play.png
Prints the matrix of rewards on held-out topics (row: the run of agent 0, which writes the setup; column: the run of agent 1,
which writes the story), the self-play and zero-shot scores, and one line of JSON. Use the settings of the runs, which are not
saved with the models. Only --picture needs matplotlib (the extra `plot`).
Expected (two runs of five updates, 48 tokens, 6 topics): self-play 0.610 ± 0.121, zero-shot 0.610 ± 0.114, gap 0.000 ± 0.010,
    in 78 s on two busy cores. The diagonal cell of the run with the same seed equals the last evaluation of that run to all
    digits (0.6365211266489896). Not measured: runs of full length, and whether the gap grows with training.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from experiments.start import train_config
from experiments.tables import pyplot
from jmarl.config import Count, Range, TrainConfig, check_fields
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward, story_length_ratio
from jmarl.envs.writing.story import HELD_OUT, setup_prompt, story_prompt
from jmarl.evaluation.cross_play import MAX_PAIRINGS, cross_play, load_runs
from jmarl.evaluation.zero_shot import CrossPlay


@dataclasses.dataclass(frozen=True)
class CrossPlayConfig:
    """Finished runs, and how their agents are sampled."""

    runs: tuple[Path, ...]
    """Output directories of at least two finished runs (or directories with agent_0 and agent_1)."""
    seed: int = 0
    """Seed of the completions. With the seed and settings of a run, its diagonal cell repeats its last evaluation."""
    generations: Count = 4
    """Completions per topic and agent."""
    joint_mode: Literal["aligned", "cross"] = "cross"
    """aligned: the g-th completions of both agents are judged together; cross: all combinations."""
    max_new_tokens: int = 64
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    chat: bool = True
    """Put prompts into the tokenizer's chat template."""
    held_out: Annotated[int, Range(1, len(HELD_OUT))] = len(HELD_OUT)
    """Number of held-out topics."""
    max_pairings: int = MAX_PAIRINGS
    """Refuse more pairings than this."""
    mesh: str = "auto"
    """Devices by axis; agent=1 is one device; auto: agents over all devices."""
    out: Path | None = None
    """File for the line of JSON, which is also printed."""
    picture: Path | None = None
    """File for a picture of the matrix."""

    def __post_init__(self) -> None:
        check_fields(self, ["generations", "held_out"])
        self.settings()  # refuses wrong settings before models are loaded

    def settings(self) -> TrainConfig:
        return train_config(self, eval_generations=self.generations)


def run(cfg: CrossPlayConfig) -> CrossPlay:
    """Play all pairings on held-out topics."""
    names, teams = load_runs(cfg.runs, chat=cfg.chat, num_agents=2, max_pairings=cfg.max_pairings)
    env = RewardEnvironment(make_reward(story_length_ratio, num_agents=2), [setup_prompt, story_prompt])
    items = [{"prompt": topic} for topic in HELD_OUT[: cfg.held_out]]
    return cross_play(teams, items, env, cfg.settings(), names=names, max_pairings=cfg.max_pairings)


def draw(played: CrossPlay, picture: Path) -> None:
    """Write a picture of the matrix."""
    k, mean, interval = len(played.names), played.mean, played.interval
    figure, axes = pyplot().subplots(figsize=(2.2 + 1.1 * k, 1.6 + 1.0 * k), constrained_layout=True)
    image = axes.imshow(mean, cmap="viridis", vmin=0, vmax=1)
    for (i, j), value in np.ndenumerate(mean):
        text = f"{value:.2f}\n± {interval[i, j]:.2f}"
        axes.text(j, i, text, ha="center", va="center", fontsize=9, color="black" if value > 0.6 else "white")
    axes.set(xticks=range(k), yticks=range(k), xlabel="agent 1 (story) of", ylabel="agent 0 (setup) of")
    axes.set_xticklabels(played.names, rotation=30, ha="right")
    axes.set_yticklabels(played.names)
    axes.set_title(f"self-play {played.self_play.mean:.3f}, zero-shot {played.zero_shot.mean:.3f}", fontsize=10)
    figure.colorbar(image, label="reward")
    figure.savefig(picture, dpi=130)


def main() -> None:
    cfg = tyro.cli(CrossPlayConfig)
    played = run(cfg)
    print(played.table())
    line = json.dumps(played.summary(), allow_nan=False)
    print(line)
    if cfg.out is not None:
        cfg.out.write_text(line + "\n", encoding="utf-8")
    if cfg.picture is not None:
        draw(played, cfg.picture)


if __name__ == "__main__":
    main()
