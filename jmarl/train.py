"""The training loop. One step:

    tasks    = items of the step              host; their order follows from (seed, step) alone
    rollout  = play(team, tasks)              host and device; all agents of a stack sampled at once
    batches  = judge(critics, rollout)        host returns and critics' values become device arrays
    state    = update(state, batches)         device; jitted, donated
    metrics of the step before                host; one step late, so that the device never waits for a log

Nothing but `TeamState` and the step number goes from one step to the next, so a resumed run goes on bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmarl import lora, sharding
from jmarl.algorithms import algorithm, check_options, shares_critic
from jmarl.checkpoint import Checkpointer
from jmarl.config import TrainConfig
from jmarl.critics import Critics, greedy_returns, judge, make_critics, trains
from jmarl.environment import Environment, Formatter, Rewarded, Transition, prompt_of
from jmarl.evaluate import Evaluation, evaluate
from jmarl.metrics import MetricsWriter
from jmarl.objective import with_value_head
from jmarl.programs import compile_all, programs_of_run
from jmarl.rewards import RewardFunction
from jmarl.rollout import Rollout, play
from jmarl.rundir import check_directory, open_checkpoints, resume, set_aside
from jmarl.runlog import RunLog
from jmarl.team import Team, bases, init_state, policies, save_team, to_checkpoint, without_gradients
from jmarl.types import TeamState
from jmarl.update import init_stack, update_stack
from jmarl.weights import Agent


class TrainResult(NamedTuple):
    state: TeamState  # without gradients
    rewards: list[float]  # mean return of each update that this process made; with one turn the mean reward
    before: Evaluation | None  # on the held-out items before training; None when resumed or without such items
    after: Evaluation | None  # and after it


def train(
    team: Team,
    params: Sequence[Any],
    reward: RewardFunction | Environment,
    items: Sequence[dict],
    cfg: TrainConfig,
    *,
    formatters: Sequence[Formatter] | None = None,
    external_transition: Transition | None = None,
    critic: Agent | None = None,
    eval_items: Sequence[dict] = (),
    wandb_config: dict | None = None,
) -> TrainResult:
    """Train a team on items (dicts with a `prompt`, or with what the formatters read) and return its final state.

    params: each stack's parameters [A, ...], as `make_team` returns them; they are consumed (their memory is the state's). With
    LoRA (`lora_rank`) best those of `make_team(..., lora=True)`, one copy for all agents of a stack, which stays as it is; or
    what `policies` makes of an earlier run's state, to train its adapters on.
    reward: a reward function, with formatters (one an agent, item -> prompt) and for several turns external_transition, see
    `environment.Rewarded`; or an environment, which does all of that itself.
    critic: what the critics of an algorithm that has them start from; None: from their agents, a central one from the first.
    """
    env = environment_of(team, reward, formatters, external_transition, cfg)
    check_run(items, cfg, wandb_config)
    check_team(team, cfg)
    critics, state = start(team, params, cfg, critic)
    meta = {"config": dataclasses.asdict(cfg), "team": team.describe(), "critics": Team(critics.specs).describe()}
    with contextlib.ExitStack() as opened:
        saver = open_checkpoints(cfg)
        if saver:
            opened.enter_context(saver)
        if saver or cfg.resume:
            meta["bases"] = bases(state)
        if cfg.resume:
            state = resume(cfg, state, meta)
        elif cfg.output_dir:
            set_aside(cfg.output_dir)
        writer = open_metrics(cfg, int(state.step), wandb_config)
        if writer:
            opened.enter_context(writer)
        log = RunLog(team, cfg, writer)
        result = run(team, critics, state, items, cfg, log, saver, meta, eval_items, env)
    if cfg.output_dir:
        save_team(Path(cfg.output_dir) / "models", team, policies(result.state))
    return result


def start(team: Team, params: Sequence[Any], cfg: TrainConfig, critic: Agent | None) -> tuple[Critics, TeamState]:
    """The critics of a run and its state at step 0, on the devices where it stays."""
    learning, mesh = cfg.learning(), sharding.mesh_for(cfg.mesh, [len(s.members) for s in team.stacks])
    params = lora.models(params, [(s.config, len(s.members)) for s in team.stacks], learning, cfg.seed)
    if learning.lora_rank:  # on the mesh at once, so that agents and their critics have one base there
        params = [lora.join(sharding.place(base, mesh), trained) for base, trained in map(lora.split, params)]
    critics, of_critics = make_critics(team, params, learning, critic, cfg.seed)
    if shares_critic(learning):
        params = [with_value_head(of_stack) for of_stack in params]
    state = init_state(params, learning, mesh, [len(s.members[0]) for s in team.stacks])
    where = mesh if algorithm(cfg.algorithm).critic == "own" else sharding.of_one_agent(mesh)
    judges = tuple(init_stack(sharding.place(of_stack, where), critics.learning) for of_stack in of_critics)
    return critics, state._replace(critics=judges)


def run(
    team: Team,
    critics: Critics,
    state: TeamState,
    items: Sequence[dict],
    cfg: TrainConfig,
    log: RunLog,
    saver: Checkpointer | None,
    meta: dict,
    eval_items: Sequence[dict],
    env: Environment,
) -> TrainResult:
    """The loop from `state` on."""

    def tasks_at(step: int) -> list[dict]:
        return [items[i] for i in tasks_of(step, len(items), cfg.num_prompts, cfg.seed)]

    def evaluated(step: int) -> Evaluation | None:
        due = cfg.eval_every and step % cfg.eval_every == 0
        if not eval_items or not (due or step in (0, cfg.num_updates)):
            return None
        log.flush()  # the row before the evaluation's; waits for the update, which is training time
        began = time.monotonic()
        result = evaluate(team, [lora.model_of(s) for s in state.stacks], eval_items, env, cfg)
        log.evaluation(step, result, began)
        return result

    first = int(state.step)
    if first < cfg.num_updates:
        compile_all(programs_of_run(team, critics, state, tasks_at(first), eval_items, env, cfg))
    before = after = evaluated(0) if first == 0 else None
    for step in range(first, cfg.num_updates):
        rollout = play_step(team, state, tasks_at(step), env, cfg, step)
        if step == first and not np.isfinite(rollout.turns[0].rewards).any():
            raise ValueError(f"no joint action of the first update has a valid reward: {rollout.turns[0].fault}")
        played = time.monotonic()  # before the update, for which the call below may wait or not
        state, learned = update(team, critics, state, rollout, cfg)
        log.step(step, rollout, learned, played)
        after = evaluated(step + 1) or after
        if saver:
            log.save(saver, step + 1, to_checkpoint(state), meta, last=step + 1 == cfg.num_updates)
    log.flush()
    return TrainResult(without_gradients(state), log.rewards, before, after)


def tasks_of(step: int, num_items: int, per_step: int, seed: int) -> list[int]:
    """Indices of a step's items: every epoch is a new order of all of them, from (seed, epoch) alone."""
    positions = range(step * per_step, (step + 1) * per_step)
    order = {e: np.random.default_rng((seed, e)).permutation(num_items) for e in {p // num_items for p in positions}}
    return [int(order[p // num_items][p % num_items]) for p in positions]


def play_step(team: Team, state: TeamState, tasks: Sequence[dict], env: Environment, cfg: TrainConfig, step: int) -> Rollout:
    """Sample and reward one step of training."""
    params, how = [lora.model_of(s) for s in state.stacks], dict(seed=cfg.seed, step=step, group=cfg.num_generations)
    rollout = play(team, params, tasks, env, cfg.sampling(), cfg.episodes(), **how)
    if algorithm(cfg.algorithm).advantage == "greedy_baseline":
        rollout = rollout._replace(expected=greedy_returns(team, params, tasks, env, cfg, step, rollout))
    return rollout


def update(
    team: Team, critics: Critics, state: TeamState, rollout: Rollout, cfg: TrainConfig
) -> tuple[TeamState, list[dict[str, Any]]]:
    """One update of every stack and critic; the state is donated. Returns the metrics of each stack, [A] each, on the device,
    and behind them those of a central critic; those of a stack's own critics are among its, as `critic_…`."""
    batches, of_critics = judge(team, critics, state, rollout, cfg)
    stacks, judges, learned = [], [], []
    how: dict[str, Any] = dict(learning=cfg.learning(), mode=cfg.per_agent, trains=trains(cfg))
    for i, (spec, stack, batch) in enumerate(zip(team.stacks, state.stacks, batches, strict=True)):
        batch = batch._replace(dropout=lora.dropout_keys(cfg, cfg.seed, state.step, i, len(spec.members)))
        stack, metrics = update_stack(stack, batch, cfg=spec.config, **how)
        stacks.append(stack)
        learned.append(metrics)
    how = dict(learning=critics.learning, mode=cfg.per_agent, trains="values")
    for i, (spec, stack, batch) in enumerate(zip(critics.specs, state.critics, of_critics, strict=True)):
        if algorithm(cfg.algorithm).critic == "central":  # its batch has other numbers of prompts than the agents'
            parts = min(critics.learning.micro_batches, batch.prompts.shape[1])
            how["learning"] = dataclasses.replace(critics.learning, micro_batches=parts)
        keys = lora.dropout_keys(cfg, cfg.seed, state.step, len(team.stacks) + i, len(spec.members))
        batch = batch._replace(dropout=keys)
        stack, metrics = update_stack(stack, batch, cfg=spec.config, **how)
        judges.append(stack)
        if algorithm(cfg.algorithm).critic == "own":
            learned[i] |= {f"critic_{name}": x for name, x in metrics.items()}
        else:
            learned.append(metrics)
    return TeamState(state.step + 1, tuple(stacks), tuple(judges)), learned


def check_settings(cfg: TrainConfig) -> None:
    """Refuse settings that do not fit each other, this machine or the output directory; experiments call it before they load
    models."""
    row = algorithm(cfg.algorithm)
    least = 2 if row.critic and cfg.critic_type == "q" else row.min_group
    if cfg.num_generations < least:
        raise ValueError(
            f"num_generations={cfg.num_generations} is too small for algorithm={cfg.algorithm!r}: "
            f"its {row.advantage} baseline needs at least {least}"
        )
    if cfg.cross_credit == "sum" and (row.critic or row.advantage == "greedy_baseline"):
        raise ValueError(
            f"cross_credit='sum' does not fit algorithm={cfg.algorithm!r}: its baseline is of a mean; use cross_credit='mean'"
        )
    check_options(dataclasses.asdict(cfg))
    sharding.mesh_for(cfg.mesh, [1])
    check_directory(cfg)


def check_team(team: Team, cfg: TrainConfig) -> None:
    """Refuse a row that is not for teams of this size."""
    if cfg.algorithm == "ppo" and team.num_agents > 1:
        raise ValueError(f"algorithm='ppo' is for a team of one, this one has {team.num_agents} agents: choose ippo or mappo")


def environment_of(
    team: Team,
    reward: RewardFunction | Environment,
    formatters: Sequence[Formatter] | None,
    transition: Transition | None,
    cfg: TrainConfig,
) -> Environment:
    """The environment that a run is played in."""
    if not isinstance(reward, RewardFunction):
        missing = [name for name in ("reset", "step", "observe") if not callable(getattr(reward, name, None))]
        if missing:
            raise TypeError(
                f"reward is a {type(reward).__name__} without {', '.join(missing)}: give make_reward(function, num_agents="
                f"{team.num_agents}) or an environment; one of a single episode goes into LockStep(env, {team.num_agents})"
            )
        if formatters or transition:
            raise ValueError("an environment writes its prompts itself: leave formatters and external_transition out")
        return reward
    formatters = formatters or [prompt_of] * team.num_agents
    if len(formatters) != team.num_agents:
        raise ValueError(f"{len(formatters)} formatters for {team.num_agents} agents: give one an agent")
    if cfg.num_turns > 1 and transition is None:
        raise ValueError(f"num_turns={cfg.num_turns} needs external_transition, which writes the prompts of the next turn")
    if cfg.num_turns == 1 and transition is not None:
        raise ValueError("external_transition writes the prompts of later turns, and num_turns=1 has none: set num_turns")
    return Rewarded(reward, formatters, transition)


def check_run(items: Sequence[dict], cfg: TrainConfig, wandb_config: Mapping | None) -> None:
    """Refuse what would fail later, with the number and the name."""
    check_settings(cfg)
    if not items:
        raise ValueError("there are no items to train on")
    if wandb_config is not None and not cfg.output_dir:
        raise ValueError("wandb_config was given without output_dir: W&B keeps its files there, so set output_dir")


def open_metrics(cfg: TrainConfig, first: int, wandb_config: dict | None) -> MetricsWriter | None:
    """The run's logs from step `first` on; None without an output directory."""
    if not cfg.output_dir:
        return None
    options: dict[str, Any] = dict(
        total_steps=cfg.num_updates, start_step=first, progress=cfg.progress, wandb_config=wandb_config
    )
    return MetricsWriter(cfg.output_dir, dataclasses.asdict(cfg), **options)
