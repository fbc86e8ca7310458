"""Which agents learn in an update, and settings that differ from agent to agent.

A setting of `PER_AGENT` may be a tuple with one number for each agent of the team. The agents of a stack are one program,
which reads these numbers as arrays [A] (`Own`): other numbers are no other program, and a sweep over them compiles once. The
optimiser is part of the program itself: agents may have different ones only in different stacks, that is as models of
different architecture.

Held agents are played as the others are, and change in nothing: parameters, moments, schedule and what they remember stay as
they were, also those of a critic of their own. A stack of held agents alone is not updated at all. A central critic always
learns. Agents that are `frozen` are always held; in `alternating` order all but one are, each in turn for `alternate_every`
updates, as the step number says. Left out: both for the roles of shared weights, which are one agent here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jmarl.algorithms import algorithm
from jmarl.config import OF_OPTIMIZER, Learning, TrainConfig
from jmarl.learning.optimizer import init_state
from jmarl.learning.update import lower_update, update_stack
from jmarl.memory import Program, starting
from jmarl.models import lora
from jmarl.models.sharding import place
from jmarl.team import StackSpec, Team
from jmarl.types import Data, Own, StackState, TeamState

PER_AGENT = ("learning_rate", "max_grad_norm", "weight_decay")


def learners(cfg: TrainConfig, num_agents: int) -> list[int]:
    """The agents that are not frozen."""
    return [agent for agent in range(num_agents) if agent not in cfg.frozen_agents]


def held_at(cfg: TrainConfig, num_agents: int, step: Any) -> np.ndarray | None:
    """Which agents [N] are held in an update; None: none ever is."""
    if not cfg.frozen_agents and cfg.update_order == "simultaneous":
        return None
    learn = learners(cfg, num_agents)
    if cfg.update_order == "alternating":
        learn = [learn[int(step) // cfg.alternate_every % len(learn)]]
    return ~np.isin(np.arange(num_agents), learn)


def updates_of(cfg: TrainConfig, num_agents: int) -> int:
    """How many of a run's updates an agent learns in (in alternating order the first one, whose turn may come once more): the
    length of its schedule."""
    if cfg.update_order == "simultaneous":
        return cfg.num_updates
    cycles, rest = divmod(cfg.num_updates, cfg.alternate_every * len(learners(cfg, num_agents)))
    return cycles * cfg.alternate_every + min(rest, cfg.alternate_every)


def of_stack(
    cfg: TrainConfig, learning: Learning, members: Sequence[Sequence[int]], num_agents: int, held: np.ndarray | None = None
) -> tuple[Learning, Own]:
    """How a stack learns, with plain settings, and what its agents have of their own. learning: of the team's
    agents or of their critics; members: of the stack, as in `StackSpec`; held: agents [N] that do not learn now."""

    def each(name: str) -> list[Any]:
        value = getattr(learning, name)
        return [value[roles[0]] if isinstance(value, tuple) else value for roles in members]

    own = {name: np.array(each(name), np.float32) for name in PER_AGENT}
    plain: dict[str, Any] = dict.fromkeys(PER_AGENT, 1.0) | {"optimizer": each("optimizer")[0]}
    other = {name: default for name, (of, default) in OF_OPTIMIZER.items() if of != plain["optimizer"]}
    if held is not None:
        own["held"] = held[[roles[0] for roles in members]]
    if cfg.update_order == "alternating" and len(members[0]) == 1:  # a central critic learns in every update
        plain["num_updates"] = updates_of(cfg, num_agents)
    return dataclasses.replace(learning, **plain, **other), Own(**own)


def adapted(team: Team, params: Sequence[Any], cfg: TrainConfig, mesh: Mesh | None) -> list[Any]:
    """The parameters of each stack with the adapters that the settings ask for; without LoRA as they are."""
    shapes = [(spec.config, len(spec.members)) for spec in team.stacks]
    params = lora.models(params, shapes, cfg.learning(), cfg.seed)
    if not cfg.lora_rank:
        return params
    # On the mesh at once, so that agents and their critics have one base there.
    return [lora.join(place(base, mesh), trained) for base, trained in map(lora.split, params)]


def initial_state(team: Team, params: Sequence[Any], cfg: TrainConfig, mesh: Mesh | None) -> TeamState:
    """The state at step 0 of a team whose agents learn by these settings."""
    each = [of_stack(cfg, cfg.learning(), s.members, team.num_agents)[0] for s in team.stacks]
    learn = [not set(s.order) <= set(cfg.frozen_agents) for s in team.stacks]
    return init_state(params, each, mesh, [len(s.members[0]) for s in team.stacks], learn)


def learn(
    cfg: TrainConfig,
    team: Team,
    spec: StackSpec,
    stack: StackState,
    batch: Data,
    *,
    learning: Learning,
    held: np.ndarray | None,
    trains: str = "policy",
) -> tuple[StackState, dict[str, Any]]:
    """One update of a stack by what of the settings is its own; arguments as for `of_stack` and `update_stack`."""
    if held is not None and held[spec.order].all():
        return stack, {"held": np.ones(len(spec.members))}
    learning, own = of_stack(cfg, learning, spec.members, team.num_agents, held)
    how: dict[str, Any] = dict(cfg=spec.config, learning=learning, own=own, mode=cfg.per_agent)
    parts = learning.micro_batches * learning.num_minibatches
    what = "update" if trains != "values" else "update of critics"
    agents, prompts, group, new_tokens = batch.tokens.shape
    work = Program(what, agents, prompts, group, batch.prompts.shape[-1], new_tokens, parts)
    others = (spec.config, learning, cfg.per_agent, cfg.mesh, trains, held is None)
    starting(work, others, partial(lower_update, stack, batch, trains=trains, **how))
    return update_stack(stack, batch, trains=trains, **how)


def check_agents(cfg: TrainConfig, num_agents: int) -> None:
    """Refuse settings of single agents that do not fit a team of that size; experiments call it before they load models."""
    for name in (*PER_AGENT, "optimizer"):
        value = getattr(cfg, name)
        if isinstance(value, tuple) and len(value) != num_agents:
            raise ValueError(
                f"{name}={value} has {len(value)} values for {num_agents} agents: give one for all, or one an agent"
            )
    frozen, learn = cfg.frozen_agents, learners(cfg, num_agents)
    if any(agent >= num_agents for agent in frozen):
        raise ValueError(f"frozen_agents={frozen} is not allowed: the agents of this team are 0 to {num_agents - 1}")
    if not learn:
        raise ValueError(
            f"frozen_agents={frozen} leaves none of {num_agents} agents to learn: jmarl.evaluation.evaluate plays without it"
        )
    if cfg.update_order == "alternating":
        if len(learn) < 2:
            raise ValueError(
                f"update_order='alternating' needs two agents that learn in turn, and here only agent {learn[0]} learns: "
                "use simultaneous"
            )
        turns = updates_of(cfg, num_agents)
        if cfg.lr_schedule != "constant" and turns <= cfg.warmup_updates:
            raise ValueError(
                f"warmup_updates={cfg.warmup_updates} is not allowed: in alternating order each of {len(learn)} agents learns "
                f"in only {turns} of num_updates={cfg.num_updates} updates, which is the length of its schedule"
            )


def check_central(cfg: TrainConfig) -> None:
    """Refuse different settings of the agents where the one critic of the team would need one of its own."""
    for name in (*PER_AGENT, "optimizer") if algorithm(cfg.algorithm).critic == "central" else ():
        value = getattr(cfg, name)
        given = name == "learning_rate" and cfg.critic_learning_rate is not None
        if isinstance(value, tuple) and len(set(value)) > 1 and not given:
            instead = "set critic_learning_rate" if name == "learning_rate" else f"give one {name} for all"
            raise ValueError(f"{name}={value} leaves open what the central critic of {cfg.algorithm!r} takes: {instead}")


def check_stacks(cfg: TrainConfig, team: Team) -> None:
    """Refuse what agents that share weights, or are of one stack, cannot have apart."""
    for spec in team.stacks:
        for roles in spec.members:
            if len(roles) > 1 and (cfg.update_order == "alternating" or len({role in cfg.frozen_agents for role in roles}) > 1):
                raise ValueError(
                    f"agents {list(roles)} share one set of weights, so they can neither learn in turn "
                    f"(update_order={cfg.update_order!r}) nor be frozen apart (frozen_agents={cfg.frozen_agents}): set "
                    "update_order='simultaneous' and freeze all of them or none, or give each its own weights"
                )
            for name in PER_AGENT:
                value = getattr(cfg, name)
                if isinstance(value, tuple) and len({value[role] for role in roles}) > 1:
                    raise ValueError(
                        f"{name}={value}: agents {list(roles)} share one set of weights, which has one {name}: give one value"
                    )
        if isinstance(cfg.optimizer, tuple) and len({cfg.optimizer[agent] for agent in spec.order}) > 1:
            raise ValueError(
                f"optimizer={cfg.optimizer}: agents {spec.order} are of one architecture, and so one stack and one program, "
                "which has one optimizer; only agents of different architectures may have different ones"
            )
