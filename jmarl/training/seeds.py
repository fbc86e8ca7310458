"""Several runs of one team, which differ in their seed alone, trained at once: their agents lie side by side in the stacks.

With LoRA the runs have one base, so one more costs its adapters and activations, and under `vmap` the tokens of all runs meet
the base in one product. What a run's numbers depend on is its own: adapters, order of the items, random keys, rewards, clips,
schedules. Each therefore learns what it would learn alone, but for rounding (programs have other shapes), for the noise of
dropout, which depends on how far batches are padded, and, in episodes that end at different times, for which rows are in a
minibatch. Its directory `seed_S` is that of a run alone: metrics, checkpoints to go on from alone or together, models.

Sampled in one program is what the runs ask for at one time in the same shapes; episodes of several turns that end at different
times are sampled run by run until they meet again. Left out: rows on pairs, which learn in rounds, and W&B.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmarl.algorithms import find_row
from jmarl.config import TrainConfig, flat
from jmarl.envs.base import Environment, TextEnvironment, describe
from jmarl.envs.reward_environment import Formatter, Transition
from jmarl.evaluation.evaluate import Evaluation, numbers, play_held_out, summarize
from jmarl.evaluation.statistics import mean_and_interval
from jmarl.learning.per_agent import with_adapters
from jmarl.memory import explain_memory
from jmarl.models import lora, sharding
from jmarl.models.hub.agents import Agent
from jmarl.models.stack import map_own
from jmarl.rollout.play import Rollout
from jmarl.rollout.prompt_check import items_that_fit
from jmarl.team import Team, initial_params
from jmarl.training.files import fingerprint
from jmarl.training.files.checkpoint import Checkpointer
from jmarl.training.files.lock import locked
from jmarl.training.files.run_directory import checkpoints_of, open_run, set_aside
from jmarl.training.files.saving import Saves, write_models
from jmarl.training.logs.metrics_writer import MetricsWriter, say
from jmarl.training.logs.step_log import RunLog, StepLog, TrainResult
from jmarl.training.loop import Advanced, loop
from jmarl.training.runs import Runs, alone, of_run, play_together, together, update_together
from jmarl.training.step import check_valid, play_step, tasks_at
from jmarl.training.train import check_run, check_settings, check_team, environment_of, start
from jmarl.types import TeamState

SUMMED, WITH_INTERVAL = ("tokens", "tokens_per_s"), ("reward/mean", "eval/reward")


def train_seeds(
    team: Team,
    reward: Callable | Environment | TextEnvironment,
    items: Sequence[dict],
    cfg: TrainConfig,
    *,
    seeds: Sequence[int],
    params: Sequence[Any] | None = None,
    formatters: Sequence[Formatter] | None = None,
    external_transition: Transition | None = None,
    critic: Agent | None = None,
    eval_items: Sequence[dict] = (),
) -> list[TrainResult]:
    """Train a team once from each seed, all at once; arguments as for `train`. Returns what `train` returns for each alone.

    With an output_dir every run has its own in it, `seed_0`, …, and beside them are the mean reward and its 95 % interval over
    the runs. params: best with `make_team(..., lora=True)`; without LoRA every run has a copy of all weights, and those given
    stay as they are.
    """
    env = environment_of(team, reward, formatters, external_transition, cfg)
    check_seeds(seeds, cfg)
    cfgs = tuple(cfg.for_seed(int(seed)) for seed in seeds)
    check_run(items, cfgs[0], None)
    check_team(team, cfg)
    items, eval_items = items_that_fit(team, env, items, eval_items, cfg)
    where = [sharding.mesh_for(cfg.run.mesh, [len(s.members) * count for s in team.stacks]) for count in (1, len(cfgs))]
    params = once(team, initial_params(team, params, cfg.lora.lora_rank > 0), cfgs[0], where[0])
    started = [start(team, [map_own(jnp.copy, p) for p in params], c, critic) for c in cfgs]
    runs = Runs(started[0][0], cfgs, *where)
    about = {
        "team": team.describe(),
        "critics": Team(runs.setup.critics.specs).describe(),
        "environment": describe(env),
        "data": fingerprint.of_data(items),
        "reward": fingerprint.of_reward(env),
    }
    with contextlib.ExitStack() as opened, explain_memory():
        if cfg.run.output_dir:
            opened.enter_context(locked(cfg.run.output_dir))
        state, logs, savers = open_runs(runs, [of_seed for _, of_seed in started], about, opened)
        del started, params  # with the bases that lie elsewhere than that of all
        writer, saves = None, Saves(cfg.run, savers, lambda state, i: alone(state, i, runs))
        if cfg.run.resume and cfg.run.progress:
            say(f"resuming {cfg.run.output_dir} from step {int(state.step)} of {cfg.run.num_updates}")
        if cfg.run.output_dir:
            how: dict[str, Any] = dict(total_steps=cfg.run.num_updates, start_step=int(state.step), progress=cfg.run.progress)
            writer = opened.enter_context(MetricsWriter(cfg.run.output_dir, flat(cfg), **how))
        results = run_seeds(runs, state, items, env, eval_items, logs, writer, saves)
        for i, (of_seed, result) in enumerate(zip(cfgs, results, strict=True)):
            if of_seed.run.output_dir and of_seed.run.save_models and not result.interrupted:
                unsaved = write_models(of_seed.run, team, result.state)
                results[i] = result._replace(unsaved=unsaved or result.unsaved)
    return results


def check_seeds(seeds: Sequence[int], cfg: TrainConfig) -> None:
    """Refuse what cannot be trained together; experiments call it before they load models."""
    seeds = [int(seed) for seed in seeds]
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={seeds} is not allowed: give at least one, and each once")
    if find_row(cfg.algorithm).data != "rollouts":
        raise ValueError(
            f"algorithm={cfg.algorithm!r} learns from pairs in rounds, and runs are trained together only by rows on rollouts "
            "(magrpo, ippo, c3, …): call train once a seed"
        )
    if cfg.run.saves and cfg.run.save_total_limit < 2:
        raise ValueError(
            f"save_total_limit={cfg.run.save_total_limit} is not allowed with several seeds: keep at least 2, because a "
            "kill may come when only some of them have the newest"
        )
    if cfg.run.replay_rollout:
        raise ValueError("replay_rollout makes the update of one run: leave seeds out, and set output_dir to that run's seed_N")
    if cfg.run.output_dir and checkpoints_of(cfg).exists():
        raise ValueError(
            f"output_dir={cfg.run.output_dir!r} holds the checkpoints of a single run, and runs of several seeds have "
            "theirs in seed_0, … there: choose another output_dir"
        )
    for seed in seeds:
        check_settings(cfg.for_seed(seed))


def once(team: Team, params: Sequence[Any], cfg: TrainConfig, mesh: Mesh | None) -> list[Any]:
    """The parameters that every run starts from: with new LoRA adapters to come the base alone, where it lies for all runs."""
    found = []
    for given, adapted_ in zip(params, with_adapters(team, params, cfg, mesh), strict=True):
        fresh = cfg.lora.lora_rank and not lora.targets_of(given)
        found.append(lora.split(adapted_)[0] if fresh else adapted_)
    return found


def open_runs(
    runs: Runs, states: Sequence[TeamState], about: dict[str, Any], opened: contextlib.ExitStack
) -> tuple[TeamState, list[RunLog], list[tuple[Checkpointer, dict]]]:
    """The state of all runs, which go on from the newest step that all have if they resume, and of each its log and, where it
    has them, its checkpoints with what they say of it. opened: closes them."""
    cfg = runs.cfgs[0]
    step = common_step(runs.cfgs) if cfg.run.resume else None
    if cfg.run.output_dir and not cfg.run.resume:
        set_aside(str(Path(cfg.run.output_dir).parent))
    pairs = zip(runs.cfgs, states, strict=True)
    each = [opened.enter_context(open_run(c, state, about, None, step)) for c, state in pairs]
    logs = [RunLog(runs.team, c, run.writer) for c, run in zip(runs.cfgs, each, strict=True)]
    return together([run.state for run in each], runs), logs, [saver for run in each for saver in run.savers]


def common_step(cfgs: Sequence[TrainConfig]) -> int:
    """The newest step of which all runs have a checkpoint that is whole: where they were killed, only some may have been saved.
    Reads only: the directories are not locked yet."""
    with contextlib.ExitStack() as opened:
        savers = [opened.enter_context(Checkpointer(checkpoints_of(cfg), read_only=True)) for cfg in cfgs]
        common = set.intersection(*(set(saver.steps()) for saver in savers))
        for step in sorted(common, reverse=True):
            if all([saver.is_intact(step, cfgs[0].run.strict_checkpoints) for saver in savers]):
                return step
        told = ", ".join(f"{cfg.run.output_dir}: {saver.steps()}" for cfg, saver in zip(cfgs, savers, strict=True))
    raise ValueError(f"the runs have no checkpoint of one step in common ({told}): resume them one by one with train")


def run_seeds(
    runs: Runs,
    state: TeamState,
    items: Sequence[dict],
    env: Environment,
    eval_items: Sequence[dict],
    logs: Sequence[RunLog],
    writer: MetricsWriter | None,
    saves: Saves,
) -> list[TrainResult]:
    """The loop from `state` on, as `train.run` for one run."""
    team, cfg = runs.team, runs.cfgs[0]
    cfgs = [c.replace(overlap_rewards=False) for c in runs.cfgs]  # all of them ask one environment
    setups = [setup._replace(cfg=c) for setup, c in zip(runs.setups, cfgs, strict=True)]
    log = SeedsLog(runs, logs, writer)

    def evaluated(state: TeamState) -> list:
        plays = [partial(play_held_out, team=team, items=eval_items, env=env, cfg=c) for c in cfgs]
        return [summarize(rollout) for rollout in play_together(runs, state, plays)]

    def advance(step: int, state: TeamState) -> Advanced:
        tasks = [partial(tasks_at, items, c, step) for c in cfgs]
        plays = [
            partial(play_step, setup=setup, tasks=of(), env=env, step=step, further=of)
            for of, setup in zip(tasks, setups, strict=True)
        ]
        rollouts = play_together(runs, state, plays)
        if step == 0:
            for rollout in rollouts:
                check_valid(rollout)
        played = time.monotonic()
        state, learned = update_together(runs, state, rollouts)
        return state, partial(log.step, step, rollouts, learned, played, [of() for of in tasks])

    done = loop(state, cfg.run, log, saves, advance, evaluated if eval_items else None)
    evaluations = zip(done.before or [None] * len(cfgs), done.after or [None] * len(cfgs), strict=True)
    return [
        TrainResult(team, alone(done.state, i, runs), of_run.rewards, *of, done.interrupted, done.unsaved)
        for i, (of_run, of) in enumerate(zip(logs, evaluations, strict=True))
    ]


class SeedsLog(StepLog):
    """Logs of all runs, and beside them means over them."""

    def __init__(self, runs: Runs, logs: Sequence[RunLog], writer: MetricsWriter | None):
        super().__init__(runs.team, runs.cfgs[0], writer)
        self.runs, self.logs = runs, logs

    def step(self, step: int, rollouts: Sequence[Rollout], learned: list, at: float, tasks: Sequence[Sequence[dict]]) -> None:
        """As of `RunLog`, of each run."""
        self.keep(step, rollouts, learned, at, tasks)

    def _write(self, traced: int, *about: Any) -> dict[str, float]:
        step, rollouts, learned, at, tasks = about
        learned = jax.device_get(learned)
        for i, (log, rollout) in enumerate(zip(self.logs, rollouts, strict=True)):
            if log.last_step == step or log.waiting_step == step:  # this was interrupted, and is made once more
                continue
            log.failed_saves = self.failed_saves
            log.step(step, rollout, [of_run(metrics, i, len(self.logs)) for metrics in learned], at, tasks[i], traced)
        rows = [row for log in self.logs if (row := log.flush()) is not None]
        mean = over_runs(rows) if rows else {}
        if self.writer and rows:
            self.writer.write(step, mean)
        return mean

    def _written(self, row: dict[str, float], *about: Any) -> None:
        """Each run's log has looked at its own."""

    def evaluation(self, updates: int, results: list[Evaluation], began: float) -> None:
        for log, result in zip(self.logs, results, strict=True):
            log.evaluation(updates, result, began)
        if self.writer and updates not in self.writer.evaluated:
            rows = [numbers(result) for result in results]
            found = [{name: x for name, x in row.items() if not name.endswith("_ci95")} for row in rows]
            self.writer.write(max(updates - 1, 0), {"eval/updates": updates} | over_runs(found))

    def sync(self) -> None:
        for log in (super(), *self.logs):
            log.sync()

    def was_evaluated(self, updates: int) -> bool:
        return super().was_evaluated(updates) and all(log.was_evaluated(updates) for log in self.logs)

    def stop_if_not_finite(self) -> None:
        for log in self.logs:
            log.stop_if_not_finite()


def over_runs(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each column that all runs have the mean over the runs, and of rewards half of its 95 % interval; rates are summed."""
    found: dict[str, float] = {}
    for name in rows[0]:
        if all(name in row for row in rows):
            values = np.array([row[name] for row in rows])
            mean, interval = mean_and_interval(values)
            found[name] = float(values.sum() if name in SUMMED else mean)
            if name in WITH_INTERVAL or name.startswith("eval/pass@"):
                found[f"{name}_ci95"] = float(interval)
    return found
