"""Read settings from the command line: `--optimizer.learning-rate 1e-6`, or `--learning-rate 1e-6`, since short names are
unique."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TypeVar

from jmarl.config.aliases import OTHER_NAMES
from jmarl.config.train_config import SECTION_OF, SECTIONS, TrainConfig

C = TypeVar("C", bound=TrainConfig)


def parse_flags(cls: type[C], arguments: Sequence[str] | None = None) -> C:
    """Return the configuration of command line arguments (default: those of the process). Ends the process with a message for
    flags that are wrong, and raises ValueError or TypeError for settings that are."""
    import tyro  # takes a third of a second

    arguments = sys.argv[1:] if arguments is None else arguments
    own = {field.name for field in dataclasses.fields(cls) if field.name not in SECTIONS}
    return tyro.cli(cls, args=[long_flag(argument, own) for argument in arguments])


def long_flag(argument: str, own: set[str]) -> str:
    """Return a flag with the name of its section: --run.no-resume for --no-resume. own: fields that are in no section."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    field = name.replace("-", "_")
    negative = field.startswith("no_") and field not in SECTION_OF
    field = field.removeprefix("no_") if negative else field
    if field in own:
        return argument
    field = OTHER_NAMES.get(field, field)
    if field not in SECTION_OF:
        return argument
    return f"--{SECTION_OF[field]}.{'no-' * negative}{field.replace('_', '-')}{equals}{value}"
