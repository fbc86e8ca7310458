"""Time steps that compute rewards of programs while the next prompts are sampled, against one after the other.

Claim: the parameters are equal bit for bit, and only the rewards of the last part of the prompts add to the time of a step.
Command: python -m experiments.bench.overlap            (flags: --help)
Steps are run in three ways: all prompts at once, in parts one after the other, and in parts with overlap. Prints a JSON object
for each: the median seconds of a warm step, and the seconds of its rewards. A last object says whether the last two ways end
with equal parameters.
Expected: with `--num-prompts 2 --updates 3 --max-new-tokens 32 --slow-s 0.5` on two cores, steps of 13.5 s, 15.0 s and 12.3 s,
    and equal parameters. Time: about two minutes (estimated).
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import tyro

from experiments.start import load_team, train_config
from jmarl.config import Count, NotNegative, check, check_fields
from jmarl.envs.base import Answer, Texts
from jmarl.envs.code import problems as code_problems
from jmarl.envs.code.generation import CodeGeneration
from jmarl.logs.metrics_writer import read_rows
from jmarl.runs.train import train
from jmarl.sandbox import Limits, Sandbox
from jmarl.types import TeamState

ITEMS = code_problems.generate_problems(64, difficulty=(1, 1))


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Time of a step with and without overlap of sampling and rewards."""

    model: str = "smollm2-135m-instruct"
    """Model of both agents: a name, a directory, a .gguf file or a Hub id."""
    num_prompts: Count = 4
    """Prompts per step."""
    num_generations: Count = 8
    """Completions per prompt."""
    max_new_tokens: Count = 64
    """Longest completion, in tokens."""
    parts: int = 2
    """Parts in which the prompts are sampled."""
    slow_s: NotNegative = 0.0
    """Seconds by which the tests of each program are delayed, to simulate slow tests."""
    updates: int = 4
    """Steps to run; the first is not counted."""

    def __post_init__(self) -> None:
        check_fields(self)
        check("updates", self.updates, self.updates >= 2, ">= 2, because the first is not counted")
        divides = self.parts > 1 and self.num_prompts % self.parts == 0
        check("parts", self.parts, divides, f"a divisor of num_prompts={self.num_prompts} and above 1")


class TimedCode(CodeGeneration):
    """Turn each text into a valid program, so that there is one to run, and add up the seconds of all rewards."""

    seconds = 0.0

    def code_of(self, completion: str) -> str:
        return "\n".join(f"def {item['entry_point']}(x):\n    return {len(completion)}" for item in ITEMS)

    def step(self, states: Sequence[Any], actions: Texts, rng: np.random.Generator) -> Answer:
        start = time.monotonic()
        answer = super().step(states, actions, rng)
        self.seconds += time.monotonic() - start
        return answer


def time_steps(options: Overlap, parts: int, overlap: bool) -> tuple[dict[str, Any], TeamState]:
    """Return the times of some steps, and the state after them. Each call has a new sandbox, without cached verdicts."""
    items = [item | {"test": f"import time\ntime.sleep({options.slow_s})\n{item['test']}"} for item in ITEMS]
    with Sandbox() as sandbox, tempfile.TemporaryDirectory() as out:
        cfg = train_config(
            options, num_updates=options.updates, chat=True, output_dir=out, save_every=0, progress=False, sample_parts=parts,
            overlap_rewards=overlap,
        )  # fmt: skip
        team, params = load_team(options.model, 2, cfg)
        env = TimedCode(2, sandbox=sandbox, limits=Limits(wall_s=5 + options.slow_s))
        state = train(team, env, items, cfg, params=params).state
        times = [row["time/step_s"] for row in read_rows(Path(out) / "metrics.jsonl")]
    figures = {"step_s": round(median(times[1:]), 2), "rewards_s": round(env.seconds / options.updates, 2)}
    return {"parts": parts, "overlap": overlap and parts > 1} | figures, state


def main() -> None:
    options = tyro.cli(Overlap)
    states = []
    for parts, overlap in ((1, False), (options.parts, False), (options.parts, True)):
        figures, state = time_steps(options, parts, overlap)
        print(json.dumps(figures), flush=True)
        states.append(jax.device_get(state.stacks[0].params))
    leaves = zip(*map(jax.tree.leaves, states[1:]), strict=True)
    print(json.dumps({"parameters_equal": all(np.array_equal(x, y) for x, y in leaves)}))


if __name__ == "__main__":
    main()
