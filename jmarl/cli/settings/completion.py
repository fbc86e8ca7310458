"""Complete a configuration by what its environments say, where nobody said anything else."""

import dataclasses
from collections.abc import Mapping, Sequence

from jmarl.config.experiment import EnvironmentConfig, ExperimentConfig
from jmarl.config.yaml_file import Given
from jmarl.envs import make
from jmarl.envs.calls.user_code import message_of
from jmarl.envs.messages import MAX_TURNS
from jmarl.envs.vector import vectorize


def complete(cfg: ExperimentConfig, given: Mapping[str, Given]) -> tuple[ExperimentConfig, list[str]]:
    """Return a configuration that fits its environments where nothing else was given, and lines that say what was chosen."""
    from jmarl.algorithms import find_row  # imports jax

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
    try:
        return vectorize(make(config.name, **config.options), limit).max_turns
    except (ValueError, TypeError, FileNotFoundError) as error:
        places = [given[name].place for name in ("environment", "train_envs", "eval_envs") if name in given]
        kind = next(x for x in (TypeError, FileNotFoundError, ValueError) if isinstance(error, x))  # not a subclass's arguments
        raise kind(f"{' and '.join(dict.fromkeys(places))}: {message_of(error)}") from error
