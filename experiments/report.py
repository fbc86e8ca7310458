"""What an experiment prints of its run, and the exit code that it ends with. No experiment itself."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from jmarl.config import TrainConfig
from jmarl.config.flags import parse_flags
from jmarl.evaluation.evaluate import Evaluation, numbers
from jmarl.sandbox import SandboxUnavailable
from jmarl.training.files.checkpoint import CheckpointError, saved_steps
from jmarl.training.files.failed_update import NonFiniteError
from jmarl.training.files.interrupt import EXIT_INTERRUPTED, Interrupted, ending_at_second_signal
from jmarl.training.files.lock import DirectoryInUse
from jmarl.training.files.run_directory import CannotGoOn, checkpoints_of
from jmarl.training.records import FitResult, TrainResult

EXIT_LOST = 130  # as a shell has it of a command that Ctrl+C ended

C = TypeVar("C", bound=TrainConfig)
R = TypeVar("R", bound=TrainResult | FitResult | Sequence[TrainResult])


def command(settings: type[C], run: Callable[[C], R], show: Callable[[C, R], None]) -> None:
    """The command of an experiment: read its flags, run it, show what came of it, and end with `exit_code`. What is wrong with
    the flags or the machine is said in a sentence."""
    try:
        cfg = parse_flags(settings)
    except (ValueError, TypeError, DirectoryInUse) as error:
        raise SystemExit(f"error: {error}") from None
    try:
        with ending_at_second_signal():
            result = run(cfg)
    except (CannotGoOn, CheckpointError, DirectoryInUse, NonFiniteError, SandboxUnavailable) as error:
        raise SystemExit(f"error: {error}") from None
    except Interrupted as why:
        print(f"interrupted {why}\n{how_to_go_on(cfg)}", flush=True)
        raise SystemExit(EXIT_INTERRUPTED if is_saved(cfg) else EXIT_LOST) from None
    show(cfg, result)
    results = [result] if isinstance(result, TrainResult | FitResult) else list(result)
    if results[0].interrupted:
        print(how_to_go_on(cfg), flush=True)
    raise SystemExit(exit_code(cfg, *results))


def is_saved(cfg: TrainConfig) -> bool:
    """Whether a run, or one of its seeds, has a checkpoint to go on from."""
    return cfg.run.saves and any(
        saved_steps(path) for path in (checkpoints_of(cfg), *Path(cfg.run.output_dir).glob("seed_*/checkpoints"))
    )


def how_to_go_on(cfg: TrainConfig) -> str:
    """The command that goes on where a run was interrupted."""
    return f"to go on: {resume_command()}" if is_saved(cfg) else "nothing is saved: the same command begins anew"


def exit_code(cfg: TrainConfig, *results: TrainResult | FitResult) -> int:
    """75 where a run was interrupted and can be resumed, 130 where nothing of it is saved, 1 where its last checkpoint or its
    models could not be written, else 0."""
    if any(result.unsaved for result in results):
        return 1
    if any(result.interrupted for result in results):
        return EXIT_INTERRUPTED if is_saved(cfg) else EXIT_LOST
    return 0


def resume_command() -> str:
    """The command line of this process, with --resume."""
    arguments = [x for x in sys.argv[1:] if x not in ("--resume", "--no-resume")]
    module = getattr(sys.modules["__main__"], "__spec__", None)
    name = ["-m", module.name] if module else [sys.argv[0]]
    return shlex.join(["python", *name, *arguments, "--resume"])


def told(result: Evaluation) -> str:
    """Every number of an evaluation, with its 95 % interval where it has one."""
    found, ci = numbers(result), "_ci95"
    shown = {name: with_interval(x, found.get(name + ci, math.nan)) for name, x in found.items() if not name.endswith(ci)}
    return ", ".join(f"{name.removeprefix('eval/')} {value}" for name, value in shown.items())


def with_interval(mean: float, interval: float) -> str:
    """0.523 ± 0.012; of a single number, which has no interval (NaN), 0.523."""
    return f"{mean:.3f}" if math.isnan(interval) else f"{mean:.3f} ± {interval:.3f}"


def report(cfg: TrainConfig, result: TrainResult) -> None:
    """Print what held-out tasks gave before and after, and the end of the learning curve."""
    del cfg
    if result.before:  # not of a resumed run
        print(f"held-out before: {told(result.before)}")
    if result.after:
        print(f"held-out after: {told(result.after)}")
    print(end_of(result))


def end_of(result: TrainResult) -> str:
    """The end of the learning curve."""
    if not result.rewards:
        return "no update was left to make: raise --num-updates to train on"
    last = result.rewards[-10:]
    return f"mean reward of the last {len(last)} updates {sum(last) / len(last):.3f}"
