"""Check the arguments of a run before anything is loaded or sampled, and return its environment.

The conditions and sentences are rows of `algorithms.constraints` and `algorithms.run_constraints`, which are read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from jmarl.algorithms import ALGORITHMS, Algorithm, AlgorithmRow, check_row, find_row, resolve, row_of_loss
from jmarl.algorithms.constraints import CENTRAL, LEARNS, LEARNS_REWARD, MAKES_PAIRS, MICRO_BATCHES, SAMPLES, facts
from jmarl.algorithms.run_constraints import AGENTS, FILES, GIVEN_DATA, ITEMS, REWARD_ENVIRONMENT, SEEDS, SHARED, STACK, TEAM
from jmarl.config import TrainConfig, check_argument
from jmarl.config.constraints import BEST, require
from jmarl.envs import import_name
from jmarl.envs.base import Environment
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.evaluation.environment import Reward, as_environment
from jmarl.files.lock import check_unlocked
from jmarl.files.own_files import check_free
from jmarl.files.run_directory import check_directory, checkpoints_of, resolve_resume
from jmarl.learning.per_agent import learning_agents, updates_per_agent
from jmarl.models import sharding
from jmarl.preferences.pairs import Pair, Trajectory
from jmarl.preferences.reward_model import policy_config
from jmarl.processes import exchange
from jmarl.shadows import explaining
from jmarl.team import Team


def find_own_algorithms(algorithm: str, rl_algorithm: str | None = None) -> None:
    """Put algorithms that settings name as module:row or file.py:row into the table. What can be called there is a loss: it
    gets the advantages of magrpo, and of the settings of a loss those that it has parameters for."""
    for setting, name in (("algorithm", algorithm), ("rl_algorithm", rl_algorithm)):
        if not isinstance(name, str) or (":" not in name and not name.endswith(".py")):
            continue
        row = import_name(setting, name)
        if not isinstance(row, AlgorithmRow) and (isinstance(row, type) or not callable(row)):
            raise ValueError(f"{setting}={name!r} is a {type(row).__name__}: give an AlgorithmRow, or a function, the loss")
        ALGORITHMS[name] = row if isinstance(row, AlgorithmRow) else row_of_loss(row)


def check_run(items: Sequence[Mapping], cfg: TrainConfig, wandb_config: Mapping | None) -> Algorithm:
    """Return the resolved algorithm of a run. Raises an error for settings and items that would fail later."""
    algorithm = check_settings(cfg)
    require([ITEMS, FILES], facts(cfg, items=items, wandb=wandb_config))
    return algorithm


def check_settings(cfg: TrainConfig) -> Algorithm:
    """Return the resolved algorithm of a run. Experiments call this before they load models.

    Raises:
        ValueError: settings conflict with each other, this machine or the output directory.
    """
    s = facts(cfg)
    require([SAMPLES, *BEST], s)
    algorithm = resolve(cfg)
    if s.row.data != "rollouts":
        s = with_resolved(s, algorithm)
        require(MAKES_PAIRS, s)
    if s.row.learned:
        require(LEARNS_REWARD, s)
        exchange.require_one("algorithms that train a reward model")
        check_settings(policy_config(cfg))
        return algorithm
    require([*LEARNS, *CENTRAL], s)
    check_row(algorithm)
    if cfg.run.mesh not in ("auto", "data=all"):
        sharding.make_mesh(cfg.run.mesh)
    exchange.from_first(partial(check_directory, cfg))
    return algorithm


def with_resolved(s: SimpleNamespace, algorithm: Algorithm) -> SimpleNamespace:
    """Return facts with the settings of pairs and micro-batches that the algorithm has."""
    return SimpleNamespace(**{**vars(s), **vars(algorithm.preference), "micro_batches": algorithm.optimizer.micro_batches})


@explaining()
def check_seeds(seeds: Sequence[int], cfg: TrainConfig) -> None:
    """Raise an error for seeds and settings that cannot be trained together. Experiments call this before they load models."""
    exchange.require_one("several seeds in one program")
    find_own_algorithms(cfg.algorithm, cfg.preference.rl_algorithm)
    check_argument("seeds", seeds, list | tuple | range | np.ndarray, "a list of different numbers, such as [0, 1, 2]")
    seeds, cfg = [int(seed) for seed in seeds], resolve_resume(cfg, seeds)
    single_run = bool(cfg.run.output_dir) and checkpoints_of(cfg).exists()
    require(SEEDS, facts(cfg, seeds=seeds, saves=cfg.run.saves, single_run=single_run))
    if cfg.run.output_dir:
        check_unlocked(cfg.run.output_dir)
        check_free(cfg.run.output_dir)
    for seed in seeds:
        check_settings(cfg.for_seed(seed))


def check_agents(cfg: TrainConfig, num_agents: int) -> None:
    """Raise a ValueError for settings of single agents that do not fit a team of this size. Experiments call it before they
    load models."""
    require(AGENTS, facts_of_agents(cfg, num_agents))


def facts_of_agents(cfg: TrainConfig, num_agents: int) -> SimpleNamespace:
    """Return what constraints read of settings and a number of agents."""
    learning = learning_agents(cfg.run, num_agents)
    updates = updates_per_agent(cfg.run, num_agents) if learning else 0
    return facts(cfg, num_agents=num_agents, learning=learning, updates=updates)


def check_team(team: Team, cfg: TrainConfig) -> None:
    """Raise a ValueError for an algorithm, per-agent settings or other models of the team that do not fit it."""
    counts = [len(spec.members) for spec in team.stacks]
    mesh, s = sharding.mesh_for(cfg.run.mesh, counts, cfg.run.strategy), facts_of_agents(cfg, team.num_agents)
    s.team = team
    s.divides_agents = mesh is not None and mesh.size > mesh.shape["agent"]
    s.processes = exchange.count()
    s.divides_rows = mesh is not None and mesh.shape["data"] > 1
    require(TEAM, s)
    for spec in team.stacks:
        sharding.model_on(mesh, spec.config)  # refuses what a mesh cannot divide
        for roles in spec.members:
            s.roles = list(roles)
            require(SHARED, s)
        s.order = spec.order
        require(STACK, s)


def environment_of(team: Team, reward: Reward, cfg: TrainConfig) -> Environment:
    """Return the environment of a run, see `as_environment`. Raises ValueError if num_turns does not fit it, or if the name of
    a reward function is taken."""
    env = as_environment(team, reward, cfg.episodes.num_turns)
    if isinstance(env, RewardEnvironment):
        given = {"formatters": env.num_agents, "num_agents": team.num_agents, "transition": env.transition}
        require(REWARD_ENVIRONMENT, SimpleNamespace(num_turns=cfg.episodes.num_turns, **given))
        env.reward.check_names()
    turns = getattr(env, "max_turns", 1)
    if cfg.episodes.num_turns < turns:
        raise ValueError(
            f"num_turns={cfg.episodes.num_turns}, and an episode of this environment has up to {turns}: set num_turns={turns}"
        )
    return env


# --- given data


def check_data(data: Any, cfg: TrainConfig) -> None:
    """Raise an error if data are empty or of another type than the algorithm learns from."""
    texts = find_row(cfg.algorithm).data == "texts"
    cls, reader = (Trajectory, "load_trajectories") if texts else (Pair, "load_pairs")
    is_list = isinstance(data, list | tuple) and not isinstance(data, Trajectory | Pair)
    if is_list and not data:
        raise ValueError("there is no data to train on")
    wrong = [item for item in data if not isinstance(item, cls)] if is_list else [data]
    if wrong:
        raise TypeError(
            f"algorithm={cfg.algorithm!r} learns from a list of {cls.__name__}, got {type(wrong[0]).__name__}: read "
            f"files, data sets, DataFrames and lists of dicts with jmarl.{reader}"
        )


def check_fit(cfg: TrainConfig, wandb_config: dict | None) -> Algorithm:
    """Return the resolved algorithm of a run on given data. Experiments call this before they load models.

    Raises:
        ValueError: settings conflict with each other, this machine or the output directory.
    """
    s = facts(cfg, wandb=wandb_config)
    require([*GIVEN_DATA, *BEST], s)
    algorithm = resolve(cfg)
    require([MICRO_BATCHES], with_resolved(s, algorithm))
    check_row(algorithm)
    exchange.from_first(partial(check_directory, cfg))
    return algorithm
