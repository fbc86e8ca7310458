"""Updates that cannot go on: the error that stops a run, and the file from which its update can be made once more.

The file `failed_update_N.pkl` holds what update N learned from, as it was sampled and rewarded, and `failed_update_N.json`
beside it what a person reads first: items, prompts, completions, rewards. It is a pickle: load only files that you trust.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.config import TrainConfig


class NonFiniteError(RuntimeError):
    """Losses, gradients or rewards were not finite in several updates in a row."""


class FailedUpdate(NamedTuple):
    """What one update learned from. Its random keys follow from seed and step."""

    step: int
    seed: int
    algorithm: str
    data: Any  # a `Rollout`, or each stack's batch of given data
    why: str


def write_failed_update(failed: FailedUpdate, about: dict[str, Any], directory: str) -> Path:
    """Write the files of an update, and return the path of the one that `replay_rollout` takes. about: for the JSON file."""
    path = Path(directory) / f"failed_update_{failed.step}.pkl"
    head = {"step": failed.step, "seed": failed.seed, "algorithm": failed.algorithm, "why": failed.why}
    path.with_suffix(".json").write_text(json.dumps(head | about, default=repr, indent=1), encoding="utf-8")
    with (temporary := path.with_suffix(".tmp")).open("wb") as file:
        pickle.dump(failed._asdict(), file)
    return temporary.replace(path)


def read_failed_update(cfg: TrainConfig) -> FailedUpdate:
    """The update of the file that `replay_rollout` names, refused where it is of another algorithm."""
    path = Path(cfg.run.replay_rollout)
    if not path.is_file():
        raise FileNotFoundError(f"replay_rollout={str(path)!r} is no file: give a failed_update_N.pkl of a run's output_dir")
    try:
        with path.open("rb") as file:
            failed = FailedUpdate(**pickle.load(file))
    except (pickle.UnpicklingError, EOFError, TypeError) as error:
        raise ValueError(f"replay_rollout={str(path)!r} is no failed_update_N.pkl, or is damaged: {error}") from error
    if failed.algorithm != cfg.algorithm:
        raise ValueError(
            f"replay_rollout={str(path)!r} is of algorithm={failed.algorithm!r}, and this run has {cfg.algorithm!r}"
        )
    return failed
