"""Prepare a run: check it, resolve its settings, make critics, initial state and the source of experience.

`prepare` is the only start of a run. A dry run stops after it; nothing is written, and no directory is opened. What differs
between kinds of runs is in `runs.kinds`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from jmarl.algorithms.constraints import POPULATION, facts
from jmarl.config import TrainConfig, flat
from jmarl.config.constraints import require
from jmarl.files.run_directory import resolve_auto, resolve_resume, with_absolute_directory
from jmarl.logs.terminal import say
from jmarl.processes import exchange
from jmarl.runs.checks import find_own_algorithms
from jmarl.runs.first_words import first_words
from jmarl.runs.kinds import kind_of
from jmarl.runs.precompile import choose_updates, keep_programs
from jmarl.runs.run import Kind, PreparedRun, Task, identity_of
from jmarl.runs.start import choose_mesh
from jmarl.shadows import explaining
from jmarl.team import Team, initial_params, on_mesh


@explaining()
def prepare(
    cfg: TrainConfig,
    team: Team,
    task: Task,
    *,
    params: Sequence[Any] | None = None,
    wandb_config: dict | None = None,
    kind: Kind | None = None,
) -> tuple[PreparedRun, Any]:
    """Check a run, and return it with its state at step 0, of several seeds a list. Writes nothing.

    Args:
        cfg: the settings.
        team: who learns.
        task: what from.
        params: parameters [A, ...] of each stack, instead of those of the team's agents. They are donated.
        wandb_config: keyword arguments of `wandb.init`, to be checked.
        kind: of the run; None: that of the algorithm.
    """
    seeds = kind.seeds if kind else ()
    team = team if params is None else dataclasses.replace(team, random_weights=False)
    find_own_algorithms(cfg.algorithm, cfg.preference.rl_algorithm)
    require(POPULATION, facts(cfg, seeds=seeds))
    cfg = with_absolute_directory(of_this_process(cfg))
    given = exchange.from_first(partial(resolve_resume, cfg, seeds))  # files are read by one process
    cfg = of_this_process(exchange.from_first(partial(resolve_auto, given, seeds)))
    cfg = choose_mesh(team, cfg, len(seeds) or 1)
    kind = kind or kind_of(cfg.algorithm, task)
    task, data, cfg = kind.check(cfg, team, task, wandb_config)
    check_equal(cfg, data, team)
    keep_programs(say if cfg.run.progress else None)
    team = on_mesh(team, cfg.run)
    first_words(team, task, cfg, len(seeds) or 1)
    params = initial_params(team, params, cfg.lora.lora_rank > 0, next(iter(seeds), cfg.run.seed))
    setup, state = kind.start(team, params, cfg, task)
    setup = choose_updates(kind, setup, state, task)
    return PreparedRun(kind, setup, task, identity_of(setup, state, task.env, data), given), state


def of_this_process(cfg: TrainConfig) -> TrainConfig:
    """Return the settings of this process: only the first one of a run shows its progress."""
    return cfg if exchange.is_first() else cfg.replace(progress=False)


def check_equal(cfg: TrainConfig, data: Any, team: Team) -> None:
    """Raise ValueError in all processes of a run if they do not have the same settings, data and team."""
    if exchange.count() == 1:
        return
    given = {"settings": flat(cfg.replace(progress=False)), "data": data, "team": team.describe()}
    own = {name: json.dumps(value, sort_keys=True, default=repr) for name, value in given.items()}
    for i, other in enumerate(others := exchange.gather(lambda: own)):
        for name in own:
            if other[name] != others[0][name]:
                raise ValueError(
                    f"process {i} has other {name} than process 0: start all processes with the same command, files and "
                    "environment variables (a set of texts has another order in each: sort it)"
                )
