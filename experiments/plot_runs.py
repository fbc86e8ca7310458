"""Draw the learning curves of runs as one picture.

Command: python -m experiments.plot_runs runs/story_length-0 runs/story_length-1 --out experiments/story_length.png
Needs matplotlib (the extra `plot`). The left panel has the training reward (thin: every update; thick: mean of ten) and the
reward on held-out prompts (points); the right panel each agent's completion length in tokens. `--each` gives every run a panel
of its own in place of these two, for runs whose rewards have nothing to do with each other.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from jmarl.training.logs.metrics_writer import read_rows


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draw the learning curves of runs as one picture."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories, each with a metrics.jsonl."""
    out: Path = Path("curves.png")
    """Picture to write."""
    parts: tuple[str, ...] = ()
    """Columns to draw at the right in place of lengths, such as reward/level_3."""
    each: bool = False
    """A panel of its own for each run's reward, and nothing else."""


def check(run: Path, rows: list[dict], name: str) -> None:
    """Refuse a column that a run does not have."""
    known = dict.fromkeys(key for row in rows for key in row)
    if name not in known:
        raise SystemExit(f"{run} has no column {name}; it has {', '.join(known)}")


def column(rows: list[dict], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Updates done and values of the rows that have this column."""
    found = [(row.get("eval/updates", row["step"] + 1), row[name]) for row in rows if name in row]
    return np.array([updates for updates, _ in found]), np.array([value for _, value in found], float)


def draw(axes, rows: list[dict], name: str, **how) -> None:
    """A column, its mean of ten updates, and points of held-out prompts."""
    updates, values = column(rows, name)
    window = min(10, len(values))
    axes.plot(updates, values, alpha=0.25, linewidth=0.8, color=how["color"])
    axes.plot(updates[window - 1 :], np.convolve(values, np.ones(window) / window, "valid"), **how)
    held_out = "eval/reward" if name == "reward/mean" else f"eval/{name}"
    axes.plot(*column(rows, held_out), "o", color=how["color"], markersize=5)


def rows_of(run: Path) -> list[dict]:
    """Of a run that learned from rollouts."""
    if not (run / "metrics.jsonl").is_file():
        raise SystemExit(f"{run} has no metrics.jsonl: give the output directory of a run")
    rows = read_rows(run / "metrics.jsonl")
    check(run, rows, "reward/mean")
    return rows


def panels(cfg: Plot, plt) -> None:
    """Every run by itself."""
    wide = min(3, len(cfg.runs))
    high = -(-len(cfg.runs) // wide)
    figure, grid = plt.subplots(high, wide, figsize=(3.6 * wide, 2.7 * high), constrained_layout=True, squeeze=False)
    for axes in grid.flat[len(cfg.runs) :]:
        axes.axis("off")
    for axes, run in zip(grid.flat, cfg.runs, strict=False):
        draw(axes, rows_of(run), "reward/mean", color="C0")
        axes.set(title=run.name, xlabel="update", ylabel="reward")
    figure.savefig(cfg.out, dpi=130)
    print(cfg.out)


def main() -> None:
    cfg = tyro.cli(Plot)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if cfg.each:
        return panels(cfg, plt)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
    for i, run in enumerate(cfg.runs):
        rows = rows_of(run)
        draw(left, rows, "reward/mean", color=f"C{i}", label=run.name)
        for j, (part, style) in enumerate(zip(cfg.parts, ("-", "--", ":", "-.") * len(cfg.parts), strict=False)):
            check(run, rows, part)
            draw(right, rows, part, color=f"C{i + j}", linestyle=style, label=part)
        if cfg.parts:
            continue
        for agent, style in enumerate(("-", "--", ":", "-.")):
            several = any(f"turn_0/agent_{agent}/length" in row for row in rows)  # then of the first turn
            updates, length = column(rows, f"{'turn_0/' if several else ''}agent_{agent}/length")
            if len(updates):
                right.plot(updates, length, style, color=f"C{i}", linewidth=1, label=f"agent {agent}" if i == 0 else None)
    left.set(xlabel="update", ylabel="reward", title="Reward: mean of ten updates; points: held-out prompts", ylim=(0, None))
    if cfg.parts:
        right.set(xlabel="update", ylabel="part of the reward", title="Its parts: the same", ylim=(0, None))
    else:
        right.set(xlabel="update", ylabel="tokens", title="Length of completions")
    left.legend(loc="lower right", fontsize=8)
    right.legend(fontsize=8)
    figure.savefig(cfg.out, dpi=130)
    print(cfg.out)


if __name__ == "__main__":
    main()
