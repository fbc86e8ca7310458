"""What the commands `eval`, `collect`, `play` and `export` share: `--model` becomes agents, `--environment` an environment.

`--model` is the directory of a run, a directory of agents (`agent_0/`, ...), one model for all roles of the environment, or one
model per role. Of a run the newest weights are taken: those in `models/`, or the newest checkpoint if the run has not ended.
Settings of sampling are those of the run, else the defaults of `TrainConfig`, where no flag says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # imported in the functions, so that `--help` answers at once
    from jmarl.config import ExperimentConfig, TrainConfig
    from jmarl.models.hub.agents import Agent
    from jmarl.team import Team

MODEL_HELP = "a run's directory, a directory of agents (agent_0/, ...), one model for all roles, or one per role"


class Source(NamedTuple):
    """The agents that `--model` names."""

    agents: list[Agent]  # on the host, with merged adapters
    text: str  # where their weights come from
    cfg: TrainConfig | None = None  # settings of their run
    experiment: ExperimentConfig | None = None  # all of its config.yaml
    directory: Path | None = None  # of the run
    adapters: list[Any] | None = None  # models with separate adapters, if they come from a checkpoint of a run with LoRA


class Match(NamedTuple):
    """A team and the environment that it plays in."""

    team: Team
    params: list[Any]  # [A, ...] of each stack
    env: Any  # a `LockStep`, or another `Environment` with roles, tasks and max_turns
    cfg: TrainConfig
    settings: dict[str, Any]  # JSON values that say what is played


# --- flags -------------------------------------------------------------------------------------------------------------


def add_model_argument(parser: Any) -> None:
    """Add `--model` and `--base-model`."""
    parser.add_argument("--model", required=True, nargs="+", metavar="M", help=MODEL_HELP)
    text = "models that a run without config.yaml started from, to read its checkpoints"
    parser.add_argument("--base-model", nargs="+", metavar="M", help=text)


def add_play_arguments(parser: argparse.ArgumentParser, split: str) -> None:
    """Add the flags of commands that play. split: default split of the tasks."""
    who = parser.add_argument_group("who plays what")
    add_model_argument(who)
    names = "a name (`jmarl info` lists them) or module:Class; default: that of the run"
    who.add_argument("--environment", metavar="E", help=names)
    who.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="argument of its constructor")
    who.add_argument("--split", choices=("train", "eval"), default=split, help=f"its tasks to play; default: {split}")
    who.add_argument("--tasks", metavar="FILE", help="play the tasks in this .json or .jsonl file instead")
    sampling = parser.add_argument_group("how agents write (default: as in the run, else as TrainConfig)")
    sampling.add_argument("--max-new-tokens", type=int, metavar="N", help="longest completion")
    sampling.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    sampling.add_argument("--compute-dtype", choices=("float32", "bfloat16"), help="type of activations")
    chat = "put prompts into the chat template"
    sampling.add_argument("--chat", action=argparse.BooleanOptionalAction, default=None, help=chat)
    sampling.add_argument("--history", choices=("none", "append"), help="what agents read in later turns")
    text = "what to do with prompts that leave no room in the context"
    sampling.add_argument("--long-prompts", choices=("error", "truncate_left", "drop"), help=text)
    sampling.add_argument("--num-turns", type=int, metavar="N", help="longest episode")


def options_of(texts: Sequence[str]) -> dict[str, Any]:
    """Return the arguments in texts KEY=VALUE; values are read as in a YAML file."""
    from jmarl.config.yaml_file import parse_value

    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--option {text} is not allowed: write --option key=value, such as --option max_turns=3")
        options[name] = parse_value(value)
    return options


# --- models ------------------------------------------------------------------------------------------------------------


def load_source(models: Sequence[str], base_models: Sequence[str] | None = None) -> Source:
    """Return the agents of `--model`. Raises FileNotFoundError or ValueError if there are none, with what is there instead."""
    from jmarl.models.hub.agents import load_agent

    paths = [Path(model).expanduser() for model in models]
    if len(models) == 1 and is_run(paths[0]):
        return load_run(paths[0], base_models)
    if base_models:
        raise ValueError(f"--base-model is for the directory of a run, and --model {' '.join(models)} is none")
    if len(models) == 1 and (paths[0] / "agent_0").is_dir():
        return Source(load_directory(paths[0]), f"the agents in {models[0]}")
    for model, path in zip(models, paths, strict=True):
        if seeds := sorted(x.name for x in path.glob("seed_*") if is_run(x)):
            raise ValueError(f"{model} holds the runs of several seeds: give one of them, such as {path / seeds[0]}")
        if len(models) > 1 and (is_run(path) or (path / "agent_0").is_dir()):
            raise ValueError(f"with several models each is one agent, and {model} is a team: give it alone, or its agent_0")
    loaded = {model: load_agent(model) for model in models}  # equal models are read once
    return Source([loaded[model] for model in models], ", ".join(models))


def is_run(path: Path) -> bool:
    """Return whether a path is the directory of a run."""
    return (path / "checkpoints").is_dir() or (path / "models" / "agent_0").is_dir()


def load_directory(path: Path) -> list[Agent]:
    """Return the agents in a directory of them."""
    from jmarl.evaluation.cross_play import agents_in
    from jmarl.models.hub.agents import load_agent

    return [load_agent(agent) for agent in agents_in(path)]


def load_run(path: Path, base_models: Sequence[str] | None = None) -> Source:
    """Return the newest agents of a run."""
    from jmarl.config import ExperimentConfig
    from jmarl.config.yaml_file import read_yaml
    from jmarl.training.files.checkpoint import saved_steps
    from jmarl.training.files.config_file import CONFIG_FILE
    from jmarl.training.files.run_directory import is_finished

    file, checkpoints = path / CONFIG_FILE, path / "checkpoints"
    experiment = ExperimentConfig.of(**read_yaml(file).tree) if file.is_file() else None
    step = max(saved_steps(checkpoints), default=None)
    if (path / "models" / "agent_0").is_dir() and (step is None or is_finished(checkpoints, step)):
        cfg = experiment.train if experiment else None if step is None else config_of(checkpoints, step)
        return Source(load_directory(path), f"the models of {path}", cfg, experiment, path)
    if step is None:
        raise FileNotFoundError(f"{path} has neither models nor a complete checkpoint yet: wait for the first one")
    models = list(base_models or (experiment.team.models if experiment else ()))
    if not models:
        raise ValueError(
            f"{path} has checkpoints and no {CONFIG_FILE}, so the models that it started from are unknown: name them with "
            "--base-model"
        )
    return load_checkpoint(path, models, experiment)


def config_of(checkpoints: Path, step: int) -> TrainConfig:
    """Return the settings in a checkpoint."""
    from jmarl.training.files.checkpoint import META

    return train_config(json.loads((checkpoints / str(step) / META).read_text(encoding="utf-8"))["meta"])


def train_config(meta: dict[str, Any]) -> TrainConfig:
    """Return the settings in the metadata of a checkpoint, which may have fields of an experiment too."""
    from jmarl.config import SECTION_OF, TrainConfig

    known = {name: value for name, value in meta["config"].items() if name in SECTION_OF or name == "algorithm"}
    return TrainConfig.of(**known)


def load_checkpoint(path: Path, models: Sequence[str], experiment: ExperimentConfig | None) -> Source:
    """Return the agents in the newest intact checkpoint of a run. models: those that the run started from."""
    from jmarl.models.heads import without_value_head
    from jmarl.models.lora import describe
    from jmarl.team import Team, agents_of
    from jmarl.training.files.checkpoint import Checkpointer

    with Checkpointer(path / "checkpoints", read_only=True) as saved:
        arrays, meta, step = saved.read_arrays()
    roles = [len(members) for stack in meta["team"] for members in stack["members"]]
    models = list(models) * sum(roles) if len(models) == 1 else models
    team = Team.load(models, shared_weights=max(roles) > 1)
    if team.describe() != meta["team"]:
        raise ValueError(f"the run in {path} started from other models than {', '.join(dict.fromkeys(models))}")
    params = [without_value_head(x) for x in stacks_in(arrays, team, train_config(meta), meta["bases"])]
    adapters = params if describe(params[0]).rank else None
    cfg = experiment.train if experiment else train_config(meta)
    text = f"the checkpoint of step {step} in {path}"
    return Source(agents_of(team, params), text, cfg, experiment, path, adapters)


def stacks_in(arrays: dict[str, Any], team: Team, cfg: TrainConfig, bases: Sequence[str]) -> list[Any]:
    """Return the parameters [A, ...] of each stack from the arrays of a checkpoint, which lack the base of LoRA.

    bases: digests of the bases that the adapters were trained on."""
    from jmarl.learning.per_agent import with_adapters
    from jmarl.models import lora
    from jmarl.team import initial_params

    stacks = [nested(arrays, f"stacks/{i}/params/") for i in range(len(team.stacks))]
    if not cfg.lora.lora_rank:
        return stacks
    adapted = [lora.split(stack)[0] for stack in with_adapters(team, initial_params(team, None, True), cfg, None)]
    if [lora.digest(base) for base in adapted] != list(bases[: len(adapted)]):
        raise ValueError("the models differ from those that the adapters were trained on: give the run's own with --base-model")
    return [lora.join(base, trained) for base, trained in zip(adapted, stacks, strict=True)]


def nested(arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the arrays whose paths begin with a prefix as nested dicts."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            *above, last = name.removeprefix(prefix).split("/")
            node = tree
            for key in above:
                node = node.setdefault(key, {})
            node[last] = array
    return tree


# --- a team in an environment ------------------------------------------------------------------------------------------


def open_match(args: argparse.Namespace, seed: int, generations: int = 1) -> Match:
    """Return the team and the environment of the flags, and print what they are.

    The environment is made before models are read. generations: completions of each task."""
    from jmarl.team import Team, place_params, stack_agents

    if os.getcwd() not in sys.path:  # module:Class of the user
        sys.path.insert(0, os.getcwd())
    env, name, options = (None, "", {}) if args.environment is None else make_environment(args.environment, args.option)
    say(f"reading {' '.join(args.model)} ...")
    source = load_source(args.model, args.base_model)
    if env is None:
        env, name, options = environment_of_run(source, args)
    agents = source.agents * len(env.roles) if len(source.agents) == 1 else source.agents
    if len(agents) != len(env.roles):
        raise ValueError(
            f"environment {name!r} has {len(env.roles)} roles ({', '.join(env.roles)}), and --model gives {len(agents)} "
            "agents: give one model for all roles, or one per role"
        )
    cfg = play_config(args, source, name, env.max_turns).replace(seed=seed, eval_generations=generations)
    shared = source.experiment is not None and source.experiment.team.shared_weights
    team = Team.of(agents, shared_weights=shared)
    params = place_params(team, stack_agents(team.stacks, team.agents), cfg.run.mesh)
    settings = {"model": source.text, "environment": name, "options": options, "tasks": args.tasks or args.split}
    settings |= sampling_settings(cfg)
    say(f"{source.text}: {', '.join(env.roles)} in {name}")
    say(", ".join(f"{key} {value}" for key, value in sampling_settings(cfg).items()))
    return Match(team, params, env, cfg, settings)


def make_environment(name: str, texts: Sequence[str]) -> tuple[Any, str, dict[str, Any]]:
    """Return an environment, its name and its options. texts: KEY=VALUE."""
    return built(name, options_of(texts))


def environment_of_run(source: Source, args: argparse.Namespace) -> tuple[Any, str, dict[str, Any]]:
    """Return the environment that a run learned in, its name and its options."""
    task = source.experiment.task if source.experiment else None
    if task is None or (task.environment is None and len(task.eval_envs) != 1):
        raise ValueError(f"--environment is needed: {source.text} does not name one; `jmarl info` lists them")
    if task.environment is not None:
        return built(task.environment, task.options | options_of(args.option))
    return built(task.eval_envs[0].name, task.eval_envs[0].options | options_of(args.option))


def built(name: str, options: dict[str, Any]) -> tuple[Any, str, dict[str, Any]]:
    """Return an environment, its name and its options. Raises ValueError if a class of the user lacks what is needed here."""
    from jmarl.config.mrlm_environments import TYPES
    from jmarl.envs import make
    from jmarl.envs.vector import vectorize

    env = vectorize(make(TYPES.get(name, name), **options))
    missing = [attribute for attribute in ("roles", "tasks", "max_turns") if not hasattr(env, attribute)]
    if missing:
        raise ValueError(f"environment {name!r} has no {', '.join(missing)}: make it a TextEnvironment (jmarl/envs/base.py)")
    return env, name, options


def play_config(args: argparse.Namespace, source: Source, environment: str, max_turns: int) -> TrainConfig:
    """Return the settings to play with: flags, then those of the run, then the defaults."""
    import dataclasses

    from jmarl.config import TrainConfig
    from jmarl.config.sections import Episodes

    run = source.cfg or TrainConfig()
    own = source.experiment is not None and environment == source.experiment.task.environment
    turns = args.num_turns or (run.episodes.num_turns if own else max_turns)
    given = {"max_new_tokens": args.max_new_tokens, "compute_dtype": args.compute_dtype}
    sampling = {name: value for name, value in given.items() if value is not None}
    if (longest := sampling.get("max_new_tokens", run.sampling.min_new_tokens)) < run.sampling.min_new_tokens:
        sampling["min_new_tokens"] = longest
    episodes = Episodes(
        chat=run.episodes.chat if args.chat is None else args.chat,
        history=args.history or run.episodes.history,
        long_prompts=args.long_prompts or run.episodes.long_prompts,
        num_turns=turns,
        branching="chain",
        early_termination_threshold=run.episodes.early_termination_threshold if turns > 1 else None,
    )
    temperature = run.run.eval_temperature if args.temperature is None else args.temperature
    return TrainConfig(sampling=dataclasses.replace(run.sampling, **sampling), episodes=episodes).replace(
        eval_temperature=temperature, mesh=run.run.mesh, progress=False
    )


def sampling_settings(cfg: TrainConfig) -> dict[str, Any]:
    """Return what a reader needs to know of the sampling, as JSON values."""
    sampling, episodes = cfg.eval_sampling(), cfg.episodes
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "compute_dtype")
    return {name: getattr(sampling, name) for name in names} | {
        name: getattr(episodes, name) for name in ("chat", "history", "long_prompts", "num_turns")
    }


def tasks_for(match: Match, args: argparse.Namespace, count: int, seed: int) -> list[dict]:
    """Return `count` tasks; an environment or a file with fewer begins again, which is said."""
    from jmarl.training.preferences.pairs import read_rows

    rows = [dict(row) for row in read_rows(args.tasks)] if args.tasks else match.env.tasks(args.split, count, seed)
    if not rows:
        raise ValueError(f"there are no tasks in {args.tasks or match.settings['environment']}")
    if len(rows) < count:
        say(f"there are only {len(rows)} tasks: they are played again, with other random numbers")
    return [rows[i % len(rows)] for i in range(count)]


def split_batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Return items in batches of up to `size`, as equal as they can be."""
    count = -(-len(items) // size)
    size = -(-len(items) // count)
    return [items[i : i + size] for i in range(0, len(items), size)]


def number_of_tasks(num_episodes: int, generations: int) -> int:
    """Return the number of tasks of so many episodes. Raises ValueError if they do not divide evenly."""
    if num_episodes < 1 or generations < 1:
        raise ValueError(f"--num-episodes {num_episodes} and --num-generations {generations} must be at least 1")
    if num_episodes % generations:
        near = num_episodes + generations - num_episodes % generations
        raise ValueError(
            f"--num-episodes {num_episodes} is no multiple of --num-generations {generations}: give {near}, for example"
        )
    return num_episodes // generations


def say(line: str) -> None:
    """Print a line of progress on standard error, at once."""
    print(f"jmarl: {line}", file=sys.stderr, flush=True)
