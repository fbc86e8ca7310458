"""Train a team on given pairs, evaluate it by its reward, and write its numbers as a record.

Command: python -m experiments.evidence.preferences [METHOD ...]   (all without one; the same command again goes on)
Each run is `jmarl train`, and then `jmarl eval` with 320 joint actions on the prompts of the first script; `sft` has a run for
each agent, `untrained` none. Models are removed when they are evaluated. Time: 2 to 6 minutes a run on one core.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from experiments.evidence.record import RESULTS, write_evaluation

HERE = Path(__file__).parent
ROOT = Path("runs/evidence/preferences")
CLAIM, SEEDS = "preferences_evaluated", 5
RUNS = {"untrained": [], "sft": ["sft_0", "sft_1"], "dpo": ["dpo"], "madpo": ["madpo"], "madpo_iter": ["madpo_iter"]}
FLAGS = ["--config", str(HERE / "first_script.yaml"), "--split", "train", "-n", "320", "--num-generations", "64"]


def make(method: str, seed: int) -> None:
    """Train a team with a method, evaluate it and write its record."""
    names, before = [f"method={run}/seed_{seed}" for run in RUNS[method]], os.times()
    directory = ROOT / f"{method}_{seed}"
    shutil.rmtree(directory, ignore_errors=True)  # of a run that was interrupted: its seconds would be counted in part
    settings = ["train", "--config", str(HERE / "preferences.yaml"), "--output", str(directory)]
    for name in names:
        command = [sys.executable, "-m", "jmarl", *settings, "--only", name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    agents = [agent for name in names for agent in sorted((directory / name / "models").iterdir())]
    reward = write_evaluation(
        CLAIM, f"method={method}/seed_{seed}", agents, [*FLAGS, "--seeds", str(100 + seed)], cpu_seconds=round(seconds)
    )
    print(f"{method}, seed {seed}: {reward:.3f}, trained in {abs(seconds) / 60:.1f} min of CPU", flush=True)
    shutil.rmtree(directory, ignore_errors=True)


def main(methods: list[str]) -> None:
    if unknown := {*methods} - {*RUNS}:
        raise SystemExit(f"give some of {', '.join(RUNS)}, not {', '.join(sorted(unknown))}")
    for seed in range(SEEDS):
        for method in methods or RUNS:
            if not (RESULTS / CLAIM / f"method={method}" / f"seed_{seed}.json").is_file():
                make(method, seed)


if __name__ == "__main__":
    main(sys.argv[1:])
