"""Read what a report shows from run directories: rows, settings, attempts. Completions are read by `completions.py`."""

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.config.bounded_files import check_inside, printable, read_json, read_tail
from jmarl.config.paths import expand_home
from jmarl.config.validation import did_you_mean
from jmarl.config.yaml_file import CutShort
from jmarl.files.lock import DirectoryInUse, check_unlocked
from jmarl.files.run_files import Best, config_file_of, leaves, read_best, read_config
from jmarl.files.trusted import is_trusted
from jmarl.logs.metrics_writer import read_rows

METRICS, ATTEMPTS = "metrics.jsonl", "attempts"
TEXTS = {"time": str, "host": str, "python": str, "command": list, "devices": list, "versions": dict}  # of `start.json`
MAX_LOGS = 2 * 10**7  # characters of the logs of a run, the newest ones
IDENTITY = "identity/"  # begins the names of what is no setting: fingerprints of team, environment, data and reward
# Settings in which runs of one group may differ: they change neither what is learned nor how fast.
NOT_COMPARED = {
    "seed", "seeds", "output_dir", "resume", "resume_step", "progress", "allow_changed", "save_every", "save_minutes",
    "save_total_limit", "keep_best", "keep_every", "experiment_name", "description", "tags",
}  # fmt: skip


AGENT = re.compile(r"\bagent_\d+(?=/)")


class RecordedRun(NamedTuple):
    """What one run directory has."""

    name: str
    path: Path
    rows: list[dict[str, float]]  # one per step
    evaluations: list[dict[str, float]]  # rows with `eval/updates`
    settings: dict[str, Any]  # of the newest attempt, flat; empty if the run recorded none
    attempts: list[dict[str, Any]]  # `start.json` of each start, with the text of its log
    best: Best | None = None  # the best evaluation of a run with keep_best
    status: str = ""  # see `status_of`


class Group(NamedTuple):
    """Runs that are shown as one: their mean, and its interval."""

    name: str
    runs: list[RecordedRun]


class Grouping(NamedTuple):
    """One way to put runs together."""

    by: str  # what a group is, as the page calls it
    groups: list[Group]


def metrics(directory: str | Path) -> Any:
    """Return the rows of a run as a DataFrame of pandas: one of each update, and one of each evaluation (`eval/updates`).

    The columns are those of metrics.jsonl (`experiments/README.md` describes them), but for agents whose environment names
    their roles: `writer/return` in place of `agent_0/return`, unless two columns would have one name.
    """
    import pandas

    path = Path(expand_home(directory))
    if not (path / METRICS).is_file():
        raise FileNotFoundError(f"there is no {METRICS} in {path}: give the output_dir of a run{missing_hint(path)}")
    frame = pandas.DataFrame(read_rows(path / METRICS))
    names = {f"agent_{agent}": role for agent, role in enumerate(_newest_roles(path))}
    columns = [AGENT.sub(lambda match: names.get(match[0], match[0]), name) for name in frame.columns]
    is_other = any(AGENT.match(f"{role}/") and role != agent for agent, role in names.items())
    if is_other or any(len({*x}) < len(x) for x in (names.values(), columns)):
        return frame
    return frame.set_axis(columns, axis="columns")


def _newest_roles(directory: Path) -> list[str]:
    """Return the roles that the newest attempt of a run recorded; empty if it has none that can be read."""
    files = [file for file in directory.glob("attempts/*/start.json") if re.fullmatch("[0-9]{1,9}", file.parent.name)]
    newest = max(files, key=lambda file: int(file.parent.name), default=None)
    try:
        return roles_of([checked(read_json(newest, limit_of(directory)), newest)]) if newest else []
    except (OSError, ValueError):
        return []


def missing_hint(path: Path) -> str:
    """Return the end of a message with the run whose directory has the nearest name."""
    runs = [str(file.parent) for file in path.parent.glob(f"*/{METRICS}")]
    return did_you_mean(str(path), runs)


def roles_of(attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the agents in the environment of a run; empty if it has none."""
    recorded: Any = next((attempt["settings"] for attempt in reversed(attempts) if "settings" in attempt), {})
    environment = recorded.get("environment")
    roles = environment.get("roles") if isinstance(environment, dict) else None
    return [str(role) for role in roles] if isinstance(roles, list) else []


def load_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """Return the runs in directories. paths: run directories, or directories of several seeds."""
    directories = [directory for path in paths for directory in run_directories(path)]
    return [load_run(directory, name) for directory, name in names_of(list(dict.fromkeys(directories))).items()]


def groupings_of(runs: Sequence[RecordedRun]) -> list[Grouping]:
    """Return the ways to group runs: those of equal settings together (the first one), each run alone, and by the value of each
    setting in which they differ."""
    equal = Grouping("combination of settings", [Group(group_name(members), members) for members in partition(runs, compared)])
    if len(runs) == 1:
        return [equal]
    names = dict.fromkeys(name for run in runs for name in compared(run) if not name.startswith(IDENTITY))
    by_setting = []
    for name in names:
        members = partition(runs, lambda run, name=name: run.settings.get(name))
        if len(members) > 1:
            groups = [Group(value_name(name, group), group) for group in members]
            groups.sort(key=lambda group, name=name: order_of(group.runs[0].settings.get(name)))
            by_setting.append(Grouping(f"value of {name}", groups))
    alone = Grouping("run", [Group(run.name, [run]) for run in runs])
    return [equal, *([alone] if len(equal.groups) < len(runs) else []), *by_setting]


def partition(runs: Sequence[RecordedRun], key: Callable[[RecordedRun], Any]) -> list[list[RecordedRun]]:
    """Return the runs in lists of equal keys, in order."""
    lists: dict[str, list[RecordedRun]] = {}
    for run in runs:
        lists.setdefault(json.dumps(key(run), sort_keys=True, default=str), []).append(run)
    return list(lists.values())


def compared(run: RecordedRun) -> dict[str, Any]:
    """Return the settings that runs of a group have in common. A run without recorded settings is alone in its group."""
    settings = {name: value for name, value in run.settings.items() if name not in NOT_COMPARED}
    return settings or {f"{IDENTITY}directory": str(run.path)}


def order_of(value: Any) -> tuple[bool, float, str]:
    """Return a key that sorts the values of a setting: numbers by size, then others as texts."""
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0, str(value)


def value_name(setting: str, runs: Sequence[RecordedRun]) -> str:
    """Return the name of the runs that have one value of a setting."""
    value = str(runs[0].settings.get(setting, "not recorded"))
    return f"{setting} = {value if len(value) <= 60 else value[:60] + ' …'}" + f" ({len(runs)} runs)" * (len(runs) > 1)


def run_directories(path: Path) -> list[Path]:
    """Return the run directories that a path stands for: itself, those of its seeds, or all below it (as of a sweep). Earlier
    runs that were moved aside are left out."""
    below = [file.parent.relative_to(path) for file in sorted(path.rglob(METRICS))]
    runs = [run for run in below if not any(part.startswith(("earlier_", "reward_model")) for part in run.parts)]
    of_seeds = {run.parent for run in runs if run.name.startswith("seed_")}  # their metrics are means over the seeds
    if not runs:
        has = f"give the output_dir of a run, which has a {METRICS}"
        raise FileNotFoundError(f"there is no run in {path}: {has}{missing_hint(path)}")
    return [path / run for run in runs if run not in of_seeds]


def names_of(directories: Sequence[Path]) -> dict[Path, str]:
    """Return a short, unique name of each directory: its path without what all of them have in common."""
    if len(directories) == 1:
        return {directories[0]: directories[0].resolve().name}
    common = os.path.commonpath([path.resolve() for path in directories])
    return {path: os.path.relpath(path.resolve(), common) for path in directories}


def group_name(runs: Sequence[RecordedRun]) -> str:
    """Return the name of a run, or the common beginning of the names of several."""
    return common_name(runs) + f" ({len(runs)} seeds)" * (len(runs) > 1)


def common_name(runs: Sequence[RecordedRun]) -> str:
    """Return the name of a run, or the common beginning of the names of several without what is of one seed."""
    if len(runs) == 1:
        return runs[0].name
    prefix = re.sub(r"seed_\d*$", "", os.path.commonprefix([run.name for run in runs])).rstrip("-_/. ")
    return prefix or runs[0].path.resolve().parent.name


def load_run(directory: Path, name: str) -> RecordedRun:
    """Return what a run directory has, without its completions."""
    rows = read_rows(directory / METRICS)
    attempts = load_attempts(directory)
    recorded = next((attempt["settings"] for attempt in reversed(attempts) if "settings" in attempt), {})
    return RecordedRun(
        name,
        directory,
        [row for row in rows if "eval/updates" not in row],
        [row for row in rows if "eval/updates" in row],
        flat_settings(recorded, load_settings(directory)),
        attempts,
        read_best(directory),
        status_of(
            directory,
            attempts,
            any(row["step"] >= recorded.get("config", {}).get("num_updates", math.inf) for row in rows[-2:]),
        ),
    )


def status_of(directory: Path, attempts: Sequence[Mapping[str, Any]], is_last: bool) -> str:
    """Return whether a run is running, finished, interrupted (by a signal, after which it can be resumed), failed (with the
    error) or killed; empty if it recorded no attempt. is_last: it made its last update; old versions recorded no end."""
    try:
        check_unlocked(directory)
        if directory.name.startswith("seed_"):  # seeds of one process have its lock
            check_unlocked(directory.parent)
    except DirectoryInUse:
        return "running"
    if not attempts:
        return ""
    end = directory / ATTEMPTS / str(attempts[-1]["number"]) / "end.json"
    try:
        check_inside(end, limit_of(directory))
        content = read_json(end)
        return "interrupted" if content["interrupted"] else "finished"
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or of another form
        failed = re.search(r"the attempt ended with (.{1,200})", attempts[-1]["log"])
        return f"failed: {failed[1]}" if failed else "finished" if is_last else "killed"


def load_settings(directory: Path) -> dict[str, Any]:
    """Return the tree in the config.yaml of a run; empty, with a warning, if it is cut short: its attempts have most of it."""
    if not (written := config_file_of(directory)):
        return {}
    try:
        # As JSON, which has only texts as names: a report is made of it.
        return json.loads(json.dumps(read_config(written).tree, default=str))
    except CutShort as error:
        warnings.warn(f"{error}; the report shows the settings that the attempts of the run recorded", stacklevel=2)
        return {}


def flat_settings(recorded: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their short names, and what identifies team, environment, data and reward as one entry each.

    recorded: settings of an attempt; tree: config.yaml, which not every run has.
    """
    identity = {f"{IDENTITY}{name}": value for name, value in recorded.items() if name != "config" and value}
    return {**leaves(tree), **recorded.get("config", {}), **identity}


def limit_of(directory: Path) -> Path:
    """Return where the attempts of a run must lie: their folder, which may be a link in a run of this account."""
    return directory / ATTEMPTS if is_trusted(directory) else directory


def load_attempts(directory: Path) -> list[dict[str, Any]]:
    """Return the starts of a run in order, each with its number and log."""
    paths = (directory / ATTEMPTS).glob("*")
    numbered = sorted((int(path.name), path) for path in paths if re.fullmatch("[0-9]{1,9}", path.name))
    attempts, room = [], MAX_LOGS
    for number, path in reversed(numbered):
        check_inside(path, limit_of(directory))
        start, log = path / "start.json", path / "log.txt"
        content = checked(read_json(start), start) if start.exists() else {}
        text = read_tail(log, path) if log.exists() and room > 0 else ""
        room -= len(text)
        attempts.append({"number": number, **content, "log": text})
    return attempts[::-1]


def checked(content: Any, file: Path) -> dict[str, Any]:
    """Return what a report shows of a `start.json`. Raises ValueError if it has other types."""
    kinds = {**TEXTS, "settings": dict}
    if not isinstance(content, dict) or any(not isinstance(content.get(name, kind()), kind) for name, kind in kinds.items()):
        raise ValueError(f"{printable(file)} is no record of an attempt: move it away")
    if not isinstance(content.get("settings", {}).get("config", {}), dict):
        raise ValueError(f"{printable(file)} has settings that are no mapping: move it away")
    return {name: content[name] for name in kinds if name in content}
