"""Put a run on its devices: choose the mesh, make critics, state and programs.

`start` makes the state of a run, also for several seeds in one program and, of shapes, for `jmarl plan`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jmarl.algorithms import Algorithm, find_row, resolve
from jmarl.algorithms.resolve import policy_config
from jmarl.config import TrainConfig
from jmarl.hardware import memory_pool
from jmarl.learning.meshes import mesh_that_fits
from jmarl.learning.optimizer import init_stack
from jmarl.learning.per_agent import initial_state, settings_of_stack, with_adapters
from jmarl.learning.setup import Setup, critic_algorithm, make_critics, make_setup
from jmarl.logs.terminal import say
from jmarl.models import sharding
from jmarl.models.agent import Agent
from jmarl.models.heads import with_value_head
from jmarl.processes import exchange
from jmarl.team import Team, on_mesh, sort_into_stacks, stack_agents
from jmarl.types import TeamState


def in_chosen_context(team: Team, cfg: TrainConfig, is_long: Callable[[], bool]) -> TrainConfig:
    """Return settings that say whether models with two contexts compute in the long one: it is chosen here, once for a run.

    is_long: whether the run needs it, for auto. Raises ValueError if it is set and no model has two."""
    models = [*(spec.config for spec in team.stacks), *(x.config for x in (team.critic, team.reward_model) if x is not None)]
    if cfg.run.long_context is True and not any(config.has_two_contexts for config in models):
        raise ValueError(
            "long_context=True has no effect: no model of the team has factors of longrope for short and for long contexts; "
            "remove it"
        )
    if cfg.run.long_context != "auto" or not is_long():
        return cfg
    if cfg.run.progress:
        say("computes with longrope's long factors, in all rows (long_context=True): prompts need them")
    return cfg.replace(long_context=True)


def choose_mesh(team: Team, cfg: TrainConfig, num_runs: int = 1) -> TrainConfig:
    """Return settings for the devices that are here, see `mesh_that_fits`, and say what was chosen.

    num_runs: of this team that learn together."""
    room = memory_pool()
    if room is None or exchange.count() > 1:  # unknown, as on CPUs; processes use all devices anyway, see `mesh_of_processes`
        return cfg
    cfg, line = mesh_that_fits(team, cfg, policy_algorithm(cfg), jax.device_count(), room, num_runs)
    if line and cfg.run.progress:
        say(line)
    return cfg


def place_team(agents: Sequence[Agent], cfg: TrainConfig, shared_weights: bool = False) -> tuple[TrainConfig, Team, list[Any]]:
    """Return the settings with their mesh, a team on it without agents, and the parameters [A, ...] of its stacks, for callers
    that keep parameters between runs. Arguments as of `make_team`."""
    team = Team(sort_into_stacks(agents, shared_weights))
    cfg = choose_mesh(team, cfg)
    team = on_mesh(team, cfg.run)
    return cfg, team, stack_agents(team.stacks, agents, cfg.lora.lora_rank > 0)


def start(team: Team, params: Sequence[Any], cfg: TrainConfig, devices: Sequence[Any] | None = None) -> tuple[Setup, TeamState]:
    """Return the setup of a run and its state at step 0, on the devices where it trains.

    params: parameters [A, ...] of each stack, which are donated. devices: of the mesh; None: those of this process. Others are
    for shapes.
    """
    team = on_mesh(team, cfg.run, devices)
    mesh = team.stacks[0].mesh
    divides_rows = mesh is not None and mesh.shape["data"] > 1
    algorithm = dataclasses.replace(policy_algorithm(cfg), divides_rows=divides_rows)
    params = with_adapters(team, params, cfg)
    critics, critic_params = make_critics(team, params, algorithm, cfg.run.seed)
    if algorithm.critic_kind == "head":
        params = [with_value_head(stack) for stack in params]
    if algorithm.compares_scores:  # params of an earlier fit have a head
        params = [stack if "value" in stack else with_value_head(stack) for stack in params]
    state, central = initial_state(team, params, algorithm, cfg.run), algorithm.critic_kind == "central"
    learns = [True] if central else [stack.opt_state != () for stack in state.stacks]  # frozen agents have frozen critics
    critic_states = tuple(
        init_stack(
            sharding.place(weights, spec.mesh),
            settings_of_stack(critic_algorithm(algorithm), cfg.run, spec.members, team.num_agents)[0],
            learns=critic_learns,
            mesh=spec.mesh,
        )
        for spec, weights, critic_learns in zip(critics, critic_params, learns, strict=False)
    )
    return make_setup(team, critics, algorithm, cfg), state._replace(critics=critic_states)


def policy_algorithm(cfg: TrainConfig) -> Algorithm:
    """Return the resolved algorithm by which the team learns: of a run on a learned reward, `rl_algorithm`."""
    return resolve(policy_config(cfg) if find_row(cfg.algorithm).learned else cfg)
