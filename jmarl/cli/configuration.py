"""Read the configuration of a command from files and flags.

Sources in keys of MRLM are converted here, at the border (`own_settings`); from then on there are only our names. `train` runs
a configuration; `settings` completes it by what its environments say, and asks before code of others is run.
"""

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.cli.main import find_own_modules
from jmarl.cli.settings.running import interrupted_again
from jmarl.cli.settings.trust import check_copy, require_trusted_names
from jmarl.config import TrainConfig
from jmarl.config.experiment import ExperimentConfig
from jmarl.config.layers import FLAGS, Layers, experiment_config, flag_source, located
from jmarl.config.paths import expand_home
from jmarl.config.yaml_file import Given, YamlFile, parse_value, read_yaml
from jmarl.files.run_files import CONFIG_FILE
from jmarl.mrlm.convert import KeyConversion, is_foreign
from jmarl.mrlm.keys import TOP_KEYS

Finish = Callable[[Mapping[str, Given], str], dict[str, Given]]


class Configuration(NamedTuple):
    """What files and flags say."""

    experiment: ExperimentConfig
    device: str  # platform to run on
    sweep: dict[str, Any] | None  # the section sweep
    notes: list[str]  # what was chosen because nobody said it
    given: Mapping[str, Given]  # settings by short name, with their places


def read_configuration(args: argparse.Namespace, point: Mapping[str, Any] | None = None) -> Configuration:
    """Return the configuration of the arguments of `jmarl train`: files, then --set, then the other flags.

    point: settings of one run of a sweep, which override all others."""
    from jmarl.cli.settings.completion import complete  # imports NumPy

    find_own_modules()
    names, sources, sweep = read_sources(args)
    own, finish = own_settings([*sources, *(flag_source(name, x, "sweep:") for name, x in (point or {}).items())])
    files = {name: shipped(name) for name in names}
    folders = [Path(os.path.abspath(files[name])).parent for name in reversed(names)]
    own = located(own, folders)
    require_trusted_names(files, own, args.trust)  # before the algorithm, on which other settings depend, is run
    kind = kind_of(own.get("algorithm"))
    settings = located(finish(own, kind), folders)
    notes = choose_directory(settings, Path(names[0]).stem)
    check_copy(files, settings)
    require_trusted_names(files, settings, args.trust)
    cfg = experiment_config(settings)
    with interrupted_again(cfg):
        cfg, more = complete(cfg, settings)
    return Configuration(cfg, settings["device"].value if "device" in settings else "auto", sweep, notes + more, settings)


def read_sources(args: argparse.Namespace) -> tuple[list[str], list[YamlFile], dict[str, Any] | None]:
    """Return the names of the files, what files and flags say, and the section sweep."""
    sources: list[YamlFile] = []
    sweep = None
    names = [expand_home(name.strip()) for name in args.config.split(",") if name.strip()]
    for name in names:
        file = read_yaml(shipped(name))
        if "sweep" in file.tree:
            sweep = sweep_of(file)
        sources.append(file._replace(tree={key: value for key, value in file.tree.items() if key != "sweep"}))
    for text in args.set or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {text} is not allowed: write --set name=value, such as --set learning_rate=1e-5")
        if name.startswith("sweep."):
            sweep = (sweep or {}) | {name.removeprefix("sweep."): parse_value(value)}
        else:
            sources.append(flag_source(name, parse_value(value)))
    return names, [*sources, YamlFile(FLAGS, flags_of(args), {})], sweep


def own_settings(sources: Sequence[YamlFile]) -> tuple[dict[str, Given], Finish]:
    """Return settings in our names, and what completes them once it is known what the algorithm learns from."""
    ranked = list(enumerate(sources, 1))
    conversion = KeyConversion(ranked) if any(map(is_foreign, sources)) else None
    layers = Layers(other_keys=TOP_KEYS)
    for rank, source in conversion.sources if conversion else ranked:
        layers.add(rank, source)
    own = layers.settings()
    if conversion and conversion.algorithm:
        own.setdefault("algorithm", conversion.algorithm)
    return own, conversion.finish if conversion else lambda own, kind: dict(own)


def kind_of(algorithm: Given | None) -> str:
    """Return what an algorithm learns from: rollouts, pairs or texts. Raises ValueError for an unknown one."""
    from jmarl.algorithms import find_row  # imports jax
    from jmarl.runs.checks import find_own_algorithms

    name, place = (algorithm.value, algorithm.place) if algorithm else (TrainConfig.algorithm, "algorithm")
    try:
        find_own_algorithms(name)
        return find_row(name).data
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


@contextlib.contextmanager
def naming_places(given: Mapping[str, Given]) -> Iterator[None]:
    """Put the file and line of a setting in front of an error that begins with the setting, such as num_generations=1."""
    try:
        yield
    except (ValueError, TypeError, FileNotFoundError) as error:
        name = str(error).partition("=")[0]
        if name in given and given[name].rank and given[name].place != FLAGS:
            error.args = (f"{given[name].place}: {error}",)
        raise


def read_experiment(config: str, trust: bool = False) -> ExperimentConfig:
    """Return the experiment of YAML files alone. config, trust: as the flags of `jmarl train`."""
    others = dict.fromkeys(("set", "seed", "device", "output", "resume", "pool"))
    return read_configuration(argparse.Namespace(config=config, trust=trust, **others)).experiment


def sweep_of(file: YamlFile) -> dict[str, Any]:
    """Return the section sweep of a file. Raises ValueError if it has no settings."""
    section = file.tree["sweep"]
    if not isinstance(section, dict) or not section:
        example = "settings with lists of values, such as sweep: {learning_rate: [1e-5, 1e-4], seeds: [0, 1]}"
        raise ValueError(f"{file.place(('sweep',))}: sweep: {section!r:.60} is not allowed: sweep must be {example}")
    return section


def shipped(name: str) -> str:
    """Return the path of a configuration: the file itself, that of a run's directory, or the shipped one of this name."""
    from jmarl.cli.configs import find_config

    if (Path(name) / CONFIG_FILE).is_file():
        return str(Path(name) / CONFIG_FILE)
    return name if Path(name).is_file() or Path(name).suffix in (".yaml", ".yml") else str(find_config(name))


def flags_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the flags with names of their own."""
    settings: dict[str, Any] = {"seed": args.seed, "device": args.device, "output_dir": args.output, "pool": args.pool}
    settings = {name: value for name, value in settings.items() if value is not None}
    if args.resume is None:
        return settings
    settings["resume"] = "auto" if args.resume == "auto" else True
    if args.resume in ("auto", "latest"):
        return settings
    if args.resume.isdecimal():
        return settings | {"resume_step": int(args.resume)}
    path = Path(args.resume)
    if not path.is_dir():
        allowed = "latest, auto, the number of a checkpoint, or the directory of a run"
        raise FileNotFoundError(f"--resume {args.resume}: give {allowed}")
    if path.name.isdecimal() and path.parent.name == "checkpoints":
        settings["resume_step"], path = int(path.name), path.parent.parent
    elif path.name == "checkpoints":
        path = path.parent
    return {"output_dir": str(path)} | settings


def choose_directory(settings: dict[str, Given], stem: str) -> list[str]:
    """Set the output directory to runs/<experiment_name> if none is given. Returns a line that says so.

    stem: of the first file, the name of an experiment without one."""
    if "experiment_name" not in settings or not settings["experiment_name"].value:
        settings["experiment_name"] = Given(stem, 0, "the name of the file")
    if "output_dir" in settings and settings["output_dir"].value:
        return []
    directory = "runs/" + re.sub(r"[^\w.-]+", "_", str(settings["experiment_name"].value))
    settings["output_dir"] = Given(directory, 0, "the default")
    return [f"no output directory was given: it is {directory}"]
