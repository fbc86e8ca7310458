"""The section `sweep` of a YAML file: train once for each combination of values, and compare the runs in one table.

    sweep:
      learning_rate: [1e-5, 1e-4]
      grpo.group_size: [4, 8]
      team:                                   # a free name: settings that change together
        short: {models: [small], reward: "mine:short"}
        long: {models: [large], reward: "mine:long"}
      seeds: [0, 1, 2]
      together: true                          # default; false: one seed after the other, where all of them need too much memory
      compare: {columns: [eval/reward], against: team=short}   # or a list of columns: a report compares combinations

The runs are made one after the other, each in its own directory below the output directory; the seeds of a combination are
trained in one program where the algorithm can (`train_seeds`). The same command again skips the runs that are finished and
continues the one that is not. `--only NAME` makes those of one directory, so that several processes share a sweep: each writes
the tables anew when one of its runs ends. Left out: several runs at once in one process, and the choice of the next values from
the results so far.
"""

import argparse
import itertools
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from jmarl.algorithms import find_row
from jmarl.cli.configuration import Configuration, read_configuration
from jmarl.cli.main import DONE, FAILED, INTERRUPTED, KILLED, plural
from jmarl.cli.settings.running import has_checkpoint, train
from jmarl.config import ExperimentConfig
from jmarl.config.layers import TREES
from jmarl.files.config_file import changed_settings
from jmarl.files.own_files import is_of_run
from jmarl.files.run_files import CONFIG_FILE, replace_text
from jmarl.logs.completions_file import finite
from jmarl.logs.failed_update import NonFiniteError
from jmarl.logs.metrics_writer import read_rows
from jmarl.logs.terminal import LOSS_TAG, REWARD_TAG
from jmarl.mrlm.keys import TOP_KEYS
from jmarl.report import LAST, Comparison, check_own, write_report

INVALID = re.compile(r"(turn_\d+/)?reward/invalid")  # columns
RESULTS, REPORT = ("results.json", "results.md"), "report.html"
COMPARE = ("columns", "against")  # keys of `compare`


class Point(NamedTuple):
    """One run of a sweep, or several seeds in one program."""

    columns: dict[str, Any]  # of the table: the settings that are varied, or the names of several that change together
    cfg: ExperimentConfig
    seeds: tuple[int, ...]
    together: bool  # whether all seeds are one run
    label: str = ""  # of the combination, and of its group in a comparison

    @property
    def directories(self) -> list[Path]:
        """The directory of each seed."""
        root = Path(self.cfg.train.run.output_dir)
        return [root / f"seed_{seed}" for seed in self.seeds] if self.together else [root]


class Sweep(NamedTuple):
    """All runs of a sweep, and what is made of them."""

    root: Path
    points: list[Point]
    chosen: list[Point]  # that are trained now
    comparison: Comparison | None


def read_sweep(args: argparse.Namespace, configuration: Configuration) -> Sweep:
    """Return the sweep of the arguments of `jmarl train`. Raises ValueError for anything in it that is not allowed."""
    root, section = Path(configuration.experiment.train.run.output_dir), configuration.sweep or {}
    points = points_of(args, configuration)
    return Sweep(root, points, chosen_points(points, root, args.only), comparison_of(section.get("compare"), points))


def run_sweep(sweep: Sweep, command: str) -> int:
    """Run a sweep and write results.md and results.json to its directory, and a report if it compares. Returns the exit code.
    command: that of the sweep, which continues it when it was interrupted."""
    root, points, chosen, comparison = sweep
    again = f"to resume the sweep: {command}"
    check_results(root, points)
    if comparison:
        check_own(root / REPORT, (".html", ".md", ".tex", ".csv"))
    print(f"sweep: {plural(len(chosen), 'run')} in {root}", flush=True)
    code, failed = DONE, {}
    for number, point in enumerate(chosen):
        name = point.cfg.train.run.output_dir
        if is_finished(point):
            print(f"sweep {number + 1}/{len(chosen)}: {name} is finished", flush=True)
            continue
        print(f"sweep {number + 1}/{len(chosen)}: {name}", flush=True)
        try:
            code = max(code, train(point.cfg.replace(resume=has_checkpoint(name)), again)[0])
        except KeyboardInterrupt:  # before the run has begun, or at its end
            print(again, flush=True)
            raise
        except NonFiniteError as error:  # of one learning rate; the others go on
            print(f"sweep: {name} failed: {error}", flush=True)
            code, failed[name] = FAILED, str(error)
        except Exception as error:  # probably of all runs
            if has_begun(points):  # else the table would be taken for a file of the user
                write_results(root, points, failed | {name: f"{type(error).__name__}: {error}"})
            raise
        write_results(root, points, failed)
        if code in (INTERRUPTED, KILLED):
            return code
    if write_results(root, points, failed):
        print((root / "results.md").read_text(encoding="utf-8"), end="")
        print(f"the table is in {root}/results.md; `jmarl report {root}` compares the curves")
        if comparison and (line := compare_runs(sweep, comparison, failed)):
            print(line)
    return code


def check_results(root: Path, points: Sequence[Point]) -> None:
    """Raise ValueError if the tables that a sweep would write are files of the user: no run of it has begun."""
    taken = [name for name in RESULTS if (root / name).exists()]
    if taken and not has_begun(points):
        raise ValueError(
            f"{root} has {' and '.join(taken)}, which this sweep has not written and would replace: choose another --output, "
            "or move them"
        )


def has_begun(points: Sequence[Point]) -> bool:
    """Return whether a run of a sweep has left its mark."""
    return any(is_of_run(directory) for point in points for directory in point.directories)


def points_of(args: argparse.Namespace, configuration: Configuration) -> list[Point]:
    """Return the runs of a sweep; all are checked before the first one starts."""
    lists = {name: values for name, values in (configuration.sweep or {}).items() if name != "compare"}
    together = lists.pop("together", True)
    if not isinstance(together, bool):
        raise ValueError(f"sweep: together: {together!r:.60} is not allowed: give true or false")
    for name, values in lists.items():
        if name != "seeds" and are_named(values):
            continue
        if not isinstance(values, list) or not values:
            key = f"{name}.{next(iter(values))}" if isinstance(values, dict) and values else name
            raise ValueError(f"sweep: {name}: {values!r:.60} is no list of values: write {key}: [first, second]")
    seeds = tuple(lists.pop("seeds", ()) or ())
    root, points = configuration.experiment.train.run.output_dir, []
    for choices in itertools.product(*(choices_of(name, values) for name, values in lists.items())):
        settings, columns = settings_of(choices), {name: x for choice in choices for name, x in choice.columns.items()}
        label = re.sub(r"[^\w.=,+-]+", "_", ",".join(choice.label for choice in choices))[:150]
        directory = f"{root}/{label}" if choices else root
        group = label or Path(root).absolute().name
        cfg = read_configuration(args, settings | {"output_dir": directory, "resume": False, "resume_step": None}).experiment
        if cfg.train.population.members:
            own = cfg.replace(seeds=seeds).with_seeds()
            points.append(Point(columns, own, own.seeds, True, group))
            continue
        if together and len(seeds) > 1 and find_row(cfg.train.algorithm).data == "rollouts" and not cfg.wandb:
            points.append(Point(columns, cfg.replace(seeds=seeds), seeds, True, group))
            continue
        for seed in seeds or (cfg.train.run.seed,):
            own = cfg.replace(seed=seed, output_dir=f"{directory}/seed_{seed}")
            points.append(Point(columns, own, (seed,), False, group))
    directories = [str(directory) for point in points for directory in point.directories]
    if twice := next((directory for directory in directories if directories.count(directory) > 1), ""):
        raise ValueError(f"sweep: two runs would write to {twice}: give each value once")
    return points


def chosen_points(points: Sequence[Point], root: Path, names: Sequence[str]) -> list[Point]:
    """Return the runs whose directory below that of the sweep has one of these names, or is below it; without names all."""
    paths = [Path(point.cfg.train.run.output_dir).relative_to(root) for point in points]
    places = [(path, *path.parents) for path in paths]
    known = dict.fromkeys(str(place) for above in places for place in reversed(above) if place != PurePath())
    for name in names:
        if str(PurePath(name)) not in known:
            seeds = any(root / name in point.directories for point in points)
            hint = "; its seeds are one run, and with together: false each is one" * seeds
            raise ValueError(f"--only {name} is no run of the sweep{hint}: choose {' or '.join(known) or 'no --only'}")
    wanted = {PurePath(name) for name in names} or {PurePath()}
    return [point for point, above in zip(points, places, strict=True) if not wanted.isdisjoint(above)]


def comparison_of(asked: Any, points: Sequence[Point]) -> Comparison | None:
    """Return what a sweep compares at its end. asked: the value of `compare`, a mapping or a list of columns; None: nothing."""
    if asked is None:
        return None
    asked = {"columns": asked} if isinstance(asked, list) else asked
    example = "such as compare: {columns: [eval/reward]}"
    if not isinstance(asked, dict):
        raise ValueError(f"sweep: compare: {asked!r:.60} is not allowed: give columns and perhaps against, {example}")
    if unknown := next((str(key) for key in asked if key not in COMPARE), ""):
        raise ValueError(f"sweep: compare: {unknown}: unknown key; allowed: {' and '.join(COMPARE)}")
    columns, against = asked.get("columns"), asked.get("against") or ""
    if not isinstance(columns, list) or not columns or not all(isinstance(column, str) for column in columns):
        raise ValueError(f"sweep: compare: columns: {columns!r:.60} is no list of names of columns, {example}")
    names = {directory: point.label for point in points for directory in point.directories}
    if against and against not in names.values():
        known = " or ".join(map(repr, dict.fromkeys(names.values())))
        raise ValueError(f"sweep: compare: against: there is no combination {against!r}: choose {known}")
    return Comparison(columns, (), against, names)


class Choice(NamedTuple):
    """One of the values of a key of a sweep."""

    key: str
    settings: dict[str, Any]  # that it sets: one, or all of a mapping under a free name
    label: str  # in the name of the directory, such as learning_rate=1e-05, or team=large+brevity
    columns: dict[str, Any]  # of the table: the settings, or the name under which they change together


def are_named(values: Any) -> bool:
    """Return whether the values of a key are settings that change together, each under a name."""
    return isinstance(values, Mapping) and bool(values) and all(isinstance(x, Mapping) and x for x in values.values())


def choices_of(key: str, values: Sequence[Any] | Mapping[str, Any]) -> list[Choice]:
    """Return the values of a key: of a setting, or mappings of settings that change together under a free name."""
    name = key.rpartition(".")[2]
    if isinstance(values, Mapping):
        return [Choice(key, dict(value), f"{name}={label}", {name: label}) for label, value in values.items()]
    if key in (*TREES, *TOP_KEYS) or not all(isinstance(value, Mapping) and value for value in values):
        return [Choice(key, {key: value}, f"{name}={value}", {key: value}) for value in values]
    short = ["+".join(map(short_text, value.values())) for value in values]
    unique = len(set(short)) == len(values)
    long = [",".join(f"{setting}={x}" for setting, x in value.items()) for value in values]
    labels = [f"{name}={x}" for x in (short if unique else long)]
    return [Choice(key, dict(value), label, dict(value)) for value, label in zip(values, labels, strict=True)]


def short_text(value: Any) -> str:
    """Return a value without what its directory, module or repository says."""
    if isinstance(value, list):
        return "-".join(map(short_text, value))
    return re.split("[:/]", value.rstrip("/"))[-1] if isinstance(value, str) else str(value)


def settings_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the settings of one choice of each key. Raises ValueError for a setting of two keys."""
    settings: dict[str, Any] = {}
    for i, choice in enumerate(choices):
        if twice := settings.keys() & choice.settings.keys():
            other = next(one.key for one in choices[:i] if min(twice) in one.settings)
            raise ValueError(f"sweep: {min(twice)} is set by {other} and by {choice.key}: give it in one of them")
        settings |= choice.settings
    return settings


def is_finished(point: Point) -> bool:
    """Return whether a run has made all its updates. Raises ValueError if its directory holds one with other settings."""
    if (names := changed_settings(point.cfg)) is None:
        return False
    if names:
        file = Path(point.cfg.train.run.output_dir) / CONFIG_FILE
        raise ValueError(f"{file} was written with other settings ({', '.join(names)}): choose another --output")
    run = point.cfg.train.run
    saved = all(not run.save_models or (directory / "models").is_dir() for directory in point.directories)
    return saved and all(last_step(directory) == run.num_updates for directory in point.directories)


def last_step(directory: Path) -> int:
    """Return the last step with the metrics of an update; 0 without any."""
    file = directory / "metrics.jsonl"
    rows = read_rows(file) if file.is_file() else []
    return max((row["step"] for row in rows if "eval/updates" not in row), default=0)


def write_results(root: Path, points: Sequence[Point], failed: Mapping[str, str]) -> bool:
    """Write the table of all runs that have metrics or failed. Returns whether there are any."""
    before = None
    while (rows := result_rows(points, failed)) and (now := ended(rows)) != before:
        before = now
        table = [*rows, *means(rows)]
        columns = list(dict.fromkeys(name for row in table for name in row))
        lines = [columns, ["---"] * len(columns), *([shown(row.get(name)) for name in columns] for row in table)]
        replace_text(root / "results.json", json.dumps(finite(table), indent=1, allow_nan=False) + "\n", is_shared=True)
        replace_text(root / "results.md", "".join(f"| {' | '.join(line)} |\n" for line in lines), is_shared=True)
    return bool(rows)


def compare_runs(sweep: Sweep, comparison: Comparison, failed: Mapping[str, str]) -> str:
    """Write the report of all runs that have metrics. Returns a line about it."""
    before, line = None, ""
    while (now := ended(result_rows(sweep.points, failed))) != before:
        before, begun = now, [path for point in sweep.points for path in point.directories if last_step(path) > 0]
        line = write_report(begun, sweep.root / REPORT, comparison=comparison) if begun else ""
    return line


def ended(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of the runs that do not go on, as a text. If they change while a file is made of them, another process of
    the sweep has ended a run, and perhaps written the file already: then it is made once more."""
    return json.dumps([row for row in rows if "not finished" not in row])


def result_rows(points: Sequence[Point], failed: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the results of all runs that have metrics or failed."""
    return [
        result_row(point, seed, directory, failed)
        for point in points
        for seed, directory in zip(point.seeds, point.directories, strict=True)
        if last_step(directory) > 0 or point.cfg.train.run.output_dir in failed
    ]


def result_row(point: Point, seed: int, directory: Path, failed: Mapping[str, str]) -> dict[str, Any]:
    """Return the results of one run: its last reward (or loss), its first and last evaluation, how many joint actions and
    episodes had no valid reward, and whether it failed or is not finished."""
    run = point.cfg.train.run
    rows = read_rows(file) if (file := directory / "metrics.jsonl").is_file() else []
    updates, evaluations = ([row for row in rows if ("eval/updates" in row) == held_out] for held_out in (False, True))
    tag = LOSS_TAG if any(LOSS_TAG in row for row in updates) and not any(REWARD_TAG in row for row in updates) else REWARD_TAG
    held_out = "eval/reward" if tag == REWARD_TAG else "eval/loss"
    row: dict[str, Any] = {**point.columns, "seed": seed, "updates": len(updates)}
    last = min(LAST, run.num_updates)
    if values := [row[tag] for row in updates[-last:] if tag in row]:
        row[f"{tag.partition('/')[0]} of the last {last}"] = statistics.fmean(values)
    if invalid := sum(x for update in updates[-last:] for name, x in update.items() if INVALID.fullmatch(name)):
        row[f"invalid of the last {last}"] = invalid
    if values := [evaluation[held_out] for evaluation in evaluations if held_out in evaluation]:
        row |= {"held out before": values[0], "held out after": values[-1]}
        if invalid := evaluations[-1].get("eval/reward/invalid"):
            row["held out invalid"] = invalid
    for name in ("accuracy", "margin"):  # of pairs
        if after := [evaluation[f"eval/{name}"] for evaluation in evaluations if f"eval/{name}" in evaluation]:
            row[f"{name} after"] = after[-1]
    if run.output_dir in failed:
        return row | {"failed": failed[run.output_dir]}
    return row if len(updates) >= run.num_updates else row | {"not finished": f"{len(updates)} of {run.num_updates} updates"}


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row with the mean over seeds for each combination that has several. Runs that failed or are not finished are in
    no mean, and the row says of how many runs it is."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        varied = itertools.takewhile(lambda item: item[0] != "seed", row.items())
        groups.setdefault(json.dumps(dict(varied)), []).append(row)
    result = []
    for key, group in groups.items():
        finished = [row for row in group if not {"failed", "not finished"} & row.keys()]
        if len(group) > 1 and finished:
            names = dict.fromkeys(name for row in finished for name in row if name not in json.loads(key) and name != "seed")
            # A run without a count of invalid ones had none.
            columns = {name: [row.get(name, 0.0 if "invalid" in name else math.nan) for row in finished] for name in names}
            which = "mean" if len(finished) == len(group) else f"mean of {len(finished)} of {len(group)}"
            result.append({**json.loads(key), "seed": which, **{name: statistics.fmean(x) for name, x in columns.items()}})
    return result


def shown(value: Any) -> str:
    """Return a value as a cell of a table."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
