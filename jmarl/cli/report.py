"""`jmarl report RUN [RUN ...]`: write one HTML file with all that can be seen of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from jmarl.config import check
from jmarl.report.page import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output directory of a run, or of several seeds")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="file to write (default: %(default)s)")
    parser.add_argument(
        "--max-mb", type=float, default=30.0, help="largest size of the file; smaller: completions of fewer steps (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    check("max_mb", args.max_mb, args.max_mb > 0, "above 0")
    print(write_report(args.runs, args.output, args.max_mb))
    return 0
