"""Train a team on what it plays: `jmarl.train`. It checks what it is given, prepares the state, chooses how batches are made
by the row of the algorithm, and hands all of it to the loop (`loop.run_loop`), which shows a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jmarl.config import TrainConfig
from jmarl.envs.base import Environment, TextEnvironment, describe
from jmarl.envs.messages import SimulatedEnvironment
from jmarl.envs.reward_environment import Formatter, Transition
from jmarl.learning.per_agent import with_adapters
from jmarl.memory import explain_memory
from jmarl.models import sharding
from jmarl.models.hub.agents import Agent
from jmarl.rollout.prompt_check import items_that_fit
from jmarl.team import Team, initial_params
from jmarl.training.checks import check_run, check_team, environment_of
from jmarl.training.files import fingerprint
from jmarl.training.files.run_directory import open_run
from jmarl.training.files.saving import Saves, write_models
from jmarl.training.logs.data_log import DataLog
from jmarl.training.logs.rollout_log import RolloutLog, mean_return
from jmarl.training.loop import repeat_update, run_loop
from jmarl.training.precompile import compile_all, programs_of_run
from jmarl.training.preferences.pair_rounds import Rounds, pair_source
from jmarl.training.preferences.reward_model import learned_source, policy_config
from jmarl.training.records import TrainResult
from jmarl.training.rollouts import rollout_source, tasks_at
from jmarl.training.start import first_agent, initial_digests, initial_of, start


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
    row = algorithm.row
    if reward_model is not None and not row.learned:
        raise ValueError(
            f"a reward model was given, but algorithm={cfg.algorithm!r} has none: it is for marlhf and marlhf_iter"
        )
    items, eval_items = items_that_fit(team, env, items, eval_items, cfg)
    mesh = sharding.mesh_for(cfg.run.mesh, [len(s.members) for s in team.stacks])
    params = with_adapters(team, initial_params(team, params, cfg.lora.lora_rank > 0), cfg, mesh)
    initial = initial_digests(params, algorithm)
    # What is copied of the parameters is copied before `start`, which updates them in place.
    rounds = Rounds(team, initial_of(params, algorithm, mesh), items, env, algorithm, cfg) if row.makes_pairs else None
    judge = (reward_model or first_agent(team, params)) if row.learned else None
    setup, state = start(team, params, policy_config(cfg) if row.learned else cfg, critic)
    if rounds is None:
        source = rollout_source(setup, items, env, eval_items)
    elif judge is None:
        source = pair_source(setup, rounds, eval_items)
    else:
        source = learned_source(setup, rounds, judge, eval_items, algorithm, cfg)
    identity = {
        "team": team.describe(),
        "critics": Team(setup.critics.specs).describe(),
        "initial": initial,
        "environment": describe(env),
        "data": fingerprint.of_data(items),
        "reward": fingerprint.of_reward(env),
    }
    plays = rounds is None or row.learned
    if cfg.run.replay_rollout:
        state, experience = repeat_update(setup, state, source, identity, cfg)
        return TrainResult(team, state, [mean_return(experience.rollout)] if plays else [], None, None)
    with open_run(cfg, state, identity, wandb_config) as opened, explain_memory():
        state, log = opened.state, (RolloutLog if plays else DataLog)(team, cfg, opened.writer)
        if plays and (first := int(state.step)) < cfg.run.num_updates:
            compile_all(programs_of_run(setup, state, tasks_at(items, cfg, first), eval_items, env))
        if rounds is not None and judge is None:
            rounds.resume(int(state.step))
        ending = run_loop(setup, state, source, log, Saves(cfg.run, opened.savers))
        result = TrainResult(team, ending.state, log.rewards, *ending[1:])
        if cfg.run.output_dir and cfg.run.save_models and not result.interrupted:
            result = result._replace(unsaved=write_models(cfg.run, team, result.state) or result.unsaved)
    return result
