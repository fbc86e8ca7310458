"""Which files in an output directory are those of runs, and move them aside.

A directory is a run's if a run has left its mark there: the record of an attempt, or a checkpoint. In such a directory the
names below are files of runs. Everything beside them is the user's, and stays. In any other directory a run begins only if all
these names are free, so that they hold nothing of the user later.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from jmarl.config.bounded_files import kind_of, printable
from jmarl.files.changes import CannotGoOn
from jmarl.files.run_files import shown
from jmarl.logs.metrics_writer import MetricsWriter

logger = logging.getLogger(__name__)

# Folder -> the names in it that are files of runs.
LEARNED = {
    "checkpoints": r"\d+(\.(saving|deleting|damaged|later))?|best\.json(\.tmp)?",
    "models": r"agent_\d+(\.(saving|old))?",
    "pairs": r"round_\d{4,}\.(jsonl|json|tmp)",
    "history": r"round_\d{6,}\.(npz|tmp)",
    ".": r"reward_model(_\d+)?|failed_update_\d+\.(pkl|json|tmp)",
}
EVENTS = r"events\.out\.tfevents\.\d+\..+\.\d{18,}\.\d+"  # the long number are nanoseconds: others' files have none
LOGS = {".": rf"metrics\.jsonl(\.tmp)?|completions\.jsonl\.gz(\.tmp)?|{EVENTS}|(wandb_id|trackio_name)\.(txt|tmp)"}
START = {"attempts": r"\d+", ".": r"config\.yaml(\.tmp)?"}
EMPTY = ("metrics.jsonl", "completions.jsonl.gz")  # of a start that failed before its first step
SHORT_LIVED = ("checkpoints", "history")  # folders of which a run deletes what it does not need any more
PARTIAL = (".tmp", ".saving", ".old")
MARKS = ("attempts/*/start.json", "checkpoints/*/meta.json", "seed_*/attempts/*/start.json")
MAX_NAMES = 4  # in an error


def own_paths(root: Path, names: Mapping[str, str]) -> list[Path]:
    """Return the paths in a directory whose names are those of files of runs. names: LEARNED, LOGS or START."""
    folders = {root / folder: re.compile(name) for folder, name in names.items()}
    return sorted(x for folder, name in folders.items() if folder.is_dir() for x in folder.iterdir() if name.fullmatch(x.name))


def all_own_paths(root: Path) -> list[Path]:
    """Return all paths in a directory whose names are those of files of runs."""
    return [path for names in (LEARNED, LOGS, START) for path in own_paths(root, names)]


def is_of_run(root: Path) -> bool:
    """Return whether a run has left its mark in a directory."""
    return any(path.parent.name.isdecimal() for mark in MARKS for path in root.glob(mark))


def check_free(directory: str | Path) -> None:
    """Raise `CannotGoOn` if a directory that is not a run's has files with the names of those of runs, or if one of a run's is
    a link to a file, or a pipe, to which a run would write. Links to folders may be: of checkpoints elsewhere. Only reads."""
    root = Path(directory)
    if is_of_run(root):
        for path in all_own_paths(root):
            if not path.is_dir() and (kind := kind_of(path.lstat().st_mode)):
                raise CannotGoOn(
                    f"the output directory {printable(root)} has {printable(path.relative_to(root))}, which is {kind}, and a "
                    "run would write to it: move it away, or choose another output_dir (--output)"
                )
        return
    taken = [str(path.relative_to(root)) for path in all_own_paths(root)]
    if taken:
        names = ", ".join(taken[:MAX_NAMES]) + f" and {len(taken) - MAX_NAMES} more" * (len(taken) > MAX_NAMES)
        raise CannotGoOn(
            f"the output directory {directory} has {names}, which no run of jmarl has written, and a run would write files of "
            "these names: choose another output_dir (--output), or move them"
        )


def set_aside(directory: str) -> None:
    """Move the files of an earlier run (metrics, completions, attempts, TensorBoard events, checkpoints, models, pairs, reward
    models, settings) into the folder `earlier_1`, `earlier_2`, ... of its directory. Files of the user stay.

    A start that failed before its first step left nothing to keep but the log of its attempt, which stays where it is.
    Raises `CannotGoOn` as `check_free`.
    """
    check_free(directory)
    root = Path(directory)
    if not is_of_run(root):
        return
    learned, logs = (own_paths(root, names) for names in (LEARNED, LOGS))
    sizes = [(root / name).stat().st_size for name in EMPTY if (root / name).is_file()]
    if not learned and (root / EMPTY[0]).is_file() and not any(sizes):
        for path in logs:
            path.unlink()
        return
    if not learned and not logs:
        return
    target = next(root / f"earlier_{n}" for n in itertools.count(1) if not (root / f"earlier_{n}").exists())
    for path in [*learned, *logs, *own_paths(root, START)]:
        new = target / path.relative_to(root)
        new.parent.mkdir(parents=True, exist_ok=True)
        path.rename(new)
    for folder in [folder for names in (LEARNED, START) for folder in names if folder != "."]:
        with contextlib.suppress(OSError):  # it does not exist, or has files of the user
            (root / folder).rmdir()
    names = shown(directory), shown(str(target))
    logger.warning("%s held an earlier run; its metrics, checkpoints and models are now in %s", *names)


class Watch:
    """The files that the run in a directory has when it begins, and does not delete.

    writer: of its logs.
    """

    def __init__(self, directory: str, writer: MetricsWriter | None):
        paths = all_own_paths(Path(directory)) if directory else []
        self.paths = [path for path in paths if path.parent.name not in SHORT_LIVED and path.suffix not in PARTIAL]
        self.writer = writer

    def lost(self) -> str:
        """Return a sentence about files that were removed, or replaced while the run wrote to them; empty if there are none."""
        logs = self.writer.find_lost_files() if self.writer else []
        names = list(dict.fromkeys(str(path) for path in [*logs, *(path for path in self.paths if not path.exists())]))
        more = f" and {len(names) - 1} more" * (len(names) > 1)
        return f"{names[0]}{more} {'were' if more else 'was'} removed or replaced while the run went on" if names else ""
