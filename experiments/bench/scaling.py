"""Measure how the cost of a run grows: time, memory and the host's share against what a user makes larger.

Claim: no cost grows faster than the work. Exponents above 1.1 are explained in experiments/README.md ("Growth").
Command: python -m experiments.bench.scaling                (flags: --help)
Eight panels, each with one size that grows and the rest fixed: agents, completions of a prompt, tokens of a completion, turns,
rows of data, seconds of the environment's answer, rows of the log, rows of a report. Agents are tiny Llamas of random weights;
every point is a process of its own, so that peaks are separate and nothing is compiled before. Of training:
    step        median seconds of warm steps, from rewards to rewards
    first step  seconds from the call of `train` until the rewards of the second step: reading, compiling, the first update
    peak        resident memory of the process in GiB; an idle one with JAX and transformers has about 0.45
    host        share of the seconds in which the host did not wait for a program (`time/rewards`, `time/idle`); tokenization
                of a step's first prompts and writing the log run beside the update, and count too
Prints a JSON object for each point and the exponents of each panel: of all points, and of the last two. Draws them as one
picture, and writes the points beside it (.json): `--panels none` draws them again, `--panels data,log` measures these anew.
Expected: see experiments/README.md. Time: nine minutes on two shared cores,
four with --quick (both estimated: four panels took 100 s with it); needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import tyro

from experiments.tables import pyplot
from jmarl.config import check

Point = dict[str, float]  # x, and figures by their names
STEP, FIRST, PEAK, HOST = "step (s)", "first step (s)", "peak (GiB)", "host (share)"
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # compiles sooner, to slower programs
PARTS = 4  # in which the prompts are sampled where an answer is computed beside the sampler


@dataclasses.dataclass(frozen=True)
class Size:
    """What a run is made of; one of these grows."""

    agents: int = 2
    completions: int = 16
    tokens: int = 32
    turns: int = 1
    data: int = 64
    answer_s: float = 0.0
    prompts: int = 1
    parts: int = 1
    history: str = "none"


def peak() -> float:
    """Return the peak of the resident memory of this process so far, in GiB. Starts no JAX, as `report.peak_memory` would."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def train_tiny(size: Size, updates: int) -> Point:
    """Train tiny agents, and return what it took."""
    from experiments.tiny import random_agents, tokenizer
    from jmarl.config import TrainConfig
    from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
    from jmarl.logs.metrics_writer import read_rows
    from jmarl.models.config import ModelConfig
    from jmarl.runs.train import train
    from jmarl.team import make_team

    characters = tokenizer(tuple(map(chr, range(32, 288))))
    model = ModelConfig("llama", len(characters), 64, 128, 2, 4, 2, 16, 4096)
    team, params = make_team(random_agents("random", characters, size.agents, seed=0, model=model))
    called: list[float] = []  # when rewards were asked for

    def reward(*texts: list[str]) -> list[float]:
        called.append(time.perf_counter())
        time.sleep(size.answer_s * len(texts[0]) / (size.prompts * size.completions))
        return [len(set(text)) / size.tokens for text in texts[0]]

    def go_on(agent_completions: list[str], **rest: Any) -> list[str]:
        return [f"{text[:8]}? Go on." for text in agent_completions]

    env = RewardEnvironment(reward, [default_formatter] * size.agents, go_on if size.turns > 1 else None)
    with tempfile.TemporaryDirectory() as directory:
        cfg = TrainConfig.of(
            num_prompts=size.prompts, num_generations=size.completions, max_new_tokens=size.tokens, min_new_tokens=size.tokens,
            num_turns=size.turns, branching="chain", history=size.history, sample_parts=size.parts, learning_rate=1e-4,
            num_updates=updates, output_dir=f"{directory}/run", save_every=0, progress=False,
        )  # fmt: skip
        data = Path(directory, "data.jsonl")
        write_data(data, size.data)
        start = time.perf_counter()
        train(team, env, data, cfg, params=params)
        rows = read_rows(Path(cfg.run.output_dir, "metrics.jsonl"))
    warm = rows[2:]
    seconds = [sum(x for name, x in row.items() if name.startswith("time/") and name != "time/step_s") for row in warm]
    host = sum(row["time/rewards"] + row["time/idle"] for row in warm)
    figures = {STEP: median(row["time/step_s"] for row in warm), FIRST: called[size.turns * size.parts] - start}
    return figures | {PEAK: peak(), HOST: host / sum(seconds)}


def write_data(path: Path, rows: int) -> None:
    """Write a data set of short prompts."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            file.write(json.dumps({"prompt": f"Write about the number {i} and its friends.", "answer": str(i)}) + "\n")


def train_turns(size: Size, updates: int) -> Point:
    """Return the figures of several turns, and those where each turn reads the ones before."""
    figures, appended = (train_tiny(dataclasses.replace(size, history=x), updates) for x in ("none", "append"))
    return figures | {f"history=append: {name}": appended[name] for name in (STEP, PEAK)}


def wait_for_answers(size: Size, updates: int) -> Point:
    """Return the seconds of a step with answers in line and beside the sampler, and the share of an answer that is hidden."""
    size = dataclasses.replace(size, prompts=2 * PARTS, completions=8, tokens=128)
    beside = dataclasses.replace(size, parts=PARTS)
    in_line, hidden = train_tiny(size, updates)[STEP], train_tiny(beside, updates)[STEP]
    none = train_tiny(dataclasses.replace(beside, answer_s=0.0), updates)[STEP]
    share = 1 - (hidden - none) / size.answer_s
    return {"in line: step (s)": in_line, "beside the sampler: step (s)": hidden, "hidden (share)": min(max(share, 0.01), 1.0)}


def write_rows(directory: Path, rows: int) -> None:
    """Write the metrics of a run of two agents: as many columns, other numbers."""
    agents = (
        "return length ended distinct_1 distinct_2 repeated loss grad_norm learning_rate steps skipped entropy advantage_std"
    )
    agents += " zero_variance_share ratio mismatch clip_share"
    phases = ("step_s", "sampling", "rewards", "update", "checkpoint", "evaluation", "compiling", "idle")
    names = [f"agent_{agent}/{name}" for agent in range(2) for name in agents.split()] + [f"time/{name}" for name in phases]
    names += ["tokens", "tokens_per_s", "reward/mean", "reward/std", "reward/max", "reward/invalid", "compiles", "failed_saves"]
    numbers = np.random.default_rng(0).normal(size=(1000, len(names))).round(12).tolist()
    directory.mkdir(parents=True)
    with (directory / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, rows + 1):
            file.write(json.dumps({"step": step, **dict(zip(names, numbers[step % 1000], strict=True))}) + "\n")


def log_rows(rows: int) -> Point:
    """Return the seconds to resume a log of so many rows, those of a further row, and the peak."""
    from jmarl.logs.metrics_writer import MetricsWriter, read_rows

    with tempfile.TemporaryDirectory() as directory:
        run, more = Path(directory, "run"), Path(directory, "more")
        write_rows(run, rows)
        write_rows(more, 300)
        start = time.perf_counter()
        with MetricsWriter(run, {}, total_steps=2 * rows, start_step=rows + 1, progress=False) as writer:
            opened, seconds = time.perf_counter() - start, []
            for i, row in enumerate(read_rows(more / "metrics.jsonl"), rows + 1):
                start = time.perf_counter()
                writer.write(i, row)
                seconds.append(time.perf_counter() - start)
    return {"a row (s)": median(seconds), "resume (s)": opened, PEAK: peak()}


def report_rows(rows: int) -> Point:
    """Return the seconds of a report of so many rows, and the peak."""
    from jmarl.report import write_report

    with tempfile.TemporaryDirectory() as directory:
        write_rows(Path(directory, "run"), rows)
        start = time.perf_counter()
        write_report([Path(directory, "run")], Path(directory, "report.html"))
        return {"jmarl report (s)": time.perf_counter() - start, PEAK: peak()}


class Panel(NamedTuple):
    """One size that grows."""

    label: str
    values: Sequence[float]
    measure: Callable[[float, int], Point]  # (value, updates) -> figures


def growing(name: str, kind: type, measure: Any = train_tiny, **fixed: int) -> Callable[[float, int], Point]:
    """Return a function that measures runs in which one part of their size grows. fixed: other parts of it."""
    return lambda value, updates: measure(Size(**fixed, **{name: kind(value)}), updates)


STEPS = [10**k for k in (2, 3, 4, 5)]
PANELS = {
    "agents": Panel("agents", (1, 2, 4, 8, 16), growing("agents", int)),
    "completions": Panel("completions of a prompt", (8, 16, 32, 64, 128, 256), growing("completions", int)),
    "tokens": Panel("tokens of a completion", (32, 128, 512, 1024), growing("tokens", int, completions=4)),
    "turns": Panel("turns", (1, 2, 4, 6), growing("turns", int, train_turns, completions=4, tokens=16)),
    "data": Panel("rows of data", [10**k for k in (3, 4, 5, 6)], growing("data", int)),
    "answers": Panel("answer of the environment (s)", (1e-3, 1e-2, 1e-1, 1.0), growing("answer_s", float, wait_for_answers)),
    "log": Panel("rows of the log", STEPS, lambda value, updates: log_rows(int(value))),
    "report": Panel("rows of a run", STEPS, lambda value, updates: report_rows(int(value))),
}


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How the cost of a run grows; draws one picture."""

    quick: bool = False
    """Measure the second and the third value of each panel only, with fewer steps of programs that are compiled sooner."""
    panels: str = ",".join(PANELS)
    """What grows, separated by commas; none: draw the picture again."""
    out: Path = Path("scaling.png")
    """Picture to write; the points are beside it, in a .json file."""
    point: str = ""
    """Measure one point in this process and print it, such as agents=4."""

    def __post_init__(self) -> None:
        for name in self.names:
            check("panels", self.panels, name in PANELS, f"none, or some of {', '.join(PANELS)}")

    @property
    def names(self) -> list[str]:
        """The panels to measure."""
        return [] if self.panels == "none" else self.panels.split(",")

    @property
    def updates(self) -> int:
        """Steps of a run, of which the first two are not counted."""
        return 4 if self.quick else 6


def measure_in_process(name: str, value: float, quick: bool) -> Point:
    """Return a point that a process of its own has measured, which has compiled its programs anew."""
    command = [sys.executable, "-m", "experiments.bench.scaling", "--point", f"{name}={value}", *["--quick"] * quick]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"} | ({"XLA_FLAGS": QUICK} if quick else {})
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment, check=True)
    return {"x": value} | json.loads(done.stdout.splitlines()[-1])


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent b of y = a x^b, fitted to the logarithms by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def exponents(points: Sequence[Point]) -> dict[str, tuple[float, float]]:
    """Return the exponent of each figure of a panel, over all points and over the last two."""
    x = [point["x"] for point in points]
    columns = {name: [point[name] for point in points] for name in points[0] if name != "x"}
    return {name: (exponent(x, y), exponent(x[-2:], y[-2:])) for name, y in columns.items()}


def draw(panels: Mapping[str, Sequence[Point]], out: Path) -> None:
    """Draw the panels that have points as one picture, with the exponents of each line."""
    figure, axes = pyplot().subplots(2, 4, figsize=(20, 9.5), layout="constrained")
    for axis, (name, panel) in zip(axes.flat, PANELS.items(), strict=True):
        axis.set(title=name, xlabel=panel.label, xscale="log", yscale="log")
        for label, (overall, end) in exponents(panels[name]).items() if panels.get(name) else ():
            x, y = ([point[key] for point in panels[name]] for key in ("x", label))
            axis.plot(x, y, "o-", label=f"{label}: x^{overall:.2f}, at the end x^{end:.2f}")
        if panels.get(name):
            axis.legend(fontsize=8, loc="upper left")
            low, high = axis.get_ylim()
            axis.set_ylim(low, high * (high / low) ** 0.6)  # room for the legend
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=80)


def main(options: Scaling) -> None:
    """Measure the panels, and draw them with those that were measured before."""
    if options.point:
        name, value = options.point.split("=")
        print(json.dumps(PANELS[name].measure(float(value), options.updates)))
        return
    beside = options.out.with_suffix(".json")
    panels = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
    for name in options.names:
        values = PANELS[name].values[1:3] if options.quick else PANELS[name].values
        panels[name] = []
        for value in values:
            panels[name].append(measure_in_process(name, value, options.quick))
            print(json.dumps({"panel": name} | panels[name][-1]), flush=True)
        fitted = {label: [round(b, 2) for b in both] for label, both in exponents(panels[name]).items()}
        print(json.dumps({"panel": name, "exponents, at the end": fitted}), flush=True)
        beside.write_text(json.dumps(panels, indent=1) + "\n", encoding="utf-8")
    draw(panels, options.out)


if __name__ == "__main__":
    main(tyro.cli(Scaling))
