"""`jmarl.train`: train a team on its own completions. `jmarl.fit`: train it on given data, on preference pairs (dpo, madpo,
reward_model) or on texts (sft).

Both are one loop with the same settings, checkpoints, logs and exact resume. For given data log-probabilities under the
reference are computed once, before the first step; settings of rollouts have no effect there and are refused.
"""

from collections.abc import Sequence
from typing import Any

from jmarl.config import TrainConfig
from jmarl.envs.data import Pair, Trajectory
from jmarl.envs.rows import Rows
from jmarl.evaluation.environment import Reward
from jmarl.evaluation.evaluate import EvalMetrics
from jmarl.files.interrupt import raised_again
from jmarl.logs.goodput import CLOCK
from jmarl.logs.rollout_log import mean_return
from jmarl.logs.terminal import watched
from jmarl.processes import exchange
from jmarl.rollout.experience import Source
from jmarl.rollout.turns import Rollout
from jmarl.runs.loop import repeat_update, run_training
from jmarl.runs.prepare import of_this_process, prepare
from jmarl.runs.records import FitResult, TrainResult
from jmarl.runs.run import PreparedRun, Task
from jmarl.team import Team, check_arguments


@exchange.tells_others
@raised_again()
def train(
    team: Team,
    reward: Reward,
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
        eval_metrics: (eval_items, their rollout) -> further metrics of an evaluation by name, logged as `eval/<name>`. Names
            of the library, such as reward, are refused.
    """
    check_arguments(team, cfg, reward)
    task = Task(reward, items, eval_items, eval_metrics, fit=fit)
    run, source, state = prepared(cfg, team, task, params=params, wandb_config=wandb_config)
    team = team.in_context(run.cfg.run.long_context)
    if run.cfg.run.replay_rollout:
        state, experience = repeat_update(run, state)
        return TrainResult(team, state, [mean_return(experience)] if isinstance(experience, Rollout) else [], None, None)
    result, log = run_training(run, source, state, wandb_config)
    return TrainResult(team, result.state, log.rewards, *result[1:])


@exchange.tells_others
@raised_again()
def fit(
    team: Team,
    data: Sequence[Pair] | Sequence[Trajectory],
    cfg: TrainConfig,
    *,
    params: Sequence[Any] | None = None,
    eval_data: Sequence[Pair] | Sequence[Trajectory] = (),
    wandb_config: dict | None = None,
) -> FitResult:
    """Train a team on pairs or trajectories and return the result.

    Args:
        team: from `Team.load` or `Team.of`, or from `make_team` together with params.
        data: from `load_pairs` or `load_trajectories`.
        params: parameters [A, ...] of each stack, instead of those of the team's agents: the initial weights, and the reference
            of preferences. They are donated.
        eval_data: held-out data; evaluated before training, after it and every `eval_every` updates.
        wandb_config: keyword arguments of `wandb.init`; None: no W&B.
    """
    check_arguments(team, cfg)
    run, source, state = prepared(cfg, team, Task(None, data, eval_data), params=params, wandb_config=wandb_config)
    team = team.in_context(run.cfg.run.long_context)
    if run.cfg.run.replay_rollout:
        return FitResult(team, repeat_update(run, state)[0], [], None, None)
    result, log = run_training(run, source, state, wandb_config)
    return FitResult(team, result.state, log.losses, *result[1:])


def prepared(cfg: TrainConfig, team: Team, task: Task, **given: Any) -> tuple[PreparedRun, Source, Any]:
    """Return a run, its source of experience and its state at step 0. Arguments as of `prepare`."""
    cfg = of_this_process(cfg)
    with CLOCK.running(), watched("preparing the run", cfg.run.progress, CLOCK.reader()):
        run, state = prepare(cfg, team, task, **given)
        return run, run.kind.source(run, state), state
