"""Checkpoints under CoMLRL's names: `train(resume_from_checkpoint=, checkpoint_dir=, ...)`, `save_checkpoint`.

A run has its files in one directory, with the checkpoint of each saved step in `checkpoints/STEP`. So checkpoint_dir is the
directory of the run, and a run continues in the directory of its checkpoint, or in that of a copy (`save_checkpoint`). Left
out: checkpoints of torch.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from jmarl.comlrl.settings.rollouts import RolloutConfig
from jmarl.config import TrainConfig, check
from jmarl.config.bounded_files import read_json
from jmarl.config.paths import expand_home
from jmarl.files.checkpoint import META, saved_steps
from jmarl.files.run_files import BEST_FILE, read_best

FOLDER = "checkpoints"  # of a run's directory


def with_checkpoints(
    config: TrainConfig,
    epoch: int,
    resume_from: str | os.PathLike | None,
    directory: str | os.PathLike | None,
    interval: int,
    limit: int | None,
) -> TrainConfig:
    """Return the settings of a run with the arguments of `train`.

    Args:
        config: the settings of the trainer.
        epoch: updates of an epoch, or of a round.
        resume_from: a run's directory, or one of its checkpoints.
        directory: of the run's files; None: output_dir.
        interval: epochs between checkpoints.
        limit: checkpoints kept.
    """
    check("checkpoint_interval", interval, type(interval) is int and interval > 0, "a number of epochs >= 1")
    check("checkpoint_total_limit", limit, limit is None or (type(limit) is int and limit > 0), "a number >= 1, or None")
    if resume_from is None and directory is None and interval == 1 and limit is None:
        return config
    changes: dict[str, Any] = {"save_every": interval * epoch}
    changes |= {} if limit is None else {"save_total_limit": limit}
    if directory is not None:
        changes["output_dir"] = os.fspath(directory := expand_home(directory))
    if resume_from is not None:
        run, step = find_checkpoint(resume_from)
        if directory is not None and Path(directory).absolute() != run.absolute():
            raise ValueError(
                f"checkpoint_dir={os.fspath(directory)!r} is another directory than {str(run)!r} of resume_from_checkpoint=: a "
                "run continues in its own directory; leave checkpoint_dir out, or copy the run there first"
            )
        changes |= {"output_dir": str(run), "resume": True, "resume_step": step}
    return config.replace(**changes)


def find_checkpoint(checkpoint: str | os.PathLike) -> tuple[Path, int | None]:
    """Return the directory of the run that a path names, and the step if it names a checkpoint. Raises ValueError."""
    path = Path(expand_home(checkpoint))
    if path.suffix == ".pt" or (path / "training_state.pt").exists():
        raise ValueError(
            f"{path} is a checkpoint of CoMLRL, with arrays of torch, which jmarl cannot continue: start from its agents, "
            "saved by save_model, with agents=[...]"
        )
    if path.name.isdecimal() and path.parent.name == FOLDER and path.is_dir():
        return path.parent.parent, int(path.name)
    run = path.parent if path.name == FOLDER else path
    if not saved_steps(run / FOLDER):
        raise ValueError(f"{path} has no checkpoint: give the directory of a run, or DIRECTORY/{FOLDER}/STEP")
    return run, None


def copy_run(run: str | os.PathLike, target: str | os.PathLike) -> Path:
    """Copy a run with its newest checkpoint to a directory, in place of an earlier copy. Returns the directory."""
    source, target = Path(run).absolute(), Path(expand_home(target)).absolute()
    newest = max(saved_steps(source / FOLDER), default=None) if os.fspath(run) else None
    if newest is None:
        raise RuntimeError(
            "there is no checkpoint to copy: train() writes them to output_dir (unless save_every=0), and save_checkpoint "
            "copies the newest one afterwards"
        )
    if target.exists() and not saved_steps(target / FOLDER):
        raise FileExistsError(f"{target} exists and is not a copy of a run: choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, ignore=lambda folder, names: _left_out(source, Path(folder), names, newest))
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    return target


def _left_out(source: Path, folder: Path, names: list[str], newest: int) -> list[str]:
    """Return what a copy of a run's folder does not need: models, earlier runs, copies, locks and other checkpoints."""
    if folder == source / FOLDER:
        best = read_best(source)
        return [name for name in names if name not in (str(newest), BEST_FILE, best and str(best.updates))]
    copies = [x for x in names if (folder / x / FOLDER).is_dir() or (x.startswith(".") and x.endswith(".tmp"))]
    if folder == source:
        return [*copies, *(x for x in names if x in ("models", "wandb") or x.startswith(("earlier_", ".", "lock")))]
    return copies


def read_metadata(checkpoint: str | os.PathLike) -> dict[str, Any]:
    """Return what the newest, or the given, checkpoint of a run says about itself, by CoMLRL's names."""
    run, step = find_checkpoint(checkpoint)
    step = max(saved_steps(run / FOLDER)) if step is None else step
    content = read_json(run / FOLDER / str(step) / META)
    config = content["meta"]["config"]
    names = {"version": content["format"], "sequence": step, "algorithm": config["algorithm"], "config": config}
    return names | {"run_id": None, "wandb": None}


def updates_per_epoch(args: RolloutConfig, config: TrainConfig, num_items: int) -> int:
    """Return the updates after which CoMLRL counts an epoch, or of iterative trainers a round."""
    if config.preference.round_updates:
        return config.preference.round_updates
    return max(1, round(args.count_updates(num_items) / args.num_train_epochs))
