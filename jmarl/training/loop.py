"""The loop of training, which all kinds of runs share: update, log, save, evaluate, until all updates are made or a signal asks
to stop.

- The row of an update is written before the checkpoint that holds it, so a run that goes on misses none and doubles none.
- A checkpoint is written before an evaluation, so one that fails loses nothing; one that is missing is made on resume.
- Before a run ends early (a signal, an error) a checkpoint is written, unless the update that failed has consumed the weights.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from jmarl.config import Run
from jmarl.team import without_gradients
from jmarl.training.files.interrupt import Interrupted, interruptible
from jmarl.training.files.saving import Saves
from jmarl.training.logs.metrics_writer import say
from jmarl.training.logs.step_log import StepLog
from jmarl.types import TeamState

Advanced = tuple[TeamState, Callable[[], None]]  # the state after an update, and a function that hands it to the log


class Looped(NamedTuple):
    """What the loop ends with. The evaluations are None where there was none to make."""

    state: TeamState  # without gradients
    before: Any  # evaluation before training
    after: Any  # the newest evaluation after it
    interrupted: bool  # by a signal; the run can be resumed
    unsaved: str  # why the last checkpoint could not be written; empty: it was, or none was wanted


def loop(
    state: TeamState,
    run: Run,
    log: StepLog,
    saves: Saves,
    advance: Callable[[int, TeamState], Advanced],
    evaluate: Callable[[TeamState], Any] | None,
) -> Looped:
    """Train from `state` on. advance: make one update; evaluate: on what is held out, None if nothing is."""
    first, interrupted = int(state.step), False
    before = after = None
    saves.begin(state)

    def evaluated(updates: int) -> Any:
        due = run.eval_every and updates % run.eval_every == 0
        if evaluate is None or not (due or updates in (0, run.num_updates)):
            return None
        log.flush()  # the row before the evaluation's; waits for the update, which is training time
        began = time.monotonic()
        result = evaluate(state)
        log.evaluation(updates, result, began)
        return result

    with interruptible() as signals:
        try:
            if first == 0:
                before = evaluated(0)
            elif first == run.num_updates or not log.was_evaluated(first):
                after = evaluated(first)
            for step in range(first, run.num_updates):
                if interrupted := signals.requested:
                    break
                state, hand_to_log = advance(step, state)
                hand_to_log()
                saves.check()
                log.failed_saves = saves.failed
                if saves.is_due(step + 1) or step + 1 == run.num_updates:
                    log.flush()
                    log.sync()
                    saves.save(step + 1, state)
                log.stop_if_not_finite()
                if interrupted := signals.requested:
                    break
                after = evaluated(step + 1) or after
            log.flush()
            log.stop_if_not_finite()
        except Interrupted:  # within a part of the update, such as the training of a reward model: nothing of it has changed
            interrupted = True
        except BaseException:  # also Ctrl+C where it raises
            save_at_failure(log, saves, state)
            raise
        finally:
            log.flush()
        if interrupted:
            saves.save(int(state.step), state)
        unsaved = saves.finish(int(state.step))
    if interrupted and run.progress:
        where = f", saved in {run.output_dir}: resume goes on from there" if saves.savers and not unsaved else ""
        say(f"interrupted after update {int(state.step)} of {run.num_updates}{where}")
    return Looped(without_gradients(state), before, after, interrupted, unsaved)


def save_at_failure(log: StepLog, saves: Saves, state: TeamState) -> None:
    """Save what a run that fails has learned. A failure of that is told, and does not hide the one that is about to raise."""
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
