"""`jmarl report RUN [RUN ...]`: write one HTML file with all that can be seen of runs, or serve a page that follows them.

With `--compare` groups of runs (seeds) are compared at the top of the page, and as Markdown, LaTeX and CSV beside the file.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from jmarl.cli.main import check_output
from jmarl.config import check
from jmarl.report import Comparison, address_of, open_server, write_report

OUTPUT = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output directory of a run, or of several seeds")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"file to write (default: {OUTPUT})")
    parser.add_argument(
        "--watch", action="store_true", help="write no file: serve a page on this machine that follows the runs, until Ctrl+C"
    )
    text = "compare groups of runs (of equal settings) in these columns, also in .md, .tex and .csv beside the file"
    parser.add_argument("--compare", nargs="+", action="extend", default=[], metavar="COLUMN", help=text)
    text = "groups are the runs with equal values of these settings"
    parser.add_argument("--by", nargs="+", action="extend", default=[], metavar="SETTING", help=text)
    parser.add_argument("--against", default="", metavar="GROUP", help="differences to this group, with Welch's t-test")
    text = "steps whose completions the page has in any case, beside the first, the newest and those evenly between that fit"
    parser.add_argument("--steps", nargs="+", type=int, action="extend", default=[], metavar="STEP", help=text)
    parser.add_argument("--port", type=int, help="port of --watch (default: a free one)")
    parser.add_argument(
        "--max-mb", type=float, default=30.0, help="largest size of the file; smaller: completions of fewer steps (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    check("max_mb", args.max_mb, args.max_mb > 0, "above 0")
    for flag in ("by", "against"):
        if getattr(args, flag) and not args.compare:
            raise ValueError(f"--{flag} has no effect without --compare COLUMN, which compares groups of runs: add one")
    if not args.watch:
        if args.port is not None:
            raise ValueError(
                f"--port {args.port} has no effect without --watch, which serves a page: add --watch or remove --port"
            )
        output = args.output or Path(OUTPUT)
        check_output(output, is_file=True)
        comparison = Comparison(args.compare, args.by, args.against) if args.compare else None
        print(write_report(args.runs, output, args.max_mb, comparison, args.steps))
        return 0
    for flag, value in (
        ("--output", args.output),
        ("--compare", " ".join(args.compare) or None),
        ("--steps", " ".join(map(str, args.steps)) or None),
    ):
        if value is not None:
            raise ValueError(f"{flag} {value} has no effect with --watch, which writes no file: remove one of them")
    return watch(args.runs, args.port or 0, args.max_mb)


def watch(runs: Sequence[Path], port: int, max_mb: float) -> int:
    """Serve a page that follows runs, until Ctrl+C."""
    with open_server(runs, port, max_mb) as server:
        print(f"{address_of(server)} follows {', '.join(map(str, runs))}; Ctrl+C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
