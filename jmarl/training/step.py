"""One step of training in its parts: play, make batches, learn. `train` runs them for one run, `seeds` for several at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from jmarl.algorithms import algorithm
from jmarl.config import TrainConfig
from jmarl.envs.environment import Environment
from jmarl.learning.critics import Critics, trains
from jmarl.learning.per_agent import held_at, learn
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
    own = tasks_of(step, len(items), cfg.num_prompts, cfg.seed)
    return [items[i] for i in (further_items(step, draw, own, len(items), cfg.seed) if draw else own)]


def sampler_of(team: Team, state: TeamState) -> Sampler:
    """Return the function that samples from the policies of a state."""
    return partial(sample_team, team, [lora.model_of(stack) for stack in state.stacks])


def play_step(
    sample: Sampler,
    team: Team,
    tasks: Sequence[dict],
    env: Environment,
    cfg: TrainConfig,
    step: int,
    further: Callable[[int], Sequence[dict]] | None = None,
) -> Rollout:
    """Play one step of training.

    sample: see `play`. further: returns the tasks of a round of dynamic sampling, from 1 on.
    """
    row = algorithm(cfg.algorithm)

    def play_round(draw: int) -> Rollout:
        items = further(draw) if further and draw else tasks
        settings, episodes = cfg.sampling(), cfg.episodes()
        return play(
            sample, team, items, env, settings, episodes, seed=cfg.seed, step=step, group=cfg.num_generations, draw=draw
        )

    rollout = play_round(0)
    if cfg.dynamic_sampling and further:
        rollout = refill(team, rollout, play_round, cfg.dynamic_sampling, row.grouping)
    if row.advantage == "greedy_baseline":
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


def update(
    team: Team, critics: Critics, state: TeamState, rollout: Rollout, cfg: TrainConfig
) -> tuple[TeamState, list[dict[str, Any]]]:
    """One update of every stack and critic from a rollout, see `learn_from`."""
    return learn_from(team, critics, state, *batches_of(team, critics, state, rollout, cfg), cfg)


def batches_of(
    team: Team, critics: Critics, state: TeamState, rollout: Rollout, cfg: TrainConfig
) -> tuple[list[Batch], list[Batch]]:
    """What the stacks and the critics learn from a rollout."""
    keys = partial(lora.dropout_keys, cfg, cfg.seed, state.step)
    numbered = itertools.count()  # the stacks', and behind them the critics'
    batches, of_critics = (
        [batch._replace(dropout=keys(next(numbered), batch.rewards.shape[0])) for batch in of_each]
        for of_each in judge(team, critics, state, rollout, cfg)
    )
    return batches, of_critics


def learn_from(
    team: Team, critics: Critics, state: TeamState, batches: list[Batch], of_critics: list[Batch], cfg: TrainConfig
) -> tuple[TeamState, list[dict[str, Any]]]:
    """One update of every stack and critic; the state is donated. Returns the metrics of each stack, [A] each, on the device,
    and behind them those of a central critic; those of a stack's own critics are among its, as `critic_…`."""
    held, done = held_at(cfg, team.num_agents, state.step), state.step + 1  # now: behind the update it would wait for it
    judges, judged = critics_learn(team, critics, state, of_critics, cfg, held)
    own = algorithm(cfg.algorithm).critic == "own"
    beside: list[dict[str, Any]] = judged if own and judged else [{} for _ in batches]
    stacks, learned = [], []
    for spec, stack, batch, of_critic in zip(team.stacks, state.stacks, batches, beside, strict=True):
        if "values" in of_critic:  # of the pass in which the critic has learned
            batch = batch._replace(values=of_critic.pop("values"))
        stack, metrics = learn(cfg, team, spec, stack, batch, learning=cfg.learning(), held=held, trains=trains(cfg))
        stacks.append(stack)
        learned.append(metrics | {f"critic_{name}": x for name, x in of_critic.items() if name != "held"})
    return TeamState(done, tuple(stacks), judges), learned if own else learned + judged


def critics_learn(
    team: Team, critics: Critics, state: TeamState, batches: list[Batch], cfg: TrainConfig, held: np.ndarray | None
) -> tuple[tuple[StackState, ...], list[dict[str, Any]]]:
    """One update of every critic beside the agents, and its metrics. held [N]: agents, and with them their own critics."""
    stacks, learned = [], []
    for spec, stack, batch in zip(critics.specs, state.critics, batches, strict=True):
        learning = critics.learning
        if algorithm(cfg.algorithm).critic == "central":  # its batch has other numbers of prompts than the agents'
            parts, held = min(learning.micro_batches, batch.prompts.shape[1]), None
            learning = dataclasses.replace(learning, micro_batches=parts)
        stack, metrics = learn(cfg, team, spec, stack, batch, learning=learning, held=held, trains="values")
        stacks.append(stack)
        learned.append(metrics)
    return tuple(stacks), learned
