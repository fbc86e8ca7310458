"""Pair the agents of finished runs of `story_length` with each other: who can tell a story with whom?

Command: python -m experiments.cross_play --runs runs/story_length-0 runs/story_length-1 --picture cross_play.png
Prints the matrix (row: whose agent 0 writes the setup, column: whose agent 1 tells the story) on held-out topics, self-play,
zero-shot score and one line of JSON. Leave the settings at those of the runs: they are not saved beside the models. Needs
matplotlib for the picture only (the extra `plot`).
Seen with two runs of five updates (48 tokens, 6 topics): self-play 0.610 ± 0.121, zero-shot 0.610 ± 0.114, gap 0.000 ± 0.010,
in 78 s on two busy cores. The cell of the run with this seed was that run's last evaluation to all digits (0.6365211266489896).
Not measured: runs of full length, and whether a gap grows with training.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

import tyro

from jmarl.config import TrainConfig, check
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
    """Of the completions; with a run's own seed and settings the diagonal has what it was evaluated by at its end."""
    generations: int = 4
    """Completions a topic and agent."""
    joint_mode: Literal["aligned", "cross"] = "cross"
    """aligned: completion g of both agents is judged; cross: all combinations."""
    max_new_tokens: int = 64
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    chat: bool = True
    """Put prompts into the tokenizer's chat template."""
    held_out: int = len(HELD_OUT)
    """Held-out topics that are played."""
    max_pairings: int = MAX_PAIRINGS
    """More pairings than this are refused."""
    mesh: str = "auto"
    """Devices by axis; agent=1 is one device; auto: agents over the devices there are."""
    out: Path | None = None
    """File for the JSON, beside printing it."""
    picture: Path | None = None
    """File for a picture of the matrix."""

    def __post_init__(self):
        check("held_out", self.held_out, 1 <= self.held_out <= len(HELD_OUT), f"in 1..{len(HELD_OUT)}")
        check("generations", self.generations, self.generations >= 1, ">= 1")
        self.settings()  # refuses a bad setting before models are loaded

    def settings(self) -> TrainConfig:
        return TrainConfig.of(
            seed=self.seed,
            eval_generations=self.generations,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            chat=self.chat,
            joint_mode=self.joint_mode,
            mesh=self.mesh,
        )


def run(cfg: CrossPlayConfig) -> CrossPlay:
    names, teams = load_runs(cfg.runs, chat=cfg.chat, num_agents=2, max_pairings=cfg.max_pairings)
    env = RewardEnvironment(make_reward(story_length_ratio, num_agents=2), [setup_prompt, story_prompt])
    items = [{"prompt": topic} for topic in HELD_OUT[: cfg.held_out]]
    return cross_play(teams, items, env, cfg.settings(), names=names, max_pairings=cfg.max_pairings)


def draw(played: CrossPlay, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    k, mean, interval = len(played.names), played.mean, played.interval
    figure, axes = plt.subplots(figsize=(2.2 + 1.1 * k, 1.6 + 1.0 * k), constrained_layout=True)
    image = axes.imshow(mean, cmap="viridis", vmin=0, vmax=1)
    for i in range(k):
        for j in range(k):
            dark = not mean[i, j] > 0.6
            text = f"{mean[i, j]:.2f}\n± {interval[i, j]:.2f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=9, color="white" if dark else "black")
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
        cfg.out.write_text(line + "\n")
    if cfg.picture is not None:
        draw(played, cfg.picture)


if __name__ == "__main__":
    main()
