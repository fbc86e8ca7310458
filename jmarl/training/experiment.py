"""Run the experiment that an `ExperimentConfig` describes: read its task, load its team, train.

The run is one of `train` (completions and a reward), `train_seeds` (the same, from several seeds) or `fit` (given pairs or
texts). Everything that can be checked without a model is checked before models are loaded. Left out: what has no plain value,
such as loaded agents or reward functions with arguments; call `train` or `fit` for those.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jmarl.algorithms import find_row
from jmarl.config import EnvironmentConfig, ExperimentConfig, TaskConfig, TeamConfig
from jmarl.envs import make
from jmarl.envs.data import load_rows
from jmarl.envs.mixture import Mixture
from jmarl.envs.reward_environment import Formatter, Transition, bind_formatter, default_formatter
from jmarl.envs.vector import vectorize
from jmarl.learning.per_agent import check_agents
from jmarl.team import Team
from jmarl.training.checks import check_settings
from jmarl.training.fit import check_data, check_fit, fit
from jmarl.training.preferences.pairs import load_pairs, load_trajectories, read_rows
from jmarl.training.records import FitResult, TrainResult
from jmarl.training.seeds import check_seeds, train_seeds
from jmarl.training.train import train

NUM_TASKS = 1000  # of an environment, if the number is not set


class Task(NamedTuple):
    """The arguments of `train` that a `TaskConfig` describes."""

    reward: Any  # an environment, or a reward function
    items: Sequence[dict]
    held_out: Sequence[dict]
    formatters: list[Formatter] | None  # [N]; None: an environment writes the prompts
    external_transition: Transition | None


def run_experiment(cfg: ExperimentConfig) -> TrainResult | FitResult | list[TrainResult]:
    """Run an experiment. Returns the result of `train`, of `fit` for given pairs or texts, or of `train_seeds` with seeds.

    Raises:
        ValueError: settings do not fit each other, the data, this machine or the output directory.
        FileNotFoundError: a file of data does not exist.
    """
    row = find_row(cfg.train.algorithm)
    plays = cfg.task.data is None or cfg.task.reward is not None
    if not plays and row.data == "rollouts":
        raise ValueError(
            f"algorithm={cfg.train.algorithm!r} learns from completions of the prompts in data, which need a reward: set "
            "reward to module:function"
        )
    if plays and row.data != "rollouts" and not row.makes_pairs:
        raise ValueError(
            f"algorithm={cfg.train.algorithm!r} learns from given {row.data}: set data, and no reward or environment"
        )
    check_agents(cfg.train, cfg.team.size)
    return _train(cfg) if plays else _fit(cfg)


def _train(cfg: ExperimentConfig) -> TrainResult | list[TrainResult]:
    """Train on completions."""
    if cfg.task.min_reward is not None:
        raise ValueError(f"min_reward={cfg.task.min_reward} has no effect on prompts: it is for algorithm=sft")
    if cfg.seeds:
        check_seeds(cfg.seeds, cfg.train)
    else:
        check_settings(cfg.train)
    task = task_of(cfg.task, cfg.team, num_turns=cfg.train.episodes.num_turns, seed=cfg.train.run.seed)
    team = team_of(cfg.team)
    arguments: dict[str, Any] = dict(
        formatters=task.formatters, external_transition=task.external_transition, eval_items=task.held_out
    )
    if cfg.seeds:
        return train_seeds(team, task.reward, task.items, cfg.train, seeds=cfg.seeds, **arguments)
    return train(team, task.reward, task.items, cfg.train, **arguments)


def _fit(cfg: ExperimentConfig) -> FitResult:
    """Train on given pairs or texts."""
    if cfg.train.algorithm == "reward_model":
        raise ValueError(
            "algorithm='reward_model' trains no team: use jmarl.training.preferences.reward_model.fit_reward_model"
        )
    if cfg.seeds:
        raise ValueError(f"seeds={cfg.seeds} is for completions with a reward: run given data once per seed of train")
    check_fit(cfg.train, None)
    data, held_out = examples_of(cfg)
    check_data(data, cfg.train)
    return fit(team_of(cfg.team), data, cfg.train, eval_data=held_out)


def team_of(team: TeamConfig) -> Team:
    """Load the team."""
    models = team.models * team.size if len(team.models) == 1 else team.models
    return Team.load(models, shared_weights=team.shared_weights)


def task_of(task: TaskConfig, team: TeamConfig, *, num_turns: int = 1, seed: int = 0) -> Task:
    """Read a task that is played: its environment or its prompts and reward.

    Args:
        task: the task.
        team: the team that plays it; no model is loaded.
        num_turns: the limit of turns for an environment that sets none.
        seed: of the tasks that environments draw.
    """
    if task.data is None:
        return _environment_task(task, team, num_turns, seed)
    rows, held_out = split_held_out(read_rows(read_data(task)), task, read_rows)
    return Task(
        import_name("reward", str(task.reward)),
        [dict(row) for row in rows],
        [dict(row) for row in held_out],
        formatters_of(task, team),
        None if task.external_transition is None else import_name("external_transition", task.external_transition),
    )


def _environment_task(task: TaskConfig, team: TeamConfig, num_turns: int, seed: int) -> Task:
    trained = [EnvironmentConfig(task.environment, task.options)] if task.environment is not None else [*task.eval_envs]
    evaluated = [*task.eval_envs] or trained
    envs: dict[str, tuple[EnvironmentConfig, Any]] = {}
    for i, config in enumerate(configs := list(dict.fromkeys([*trained, *evaluated]))):
        same = [other.name for other in configs].count(config.name) > 1
        label = f"{config.name}_{i}" if same else config.name
        envs[label] = config, vectorize(make(config.name, **config.options), num_turns)
    for config, env in envs.values():
        if len(env.roles) != team.size:
            raise ValueError(
                f"environment {config.name!r} is for {len(env.roles)} agents ({', '.join(env.roles)}), and the team has "
                f"{team.size}: set models to one per agent, or num_agents"
            )
    if len(envs) == 1:
        ((_, env),) = envs.values()
        train_env = eval_env = env
    else:
        env = Mixture({label: one for label, (_, one) in envs.items()})
        train_env, eval_env = (
            Mixture({label: one for label, (config, one) in envs.items() if config in part}) for part in (trained, evaluated)
        )
    items = train_env.tasks("train", task.num_tasks or NUM_TASKS, seed)
    if isinstance(task.held_out, str):
        held_out = [dict(row) for row in read_rows(read_held_out(task))]
    else:
        held_out = eval_env.tasks("eval", task.held_out, seed) if task.held_out else []
    return Task(env, items, held_out, None, None)


def examples_of(cfg: ExperimentConfig) -> tuple[list[Any], list[Any]]:
    """Return the given pairs or texts to learn from, and those held out."""
    texts = find_row(cfg.train.algorithm).data == "texts"
    if cfg.task.min_reward is not None and not texts:
        raise ValueError(f"min_reward={cfg.task.min_reward} has no effect for algorithm={cfg.train.algorithm!r}: it is for sft")

    def read(source: Any) -> list[Any]:
        return load_trajectories(source, cfg.task.min_reward) if texts else load_pairs(source, cfg.team.size)

    return split_held_out(read(read_data(cfg.task)), cfg.task, read)


def split_held_out(rows: Sequence[Any], task: TaskConfig, read: Callable[[Any], Sequence[Any]]) -> tuple[list[Any], list[Any]]:
    """Return what to train on and what to hold out: the last rows, or what `read` makes of another file or data set."""
    if isinstance(task.held_out, str):
        return list(rows[: task.num_tasks]), list(read(read_held_out(task)))
    if task.held_out >= len(rows):
        raise ValueError(f"held_out={task.held_out} leaves nothing to train on: data has {len(rows)} rows")
    last = len(rows) - task.held_out
    return list(rows[:last][: task.num_tasks]), list(rows[last:])


def read_data(task: TaskConfig) -> Any:
    """Return the path of the file of data, or the rows of the data set."""
    name = str(task.data)
    if not is_file(name):
        return load_rows(name, (), config=task.subset, split=task.split)
    for setting, value, default in (("subset", task.subset, None), ("split", task.split, "train")):
        if value != default:
            raise ValueError(f"{setting}={value!r} has no effect on the file data={name!r}: it is for data sets of the Hub")
    return Path(name)


def read_held_out(task: TaskConfig) -> Any:
    """Return the path of the file of held-out tasks, or the rows of the data set. It has the subset of data, if both are data
    sets."""
    name = str(task.held_out)
    if not is_file(name):
        return load_rows(name, (), config=task.subset, split=task.held_out_split)
    if task.held_out_split != "test":
        setting = f"held_out_split={task.held_out_split!r}"
        raise ValueError(f"{setting} has no effect on the file held_out={name!r}: it is for data sets of the Hub")
    return Path(name)


def is_file(name: str) -> bool:
    """Return whether data are a file, which need not exist, and not a data set of the Hub or a directory of one."""
    return Path(name).suffix in (".json", ".jsonl") or Path(name).is_file()


def formatters_of(task: TaskConfig, team: TeamConfig) -> list[Formatter]:
    """Return the formatter of each agent [N], with the text of its role in front of each prompt."""
    formatters = [import_name("formatters", name) for name in task.formatters] or [default_formatter]
    if len(formatters) == 1:
        formatters = formatters * team.size
    if not team.roles:
        return formatters
    return [with_role(formatter, role) for formatter, role in zip(formatters, team.roles, strict=True)]


def with_role(formatter: Formatter, role: str) -> Formatter:
    """Return a formatter that puts a text in front of each prompt of another."""
    write = bind_formatter(formatter)

    def prompt(item: dict, external_prompts: str | None = None) -> str:
        return f"{role}\n\n{write(item, external_prompts)}"

    return prompt


def import_name(setting: str, name: str) -> Any:
    """Return what module:name stands for. setting: the one that names it, for errors."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"{setting}={name!r} is not allowed: {setting} must be module:function")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting}={name!r} cannot be imported: {error}") from error
