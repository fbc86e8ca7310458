"""`jmarl.fit`: train a team on given data, on preference pairs (dpo, madpo, reward_model) or on texts (sft).

The loop, settings, checkpoints, logs and exact resume are those of `train`. Log-probabilities under the reference are computed
once, before the first step. Settings of rollouts have no effect here and are refused.
"""

from collections.abc import Sequence
from typing import Any

from jmarl.config import TrainConfig
from jmarl.files.interrupt import raised_again
from jmarl.logs.goodput import CLOCK
from jmarl.logs.terminal import watched
from jmarl.preferences.pairs import Pair, Trajectory
from jmarl.processes import exchange
from jmarl.runs.loop import repeat_update, run_training
from jmarl.runs.prepare import of_this_process, prepare
from jmarl.runs.records import FitResult
from jmarl.runs.run import Task
from jmarl.team import Team, check_arguments


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
    cfg = of_this_process(cfg)
    with CLOCK.running(), watched("preparing the run", cfg.run.progress, CLOCK.reader()):
        run, state = prepare(cfg, team, Task(None, data, eval_data), params=params, wandb_config=wandb_config)
        source = run.make_source(state)
    team = team.in_context(run.cfg.run.long_context)
    if run.cfg.run.replay_rollout:
        return FitResult(team, repeat_update(run, source, state)[0], [], None, None)
    result, log = run_training(run, source, state, wandb_config)
    return FitResult(team, result.state, log.losses, *result[1:])
