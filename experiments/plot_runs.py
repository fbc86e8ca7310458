"""Draw the learning curves of runs as one picture.

Command: python -m experiments.plot_runs runs/story_length-0 runs/story_length-1 --out curves.png
Needs matplotlib (the extra `plot`). The left panel has the training reward (thin: every update; thick: mean of ten) and the
reward on held-out prompts (points). The right panel has the completion length of each agent in tokens, or the columns of
--parts. Runs on given data have no rewards: left is their loss, and right the accuracy of each agent on pairs. With --each,
there is one panel of rewards or losses per run instead, for runs that cannot be compared.
Time: seconds.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from experiments.tables import pyplot
from jmarl.config import check
from jmarl.logs.metrics_writer import read_rows

STYLES = ("-", "--", ":", "-.")
REWARD, LOSS = "reward/mean", "loss"  # the columns that are drawn first


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draw the learning curves of runs as one picture."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories, each with a metrics.jsonl."""
    out: Path = Path("curves.png")
    """Picture to write."""
    parts: tuple[str, ...] = ()
    """Columns to draw in the right panel instead of lengths, such as reward/level_3."""
    panels: Annotated[bool, tyro.conf.arg(name="each")] = False
    """Draw only rewards or losses, with one panel per run."""

    def __post_init__(self) -> None:
        check("runs", self.runs, len(self.runs) > 0, "at least one run directory")


def check_column(run: Path, rows: list[dict], name: str) -> None:
    """Exit with an error if a run does not have a column."""
    known = dict.fromkeys(key for row in rows for key in row)
    if name not in known:
        raise SystemExit(f"{run} has no column {name}; it has {', '.join(known)}")


def column(rows: list[dict], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of updates and the values of the rows that have a column."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    return np.array([updates for updates, _ in points]), np.array([value for _, value in points], float)


def draw(axes: Any, rows: list[dict], name: str, color: str, label: str | None = None, linestyle: str = "-") -> None:
    """Draw a column, its mean over ten updates, and points for its evaluations on held-out prompts."""
    updates, values = column(rows, name)
    window = min(10, len(values))
    axes.plot(updates, values, alpha=0.25, linewidth=0.8, color=color)
    mean = np.convolve(values, np.ones(window) / window, "valid")
    axes.plot(updates[window - 1 :], mean, color=color, label=label, linestyle=linestyle)
    held_out = "eval/reward" if name == REWARD else f"eval/{name}"
    axes.plot(*column(rows, held_out), "o", color=color, markersize=5)


def draw_agents(axes: Any, rows: list[dict], name: str, color: str, labelled: bool) -> None:
    """Draw a column of each agent, such as the length of completions; with several turns that of the first."""
    for agent, style in enumerate(STYLES):
        own = f"agent_{agent}/{name}"
        if any(f"turn_0/{own}" in row for row in rows):
            own = f"turn_0/{own}"
        updates, values = column(rows, own)
        if len(updates):
            axes.plot(updates, values, style, color=color, linewidth=1, label=f"agent {agent}" if labelled else None)
    axes.plot(*column(rows, f"eval/{name}"), "o", color=color, markersize=5)


def rows_of(run: Path) -> tuple[list[dict], str]:
    """Return the rows of a run, and what is drawn of them first: the reward, or the loss of a run on given data."""
    if not (run / "metrics.jsonl").is_file():
        raise SystemExit(f"{run} has no metrics.jsonl: give the output directory of a run")
    rows = read_rows(run / "metrics.jsonl")
    name = REWARD if any(REWARD in row for row in rows) else LOSS
    check_column(run, rows, name)
    return rows, name


def draw_panels(cfg: Plot) -> Any:
    """Return a figure with one panel of rewards per run."""
    columns = min(3, len(cfg.runs))
    lines = -(-len(cfg.runs) // columns)
    size = (3.6 * columns, 2.7 * lines)
    figure, grid = pyplot().subplots(lines, columns, figsize=size, constrained_layout=True, squeeze=False)
    for axes in grid.flat[len(cfg.runs) :]:
        axes.axis("off")
    for axes, run in zip(grid.flat, cfg.runs, strict=False):
        rows, name = rows_of(run)
        draw(axes, rows, name, "C0")
        axes.set(title=run.name, xlabel="update", ylabel="reward" if name == REWARD else "loss")
    return figure


def draw_together(cfg: Plot) -> Any:
    """Return a figure with the rewards or losses of all runs, and beside them lengths, accuracies or parts of the rewards."""
    runs = [rows_of(run) for run in cfg.runs]
    names = [name for _, name in runs]
    if len({*names}) > 1:
        with_reward, without = (cfg.runs[names.index(name)] for name in (REWARD, LOSS))
        raise SystemExit(f"{without} learned from given data and has no rewards, {with_reward} has some: draw them with --each")
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
    first, name = ("reward", "length") if names[0] == REWARD else ("loss", "accuracy")
    for i, (run, (rows, main_column)) in enumerate(zip(cfg.runs, runs, strict=True)):
        draw(left, rows, main_column, f"C{i}", run.name)
        for j, part in enumerate(cfg.parts):
            check_column(run, rows, part)
            draw(right, rows, part, f"C{i + j}", part, STYLES[j % len(STYLES)])
        if not cfg.parts:
            draw_agents(right, rows, name, f"C{i}", labelled=i == 0)
    held_out = "prompts" if first == "reward" else "data"
    left.set(xlabel="update", ylabel=first, title=f"{first.capitalize()}: mean of ten updates; points: held-out {held_out}")
    if first == "reward":
        left.set(ylim=(0, None))
    if cfg.parts and first == "loss":
        right.set(xlabel="update", title="The same of other columns")
    elif cfg.parts:
        right.set(xlabel="update", ylabel="part of the reward", title="Its parts: the same", ylim=(0, None))
    elif name == "length":
        right.set(xlabel="update", ylabel="tokens", title="Length of completions")
    else:
        right.set(xlabel="update", ylabel="accuracy", title="Share of pairs that are ranked as given", ylim=(0, 1.02))
    left.legend(loc="lower right" if first == "reward" else "upper right", fontsize=8)
    if right.get_legend_handles_labels()[0]:
        right.legend(fontsize=8)
    else:  # texts are imitated, not ranked
        right.set(title=f"These runs have no {name}; --parts draws other columns")
    return figure


def main() -> None:
    cfg = tyro.cli(Plot)
    figure = draw_panels(cfg) if cfg.panels else draw_together(cfg)
    figure.savefig(cfg.out, dpi=130)
    print(cfg.out)


if __name__ == "__main__":
    main()
