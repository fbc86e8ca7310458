"""Check the arguments of a run before anything is loaded or sampled, and return its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jmarl.algorithms import ALGORITHMS, Algorithm, check_row, find_row, resolve
from jmarl.config import TrainConfig
from jmarl.envs.base import Environment, TextEnvironment
from jmarl.envs.messages import SimulatedEnvironment
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import RewardFunction
from jmarl.envs.vector import vectorize
from jmarl.files.run_directory import check_directory
from jmarl.learning.per_agent import check_agents, check_central, check_other_models, check_stacks
from jmarl.models import sharding
from jmarl.preferences.pair_rounds import check_rounds
from jmarl.preferences.reward_model import policy_config
from jmarl.team import Team


def check_run(items: Sequence[Mapping], cfg: TrainConfig, wandb_config: Mapping | None) -> Algorithm:
    """Return the resolved algorithm of a run. Raises an error for settings and items that would fail later."""
    algorithm = check_settings(cfg)
    if not items:
        raise ValueError("there are no items to train on: items is empty")
    if wandb_config is not None and not cfg.run.output_dir:
        raise ValueError("wandb_config was given without output_dir: W&B keeps its files there, so set output_dir")
    return algorithm


def check_settings(cfg: TrainConfig) -> Algorithm:
    """Return the resolved algorithm of a run. Experiments call this before they load models.

    Raises:
        ValueError: settings conflict with each other, this machine or the output directory.
    """
    sharding.require_one_process()
    row, group, name = find_row(cfg.algorithm), cfg.episodes.num_generations, "num_generations"
    if row.makes_pairs and cfg.preference.num_candidates:
        group, name = cfg.preference.num_candidates, "num_candidates"
    if row.data != "rollouts" and not row.makes_pairs:
        raise ValueError(f"algorithm={cfg.algorithm!r} learns from given data: use jmarl.fit")
    algorithm = resolve(cfg)
    if row.data != "rollouts":
        check_rounds(cfg, algorithm)
    if row.learned:
        policy = policy_config(cfg)
        if cfg.episodes.async_steps:
            raise ValueError(f"async_steps=1 does not go with algorithm={cfg.algorithm!r}, whose reward changes: set it to 0")
        if find_row(policy.algorithm).data != "rollouts":
            raise ValueError(f"rl_algorithm={policy.algorithm!r} does not learn from rollouts: choose magrpo, grpo, maac, ...")
        if group < row.min_group:
            raise ValueError(f"{name}={group} is too small for algorithm={cfg.algorithm!r}: pairs need 2; set it higher")
        check_settings(policy)
        return algorithm
    smallest = 2 if row.critic and cfg.critic.critic_type == "q" else row.min_group
    if group < smallest:
        raise ValueError(
            f"{name}={group} is too small for algorithm={cfg.algorithm!r}: its baseline needs at least {smallest} completions "
            f"of a prompt; set {name} higher"
        )
    check_joint_mode(cfg, algorithm)
    check_row(algorithm)
    check_central(cfg, algorithm)
    sharding.mesh_for(cfg.run.mesh, [1])
    check_directory(cfg)
    return algorithm


def check_joint_mode(cfg: TrainConfig, algorithm: Algorithm) -> None:
    """Raise a ValueError for joint modes and dynamic sampling that do not fit the algorithm's baseline."""
    row, episodes, dynamic_sampling = algorithm.row, cfg.episodes, cfg.episodes.dynamic_sampling
    has_value_baseline = row.critic or row.baseline == "greedy"
    if episodes.cross_credit == "sum" and has_value_baseline:
        raise ValueError(
            f"cross_credit='sum' does not fit algorithm={cfg.algorithm!r}: its baseline is of a mean; use cross_credit='mean'"
        )
    if episodes.forks and (has_value_baseline or dynamic_sampling):
        setting = f"dynamic_sampling={dynamic_sampling}" if dynamic_sampling else f"algorithm={cfg.algorithm!r}"
        raise ValueError(
            f"joint_mode='counterfactual' does not go with {setting}: its groups are alternatives to single completions"
        )
    if dynamic_sampling and not row.compares_group:
        users = ", ".join(name for name, other in ALGORITHMS.items() if other.compares_group)
        raise ValueError(
            f"dynamic_sampling={dynamic_sampling} has no effect for algorithm={cfg.algorithm!r}, whose advantages do "
            f"not compare the returns of a group; it is for {users}"
        )


def check_async(team: Team, cfg: TrainConfig) -> None:
    """Raise a ValueError if completions of the next step cannot begin early on these devices."""
    agents = [len(spec.members) for spec in team.stacks]
    mesh = sharding.mesh_for(cfg.run.mesh, agents)
    if cfg.episodes.async_steps and mesh is not None and not all(sharding.splits_only_agents(mesh, n) for n in agents):
        raise ValueError(
            f"async_steps=1 does not go with mesh={cfg.run.mesh!r}, which splits the rows or weights of an agent: spread whole "
            "agents (mesh=auto)"
        )


def check_team(team: Team, cfg: TrainConfig) -> None:
    """Raise a ValueError for an algorithm, per-agent settings or other models of the team that do not fit it."""
    check_other_models(team, cfg)
    check_async(team, cfg)
    if cfg.algorithm == "ppo" and team.num_agents > 1:
        raise ValueError(f"algorithm='ppo' is for a team of one, this one has {team.num_agents} agents: choose ippo or mappo")
    check_agents(cfg, team.num_agents)
    check_stacks(cfg, team)


def environment_of(
    team: Team,
    reward: Callable | Environment | TextEnvironment | SimulatedEnvironment,
    cfg: TrainConfig,
) -> Environment:
    """Return the environment of a run, made of `reward` if that is a function (plain, or from `make_reward`).

    Raises:
        TypeError: reward is neither a function nor an environment.
        ValueError: the team or num_turns do not fit it.
    """
    env: Any = vectorize(reward, cfg.episodes.num_turns)
    missing = [name for name in ("reset", "step", "observe") if not callable(getattr(env, name, None))]
    if isinstance(env, type):
        raise TypeError(f"{env.__name__} is a class: give an environment, {env.__name__}(...)")
    if isinstance(env, RewardFunction) or (missing and callable(env)):
        env, missing = RewardEnvironment(env, [default_formatter] * team.num_agents), []
    if missing:
        raise TypeError(
            f"reward is a {type(env).__name__} without {', '.join(missing)}: give make_reward(function, num_agents="
            f"{team.num_agents}) or an environment; one of a single episode is a TextEnvironment, or goes into "
            f"LockStep(env, {team.num_agents})"
        )
    if isinstance(env, RewardEnvironment):
        env = env.for_agents(team.num_agents)
        check_reward_environment(env, team, cfg.episodes.num_turns)
    turns = getattr(env, "max_turns", 1)
    if cfg.episodes.num_turns < turns:
        raise ValueError(
            f"num_turns={cfg.episodes.num_turns}, and an episode of this environment has up to {turns}: set num_turns={turns}"
        )
    return env


def check_reward_environment(env: RewardEnvironment, team: Team, num_turns: int) -> None:
    """Raise a ValueError for formatters that do not fit the team, and for a transition that does not fit the turns."""
    if env.num_agents != team.num_agents:
        raise ValueError(
            f"{env.num_agents} formatters for {team.num_agents} agents: give one function for all of them, or a list with one "
            "per agent"
        )
    if num_turns > 1 and env.transition is None:
        raise ValueError(
            f"num_turns={num_turns} needs external_transition, which writes the prompts of the next turn; in Python it is "
            "RewardEnvironment(reward, formatters, transition)"
        )
    if num_turns == 1 and env.transition is not None:
        raise ValueError("external_transition writes the prompts of later turns, and num_turns=1 has none: set num_turns")
