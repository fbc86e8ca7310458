"""The training loop. One step:

    tasks    = items of the step              host; their order follows from (seed, step) alone
    rollout  = play(team, tasks)              host and device; all agents of a stack sampled at once
    batches  = judge(critics, rollout)        host returns and critics' values become device arrays
    state    = update(state, batches)         device; jitted, donated
    metrics of the step before                host; one step late, so that the device never waits for a log

Nothing but `TeamState` and the step number goes from one step to the next, so a resumed run goes on bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jmarl.algorithms import (
    ALGORITHMS,
    GROUP_BASELINES,
    algorithm,
    check_options,
    check_row,
    check_used,
    makes_pairs,
    shares_critic,
)
from jmarl.config import TrainConfig
from jmarl.envs.environment import Environment, Formatter, Rewarded, Transition, describe, prompt_of
from jmarl.envs.messages import SimulatedEnvironment
from jmarl.envs.rewards import RewardFunction
from jmarl.envs.vector import TextEnvironment, side_by_side
from jmarl.evaluation.evaluate import Evaluation, evaluate
from jmarl.learning.critics import Critics, make_critics
from jmarl.learning.optimizer import init_stack
from jmarl.learning.per_agent import adapted, check_agents, check_central, check_stacks, initial_state, of_stack
from jmarl.memory import explain_memory
from jmarl.models import lora, sharding
from jmarl.models.heads import with_value_head
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.peft import merge
from jmarl.models.stack import fetched, map_own, unstack
from jmarl.rollout.prompt_check import items_that_fit
from jmarl.team import Team, bases, without_gradients
from jmarl.training.files import fingerprint
from jmarl.training.files.failed_update import read_failed_update
from jmarl.training.files.run_directory import check_directory, open_run, resume
from jmarl.training.files.saving import Saves, write_models
from jmarl.training.fit import initial_digests
from jmarl.training.fit import replay as replay_data
from jmarl.training.logs.step_log import RunLog, TrainResult, mean_return, update_metrics
from jmarl.training.loop import Advanced, loop
from jmarl.training.precompile import compile_all, programs_of_run
from jmarl.training.preferences.reward_model import OF_PAIRS, LearnedRounds, policy_config
from jmarl.training.preferences.rounds import RoundLog, Rounds, check_rounds, run_rounds
from jmarl.training.step import check_valid, play_step, sampler_of, tasks_at, update
from jmarl.types import TeamState


def train(
    team: Team,
    params: Sequence[Any],
    reward: Callable | Environment | TextEnvironment | SimulatedEnvironment,
    items: Sequence[dict],
    cfg: TrainConfig,
    *,
    formatters: Sequence[Formatter] | None = None,
    external_transition: Transition | None = None,
    critic: Agent | None = None,
    reward_model: Agent | None = None,
    eval_items: Sequence[dict] = (),
    wandb_config: dict | None = None,
) -> TrainResult:
    """Train a team on items (dicts with a `prompt`, or with what the formatters read) and return its final state.

    params: each stack's parameters [A, ...], as `make_team` returns them; they are consumed (their memory is the state's). With
    LoRA (`lora_rank`) best those of `make_team(..., lora=True)`, one copy for all agents of a stack, which stays as it is; or
    what `policies` makes of an earlier run's state, to train its adapters on.
    reward: a function of completions, or `make_reward` of several, with formatters (item -> prompt; one for all or one an
    agent) and for several turns external_transition, see `environment.Rewarded`; or an environment, which does all of that.
    critic: what the critics of an algorithm that has them start from; None: from their agents, a central one from the first.
    reward_model: what that of marlhf and marlhf_iter starts from; None: from the first agent.
    """
    env = environment_of(team, reward, formatters, external_transition, cfg)
    check_run(items, cfg, wandb_config)
    check_team(team, cfg)
    items, eval_items = items_that_fit(team, env, items, eval_items, cfg)
    row, policy, rewarder = algorithm(cfg.algorithm), cfg, None
    mesh = sharding.mesh_for(cfg.mesh, [len(s.members) for s in team.stacks])
    params = adapted(team, params, cfg, mesh)
    rounds = None if row.data == "rollouts" else Rounds(team, initial_of(params, cfg, mesh), items, env, cfg)
    if reward_model is not None and not row.learned:
        raise ValueError(
            f"a reward model was given, but algorithm={cfg.algorithm!r} has none: it is for marlhf and marlhf_iter"
        )
    if rounds is not None and row.learned:
        policy, rewarder = policy_config(cfg), LearnedRounds(rounds, reward_model or first_agent(team, params), cfg)
    initial = initial_digests(params, cfg)
    critics, state = start(team, params, policy, critic)
    about = {
        "team": team.describe(),
        "critics": Team(critics.specs).describe(),
        "initial": initial,
        "environment": describe(env),
        "data": fingerprint.of_data(items),
        "reward": fingerprint.of_reward(env),
    }
    if cfg.replay_rollout:
        if rounds is not None and rewarder is None:
            return TrainResult(replay_data(team, state, about, cfg).state, [], None, None)
        return replay(team, critics, state, about, cfg, policy)
    with open_run(cfg, state, about, wandb_config) as opened, explain_memory():
        saves, state = Saves(cfg, opened.savers), opened.state
        if rounds is None or rewarder is not None:
            log = RunLog(team, cfg, opened.writer)
            result = run(team, critics, state, items, policy, log, saves, eval_items, env, rewarder)
        else:
            result = run_rounds(team, state, rounds, cfg, RoundLog(team, cfg, opened.writer), saves, eval_items)
        if cfg.output_dir and cfg.save_models and not result.interrupted:
            result = result._replace(unsaved=write_models(cfg, team, result.state) or result.unsaved)
    return result


def replay(
    team: Team, critics: Critics, state: TeamState, about: dict[str, Any], cfg: TrainConfig, policy: TrainConfig
) -> TrainResult:
    """Make the one update of a file (`replay_rollout`) and print what it measures; nothing is written. policy: the settings by
    which the team is updated."""
    failed = read_failed_update(cfg)
    if cfg.resume:
        state = resume(cfg, state, {"config": dataclasses.asdict(cfg), **about, "bases": bases(state)}, read_only=True)
    state = state._replace(step=jnp.full_like(state.step, failed.step))  # its random keys
    state, learned = update(team, critics, state, failed.data, policy)
    print(json.dumps({"step": failed.step} | update_metrics(team, fetched(learned)), indent=1), flush=True)
    return TrainResult(without_gradients(state), [mean_return(failed.data)], None, None)


def start(team: Team, params: Sequence[Any], cfg: TrainConfig, critic: Agent | None) -> tuple[Critics, TeamState]:
    """The critics of a run and its state at step 0, on the devices where it stays."""
    learning, mesh = cfg.learning(), sharding.mesh_for(cfg.mesh, [len(s.members) for s in team.stacks])
    params = adapted(team, params, cfg, mesh)
    critics, of_critics = make_critics(team, params, learning, critic, cfg.seed)
    if shares_critic(learning):
        params = [with_value_head(of_stack) for of_stack in params]
    state, own = initial_state(team, params, cfg, mesh), algorithm(cfg.algorithm).critic == "own"
    learn_too = [stack.opt_state != () for stack in state.stacks] if own else [True]
    where = mesh if own else sharding.of_one_agent(mesh)
    move = sharding.place if own or mesh is None else sharding.put  # a copy of an agent's weights may lie on all devices
    judges = tuple(
        init_stack(move(weights, where), of_stack(cfg, critics.learning, s.members, team.num_agents)[0], learns=learns)
        for s, weights, learns in zip(critics.specs, of_critics, learn_too, strict=False)
    )
    return critics, state._replace(critics=judges)


def first_agent(team: Team, params: Sequence[Any]) -> Agent:
    """The first agent as it was loaded."""
    spec = team.stacks[0]
    return Agent("first", spec.config, merge(spec.config, jax.device_get(unstack(params[0], 0))), spec.tokenizer)


def initial_of(params: Sequence[Any], cfg: TrainConfig, mesh: Mesh | None) -> list[Any]:
    """Copies of the parameters of each stack, where the team will lie, if rounds need them: as the reference of preferences, or
    as the comparator. Training updates those given in place."""
    if cfg.comparator != "initial" and (algorithm(cfg.algorithm).learned or cfg.reference_free):
        return []
    return [sharding.place(map_own(jnp.copy, of_stack), mesh) for of_stack in params]


def run(
    team: Team,
    critics: Critics,
    state: TeamState,
    items: Sequence[dict],
    cfg: TrainConfig,
    log: RunLog,
    saves: Saves,
    eval_items: Sequence[dict],
    env: Environment,
    rewarder: LearnedRounds | None = None,
) -> TrainResult:
    """The loop from `state` on. rewarder: what rewards the team in place of the environment; evaluations are by the task."""
    task, env = env, env if rewarder is None else rewarder.env
    first = int(state.step)
    if first < cfg.num_updates:
        compile_all(programs_of_run(team, critics, state, tasks_at(items, cfg, first), eval_items, task, cfg))

    def evaluated(state: TeamState) -> Evaluation:
        return evaluate(team, [lora.model_of(s) for s in state.stacks], eval_items, task, cfg)

    def advance(step: int, state: TeamState) -> Advanced:
        if rewarder is not None:
            if step == first:
                rewarder.resume(first)
            log.about(rewarder.begin(step, state))
        tasks = partial(tasks_at, items, cfg, step)
        rollout = play_step(sampler_of(team, state), team, tasks(), env, cfg, step, tasks)
        if step == 0:  # of a run that goes on, an update without a valid reward is one as any other
            check_valid(rollout)
        played = time.monotonic()  # before the update, for which the call below may wait or not
        state, learned = update(team, critics, state, rollout, cfg)
        return state, partial(log.step, step, rollout, learned, played, tasks())

    done = loop(state, cfg, log, saves, advance, evaluated if eval_items else None)
    return TrainResult(done.state, log.rewards, done.before, done.after, done.interrupted, done.unsaved)


def check_settings(cfg: TrainConfig) -> None:
    """Refuse settings that do not fit each other, this machine or the output directory; experiments call it before they load
    models."""
    sharding.require_one_process()
    row = algorithm(cfg.algorithm)
    if row.data != "rollouts":
        if not makes_pairs(row):
            raise ValueError(f"algorithm={cfg.algorithm!r} learns from data that is given: use jmarl.training.fit.fit")
        check_rounds(cfg)
    if row.learned:
        policy = policy_config(cfg)
        if algorithm(policy.algorithm).data != "rollouts":
            raise ValueError(f"rl_algorithm={policy.algorithm!r} does not learn from rollouts: choose magrpo, grpo, maac, …")
        check_used({name: getattr(cfg, name) for name in OF_PAIRS}, cfg.algorithm)
        if cfg.num_generations < row.min_group:
            raise ValueError(
                f"num_generations={cfg.num_generations} is too small for algorithm={cfg.algorithm!r}: pairs need 2"
            )
        return check_settings(policy)
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
    if cfg.forks and (row.critic or row.advantage == "greedy_baseline" or cfg.dynamic_sampling):
        what = f"dynamic_sampling={cfg.dynamic_sampling}" if cfg.dynamic_sampling else f"algorithm={cfg.algorithm!r}"
        raise ValueError(f"joint_mode='counterfactual' does not go with {what}: its groups are alternatives to single messages")
    if cfg.dynamic_sampling and row.advantage not in GROUP_BASELINES:
        fits = ", ".join(name for name, other in ALGORITHMS.items() if other.advantage in GROUP_BASELINES)
        raise ValueError(
            f"dynamic_sampling={cfg.dynamic_sampling} has no meaning for algorithm={cfg.algorithm!r}, whose advantages do not "
            f"compare a group's returns; it is for {fits}"
        )
    check_options(dataclasses.asdict(cfg))
    check_row(cfg.algorithm, cfg)
    check_central(cfg)
    sharding.mesh_for(cfg.mesh, [1])
    check_directory(cfg)


def check_team(team: Team, cfg: TrainConfig) -> None:
    """Refuse a row that is not for teams of this size, and settings of single agents that do not fit."""
    if cfg.algorithm == "ppo" and team.num_agents > 1:
        raise ValueError(f"algorithm='ppo' is for a team of one, this one has {team.num_agents} agents: choose ippo or mappo")
    check_agents(cfg, team.num_agents)
    check_stacks(cfg, team)


def environment_of(
    team: Team,
    reward: Callable | Environment | TextEnvironment | SimulatedEnvironment,
    formatters: Sequence[Formatter] | None,
    transition: Transition | None,
    cfg: TrainConfig,
) -> Environment:
    """The environment that a run is played in. reward: also a plain function, as `make_reward` takes it."""
    env: Any = side_by_side(reward, cfg.num_turns)
    missing = [name for name in ("reset", "step", "observe") if not callable(getattr(env, name, None))]
    if missing and callable(env) and not isinstance(env, RewardFunction | type):
        env = RewardFunction(env, num_agents=team.num_agents)
    if not isinstance(env, RewardFunction):
        if isinstance(env, type):
            raise TypeError(f"{env.__name__} is a class: give an environment, {env.__name__}(...)")
        if missing:
            raise TypeError(
                f"reward is a {type(env).__name__} without {', '.join(missing)}: give make_reward(function, num_agents="
                f"{team.num_agents}) or an environment; one of a single episode is a TextEnvironment, or goes into "
                f"LockStep(env, {team.num_agents})"
            )
        if formatters or transition:
            raise ValueError("an environment writes its prompts itself: leave formatters and external_transition out")
        turns = getattr(env, "max_turns", 1)
        if cfg.num_turns < turns:
            raise ValueError(
                f"num_turns={cfg.num_turns}, and an episode of this environment has up to {turns}: set num_turns={turns}"
            )
        return env
    formatters = [formatters] * team.num_agents if callable(formatters) else formatters or [prompt_of] * team.num_agents
    if len(formatters) != team.num_agents:
        raise ValueError(f"{len(formatters)} formatters for {team.num_agents} agents: give one an agent")
    if cfg.num_turns > 1 and transition is None:
        raise ValueError(f"num_turns={cfg.num_turns} needs external_transition, which writes the prompts of the next turn")
    if cfg.num_turns == 1 and transition is not None:
        raise ValueError("external_transition writes the prompts of later turns, and num_turns=1 has none: set num_turns")
    return Rewarded(env, formatters, transition)


def check_run(items: Sequence[dict], cfg: TrainConfig, wandb_config: Mapping | None) -> None:
    """Refuse what would fail later, with the number and the name."""
    check_settings(cfg)
    if not items:
        raise ValueError("there are no items to train on")
    if not isinstance(items[0], Mapping):
        raise TypeError(f"items are dicts, such as {{'prompt': 'Describe a city:'}}; the first is {items[0]!r:.60}")
    if wandb_config is not None and not cfg.output_dir:
        raise ValueError("wandb_config was given without output_dir: W&B keeps its files there, so set output_dir")
