"""Make a step of a run again: from the newest checkpoint before it, with the same random keys, without writing anything.

Where no checkpoint is exactly before the step, the updates between are made again too. All that the run has stored of them,
completions, rewards and columns of the log, is compared and must be equal. Settings, data, reward, environment and team are
compared as for a run that resumes.

Left out, and refused by a sentence: rows that begin a step early, leagues and populations, several seeds in one program,
several processes, given data, preference rounds and learned rewards.
"""

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.config import TrainConfig, flat
from jmarl.config.bounded_files import read_json
from jmarl.files.changes import MAY_CHANGE, CannotGoOn, check_changes
from jmarl.files.checkpoint import META, Checkpointer, saved_steps
from jmarl.files.run_directory import base_digests, read_state
from jmarl.learning.team_update import update_team
from jmarl.logs.metrics_writer import read_rows
from jmarl.logs.rollout_log import rollout_metrics
from jmarl.logs.step_log import update_metrics
from jmarl.processes import exchange
from jmarl.replay.stored import StoredStep, check_record, check_row, stored_steps
from jmarl.rollout.turns import Rollout
from jmarl.runs.kinds import rollouts
from jmarl.runs.prepare import prepare
from jmarl.runs.run import PreparedRun, Task
from jmarl.team import Team
from jmarl.types import TeamState

NOTHING_WRITTEN: dict[str, Any] = dict(
    output_dir="", resume=False, resume_step=None, allow_changed=None, save_every=None, keep_every=0, keep_best=False,
    log_tokens=0, replay_rollout="", progress=False, trackio="",
)  # fmt: skip


class OpenStep(NamedTuple):
    """A step that can be made again."""

    directory: Path
    number: int  # of the step, as in metrics.jsonl: the updates that are made once it is
    run: PreparedRun
    state: TeamState  # of the checkpoint
    first: int  # updates that the checkpoint has
    seconds: float  # that the updates between took in the run; NaN if unknown


class RemadeStep(NamedTuple):
    """A step that was made again."""

    rollout: Rollout
    state: TeamState  # before its update
    stored: StoredStep  # what the run has of it
    checked: int  # steps with completions that are equal to the stored ones, this one included


def open_step(
    directory: str | Path, cfg: TrainConfig, team: Team, task: Task, number: int, params: Sequence[Any] | None = None,
    replaces: bool = False,
) -> OpenStep:  # fmt: skip
    """Prepare a step of a run and restore the newest checkpoint before it. Writes nothing.

    Args:
        directory: of the run.
        cfg: the settings of the run.
        team: who learns.
        task: what from.
        number: of the step, from 1, as in metrics.jsonl.
        params: parameters [A, ...] of each stack, as for `jmarl.train`. They are donated.
        replaces: refuse runs in which no message can be replaced.

    Raises:
        ValueError: the step cannot be made again.
    """
    directory = Path(directory)
    check_settings(cfg, replaces)
    old = newest_meta(directory)
    if not 1 <= number <= old["config"]["num_updates"]:
        raise ValueError(f"there is no step {number}: {directory} has steps 1 to {old['config']['num_updates']}")
    run, state = prepare(cfg.replace(**NOTHING_WRITTEN), team, task, params=params)
    if run.kind is not rollouts.ROLLOUTS:
        raise ValueError("only steps of runs on rollouts with a given reward can be made again, not of rounds or given data")
    run = dataclasses.replace(run, task=run.task._replace(held_out=()))  # nothing is evaluated
    there, checkpoints = run.cfg.replace(output_dir=str(directory.absolute())), directory / "checkpoints"
    first = 0
    with explained(directory, number):
        meta = {"config": flat(there), **run.identity, "bases": base_digests(state)}
        changes = check_changes(there, old, meta, number - 1)
        before = [step for step in saved_steps(checkpoints) if step < number]
        if before:
            with Checkpointer(checkpoints, read_only=True) as saved:
                first = next((step for step in reversed(before) if saved.is_intact(step)), 0)
        later = [text for change in old.get("changes", []) if change["step"] >= first for text in change["changed"]]
        different = [text for name, text in changes.items() if name not in MAY_CHANGE]
        different += [text for text in later if text.split(":")[0] not in MAY_CHANGE]
        if different:
            raise CannotGoOn("".join(f"\n  {text}" for text in different))
        if first:
            state, _ = read_state(there, state, run.identity, first)
    return OpenStep(directory, number, run, state, first, seconds_of(directory, first, number - 1))


def check_settings(cfg: TrainConfig, replaces: bool = False) -> None:
    """Raise ValueError for runs whose steps cannot be made again. replaces: with messages replaced."""
    refused = {
        "async_steps, whose rows begin with the weights of the step before": cfg.episodes.async_steps,
        "a league, whose past weights change with evaluations": cfg.league.on,
        "a population, whose members copy each other": cfg.population.members,
        "several processes, of which each has a part of the weights": exchange.count() > 1,
    }
    for what, is_set in refused.items():
        if is_set:
            raise ValueError(f"steps of a run with {what}, cannot be made again yet")
    if replaces and cfg.episodes.dynamic_sampling:
        raise ValueError("messages cannot be replaced yet in a run with dynamic_sampling, which may replace their tasks")


def newest_meta(directory: Path) -> dict[str, Any]:
    """Return what the run consisted of when it wrote its newest readable checkpoint; without one, when it began."""
    folders = [directory / "checkpoints" / str(step) / META for step in reversed(saved_steps(directory / "checkpoints"))]
    attempts = directory / "attempts"
    starts = sorted((path for path in attempts.glob("*/start.json")), key=lambda path: int(path.parent.name), reverse=True)
    for file, name in [*((file, "meta") for file in folders), *((file, "settings") for file in starts)]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # resuming skips damaged checkpoints too
            content = read_json(file)[name]
            content["config"]["num_updates"]
            return content
    raise ValueError(f"{directory} is not the directory of a run: it has no checkpoint and no attempts/1/start.json")


@contextlib.contextmanager
def explained(directory: Path, number: int) -> Iterator[None]:
    """Name what has changed in the words of a step that is made again, not in those of a run that resumes."""
    try:
        yield
    except CannotGoOn as error:
        changes = [line.strip() for line in str(error).splitlines() if line.startswith("  ")]
        if not changes:
            raise
        text = f"step {number} of {directory} cannot be made again, because these have changed: {'; '.join(changes)}"
        raise CannotGoOn(f"{text}; restore what the step was made with") from error


def seconds_of(directory: Path, first: int, last: int) -> float:
    """Return how long the updates after `first` up to `last` took in the run, by the median; NaN if unknown."""
    file = directory / "metrics.jsonl"
    rows = read_rows(file) if last > first and file.is_file() else []
    seconds = [row["time/step_s"] for row in rows if first < row["step"] <= last and "time/step_s" in row]
    return statistics.median(seconds) * (last - first) if seconds else float("nan")


def make_again(step: OpenStep, show: Callable[[str], None] = lambda line: None) -> RemadeStep:
    """Make the updates before a step and play the step again. `state` of the step is donated.

    show: takes a line after each update that is made again.

    Raises:
        ValueError: something is not as the run has stored it.
    """
    run, state, checked = step.run, step.state, 0
    source = run.kind.source(run, state)
    if step.first < step.number - 1:
        state = source.open(state)
    for stored in stored_steps(step.directory, step.first, step.number):
        rollout = source.play(stored.number - 1, state)
        checked += check_record(stored, run.team, rollout, step.directory)
        check_row(stored, rollout_metrics(run.team, rollout), step.directory)
        if stored.number == step.number:
            return RemadeStep(rollout, state, stored, checked)
        state, metrics = update_team(run.setup, state, run.kind.make_batches(run.setup, state, rollout))
        check_row(stored, update_metrics(run.team, metrics), step.directory)
        show(f"update {stored.number} of {step.number - 1} is made again")
    raise AssertionError("the last step is returned")
