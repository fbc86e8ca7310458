"""Write the report of runs as one HTML file that needs no network and no server.

The file has its styles, scripts and data in it. The data are JSON, compressed by gzip and written in base64, which the page
unpacks when it opens; texts of models become text nodes, so that nothing in them is run. The largest size of the file decides
how many steps have their completions in it.
"""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jmarl.report.completions import load_completions
from jmarl.report.load import Group, load_groups
from jmarl.report.summary import curves, goodput, held_out, settings_table
from jmarl.training.logs.completions_file import finite

SCRIPTS, STYLES = ("charts.js", "completions.js", "page.js"), ("page.css",)


def write_report(paths: Sequence[Path], output: Path, max_mb: float = 30.0) -> str:
    """Write a report and return a line about it.

    Args:
        paths: run directories, or directories of several seeds.
        output: the HTML file.
        max_mb: about its largest size in MB; where it is too small, only every second, fourth, ... step has its completions.
    """
    groups = load_groups(paths)
    runs = [run for group in groups for run in group.runs]
    numbers = summarize(groups)
    room = int(max_mb * 1e6 - len(pack(numbers))) * 3 // 4  # base64 takes four bytes for three
    records, every = load_completions(runs, max(room, 0))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(numbers | {"completions": records, "every": every}), encoding="utf-8")
    thinned = f" of every {every} steps" * (every > 1)
    steps = sum(record["kind"] == "train" for record in records)
    size = output.stat().st_size / 1e6
    return f"{output}: {len(runs)} run{'s' * (len(runs) > 1)}, completions of {steps} steps{thinned}, {size:.1f} MB"


def summarize(groups: Sequence[Group]) -> dict[str, Any]:
    """Return all that the page shows but the completions, as JSON values."""
    runs = [(number, run) for number, group in enumerate(groups) for run in group.runs]
    content = {
        "created": time.strftime("%Y-%m-%d %H:%M"),
        "groups": [
            {
                "name": group.name,
                "num_runs": len(group.runs),
                "updates": max((int(row["step"]) + 1 for run in group.runs for row in run.rows), default=0),
                "curves": curves(group),
                "held_out": held_out(group),
                "goodput": goodput(group),
            }
            for group in groups
        ],
        "runs": [
            {"name": run.name, "group": number, "attempts": [without_settings(attempt) for attempt in run.attempts]}
            for number, run in runs
        ],
        "settings": settings_table(groups),
    }
    return finite(content)


def without_settings(attempt: dict[str, Any]) -> dict[str, Any]:
    """Return an attempt without its settings, which have a table of their own."""
    return {name: value for name, value in attempt.items() if name != "settings"}


def pack(content: Any) -> str:
    """Return JSON values as compressed text."""
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(data.encode("utf-8", "replace"), 6, mtime=0)).decode()


def render(content: dict[str, Any]) -> str:
    """Return the HTML file."""
    here = Path(__file__).parent
    templates = Environment(loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined)
    return templates.get_template("page.html").render(
        title=", ".join(group["name"] for group in content["groups"]),
        created=content["created"],
        styles="".join((here / name).read_text(encoding="utf-8") for name in STYLES),
        scripts="".join((here / name).read_text(encoding="utf-8") for name in SCRIPTS),
        data=pack(content),
    )
