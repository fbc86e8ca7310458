"""A team in an environment, for commands that play: flags, `open_match`, tasks and batches.

The agents are those of `--model`, or of the file of `--config` before training. They play in `--environment`, on `--data` with
`--reward`, on the task of `--config`, or on that of their run. Settings of sampling are those of `--config`, else of the run,
else the defaults of `TrainConfig`, where no flag says otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jmarl.cli.main import add_trust_argument, find_own_modules, plural, to_stderr
from jmarl.cli.teams.sources import TeamSource, load_source, require_trusted_task, tree_of

if TYPE_CHECKING:  # imported in the functions, so that `--help` answers at once
    from jmarl.config import ExperimentConfig, TrainConfig
    from jmarl.models.hub.agents import Agent
    from jmarl.rollout.turns import Rollout
    from jmarl.team import Team

MODEL_HELP = "a run's directory, a directory of agents (agent_0/, ...), one model for all roles, or one per role"


@dataclasses.dataclass(frozen=True)
class Match:
    """A team and the environment that it plays in."""

    team: Team
    params: list[Any]  # [A, ...] of each stack
    env: Any  # a `LockStep`, or another `Environment` with roles, tasks and max_turns
    cfg: TrainConfig
    settings: dict[str, Any]  # JSON values that say what is played


def play_tasks(match: Match, tasks: Sequence[dict], cfg: TrainConfig, part: int = 0) -> Rollout:
    """Play tasks as an evaluation does, see `evaluate`. Callers say how many episodes have no valid reward."""
    from jmarl.evaluation.evaluate import play_held_out
    from jmarl.sampling.generate import sample_team
    from jmarl.team import moved

    team, params = moved(match.team, match.params, cfg.run)
    return play_held_out(partial(sample_team, team, params), team, tasks, match.env, cfg, part=part)


# --- flags -------------------------------------------------------------------------------------------------------------


def add_model_argument(parser: Any, required: bool = True) -> None:
    """Add `--model`, `--base-model` and `--best`."""
    parser.add_argument("--model", required=required, nargs="+", metavar="M", help=MODEL_HELP)
    text = "models that a run without config.yaml started from, to read its checkpoints"
    parser.add_argument("--base-model", nargs="+", metavar="M", help=text)
    text = "of a run with keep_best: those of its best evaluation"
    parser.add_argument("--best", action="store_true", help=text)


def add_play_arguments(parser: argparse.ArgumentParser, split: str) -> None:
    """Add the flags of commands that play. split: default split of the tasks."""
    who = parser.add_argument_group("who plays what")
    add_model_argument(who, required=False)
    text = "YAML file of `jmarl train`: its task and settings and, without --model, its models before training"
    who.add_argument("--config", metavar="FILE", help=text)
    names = "a name (`jmarl info` lists them), module:Class or file.py:Class; default: that of the run"
    who.add_argument("--environment", metavar="E", help=names)
    who.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="argument of its constructor")
    who.add_argument("--data", metavar="FILE", help="play all of these prompts instead, with --reward")
    who.add_argument("--reward", metavar="M:F", help="module:function or file.py:function for --data")
    text = "functions that write the prompts of --data, as in YAML"
    who.add_argument("--formatters", nargs="+", default=[], metavar="M:F", help=text)
    who.add_argument("--split", choices=("train", "eval"), default=split, help=f"its tasks to play; default: {split}")
    who.add_argument("--tasks", metavar="FILE", help="play the tasks in this .json or .jsonl file instead")
    add_trust_argument(who)
    add_sampling_arguments(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of sampling and episodes that `play_config` reads."""
    sampling = parser.add_argument_group("how agents write (default: as in the run, else as TrainConfig)")
    sampling.add_argument("--max-new-tokens", type=int, metavar="N", help="longest completion")
    sampling.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    sampling.add_argument("--compute-dtype", choices=("float32", "bfloat16"), help="type of activations")
    text = "longrope's long factors in all rows"
    sampling.add_argument("--long-context", action="store_true", help=text)
    chat = "put prompts into the chat template"
    sampling.add_argument("--chat", action=argparse.BooleanOptionalAction, default=None, help=chat)
    sampling.add_argument("--history", choices=("none", "append"), help="what agents read in later turns")
    text = "what to do with prompts that leave no room"
    sampling.add_argument("--long-prompts", choices=("error", "truncate_left", "drop"), help=text)
    sampling.add_argument("--num-turns", type=int, metavar="N", help="longest episode")
    sampling.add_argument("--mesh", metavar="AXES", help="devices by axis: agent=2,data=4; auto; agent=1: one")


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


# --- a team in an environment ------------------------------------------------------------------------------------------


def open_match(args: argparse.Namespace, seed: int, generations: int = 1) -> Match:
    """Return the team and the environment of the flags, and print what they are.

    The environment is made before models are read. generations: completions of each task."""
    from jmarl.runs.precompile import keep_programs
    from jmarl.runs.start import in_chosen_context
    from jmarl.team import Team, on_mesh, stack_agents

    find_own_modules()
    check_flags(args)
    options = options_of(args.option)
    env, name, options = (None, "", options) if args.environment is None else built(args.environment, options)
    source = source_of(args)
    if env is None:
        env, name, options = environment_of_run(source, options, all_rows=args.data is not None)
    agents = source.agents_for(env.roles, name)
    cfg = play_config(args, source, env.max_turns).replace(seed=seed, eval_generations=generations)
    shared = source.experiment is not None and source.experiment.team.shared_weights
    keep_programs(to_stderr)
    team = Team.of(agents, shared_weights=shared)
    if args.long_context:  # raises if no model of the team has two contexts
        in_chosen_context(team, cfg, lambda: False)
    team = on_mesh(team, cfg.run)
    params = stack_agents(team.stacks, team.agents)
    settings = {"model": source.text, "environment": name, "options": options, "tasks": args.tasks or args.split}
    settings |= sampling_settings(cfg)
    to_stderr(f"{source.text}: {', '.join(env.roles)} in {name}")
    to_stderr(", ".join(f"{key} {value}" for key, value in sampling_settings(cfg).items()))
    return Match(team, params, env, cfg, settings)


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that do not fit each other, before a model is read."""
    if not args.model and not args.config:
        raise ValueError("--model is needed; or --config FILE, which plays the models of a YAML file before training")
    if args.best and not args.model:
        raise ValueError("--best is for the directory of a run, and there is no --model")
    if args.base_model and not args.model:
        raise ValueError("--base-model is for the directory of a run, and there is no --model")
    if args.data:
        others = [name for name in ("environment", "config", "tasks") if getattr(args, name)]
        if others:
            raise ValueError(f"--data and --{others[0]} exclude each other: both say what is played")
        if not args.reward:
            raise ValueError("--data needs --reward module:function, which judges the completions")
    elif args.reward or args.formatters:
        flag = "--reward" if args.reward else "--formatters"
        raise ValueError(f"{flag} is for --data; of a YAML file (--config) or a run it is the file's own")


def source_of(args: argparse.Namespace) -> TeamSource:
    """Return the agents of `--model`, or of `--config` before training, and what `--config` or `--data` says they play."""
    from jmarl.cli.configuration import read_experiment
    from jmarl.config import ExperimentConfig
    from jmarl.runs.experiment import team_of
    from jmarl.team import random_agents

    if not args.config:
        to_stderr(f"reading {' '.join(args.model)} ...")
        source = load_source(args.model, args.base_model, args.best)
        if not args.data:
            if args.environment is None and source.directory and source.experiment:
                require_trusted_task(source.directory, source.experiment, args.trust)
            return source
        task: dict[str, Any] = dict(data=args.data, reward=args.reward, formatters=tuple(args.formatters))
        if source.experiment is not None:  # the team reads its prompts as in training
            team = source.experiment.team
            task |= {"shared_weights": team.shared_weights} | ({} if args.formatters else {"roles": team.roles})
        return dataclasses.replace(source, experiment=ExperimentConfig.of(models=["-"] * len(source.agents), **task))
    cfg = read_experiment(args.config, args.trust)
    models = args.model or (cfg.team.models * cfg.team.size if len(cfg.team.models) == 1 else cfg.team.models)
    to_stderr(f"reading {' '.join(dict.fromkeys(models))} ...")
    if cfg.team.random_weights and not args.model:
        seed = next(iter(cfg.seeds), cfg.train.run.seed)
        text = f"random weights of seed {seed} before training, as in {args.config}"
        return TeamSource(random_agents(team_of(cfg.team), seed), text, cfg.train, cfg)
    source = load_source(models, args.base_model, args.best)
    if args.model:
        shared = source.experiment is not None and source.experiment.team.shared_weights
        return dataclasses.replace(source, cfg=cfg.train, experiment=cfg.replace(shared_weights=shared))
    text = f"{', '.join(dict.fromkeys(models))} before training, as in {args.config}"
    return dataclasses.replace(source, text=text, cfg=cfg.train, experiment=cfg)


def environment_of_run(source: TeamSource, options: dict[str, Any], all_rows: bool = False) -> tuple[Any, str, dict[str, Any]]:
    """Return what a run learned in: its environment, a mixture, or its prompts with a reward; its name and its options.

    options: override those of the run. all_rows: both splits are all of the data, which no agent was trained on."""
    in_python = source.experiment is None and source.directory is not None and bool(tree_of(source.directory))
    if source.experiment is None or (source.experiment.task.data is not None and not source.experiment.task.reward_names):
        raise ValueError(
            f"--environment is needed, none is known of {source.text}{' (begun in Python)' * in_python}: `jmarl info` lists "
            "them. For completions of prompts "
            "give --data FILE --reward MODULE:FUNCTION, or call jmarl.generate in Python"
        )
    task = source.experiment.task
    entries = task.train_envs or task.eval_envs
    if task.environment is not None:
        return built(task.environment, task.options | options)
    if task.data is None and len(entries) == 1:
        return built(entries[0].name, entries[0].options | options)
    if options:
        raise ValueError(f"--option {min(options)} is for one environment, and the run learned in several or from data")
    name = ", ".join(entry.name for entry in entries) or f"{task.data} with {' + '.join(task.reward_names)}"
    roles = [f"agent {i}" for i in range(source.experiment.team.size)]
    return RunTask(source.agents_for(roles, name), source.experiment, all_rows), name, {}


class RunTask:
    """The prompts and the reward of a run, or its mixture of environments, with the interface of an environment."""

    def __init__(self, agents: Sequence[Agent], cfg: ExperimentConfig, all_rows: bool = False):
        from jmarl.envs.base import special_tokens
        from jmarl.runs.checks import environment_of
        from jmarl.runs.experiment import task_of
        from jmarl.team import Team

        self.max_turns = cfg.train.episodes.num_turns
        played = dataclasses.replace(cfg.task, eval_metrics=None)  # metrics of training are not shown
        task = task_of(played, cfg.team, num_turns=self.max_turns, seed=cfg.train.run.seed)
        team = Team.of(agents, shared_weights=cfg.team.shared_weights)
        env: Any = environment_of(team, task.env, cfg.train)
        self.roles = env.roles if cfg.task.reward is None else tuple(f"agent {i}" for i in range(team.num_agents))
        self.reset, self.step, self.observe = env.reset, env.step, env.observe
        self.special_tokens = special_tokens(env)
        self._tasks = {"train": task.items, "eval": task.items if all_rows else task.held_out}

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return up to `count` tasks of a split, the same for all seeds."""
        if not self._tasks[split]:
            raise ValueError("there are no held-out tasks (held_out is 0): play the tasks to train on with --split train")
        return list(self._tasks[split][:count])


def built(name: str, options: dict[str, Any]) -> tuple[Any, str, dict[str, Any]]:
    """Return an environment, its name and its options. Raises ValueError if a class of the user lacks what is needed here."""
    from jmarl.envs import make
    from jmarl.envs.vector import vectorize

    env = vectorize(make(name, **options))
    missing = [attribute for attribute in ("roles", "tasks", "max_turns") if not hasattr(env, attribute)]
    if missing:
        raise ValueError(f"environment {name!r} has no {', '.join(missing)}: make it a TextEnvironment (jmarl/envs/base.py)")
    return env, name, options


def play_config(args: argparse.Namespace, source: TeamSource, max_turns: int) -> TrainConfig:
    """Return the settings to play with: flags, then those of the run, then the defaults."""
    import jax

    from jmarl.algorithms import on_platform
    from jmarl.config import TrainConfig
    from jmarl.config.sections import Episodes

    run, experiment, others = source.cfg or TrainConfig(), source.experiment, args.option or args.data
    own = experiment is not None and not others and args.environment in (None, experiment.task.environment)
    turns = (run.episodes.num_turns if own else max_turns) if args.num_turns is None else args.num_turns
    given = {"max_new_tokens": args.max_new_tokens, "compute_dtype": args.compute_dtype}
    sampling = {name: value for name, value in given.items() if value is not None}
    if (longest := sampling.get("max_new_tokens", run.sampling.min_new_tokens)) < run.sampling.min_new_tokens:
        sampling["min_new_tokens"] = longest
    episodes = Episodes(
        chat=run.episodes.chat if args.chat is None else args.chat,
        chat_template_kwargs=run.episodes.chat_template_kwargs,
        chat_date=run.episodes.chat_date,
        skip_special_tokens=run.episodes.skip_special_tokens,
        history=args.history or run.episodes.history,
        long_prompts=args.long_prompts or run.episodes.long_prompts,
        num_turns=turns,
        branching="chain",
        early_termination_threshold=run.episodes.early_termination_threshold if turns > 1 else None,
    )
    temperature = run.run.eval_temperature if args.temperature is None else args.temperature
    cfg = TrainConfig(sampling=dataclasses.replace(run.sampling, **sampling), episodes=episodes)
    mesh = run.run.mesh if args.mesh is None else args.mesh
    devices = {"mesh": mesh, "strategy": run.run.strategy}
    long_context = args.long_context or run.run.long_context
    cfg = cfg.replace(eval_temperature=temperature, long_context=long_context, progress=False, **devices)
    return on_platform(cfg, jax.default_backend())


CHAT = ("chat", "chat_template_kwargs", "chat_date")


def sampling_settings(cfg: TrainConfig) -> dict[str, Any]:
    """Return what a reader needs to know of the sampling, as JSON values."""
    sampling, episodes = cfg.eval_sampling(), cfg.episodes
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "compute_dtype")
    return {name: getattr(sampling, name) for name in names} | {
        name: getattr(episodes, name) for name in (*CHAT, "history", "long_prompts", "num_turns")
    }


def tasks_for(match: Match, args: argparse.Namespace, count: int, seed: int) -> list[dict]:
    """Return `count` tasks; an environment or a file with fewer begins again, which is said."""
    from jmarl.envs.rows import read_rows

    rows = [dict(row) for row in read_rows(args.tasks)] if args.tasks else match.env.tasks(args.split, count, seed)
    if not rows:
        raise ValueError(f"there are no tasks in {args.tasks or match.settings['environment']}")
    if len(rows) < count:
        to_stderr(f"there are only {plural(len(rows), 'task')}: they are played again, with other random numbers")
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
