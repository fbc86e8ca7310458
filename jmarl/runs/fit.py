"""`jmarl.fit`: train a team on given data, on preference pairs (dpo, madpo, reward_model) or on texts (sft).

The loop, settings, checkpoints, logs and exact resume are those of `train`. Log-probabilities under the reference are computed
once, before the first step. Settings of rollouts have no effect here and are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from jmarl.algorithms import Algorithm, find_row, resolve
from jmarl.config import Episodes, Sampling, TrainConfig, flat
from jmarl.files import fingerprint
from jmarl.files.run_directory import check_directory, resolve_auto, resolve_resume
from jmarl.learning.choose import Work
from jmarl.learning.critics import Critics
from jmarl.learning.per_agent import check_agents, check_other_models, check_stacks, initial_state, with_adapters
from jmarl.learning.setup import Setup, make_setup
from jmarl.logs.data_log import DataLog
from jmarl.logs.goodput import CLOCK
from jmarl.logs.terminal import say, watched
from jmarl.models import sharding
from jmarl.models.heads import with_value_head
from jmarl.preferences.data_source import batch_size, check_micro_batches, data_source, encode, longest_batches
from jmarl.preferences.encoding import Examples
from jmarl.preferences.pairs import Pair, Trajectory, shared_examples
from jmarl.runs.loop import repeat_update, run_training
from jmarl.runs.precompile import Updates, keep_programs, updates_of
from jmarl.runs.records import FitResult
from jmarl.runs.start import initial_digests, say_what_data, say_what_is_shared, say_what_runs, settle_updates
from jmarl.team import Team, initial_params
from jmarl.types import Batches, TeamState

# Settings of episodes and sampling that also apply to given data.
USED_BY_DATA = {"chat", "chat_template_kwargs", "chat_date", "compute_dtype"}
UNUSED_BY_DATA = {field.name for cls in (Episodes, Sampling) for field in dataclasses.fields(cls)} - USED_BY_DATA
UNUSED_BY_DATA |= {"eval_generations", "eval_temperature"}


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
    check_agents(cfg, team.num_agents)
    check_stacks(cfg, team)
    check_other_models(team, cfg)
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


def check_data(data: Any, cfg: TrainConfig) -> None:
    """Raise an error if data are empty or of another type than the algorithm learns from."""
    texts = find_row(cfg.algorithm).data == "texts"
    cls, reader = (Trajectory, "load_trajectories") if texts else (Pair, "load_pairs")
    is_list = isinstance(data, list | tuple) and not isinstance(data, Trajectory | Pair)
    if is_list and not data:
        raise ValueError("there is no data to train on")
    wrong = [item for item in data if not isinstance(item, cls)] if is_list else [data]
    if wrong:
        raise TypeError(
            f"algorithm={cfg.algorithm!r} learns from a list of {cls.__name__}, got {type(wrong[0]).__name__}: read "
            f"files, data sets, DataFrames and lists of dicts with jmarl.{reader}"
        )


def check_fit(cfg: TrainConfig, wandb_config: dict | None) -> Algorithm:
    """Return the resolved algorithm of a run on given data. Experiments call this before they load models.

    Raises:
        ValueError: settings conflict with each other, this machine or the output directory.
    """
    sharding.require_one_process()
    row = find_row(cfg.algorithm)
    if row.data == "rollouts" or row.rounds or row.learned:
        raise ValueError(f"algorithm={cfg.algorithm!r} learns from completions that the team samples: use jmarl.train")
    if wandb_config is not None and not cfg.run.output_dir:
        raise ValueError("wandb_config was given without output_dir: W&B keeps its files there, so set output_dir")
    settings, defaults = flat(cfg), flat(TrainConfig())
    for name in sorted(UNUSED_BY_DATA):
        if settings[name] != defaults[name]:
            is_size = name == "num_prompts"
            also = " (per_device_train_batch_size in TRL)" if is_size else ""
            size = "set batch_size, the number of pairs or texts of an update, and " if is_size else ""
            raise ValueError(
                f"{name}={settings[name]!r}{also} has no effect for algorithm={cfg.algorithm!r}, which trains on given data; "
                f"{size}leave it at {defaults[name]!r}"
            )
    algorithm = resolve(cfg)
    check_micro_batches(algorithm)
    check_directory(cfg)
    return algorithm
