"""Turn the rows of runs into what a report draws: curves, a table of held-out results, goodput, settings."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jmarl.columns import INTERVAL
from jmarl.config import ExperimentConfig, TaskConfig, TeamConfig, TrainConfig, flat
from jmarl.evaluation.statistics import mean_and_interval
from jmarl.report.load import IDENTITY, Group, RecordedRun

MAX_POINTS = 400  # of a curve: more cannot be seen
MAX_LINES = 4  # runs of a group whose curves are drawn one by one; the interval of more runs is a band
NOT_DRAWN = {"step", "eval/updates"}


def curves(group: Group) -> dict[str, dict[str, list[float | None]]]:
    """Return each column as a curve: `x`, numbers of updates; `mean` over the runs; `interval`, half of the 95 % interval.

    With one run the interval is the one that its row has (held-out results), or null. Where some means are not of all runs,
    `runs` are the numbers of runs.
    """
    columns = columns_of(row for run in group.runs for row in (*run.rows, *run.evaluations))
    drawn = [name for name in columns if name not in NOT_DRAWN and not name.endswith(INTERVAL)]
    has_own = {name for name in drawn if name + INTERVAL in columns}  # of most names, which need not be looked for in all rows
    return {name: curve([points(run, name) for run in group.runs],
                        [points(run, name + INTERVAL) if name in has_own else {} for run in group.runs])
            for name in drawn}  # fmt: skip


def columns_of(rows: Iterable[dict[str, float]]) -> dict[str, None]:
    """Return the names of the columns that rows have, in the order in which they come first."""
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    return columns


def points(run: RecordedRun, name: str) -> dict[float, float]:
    """Return the values of a column by the number of updates."""
    rows = run.evaluations if name.startswith("eval/") else run.rows
    return {row["step"]: row[name] for row in rows if name in row}


def axes(group: Group) -> dict[str, list[float | None]]:
    """Return what a run has used after `x` updates, in the mean over runs: `tokens` sampled, `minutes`. Those that a run did
    not count are left out."""
    x = thin(np.array(sorted({row["step"] for run in group.runs for row in run.rows}), float))
    used = {"x": plain(x)}
    for name, column, unit in (("tokens", "tokens", 1), ("minutes", "time/step_s", 60)):
        spent = [{k: v / unit for k, v in points(run, column).items() if math.isfinite(v)} for run in group.runs]
        if all(spent) and x.size:
            totals = [np.interp(x, [0, *run], np.cumsum([0, *run.values()]), right=math.nan) for run in spent]
            known = [row[np.isfinite(row)] for row in np.transpose(totals)]  # behind the end of a run, the mean of the others
            used[name] = plain(np.array([row.mean() if row.size else math.nan for row in known]))
    return used


def curve(values: Sequence[dict[float, float]], own: Sequence[dict[float, float]]) -> dict[str, Any]:
    """Return the curve of values of several runs, with `lines` of each run if they are few. own: the intervals that their rows
    have."""
    x = sorted(set().union(*values))
    table = np.array([[run.get(updates, math.nan) for run in values] for updates in x])
    mean, interval = mean_and_interval(table)
    if len(values) == 1:
        interval = np.array([own[0].get(updates, math.nan) for updates in x])
    arrays = {"x": np.array(x), "mean": mean, "interval": interval}
    lines = [plain(thin(run)) for run in table.T] if 1 < len(values) <= MAX_LINES else []
    if (known := np.isfinite(table).sum(-1)).min(initial=len(values)) < len(values) > 1:
        arrays["runs"] = known.astype(float)
    return {name: plain(thin(array)) for name, array in arrays.items()} | ({"lines": lines} if lines else {})


def thin(values: np.ndarray) -> np.ndarray:
    """Return at most `MAX_POINTS` values: means of neighbors."""
    size = -(-len(values) // MAX_POINTS)
    if size <= 1:
        return values
    return np.array(
        [np.nanmean(part) if np.isfinite(part).any() else math.nan for part in np.split(values, range(size, len(values), size))]
    )


def plain(values: np.ndarray) -> list[float | None]:
    """Return numbers for JSON, with six digits; null where they are not finite."""
    return [float(f"{x:.6g}") if math.isfinite(x) else None for x in values.tolist()]


def held_out(columns: dict[str, dict[str, list[float | None]]]) -> dict[str, list[list[float | None]]]:
    """Return each held-out column at its first and last evaluation: updates, mean, half of its 95 % interval (over runs, or
    with one run over prompts), and of how many runs it is, if some are not of all. columns: see `curves`."""
    table = {}
    for name, drawn in columns.items():
        if name.startswith("eval/") and drawn["x"]:
            parts = [drawn["x"], drawn["mean"], drawn["interval"], drawn.get("runs", [None])]
            table[name.removeprefix("eval/")] = [[part[i] for part in parts] for i in (0, -1)]
    return table


def goodput(group: Group) -> dict[str, float]:
    """Return the seconds of each phase, summed over rows and runs, see `logs.goodput`."""
    rows = [row for run in group.runs for row in run.rows]
    phases = [name for name in columns_of(rows) if name.startswith("time/") and name != "time/step_s"]
    values = {name: [row[name] for row in rows if name in row and math.isfinite(row[name])] for name in phases}
    return {name.removeprefix("time/"): sum(x) for name, x in values.items() if x}


def settings_table(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return each setting with its values in each group, whether they differ, whether all are the default, and whether the
    default is auto, which each run replaced by what it chose.

    What identifies team, environment, data and reward is in the table only where it differs: the settings name them too."""
    own = {f.name: f.default for cls in (TeamConfig, TaskConfig, ExperimentConfig) for f in dataclasses.fields(cls)}
    plain_own = {name: value for name, value in own.items() if isinstance(value, bool | int | float | str | tuple | None)}
    plain_own |= {"options": {}, "wandb": {}}
    defaults = json.loads(json.dumps(plain_own | flat(TrainConfig())))  # as in start.json, where tuples are lists
    table = []
    for name in dict.fromkeys(name for group in groups for run in group.runs for name in run.settings):
        if name == "output_dir" and len(groups) > 1:  # the names of the groups say it
            continue
        values = [dict.fromkeys(str(run.settings.get(name)) for run in group.runs) for group in groups]
        texts = [", ".join(group_values) for group_values in values]
        if name.startswith(IDENTITY):
            if len(set(texts)) == 1:
                continue
            name = f"contents of the {name.removeprefix(IDENTITY)}"
        default = name in defaults and all(text == str(defaults[name]) for text in texts)
        row = {"name": name, "values": texts, "differs": len(set(texts)) > 1, "default": default}
        table.append(row | {"auto": not default and defaults.get(name) == "auto"})
    return table
