"""Stop a run whose updates are not finite, and write the experience of the last one to a file, so that it can be repeated.

The file `failed_update_N.pkl` holds the experience of update N, as it was sampled and rewarded. `failed_update_N.json` is a
readable summary: items, prompts, completions, rewards. Pickles can execute code: load only files that you trust.
"""

import json
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.config import TrainConfig
from jmarl.processes import exchange

SKIPPED = re.compile(r"(agent_\d+/(critic_)?|critic/)skipped")  # columns


class NonFiniteError(RuntimeError):
    """Losses, gradients or rewards were not finite in several updates in a row."""


class FailedUpdate(NamedTuple):
    """The experience of an update. Its random keys are determined by seed and step."""

    step: int  # number of updates before it
    seed: int
    algorithm: str
    data: Any  # the experience of the step, see `rollout.experience`
    why: str


class NonFiniteWatch:
    """Counts consecutive updates in which a loss or gradient was not finite, or no reward was valid."""

    def __init__(self, cfg: TrainConfig):
        self.cfg = cfg
        self.updates = 0  # bad updates in a row
        self.reason = ""  # what was wrong in the last one
        self._last: tuple[int, Any] | None = None  # its step and experience
        self._skipped: dict[str, float] = {}  # optimizer steps that each agent and critic has skipped: columns of the last row
        self._warned: set[str] = set()  # columns

    def count(self, step: int, experience: Any, row: dict[str, float], fault: str) -> None:
        """Count the update of a step, and warn the first time that an agent or critic skips an optimizer step.

        fault: why the update had nothing to learn from; empty if it had.
        """
        counts = {name: count for name, count in row.items() if SKIPPED.fullmatch(name)}
        before = {name: self._skipped.get(name, 0 if step == 0 else count) for name, count in counts.items()}
        new = [name for name, count in counts.items() if count > before[name]]
        self._skipped |= counts
        if first_time := [name for name in new if name not in self._warned]:
            place = self.cfg.run.output_dir and f" in {self.cfg.run.output_dir}"
            warnings.warn(
                f"update {step + 1}{place}: a loss or gradient is not finite, so the optimizer step was skipped (counted in "
                f"the log as {', '.join(first_time)}; this warning comes once)",
                stacklevel=5,
            )
            self._warned |= set(first_time)
        self.reason = f"a loss or gradient was not finite ({', '.join(new)})" if new else fault
        self.updates = self.updates + 1 if self.reason else 0
        self._last = (step, experience) if self.reason else None

    def stop(self, record: Callable[[Any], tuple[Any, dict[str, Any]]]) -> None:
        """Raise `NonFiniteError` after `stop_after_nonfinite` bad updates in a row, and write the last one to a file.

        record: experience -> the experience on the host, and its readable summary.
        """
        limit, cfg = self.cfg.run.stop_after_nonfinite, self.cfg
        if self._last is None or not limit or self.updates < limit:
            return
        (step, experience), note = self._last, ""
        if cfg.run.output_dir:
            data, summary = record(experience)
            failed = FailedUpdate(step, cfg.run.seed, cfg.algorithm, data, self.reason)
            try:
                path = exchange.from_first(lambda: write_failed_update(failed, summary, cfg.run.output_dir))
                note = f" Its experience is in {path}; --resume --set replay_rollout={path} repeats that update alone."
            except Exception as error:  # a full disk, items that cannot be pickled: still report why the run stops
                note = f" Its experience could not be written: {error!r}."
        first = f"s {step + 2 - self.updates} to" if self.updates > 1 else ""
        raise NonFiniteError(
            f"stopped: in update{first} {step + 1} of the run in {cfg.run.output_dir or 'memory'} {self.reason}. "
            f"Such optimizer steps were skipped.{note} A resumed run may have a lower learning_rate or "
            f"max_grad_norm; stop_after_nonfinite={limit} sets this limit"
        )


def write_failed_update(failed: FailedUpdate, summary: dict[str, Any], directory: str) -> Path:
    """Write the files of an update, and return the path for `replay_rollout`. summary: for the JSON file."""
    path = Path(directory) / f"failed_update_{failed.step + 1}.pkl"
    head = {"step": failed.step + 1, "seed": failed.seed, "algorithm": failed.algorithm, "why": failed.why}
    path.with_suffix(".json").write_text(json.dumps(head | summary, default=repr, indent=1), encoding="utf-8")
    with (temporary := path.with_suffix(".tmp")).open("wb") as file:
        pickle.dump(failed._asdict(), file)
    return temporary.replace(path)


def read_failed_update(cfg: TrainConfig) -> FailedUpdate:
    """Read the file `replay_rollout`. Raises FileNotFoundError, or ValueError if it is damaged or of another algorithm."""
    path = Path(cfg.run.replay_rollout)
    if not path.is_file():
        raise FileNotFoundError(f"replay_rollout={str(path)!r} is no file: give a failed_update_N.pkl of a run's output_dir")
    try:
        with path.open("rb") as file:
            failed = FailedUpdate(**pickle.load(file))
    except (ModuleNotFoundError, AttributeError) as error:  # it names modules as they were
        raise ValueError(
            f"replay_rollout={str(path)!r} was written by another version of jmarl ({error}): repeat the update with the "
            "version that wrote it, which attempts/ of its run names"
        ) from error
    except (pickle.UnpicklingError, EOFError, TypeError) as error:
        raise ValueError(f"replay_rollout={str(path)!r} is no failed_update_N.pkl, or is damaged: {error}") from error
    if failed.algorithm != cfg.algorithm:
        raise ValueError(
            f"replay_rollout={str(path)!r} is of algorithm={failed.algorithm!r}, and this run has {cfg.algorithm!r}"
        )
    return failed
