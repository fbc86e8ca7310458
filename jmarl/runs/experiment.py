"""Run the experiment that an `ExperimentConfig` describes: read its task, load its team, train.

The run is one of `train` (completions and a reward), `train_seeds` (the same, from several seeds) or `fit` (given pairs or
texts). All checks that need no model come before models are loaded. Left out: arguments that are not plain values, such as
loaded agents or reward functions with arguments; call `train` or `fit` for those.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jmarl.algorithms import find_row
from jmarl.algorithms.constraints import EXPERIMENT, facts
from jmarl.config import EnvironmentConfig, ExperimentConfig, TaskConfig, TeamConfig, check_argument
from jmarl.config.constraints import require
from jmarl.envs import import_name, make
from jmarl.envs.base import close
from jmarl.envs.calls.user_code import calling, excerpt
from jmarl.envs.data import load_rows
from jmarl.envs.mixture import Mixture
from jmarl.envs.pool import in_pool, pool_of
from jmarl.envs.reward_environment import Formatter, RewardEnvironment, bind_formatter, default_formatter
from jmarl.envs.rewards import RewardFunction, make_reward
from jmarl.envs.rows import SUFFIXES, is_saved, missing_text, read_rows
from jmarl.envs.vector import vectorize
from jmarl.files.config_file import written_config
from jmarl.files.interrupt import raised_again
from jmarl.files.run_directory import resolve_resume
from jmarl.lazy import Table
from jmarl.logs.goodput import CLOCK
from jmarl.logs.terminal import watched
from jmarl.models.hub.messages import with_instruction
from jmarl.processes import exchange
from jmarl.runs.checks import check_agents, check_data, check_fit, check_seeds, check_settings, find_own_algorithms
from jmarl.runs.imitation import collect_solutions
from jmarl.runs.prepare import of_this_process
from jmarl.runs.records import FitResult, TrainResult
from jmarl.runs.run import Task
from jmarl.runs.seeds import train_seeds
from jmarl.runs.train import fit, train
from jmarl.team import Team

NUM_TASKS = 1000  # default number of tasks of an environment
READERS = Table[Callable[..., list[Any]]](
    {"pairs": "jmarl.preferences:load_pairs", "texts": "jmarl.preferences:load_trajectories"}
)


def learns_from_completions(cfg: ExperimentConfig) -> bool:
    """Return whether the team learns from its own completions; else from given pairs or texts. Raises ValueError if the
    algorithm, the task and the team do not fit."""
    find_own_algorithms(cfg.train.algorithm, cfg.train.preference.rl_algorithm)
    solved = cfg.task.data is None and find_row(cfg.train.algorithm).data == "texts"  # what the environments' solvers write
    plays = cfg.task.reward is not None or (cfg.task.data is None and not solved)
    require(EXPERIMENT, facts(cfg.train, **{**vars(cfg), **vars(cfg.task), "plays": plays}))
    if plays or cfg.task.data is not None:
        check_agents(cfg.train, cfg.team.size)
    return plays


@exchange.tells_others
@raised_again()
def run_experiment(cfg: ExperimentConfig) -> TrainResult | FitResult | list[TrainResult]:
    """Run an experiment, and return the result of `train`, of `fit` for given pairs or texts, or of `train_seeds` with seeds.

    With an output directory, all settings are written to its config.yaml.

    Raises:
        ValueError: settings do not fit each other, the data, this machine or the output directory.
        FileNotFoundError: a file of data does not exist.
    """
    check_argument("cfg", cfg, ExperimentConfig, "an ExperimentConfig(team=..., task=..., train=...)")
    cfg = cfg.with_seeds()
    cfg = cfg.replace(resume=exchange.from_first(partial(resolve_resume, cfg.train, cfg.seeds)).run.resume)
    return _train(cfg) if learns_from_completions(cfg) else _fit(cfg)


def _train(cfg: ExperimentConfig) -> TrainResult | list[TrainResult]:
    """Train on completions."""
    if cfg.seeds:
        check_seeds(cfg.seeds, cfg.train)
    else:
        check_settings(cfg.train)
    task = task_of(cfg.task, cfg.team, num_turns=cfg.train.episodes.num_turns, seed=cfg.train.run.seed)
    team = load_team(cfg)
    with contextlib.ExitStack() as opened:
        opened.callback(close, task.env)
        exchange.from_first(partial(opened.enter_context, written_config(cfg)))
        if cfg.seeds:
            return train_seeds(team, task.env, task.items, cfg.train, seeds=cfg.seeds, eval_items=task.held_out)
        more = {"wandb_config": wandb_config(vars(cfg)), "eval_metrics": task.eval_metrics}
        return train(team, task.env, task.items, cfg.train, eval_items=task.held_out, **more)


def _fit(cfg: ExperimentConfig) -> FitResult:
    """Train on given pairs or texts."""
    check_fit(cfg.train, None)
    data, held_out = examples_of(cfg)
    check_data(data, cfg.train)
    team = load_team(cfg)
    with contextlib.ExitStack() as opened:
        exchange.from_first(partial(opened.enter_context, written_config(cfg)))
        return fit(team, data, cfg.train, eval_data=held_out, wandb_config=wandb_config(vars(cfg)))


def wandb_config(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the keyword arguments of `wandb.init`; None: no W&B. settings: those of `ExperimentConfig`, as far as given."""
    if not settings.get("wandb"):
        return None
    tags = list(settings.get("tags") or ())
    described = {"name": settings.get("experiment_name"), "notes": settings.get("description"), "tags": tags}
    return {name: value for name, value in described.items() if value} | dict(settings["wandb"])


def load_team(cfg: ExperimentConfig) -> Team:
    """Load the team of a run, and show that, if it takes long."""
    shows = of_this_process(cfg.train).run.progress
    with CLOCK.running(), watched("loading the models", shows, CLOCK.reader()):
        return team_of(cfg.team)


def team_of(team: TeamConfig) -> Team:
    """Load the team."""
    models = team.models * team.size if len(team.models) == 1 else team.models
    return Team.load(models, shared_weights=team.shared_weights, random_weights=team.random_weights)


def task_of(task: TaskConfig, team: TeamConfig, *, num_turns: int = 1, seed: int = 0) -> Task:
    """Read a task with completions: its environment, or its prompts and reward.

    Args:
        task: the settings of the task.
        team: the settings of the team; no model is loaded.
        num_turns: limit of turns for an environment that sets none.
        seed: seed of the tasks that environments draw.
    """
    metrics = None if task.eval_metrics is None else import_name("eval_metrics", task.eval_metrics)
    if task.data is None:
        return _environment_task(task, team, num_turns, seed)._replace(eval_metrics=metrics)
    rows, held_out = split_held_out(read_rows(read_data(task)), task, read_rows)
    transition = None if task.external_transition is None else import_name("external_transition", task.external_transition)
    reward = reward_of(task, team.size)
    check_columns(task, reward, [*rows, *held_out])
    env = RewardEnvironment(reward, formatters_of(task, team), transition, in_turns=task.in_turns)
    return Task(env, rows, held_out, metrics)


def check_columns(task: TaskConfig, reward: RewardFunction, rows: Sequence[dict]) -> None:
    """Raise a ValueError for rows without a column that the reward needs, or without a prompt where no formatter writes one."""
    reward.check_items(rows)
    for number, row in enumerate(rows if not task.formatters else ()):
        with calling(f"row {number}, {excerpt(row)}"):
            default_formatter(row)


def reward_of(task: TaskConfig, num_agents: int) -> RewardFunction:
    """Return the reward of a task. Raises ValueError for settings beside a `make_reward` of the user, which has its own."""
    functions = [import_name("reward", name) for name in task.reward_names]
    for name, function in zip(task.reward_names, functions, strict=True):
        if isinstance(function, type) and hasattr(function, "step"):
            raise ValueError(f"reward={name!r} is not allowed: it is an environment; set environment to it, and no data")
    ready = next((name for name, f in zip(task.reward_names, functions, strict=True) if isinstance(f, RewardFunction)), None)
    own = {"on_error": task.on_error, "timeout": task.timeout, "max_error_share": task.max_error_share}
    if ready is None:
        weights = task.reward_weights or None
        return make_reward(functions, num_agents=num_agents, weights=weights, pool=pool_of(task), **own)
    given = [name for name in ("reward_weights", "pool", *own) if getattr(task, name) != getattr(TaskConfig, name)]
    if len(functions) > 1 or given:
        what = given[0] if given else "a list of rewards"
        raise ValueError(f"{what} has no effect on reward={ready!r}, which make_reward has made: give it to make_reward")
    return functions[0]


def _environment_task(task: TaskConfig, team: TeamConfig, num_turns: int, seed: int) -> Task:
    """Return the task of one environment, or of a mixture of several."""
    if task.environment is not None:
        trained = [EnvironmentConfig(task.environment, task.options)]
    else:
        trained = [*(task.train_envs or task.eval_envs)]
    evaluated = [*task.eval_envs] or trained
    configs = list(dict.fromkeys([*trained, *evaluated]))
    names = [config.name for config in configs]
    envs: dict[str, Any] = {}
    for i, config in enumerate(configs):
        env = vectorize(in_pool(make(config.name, **config.options), task, num_turns), num_turns)
        if len(env.roles) != team.size:
            count, roles = len(env.roles), ", ".join(env.roles)
            advice = f"one model per role, or one model for all and num_agents={count}" if count > 1 else "one model"
            raise ValueError(
                f"environment {config.name!r} has {count} role{'s' * (count > 1)} ({roles}), and the team has {team.size}: "
                f"give {advice}"
            )
        envs[f"{config.name}_{i}" if names.count(config.name) > 1 else config.name] = env

    def mixture(part: Sequence[EnvironmentConfig]) -> Any:
        if len(envs) == 1:
            return next(iter(envs.values()))
        labeled = zip(envs.items(), configs, strict=True)
        return Mixture({label: env for (label, env), config in labeled if config in part})

    items = mixture(trained).tasks("train", task.num_tasks or NUM_TASKS, seed)
    if isinstance(task.held_out, str):
        held_out = read_rows(read_held_out(task))
    else:
        held_out = mixture(evaluated).tasks("eval", task.held_out, seed) if task.held_out else []
    return Task(mixture(configs), items, held_out)


def examples_of(cfg: ExperimentConfig) -> tuple[list[Any], list[Any]]:
    """Return the pairs or texts to train on, and the held-out ones: given, or of environments what their solvers write."""
    if cfg.task.data is None:
        return _solutions(cfg)
    kind = find_row(cfg.train.algorithm).data
    more: dict[str, Any] = {"min_reward": cfg.task.min_reward} if kind == "texts" else {"num_agents": cfg.team.size}
    read = partial(READERS[kind], **more)
    return split_held_out(read(read_data(cfg.task)), cfg.task, read)


def _solutions(cfg: ExperimentConfig) -> tuple[list[Any], list[Any]]:
    """Return the solutions of the environments' tasks, to train on and held out."""
    if isinstance(cfg.task.held_out, str):
        raise ValueError(f"held_out={cfg.task.held_out!r} is for given texts: set the number of held-out tasks")
    env = _environment_task(cfg.task, cfg.team, cfg.train.episodes.num_turns, cfg.train.run.seed).env

    def solve(split: str, limit: int | None) -> list[Any]:
        answers = bool(cfg.train.loss.world_model_weight)
        return collect_solutions(env, split, limit, cfg.train.run.seed, answers, cfg.task.min_reward)

    return solve("train", cfg.task.num_tasks), solve("eval", cfg.task.held_out) if cfg.task.held_out else []


def split_held_out(rows: Sequence[Any], task: TaskConfig, read: Callable[[Any], Sequence[Any]]) -> tuple[list[Any], list[Any]]:
    """Return the rows to train on, and the held-out ones: the last rows, or those that `read` returns for another source."""
    if isinstance(task.held_out, str):
        return list(rows[: task.num_tasks]), list(read(read_held_out(task)))
    return hold_out(rows, task.held_out, task.num_tasks)


def hold_out(rows: Sequence[Any], count: int, num_tasks: int | None = None) -> tuple[list[Any], list[Any]]:
    """Return the first rows to train on, at most num_tasks, and the last `count` rows. Raises ValueError if none is left."""
    if count >= len(rows):
        raise ValueError(
            f"held_out={count} leaves nothing to train on: data has {len(rows)} rows; set held_out (eval_episodes) lower"
        )
    last = len(rows) - count
    return list(rows[:last][:num_tasks]), list(rows[last:])


def read_data(task: TaskConfig) -> Any:
    """Return the path of the file of data, or the rows of the data set."""
    return _read_source(task, "data", "split", {"subset": None, "split": "train"})


def read_held_out(task: TaskConfig) -> Any:
    """Return the path of the file of held-out tasks, or the rows of the data set, which has the same subset as data."""
    return _read_source(task, "held_out", "held_out_split", {"held_out_split": "test"})


def _read_source(task: TaskConfig, source: str, split: str, defaults: dict[str, Any]) -> Any:
    """Read what the setting `source` names. split: the setting of its split. defaults: of settings that a file ignores."""
    name = str(getattr(task, source))
    if is_saved(Path(name)):
        if task.subset is not None:
            raise ValueError(f"subset={task.subset!r} has no effect on the directory {source}={name!r}: it is for the Hub")
        return read_rows(name, getattr(task, split))
    if not is_file(name):
        return load_rows(name, (), config=task.subset, split=getattr(task, split))
    for setting, default in defaults.items():
        if (value := getattr(task, setting)) != default:
            raise ValueError(f"{setting}={value!r} has no effect on the file {source}={name!r}: it is for data sets of the Hub")
    if not Path(name).is_file():
        raise FileNotFoundError(f"{source}={name!r} is not allowed: {missing_text(Path(name))}")
    return Path(name)


def is_file(name: str) -> bool:
    """Return whether a name means a file (which may not exist) instead of a data set of the Hub or a directory of one."""
    return Path(name).suffix in (*SUFFIXES, ".gz") or Path(name).is_file()


def formatters_of(task: TaskConfig, team: TeamConfig) -> list[Formatter]:
    """Return the formatter of each agent [N], with the text of its role in front of each prompt."""
    formatters = [import_name("formatters", name) for name in task.formatters] or [default_formatter]
    if len(formatters) == 1:
        formatters = formatters * team.size
    if not team.roles:
        return formatters
    return [with_role(formatter, role) for formatter, role in zip(formatters, team.roles, strict=True)]


def with_role(formatter: Formatter, role: str) -> Formatter:
    """Return a formatter that puts the text of a role in front of each prompt of another formatter."""
    write = bind_formatter(formatter)

    def prompt(item: dict, external_prompts: str | None = None) -> str | None:
        text = write(item, external_prompts)
        return None if text is None else with_instruction(role, text)  # None: the agent does not act in this turn

    return prompt
