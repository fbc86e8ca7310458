"""Which agents learn in an update, and settings that differ from agent to agent.

A setting of `PER_AGENT` may be a tuple with one number per agent of the team. The agents of a stack are one program, which
reads these numbers as arrays [A]: other numbers are no other program, and a sweep over them compiles once.
The optimizer is part of the program: agents of one architecture have the same.

Inactive agents play like the others and do not change: neither their parameters, moments and statistics nor those of an own
critic. Their schedule stands too: its clock counts the updates in which it was the agent's turn. A stack without an active
agent is not updated at all. A central critic always learns. Frozen agents are never active; in alternating order one agent is,
each in turn for `alternate_every` updates, determined by the step. Left out: both for the roles of shared weights, which are
one agent here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import Algorithm
from jmarl.algorithms.constraints import PER_AGENT
from jmarl.config import ONLY_WITH, Run, TrainConfig
from jmarl.hardware import dtype_on
from jmarl.learning.optimizer import init_state
from jmarl.models import lora
from jmarl.models.sharding import place
from jmarl.team import Team
from jmarl.types import TeamState


def learning_agents(run: Run, num_agents: int) -> list[int]:
    """Return the agents that are not frozen."""
    return [agent for agent in range(num_agents) if agent not in run.frozen_agents]


def active_agents(run: Run, num_agents: int, step: Any) -> np.ndarray | None:
    """Return which agents [N] learn in an update; None if all always do."""
    if not run.frozen_agents and run.update_order == "simultaneous":
        return None
    learning = learning_agents(run, num_agents)
    if run.update_order == "alternating":
        learning = [learning[int(step) // run.alternate_every % len(learning)]]
    return np.isin(np.arange(num_agents), learning)


def updates_before(run: Run, num_agents: int, step: Any) -> np.ndarray:
    """Return in how many of a run's first `step` updates it was each agent's turn to learn [N]: where it is in its schedule.
    What an update has learned does not matter; for frozen agents the numbers have no meaning."""
    if run.update_order == "simultaneous":
        return np.full(num_agents, int(step), np.int32)
    learning = learning_agents(run, num_agents)
    cycles, remainder = divmod(int(step), run.alternate_every * len(learning))
    turns = np.zeros(num_agents, np.int32)
    turns[learning] = np.clip(remainder - run.alternate_every * np.arange(len(learning)), 0, run.alternate_every)
    return cycles * run.alternate_every + turns


def updates_per_agent(run: Run, num_agents: int) -> int:
    """Return in how many of a run's updates an agent learns (in alternating order the first one, which may have one turn more):
    the length of its schedule."""
    return int(updates_before(run, num_agents, run.num_updates).max())


def settings_of_stack(
    algorithm: Algorithm, run: Run, members: Sequence[Sequence[int]], num_agents: int
) -> tuple[Algorithm, dict[str, np.ndarray]]:
    """Return how one stack learns, with one value per setting, and the numbers [A] of its agents by setting.

    algorithm: of the team's agents or of their critics; members: of the stack, as in `StackSpec`."""
    settings = algorithm.optimizer

    def values(name: str) -> list[Any]:
        value = getattr(settings, name)
        return [value[roles[0]] if isinstance(value, tuple) else value for roles in members]

    own = {name: np.array(values(name), np.float32) for name in PER_AGENT}
    optimizer = values("optimizer")[0]
    changes: dict[str, Any] = dict.fromkeys(PER_AGENT, 1.0) | {"optimizer": optimizer}
    changes |= {name: default for name, (user, default) in ONLY_WITH.items() if user != optimizer}
    algorithm = algorithm.with_optimizer(**changes)
    # A central critic learns in every update; without a schedule its length has no effect.
    if run.update_order == "alternating" and len(members[0]) == 1 and settings.lr_schedule != "constant":
        algorithm = dataclasses.replace(algorithm, num_updates=updates_per_agent(run, num_agents))
    return algorithm, own


def with_adapters(team: Team, params: Sequence[Any], cfg: TrainConfig) -> list[Any]:
    """Return the parameters of each stack with the adapters that the settings ask for; without LoRA as they are."""
    shapes = [(spec.config, len(spec.members)) for spec in team.stacks]
    params = lora.init_models(params, shapes, cfg.lora, cfg.run.seed)
    if not cfg.lora.lora_rank:
        return params
    dtype = jnp.dtype(dtype_on(jax.default_backend(), cfg.sampling.compute_dtype))
    split = [(lora.cast_base(base, dtype), trained) for base, trained in map(lora.split, params)]
    # On the mesh at once, so that agents and their critics share one base there.
    return [lora.join(place(base, spec.mesh), trained) for (base, trained), spec in zip(split, team.stacks, strict=True)]


def initial_state(team: Team, params: Sequence[Any], algorithm: Algorithm, run: Run) -> TeamState:
    """Return the state of a team at step 0."""
    algorithms = [settings_of_stack(algorithm, run, spec.members, team.num_agents)[0] for spec in team.stacks]
    learns = [not set(spec.order) <= set(run.frozen_agents) for spec in team.stacks]
    mesh = team.stacks[0].mesh  # that of all
    return init_state(params, algorithms, mesh, [len(spec.members[0]) for spec in team.stacks], learns)
