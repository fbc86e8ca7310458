"""`jmarl.train_seeds`: train a team from several seeds at once, with the agents of all runs in the same stacks.

With LoRA the runs share one base, so an extra run costs only its adapters and activations, and under `vmap` the tokens of all
runs are multiplied with the base in one product. Adapters, item order, random keys, rewards, clipping and schedules belong to
single runs. So a run learns what it would learn alone, except for rounding (programs have other shapes), for dropout (its noise
depends on the padding of batches) and, if episodes end at different times, for the assignment of rows to minibatches. Its
directory `seed_S` equals that of a run alone: metrics, models, and checkpoints from which it resumes alone or with the others.

Requests of all runs with equal shapes are sampled by one program. Episodes of several turns that end at different times are
sampled run by run until the shapes are equal again. Left out: algorithms on pairs, which learn in rounds, and W&B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jmarl.config import TrainConfig
from jmarl.envs.rows import Rows
from jmarl.evaluation.environment import Reward
from jmarl.files.interrupt import raised_again
from jmarl.files.run_files import next_commands, shown
from jmarl.files.saving import Saves
from jmarl.logs.goodput import CLOCK
from jmarl.logs.terminal import say
from jmarl.memory import explain_memory
from jmarl.runs.checks import check_seeds
from jmarl.runs.kinds.seeds import batches_together, runs_of, several, state_of_run
from jmarl.runs.loop import end_run, run_loop
from jmarl.runs.records import TrainResult
from jmarl.runs.run import Task
from jmarl.runs.seeds_files import open_seeds
from jmarl.runs.train import prepared
from jmarl.team import Team, check_arguments


@raised_again()
@explain_memory(lambda: [])
def train_seeds(
    team: Team,
    reward: Reward,
    items: Rows,
    cfg: TrainConfig,
    *,
    seeds: Sequence[int],
    params: Sequence[Any] | None = None,
    eval_items: Rows = (),
) -> list[TrainResult]:
    """Train a team once from each seed, all at once. Returns the result of `train` for each seed.

    With an output_dir each run has a directory `seed_0`, ... in it; metrics.jsonl beside them has the mean reward over the runs
    and its 95 % interval.

    Args:
        seeds: one per run, all different.
        params: best from `make_team(..., lora=True)`. Without LoRA each run has a copy of all weights. They are not donated.
        team, reward, items, cfg, eval_items: see `train`.
    """
    check_arguments(team, cfg, reward)
    check_seeds(seeds, cfg)
    kind = several(seeds)
    run, source, states = prepared(cfg, team, Task(reward, items, eval_items), params=params, kind=kind)
    runs, cfg = runs_of(run.setup, kind.seeds), run.cfg
    kind = kind._replace(make_batches=lambda _, state, rollouts: batches_together(runs, state, rollouts))
    with CLOCK.running(), open_seeds(run, runs, states) as (state, savers, log, lost):
        saves = Saves(cfg.run, savers, state_of=lambda state, i: state_of_run(state, i, runs))
        result = run_loop(dataclasses.replace(run, kind=kind, setup=runs.joint), state, source, log, saves)
        results = []
        for i, setup in enumerate(runs.alone):
            before, after = (both and both[i] for both in (result.before, result.after))
            own = result._replace(state=state_of_run(result.state, i, runs), before=before, after=after)
            own = end_run(setup, own, lost)
            results.append(TrainResult(run.team, own.state, log.logs[i].rewards, *own[1:]))
    if cfg.run.output_dir and cfg.run.progress and not any(one.interrupted or one.unsaved for one in results):
        say(next_commands(shown(cfg.run.output_dir), seeds))
    return results
