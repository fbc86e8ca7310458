"""One step of training in its parts: play, make batches, learn. `train` runs them for one run, `seeds` for several at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from jmarl.config import TrainConfig
from jmarl.envs.base import Environment
from jmarl.learning.critics import trains
from jmarl.learning.per_agent import held_agents, update_one_stack
from jmarl.learning.setup import Setup
from jmarl.learning.update import update_keys
from jmarl.models import lora
from jmarl.randomness import tasks_of
from jmarl.rollout.critic_values import greedy_baseline, judge
from jmarl.rollout.dynamic_sampling import further_items, refill
from jmarl.rollout.play import Rollout, play
from jmarl.sampling.generate import Sampler, sample_team
from jmarl.team import Team
from jmarl.types import Batch, StackState, TeamState


def tasks_at(items: Sequence[dict], cfg: TrainConfig, step: int, draw: int = 0) -> list[dict]:
    """The items of a step; draw: of a round of its dynamic sampling."""
    own = tasks_of(step, len(items), cfg.episodes.num_prompts, cfg.run.seed)
    return [items[i] for i in (further_items(step, draw, own, len(items), cfg.run.seed) if draw else own)]


def sampler_of(team: Team, state: TeamState) -> Sampler:
    """Return the function that samples from the policies of a state."""
    return partial(sample_team, team, [lora.model_of(stack) for stack in state.stacks])


def play_step(
    sample: Sampler,
    setup: Setup,
    tasks: Sequence[dict],
    env: Environment,
    step: int,
    further: Callable[[int], Sequence[dict]] | None = None,
) -> Rollout:
    """Play one step of training.

    sample: see `play`. further: returns the tasks of a round of dynamic sampling, from 1 on.
    """
    team, row, cfg = setup.team, setup.algorithm.row, setup.cfg

    def play_round(draw: int) -> Rollout:
        items = further(draw) if further and draw else tasks
        return play(
            sample,
            team,
            items,
            env,
            cfg.sampling,
            cfg.episodes,
            seed=cfg.run.seed,
            step=step,
            group=cfg.episodes.num_generations,
            draw=draw,
        )

    rollout = play_round(0)
    if cfg.episodes.dynamic_sampling and further:
        rollout = refill(team, rollout, play_round, cfg.episodes.dynamic_sampling, row.grouping)
    if row.baseline == "greedy":
        rollout = rollout._replace(expected=greedy_baseline(sample, team, tasks, env, cfg, step, rollout))
    return rollout


def check_valid(first: Rollout) -> None:
    """Refuse to train on a reward of which nothing is valid in the first update, and where nobody writes anything."""
    if not any(turn.acts.any() for turn in first.turns):
        raise ValueError(
            "no agent acts in the first update: every prompt is None, which says that its agent does not act (does a formatter "
            "return its text?)"
        )
    if not np.isfinite(first.joint_returns[0]).any():  # a reward of a later turn counts for the turns before
        fault = next((turn.fault for turn in first.turns if turn.fault), "")
        raise ValueError(f"no joint action of the first update has a valid reward: {fault}")


def update(setup: Setup, state: TeamState, rollout: Rollout) -> tuple[TeamState, list[dict[str, Any]]]:
    """Make one update of every stack and critic from a rollout, see `update_on_batches`."""
    return update_on_batches(setup, state, *rollout_batches(setup, state, rollout))


def rollout_batches(setup: Setup, state: TeamState, rollout: Rollout) -> tuple[list[Batch], list[Batch]]:
    """Return what the stacks and the critics learn from a rollout."""
    run = setup.cfg.run
    batches, critic_batches = judge(setup, state, rollout)
    numbers = itertools.count()  # of the stacks first, then of the critics

    def with_keys(batch: Batch) -> Batch:
        keys = update_keys(setup.algorithm, run.seed, state.step, next(numbers), batch.rewards.shape[0])
        return batch._replace(keys=keys)

    return [with_keys(batch) for batch in batches], [with_keys(batch) for batch in critic_batches]


def update_on_batches(
    setup: Setup, state: TeamState, batches: list[Batch], critic_batches: list[Batch]
) -> tuple[TeamState, list[dict[str, Any]]]:
    """Make one update of every stack and critic; the state is donated.

    Returns the metrics of each stack, [A] each, on the device, and after them those of a central critic; those of a stack's own
    critics are among its, as `critic_...`.
    """
    team, algorithm, cfg = setup.team, setup.algorithm, setup.cfg
    held = held_agents(cfg.run, team.num_agents, state.step)
    step = state.step + 1  # computed now: after the update it would wait for it
    critics, critic_metrics, values = update_critics(setup, state, critic_batches, held)
    own = algorithm.row.critic == "own"
    stacks, metrics = [], []
    for i, (spec, stack, batch) in enumerate(zip(team.stacks, state.stacks, batches, strict=True)):
        if own and values and values[i] is not None:  # computed in the update of the critic
            batch = batch._replace(values=values[i])
        stack, stack_metrics, _ = update_one_stack(
            stack, batch, spec, algorithm, cfg, num_agents=team.num_agents, held=held, trains=trains(algorithm)
        )
        if own and critic_metrics:
            stack_metrics |= {f"critic_{name}": x for name, x in critic_metrics[i].items() if name != "held"}
        stacks.append(stack)
        metrics.append(stack_metrics)
    return TeamState(step, tuple(stacks), critics), metrics if own else metrics + critic_metrics


def update_critics(
    setup: Setup, state: TeamState, batches: list[Batch], held: np.ndarray | None
) -> tuple[tuple[StackState, ...], list[dict[str, Any]], list[Any]]:
    """Make one update of every critic besides the agents; return their states, metrics, and the values of critics that learn
    from those of the same pass. held [N]: agents, and with them their own critics."""
    stacks, metrics, values = [], [], []
    for spec, stack, batch in zip(setup.critics.specs, state.critics, batches, strict=True):
        algorithm = setup.critics.algorithm
        if algorithm.row.critic == "central":  # its batch has another number of prompts than those of the agents
            parts, held = min(algorithm.optimizer.micro_batches, batch.prompts.shape[1]), None
            algorithm = algorithm.with_optimizer(micro_batches=parts)
        stack, stack_metrics, stack_values = update_one_stack(
            stack, batch, spec, algorithm, setup.cfg, num_agents=setup.team.num_agents, held=held, trains="values"
        )
        stacks.append(stack)
        metrics.append(stack_metrics)
        values.append(stack_values)
    return tuple(stacks), metrics, values
