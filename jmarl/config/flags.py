"""Read settings from the command line: `--optimizer.learning-rate 1e-6`, or `--learning-rate 1e-6`, since short names are
unique."""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jmarl.config.aliases import CONVERSIONS, OTHER_NAMES, REFUSED
from jmarl.config.experiment import EnvironmentConfig, ExperimentConfig
from jmarl.config.train_config import TrainConfig

C = TypeVar("C", bound=TrainConfig | ExperimentConfig)
SWITCHES = ("episodes.chat", "run.resume")  # flags that may stand alone, or have one of VALUES
VALUES = ("True", "False", "auto")


def parse_flags(cls: type[C], arguments: Sequence[str] | None = None) -> C:
    """Return the configuration of command line arguments (default: those of the process).

    Ends the process with a message for wrong flags. Raises ValueError or TypeError for wrong settings.
    """
    import tyro  # takes a third of a second

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def from_json(info: Any) -> Any:
        """Read options as JSON, and an environment as a name or as JSON of its name and options."""
        if info.type is not EnvironmentConfig and typing.get_origin(info.type) is not dict:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="NAME|JSON" if info.type is EnvironmentConfig else "JSON",
            instance_from_str=lambda texts: _environment(texts[0]) if info.type is EnvironmentConfig else _json(texts[0]),
            is_instance=lambda value: isinstance(value, EnvironmentConfig if info.type is EnvironmentConfig else dict),
            str_from_instance=lambda value: [json.dumps(value if isinstance(value, dict) else dataclasses.asdict(value))],
        )

    arguments = sys.argv[1:] if arguments is None else arguments
    paths = flag_paths(cls)
    arguments, converted = without_conversions(cls, arguments, paths)
    arguments = with_values([long_flag(argument, paths) for argument in arguments], paths.values())
    config = tyro.cli(cls, args=arguments, registry=registry)
    return config.replace(**converted) if converted else config


def without_conversions(cls: type, arguments: Sequence[str], paths: Mapping[str, str]) -> tuple[list[str], dict[str, Any]]:
    """Return arguments without the flags of names in `CONVERSIONS`, and the values of these, which follow from other settings.

    Raises TypeError for names of others that are no settings here."""
    rest: list[str] = []
    converted: dict[str, Any] = {}
    texts = iter(arguments)
    for argument in texts:
        flag, equals, text = argument.partition("=")
        name = flag.removeprefix("--").rpartition(".")[2].replace("-", "_")
        if flag.startswith("--") and name in REFUSED and name not in paths:
            raise TypeError(f"{cls.__name__} has no setting {name!r}; {REFUSED[name]}")
        if name in CONVERSIONS and name not in paths and long_flag(flag, paths) != flag:
            converted[name] = _literal(text if equals else next(texts, ""))
        else:
            rest.append(argument)
    return rest, converted


def with_values(arguments: Sequence[str], paths: Iterable[str]) -> list[str]:
    """Return arguments in which each switch that may also have other values has one: --X True for --X, --X False for --no-X."""
    switches = {f"--{path}" for path in paths if path.endswith(SWITCHES)}
    negatives = {".no-".join(flag.rsplit(".", 1)): flag for flag in switches}
    result: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument in negatives:
            result += [negatives[argument], "False"]
        else:
            result += [argument, "True"] if argument in switches and following not in VALUES else [argument]
    return result


def _literal(text: str) -> Any:
    """Return the number, bool or None that a text is written as, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _environment(text: str) -> EnvironmentConfig:
    return EnvironmentConfig(**_json(text)) if text.lstrip().startswith("{") else EnvironmentConfig(text)


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is a {type(value).__name__}: give a JSON object of names and values")
    return value


def flag_paths(cls: type, prefix: str = "") -> dict[str, str]:
    """Return the long name of each setting by its short one, such as train.optimizer.learning_rate by learning_rate.

    A field of a class itself comes before one of its sections with the same name.
    """
    own: dict[str, str] = {}
    nested: dict[str, str] = {}
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            nested |= flag_paths(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            own[name] = prefix + name
    return nested | own


def long_flag(argument: str, paths: Mapping[str, str]) -> str:
    """Return a flag under its long name: --run.no-resume for --no-resume. paths: see `flag_paths`."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    *sections, short = name.replace("-", "_").split(".")
    negative = short.startswith("no_") and short not in paths
    short = short.removeprefix("no_") if negative else short
    short = short if short in paths else OTHER_NAMES.get(short, short)
    path = paths.get(short, "")
    *parents, _ = path.split(".")
    if not path or sections != parents[len(parents) - len(sections) :]:
        return argument
    return f"--{'.'.join([*parents, 'no-' * negative + short.replace('_', '-')])}{equals}{value}"
