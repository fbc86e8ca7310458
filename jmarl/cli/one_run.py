"""Run one experiment for a command: its exit code, and what it prints at the end."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from jmarl.cli.main import DONE, FAILED, INTERRUPTED, KILLED
from jmarl.config import ExperimentConfig
from jmarl.training.experiment import run_experiment
from jmarl.training.files.checkpoint import saved_steps
from jmarl.training.files.config_file import CONFIG_FILE
from jmarl.training.files.interrupt import Interrupted, ending_at_second_signal


def train(cfg: ExperimentConfig) -> tuple[int, Any]:
    """Run an experiment. Returns the exit code, and its result or None."""
    directory = cfg.train.run.output_dir
    print(first_line(cfg), flush=True)
    try:
        with ending_at_second_signal():
            result = run_experiment(cfg)
    except Interrupted as reason:
        print(f"interrupted {reason}\n{resume_line(directory)}", flush=True)
        return (INTERRUPTED if has_checkpoint(directory) else KILLED), None
    results = result if isinstance(result, list) else [result]
    for one in results:
        print(f"{one!r} in {directory}", flush=True)
    if unsaved := [one.unsaved for one in results if one.unsaved]:
        print(f"jmarl: not everything is saved: {unsaved[0]}", file=sys.stderr)
        return FAILED, result
    if any(one.interrupted for one in results):
        print(resume_line(directory), flush=True)
        return (INTERRUPTED if has_checkpoint(directory) else KILLED), result
    return DONE, result


def first_line(cfg: ExperimentConfig) -> str:
    """Return a line that says what is run; it comes before models are loaded."""
    agents = f"{cfg.team.size} agent{'s' * (cfg.team.size > 1)} of {', '.join(dict.fromkeys(cfg.team.models))}"
    runs = f" from {len(cfg.seeds)} seeds" if cfg.seeds else ""
    run = cfg.train.run
    name = cfg.experiment_name or "experiment"
    return f"{name}: {cfg.train.algorithm}, {agents}, {run.num_updates} updates{runs}, in {run.output_dir}"


def resume_line(directory: str) -> str:
    """Return a line with the command that continues an interrupted run."""
    if not has_checkpoint(directory):
        return "no checkpoint was written: the same command starts again from the beginning"
    return f"to resume: jmarl train --config {shlex.quote(f'{directory}/{CONFIG_FILE}')} --resume"


def has_checkpoint(directory: str) -> bool:
    """Return whether a run, or one of its seeds, has a checkpoint to resume from."""
    return any(saved_steps(path) for path in (Path(directory) / "checkpoints", *Path(directory).glob("seed_*/checkpoints")))
