"""Open the output directory of a run: lock it, move an earlier run aside or resume it, and open checkpoints and logs."""

import contextlib
import datetime
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jmarl.algorithms import on_platform
from jmarl.config import TrainConfig, flat
from jmarl.config.bounded_files import read_json
from jmarl.files.attempt import attempt
from jmarl.files.changes import CHANGES_PENDING, CannotGoOn, check_changes
from jmarl.files.checkpoint import META, SAVING, Checkpointer, CheckpointError, saved_steps
from jmarl.files.lock import check_unlocked, locked
from jmarl.files.own_files import check_free, set_aside
from jmarl.files.run_files import shown
from jmarl.logs.goodput import CLOCK
from jmarl.logs.metrics_writer import MetricsWriter
from jmarl.logs.terminal import say
from jmarl.models.lora import digest
from jmarl.processes import exchange
from jmarl.team import to_checkpoint
from jmarl.types import StackState, TeamState

logger = logging.getLogger(__name__)
C = TypeVar("C", bound=TrainConfig)

PATTERN_MARKS = "*?[\\"  # characters of a path that Orbax reads as a pattern
ENOUGH_TO_TRY = 2**20  # free bytes

# Settings that may be auto, and are chosen when a run starts.
CHOSEN = ("compute_dtype", "remat", "micro_batches", "chat_date", "long_context")


def checkpoints_of(cfg: TrainConfig) -> Path:
    """Return the directory of a run's checkpoints."""
    return Path(cfg.run.output_dir) / "checkpoints"


def with_absolute_directory(cfg: C) -> C:
    """Return settings whose output directory stays the same if code of the user changes the working directory."""
    return cfg.replace(output_dir=str(Path(cfg.run.output_dir).absolute())) if cfg.run.output_dir else cfg


def check_directory(cfg: TrainConfig) -> None:
    """Raise an error if the output directory does not allow this run. Only reads.

    Raises:
        DirectoryInUse: another process writes there.
        ValueError: it has a name below which Orbax finds no files.
        CannotGoOn: see `check_contents`.
    """
    if cfg.run.output_dir and not cfg.run.replay_rollout:
        check_name(cfg)
        check_unlocked(cfg.run.output_dir)
        check_contents(resolve_resume(cfg))


def check_name(cfg: TrainConfig) -> None:
    """Raise ValueError if a run needs checkpoints, and the path of its directory has characters that Orbax cannot take: it
    looks for its files by patterns, and would find none, or those of another directory."""
    path = str(Path(cfg.run.output_dir).absolute())
    marks = [mark for mark in PATTERN_MARKS if mark in path]
    is_text = path.encode(errors="ignore").decode() == path
    if not (cfg.run.saves or cfg.run.resume) or (is_text and not marks):
        return
    raise ValueError(
        f"the output directory {path} cannot hold checkpoints: its path has {' '.join(marks) or 'bytes that are no UTF-8'}, "
        "and Orbax, which writes them, finds files by patterns; choose another output_dir (--output), or make no checkpoints "
        "(save_every=0)"
    )


def try_checkpoint(checkpoints: Path) -> None:
    """Write a small checkpoint to a directory of checkpoints, read it back and delete it, so that a run that could not be
    resumed does not begin. Raises ValueError. Skipped on a disk that is full, where a run waits for room."""
    if exchange.from_first(lambda: shutil.disk_usage(checkpoints).free) < ENOUGH_TO_TRY:
        return
    folder, numbers = checkpoints / f"0{SAVING}", np.arange(2.0)  # the next run removes what a kill leaves
    try:
        with Checkpointer(folder) as saved:
            saved.save(0, {"numbers": numbers}, {})
            read = saved.read_arrays(0)[0]["numbers"]
        if (np.asarray(read) != numbers).any():
            raise CheckpointError("other numbers were read than were written")
    except CheckpointError as error:
        raise ValueError(
            f"the output directory {checkpoints.parent} cannot hold checkpoints: {error}; choose another output_dir "
            "(--output), or make no checkpoints (save_every=0)"
        ) from error
    finally:
        exchange.from_first(partial(shutil.rmtree, folder, ignore_errors=True))


def resolve_resume(cfg: C, seeds: Sequence[int] = ()) -> C:
    """Return settings with True or False in place of resume=auto: True if there is a checkpoint to resume from. Only reads.

    seeds: of several runs in one program; all of them must have a checkpoint.

    Raises:
        CannotGoOn: only some of several seeds have a checkpoint.
    """
    if cfg.run.resume != "auto":
        return cfg
    directories = [checkpoints_of(cfg.for_seed(int(seed)) if seeds else cfg) for seed in seeds or (cfg.run.seed,)]
    begun = [directory for directory in directories if saved_steps(directory)]
    if begun and len(begun) < len(directories):
        raise CannotGoOn(
            f"the run was ended while its first checkpoints were written, and only some of its seeds have one: move "
            f"{', '.join(map(str, begun))} away to begin anew"
        )
    return cfg.replace(resume=bool(begun))


def check_contents(cfg: TrainConfig) -> None:
    """Raise `CannotGoOn` if there is no checkpoint to resume from, or if a new run would replace an unfinished one or files of
    the user."""
    check_free(cfg.run.output_dir)
    directory = checkpoints_of(cfg)
    last = max(saved_steps(directory), default=None)
    if cfg.run.resume:
        if last is None:
            raise CannotGoOn(
                f"there is nothing to resume: {directory} has no complete checkpoint. Is that the output directory? Without "
                "--resume (resume=True) the run starts anew; with --resume auto it does whichever is possible"
            )
        if cfg.run.resume_step not in (None, *saved_steps(directory)):
            steps = ", ".join(map(str, saved_steps(directory)))
            raise CannotGoOn(f"there is no checkpoint of step {cfg.run.resume_step} in {directory}: choose from {steps}")
        if cfg.run.num_updates < (cfg.run.resume_step or last):
            raise CannotGoOn(
                f"num_updates={cfg.run.num_updates} is not allowed: the run in {cfg.run.output_dir} has made {last} already"
            )
    elif last is not None and not is_finished(directory, last):
        raise CannotGoOn(
            f"the output directory {cfg.run.output_dir} already holds checkpoints up to step {last} of a run that has not "
            "ended: continue it with --resume (resume=True, or auto), or choose another directory"
        )


def is_finished(checkpoints: Path, step: int) -> bool:
    """Return whether a run had made all its updates at a step. A damaged checkpoint counts as unfinished."""
    try:
        content = read_json(checkpoints / str(step) / META)
        return step >= content["meta"]["config"]["num_updates"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def chosen_before(cfg: TrainConfig) -> dict[str, Any]:
    """Return the values of settings that are auto here from the newest readable checkpoint of the run that resumes: with other
    values its numbers would change. {} for a new run."""
    settings = flat(cfg)
    names = [name for name in CHOSEN if settings[name] == "auto"]
    if not names or not cfg.run.resume:
        return {}
    directory = checkpoints_of(cfg)
    for step in sorted(saved_steps(directory), key=lambda step: (step == cfg.run.resume_step, step), reverse=True):
        try:
            config = read_json(directory / str(step) / META)["meta"]["config"]
        except (OSError, ValueError, KeyError, TypeError):  # resuming skips damaged checkpoints too, and says so
            continue
        return {name: config.get(name, "auto") for name in names}  # older runs lack newer settings
    return {}


def resolve_auto(cfg: C, seeds: Sequence[int] = ()) -> C:
    """Return settings without auto, as far as they are known before the state of the run is. A run that resumes has those that
    it began with.

    seeds: of several runs in one program.
    """
    before = chosen_before(cfg.for_seed(seeds[0]) if seeds else cfg)
    if cfg.episodes.chat_date == "auto":
        before.setdefault("chat_date", datetime.date.today().isoformat())
    return on_platform(cfg.replace(**before), jax.default_backend())


class OpenRun(NamedTuple):
    """A run whose directory is open."""

    state: TeamState  # initial, or restored from a checkpoint
    savers: list[tuple[Checkpointer, dict[str, Any]]]  # its checkpointer and the metadata of checkpoints; empty: no checkpoints
    writer: MetricsWriter | None  # None without an output directory
    changes: Sequence[str] = ()  # settings, data and reward that differ from those before it was resumed


@contextlib.contextmanager
def open_run(
    cfg: TrainConfig, state: TeamState, identity: dict[str, Any], wandb_config: dict | None, step: int | None = None
) -> Iterator[OpenRun]:
    """Lock the directory of a run, restore its state when it resumes, and open its checkpoints and logs.

    Args:
        cfg: the settings.
        state: the initial state.
        identity: team, critics, environment, data and reward, which must not change when a run resumes.
        wandb_config: keyword arguments of `wandb.init`; None: no W&B.
        step: the checkpoint to resume from; None: the newest intact one.
    """
    meta, savers, writer, changes = {"config": flat(cfg), **identity}, [], None, list[str]()
    owns_files = bool(cfg.run.output_dir) and exchange.is_first()
    note: Callable[[str], None] = logger.debug  # without a directory there is no log of the attempt
    with contextlib.ExitStack() as opened:
        if cfg.run.saves or cfg.run.resume:
            meta["bases"] = base_digests(state)

        def enter() -> Callable[[str], None]:
            opened.enter_context(locked(cfg.run.output_dir))
            check_contents(cfg)  # again, because another process may have written before the lock was taken
            if not cfg.run.resume:
                set_aside(cfg.run.output_dir)
            return opened.enter_context(attempt(cfg.run.output_dir, meta))

        if owns_files:
            note = enter()
        exchange.wait_for_all()
        if cfg.run.resume:
            state, changes, meta["changes"] = resume(cfg, state, meta, step)
            if changes:
                note(f"resumed with other settings: {'; '.join(changes)}")
        if cfg.run.saves:
            saver = Checkpointer(checkpoints_of(cfg), cfg.run.save_total_limit, cfg.run.keep_every)
            savers = [(opened.enter_context(saver), meta)]
            try_checkpoint(checkpoints_of(cfg))
        if owns_files:
            note(f"the first step is {int(state.step) + 1}")
            hparams = meta["config"] | {"environment": meta.get("environment", {})}
            writer = opened.enter_context(open_writer(cfg, hparams, int(state.step), wandb_config))
        elif cfg.run.progress and exchange.is_first():
            writer = opened.enter_context(open_writer(cfg, {}, int(state.step)))
        yield OpenRun(state, savers, writer, changes)


def open_writer(cfg: TrainConfig, hparams: dict[str, Any], updates: int, wandb_config: dict | None = None) -> MetricsWriter:
    """Return the writer of a run's metrics, which drops rows of later steps. Without output_dir it only shows progress.

    updates: made before."""
    return MetricsWriter(
        cfg.run.output_dir,
        hparams,
        total_steps=cfg.run.num_updates,
        start_step=updates + 1 if updates else 0,  # the evaluation before the first update has step 0
        tensorboard=cfg.run.tensorboard,
        progress=cfg.run.progress,
        wandb_config=wandb_config,
        trackio={"project": cfg.run.trackio, "trace_every": cfg.run.log_every} if cfg.run.trackio else None,
        max_completions_mb=cfg.run.max_completions_mb,
        phase=CLOCK.reader(),
    )


def resume(
    cfg: TrainConfig, state: TeamState, meta: dict[str, Any], step: int | None = None, *, read_only: bool = False
) -> tuple[TeamState, list[str], list[dict[str, Any]]]:
    """Restore the state of a checkpoint, on the devices and in the shapes of `state`, whose arrays are freed.

    Returns the state; what differs from the checkpoint's settings, data and reward; and all such changes since the run began,
    as {"step": where it was resumed, "changed": what differed}. Completions that had begun early are dropped if what they
    depend on has changed.

    Args:
        meta: metadata that this run would write; `CannotGoOn` is raised if that of the checkpoint does not fit.
        step: the checkpoint; None: that of resume_step, or the newest intact one.
        read_only: leave checkpoints of later steps; otherwise they are set aside.
    """
    step = cfg.run.resume_step if step is None else step
    with Checkpointer(checkpoints_of(cfg), cfg.run.save_total_limit, read_only=read_only) as saved:
        if step is None and (step := saved.newest_intact(cfg.run.strict_checkpoints)) is None:
            raise CannotGoOn(f"there is nothing to resume: all checkpoints in {saved.directory} are damaged")
        old, step = saved.read_meta(step)
        changes = check_changes(cfg, old, meta, step)
        drops_pending = bool(cfg.episodes.async_steps) and not changes.keys().isdisjoint(CHANGES_PENDING)
        replaced = to_checkpoint(state)._replace(pending=() if drops_pending else state.pending)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None), replaced
        )
        for leaf in jax.tree.leaves(replaced):  # two states may not fit into memory
            leaf.delete()
        restored = saved.restore(like, step, resized="pending", unused="pending" if drops_pending else None)[0]
        restored = restored._replace(pending=state.pending) if drops_pending else restored
        if not read_only:
            for later in [s for s in saved.steps() if s > step]:  # if some of several seeds have saved more than all have
                saved.set_aside(later, "later")
    changed = list(changes.values())
    if cfg.run.progress:
        notes = "".join(f"; {text}" for text in changed)
        say(f"resuming {shown(cfg.run.output_dir)} from step {step} of {cfg.run.num_updates}{notes}")

    def complete(new: Sequence[StackState], old: Sequence[StackState]) -> tuple[StackState, ...]:
        return tuple(stack._replace(grads=other.grads, base=other.base) for stack, other in zip(new, old, strict=True))

    stacks, critics = complete(restored.stacks, state.stacks), complete(restored.critics, state.critics)
    history = old.get("changes", []) + ([{"step": step, "changed": changed}] if changed else [])
    return restored._replace(stacks=stacks, critics=critics), changed, history


def read_state(
    cfg: TrainConfig, state: TeamState, identity: dict[str, Any], step: int | None = None
) -> tuple[TeamState, list[str]]:
    """Return the state that a run resumes from, and what has changed, as `resume` does, without changing a file.

    state: the initial state, whose arrays are freed. identity: see `open_run`.
    """
    meta = {"config": flat(cfg), **identity, "bases": base_digests(state)}
    return resume(cfg, state, meta, step, read_only=True)[:2]


def base_digests(state: TeamState) -> list[str]:
    """Return a digest of the base of each stack and critic with LoRA; they must be equal when a run resumes."""
    return [digest(stack.base) for stack in (*state.stacks, *state.critics) if stack.base is not None]
