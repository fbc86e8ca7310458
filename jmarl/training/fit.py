"""Train a team on given data: `jmarl.fit`, on pairs of which one was preferred (dpo, madpo, reward_model) or on texts (sft).

The loop, settings, checkpoints, logs and exact resume are those of `train`. Reference log-probabilities are computed once,
before the first step. Settings of rollouts have no effect here and are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jmarl.algorithms import Algorithm, find_row, resolve
from jmarl.config import Episodes, Sampling, TrainConfig, flat
from jmarl.learning.critics import Critics
from jmarl.learning.per_agent import check_agents, check_stacks, initial_state, with_adapters
from jmarl.learning.setup import Setup
from jmarl.memory import explain_memory
from jmarl.models import sharding
from jmarl.models.heads import with_value_head
from jmarl.team import Team, initial_params
from jmarl.training.files import fingerprint
from jmarl.training.files.run_directory import check_directory, open_run
from jmarl.training.files.saving import Saves, write_models
from jmarl.training.logs.data_log import DataLog
from jmarl.training.loop import repeat_update, run_loop
from jmarl.training.preferences.data_source import check_micro_batches, data_source, encode
from jmarl.training.preferences.pairs import Pair, Trajectory
from jmarl.training.records import FitResult
from jmarl.training.start import initial_digests

USED_BY_DATA = ("chat", "compute_dtype")  # settings of episodes and sampling that given data have as well
UNUSED_BY_DATA = {field.name for cls in (Episodes, Sampling) for field in dataclasses.fields(cls)}.difference(USED_BY_DATA)
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
    """Train a team on pairs or trajectories and return its final state.

    Args:
        team: of `Team.load` or `Team.of`, or of `make_team` together with params.
        data: of `load_pairs` or `load_trajectories`.
        params: each stack's parameters [A, ...], in place of those of the team's agents. They are consumed, and are the
            reference of preferences before that.
        eval_data: held out; evaluated before and after training and every `eval_every` updates.
        wandb_config: keyword arguments of `wandb.init`.
    """
    algorithm = check_fit(cfg, wandb_config)
    check_data(data, cfg)
    if eval_data:
        check_data(eval_data, cfg)
    check_agents(cfg, team.num_agents)
    check_stacks(cfg, team)
    mesh = sharding.mesh_for(cfg.run.mesh, [len(s.members) for s in team.stacks])
    params = with_adapters(team, initial_params(team, params, cfg.lora.lora_rank > 0), cfg, mesh)
    scores = algorithm.row.margin == "score"
    if scores:  # parameters that were trained before keep their head
        params = [stack if "value" in stack else with_value_head(stack) for stack in params]
    params = [sharding.place(stack, mesh) for stack in params]
    setup = Setup(team, Critics((), algorithm), algorithm, cfg)
    source = data_source(setup, *(encode(team, params, part, algorithm, cfg) for part in (data, eval_data)))
    state = initial_state(team, params, algorithm, cfg.run, mesh)
    identity: dict[str, Any] = {"team": team.describe(), "critics": [], "data": fingerprint.of_data(data)}
    identity["initial"] = initial_digests(params, algorithm)
    if cfg.run.replay_rollout:
        return FitResult(team, repeat_update(setup, state, source, identity, cfg)[0], [], None, None)
    with open_run(cfg, state, identity, wandb_config) as opened, explain_memory():
        log = DataLog(team, cfg, opened.writer)
        ending = run_loop(setup, opened.state, source, log, Saves(cfg.run, opened.savers))
        result = FitResult(team, ending.state, log.losses, *ending[1:])
        # Models with a value head are not written: they would lose it.
        if cfg.run.output_dir and cfg.run.save_models and not scores and not result.interrupted:
            result = result._replace(unsaved=write_models(cfg.run, team, result.state) or result.unsaved)
    return result


def check_data(data: Sequence, cfg: TrainConfig) -> None:
    """Raise an error for data that are not what the algorithm learns from."""
    if not data:
        raise ValueError("there is no data to train on")
    texts = find_row(cfg.algorithm).data == "texts"
    cls, reader = (Trajectory, "load_trajectories") if texts else (Pair, "load_pairs")
    if not isinstance(data[0], cls):
        raise TypeError(
            f"algorithm={cfg.algorithm!r} learns from a list of {cls.__name__}, got {type(data[0]).__name__}: read data "
            f"with jmarl.{reader}"
        )


def check_fit(cfg: TrainConfig, wandb_config: dict | None) -> Algorithm:
    """Return the algorithm of a run on data. Raises ValueError for settings that do not fit each other, this machine or the
    output directory; experiments call it before they load models."""
    sharding.require_one_process()
    row = find_row(cfg.algorithm)
    if row.data == "rollouts" or row.rounds or row.learned:
        raise ValueError(f"algorithm={cfg.algorithm!r} learns from what the team writes: use jmarl.train")
    if wandb_config is not None and not cfg.run.output_dir:
        raise ValueError("wandb_config was given without output_dir: W&B keeps its files there, so set output_dir")
    settings, defaults = flat(cfg), flat(TrainConfig())
    for name in sorted(UNUSED_BY_DATA):
        if settings[name] != defaults[name]:
            raise ValueError(
                f"{name}={settings[name]!r} has no effect for algorithm={cfg.algorithm!r}, which trains on given data; "
                f"leave it at {defaults[name]!r}"
            )
    algorithm = resolve(cfg)
    check_micro_batches(algorithm)
    check_directory(cfg)
    return algorithm
