"""Compare groups of runs: mean and interval of each, differences to one of them with Welch's t-test, and their tables.

A group is the runs that differ in the seed alone, those with equal values of some settings, or one that the caller names. A run
counts as one number: its last evaluation (`eval/...`), or the mean of its last 10 updates (other columns). Runs that are not
finished, because they failed or go on, are in no mean. Left out: paired tests, and those that assume no normal distribution.
"""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmarl.columns import INTERVAL
from jmarl.config.validation import did_you_mean
from jmarl.evaluation.statistics import mean_and_interval, valid_mean
from jmarl.logs.completions_file import finite
from jmarl.report.load import RecordedRun, common_name, compared, partition
from jmarl.report.summary import NOT_DRAWN, columns_of, curve, points

LAST = 10  # updates whose mean is the value of a run
NONE = "–"  # in place of a number

Curve = dict[str, list[float | None]]


class Comparison(NamedTuple):
    """What is compared."""

    columns: Sequence[str]
    by: Sequence[str] = ()  # settings; runs with equal values are a group. Without any: runs that differ in the seed alone
    against: str = ""  # the group to which the others are compared; without it there are no differences
    names: Mapping[Path, str] | None = None  # of the group of each run directory, in place of `by`; some may have no run yet


class ComparedGroup(NamedTuple):
    """One group in one column. NaN: there is no such number."""

    column: str
    group: str
    runs: int  # in the mean
    left_out: int
    mean: float
    low: float  # of the 95 % interval
    high: float
    against: str
    difference: float = math.nan  # to the mean of the group `against`; this one has none to itself
    difference_low: float = math.nan
    difference_high: float = math.nan
    p: float = math.nan
    p_holm: float = math.nan


MARKS = {
    ".md": "<!-- written by jmarl report -->",
    ".tex": "% written by jmarl report",
    ".csv": ",".join(ComparedGroup._fields[:3]),
    ".html": "jmarl report</title>",
}  # suffix -> what is near the beginning of a file of a report


def compare(runs: Sequence[RecordedRun], asked: Comparison) -> dict[str, Any]:
    """Return what the page and the tables show of a comparison, as JSON values. Raises ValueError for unknown names."""
    columns = columns_of(row for run in runs for row in (*run.rows, *run.evaluations))
    check_known("column", asked.columns, columns.keys() - NOT_DRAWN)
    groups = groups_of(runs, asked)
    if asked.against and asked.against not in groups:
        raise ValueError(f"there is no group {asked.against!r} to compare against: choose {' or '.join(map(repr, groups))}")
    sizes = Counter(asked.names.values()) if asked.names else {name: len(members) for name, members in groups.items()}
    rows, tables = [], []
    for column in asked.columns:
        values = {name: {run.name: value_of(run, column) for run in members} for name, members in groups.items()}
        valid = {name: np.array([x for x in known.values() if math.isfinite(x)]) for name, known in values.items()}
        own = rows_of(column, valid, sizes, asked.against)
        used = [[run for run in members if math.isfinite(values[name][run.name])] for name, members in groups.items()]
        rows += own
        tables.append({"column": column, "cells": [cells_of(row) for row in own],
                       "updates": [over_updates(members, column) for members in used],
                       "tokens": [over_tokens(members, column) for members in used]})  # fmt: skip
    head = ["group", "runs", "left out", "mean", *([f"difference to {asked.against}", "p"] if asked.against else [])]
    content = {"caption": caption_of(asked.against), "head": head, "tables": tables}
    return finite(content | {"rows": [row._asdict() for row in rows]})


def check_known(what: str, names: Sequence[str], known: Collection[str]) -> None:
    """Raise ValueError for a name that no run has."""
    for name in names:
        if name not in known:
            raise ValueError(f"no run has the {what} {name!r}{did_you_mean(name, known)}")


def groups_of(runs: Sequence[RecordedRun], asked: Comparison) -> dict[str, list[RecordedRun]]:
    """Return the runs of each group by its name."""
    groups: dict[str, list[RecordedRun]] = {}
    if asked.names:
        groups = {name: [] for name in asked.names.values()}
        for run in runs:
            if run.path in asked.names:
                groups[asked.names[run.path]].append(run)
        return groups
    if asked.by:
        check_known("setting", asked.by, {name for run in runs for name in run.settings})
        for run in runs:
            name = ",".join(f"{setting}={run.settings.get(setting, 'not recorded')}" for setting in asked.by)
            groups.setdefault(name, []).append(run)
        return groups
    equal = partition(runs, compared)
    short = [common_name(members) for members in equal]
    unique = len(set(short)) == len(short)
    long = (", ".join(run.name for run in members) for members in equal)
    return dict(zip(short if unique else long, equal, strict=True))


def is_finished(run: RecordedRun) -> bool:
    """Return whether a run has made all its updates; true if it did not record how many these are."""
    planned = run.settings.get("num_updates")
    return not isinstance(planned, int) or max((row["step"] for row in run.rows), default=0) >= planned


def value_of(run: RecordedRun, column: str) -> float:
    """Return the number that a run counts as; NaN if it is not finished, or has none."""
    if not is_finished(run):
        return math.nan
    if column.startswith("eval/"):
        values = [row[column] for row in run.evaluations if column in row][-1:]
    else:
        values = [row[column] for row in run.rows[-LAST:] if column in row]
    return float(valid_mean(np.array(values, float)))


def rows_of(column: str, values: Mapping[str, np.ndarray], sizes: Mapping[str, int], against: str) -> list[ComparedGroup]:
    """Return the row of each group. values: of the runs that count; sizes: numbers of all runs."""
    rows = []
    for name, x in values.items():
        mean, half = mean_of(x), half_of(x)
        row = ComparedGroup(column, name, len(x), sizes[name] - len(x), mean, mean - half, mean + half, against)
        if against and name != against:
            difference, half, p = welch(x, values[against])
            row = row._replace(difference=difference, difference_low=difference - half, difference_high=difference + half, p=p)
        rows.append(row)
    return [row._replace(p_holm=p) for row, p in zip(rows, holm([row.p for row in rows]), strict=True)]


def mean_of(x: np.ndarray) -> float:
    """Return the mean: of equal numbers exactly this one, of none NaN."""
    return float(x[0] if len(x) and np.ptp(x) == 0 else valid_mean(x))


def half_of(x: np.ndarray) -> float:
    """Return half of the 95 % interval of the mean; NaN with less than two numbers, exactly 0 if all are equal."""
    return 0.0 if len(x) > 1 and np.ptp(x) == 0 else float(mean_and_interval(x)[1])


def welch(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return the difference of two means, half of its 95 % interval, and the p-value of Welch's t-test (Biometrika 1947):

        v = var(x) / n_x,  w = var(y) / n_y,  t = (mean(x) - mean(y)) / sqrt(v + w),
        degrees of freedom = (v + w)² / (v² / (n_x - 1) + w² / (n_y - 1))

    The last two are NaN with less than two numbers in x or y, and if neither x nor y varies: then nothing says how far other
    runs would be from these.
    """
    from scipy.special import stdtr, stdtrit

    difference, counts = mean_of(x) - mean_of(y), np.array([len(x), len(y)])
    if counts.min() < 2:
        return difference, math.nan, math.nan
    squares = np.array([np.var(one, ddof=1) if np.ptp(one) else 0.0 for one in (x, y)]) / counts
    if not (total := squares.sum()) > 0:
        return difference, math.nan, math.nan
    freedom = 1 / ((squares / total) ** 2 / (counts - 1)).sum()
    return difference, float(stdtrit(freedom, 0.975) * total**0.5), float(2 * stdtr(freedom, -abs(difference) / total**0.5))


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm, 1979): the k-th smallest of m, from 0, becomes the largest of
    min(1, (m - i) p_i) for i up to k. NaN stays, and does not count."""
    order = sorted((i for i, x in enumerate(p) if math.isfinite(x)), key=lambda i: p[i])
    corrected, largest = list(p), 0.0
    for k, i in enumerate(order):
        largest = corrected[i] = max(largest, min(1.0, (len(order) - k) * p[i]))
    return corrected


def over_updates(runs: Sequence[RecordedRun], column: str) -> Curve | None:
    """Return the curve of a column over updates; None without runs."""
    own = [points(run, column + INTERVAL) for run in runs]
    return curve([points(run, column) for run in runs], own) if runs else None


def over_tokens(runs: Sequence[RecordedRun], column: str) -> Curve | None:
    """Return the curve of a column over the tokens that a run has sampled so far; None if a run did not count them.

    A point for each update that all runs have, at the smallest of their tokens: the others are interpolated between updates.
    """
    if not runs or not all(any("tokens" in row for row in run.rows) for run in runs):
        return None
    values = [points(run, column) for run in runs]
    updates = sorted(set(values[0]).intersection(*values))
    tokens = np.array([tokens_after(run, updates) for run in runs])
    x = tokens.min(0).tolist()
    lines = [np.interp(x, own, [line[step] for step in updates]) for own, line in zip(tokens, values, strict=True)]
    return curve([dict(zip(x, line.tolist(), strict=True)) for line in lines], [{}] * len(runs))


def tokens_after(run: RecordedRun, updates: Sequence[float]) -> np.ndarray:
    """Return how many tokens a run has sampled until each of these updates was made."""
    sampled = points(run, "tokens")
    total = np.cumsum([0.0, *sampled.values()])
    return total[np.searchsorted([*sampled], updates, side="right")]


def cells_of(row: ComparedGroup) -> list[str]:
    """Return a row as texts, without its column."""
    cells = [row.group, str(row.runs), str(row.left_out), text_of(row.mean, row.high - row.mean)]
    if row.against:
        p = NONE if math.isnan(row.p_holm) else "< 0.0001" if row.p_holm < 1e-4 else f"{row.p_holm:.2g}"
        return [*cells, text_of(row.difference, row.difference_high - row.difference, "+"), p]
    return cells


def text_of(mean: float, half: float, sign: str = "") -> str:
    """Return a mean with half of its interval, where there are these."""
    return NONE if math.isnan(mean) else f"{mean:{sign}.4g}" + f" ± {half:.2g}" * (not math.isnan(half))


def caption_of(against: str) -> str:
    """Return what the numbers in the tables are."""
    difference = (
        f"Difference to {against}: ± half of its 95 % interval, and p by Welch's t-test; p has Holm's correction for the "
        "number of groups compared in one column, the interval has none. "
    )
    return (
        f"Value of a run: its last evaluation (eval/...), or the mean of its last {LAST} updates. Mean: over runs, ± half of "
        f"its 95 % interval (Student's t); ± 0: all runs have this value. {difference * bool(against)}Left out: runs that "
        f"failed, are not finished or have no value. {NONE}: too few runs, or nothing varies."
    )


def files_of(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables as texts by the suffix of their file. content: see `compare`."""
    return {".md": markdown(content), ".tex": latex(content), ".csv": comma_separated(content)}


def markdown(content: Mapping[str, Any]) -> str:
    """Return a table for each column."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(map(plain_markdown, cells))} |\n"

    texts = [MARKS[".md"] + "\n"]
    for table in content["tables"]:
        head = line([table["column"], *content["head"][1:]]) + f"|---|{'---:|' * (len(content['head']) - 1)}\n"
        texts.append(head + "".join(map(line, table["cells"])))
    return "\n".join([*texts, plain_markdown(content["caption"]) + "\n"])


def plain_markdown(text: str) -> str:
    """Return a text as Markdown shows it."""
    return re.sub(r"([\\|*`]|<(?=\S))", r"\\\1", " ".join(text.split()))


TEX = str.maketrans(
    {character: f"\\{character}" for character in "{}$&#%_"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "[": "{[}", "]": "{]}", "±": r"$\pm$", NONE: "--"}
)


def latex(content: Mapping[str, Any]) -> str:
    """Return a table for each column, which needs no package."""
    texts = [MARKS[".tex"] + "\n"]
    for table in content["tables"]:
        head = " & ".join(map(tex, content["head"]))
        rows = [" & ".join([tex(name), *map(tex_number, cells)]) for name, *cells in table["cells"]]
        lines = [f"\\begin{{tabular}}{{l{'r' * (len(content['head']) - 1)}}}", r"\hline", rf"{head} \\", r"\hline"]
        lines = [r"\begin{table}", r"\centering", *lines, *(rf"{row} \\" for row in rows), r"\hline", r"\end{tabular}"]
        caption = rf"\caption{{\texttt{{{tex(table['column'])}}}. {tex(content['caption'])}}}"
        texts.append("\n".join([*lines, caption, r"\end{table}", ""]))
    return "\n".join(texts)


def tex(text: str) -> str:
    """Return a text as LaTeX shows it."""
    return " ".join(text.split()).translate(TEX)


def tex_number(text: str) -> str:
    """Return a cell of numbers in math mode."""
    power = re.sub(r"e([+-])0*(\d+)", lambda match: rf" \cdot 10^{{{match[1].replace('+', '')}{match[2]}}}", text)
    return tex(text) if text == NONE else f"${power.replace('±', chr(92) + 'pm')}$"


def comma_separated(content: Mapping[str, Any]) -> str:
    """Return a line for each group in each column; numbers have all their digits."""
    file = io.StringIO()
    writer = csv.DictWriter(file, ComparedGroup._fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(content["rows"])
    return file.getvalue()


def check_own(output: Path, suffixes: Sequence[str] = (".md", ".tex", ".csv")) -> None:
    """Raise ValueError if a file with one of these suffixes beside a report, which would be replaced, is not of a report."""
    if output.suffix in (".md", ".tex", ".csv"):
        raise ValueError(f"--output {output} is the HTML file, beside which the table is {output.name}: name it .html")
    for file in (output.with_suffix(suffix) for suffix in suffixes):
        if not file.exists():
            continue
        if not file.is_file() or MARKS[file.suffix].encode() not in read_beginning(file):
            raise ValueError(f"{file} is no file of a report, and would be replaced: choose another --output, or move it")


def read_beginning(file: Path) -> bytes:
    """Return the first bytes of a file."""
    with file.open("rb") as content:
        return content.read(4096)
