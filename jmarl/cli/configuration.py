"""Read the configuration of a command from files and flags, complete it by what its environments say, and run it."""

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jmarl.cli.main import DONE, FAILED, INTERRUPTED, KILLED, find_own_modules, plural, show, to_stderr
from jmarl.config.experiment import MODULES, EnvironmentConfig, ExperimentConfig
from jmarl.config.layers import FLAGS, experiment_config, located
from jmarl.config.paths import expand_home
from jmarl.config.yaml_file import Given, YamlFile, parse_value, read_yaml
from jmarl.files.run_files import CONFIG_FILE, read_config
from jmarl.files.trusted import OTHERS, require_trust
from jmarl.mrlm.layers import MRLMLayers
from jmarl.processes.ending import Interrupted, NoServer

if TYPE_CHECKING:
    from jmarl.runs.records import FitResult, TrainResult


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
    find_own_modules()
    layers, sweep, names = read_layers(args)
    for name, value in (point or {}).items():
        layers.add_flag(name, value, "sweep:")
    folders = [Path(os.path.abspath(shipped(name))).parent for name in reversed(names)]
    layers.own = located(layers.own, folders)
    if files_of_runs(names):  # before the algorithm, on which other settings depend, is run
        named = {name: given for name in (*MODULES, *OTHERS, "options") if (given := layers.tree(name)) is not None}
        require_trusted_names(names, located(named, folders), args.trust)
    settings = located(all_settings(layers), folders)
    notes = choose_directory(settings, Path(names[0]).stem)
    check_copy(names, settings)
    require_trusted_names(names, settings, args.trust)
    cfg = experiment_config(settings)
    with interrupted_again(cfg):
        cfg, more = complete(cfg, settings)
    return Configuration(cfg, settings["device"].value if "device" in settings else "auto", sweep, notes + more, settings)


def read_layers(args: argparse.Namespace) -> tuple[MRLMLayers, dict[str, Any] | None, list[str]]:
    """Return what files and flags say, the section sweep, and the names of the files."""
    layers, sweep = MRLMLayers(), None
    names = [expand_home(name.strip()) for name in args.config.split(",") if name.strip()]
    for name in names:
        file = read_yaml(shipped(name))
        if "sweep" in file.tree:
            sweep = sweep_of(file)
        layers.add(file._replace(tree={key: value for key, value in file.tree.items() if key != "sweep"}))
    for text in args.set or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {text} is not allowed: write --set name=value, such as --set learning_rate=1e-5")
        if name.startswith("sweep."):
            sweep = (sweep or {}) | {name.removeprefix("sweep."): parse_value(value)}
        else:
            layers.add_flag(name, parse_value(value))
    layers.add(YamlFile(FLAGS, flags_of(args), {}))
    return layers, sweep, names


def files_of_runs(names: Sequence[str]) -> list[str]:
    """Return which of the files are the config.yaml of a run, whose directory or whose file is among the names."""
    from jmarl.files.own_files import is_of_run

    def is_written(name: str, file: Path) -> bool:
        return is_of_run(file.parent) or (file.parent / "models" / "agent_0").is_dir() or file == Path(name) / CONFIG_FILE

    return [file for name in names if Path(file := shipped(name)).name == CONFIG_FILE and is_written(name, Path(file))]


def require_trusted_names(names: Sequence[str], given: Mapping[str, Given], trust: bool) -> None:
    """Raise PermissionError if the config.yaml of a run among the files names code that is not trusted. What flags and other
    files set is the user's own.

    given: the settings, with the places where they were given."""
    for file in files_of_runs(names):
        sweeps = () if "sweep" in read_config(Path(file)).tree else ("sweep:",)
        others = ("--set", *sweeps, *(f"{other}, line " for other in map(shipped, names) if other != file))
        own = {name: x.value for name, x in given.items() if x.place != FLAGS and not x.place.startswith(others)}
        require_trust(Path(file), own, trust)


def check_copy(names: Sequence[str], given: Mapping[str, Given]) -> None:
    """Raise ValueError if a run is to be resumed by its config.yaml, and that names another directory: the run was copied."""
    output, resumes = given["output_dir"], "resume" in given and given["resume"].value
    for file in files_of_runs(names) if resumes else ():
        folder, named = os.path.dirname(file) or ".", expand_home(output.value)
        if output.place.startswith(f"{file}, line ") and os.path.realpath(folder) != os.path.realpath(named):
            raise ValueError(
                f"{output.place}: output_dir={output.value!r} is not the directory of this file: give --output {folder} to "
                f"resume the run beside it, or --output {named}"
            )


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


def all_settings(layers: MRLMLayers) -> dict[str, Given]:
    """Return the settings of all sources."""
    from jmarl.algorithms import find_row  # imports jax
    from jmarl.runs.checks import find_own_algorithms

    def kind_of(name: str) -> str:
        try:
            find_own_algorithms(name)
            return find_row(name).data
        except ValueError as error:
            place = layers.own["algorithm"].place if "algorithm" in layers.own else "algorithm"
            raise ValueError(f"{place}: {error}") from None

    return layers.settings(kind_of)


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


def complete(cfg: ExperimentConfig, given: Mapping[str, Given]) -> tuple[ExperimentConfig, list[str]]:
    """Return a configuration that fits its environments where nothing else was given, and lines that say what was chosen."""
    from jmarl.algorithms import find_row  # imports jax
    from jmarl.envs.messages import MAX_TURNS

    notes: list[str] = []
    names = {config.name for config in environments_of(cfg)}
    if names == {"debate"} and cfg.team.size == 1:
        cfg = self_play(cfg)
        notes.append("debate with one model: self-play, both sides share its weights and every motion is played from both")
    alone, for_teams = cfg.train.algorithm, find_row(cfg.train.algorithm).for_teams
    if for_teams and cfg.team.size > 1:
        cfg = cfg.replace(algorithm=for_teams[0])
        notes.append(f"{alone} for {cfg.team.size} agents is {for_teams[0]}")
    limit = cfg.train.episodes.num_turns if "num_turns" in given else MAX_TURNS
    turns = max((turns_of(config, given, limit) for config in environments_of(cfg)), default=1)
    plays = find_row(cfg.train.algorithm).data != "texts"  # sft imitates solvers, whatever the number of turns
    if plays and "num_turns" not in given and turns > cfg.train.episodes.num_turns:
        chain = "branching" not in given and cfg.train.episodes.joint_mode != "cross"
        cfg = cfg.replace(num_turns=turns, **({"branching": "chain"} if chain else {}))
        notes.append(f"num_turns={turns}, the longest episode" + ", in chains" * chain)
    elif plays and environments_of(cfg) and turns < cfg.train.episodes.num_turns:
        cfg = cfg.replace(num_turns=turns, **({} if turns > 1 else {"branching": "tree"}))
        notes.append(f"num_turns={turns}: no episode is longer")
    return cfg, notes


def environments_of(cfg: ExperimentConfig) -> list[EnvironmentConfig]:
    """Return all environments of an experiment."""
    one = [] if cfg.task.environment is None else [EnvironmentConfig(cfg.task.environment, cfg.task.options)]
    return [*one, *cfg.task.train_envs, *cfg.task.eval_envs]


def self_play(cfg: ExperimentConfig) -> ExperimentConfig:
    """Return a debate of one model with itself."""

    def swapped(configs: Sequence[EnvironmentConfig]) -> tuple[EnvironmentConfig, ...]:
        return tuple(dataclasses.replace(config, options={"swap": True, **config.options}) for config in configs)

    task = dataclasses.replace(cfg.task, train_envs=swapped(cfg.task.train_envs), eval_envs=swapped(cfg.task.eval_envs))
    if task.environment is not None:
        task = dataclasses.replace(task, options={"swap": True, **task.options})
    return cfg.replace(task=task, num_agents=2, shared_weights=True)


def turns_of(config: EnvironmentConfig, given: Mapping[str, Given], limit: int) -> int:
    """Return the longest episode of an environment, which is made to see that it can be. limit: if it sets none."""
    from jmarl.envs import make
    from jmarl.envs.calls.user_code import message_of
    from jmarl.envs.vector import vectorize

    try:
        return vectorize(make(config.name, **config.options), limit).max_turns
    except (ValueError, TypeError, FileNotFoundError) as error:
        places = [given[name].place for name in ("environment", "train_envs", "eval_envs") if name in given]
        kind = next(x for x in (TypeError, FileNotFoundError, ValueError) if isinstance(error, x))  # not a subclass's arguments
        raise kind(f"{' and '.join(dict.fromkeys(places))}: {message_of(error)}") from error


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


def train(cfg: ExperimentConfig, again: str = "") -> tuple[int, Any]:
    """Run an experiment. Returns the exit code, and its result or None. again: the line of an interrupted run that says how to
    continue, if another one than `resume_line`."""
    from jmarl.files.interrupt import ending_at_second_signal
    from jmarl.runs.experiment import run_experiment  # imports jax

    directory, updates = cfg.train.run.output_dir, cfg.train.run.num_updates
    place_of_run = os.path.abspath(directory)  # code of the user may change the working directory
    if cfg.train.run.resume == "auto" and has_ended(cfg):
        show(f"{directory}: the run has made all {plural(updates, 'update')}, nothing is left to do")
        return DONE, None
    show(f"{cfg.experiment_name or 'experiment'}: loading {', '.join(dict.fromkeys(cfg.team.models))}")
    try:
        with ending_at_second_signal(), interrupted_again(cfg):
            result = run_experiment(cfg)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {again or resume_line(directory)}") from None
    except Interrupted as reason:
        show(f"interrupted {reason}\n{again or resume_line(directory)}")
        return (INTERRUPTED if has_checkpoint(place_of_run) else KILLED), None
    results = result if isinstance(result, list) else [result]
    directories = directories_of(cfg)
    for one, place in zip(results, directories, strict=True):
        show(f"{place}: {closing_line(one, None if cfg.train.run.allow_changed else Path(place))}")
    if unsaved := [one.unsaved for one in results if one.unsaved]:
        to_stderr(f"not everything is saved: {unsaved[0]}")
        return FAILED, result
    if any(one.interrupted for one in results):
        show(again or resume_line(directory))
        return (INTERRUPTED if has_checkpoint(place_of_run) else KILLED), result
    return DONE, result


@contextlib.contextmanager
def interrupted_again(cfg: ExperimentConfig) -> Iterator[None]:
    """Let a run that resumes and finds no server be interrupted once more: nothing is lost, and it can be resumed later.

    One that begins fails: its addresses may be wrong."""
    try:
        yield
    except NoServer as error:
        if cfg.train.run.resume and has_checkpoint(cfg.train.run.output_dir):
            raise Interrupted(f"because {error}") from error
        raise


def directories_of(cfg: ExperimentConfig) -> list[str]:
    """Return the directory of each run of an experiment: of each seed, or of the only run."""
    directory = cfg.train.run.output_dir
    return [f"{directory}/seed_{seed}" for seed in cfg.seeds] or [directory]


def has_ended(cfg: ExperimentConfig) -> bool:
    """Return whether the directory holds the complete run of exactly these settings."""
    from jmarl.files.attempt import is_complete
    from jmarl.files.config_file import changed_settings

    complete = all(is_complete(directory, cfg.train.run.num_updates) for directory in directories_of(cfg))
    return complete and changed_settings(cfg) == []


def closing_line(result: "TrainResult | FitResult", directory: Path | None) -> str:
    """Return what a run did: its updates, the last reward or loss, and the held-out results if there are any.

    directory: whose log has the evaluation before training of a run that was resumed; None: it may be of other tasks."""
    from jmarl.evaluation.evaluate import Evaluation, logged, logged_numbers
    from jmarl.logs.metrics_writer import read_rows
    from jmarl.runs.records import TrainResult

    name, values = ("reward", result.rewards) if isinstance(result, TrainResult) else ("loss", result.losses)
    before, file = result.before, directory and directory / "metrics.jsonl"
    for row in read_rows(file) if before is None and file and file.is_file() else ():
        if row.get("eval/updates") == 0:
            before = logged(row) if name == "reward" else logged_numbers(row)
    ends = [x.mean_text if isinstance(x, Evaluation) else x and f"{x['loss']:.3f}" for x in (before, result.after)]
    updates = int(result.state.step)
    parts = [f"{plural(updates, 'update')} made" + ", then interrupted" * result.interrupted]
    parts += [f"{name} of the last one {values[-1]:.3f}" if values else "none of them now"]
    words = ("before training", f"after {plural(updates, 'update')}")
    held_out = [f"{value} {when}" for value, when in zip(ends, words, strict=True) if value is not None]
    return ", ".join(parts) + (f"; held-out {name} {', '.join(held_out)}" if held_out else "")


def resume_line(directory: str) -> str:
    """Return a line with the command that continues an interrupted run."""
    if not has_checkpoint(directory):
        return "no checkpoint was written: the same command starts again from the beginning"
    return f"to resume: jmarl train --config {shlex.quote(f'{directory}/{CONFIG_FILE}')} --resume"


def has_checkpoint(directory: str) -> bool:
    """Return whether a run, or one of its seeds, has a checkpoint to resume from."""
    from jmarl.files.checkpoint import saved_steps

    return any(saved_steps(path) for path in (Path(directory) / "checkpoints", *Path(directory).glob("seed_*/checkpoints")))
