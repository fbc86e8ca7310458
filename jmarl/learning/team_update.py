"""One update of a whole team: of every stack, and of every critic besides the agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmarl.learning.critics import trains
from jmarl.learning.per_agent import held_agents, update_one_stack
from jmarl.learning.setup import Setup
from jmarl.types import Batch, Batches, StackState, TeamState


def update_team(setup: Setup, state: TeamState, batches: Batches) -> tuple[TeamState, list[dict[str, Any]]]:
    """Make one update of every stack and critic; the state is donated.

    Returns the new state and the metrics of each stack, [A] each, on the device. The metrics of a central critic come last;
    those of a stack's own critics are among the metrics of the stack, as `critic_...`.
    """
    team, algorithm, cfg = setup.team, setup.algorithm, setup.cfg
    held = held_agents(cfg.run, team.num_agents, state.step)
    step = state.step + 1  # computed now: after the update it would wait for it
    critics, critic_metrics, values = update_critics(setup, state, batches.critics, held)
    own = algorithm.row.critic == "own"
    stacks, metrics = [], []
    for i, (spec, stack, batch) in enumerate(zip(team.stacks, state.stacks, batches.stacks, strict=True)):
        if own and values and values[i] is not None:  # computed in the update of the critic
            assert isinstance(batch, Batch)
            batch = batch._replace(values=values[i])
        stack, stack_metrics, _ = update_one_stack(
            stack, batch, spec, algorithm, cfg, num_agents=team.num_agents, held=held, trains=trains(algorithm)
        )
        if own and critic_metrics:
            stack_metrics |= {f"critic_{name}": x for name, x in critic_metrics[i].items() if name != "held"}
        stacks.append(stack)
        metrics.append(stack_metrics)
    return TeamState(step, tuple(stacks), critics, state.pending), metrics if own else metrics + critic_metrics


def update_critics(
    setup: Setup, state: TeamState, batches: Sequence[Batch], held: np.ndarray | None
) -> tuple[tuple[StackState, ...], list[dict[str, Any]], list[Any]]:
    """Make one update of every critic besides the agents.

    Returns their states, their metrics, and the values [A, P, G, T] of critics that learn from the values of the same pass,
    None for others. held [N]: agents that do not learn now, and with them their own critics.
    """
    stacks, metrics, values = [], [], []
    for spec, stack, batch in zip(setup.critics.specs, state.critics, batches, strict=True):
        algorithm = setup.critics.algorithm
        if algorithm.row.critic == "central":  # its batch has another number of prompts than those of the agents
            parts, held = min(algorithm.micro_batches, batch.prompts.shape[1]), None
            algorithm = algorithm.with_optimizer(micro_batches=parts)
        stack, stack_metrics, stack_values = update_one_stack(
            stack, batch, spec, algorithm, setup.cfg, num_agents=setup.team.num_agents, held=held, trains="values"
        )
        stacks.append(stack)
        metrics.append(stack_metrics)
        values.append(stack_values)
    return tuple(stacks), metrics, values
