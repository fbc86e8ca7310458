"""Write the report of runs as one HTML file that needs no network and no server.

The file has its styles, scripts and data in it. The data are JSON, compressed by gzip and written in base64. The page unpacks
the numbers when it opens, and completions in parts, when they are looked at; texts of models become text nodes, so that nothing
in them is run. The largest size of the file decides how many steps have their completions in it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jmarl.files.run_files import replace_text
from jmarl.logs.completions_file import finite
from jmarl.report.comparison import Comparison, check_own, compare, files_of
from jmarl.report.completions import dump, pack, pack_steps
from jmarl.report.diagnosis import top_findings
from jmarl.report.league import league
from jmarl.report.load import IDENTITY, Group, Grouping, RecordedRun, groupings_of, load_runs, roles_of
from jmarl.report.summary import axes, curves, goodput, held_out, settings_table

SCRIPTS = (
    "charts.js", "panels.js", "tables.js", "steps.js", "episode.js", "lanes.js", "find.js", "what_if.js", "episodes.js",
    "league.js", "page.js",
)  # fmt: skip
STYLES = ("page.css", "episodes.css")

MAX_TITLE = 100  # characters


def write_report(
    paths: Sequence[Path],
    output: Path,
    max_mb: float = 30.0,
    comparison: Comparison | None = None,
    steps: Collection[int] = (),
) -> str:
    """Write a report and return a line about it.

    Args:
        paths: run directories, or directories of several seeds.
        output: the HTML file.
        max_mb: about its largest size in MB; where it is too small, only every second, fourth, ... step has its completions.
        comparison: what to compare at the top of the page and in files beside it (`.md`, `.tex`, `.csv`); None: nothing.
        steps: those whose completions are in the file in any case.
    """
    if comparison:
        check_own(output)
    content = load_content(paths, max_mb, comparison, steps)
    output.parent.mkdir(parents=True, exist_ok=True)
    if comparison:
        for suffix, text in {**files_of(content["comparison"]), output.suffix: render(content)}.items():
            replace_text(output.with_suffix(suffix), text.encode("utf-8", "replace").decode("utf-8"), is_shared=True)
    else:
        output.write_text(render(content), encoding="utf-8", errors="replace")  # names of files may be no UTF-8
    thinned = f" of every {content['every']} steps" * (content["every"] > 1)
    index = content["steps"]
    count = sum(kind == "train" and part >= 0 for kind, part in zip(index["kind"], index["part"], strict=True))
    runs, size = len(content["runs"]), output.stat().st_size / 1e6
    completions = f", completions of {count} step{'s' * (count > 1)}{thinned}" if count else ""  # runs on pairs write none
    beside = ", and the comparison as .md, .tex and .csv beside it" * (comparison is not None)
    return f"{output}: {runs} run{'s' * (runs > 1)}{completions}, {max(size, 0.1):.1f} MB{beside}"


def load_content(
    paths: Sequence[Path], max_mb: float, comparison: Comparison | None = None, steps: Collection[int] = ()
) -> dict[str, Any]:
    """Return all that the page shows, as JSON values; `parts` are completions, packed. See `write_report`."""
    runs = load_runs(paths)
    numbers = {"comparison": compare(runs, comparison)} if comparison else {}
    numbers |= summarize(runs)
    room = int(max_mb * 1e6 - len(pack(dump(numbers)))) * 3 // 4  # base64 takes four bytes for three
    packed = pack_steps(runs, max(room, 0), steps)
    findings = top_findings(runs, packed.judged)
    return numbers | {"steps": packed.columns, "parts": packed.parts, "every": packed.every, "findings": findings}


def summarize(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return all that the page shows but the completions, as JSON values.

    Groups with the same runs are in `groups` once; each grouping names its groups and has their numbers in that list.
    """
    numbers: dict[tuple[str, ...], int] = {}  # names of the runs of a group -> its number
    groups: list[dict[str, Any]] = []

    def number_of(group: Group) -> int:
        key = tuple(run.name for run in group.runs)
        if key not in numbers:
            numbers[key] = len(groups)
            groups.append(summarize_group(group))
        return numbers[key]

    def summarize_grouping(grouping: Grouping) -> dict[str, Any]:
        members = [{"name": group.name, "group": number_of(group)} for group in grouping.groups]
        return {"by": grouping.by, "members": members, "settings": settings_table(grouping.groups)}

    content = {
        "created": time.strftime("%Y-%m-%d %H:%M"),
        "groupings": [summarize_grouping(grouping) for grouping in groupings_of(runs)],
        "groups": groups,
        "roles": common_roles(runs),
        "runs": [summarize_run(run) for run in runs],
    }
    return finite(content)


def common_roles(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of the agents if all runs have the same."""
    roles = roles_of(runs[0].attempts)
    return roles if all(roles_of(run.attempts) == roles for run in runs) else []


def summarize_group(group: Group) -> dict[str, Any]:
    """Return the numbers of a group, as JSON values."""
    columns = curves(group)
    return {
        "num_runs": len(group.runs),
        "updates": max((int(row["step"]) for run in group.runs for row in run.rows), default=0),
        "curves": columns,
        "axes": axes(group),
        "held_out": held_out(columns),
        "has_held_out": any(run.settings.get(f"{IDENTITY}held_out", {}).get("items") for run in group.runs),
        "is_trained_on": any(is_trained_on(run) for run in group.runs),
        "best": [f"{run.name}: {run.best}" for run in group.runs if run.best],
        "goodput": goodput(group),
    }


def is_trained_on(run: RecordedRun) -> bool:
    """Return whether the held-out tasks of a run are those that it trained on."""
    data, held_out = (run.settings.get(f"{IDENTITY}{name}") for name in ("data", "held_out"))
    return bool(held_out) and held_out == data


def summarize_run(run: RecordedRun) -> dict[str, Any]:
    """Return what the page shows of each run alone, as JSON values."""
    attempts = [without_settings(attempt) for attempt in run.attempts]
    settings = {name: run.settings.get(name) for name in ("gamma", "description", "tags")}
    content = settings | {"name": run.name, "status": run.status, "attempts": attempts}
    has_opponents = run.settings.get("snapshots") or run.settings.get("strangers")
    return content | ({"league": league(run)} if has_opponents else {})


def without_settings(attempt: dict[str, Any]) -> dict[str, Any]:
    """Return an attempt without its settings, which have a table of their own."""
    return {name: value for name, value in attempt.items() if name != "settings"}


def render(content: dict[str, Any], live: bool = False) -> str:
    """Return the HTML file. live: it is served by `serve.py`, which it asks for new data."""
    here = Path(__file__).parent
    scripts = (*SCRIPTS[:-1], *(("live.js",) * live), *SCRIPTS[-1:])
    templates = Environment(loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined)
    return templates.get_template("page.html").render(
        title=title_of([member["name"] for member in content["groupings"][0]["members"]]),
        live=live,
        compared="comparison" in content,
        findings=content["findings"],
        league=any("league" in run for run in content["runs"]),
        created=content["created"],
        styles="".join((here / name).read_text(encoding="utf-8") for name in STYLES),
        scripts="".join((here / name).read_text(encoding="utf-8") for name in scripts),
        parts=content["parts"],
        data=pack(dump({name: x for name, x in content.items() if name != "parts"} | {"live": live})),
    )


def title_of(names: Sequence[str]) -> str:
    """Return the names of the groups, or of the first one and how many more there are."""
    joined = ", ".join(names)
    return joined if len(joined) <= MAX_TITLE else f"{names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1)
