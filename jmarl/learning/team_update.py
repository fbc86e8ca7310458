"""One update of a whole team: the program of every stack, and of every critic besides the agents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.stages import Lowered

from jmarl.learning.setup import Setup
from jmarl.memory import ProgramCall, shapes_of
from jmarl.types import Batches, TeamState


def update_team(setup: Setup, state: TeamState, batches: Batches) -> tuple[TeamState, list[dict[str, Any]]]:
    """Make one update of every stack and critic; the state is donated.

    Returns the new state and the metrics of each stack, [A] each, on the device. The metrics of a central critic come last;
    those of a stack's own critics are among the metrics of the stack, as `critic_...`.
    """
    step, own = state.step + 1, setup.algorithm.critic_kind == "own"  # computed now: after the update it would wait for it
    critics, critic_metrics, values = [], [], []
    for program, critic, critic_batch in zip(setup.critic_programs, state.critics, batches.critics, strict=True):
        critic, metrics = program(critic, critic_batch, state.step)
        critics.append(critic)
        values.append(metrics.pop("values", None))  # of critics whose agents learn from the values of this pass
        critic_metrics.append(metrics)
    stacks, stack_metrics = [], []
    for i, (program, stack, batch) in enumerate(zip(setup.programs, state.stacks, batches.stacks, strict=True)):
        if own and values[i] is not None:
            batch = batch._replace(values=values[i])
        stack, metrics = program(stack, batch, state.step)
        metrics.pop("values", None)
        if own:
            metrics |= {f"critic_{name}": x for name, x in critic_metrics[i].items() if name != "frozen"}
        stacks.append(stack)
        stack_metrics.append(metrics)
    new = state._replace(step=step, stacks=tuple(stacks), critics=tuple(critics))
    return new, stack_metrics if own else stack_metrics + critic_metrics


def lower_team(setup: Setup, state: TeamState, batches: Batches) -> Iterator[tuple[str, int, Lowered]]:
    """Yield kind, number of the stack and program of each update of a team; arrays may be shapes. Stacks that never learn are
    left out, and critics without a batch."""
    values = {}
    for i, (program, critic, batch) in enumerate(zip(setup.critic_programs, state.critics, batches.critics, strict=False)):
        if program.learns:
            lowered = program.lower(critic, batch, state.step)
            values[i] = lowered.out_info[1].get("values")
            yield program.kind, i, lowered
    for i, (program, stack, batch) in enumerate(zip(setup.programs, state.stacks, batches.stacks, strict=True)):
        if values.get(i) is not None:
            batch = batch._replace(values=np.broadcast_to(np.float32(0), values[i].shape))
        if program.learns:
            yield program.kind, i, program.lower(stack, batch, state.step)


def update_calls(setup: Setup, state: TeamState, batches: Batches) -> list[ProgramCall]:
    """Describe the programs of an update of a team, to explain a lack of memory; the arrays may be donated already."""
    of_kind = {"update": batches.stacks, "update of critics": batches.critics}
    parts = setup.algorithm.micro_batches * setup.algorithm.optimizer.num_minibatches
    calls, shapes = [], shapes_of(state)._replace(step=0)  # the number of the step would wait for the device
    for kind, i, lowered in lower_team(setup, shapes, batches):
        batch = of_kind[kind][i]
        agents, prompts, group, new_tokens = batch.tokens.shape
        calls.append(ProgramCall(kind, agents, prompts, group, batch.prompts.shape[-1], new_tokens, parts, lowered))
    return calls
