"""The training loop, the same for every kind of run. One step:

    experience = source.play(step, state)                 host and device: play episodes, or draw given examples
    batches    = make_batches(setup, state, experience)   host and device: returns, values of critics, arrays of each stack
    state      = update_team(setup, state, batches)       device: one jitted update per stack; the old state is donated
    log                                                   host: write the row of the step before, while the device works
    save, evaluate                                        when due

Runs on rollouts, given data, preference rounds and several seeds differ only in their `Kind` (runs/run.py) and in the loss. A
step depends on `TeamState`, the step number, settings and items (in rounds also on the stored pairs, with early
rows on those), so a resumed run is bit-equal.

- The log holds the row of an update before a checkpoint holds the update: resuming neither loses nor repeats a row.
- A checkpoint is written before an evaluation, so a failed evaluation loses nothing; resuming repeats it.
- A run that ends early (signal, error) writes a checkpoint first, unless the failed update has already consumed the weights.
"""

import contextlib
import json
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jmarl.files.attempt import write_end
from jmarl.files.config_file import record_choices
from jmarl.files.interrupt import Interrupt, Interrupted, Stopped, interruptible
from jmarl.files.own_files import Watch
from jmarl.files.run_directory import open_run, read_state
from jmarl.files.run_files import next_commands, shown
from jmarl.files.saving import Saves, write_models
from jmarl.learning.setup import Setup
from jmarl.learning.team_update import update_calls, update_team
from jmarl.logs.failed_update import read_failed_update
from jmarl.logs.goodput import CLOCK
from jmarl.logs.step_log import StepLog, update_metrics
from jmarl.logs.terminal import say
from jmarl.memory import explain_memory, shapes_of
from jmarl.processes import exchange
from jmarl.rollout.experience import Source
from jmarl.runs.run import PreparedRun
from jmarl.team import without_gradients
from jmarl.types import TeamState


class LoopResult(NamedTuple):
    """The state and the evaluations at the end of the loop."""

    state: TeamState  # without gradients
    before: Any  # evaluation before training; None if there was none
    after: Any  # newest evaluation after an update; None if there was none
    interrupted: bool  # a signal stopped the run, which can be resumed
    unsaved: str  # why the last checkpoint could not be written; empty if it was written or not wanted


def run_loop(run: PreparedRun, state: TeamState, source: Source, log: StepLog, saves: Saves) -> LoopResult:
    """Train from `state`, which is donated, to the last update or until a signal."""
    setup, settings, first = run.setup, run.cfg.run, int(state.step)
    interrupted, reason, before, after = False, "", None, None
    shapes = None  # of the newest batches
    with CLOCK.phase("compiling"):
        state = source.open(state)
        exchange.wait_for_all()  # collectives of CPUs wait 30 s for each other, and one process may compile for longer
    saves.check_room(state)
    saves.open_best(first)
    explained = explain_memory(lambda: [] if shapes is None else update_calls(setup, state, shapes))
    with explained, interruptible(bool(saves.savers)) as signals:
        try:
            if first == 0:
                before = evaluate_if_due(source, state, 0, log, saves, signals)
            elif (after := log.logged_evaluation(first)) is None:
                after = evaluate_if_due(source, state, first, log, saves, signals)
            for step in range(first, settings.num_updates):
                if interrupted := exchange.any_of(signals.requested):
                    break
                state = source.renew(step, state, after)
                if source.waits(step):
                    log.flush()  # the step before ends with its update
                with CLOCK.phase("rewards"):
                    experience = source.play(step, state)
                played_at = time.monotonic()  # the next two calls may wait for the update before; a step on rollouts ends here
                with CLOCK.phase("update"):
                    batches = run.kind.make_batches(setup, state, experience)
                    shapes = shapes_of(batches)
                    state, metrics = update_team(setup, state, batches)
                log.step(step, experience, metrics, played_at)
                del experience, batches  # free their memory; the log keeps what it needs
                log.failed_saves = saves.check()
                if saves.is_due(step + 1):
                    log.sync()
                    with CLOCK.phase("checkpoint"):
                        saves.save(step + 1, state)
                log.stop_if_not_finite()
                if interrupted := exchange.any_of(signals.requested):
                    break
                after = evaluate_if_due(source, state, step + 1, log, saves, signals) or after
            log.flush()
            log.stop_if_not_finite()
        except Interrupted as error:  # inside a step, e.g. because no server answers: the state has not changed
            interrupted, reason = True, f" {error}"
        except BaseException as error:  # including a second Ctrl+C
            if exchange.tell(error):
                save_at_failure(log, saves, state)
            raise
        finally:
            if not exchange.has_ended():
                log.flush()
        with CLOCK.phase("checkpoint"):
            if interrupted:
                saves.save(int(state.step), state)
            unsaved = saves.finish(int(state.step))
    if interrupted and settings.progress:
        place = f", saved in {shown(settings.output_dir)}: resume continues from there" if saves.savers and not unsaved else ""
        say(f"interrupted after update {int(state.step)} of {settings.num_updates}{reason}{place}")
    for line in saves.best_lines() if settings.progress and not interrupted else ():
        say(line)
    return LoopResult(without_gradients(state), before, after, interrupted, unsaved)


def evaluate_if_due(source: Source, state: TeamState, updates: int, log: StepLog, saves: Saves, signals: Interrupt) -> Any:
    """Evaluate and log the state after `updates` updates, and keep it if it is the best. Returns None if no evaluation is due.

    A signal ends the evaluation by `Interrupted`; of several processes only before it begins."""
    settings = saves.run
    due = updates in (0, settings.num_updates) or (settings.eval_every and updates % settings.eval_every == 0)
    if source.evaluate is None or not due:
        return None
    log.flush()  # the row of the last update comes first; waiting for that update is training time
    start = time.monotonic()
    try:
        with CLOCK.phase("evaluation"), signals.raising() if exchange.count() == 1 else contextlib.nullcontext():
            if exchange.any_of(signals.requested):
                raise Stopped
            result = source.evaluate(state)
    except Stopped:
        raise Interrupted("before its evaluation, which the resumed run makes") from None
    if saves.is_best(updates, log.scores(result)):  # before its row: a resumed run repeats evaluations without one
        log.sync()
        with CLOCK.phase("checkpoint"):
            saves.save(updates, state)
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


@explain_memory(lambda: [])  # also while programs compile, a state is restored and models are written
def run_training(run: PreparedRun, source: Source, state: TeamState, wandb_config: dict | None) -> tuple[LoopResult, StepLog]:
    """Open or resume a run, train, and write the models. Returns the result of the loop and the log.

    wandb_config: keyword arguments of `wandb.init`; None: no W&B.
    """
    cfg, team = run.cfg, run.team
    writes_models = not run.setup.algorithm.compares_scores  # their directories would not hold the head of a reward model
    with open_run(cfg, state, run.identity, wandb_config) as opened, CLOCK.running():
        if exchange.is_first():
            record_choices(cfg, team, run.task.env, run.task.items)
        watch = Watch(cfg.run.output_dir if exchange.is_first() else "", opened.writer)
        unchanged = not opened.changes and run.task.eval_metrics is None
        log = run.kind.log(team, cfg, opened.writer, unchanged)
        result = run_loop(run, opened.state, source, log, Saves(cfg.run, opened.savers, source.to_save))
        result = end_run(run.setup, result, watch.lost, writes_models)
    if cfg.run.output_dir and cfg.run.progress and not (result.unsaved or result.interrupted) and writes_models:
        say(next_commands(shown(cfg.run.output_dir)))  # a reward model is often a part of another run
    return result, log


def end_run(setup: Setup, result: LoopResult, lost: Callable[[], str], writes_models: bool = True) -> LoopResult:
    """Write the models of a run, and that it has ended. Returns the result with why something could not be written.

    lost: returns which of its files were removed meanwhile, see `Watch`."""
    run = setup.cfg.run
    if not result.interrupted and writes_models:
        with CLOCK.phase("checkpoint"):
            result = result._replace(unsaved=write_models(run, setup.team, result.state) or result.unsaved)
    result = result._replace(unsaved=result.unsaved or exchange.from_first(lost))
    if run.output_dir and not result.unsaved and exchange.is_first():
        write_end(run.output_dir, run.num_updates, int(result.state.step), result.interrupted)
    return result


def repeat_update(run: PreparedRun, state: TeamState) -> tuple[TeamState, Any]:
    """Repeat the update in the file `replay_rollout` and print its metrics, without writing anything. Returns the state without
    gradients, and the experience of the update."""
    failed = read_failed_update(run.cfg)
    if run.cfg.run.resume:
        state, _ = read_state(run.cfg, state, run.identity)
    state = state._replace(step=jnp.full_like(state.step, failed.step))  # the random keys depend on the step
    state, metrics = update_team(run.setup, state, run.kind.make_batches(run.setup, state, failed.data))
    row = {"step": failed.step + 1} | update_metrics(run.team, metrics)
    if exchange.is_first():
        print(json.dumps(row, indent=1), flush=True)
    return without_gradients(state), failed.data
