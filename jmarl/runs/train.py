"""`jmarl.train`: train a team on its own completions.

Checks the arguments, prepares the initial state, chooses the source of experience, and runs the loop in `loop.run_loop`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from jmarl.config import TrainConfig
from jmarl.envs.base import Environment, TextEnvironment
from jmarl.envs.messages import SimulatedEnvironment
from jmarl.envs.rows import Rows, read_rows
from jmarl.evaluation.evaluate import evaluation_of
from jmarl.files.run_directory import resolve_auto, resolve_resume
from jmarl.learning.choose import Work
from jmarl.learning.per_agent import with_adapters
from jmarl.learning.setup import Setup
from jmarl.logs.data_log import DataLog
from jmarl.logs.goodput import CLOCK
from jmarl.logs.rollout_log import RolloutLog, mean_return
from jmarl.logs.terminal import say, watched
from jmarl.models import sharding
from jmarl.preferences.encoding import AgentTokens, Examples
from jmarl.preferences.pair_rounds import Rounds, pair_source
from jmarl.preferences.reward_model import LearnedRounds, policy_config, with_reward_models
from jmarl.rollout.experience import Source
from jmarl.rollout.prompt_check import items_that_fit
from jmarl.runs.checks import check_run, check_team, environment_of
from jmarl.runs.fit import fit
from jmarl.runs.fit import longest_update as longest_data_update
from jmarl.runs.loop import repeat_update, run_training
from jmarl.runs.precompile import Updates, keep_programs, longest_prompts, longest_update
from jmarl.runs.records import TrainResult
from jmarl.runs.rollouts import EvalMetrics, rollout_source, with_empty_slots, with_metrics
from jmarl.runs.start import (
    copy_initial,
    first_agent,
    initial_digests,
    run_identity,
    say_what_is_shared,
    say_what_runs,
    settle_updates,
    start,
)
from jmarl.team import Team, initial_params
from jmarl.types import TeamState


def train(
    team: Team,
    reward: Callable | Environment | TextEnvironment | SimulatedEnvironment,
    items: Rows,
    cfg: TrainConfig,
    *,
    params: Sequence[Any] | None = None,
    eval_items: Rows = (),
    wandb_config: dict | None = None,
    eval_metrics: EvalMetrics | None = None,
) -> TrainResult:
    """Train a team on items and return the result.

    Args:
        team: from `Team.load` or `Team.of`, or from `make_team` together with params. It may bring the initial model of its
            critics and reward model.
        reward: a function of completions (one list per agent), the result of `make_reward`, or an environment. Formatters that
            write prompts, and the prompts of later turns, are part of an environment: `RewardEnvironment`.
        items: dicts with a `prompt`, or with the keys that the environment reads, in anything that `jmarl.envs.rows.read_rows`
            reads: a list, a data set, a DataFrame, a file.
        params: parameters [A, ...] of each stack, instead of those of the team's agents. They are donated. The result of
            `policies` for an earlier state works too, and continues to train its adapters.
        eval_items: held-out items, as items; evaluated before training, after it and every `eval_every` updates.
        wandb_config: keyword arguments of `wandb.init`; None: no W&B.
        eval_metrics: (eval_items, their rollout) -> further metrics of an evaluation by name, logged as `eval/<name>`.
    """
    cfg = resolve_resume(cfg)
    with CLOCK.running(), watched("preparing the run", cfg.run.progress, CLOCK.reader()):
        run = prepare(team, reward, items, cfg, params, eval_items, wandb_config, eval_metrics)
    if cfg.run.replay_rollout:
        state, experience = repeat_update(run.setup, run.state, run.source, run.identity, run.cfg)
        return TrainResult(team, state, [mean_return(experience.rollout)] if run.plays else [], None, None)
    log_class = RolloutLog if run.plays else DataLog
    result, log = run_training(run.setup, run.state, run.source, run.identity, run.cfg, log_class, wandb_config)
    return TrainResult(team, result.state, log.rewards, *result[1:])


class Prepared(NamedTuple):
    """A run that is checked and resolved, before its directory is opened."""

    setup: Setup
    state: TeamState  # at step 0
    source: Source
    identity: dict[str, Any]  # see `open_run`
    cfg: TrainConfig  # without auto
    plays: bool  # whether it learns from rollouts; otherwise from pairs


def prepare(
    team: Team,
    reward: Callable | Environment | TextEnvironment | SimulatedEnvironment,
    items: Sequence[dict],
    given: TrainConfig,
    params: Sequence[Any] | None,
    eval_items: Sequence[dict],
    wandb_config: dict | None = None,
    eval_metrics: EvalMetrics | None = None,
) -> Prepared:
    """Check the arguments of `train`, and prepare its run. Writes nothing, so that a dry run can do the same."""
    cfg = resolve_auto(given)
    env = environment_of(team, reward, cfg)
    items, eval_items = read_rows(items), read_rows(() if eval_items is None else eval_items)
    all_items = items
    algorithm = check_run(items, cfg, wandb_config)
    keep_programs(say if cfg.run.progress else None)
    check_team(team, cfg)
    row = algorithm.row
    items, eval_items, shared = items_that_fit(team, env, items, eval_items, cfg)
    say_what_is_shared(shared, cfg)
    mesh = sharding.mesh_for(cfg.run.mesh, [len(spec.members) for spec in team.stacks])
    params = initial_params(team, params, cfg.lora.lora_rank > 0)
    say_what_runs(team, params, cfg)
    params = with_adapters(team, params, cfg, mesh)
    # `start` donates the parameters, so digests and copies of them are made before.
    initial = initial_digests(params, algorithm)
    rounds = Rounds(team, copy_initial(params, algorithm, mesh), items, env, algorithm, cfg) if row.makes_pairs else None
    judge = (team.reward_model or first_agent(team, params)) if row.learned else None
    setup, state = start(team, params, policy_config(cfg) if row.learned else cfg)
    if cfg.episodes.async_steps:
        state = with_empty_slots(setup, state, items, env)
    setup, cfg = settle_updates(setup, state, cfg, partial(largest_update, setup, state, items, env))
    if rounds is None:
        source = rollout_source(setup, items, env, eval_items)
    elif judge is None:
        source = pair_source(setup, rounds, eval_items)
    else:
        learned = LearnedRounds(rounds, judge, algorithm, given, fit)  # reward models choose for themselves
        rollouts = rollout_source(setup, items, learned.env, eval_items)
        source = with_reward_models(rollouts, learned, evaluation_of(team, eval_items, env, setup.cfg))
    if source.evaluate is not None and eval_metrics is not None:
        source = source._replace(evaluate=with_metrics(source.evaluate, eval_items, eval_metrics))
    identity = run_identity(setup, all_items, env) | {"initial": initial}
    return Prepared(setup, state, source, identity, cfg, rounds is None or judge is not None)


def largest_update(setup: Setup, state: TeamState, items: Sequence[dict], env: Environment) -> tuple[Work, Updates]:
    """Return the largest update of a run on items, and a function from a setup to its programs."""
    widths = longest_prompts(setup, items, env)
    if setup.algorithm.row.data == "rollouts":
        return longest_update(setup, state, widths)
    row = [0] * setup.cfg.sampling.max_new_tokens
    agents = {agent: width for spec, width in zip(setup.team.stacks, widths, strict=True) for agent in spec.order}
    pair = [AgentTokens([0] * agents[agent], (row, row)) for agent in range(setup.team.num_agents)]
    return longest_data_update(setup, state, Examples([pair]))
