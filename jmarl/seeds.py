"""Several runs of one team, which differ in their seed alone, trained at once: their agents lie side by side in the stacks.

With LoRA the runs have one base, so one more costs its adapters and activations, and under `vmap` the tokens of all runs meet
the base in one product. What a run's numbers depend on is its own: adapters, order of the items, random keys, rewards, clips,
schedules. Each therefore learns what it would learn alone, but for rounding (programs have other shapes) and for the noise of
dropout, which depends on how far batches are padded. Its directory `seed_S` is that of a run alone: metrics, checkpoints to go
on from alone or together, models.

Sampled in one program is what the runs ask for at one time in the same shapes; episodes of several turns that end at different
times are sampled run by run until they meet again. Left out: rows on pairs, which learn in rounds, and W&B.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmarl import lora, sharding
from jmarl.algorithms import algorithm
from jmarl.batches import stacked
from jmarl.checkpoint import Checkpointer
from jmarl.config import TrainConfig
from jmarl.critics import Critics
from jmarl.environment import Environment, Formatter, Transition
from jmarl.evaluate import evaluating
from jmarl.generate import Ask, Asking, Past, sample_team
from jmarl.metrics import MetricsWriter
from jmarl.returns import mean_and_interval
from jmarl.rewards import RewardFunction
from jmarl.rollout import Rollout
from jmarl.rundir import open_run, set_aside
from jmarl.runlog import RunLog, TrainResult
from jmarl.stack import map_own
from jmarl.step import batches_of, learn_from, playing_step, tasks_at
from jmarl.team import Team, policies, save_team, to_checkpoint, without_gradients
from jmarl.train import check_run, check_team, environment_of, start
from jmarl.types import Completions, TeamState
from jmarl.weights import Agent

T = TypeVar("T")
SUMMED, WITH_INTERVAL = ("tokens", "tokens_per_s"), ("reward/mean", "eval/reward")


class Runs(NamedTuple):
    """What does not change about runs that are trained together."""

    team: Team
    critics: Critics
    cfgs: tuple[TrainConfig, ...]  # of each run, with its seed and directory
    alone: Mesh | None  # where the models of one run would lie

    def wide(self, specs: Sequence[Any]) -> tuple:
        """Stacks with the agents of all runs, run by run."""
        return tuple(dataclasses.replace(spec, members=spec.members * len(self.cfgs)) for spec in specs)

    @property
    def all(self) -> Team:
        return Team(self.wide(self.team.stacks))


def train_seeds(
    team: Team,
    params: Sequence[Any],
    reward: RewardFunction | Environment,
    items: Sequence[dict],
    cfg: TrainConfig,
    *,
    seeds: Sequence[int],
    formatters: Sequence[Formatter] | None = None,
    external_transition: Transition | None = None,
    critic: Agent | None = None,
    eval_items: Sequence[dict] = (),
) -> list[TrainResult]:
    """Train a team once from each seed, all at once; arguments as for `train`. Returns what `train` returns for each alone.

    With an output_dir every run has its own in it, `seed_0`, …, and beside them are the mean reward and its 95 % interval over
    the runs. params: best with `make_team(..., lora=True)`; without LoRA every run has a copy of all weights.
    """
    env = environment_of(team, reward, formatters, external_transition, cfg)
    cfgs = check_seeds(seeds, cfg)
    for of_seed in cfgs:
        check_run(items, of_seed, None)
    check_team(team, cfg)
    started = [start(team, [map_own(jnp.copy, p) for p in params], c, critic) for c in cfgs]
    runs = Runs(team, started[0][0], cfgs, sharding.mesh_for(cfg.mesh, [len(s.members) for s in team.stacks]))
    states = [state for _, state in started]
    del started, params
    about = {"team": team.describe(), "critics": Team(runs.critics.specs).describe()}
    with contextlib.ExitStack() as opened:
        if cfg.output_dir and not cfg.resume:
            set_aside(cfg.output_dir)
        each = [opened.enter_context(open_run(c, state, about, None)) for c, state in zip(cfgs, states, strict=True)]
        states = [state for state, *_ in each]
        check_steps(cfgs, states)
        writer = None
        if cfg.output_dir:
            how: dict[str, Any] = dict(total_steps=cfg.num_updates, start_step=int(states[0].step), progress=cfg.progress)
            writer = opened.enter_context(MetricsWriter(cfg.output_dir, dataclasses.asdict(cfg), **how))
        logs = [RunLog(team, c, of_run) for c, (*_, of_run) in zip(cfgs, each, strict=True)]
        saved = [(saver, meta) for _, saver, meta, _ in each if saver]
        results = run_seeds(runs, together(states, runs), items, env, eval_items, logs, writer, saved)
    for of_seed, result in zip(cfgs, results, strict=True):
        if of_seed.output_dir:
            save_team(Path(of_seed.output_dir) / "models", team, policies(result.state))
    return results


def check_seeds(seeds: Sequence[int], cfg: TrainConfig) -> tuple[TrainConfig, ...]:
    """The settings of each run; refuses what cannot be trained together."""
    seeds = [int(seed) for seed in seeds]
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={seeds} is not allowed: give at least one, and each once")
    row = algorithm(cfg.algorithm)
    if row.data != "rollouts":
        raise ValueError(
            f"algorithm={cfg.algorithm!r} learns from pairs in rounds, and runs are trained together only by rows on rollouts "
            "(magrpo, ippo, c3, …): call train once a seed"
        )
    return tuple(
        dataclasses.replace(
            cfg, seed=seed, output_dir=cfg.output_dir and str(Path(cfg.output_dir) / f"seed_{seed}"), progress=False
        )
        for seed in seeds
    )


def check_steps(cfgs: Sequence[TrainConfig], states: Sequence[TeamState]) -> None:
    steps = {c.output_dir: int(state.step) for c, state in zip(cfgs, states, strict=True)}
    if len(set(steps.values())) > 1:
        told = ", ".join(f"{name}: {step}" for name, step in steps.items())
        raise ValueError(
            f"the runs have made different numbers of updates ({told}): bring the others up with train(resume) one by one"
        )


def together(states: Sequence[TeamState], runs: Runs) -> TeamState:
    """The state of all runs, each stack [K * A, ...]; those given are consumed."""
    mesh = sharding.mesh_for(runs.cfgs[0].mesh, [len(s.members) for s in runs.all.stacks])
    where = mesh if algorithm(runs.cfgs[0].algorithm).critic == "own" else sharding.of_one_agent(mesh)

    def joined(stacks, where):
        whole = jax.tree.map(_concatenated, *(stack._replace(base=None) for stack in stacks))
        return sharding.place(whole._replace(base=stacks[0].base), where)

    stacks = tuple(joined(of, mesh) for of in zip(*(state.stacks for state in states), strict=True))
    critics = tuple(joined(of, where) for of in zip(*(state.critics for state in states), strict=True))
    return TeamState(sharding.place(states[0].step, mesh), stacks, critics)


def _concatenated(*arrays: jax.Array) -> jax.Array:
    """Arrays on axis 0; they are freed one by one, so that all weights are never there twice."""
    if len(arrays) == 1:
        return arrays[0]
    whole = jnp.concatenate(arrays)
    for x in arrays:
        x.delete()
    return whole


def of_run(tree: T, run: int, count: int) -> T:
    """One run's part of arrays [K * A, ...]; what agents share is in every part."""
    if count == 1:
        return tree
    return map_own(lambda x: x[run * (x.shape[0] // count) : (run + 1) * (x.shape[0] // count)], tree)


def alone(state: TeamState, run: int, runs: Runs) -> TeamState:
    """The state of one run, as it would be of that run alone."""
    count = len(runs.cfgs)
    stacks, critics = (tuple(of_run(stack, run, count) for stack in of) for of in (state.stacks, state.critics))
    return TeamState(state.step, stacks, critics)


def play_together(runs: Runs, state: TeamState, asking: Sequence[Asking[T]]) -> list[T]:
    """What one generator a run returns. All are driven to the point where they ask for completions; asks of the same shapes are
    answered by one program of all runs, others by one of each run."""
    params, count = [lora.model_of(stack) for stack in state.stacks], len(asking)
    results: dict[int, T] = {}
    asks: dict[int, Ask] = {}

    def go_on(run: int, done: tuple | None) -> None:
        try:
            asks[run] = asking[run].send(done)  # type: ignore[arg-type]  # a generator that has not begun takes None
        except StopIteration as end:
            results[run] = end.value

    for run in range(count):
        go_on(run, None)
    while asks:
        waiting, asks = asks, {}
        if len(waiting) == count and (ask := as_one(list(waiting.values()))) is not None:
            done = [_on_host(of_stack) for of_stack in sample_team(runs.all, params, ask)]
            answers = {run: tuple(of_run(of_stack, run, count) for of_stack in done) for run in waiting}
        else:
            answers = {run: sample_team(runs.team, own_params(params, run, runs), ask) for run, ask in waiting.items()}
        for run, done in answers.items():
            go_on(run, done)
    return [results[run] for run in range(count)]


def _on_host(done: Completions) -> Completions:
    """Completions whose arrays are cut without a program for each; what a next turn goes on from stays where it is."""
    return jax.device_get(done._replace(kept=None))._replace(kept=done.kept)


def own_params(params: Sequence[Any], run: int, runs: Runs) -> list[Any]:
    return [sharding.place(of_run(of_stack, run, len(runs.cfgs)), runs.alone) for of_stack in params]


def as_one(asks: Sequence[Ask]) -> Ask | None:
    """The ask of all runs' agents, if theirs have the same shapes (prompts are padded to the widest)."""
    first = asks[0]

    def alike(of: Callable[[Ask], Any]) -> bool:
        return all(of(ask) == of(first) for ask in asks)

    fixed = alike(lambda ask: (ask.settings, ask.step, ask.group, ask.purpose, ask.turn, ask.keep, ask.prompt_ids.tolist()))
    shapes = alike(lambda ask: [lengths.shape for _, lengths in ask.encoded])
    if not (fixed and shapes and alike(lambda ask: jax.tree.map(jnp.shape, ask.past))):
        return None
    encoded = []
    for of_stack in zip(*(ask.encoded for ask in asks), strict=True):
        width = max(ids.shape[-1] for ids, _ in of_stack)
        wide = [np.pad(ids, ((0, 0), (0, 0), (0, width - ids.shape[-1])), mode="edge") for ids, _ in of_stack]
        encoded.append((np.concatenate(wide), np.concatenate([lengths for _, lengths in of_stack])))
    past = None
    if first.past is not None:
        pasts = [ask.past for ask in asks if ask.past is not None]
        caches = jax.tree.map(lambda *x: jnp.concatenate(x), *(past.caches for past in pasts))
        past = Past(caches, tuple(map(np.concatenate, zip(*(past.rows for past in pasts), strict=True))))
    return first._replace(encoded=tuple(encoded), seed=np.array([ask.seed for ask in asks]), past=past)


def run_seeds(
    runs: Runs,
    state: TeamState,
    items: Sequence[dict],
    env: Environment,
    eval_items: Sequence[dict],
    logs: Sequence[RunLog],
    writer: MetricsWriter | None,
    saved: Sequence[tuple[Checkpointer, dict]],
) -> list[TrainResult]:
    """The loop from `state` on, as `train.run` for one run. saved: of each run its checkpoints and what they say of it."""
    team, cfgs, cfg = runs.team, runs.cfgs, runs.cfgs[0]
    kept: list[tuple] = []  # the step that is not logged yet, so that the device works on while the host logs

    def flush() -> None:
        while kept:
            step, rollouts, learned, played = kept.pop()
            learned = jax.device_get(learned)
            for i, (log, rollout) in enumerate(zip(logs, rollouts, strict=True)):
                log.step(step, rollout, [of_run(metrics, i, len(cfgs)) for metrics in learned], played)
            rows = [log.flush() for log in logs]
            if writer:
                writer.write(step, over_runs([row for row in rows if row is not None]))

    def evaluated(step: int) -> list | None:
        due = cfg.eval_every and step % cfg.eval_every == 0
        if not eval_items or not (due or step in (0, cfg.num_updates)):
            return None
        flush()
        began = time.monotonic()
        results = play_together(runs, state, [evaluating(team, eval_items, env, c) for c in cfgs])
        for log, result in zip(logs, results, strict=True):
            log.evaluation(step, result, began)
        if writer:
            found = [{"eval/reward": result.mean} for result in results]
            writer.write(max(step - 1, 0), {"eval/updates": step} | over_runs(found))
        return results

    first = int(state.step)
    before = after = evaluated(0) if first == 0 else None
    for step in range(first, cfg.num_updates):
        tasks = [partial(tasks_at, items, c, step) for c in cfgs]
        asking = [playing_step(team, of(), env, c, step, of) for of, c in zip(tasks, cfgs, strict=True)]
        rollouts = play_together(runs, state, asking)
        if step == first:
            check_valid(cfgs, rollouts)
        played = time.monotonic()
        state, learned = update_together(runs, state, rollouts)
        flush()
        kept.append((step, rollouts, learned, played))
        after = evaluated(step + 1) or after
        last = step + 1 == cfg.num_updates
        if cfg.save_every and (last or (step + 1) % cfg.save_every == 0):
            flush()
            for i, (log, (saver, meta)) in enumerate(zip(logs, saved, strict=True)):
                log.save(saver, step + 1, to_checkpoint(alone(state, i, runs)), meta, last=last)
    flush()
    evaluations = zip(before or [None] * len(cfgs), after or [None] * len(cfgs), strict=True)
    return [
        TrainResult(without_gradients(alone(state, i, runs)), log.rewards, *of)
        for i, (log, of) in enumerate(zip(logs, evaluations, strict=True))
    ]


def update_together(runs: Runs, state: TeamState, rollouts: Sequence[Rollout]) -> tuple[TeamState, list[dict[str, Any]]]:
    """One update of all runs: each judged alone, all learning in one program. Returns metrics [K * A] as `step.learn_from`."""
    judged = algorithm(runs.cfgs[0].algorithm).critic is not None
    each = [
        batches_of(runs.team, runs.critics, placed_alone(state, i, runs) if judged else state, rollout, cfg)
        for i, (rollout, cfg) in enumerate(zip(rollouts, runs.cfgs, strict=True))
    ]
    batches, of_critics = ([stacked(parts) for parts in zip(*of, strict=True)] for of in zip(*each, strict=True))
    critics = runs.critics._replace(specs=runs.wide(runs.critics.specs))
    return learn_from(runs.all, critics, state, batches, of_critics, runs.cfgs[0])


def placed_alone(state: TeamState, run: int, runs: Runs) -> TeamState:
    """As `alone`, on the devices where that run alone would have it."""
    found, own = alone(state, run, runs), algorithm(runs.cfgs[0].algorithm).critic == "own"
    where = runs.alone if own else sharding.of_one_agent(runs.alone)
    stacks = tuple(sharding.place(stack, runs.alone) for stack in found.stacks)
    return TeamState(found.step, stacks, tuple(sharding.place(stack, where) for stack in found.critics))


def check_valid(cfgs: Sequence[TrainConfig], rollouts: Sequence[Rollout]) -> None:
    for cfg, rollout in zip(cfgs, rollouts, strict=True):
        if not np.isfinite(rollout.turns[0].rewards).any():
            fault = rollout.turns[0].fault
            raise ValueError(f"no joint action of the first update from seed {cfg.seed} has a valid reward: {fault}")


def over_runs(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each column that all runs have the mean over the runs, and of rewards half of its 95 % interval; rates are summed."""
    found: dict[str, float] = {}
    for name in rows[0]:
        if all(name in row for row in rows):
            values = np.array([row[name] for row in rows])
            mean, interval = mean_and_interval(values)
            found[name] = float(values.sum() if name in SUMMED else mean)
            if name in WITH_INTERVAL:
                found[f"{name}_ci95"] = float(interval)
    return found
