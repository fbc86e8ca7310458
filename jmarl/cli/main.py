"""`jmarl` and `python -m jmarl`: parse the command line, run one subcommand, turn errors into one line on stderr.

Only the module of the given subcommand is imported, so that `jmarl --help` answers at once. Exit codes: 0 done; 2 for what the
user wrote (a wrong flag, setting, file or name); 1 for failures; 75 for a run that was interrupted and saved; 130 for Ctrl+C
where nothing is saved.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence

COMMANDS: dict[str, str] = {
    "train": "train a team as a YAML file says",
    "eval": "play without learning: mean return, success rate, parts of the reward",
    "collect": "play without learning, and write what was written as trajectories and pairs",
    "play": "print one episode turn by turn",
    "info": "show devices, versions, environments and algorithms, and whether they work",
    "export": "write the agents of a run for transformers, vLLM and peft",
    "configs": "list and show the YAML files that come with jmarl",
}  # name of a subcommand and of its module in jmarl.cli -> one line of help
DONE, FAILED, WRONG_INPUT, INTERRUPTED, KILLED = 0, 1, 2, 75, 130
USER_ERRORS = (ValueError, TypeError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. arguments: default: those of the process."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = parser_for(arguments).parse_args(arguments)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return _fail("stopped", args.verbose, KILLED)
    except USER_ERRORS as error:
        return _fail(str(error), args.verbose, WRONG_INPUT)
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error}", args.verbose, FAILED)


def parser_for(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser, with the flags of the subcommand in `arguments` only: its module is imported, no other."""
    parser = argparse.ArgumentParser(prog="jmarl", description="Train teams of language models to work together.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("-v", "--verbose", action="store_true", help="show the traceback of an error")
        if name in arguments:
            module = importlib.import_module(f"jmarl.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _fail(message: str, verbose: bool, code: int) -> int:
    if verbose:
        traceback.print_exc()
    print(f"jmarl: {' '.join(message.split())}", file=sys.stderr)
    return code
