"""The state that a run starts from, and who learns in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jmarl.algorithms import Algorithm, resolve
from jmarl.config import TrainConfig
from jmarl.learning.critics import make_critics
from jmarl.learning.optimizer import init_stack
from jmarl.learning.per_agent import for_stack, initial_state, with_adapters
from jmarl.learning.setup import Setup
from jmarl.models import lora, sharding
from jmarl.models.heads import with_value_head
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.peft import merge
from jmarl.models.stack import map_own, unstack
from jmarl.team import Team
from jmarl.types import TeamState


def start(team: Team, params: Sequence[Any], cfg: TrainConfig, critic: Agent | None) -> tuple[Setup, TeamState]:
    """Return who learns and how, and the state at step 0, on the devices where it stays."""
    algorithm, mesh = resolve(cfg), sharding.mesh_for(cfg.run.mesh, [len(s.members) for s in team.stacks])
    params = with_adapters(team, params, cfg, mesh)
    critics, critic_params = make_critics(team, params, algorithm, critic, cfg.run.seed)
    if algorithm.has_value_head:
        params = [with_value_head(stack) for stack in params]
    state, own = initial_state(team, params, algorithm, cfg.run, mesh), algorithm.row.critic == "own"
    learns = [stack.opt_state != () for stack in state.stacks] if own else [True]
    critic_mesh = mesh if own else sharding.mesh_of_one_model(mesh)
    move = sharding.place if own or mesh is None else sharding.put  # a copy of an agent's weights may lie on all devices
    critic_states = tuple(
        init_stack(
            move(weights, critic_mesh),
            for_stack(critics.algorithm, cfg.run, spec.members, team.num_agents)[0],
            learns=learns_too,
        )
        for spec, weights, learns_too in zip(critics.specs, critic_params, learns, strict=False)
    )
    return Setup(team, critics, algorithm, cfg), state._replace(critics=critic_states)


def first_agent(team: Team, params: Sequence[Any]) -> Agent:
    """Return the first agent as it was loaded."""
    spec = team.stacks[0]
    return Agent("first", spec.config, merge(spec.config, jax.device_get(unstack(params[0], 0))), spec.tokenizer)


def initial_of(params: Sequence[Any], algorithm: Algorithm, mesh: Mesh | None) -> list[Any]:
    """Return copies of the parameters of each stack, on the mesh, if rounds need them as the reference of preferences or as the
    comparator. Training updates those given in place."""
    settings = algorithm.preference
    if settings.comparator != "initial" and (algorithm.row.learned or settings.reference_free):
        return []
    return [sharding.place(map_own(jnp.copy, stack), mesh) for stack in params]


def initial_digests(params: Sequence[Any], algorithm: Algorithm) -> list[str]:
    """Return the digest of each stack's parameters if a reference is made of them: they must be the same when a run is resumed.
    With LoRA the digest of the bases says it."""
    has_reference = algorithm.row.margin in ("own", "joint") and not algorithm.preference.reference_free
    return [lora.digest(stack) for stack in params] if has_reference and not algorithm.lora.lora_rank else []
