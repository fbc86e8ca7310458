"""`jmarl doctor RUN [RUN ...]`: say in a few sentences what is wrong with runs, from their metrics and completions alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jmarl.report import diagnose_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output directory of a run, or of several seeds")
    parser.add_argument("--json", action="store_true", help="print a line of JSON a run: rules, severity, updates, sentences")


def run(args: argparse.Namespace) -> int:
    """Print the sentences of each run, the most severe first."""
    for name, findings in diagnose_runs(args.runs).items():
        if args.json:
            print(json.dumps({"run": name, "findings": [finding._asdict() for finding in findings]}))
            continue
        print(f"{name}:" if name else "")
        print("\n".join(f"  {number}. {finding.text}" for number, finding in enumerate(findings, 1)), flush=True)
    return 0
