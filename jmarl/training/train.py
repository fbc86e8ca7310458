"""The training loop. One step:

    tasks    = items of the step              host; their order follows from (seed, step) alone
    rollout  = play(team, tasks)              host and device; all agents of a stack sampled at once
    batches  = judge(critics, rollout)        host returns and critics' values become device arrays
    state    = update(state, batches)         device; jitted, donated
    metrics of the step before                host; one step late, so that the device never waits for a log

Nothing but `TeamState` and the step number goes from one step to the next, so a resumed run goes on bit for bit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jmarl.algorithms import ALGORITHMS, Algorithm, check_row, find_row, resolve
from jmarl.config import TrainConfig, flat
from jmarl.envs.base import Environment, TextEnvironment, describe
from jmarl.envs.messages import SimulatedEnvironment
from jmarl.envs.reward_environment import Formatter, RewardEnvironment, Transition, default_formatter
from jmarl.envs.rewards import RewardFunction
from jmarl.envs.vector import vectorize
from jmarl.evaluation.evaluate import Evaluation, evaluate
from jmarl.learning.critics import make_critics
from jmarl.learning.optimizer import init_stack
from jmarl.learning.per_agent import check_agents, check_central, check_stacks, for_stack, initial_state, with_adapters
from jmarl.learning.setup import Setup
from jmarl.memory import explain_memory
from jmarl.models import lora, sharding
from jmarl.models.heads import with_value_head
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.peft import merge
from jmarl.models.stack import fetched, map_own, unstack
from jmarl.rollout.prompt_check import items_that_fit
from jmarl.team import Team, bases, initial_params, without_gradients
from jmarl.training.files import fingerprint
from jmarl.training.files.failed_update import read_failed_update
from jmarl.training.files.run_directory import check_directory, open_run, resume
from jmarl.training.files.saving import Saves, write_models
from jmarl.training.fit import initial_digests, replay_data_update
from jmarl.training.logs.step_log import RunLog, TrainResult, mean_return, update_metrics
from jmarl.training.loop import Advanced, loop
from jmarl.training.precompile import compile_all, programs_of_run
from jmarl.training.preferences.reward_model import LearnedRounds, policy_config
from jmarl.training.preferences.rounds import RoundLog, Rounds, check_rounds, run_rounds
from jmarl.training.step import check_valid, play_step, sampler_of, tasks_at, update
from jmarl.types import TeamState


def train(
    team: Team,
    reward: Callable | Environment | TextEnvironment | SimulatedEnvironment,
    items: Sequence[dict],
    cfg: TrainConfig,
    *,
    params: Sequence[Any] | None = None,
    formatters: Sequence[Formatter] | None = None,
    external_transition: Transition | None = None,
    critic: Agent | None = None,
    reward_model: Agent | None = None,
    eval_items: Sequence[dict] = (),
    wandb_config: dict | None = None,
) -> TrainResult:
    """Train a team on items and return its final state.

    Args:
        team: of `Team.load` or `Team.of`, or of `make_team` together with params.
        reward: a function of completions (one list per agent), `make_reward` of several, or an environment.
        items: dicts with a `prompt`, or with what the formatters or the environment read.
        params: each stack's parameters [A, ...], in place of those of the team's agents. They are consumed: training
            updates them in place. Also what `policies` returns of an earlier state, to train its adapters on.
        formatters: item -> prompt, one for all agents or one per agent; for a reward function.
        external_transition: writes the prompts of later turns, see `reward_environment.RewardEnvironment`.
        critic: what critics start from; None: their agents, for a central one the first.
        reward_model: what the reward model of marlhf and marlhf_iter starts from; None: the first agent.
        eval_items: held out; evaluated before and after training and every `eval_every` updates.
        wandb_config: keyword arguments of `wandb.init`.
    """
    env = environment_of(team, reward, formatters, external_transition, cfg)
    algorithm = check_run(items, cfg, wandb_config)
    check_team(team, cfg)
    items, eval_items = items_that_fit(team, env, items, eval_items, cfg)
    row, policy, rewarder = algorithm.row, cfg, None
    mesh = sharding.mesh_for(cfg.run.mesh, [len(s.members) for s in team.stacks])
    params = with_adapters(team, initial_params(team, params, cfg.lora.lora_rank > 0), cfg, mesh)
    rounds = None if row.data == "rollouts" else Rounds(team, initial_of(params, algorithm, mesh), items, env, algorithm, cfg)
    if reward_model is not None and not row.learned:
        raise ValueError(
            f"a reward model was given, but algorithm={cfg.algorithm!r} has none: it is for marlhf and marlhf_iter"
        )
    if rounds is not None and row.learned:
        policy, rewarder = policy_config(cfg), LearnedRounds(rounds, reward_model or first_agent(team, params), algorithm, cfg)
    initial = initial_digests(params, algorithm)
    setup, state = start(team, params, policy, critic)
    about = {
        "team": team.describe(),
        "critics": Team(setup.critics.specs).describe(),
        "initial": initial,
        "environment": describe(env),
        "data": fingerprint.of_data(items),
        "reward": fingerprint.of_reward(env),
    }
    if cfg.run.replay_rollout:
        if rounds is not None and rewarder is None:
            return TrainResult(team, replay_data_update(team, state, about, algorithm, cfg).state, [], None, None)
        return replay_update(setup, state, about, cfg)
    with open_run(cfg, state, about, wandb_config) as opened, explain_memory():
        saves, state = Saves(cfg.run, opened.savers), opened.state
        if rounds is None or rewarder is not None:
            log = RunLog(team, cfg, opened.writer)
            result = train_from(setup, state, items, log, saves, eval_items, env, rewarder)
        else:
            result = run_rounds(setup, state, rounds, RoundLog(team, cfg, opened.writer), saves, eval_items)
        if cfg.run.output_dir and cfg.run.save_models and not result.interrupted:
            result = result._replace(unsaved=write_models(cfg.run, team, result.state) or result.unsaved)
    return result


def replay_update(setup: Setup, state: TeamState, about: dict[str, Any], cfg: TrainConfig) -> TrainResult:
    """Make the one update of a file (`replay_rollout`) and print its metrics; nothing is written. cfg: of the run, whose team
    may be updated by other settings (those of `setup`)."""
    failed = read_failed_update(cfg)
    if cfg.run.resume:
        state = resume(cfg, state, {"config": flat(cfg), **about, "bases": bases(state)}, read_only=True)
    state = state._replace(step=jnp.full_like(state.step, failed.step))  # its random keys
    state, metrics = update(setup, state, failed.data)
    print(json.dumps({"step": failed.step} | update_metrics(setup.team, fetched(metrics)), indent=1), flush=True)
    return TrainResult(setup.team, without_gradients(state), [mean_return(failed.data)], None, None)


def start(team: Team, params: Sequence[Any], cfg: TrainConfig, critic: Agent | None) -> tuple[Setup, TeamState]:
    """Return who learns and how, and the state at step 0, on the devices where it stays."""
    algorithm, mesh = resolve(cfg), sharding.mesh_for(cfg.run.mesh, [len(s.members) for s in team.stacks])
    params = with_adapters(team, params, cfg, mesh)
    critics, critic_params = make_critics(team, params, algorithm, critic, cfg.run.seed)
    if algorithm.has_value_head:
        params = [with_value_head(stack) for stack in params]
    state, own = initial_state(team, params, algorithm, cfg.run, mesh), algorithm.row.critic == "own"
    learns = [stack.opt_state != () for stack in state.stacks] if own else [True]
    critic_mesh = mesh if own else sharding.of_one_agent(mesh)
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
    """The first agent as it was loaded."""
    spec = team.stacks[0]
    return Agent("first", spec.config, merge(spec.config, jax.device_get(unstack(params[0], 0))), spec.tokenizer)


def initial_of(params: Sequence[Any], algorithm: Algorithm, mesh: Mesh | None) -> list[Any]:
    """Return copies of the parameters of each stack, on the mesh, if rounds need them as the reference of preferences or as the
    comparator. Training updates those given in place."""
    settings = algorithm.preference
    if settings.comparator != "initial" and (algorithm.row.learned or settings.reference_free):
        return []
    return [sharding.place(map_own(jnp.copy, stack), mesh) for stack in params]


def train_from(
    setup: Setup,
    state: TeamState,
    items: Sequence[dict],
    log: RunLog,
    saves: Saves,
    eval_items: Sequence[dict],
    env: Environment,
    rewarder: LearnedRounds | None = None,
) -> TrainResult:
    """Run the loop from `state` on. rewarder: rewards the team in place of the environment; evaluations use the environment."""
    team, cfg = setup.team, setup.cfg
    task, env = env, env if rewarder is None else rewarder.env
    first = int(state.step)
    if first < cfg.run.num_updates:
        compile_all(programs_of_run(setup, state, tasks_at(items, cfg, first), eval_items, task))

    def evaluated(state: TeamState) -> Evaluation:
        return evaluate(team, [lora.model_of(s) for s in state.stacks], eval_items, task, cfg)

    def advance(step: int, state: TeamState) -> Advanced:
        if rewarder is not None:
            if step == first:
                rewarder.resume(first)
            log.about(rewarder.begin(step, state))
        tasks = partial(tasks_at, items, cfg, step)
        rollout = play_step(sampler_of(team, state), setup, tasks(), env, step, tasks)
        if step == 0:  # a resumed run may have an update without a valid reward
            check_valid(rollout)
        played = time.monotonic()  # before the update, for which the next call may wait or not
        state, metrics = update(setup, state, rollout)
        return state, partial(log.step, step, rollout, metrics, played, tasks())

    done = loop(state, cfg.run, log, saves, advance, evaluated if eval_items else None)
    return TrainResult(team, done.state, log.rewards, done.before, done.after, done.interrupted, done.unsaved)


def check_settings(cfg: TrainConfig) -> Algorithm:
    """Return the algorithm of a run. Raises ValueError for settings that do not fit each other, this machine or the output
    directory; experiments call it before they load models."""
    sharding.require_one_process()
    algorithm = resolve(cfg)
    row, group = algorithm.row, cfg.episodes.num_generations
    if row.data != "rollouts":
        if not row.makes_pairs:
            raise ValueError(f"algorithm={cfg.algorithm!r} learns from data that is given: use jmarl.fit")
        check_rounds(cfg, algorithm)
    if row.learned:
        policy = policy_config(cfg)
        if find_row(policy.algorithm).data != "rollouts":
            raise ValueError(f"rl_algorithm={policy.algorithm!r} does not learn from rollouts: choose magrpo, grpo, maac, …")
        if group < row.min_group:
            raise ValueError(f"num_generations={group} is too small for algorithm={cfg.algorithm!r}: pairs need 2")
        check_settings(policy)
        return algorithm
    smallest = 2 if row.critic and cfg.critic.critic_type == "q" else row.min_group
    if group < smallest:
        raise ValueError(
            f"num_generations={group} is too small for algorithm={cfg.algorithm!r}: its baseline needs at least {smallest}"
        )
    check_joint_mode(cfg, algorithm)
    check_row(algorithm)
    check_central(cfg, algorithm)
    sharding.mesh_for(cfg.run.mesh, [1])
    check_directory(cfg)
    return algorithm


def check_joint_mode(cfg: TrainConfig, algorithm: Algorithm) -> None:
    """Raise a ValueError for joint actions and dynamic sampling that the algorithm's baseline does not fit."""
    row, episodes = algorithm.row, cfg.episodes
    other_baseline = row.critic or row.baseline == "greedy"
    if episodes.cross_credit == "sum" and other_baseline:
        raise ValueError(
            f"cross_credit='sum' does not fit algorithm={cfg.algorithm!r}: its baseline is of a mean; use cross_credit='mean'"
        )
    if episodes.forks and (other_baseline or episodes.dynamic_sampling):
        setting = (
            f"dynamic_sampling={episodes.dynamic_sampling}" if episodes.dynamic_sampling else f"algorithm={cfg.algorithm!r}"
        )
        raise ValueError(
            f"joint_mode='counterfactual' does not go with {setting}: its groups are alternatives to single completions"
        )
    if episodes.dynamic_sampling and not row.compares_group:
        users = ", ".join(name for name, other in ALGORITHMS.items() if other.compares_group)
        raise ValueError(
            f"dynamic_sampling={episodes.dynamic_sampling} has no effect for algorithm={cfg.algorithm!r}, whose advantages do "
            f"not compare the returns of a group; it is for {users}"
        )


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
    env: Any = vectorize(reward, cfg.episodes.num_turns)
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
        if cfg.episodes.num_turns < turns:
            raise ValueError(
                f"num_turns={cfg.episodes.num_turns}, and an episode of this environment has up to {turns}: "
                f"set num_turns={turns}"
            )
        return env
    formatters = [formatters] * team.num_agents if callable(formatters) else formatters or [default_formatter] * team.num_agents
    if len(formatters) != team.num_agents:
        raise ValueError(f"{len(formatters)} formatters for {team.num_agents} agents: give one an agent")
    if cfg.episodes.num_turns > 1 and transition is None:
        raise ValueError(
            f"num_turns={cfg.episodes.num_turns} needs external_transition, which writes the prompts of the next turn"
        )
    if cfg.episodes.num_turns == 1 and transition is not None:
        raise ValueError("external_transition writes the prompts of later turns, and num_turns=1 has none: set num_turns")
    return RewardEnvironment(env, formatters, transition)


def check_run(items: Sequence[dict], cfg: TrainConfig, wandb_config: Mapping | None) -> Algorithm:
    """Return the algorithm of a run. Raises an error for settings and items that would fail later."""
    algorithm = check_settings(cfg)
    if not items:
        raise ValueError("there are no items to train on")
    if not isinstance(items[0], Mapping):
        raise TypeError(f"items are dicts, such as {{'prompt': 'Describe a city:'}}; the first is {items[0]!r:.60}")
    if wandb_config is not None and not cfg.run.output_dir:
        raise ValueError("wandb_config was given without output_dir: W&B keeps its files there, so set output_dir")
    return algorithm
