"""Run a configuration, and say what came of it and how an interrupted run goes on."""

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmarl.cli.main import DONE, FAILED, INTERRUPTED, KILLED, plural, show, to_stderr
from jmarl.config.experiment import ExperimentConfig
from jmarl.files.run_files import CONFIG_FILE
from jmarl.lazy import collector_paused
from jmarl.processes.ending import Interrupted, NoServer

if TYPE_CHECKING:
    from jmarl.runs.records import FitResult, TrainResult


def train(cfg: ExperimentConfig, again: str = "") -> tuple[int, Any]:
    """Run an experiment. Returns the exit code, and its result or None. again: the line of an interrupted run that says how to
    continue, if another one than `resume_line`."""
    with collector_paused():
        from jmarl.files.interrupt import ending_at_second_signal
        from jmarl.runs.experiment import run_experiment  # imports jax

    cfg = cfg.with_seeds()
    directory, updates = cfg.train.run.output_dir, cfg.train.run.num_updates
    place_of_run = os.path.abspath(directory)  # code of the user may change the working directory
    if cfg.train.run.resume == "auto" and has_ended(cfg):
        show(f"{directory}: the run has made all {plural(updates, 'update')}, nothing is left to do")
        return DONE, None
    show(f"{cfg.experiment_name or 'experiment'}: loading {', '.join(dict.fromkeys(cfg.team.models))}")
    try:
        with ending_at_second_signal(), interrupted_again(cfg):
            result = run_experiment(cfg)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {again or resume_line(directory)}") from None
    except Interrupted as reason:
        show(f"interrupted {reason}\n{again or resume_line(directory)}")
        return (INTERRUPTED if has_checkpoint(place_of_run) else KILLED), None
    results = result if isinstance(result, list) else [result]
    directories = directories_of(cfg)
    for one, place in zip(results, directories, strict=True):
        show(f"{place}: {closing_line(one, None if cfg.train.run.allow_changed else Path(place))}")
    if unsaved := [one.unsaved for one in results if one.unsaved]:
        to_stderr(f"not everything is saved: {unsaved[0]}")
        return FAILED, result
    if any(one.interrupted for one in results):
        show(again or resume_line(directory))
        return (INTERRUPTED if has_checkpoint(place_of_run) else KILLED), result
    return DONE, result


@contextlib.contextmanager
def interrupted_again(cfg: ExperimentConfig) -> Iterator[None]:
    """Let a run that resumes and finds no server be interrupted once more: nothing is lost, and it can be resumed later.

    One that begins fails: its addresses may be wrong."""
    try:
        yield
    except NoServer as error:
        if cfg.train.run.resume and has_checkpoint(cfg.train.run.output_dir):
            raise Interrupted(f"because {error}") from error
        raise


def directories_of(cfg: ExperimentConfig) -> list[str]:
    """Return the directory of each run of an experiment: of each seed, or of the only run."""
    directory = cfg.train.run.output_dir
    return [f"{directory}/seed_{seed}" for seed in cfg.seeds] or [directory]


def has_ended(cfg: ExperimentConfig) -> bool:
    """Return whether the directory holds the complete run of exactly these settings."""
    from jmarl.files.attempt import is_complete
    from jmarl.files.config_file import changed_settings

    complete = all(is_complete(directory, cfg.train.run.num_updates) for directory in directories_of(cfg))
    return complete and changed_settings(cfg) == []


def closing_line(result: "TrainResult | FitResult", directory: Path | None) -> str:
    """Return what a run did: its updates, the last reward or loss, and the held-out results if there are any.

    directory: whose log has the evaluation before training of a run that was resumed; None: it may be of other tasks."""
    from jmarl.evaluation.evaluate import Evaluation, logged, logged_numbers
    from jmarl.logs.metrics_writer import read_rows
    from jmarl.runs.records import TrainResult

    name, values = ("reward", result.rewards) if isinstance(result, TrainResult) else ("loss", result.losses)
    before, file = result.before, directory and directory / "metrics.jsonl"
    for row in read_rows(file) if before is None and file and file.is_file() else ():
        if row.get("eval/updates") == 0:
            before = logged(row) if name == "reward" else logged_numbers(row)
    ends = [x.mean_text if isinstance(x, Evaluation) else x and f"{x['loss']:.3f}" for x in (before, result.after)]
    updates = int(result.state.step)
    parts = [f"{plural(updates, 'update')} made" + ", then interrupted" * result.interrupted]
    parts += [f"{name} of the last one {values[-1]:.3f}" if values else "none of them now"]
    words = ("before training", f"after {plural(updates, 'update')}")
    held_out = [f"{value} {when}" for value, when in zip(ends, words, strict=True) if value is not None]
    return ", ".join(parts) + (f"; held-out {name} {', '.join(held_out)}" if held_out else "")


def resume_line(directory: str) -> str:
    """Return a line with the command that continues an interrupted run."""
    if not has_checkpoint(directory):
        return "no checkpoint was written: the same command starts again from the beginning"
    return f"to resume: jmarl train --config {shlex.quote(f'{directory}/{CONFIG_FILE}')} --resume"


def has_checkpoint(directory: str) -> bool:
    """Return whether a run, or one of its seeds, has a checkpoint to resume from."""
    from jmarl.files.checkpoint import saved_steps

    return any(saved_steps(path) for path in (Path(directory) / "checkpoints", *Path(directory).glob("seed_*/checkpoints")))
