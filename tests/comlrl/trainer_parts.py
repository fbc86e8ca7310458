"""Classes, a reward and settings of small trainers under CoMLRL's names, and what their runs write."""

from __future__ import annotations

import json
from pathlib import Path

from jmarl.comlrl import trainers

# One program with those of `tests.house`, but for what each algorithm of CoMLRL does otherwise.
FEW = dict(
    num_prompts=2, num_generations=3, max_new_tokens=4, temperature=1.0, top_p=1.0, top_k=0, output_dir="", progress=False
)  # fmt: skip


def classes(*names: str) -> dict[str, tuple]:
    """The trainer and the configuration of each algorithm, of names such as MAGRPO."""
    return {
        name.lower().replace("iter", "_iter"): tuple(getattr(trainers, f"{name}{kind}") for kind in ("Trainer", "Config"))
        for name in names
    }


def lengths(a, b):
    return [abs(len(y) - len(x)) / 10 for x, y in zip(a, b, strict=True)]


def rows(output_dir) -> list[dict]:
    return [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]
