"""What the experiments share to run as commands: flags, results in words, resuming, exit codes. Not an experiment."""

from __future__ import annotations

import math
import re
import resource
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import jax

from jmarl.cli.main import prepare_streams
from jmarl.config import TrainConfig
from jmarl.config.flags import parse_flags
from jmarl.evaluation.evaluate import Evaluation, numbers
from jmarl.files.checkpoint import CheckpointError, saved_steps
from jmarl.files.interrupt import EXIT_INTERRUPTED, Interrupted, ending_at_second_signal
from jmarl.files.lock import DirectoryInUse
from jmarl.files.run_directory import CannotGoOn, checkpoints_of
from jmarl.logs.failed_update import NonFiniteError
from jmarl.processes import exchange
from jmarl.processes.ending import fail
from jmarl.processes.join import join_processes, joined_place
from jmarl.runs.records import FitResult, TrainResult
from jmarl.sandbox import SandboxUnavailable

EXIT_NOT_SAVED = 130  # the exit code of a shell for a command that Ctrl+C ended

C = TypeVar("C", bound=TrainConfig)
R = TypeVar("R", bound=TrainResult | FitResult | Sequence[TrainResult])


def command(settings: type[C], run: Callable[[C], R], show: Callable[[C, R], None]) -> None:
    """Run an experiment from the command line: read its flags, run it, show its result, and end with `exit_code`.

    Of several processes the first one shows the result.

    Wrong settings, and what this machine or directory does not allow, end the process with a message of one line. Several
    processes that torchrun or `jmarl launch` starts are one run; with --distributed auto or HOST:PORT those of Slurm, Open MPI
    and Kubernetes are too.
    """
    prepare_streams()
    try:
        distributed, arguments = distributed_flag(sys.argv[1:])
        if not {"-h", "--help"} & {*arguments}:
            join_processes(distributed)
        cfg = parse_flags(settings, arguments)
    except (ValueError, TypeError, DirectoryInUse) as error:
        refuse(error)
    try:
        with ending_at_second_signal():
            result = run(cfg)
    except (CannotGoOn, CheckpointError, DirectoryInUse, NonFiniteError, SandboxUnavailable) as error:
        refuse(error)
    except Interrupted as reason:
        print(f"interrupted {reason}\n{resume_hint(cfg)}", flush=True)
        raise SystemExit(EXIT_INTERRUPTED if has_checkpoint(cfg) else EXIT_NOT_SAVED) from None
    if exchange.is_first():
        show(cfg, result)
    results = [result] if isinstance(result, TrainResult | FitResult) else list(result)
    if results[0].interrupted:
        print(resume_hint(cfg), flush=True)
    raise SystemExit(exit_code(cfg, *results))


def refuse(error: Exception) -> NoReturn:
    """End the process with an error in one line, and with it the others of a run of several processes."""
    text = f"error: {error}"
    if joined_place() is not None:
        print(text, file=sys.stderr, flush=True)
        fail(text, 1)
    raise SystemExit(text) from None


def distributed_flag(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the value of --distributed, which is no setting of a run, and the other arguments."""
    rest, value = list[str](), ""
    words = iter(arguments)
    for word in words:
        if word == "--distributed":
            value = next(words, "")
        elif word.startswith("--distributed="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
    return value, rest


def has_checkpoint(cfg: TrainConfig) -> bool:
    """Return whether a run, or one of its seeds, has a checkpoint to resume from."""
    return cfg.run.saves and any(
        saved_steps(path) for path in (checkpoints_of(cfg), *Path(cfg.run.output_dir).glob("seed_*/checkpoints"))
    )


RESUME = re.compile(r"--(?:run\.)?(?:no-)?resume(?:=.*)?")


def resume_hint(cfg: TrainConfig) -> str:
    """Return a line that says how to resume an interrupted run."""
    if not has_checkpoint(cfg):
        return "no checkpoint was written: the same command starts again from the beginning"
    flags = [bool(RESUME.fullmatch(x)) for x in sys.argv[1:]]
    values = [is_flag and x in ("auto", "True", "False") for is_flag, x in zip([False, *flags], sys.argv[1:], strict=False)]
    arguments = [x for x, *left_out in zip(sys.argv[1:], flags, values, strict=True) if not any(left_out)]
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", module.name] if module else [sys.argv[0]]
    return f"to resume: {shlex.join(['python', *program, *arguments, '--resume'])}"


def exit_code(cfg: TrainConfig, *results: TrainResult | FitResult) -> int:
    """Return the exit code of an experiment.

    75: interrupted, and can be resumed. 130: interrupted, and nothing is saved. 1: the last checkpoint or the models could not
    be written. 0: else.
    """
    if any(result.unsaved for result in results):
        return 1
    if any(result.interrupted for result in results):
        return EXIT_INTERRUPTED if has_checkpoint(cfg) else EXIT_NOT_SAVED
    return 0


def report(cfg: TrainConfig, result: TrainResult) -> None:
    """Print the evaluations on held-out tasks, and the mean reward of the last updates."""
    del cfg
    if result.before:  # a resumed run has none
        print(f"held-out before: {evaluation_line(result.before)}")
    if result.after:
        print(f"held-out after: {evaluation_line(result.after)}")
    print(last_rewards(result))


def evaluation_line(evaluation: Evaluation) -> str:
    """Return all numbers of an evaluation, with 95 % intervals where it has them."""
    values, suffix = numbers(evaluation), "_ci95"
    means = {name: mean for name, mean in values.items() if not name.endswith(suffix)}
    return ", ".join(
        f"{name.removeprefix('eval/')} {with_interval(mean, values.get(name + suffix, math.nan))}"
        for name, mean in means.items()
    )


def with_interval(mean: float, interval: float) -> str:
    """Return a text such as 0.523 ± 0.012, or 0.523 if there is no interval (NaN), as for a single value."""
    return f"{mean:.3f}" if math.isnan(interval) else f"{mean:.3f} ± {interval:.3f}"


def last_rewards(result: TrainResult) -> str:
    """Return a line with the mean reward of the last ten updates."""
    if not result.rewards:
        finished = "no update was left to do: raise --num-updates to train longer"
        return "interrupted before the end of the first update" if result.interrupted else finished
    last = result.rewards[-10:]
    return f"mean reward of the last {len(last)} updates {sum(last) / len(last):.3f}"


def peak_memory() -> dict[str, float]:
    """Return the peak memory of this process so far, in GiB; on a GPU also that of the device."""
    device = jax.devices()[0].memory_stats()
    peak = {"peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    return peak | ({"peak_device_gib": device["peak_bytes_in_use"] / 2**30} if device else {})
