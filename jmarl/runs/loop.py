"""The training loop, the same for every kind of run. One step:

    experience = source.play(step, state)                 host and device: play episodes, or draw given examples
    batches    = source.make_batches(state, experience)   host and device: returns, values of critics, arrays of each stack
    state      = update_team(setup, state, batches)       device: one jitted update per stack; the old state is donated
    log                                                   host: write the row of the step before, while the device works
    save, evaluate                                        when due

Runs on rollouts, given data, preference rounds and several seeds differ only in their `Source` (rollout/experience.py) and in
the loss. A step depends on `TeamState`, the step number, settings and items (in rounds also on the stored pairs, with early
rows on those), so a resumed run is bit-equal.

- The log holds the row of an update before a checkpoint holds the update: resuming neither loses nor repeats a row.
- A checkpoint is written before an evaluation, so a failed evaluation loses nothing; resuming repeats it.
- A run that ends early (signal, error) writes a checkpoint first, unless the failed update has already consumed the weights.
"""

import json
import time
import warnings
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp

from jmarl.config import Run, TrainConfig
from jmarl.files.attempt import mark_complete
from jmarl.files.config_file import record_choices
from jmarl.files.interrupt import Interrupted, interruptible
from jmarl.files.run_directory import open_run, read_state
from jmarl.files.run_files import next_commands
from jmarl.files.saving import Saves, write_models
from jmarl.learning.setup import Setup
from jmarl.learning.team_update import update_team
from jmarl.logs.failed_update import read_failed_update
from jmarl.logs.goodput import CLOCK
from jmarl.logs.step_log import StepLog, update_metrics
from jmarl.logs.terminal import say
from jmarl.memory import explain_memory
from jmarl.models.stack import to_host
from jmarl.rollout.experience import Source
from jmarl.team import without_gradients
from jmarl.types import TeamState

Log = TypeVar("Log", bound=StepLog)


class LoopResult(NamedTuple):
    """The state and the evaluations at the end of the loop."""

    state: TeamState  # without gradients
    before: Any  # evaluation before training; None if there was none
    after: Any  # newest evaluation after an update; None if there was none
    interrupted: bool  # a signal stopped the run, which can be resumed
    unsaved: str  # why the last checkpoint could not be written; empty if it was written or not wanted


def run_loop(setup: Setup, state: TeamState, source: Source, log: StepLog, saves: Saves) -> LoopResult:
    """Train from `state`, which is donated, to the last update or until a signal."""
    run, first = setup.cfg.run, int(state.step)
    interrupted, before, after = False, None, None
    with CLOCK.phase("compiling"):
        state = source.open(state)
    saves.check_room(state)
    with interruptible(bool(saves.savers)) as signals:
        try:
            if first == 0:
                before = evaluate_if_due(source, state, 0, log, run)
            elif first == run.num_updates or not log.was_evaluated(first):
                after = evaluate_if_due(source, state, first, log, run)
            for step in range(first, run.num_updates):
                if interrupted := signals.requested:
                    break
                if source.waits(step):
                    log.flush()  # the step before ends with its update
                with CLOCK.phase("rewards"):
                    experience = source.play(step, state)
                played_at = time.monotonic()  # the next two calls may wait for the update before; a step on rollouts ends here
                with CLOCK.phase("update"):
                    batches = source.make_batches(state, experience)
                    state, metrics = update_team(setup, state, batches)
                log.step(step, experience, metrics, played_at)
                del experience, batches  # free their memory; the log keeps what it needs
                log.failed_saves = saves.check()
                if saves.is_due(step + 1):
                    log.sync()
                    with CLOCK.phase("checkpoint"):
                        saves.save(step + 1, state)
                log.stop_if_not_finite()
                if interrupted := signals.requested:
                    break
                after = evaluate_if_due(source, state, step + 1, log, run) or after
            log.flush()
            log.stop_if_not_finite()
        except Interrupted:  # inside a step, e.g. while a reward model was trained: the state has not changed
            interrupted = True
        except BaseException:  # including a second Ctrl+C
            save_at_failure(log, saves, state)
            raise
        finally:
            log.flush()
        with CLOCK.phase("checkpoint"):
            if interrupted:
                saves.save(int(state.step), state)
            unsaved = saves.finish(int(state.step))
    if interrupted and run.progress:
        place = f", saved in {run.output_dir}: resume continues from there" if saves.savers and not unsaved else ""
        say(f"interrupted after update {int(state.step)} of {run.num_updates}{place}")
    return LoopResult(without_gradients(state), before, after, interrupted, unsaved)


def evaluate_if_due(source: Source, state: TeamState, updates: int, log: StepLog, run: Run) -> Any:
    """Evaluate and log the state after `updates` updates. Returns None if no evaluation is due."""
    due = updates in (0, run.num_updates) or (run.eval_every and updates % run.eval_every == 0)
    if source.evaluate is None or not due:
        return None
    log.flush()  # the row of the last update comes first; waiting for that update is training time
    start = time.monotonic()
    with CLOCK.phase("evaluation"):
        result = source.evaluate(state)
    log.evaluation(updates, result, start)
    return result


def save_at_failure(log: StepLog, saves: Saves, state: TeamState) -> None:
    """Save the newest state of a failing run. If that fails too, only warn: the original error must reach the caller."""
    try:
        log.flush()
        if log.last_step is None or log.last_step == int(state.step) - 1:
            saves.save_at_failure(state)
        else:
            warnings.warn(
                f"update {int(state.step)} is not saved, because its row could not be logged: resuming repeats the update",
                stacklevel=3,
            )
    except Exception as error:
        warnings.warn(f"the last updates of the failed run are not saved: {error!r}", stacklevel=3)


def run_training(
    setup: Setup,
    state: TeamState,
    source: Source,
    identity: dict[str, Any],
    cfg: TrainConfig,
    log_class: type[Log],
    wandb_config: dict | None,
) -> tuple[LoopResult, Log]:
    """Open or resume a run, train, and write the models. Returns the result of the loop and the log.

    Args:
        identity: see `open_run`.
        cfg: the settings of the run; those in `setup` differ if a reward model rewards the team.
        log_class: `RolloutLog` or `DataLog`.
        wandb_config: keyword arguments of `wandb.init`; None: no W&B.
    """
    with open_run(cfg, state, identity, wandb_config) as opened, explain_memory(setup.calls), CLOCK.running():
        record_choices(cfg)
        log = log_class(setup.team, cfg, opened.writer)
        result = run_loop(setup, opened.state, source, log, Saves(cfg.run, opened.savers, source.to_save))
        # Models with a score head are not written, because their directories would not hold the head.
        if not result.interrupted and setup.algorithm.row.margin != "score":
            with CLOCK.phase("checkpoint"):
                result = result._replace(unsaved=write_models(cfg.run, setup.team, result.state) or result.unsaved)
        if complete := bool(cfg.run.output_dir) and not (result.interrupted or result.unsaved):
            mark_complete(cfg.run.output_dir, cfg.run.num_updates)
    if complete and cfg.run.progress and setup.algorithm.row.margin != "score":  # those are often a part of another run
        say(next_commands(cfg.run.output_dir))
    return result, log


def repeat_update(
    setup: Setup, state: TeamState, source: Source, identity: dict[str, Any], cfg: TrainConfig
) -> tuple[TeamState, Any]:
    """Repeat the update in the file `replay_rollout` and print its metrics, without writing anything.

    Args:
        identity: see `open_run`.
        cfg: the settings of the run; those in `setup` differ if a reward model rewards the team.

    Returns:
        The state without gradients, and the experience of the update.
    """
    failed = read_failed_update(cfg)
    if cfg.run.resume:
        state, _ = read_state(cfg, state, identity)
    state = state._replace(step=jnp.full_like(state.step, failed.step))  # the random keys depend on the step
    state, metrics = update_team(setup, state, source.make_batches(state, failed.data))
    print(json.dumps({"step": failed.step} | update_metrics(setup.team, to_host(metrics)), indent=1), flush=True)
    return without_gradients(state), failed.data
