"""Check the arguments of a run before anything is loaded or sampled, and return its environment.

The conditions and sentences are rows of `algorithms.constraints`, which are read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from jmarl.algorithms import ALGORITHMS, Algorithm, AlgorithmRow, check_row, find_row, resolve, row_of_loss
from jmarl.algorithms import constraints as table
from jmarl.algorithms.constraints import facts
from jmarl.algorithms.resolve import policy_config
from jmarl.config import TrainConfig, check_argument
from jmarl.config.constraints import DIRECTORY, require
from jmarl.envs import import_name
from jmarl.envs.base import Environment
from jmarl.envs.data import Pair, Trajectory
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.evaluation.environment import Reward, as_environment
from jmarl.files.lock import check_unlocked
from jmarl.files.own_files import check_free
from jmarl.files.run_directory import check_directory, checkpoints_of, resolve_resume
from jmarl.learning.per_agent import learning_agents, updates_per_agent
from jmarl.models import sharding
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


def check_run(items: Sequence[Mapping], cfg: TrainConfig, wandb_config: Mapping | None) -> None:
    """Raise a ValueError for settings and items of a run that would fail later."""
    check_settings(cfg)
    require([table.ITEMS, table.FILES], facts(cfg, items=items, wandb=wandb_config))


def check_settings(cfg: TrainConfig) -> None:
    """Raise a ValueError for settings that conflict with each other, this machine or the output directory. Experiments call
    this before they load models."""
    require([table.SAMPLES, *DIRECTORY], facts(cfg))
    algorithm = resolve(cfg)
    s = facts(cfg, **vars(algorithm.preference), micro_batches=algorithm.optimizer.micro_batches)
    require(table.LEAGUE, s)
    if s.row.data != "rollouts":
        require(table.MAKES_PAIRS, s)
    if s.row.learned:
        require(table.LEARNS_REWARD, s)
        exchange.require_one("algorithms that train a reward model")
        return check_settings(policy_config(cfg))
    require([*table.LEARNS, *table.CENTRAL], s)
    check_row(algorithm)
    if cfg.run.mesh not in ("auto", "data=all"):
        sharding.make_mesh(cfg.run.mesh)
    exchange.from_first(partial(check_directory, cfg))


@explaining()
def check_seeds(seeds: Sequence[int], cfg: TrainConfig) -> None:
    """Raise an error for seeds and settings that cannot be trained together. Experiments call this before they load models."""
    exchange.require_one("several seeds in one program")
    find_own_algorithms(cfg.algorithm, cfg.preference.rl_algorithm)
    check_argument("seeds", seeds, list | tuple | range | np.ndarray, "a list of different numbers, such as [0, 1, 2]")
    seeds, cfg = [int(seed) for seed in seeds], resolve_resume(cfg, seeds)
    single_run = bool(cfg.run.output_dir) and checkpoints_of(cfg).exists()
    require(table.SEEDS, facts(cfg, seeds=seeds, saves=cfg.run.saves, single_run=single_run))
    if cfg.run.output_dir:
        check_unlocked(cfg.run.output_dir)
        check_free(cfg.run.output_dir)
    for seed in seeds:
        check_settings(cfg.for_seed(seed))


def check_agents(cfg: TrainConfig, num_agents: int) -> None:
    """Raise a ValueError for settings of single agents that do not fit a team of this size. Experiments call it before they
    load models."""
    require(table.AGENTS, facts_of_agents(cfg, num_agents))


def facts_of_agents(cfg: TrainConfig, num_agents: int, **more: Any) -> SimpleNamespace:
    """Return what constraints read of settings and a number of agents, and more."""
    learning = learning_agents(cfg.run, num_agents)
    updates = updates_per_agent(cfg.run, num_agents) if learning else 0
    return facts(cfg, num_agents=num_agents, learning=learning, updates=updates, **more)


def check_team(team: Team, cfg: TrainConfig) -> None:
    """Raise a ValueError for an algorithm, per-agent settings or other models of the team that do not fit it."""
    mesh = sharding.mesh_for(cfg.run.mesh, [len(spec.members) for spec in team.stacks], cfg.run.strategy)
    divides_agents = mesh is not None and mesh.size > mesh.shape["agent"]
    more = {"divides_agents": divides_agents, "divides_rows": mesh is not None and mesh.shape["data"] > 1}
    s = facts_of_agents(cfg, team.num_agents, team=team, processes=exchange.count(), **more)
    require(table.TEAM, s)
    for spec in team.stacks:
        sharding.model_on(mesh, spec.config)  # refuses what a mesh cannot divide
        for roles in spec.members:
            s.roles = list(roles)
            require(table.SHARED, s)
        s.order = spec.order
        require(table.STACK, s)


def environment_of(team: Team, reward: Reward, cfg: TrainConfig) -> Environment:
    """Return the environment of a run, see `as_environment`. Raises ValueError if num_turns does not fit it, or if the name of
    a reward function is taken."""
    env = as_environment(team, reward, cfg.episodes.num_turns)
    num_turns, max_turns = cfg.episodes.num_turns, getattr(env, "max_turns", 1)
    # No `facts`, which need the algorithm: a run of one's own algorithm is played without it.
    s = SimpleNamespace(num_turns=num_turns, num_agents=team.num_agents, env=env, max_turns=max_turns)
    if isinstance(env, RewardEnvironment):
        require(table.REWARD_ENVIRONMENT, s)
        env.reward.check_names()
    require([table.TURNS], s)
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
    require([*table.GIVEN_DATA, *DIRECTORY], facts(cfg, wandb=wandb_config))
    algorithm = resolve(cfg)
    batch_size, micro_batches = algorithm.preference.batch_size, algorithm.optimizer.micro_batches
    require([table.MICRO_BATCHES], facts(cfg, batch_size=batch_size, micro_batches=micro_batches))
    check_row(algorithm)
    exchange.from_first(partial(check_directory, cfg))
    return algorithm
