"""The loop of training. One step:

    experience = source.play(step, state)                 host and device; all agents of a stack are sampled at once
    batches    = source.make_batches(state, experience)   returns and critics' values become arrays of each stack
    state      = update_team(setup, state, batches)       device; jitted, the old state is donated
    the row of the step before is written                 host; one step late, so that the device never waits for a log
    a checkpoint, an evaluation                           where they are due

Rollouts, given data, rounds of preferences and several seeds differ in their `Source` and in the loss, in nothing else. Only
`TeamState` and the step number go from one step to the next, so a resumed run is bit-equal.

- The row of an update is written before the checkpoint that holds the update, so a resumed run misses no row and doubles none.
- A checkpoint is written before an evaluation, so an evaluation that fails loses nothing; a missing one is made on resume.
- A run that ends early (a signal, an error) writes a checkpoint first, unless the update that failed has consumed the weights.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jmarl.config import Run, TrainConfig, flat
from jmarl.learning.setup import Setup
from jmarl.learning.team_update import update_team
from jmarl.models.stack import to_host
from jmarl.team import base_digests, without_gradients
from jmarl.training.files.failed_update import read_failed_update
from jmarl.training.files.interrupt import Interrupted, interruptible
from jmarl.training.files.run_directory import resume
from jmarl.training.files.saving import Saves
from jmarl.training.logs.metrics_writer import say
from jmarl.training.logs.step_log import StepLog, update_metrics
from jmarl.types import Batches, TeamState


class Source(NamedTuple):
    """What one kind of run learns from."""

    play: Callable[[int, TeamState], Any]  # step, state -> experience: played episodes, or examples that were drawn
    make_batches: Callable[[TeamState, Any], Batches]  # state, experience -> what each stack and critic learns from
    evaluate: Callable[[TeamState], Any] | None = None  # plays or scores what is held out; None: nothing is


class Ending(NamedTuple):
    """What the loop ends with. The evaluations are None where there was none to make."""

    state: TeamState  # without gradients
    before: Any  # evaluation before training
    after: Any  # the newest evaluation after it
    interrupted: bool  # by a signal; the run can be resumed
    unsaved: str  # why the last checkpoint could not be written; empty: it was, or none is to be made


def run_loop(setup: Setup, state: TeamState, source: Source, log: StepLog, saves: Saves) -> Ending:
    """Train from `state` to the last update, or until a signal asks to stop."""
    run, first = setup.cfg.run, int(state.step)
    interrupted, before, after = False, None, None
    saves.begin(state)
    with interruptible() as signals:
        try:
            if first == 0:
                before = evaluate_if_due(source, state, 0, log, run)
            elif first == run.num_updates or not log.was_evaluated(first):
                after = evaluate_if_due(source, state, first, log, run)
            for step in range(first, run.num_updates):
                if interrupted := signals.requested:
                    break
                experience = source.play(step, state)
                played_at = time.monotonic()  # before the update, for which the host may wait or not
                batches = source.make_batches(state, experience)
                state, metrics = update_team(setup, state, batches)
                log.step(step, experience, metrics, played_at)
                del experience, batches  # the log keeps what it needs
                log.failed_saves = saves.check()
                if saves.is_due(step + 1):
                    log.flush()
                    log.sync()
                    saves.save(step + 1, state)
                log.stop_if_not_finite()
                if interrupted := signals.requested:
                    break
                after = evaluate_if_due(source, state, step + 1, log, run) or after
            log.flush()
            log.stop_if_not_finite()
        except Interrupted:  # within a part of a step, such as the training of a reward model: the state has not changed
            interrupted = True
        except BaseException:  # also a second Ctrl+C
            save_at_failure(log, saves, state)
            raise
        finally:
            log.flush()
        if interrupted:
            saves.save(int(state.step), state)
        unsaved = saves.finish(int(state.step))
    if interrupted and run.progress:
        where = f", saved in {run.output_dir}: resume continues from there" if saves.savers and not unsaved else ""
        say(f"interrupted after update {int(state.step)} of {run.num_updates}{where}")
    return Ending(without_gradients(state), before, after, interrupted, unsaved)


def repeat_update(
    setup: Setup, state: TeamState, source: Source, identity: dict[str, Any], cfg: TrainConfig
) -> tuple[TeamState, Any]:
    """Make the update of a file (`replay_rollout`) once more and print its metrics; nothing is written.

    cfg: of the run; a run with a reward model updates its team by other settings, those of `setup`. identity: see `open_run`.
    Returns the state without gradients, and what the update learned from.
    """
    failed = read_failed_update(cfg)
    if cfg.run.resume:
        state = resume(cfg, state, {"config": flat(cfg), **identity, "bases": base_digests(state)}, read_only=True)
    state = state._replace(step=jnp.full_like(state.step, failed.step))  # determines its random keys
    state, metrics = update_team(setup, state, source.make_batches(state, failed.data))
    print(json.dumps({"step": failed.step} | update_metrics(setup.team, to_host(metrics)), indent=1), flush=True)
    return without_gradients(state), failed.data


def evaluate_if_due(source: Source, state: TeamState, updates: int, log: StepLog, run: Run) -> Any:
    """Return the evaluation after so many updates, which is also logged; None if none is due."""
    due = updates in (0, run.num_updates) or (run.eval_every and updates % run.eval_every == 0)
    if source.evaluate is None or not due:
        return None
    log.flush()  # the row before the evaluation's; waits for the update, which is training time
    start = time.monotonic()
    result = source.evaluate(state)
    log.evaluation(updates, result, start)
    return result


def save_at_failure(log: StepLog, saves: Saves, state: TeamState) -> None:
    """Save what a run that fails has learned. A failure to do so is a warning: it must not hide the error of the run."""
    try:
        log.flush()
        if log.last_step is None or log.last_step == int(state.step) - 1:
            saves.save_at_failure(state)
        else:
            warnings.warn(
                f"the run is not saved after update {int(state.step)}, whose row is missing: a resumed run makes it again",
                stacklevel=3,
            )
    except Exception as error:
        warnings.warn(f"the last updates of the run that failed are not saved: {error!r}", stacklevel=3)
