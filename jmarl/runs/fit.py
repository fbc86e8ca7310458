"""`jmarl.fit`: train a team on given data, on preference pairs (dpo, madpo, reward_model) or on texts (sft).

The loop, settings, checkpoints, logs and exact resume are those of `train`. Log-probabilities under the reference are computed
once, before the first step. Settings of rollouts have no effect here and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from jmarl.config import TrainConfig
from jmarl.files import fingerprint
from jmarl.files.run_directory import resolve_auto, resolve_resume
from jmarl.learning.choose import Work
from jmarl.learning.critics import Critics
from jmarl.learning.per_agent import initial_state, with_adapters
from jmarl.learning.setup import Setup, make_setup
from jmarl.logs.data_log import DataLog
from jmarl.logs.goodput import CLOCK
from jmarl.logs.terminal import say, watched
from jmarl.models import sharding
from jmarl.models.heads import with_value_head
from jmarl.preferences.data_source import batch_size, data_source, encode, longest_batches
from jmarl.preferences.encoding import Examples
from jmarl.preferences.pairs import Pair, Trajectory, shared_examples
from jmarl.runs.checks import check_data, check_fit, check_team
from jmarl.runs.loop import repeat_update, run_training
from jmarl.runs.precompile import Updates, keep_programs, updates_of
from jmarl.runs.records import FitResult
from jmarl.runs.start import initial_digests, say_what_data, say_what_is_shared, say_what_runs, settle_updates
from jmarl.team import Team, initial_params
from jmarl.types import Batches, TeamState


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
    cfg = resolve_auto(resolve_resume(cfg))
    with CLOCK.running(), watched("preparing the run", cfg.run.progress, CLOCK.reader()):
        setup, params, identity = prepare_fit(team, data, cfg, params, eval_data, wandb_config)
        algorithm, mesh = setup.algorithm, sharding.mesh_for(cfg.run.mesh, [len(spec.members) for spec in team.stacks])
        with CLOCK.phase("reference" if algorithm.row.data == "pairs" else "data"):
            examples, held_out = (encode(team, params, part, algorithm, cfg) for part in (data, eval_data))
        state = initial_state(team, params, algorithm, cfg.run, mesh)
        setup, cfg = settle_updates(setup, state, cfg, partial(longest_update, setup, state, examples))
        source = data_source(setup, examples, held_out)
    if cfg.run.replay_rollout:
        return FitResult(team, repeat_update(setup, state, source, identity, cfg)[0], [], None, None)
    result, log = run_training(setup, state, source, identity, cfg, DataLog, wandb_config)
    return FitResult(team, result.state, log.losses, *result[1:])


def longest_update(setup: Setup, state: TeamState, examples: Examples) -> tuple[Work, Updates]:
    """Return an update on the longest prompts and rows of the examples, and a function from a setup to its programs."""
    batches = longest_batches(setup.team, examples, setup.algorithm)
    tokens = max(x.prompts.shape[1] * (x.prompts.shape[2] + x.tokens.shape[2] * x.tokens.shape[3]) for x in batches)
    work = Work.of(setup.team, setup.cfg, tokens, batch_size(setup.algorithm))
    return work, lambda setup: updates_of(setup, state, Batches(batches))


def prepare_fit(
    team: Team,
    data: Sequence[Pair] | Sequence[Trajectory],
    cfg: TrainConfig,
    params: Sequence[Any] | None,
    eval_data: Sequence[Pair] | Sequence[Trajectory],
    wandb_config: dict | None = None,
) -> tuple[Setup, list[Any], dict[str, Any]]:
    """Check the arguments of `fit`. Returns its setup, the parameters of each stack on the devices, and what identifies the
    run. Writes nothing, so that a dry run can do the same."""
    algorithm = check_fit(cfg, wandb_config)
    keep_programs(say if cfg.run.progress else None)
    check_data(data, cfg)
    if not isinstance(eval_data, list | tuple) or eval_data:
        check_data(eval_data, cfg)
    check_team(team, cfg)
    mesh = sharding.mesh_for(cfg.run.mesh, [len(spec.members) for spec in team.stacks])
    params = initial_params(team, params, cfg.lora.lora_rank > 0)
    say_what_runs(team, params, cfg)
    say_what_data(data, eval_data, cfg)
    say_what_is_shared(shared_examples(data, eval_data), cfg)
    params = with_adapters(team, params, cfg, mesh)
    if algorithm.row.margin == "score":  # params of an earlier fit already have a head
        params = [stack if "value" in stack else with_value_head(stack) for stack in params]
    params = [sharding.place(stack, mesh) for stack in params]
    identity = {"team": team.describe(), "critics": [], "data": fingerprint.of_data(data)}
    identity["initial"] = initial_digests(params, algorithm)
    return make_setup(team, Critics((), algorithm), algorithm, cfg, mesh), params, identity
