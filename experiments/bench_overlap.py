"""Rewards of programs computed while the next part of the prompts is sampled, against one after the other.

Claim: the same parameters bit for bit, and of the time that rewards take only the last part's is left in a step.
Command: python -m experiments.bench_overlap            (flags: --help)
Prints a JSON object for each way to play a step: its seconds (median of warm steps), and those of its rewards. Ways: prompts
all at once, in parts one after the other, in parts with the overlap; the last two must end in equal parameters.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import tyro

from jmarl.config import SECTION_OF, TrainConfig, check
from jmarl.envs.code import problems as code_problems
from jmarl.envs.code.generation import CodeGeneration
from jmarl.models.hub.agents import load_agent
from jmarl.sandbox import Limits, Sandbox
from jmarl.team import make_team
from jmarl.training.logs.metrics_writer import read_rows
from jmarl.training.train import train
from jmarl.types import TeamState

ITEMS = code_problems.generate_problems(64, difficulty=(1, 1))


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Step times with and without the overlap of sampling and rewards."""

    model: str = "smollm2-135m-instruct"
    """Model of both agents: a name, a directory, a .gguf file or a hub id."""
    num_prompts: int = 4
    num_generations: int = 8
    max_new_tokens: int = 64
    parts: int = 2
    """Parts that the prompts are sampled in."""
    slow_s: float = 0.0
    """Seconds that the tests of each program wait, as slow tests would."""
    updates: int = 4
    """Steps, of which the first is not counted."""

    def __post_init__(self):
        check("updates", self.updates, self.updates >= 2, ">= 2")
        check("parts", self.parts, self.num_prompts % self.parts == 0 and self.parts > 1, "a divisor of num_prompts above 1")


class Timed(CodeGeneration):
    """Tells how long its answers took. Every text becomes a program, so that there is one to run for each joint action."""

    seconds = 0.0

    def code_of(self, completion):
        functions = [f"def {item['entry_point']}(x):\n    return {len(completion)}" for item in ITEMS]
        return "\n".join(functions)

    def step(self, states, actions, rng):
        began = time.monotonic()
        answer = super().step(states, actions, rng)
        self.seconds += time.monotonic() - began
        return answer


def steps(cfg: Overlap, parts: int, overlap: bool) -> tuple[dict[str, Any], TeamState]:
    """Train for a few steps; every way has a sandbox of its own, which remembers no program."""
    items = [item | {"test": f"import time\ntime.sleep({cfg.slow_s})\n{item['test']}"} for item in ITEMS]
    team, params = make_team([load_agent(cfg.model)] * 2)
    with Sandbox() as box, tempfile.TemporaryDirectory() as out:
        env = Timed(2, sandbox=box, limits=Limits(wall_s=5 + cfg.slow_s))
        fields = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.name in SECTION_OF}
        run = TrainConfig.of(
            **fields,
            num_updates=cfg.updates,
            chat=True,
            output_dir=out,
            save_every=0,
            progress=False,
            sample_parts=parts,
            overlap_rewards=overlap,
        )
        state = train(team, env, items, run, params=params).state
        times = [row["time/step_s"] for row in read_rows(Path(out) / "metrics.jsonl")]
    named = {"parts": parts, "overlap": overlap and parts > 1}
    return named | {"step_s": round(median(times[1:]), 2), "rewards_s": round(env.seconds / cfg.updates, 2)}, state


def main() -> None:
    cfg = tyro.cli(Overlap)
    states = []
    for parts, overlap in ((1, False), (cfg.parts, False), (cfg.parts, True)):
        told, state = steps(cfg, parts, overlap)
        print(json.dumps(told), flush=True)
        states.append(jax.device_get(state.stacks[0].params))
    pairs = zip(*map(jax.tree.leaves, states[1:]), strict=True)
    print(json.dumps({"parameters_equal": all(np.array_equal(x, y) for x, y in pairs)}))


if __name__ == "__main__":
    main()
