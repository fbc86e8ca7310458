"""`jmarl` and `python -m jmarl`: parse the command line, run one subcommand, turn errors into one line on stderr.

Only the module of the given subcommand is imported, so that `jmarl --help` answers at once. Exit codes: 0 done; 2 for what the
user wrote (a wrong flag, setting, file or name); 1 for failures; 75 for a run that was interrupted and saved; 130 for Ctrl+C
where nothing is saved.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from jmarl.config.paths import expand_home
from jmarl.config.validation import did_you_mean
from jmarl.files.interrupt import raised_again
from jmarl.files.lock import DirectoryInUse
from jmarl.processes import ending
from jmarl.processes.ending import Interrupted
from jmarl.processes.join import joined_place
from jmarl.shadows import ShadowedPackage, explained

COMMANDS: dict[str, str] = {
    "init": "write a small project to start from: settings, a reward with its test, data",
    "train": "train a team as a YAML file says",
    "launch": "start a command as several processes on this host, and again when one fails",
    "eval": "play without learning: mean return, success rate, parts of the reward",
    "cross-play": "play all pairings of the agents of several runs: who works with whom",
    "collect": "play without learning, and write what was written as trajectories and pairs",
    "play": "print one episode turn by turn",
    "replay": "make a step of a run again, bit for bit, and replace a message: what if",
    "report": "write one HTML file with curves, settings, held-out results and completions of runs, or follow them (--watch)",
    "doctor": "say in a few sentences what is wrong with runs, and what to try",
    "plan": "say whether a run fits on a GPU that is not here, and how long it takes at best",
    "serve": "offer environments to training elsewhere, a team over HTTP (OpenAI), or a seat of an environment (OpenEnv)",
    "export": "write the agents of a run for transformers, vLLM and peft",
    "configs": "list and show the YAML files that come with jmarl",
    "info": "show devices, versions, environments and algorithms, and whether they work",
}  # name of a subcommand and of its module in jmarl.cli -> one line of help
VERBOSE = {"train": "print a joint action a minute, and tracebacks"}
DONE, FAILED, WRONG_INPUT, INTERRUPTED, KILLED = 0, 1, 2, 75, 130
USER_ERRORS = (
    ValueError, TypeError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError,
    DirectoryInUse,
)  # fmt: skip
SHELLS = ("bash", "zsh")
PATHS = ("FILE", "FILE[,FILE...]", "DIR", "M", "RUN", "latest|auto|STEP|PATH")  # metavars of paths
EPILOG = (
    "`jmarl COMMAND --help` explains the flags of a command. Exit codes: 0 done, 1 failed, 2 wrong input, 75 stopped and "
    "saved, 130 stopped."
)


class CheckFailed(ValueError):
    """What a dry run prepares and plays fails, with settings that can be read: the exit code is FAILED."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. Flags are not abbreviated."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, allow_abbrev=False, **settings)

    def parse_known_args(self, *args: Any, **settings: Any) -> Any:
        """Parse arguments, and expand ~ in paths: shells leave it in --output=~/runs."""
        namespace, rest = super().parse_known_args(*args, **settings)
        for action in self._actions:
            if action.metavar in PATHS:
                setattr(namespace, action.dest, expand_home(getattr(namespace, action.dest)))
        return namespace, rest

    def error(self, message: str) -> NoReturn:
        """Print a line and exit."""
        self.exit(WRONG_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. arguments: default: those of the process."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    verbose = "-v" in arguments or "--verbose" in arguments
    prepare_streams()
    try:
        with raised_again(), warning_lines():
            code = run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        ending.fail("stopped by Ctrl+C", KILLED)
        return _fail(str(stop) or "stopped", verbose, KILLED)
    except Interrupted as reason:  # before a run that resumes begins
        show(f"interrupted {reason}")
        return INTERRUPTED
    except BrokenPipeError:  # such as `jmarl play | head`: nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        code = WRONG_INPUT if isinstance(error, USER_ERRORS) and not isinstance(error, CheckFailed) else FAILED
        text = sentence_of(error, verbose)
        _fail(text, verbose, code)
        ending.fail(text, code)  # of one of several processes: the others end too
        return code


def sentence_of(error: Exception, verbose: bool) -> str:
    """Return an error in one line: of the user's own code with its file, line and item, of a library with the line of jmarl.

    What jmarl itself refuses is a sentence already."""
    from jmarl.envs.calls.user_code import PACKAGE, named, sentence

    hint = "" if verbose else "; -v shows the traceback"
    if text := sentence(error):
        return text if isinstance(error, USER_ERRORS) and text.startswith(str(error)) else f"{text}{hint}"
    if isinstance(reason := explained(error), ShadowedPackage):
        return f"{reason}{hint}"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}{hint}"
    frames, package = traceback.extract_tb(error.__traceback__), os.path.join(PACKAGE, "")
    if not isinstance(error, (*USER_ERRORS, RuntimeError)) or not frames[-1].filename.startswith(package):
        last = next((frame for frame in reversed(frames) if frame.filename.startswith(package)), frames[-1])
        return f"{named(error)}, in {os.path.relpath(last.filename, os.path.dirname(PACKAGE))}, line {last.lineno}{hint}"
    return str(error) if isinstance(error, USER_ERRORS) else f"{named(error)}{hint}"


@contextlib.contextmanager
def warning_lines() -> Iterator[None]:
    """Show warnings, of Python and of jmarl's loggers, as lines like all others."""
    logger, handler = logging.getLogger("jmarl"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: to_stderr(handler.format(record))  # type: ignore[method-assign]
    handler.addFilter(lambda record: record.name != "jmarl.remote")  # a server writes its own log
    logger.addHandler(handler)
    logger.propagate = False  # a library may have given the root logger a handler
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: to_stderr(f"warning: {message}")
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def prepare_streams() -> None:
    """Write characters that the terminal cannot show as escapes, such as \\u65e5, and nothing to streams that are closed."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run(arguments: Sequence[str]) -> int:
    """Parse the arguments, run the subcommand and return its exit code. Errors are raised; those of parsing exit."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"] if arguments[1:2] != ["help"] else ["--help"]
    if arguments[:1] == ["--print-completion"]:
        return print_completion(arguments[1:])
    parser = parser_for(arguments)
    unknown = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if unknown and unknown not in COMMANDS:
        parser.error(f"there is no command {unknown!r}{did_you_mean(unknown, COMMANDS)}; choose {', '.join(COMMANDS)}")
    check_flags(parser, arguments[: arguments.index("--")] if "--" in arguments else arguments)
    args = parser.parse_args(arguments, argparse.Namespace(line=shlex.join(["jmarl", *arguments])))
    return args.run(args)


def parser_for(arguments: Sequence[str]) -> Parser:
    """Return the parser, with the flags of the subcommands in `arguments` only: their modules are imported, no other."""
    parser = Parser(prog="jmarl", description="Train teams of language models to work together.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"jmarl {metadata.version('jmarl')}")
    text = "print what completes commands and flags in a shell: put it where the shell reads it"
    parser.add_argument("--print-completion", choices=SHELLS, help=text)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands", parser_class=Parser)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments  # the rest is that of another process
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("-v", "--verbose", action="store_true", help=VERBOSE.get(name, "show the traceback of an error"))
        if name in own:
            module = importlib.import_module(f"jmarl.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands of a parser, by name."""
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]  # no public list
    return {name: command for action in actions for name, command in action.choices.items()}


def check_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Refuse unknown flags with the nearest known one; argparse itself would first complain of missing ones."""
    for text in arguments:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        flag = text.split("=")[0]
        if flag.startswith("--") and flag not in flags:
            parser.error(f"there is no flag {flag}{did_you_mean(flag, flags) or setting_hint(flag, flags)}")
        parser = below(parser).get(text, parser)


def setting_hint(flag: str, flags: Sequence[str]) -> str:
    """Return the end of a message about an unknown flag that is the name of a setting."""
    from jmarl.config.experiment import PART_OF

    name = flag.removeprefix("--").replace("-", "_")
    return f"; it is a setting: write --set {name}=VALUE" if "--set" in flags and name.rpartition(".")[2] in PART_OF else ""


def print_completion(arguments: Sequence[str]) -> int:
    """Print the script that completes commands, flags and choices in a shell."""
    import shtab

    parser = parser_for(list(COMMANDS))
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        parser.error(f"--print-completion {' '.join(arguments)}: choose {' or '.join(SHELLS)}")
    for command in below(parser).values():
        for action in command._actions:
            if action.metavar in PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments[0]))
    return DONE


def find_own_modules() -> None:
    """Let names of the user's code, such as my_module:Env, be looked for in the current directory too."""
    from jmarl import envs

    envs.own_places[:] = [os.getcwd()]


def add_trust_argument(parser: Any) -> None:
    """Add `--trust`, for commands that run what the config.yaml of a run names."""
    text = "run the code that a run from elsewhere names"
    parser.add_argument("--trust", action="store_true", help=text)


def to_stderr(line: str) -> None:
    """Print a line about progress, or an error, on standard error, at once. Results go to standard output."""
    print(f"jmarl: {' '.join(line.split())}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print lines of a run on standard output, at once; of several processes the first one does."""
    place = joined_place()
    if place is None or place.process == 0:
        print(text, flush=True)


def check_output(path: str | Path, flag: str = "--output", is_file: bool = False) -> Path:
    """Return the existing directory in which an output is made; of a file its directory is made at once.

    Raises ValueError if a file is in place of a directory or a directory in place of a file, or if nothing can be written."""
    output = Path(path).absolute()
    if is_file and output.is_dir():
        raise ValueError(f"{flag} {path} is a directory: give a file")
    existing = next(place for place in (output, *output.parents)[is_file:] if place.exists())
    if not existing.is_dir():
        raise ValueError(f"{flag} {path} cannot be made, {existing} is a file: choose another directory")
    if not os.access(output if is_file and output.exists() else existing, os.W_OK):  # /dev/stdout is in no folder of a user
        raise ValueError(f"{flag} {path}: {existing} cannot be written: choose another directory")
    if is_file:
        output.parent.mkdir(parents=True, exist_ok=True)
    return existing


def plural(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 run" and "2 runs"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def _fail(message: str, verbose: bool, code: int) -> int:
    if verbose:
        traceback.print_exc()
    to_stderr(message)
    return code
