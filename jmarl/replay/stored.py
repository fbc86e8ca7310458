"""What a run has stored of its steps, and the first difference to a step that was made again."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jmarl.config.bounded_files import read_json
from jmarl.files.run_files import PACKAGES, version_of
from jmarl.logs.completions_file import NAME, TRAIN, read_completions, steps_of
from jmarl.logs.metrics_writer import read_rows
from jmarl.logs.rollout_log import completions_record
from jmarl.rollout.turns import Rollout
from jmarl.team import Team

AXES = {  # fields of a turn that are compared, in this order -> their axes
    "prompts": ("agent", "node"), "acts": ("agent", "node"), "items": ("node",), "parents": ("node",),
    "completions": ("agent", "node", "completion"), "joint": ("joint action", "agent"),
    "rewards": ("node", "joint action", "agent"), "parts": ("name", "node", "joint action"),
    "measures": ("name", "node", "joint action"), "returns": ("agent", "node", "completion"),
    "lengths": ("agent", "node", "completion"), "cut": ("agent", "node", "completion"),
}  # fmt: skip
SHOWN = 60  # characters of a value


class StoredStep(NamedTuple):
    """What the directory of a run has of a step."""

    number: int
    record: dict[str, Any] | None  # of completions.jsonl.gz; None: it was left out, see max_completions_mb
    row: dict[str, Any]  # of metrics.jsonl; empty if there is none


def stored_steps(directory: Path, first: int, last: int) -> Iterator[StoredStep]:
    """Yield what is stored of each step after `first` up to `last`, in order."""
    rows = {}
    if (directory / "metrics.jsonl").is_file():
        rows = {row["step"]: row for row in read_rows(directory / "metrics.jsonl") if "reward/mean" in row}
    file = directory / NAME
    places = enumerate(steps_of(file)) if file.is_file() else ()
    # Older files count from 0, and `read_completions` counts their steps from 1.
    numbers = {i for i, (step, kind, *_) in places if kind == TRAIN and first <= step <= last}
    records = (record for record in (read_completions(file, numbers) if numbers else ()) if record["kind"] == TRAIN)
    record = next(records, None)
    for number in range(first + 1, last + 1):
        while record is not None and record["step"] < number:
            record = next(records, None)
        yield StoredStep(number, record if record and record["step"] == number else None, rows.get(number, {}))


def check_record(stored: StoredStep, team: Team, rollout: Rollout, directory: Path) -> bool:
    """Raise ValueError if tasks, texts or numbers of a step are not as stored. Returns whether they are stored."""
    if stored.record is None:
        return False
    text = json.dumps(completions_record(team, rollout), default=str, ensure_ascii=False)
    if place := first_difference(stored.record, json.loads(text.encode("utf-8", "replace"))):
        raise ValueError(difference_text(stored.number, place, directory))
    return True


def check_row(stored: StoredStep, columns: Mapping[str, float], directory: Path) -> None:
    """Raise ValueError if columns of a step are not as in its row of metrics.jsonl."""
    for name, now in json.loads(json.dumps({name: float(x) for name, x in columns.items()})).items():
        was = stored.row.get(name, now)
        if isinstance(was, int | float) and was != now and not (math.isnan(was) and math.isnan(now)):
            raise ValueError(difference_text(stored.number, f"column {name} was {was!r} and is {now!r}", directory))


def first_difference(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the first difference of two records of a step in words; empty if there is none. Fields that only one has, as of
    an older version, are not compared."""
    if place := difference(stored["tasks"], now["tasks"], ("task",)):
        return place
    for t, (old, new) in enumerate(zip(stored["turns"], now["turns"], strict=False)):
        old, new = ({"cut": None} | turn if "lengths" in turn else turn for turn in (old, new))  # left out where none is
        for name, axes in AXES.items():
            if name in old and name in new and (place := difference(old[name], new[name], axes)):
                return f"turn {t}, {name}, {place}"
    counts = [len(record["turns"]) for record in (stored, now)]
    return "" if counts[0] == counts[1] else f"it had {counts[0]} turns and has {counts[1]}"


def difference(old: Any, new: Any, axes: tuple[str, ...]) -> str:
    """Return where two nested values differ first, and both values; empty if they are equal. axes: names of the levels."""
    if old == new:
        return ""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        pairs = [(name, old[name], new[name]) for name in old]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = list(zip(range(len(old)), old, new, strict=True))
    else:
        return f"was {old!r:.{SHOWN}} and is {new!r:.{SHOWN}}"
    i, was, now = next(pair for pair in pairs if pair[1] != pair[2])
    inside = difference(was, now, axes[1:])
    return f"{axes[0]} {i}{' ' if inside.startswith('was ') else ', '}{inside}" if axes else inside


def difference_text(number: int, place: str, directory: Path) -> str:
    """Return a sentence for a step that is not as stored."""
    changes = machine_changes(directory)
    reasons = f"these have changed: {', '.join(changes)}" if changes else (
        "versions and devices are the same; a reward, a tool or an environment may depend on time, on a service, or on files"
    )  # fmt: skip
    return f"step {number} is not as the run has stored it: {place} ({reasons})"


def machine_changes(directory: Path) -> list[str]:
    """Return which versions and devices differ from those of the newest attempt of the run."""
    files = sorted(directory.glob("attempts/*/start.json"), key=lambda path: int(path.parent.name))
    if not files:
        return []
    start = read_json(files[-1])
    versions = {name: (was, version_of(name)) for name, was in start.get("versions", {}).items() if name in PACKAGES}
    changes = [f"{name} {was} -> {now}" for name, (was, now) in versions.items() if was != now]
    was, now = start.get("devices"), [str(device) for device in jax.devices()]
    return changes + ([f"devices {was} -> {now}"] if was not in (None, now) else [])
