"""Time steps of a league against the share of episodes that meet an opponent, and against no league.

Claim: an opponent costs what its rows and the copy of its weights cost.
Command: python -m experiments.bench.opponents        (flags: --help)
A team of two with small random models writes completions of full length for one turn; the longer text wins. Each share is
trained in turn, several times, in this process; a league has one slot, and the share is that of the items. Prints a table:
medians of warm steps (from rewards to rewards) in seconds of the clock and of the CPU, the ratio of both to no league, bytes of
both weights side by side, and the seconds that it takes to put them there. CPU seconds are for machines that do other work.
Expected: see experiments/README.md. Time: 3 minutes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from experiments.bench.seeds import small_model
from experiments.tables import markdown_table
from jmarl.config import Count, TrainConfig
from jmarl.envs.base import Step, TextEnvironment
from jmarl.runs.train import train
from jmarl.team import make_team

WARM_UP = 3  # steps of a run that are not counted


@dataclasses.dataclass(frozen=True)
class OpponentsBench:
    """Shares of a step's items against an opponent; prints a table."""

    shares: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Shares; 0: no league."""
    layers: Count = 4
    """Layers of both models."""
    width: Count = 128
    """Hidden size of both models, a multiple of 32."""
    num_prompts: Count = 8
    """Items of a step."""
    num_generations: Count = 8
    """Completions of each."""
    max_new_tokens: Count = 32
    """Tokens of each."""
    updates: Count = 12
    """Updates of a run."""
    repeats: Count = 3
    """Runs of each share, in turn."""


class LongerText(TextEnvironment):
    """Both agents write at once; the longer text wins. It takes the time whenever an episode begins."""

    roles, reward_range = ("first", "second"), (-1.0, 1.0)

    def __init__(self) -> None:
        self.begun: list[tuple[float, float]] = []  # of each episode: seconds of the clock and of the CPU

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[Any, list[str]]:
        self.begun.append((time.perf_counter(), time.process_time()))
        return task, [task["prompt"]] * 2

    def step(self, state: Any, messages: Sequence[str], rng: np.random.Generator) -> Step:
        result = float(np.sign(len(messages[0]) - len(messages[1])))
        return Step(state, ["", ""], [result, -result], True)


def time_steps(options: OpponentsBench, share: float) -> tuple[np.ndarray, dict[str, float]]:
    """Train, and return the seconds of each warm step, [T, 2] by clock and CPU, and the last row of the log."""
    league = dict(snapshots=1, snapshot_every=10**6, opponent_share=share) if share else {}
    agent, env = small_model(options.layers, options.width), LongerText()
    team, params = make_team([agent, agent])
    items = [{"prompt": f"task {i}"} for i in range(options.num_prompts)]
    with tempfile.TemporaryDirectory() as directory:
        cfg = TrainConfig.of(
            num_updates=options.updates, num_prompts=options.num_prompts, num_generations=options.num_generations,
            max_new_tokens=options.max_new_tokens, min_new_tokens=options.max_new_tokens, learning_rate=1e-4, progress=False,
            per_agent="vmap", mesh="agent=1", output_dir=directory, save_every=0, **league,
        )  # fmt: skip
        if train(team, env, items, cfg, params=params).interrupted:
            raise KeyboardInterrupt
        lines = (Path(directory) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    begun = np.array(env.begun[-options.updates * options.num_prompts :: options.num_prompts])
    steps = np.diff(begun, axis=0)[WARM_UP:]
    print(f"share {share:g}: step {np.median(steps, 0)[0]:.3f} s, {np.median(steps, 0)[1]:.3f} s of CPU", file=sys.stderr)
    return steps, json.loads(lines[-1])


def main() -> None:
    options = tyro.cli(OpponentsBench)
    runs = [[time_steps(options, share) for share in options.shares] for _ in range(options.repeats)]
    rows, first = [], None
    for share, own in zip(options.shares, zip(*runs, strict=True), strict=True):
        clock, cpu = np.median(np.concatenate([steps for steps, _ in own]), 0)
        first = (clock, cpu) if first is None else first
        log = own[-1][1]
        copied = log.get("league/copied_bytes", 0) / 2**20, 1000 * float(np.median([x.get("league/copy_s", 0) for _, x in own]))
        cells = (
            f"{share:g}",
            f"{clock:.3f}",
            f"{clock / first[0]:.2f}",
            f"{cpu:.3f}",
            f"{cpu / first[1]:.2f}",
            f"{log['tokens']:.0f}",
        )
        rows.append([*cells, f"{copied[0]:.1f}", f"{copied[1]:.1f}"])
    head = ["share", "step, s", "ratio", "CPU, s", "ratio", "tokens learned from", "weights beside, MiB", "copy, ms"]
    print(markdown_table(head, rows))


if __name__ == "__main__":
    main()
