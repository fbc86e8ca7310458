"""Summarize a finished run in a small JSON file: numbers only, from which figures are drawn again without training. Not an
experiment."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jmarl.files.run_files import leaves
from jmarl.logs.metrics_writer import read_rows

POINTS = 60  # of a curve
RESULTS = Path(__file__).parent / "results"
NOT_HASHED = {  # settings that change nothing that is learned
    "output_dir", "seed", "seeds", "resume", "resume_step", "progress", "experiment_name", "description", "tags", "save_every",
    "save_minutes", "save_total_limit", "keep_every", "save_models",
}  # fmt: skip
PHASES = ("time/sampling", "time/rewards", "time/update", "time/evaluation", "time/compiling", "time/step_s")


def write_record(claim: str, name: str, directory: Path, seconds: float, commit: str) -> Path:
    """Write the numbers of a run to results/CLAIM/NAME.json, and return the file.

    name: of the run below the directory of its claim, such as way=team/seed_0. seconds: CPU time of its process; of several
    seeds in one program the share of this one. commit: that it ran on.
    """
    file = RESULTS / claim / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    where = {"claim": claim, "run": name, "commit": commit, "cpu_seconds": round(seconds)}
    text = json.dumps(where | summary(directory), allow_nan=False)
    file.write_text(text.replace('], "', '],\n "').replace('}, "', '},\n "') + "\n", encoding="utf-8")
    return file


def write_evaluation(claim: str, name: str, agents: Sequence[Path], flags: Sequence[str], cpu_seconds: float = 0) -> float:
    """Evaluate agents by `jmarl eval`, write their numbers to results/CLAIM/NAME.json, and return their mean reward. Without
    agents those of the flags are evaluated before training. cpu_seconds: of their training."""
    file = RESULTS / claim / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    models = ["--model", *map(str, agents)] if agents else []
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "evaluation.json"
        command = [sys.executable, "-m", "jmarl", "eval", *models, *flags, "--output", str(output)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(output.read_text(encoding="utf-8"))
    measures = {f"measures/{measure}": numbers["mean"] for measure, numbers in result["measures"].items()}
    record = {
        "claim": claim, "run": name, "commit": checked_out(), "cpu_seconds": cpu_seconds, "updates": 0,
        "tokens": 0, "reward_calls": result["episodes"], "curve": {"tokens": [], "reward/mean": []},
        "evaluations": [{"updates": 0, "tokens": 0, "reward": result["mean"], **measures}],
    }  # fmt: skip
    file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return result["mean"]


def summary(directory: Path) -> dict[str, Any]:
    """Return the numbers of a run: its curve over tokens, its evaluations, and what it ran on."""
    rows = read_rows(directory / "metrics.jsonl")
    updates = [row for row in rows if "eval/updates" not in row]
    tokens: dict[int, float] = {0: 0.0}
    for row in updates:
        tokens[int(row["step"])] = tokens[int(row["step"]) - 1] + row.get("tokens", 0.0)
    evaluations = [
        {"tokens": tokens[int(row["eval/updates"])]}
        | {name.removeprefix("eval/"): rounded(x) for name, x in row.items() if name.startswith("eval/") and math.isfinite(x)}
        for row in rows
        if "eval/updates" in row
    ]
    newest = max(directory.glob("attempts/*/start.json"), key=lambda file: int(file.parent.name))
    start = json.loads(newest.read_text(encoding="utf-8"))
    return {
        "settings": settings_hash(start["settings"]),
        "versions": {name: x for name, x in start["versions"].items() if name in ("jax", "flax", "optax")},
        "machine": f"{os.cpu_count()} cores, {start['platform']}",
        "updates": len(updates),
        "tokens": tokens[len(updates)],
        "reward_calls": reward_calls(directory, updates),
        "seconds": {name.removeprefix("time/"): rounded(sum(row.get(name, 0.0) for row in updates)) for name in PHASES},
        "step_s": rounded(statistics.median([row["time/step_s"] for row in updates if "time/step_s" in row] or [0.0])),
        "curve": curve(updates, tokens),
        "evaluations": evaluations,
    }


def reward_calls(directory: Path, updates: Sequence[Mapping[str, float]]) -> float:
    """Return how many joint actions were judged. Runs of one turn do not log it: their updates have equally many."""
    if any("env_steps" in row for row in updates):
        return sum(row.get("env_steps", 0.0) for row in updates)
    with gzip.open(directory / "completions.jsonl.gz", "rt", encoding="utf-8") as file:
        records = map(json.loads, file)
        rewards = next(record["turns"][0]["rewards"] for record in records if record["kind"] == "train")
    return float(len(updates) * len(rewards) * len(rewards[0]))


def curve(updates: Sequence[Mapping[str, float]], tokens: Mapping[int, float]) -> dict[str, list[float]]:
    """Return the mean reward (or loss) of at most `POINTS` stretches of updates, and the tokens at their ends."""
    column = "reward/mean" if any("reward/mean" in row for row in updates) else "loss"
    size = -(-len(updates) // POINTS)
    parts = [updates[i : i + size] for i in range(0, len(updates), size)]
    values = [[row[column] for row in part if column in row] for part in parts]
    return {
        "tokens": [tokens[int(part[-1]["step"])] for part, x in zip(parts, values, strict=True) if x],
        column: [rounded(sum(x) / len(x)) for x in values if x],
    }


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Return a digest of the settings of a run that decide what is learned, without its seed."""
    compared = {name: value for name, value in leaves(settings).items() if name not in NOT_HASHED}
    return hashlib.sha256(json.dumps(compared, sort_keys=True, default=str).encode()).hexdigest()[:12]


def checked_out() -> str:
    """Return the commit that is checked out, with + behind it if files differ from it."""
    here = Path(__file__).parent
    return subprocess.check_output(
        ["git", "describe", "--always", "--abbrev=10", "--dirty=+"], cwd=here, encoding="utf-8"
    ).strip()


def rounded(value: float) -> float:
    """Return a number with six digits."""
    return float(f"{value:.6g}")
