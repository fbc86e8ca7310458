"""`jmarl.train_seeds`: train a team from several seeds at once, with the agents of all runs in the same stacks.

With LoRA the runs share one base, so an extra run costs only its adapters and activations, and under `vmap` the tokens of all
runs are multiplied with the base in one product. Adapters, item order, random keys, rewards, clipping and schedules belong to
single runs. So a run learns what it would learn alone, except for rounding (programs have other shapes), for dropout (its noise
depends on the padding of batches) and, if episodes end at different times, for the assignment of rows to minibatches. Its
directory `seed_S` equals that of a run alone: metrics, models, and checkpoints from which it resumes alone or with the others.

Requests of all runs with equal shapes are sampled by one program. Episodes of several turns that end at different times are
sampled run by run until the shapes are equal again. Left out: algorithms on pairs, which learn in rounds, and W&B.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from jmarl.algorithms import with_ample_memory
from jmarl.algorithms.constraints import facts
from jmarl.algorithms.run_constraints import SEEDS
from jmarl.config import TrainConfig, flat
from jmarl.config.constraints import require
from jmarl.envs.base import Environment, TextEnvironment
from jmarl.envs.rows import Rows, read_rows
from jmarl.evaluation.evaluate import Evaluation, play_held_out, summarize
from jmarl.files.attempt import mark_complete
from jmarl.files.checkpoint import Checkpointer
from jmarl.files.config_file import record_choices
from jmarl.files.lock import check_unlocked, locked
from jmarl.files.run_directory import checkpoints_of, open_run, open_writer, resolve_auto, resolve_resume, set_aside
from jmarl.files.run_files import next_commands
from jmarl.files.saving import Saves, write_models
from jmarl.learning.choose import Work, update_settings, with_settings
from jmarl.learning.per_agent import with_adapters
from jmarl.logs.goodput import CLOCK
from jmarl.logs.rollout_log import RolloutLog
from jmarl.logs.terminal import say, watched
from jmarl.memory import explain_memory
from jmarl.models import lora, sharding
from jmarl.models.stack import map_own
from jmarl.rollout.experience import RolloutExperience, Source
from jmarl.rollout.lock_step import CallersEnvironment
from jmarl.rollout.prompt_check import items_that_fit
from jmarl.rollout.turns import Rollout
from jmarl.runs.checks import check_run, check_settings, check_team, environment_of
from jmarl.runs.loop import LoopResult, run_loop
from jmarl.runs.precompile import Updates, keep_programs, longest_prompts, longest_update
from jmarl.runs.records import TrainResult
from jmarl.runs.rollouts import check_valid, play_step, tasks_at
from jmarl.runs.seeds_log import SeedsLog
from jmarl.runs.stacked_seeds import Runs, batches_together, join_states, joined_shapes, play_together, state_of_run
from jmarl.runs.start import run_identity, say_what_is_shared, say_what_runs, settle_updates, start
from jmarl.team import Team, initial_params
from jmarl.types import Batches, TeamState


def train_seeds(
    team: Team,
    reward: Callable | Environment | TextEnvironment,
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
    cfg = resolve_resume(cfg, seeds)
    with CLOCK.running(), watched("preparing the runs", cfg.run.progress, CLOCK.reader()):
        runs, states, source, identity, cfg = prepare_seeds(team, reward, items, cfg, seeds, params, eval_items)
    with contextlib.ExitStack() as opened, explain_memory(runs.joint_setup.calls), CLOCK.running():
        writer = None
        if cfg.run.output_dir:
            opened.enter_context(locked(cfg.run.output_dir))
        state, logs, savers = open_runs(runs, states, identity, opened)
        record_choices(cfg)
        del states, params  # frees the bases of single runs
        if cfg.run.resume and cfg.run.progress:
            say(f"resuming {cfg.run.output_dir} from step {int(state.step)} of {cfg.run.num_updates}")
        if cfg.run.output_dir:
            writer = opened.enter_context(open_writer(cfg.replace(max_completions_mb=0), flat(cfg), int(state.step)))
        elif cfg.run.progress:
            writer = opened.enter_context(open_writer(cfg, {}, int(state.step)))
        log = SeedsLog(team, runs.cfgs[0], logs, writer)
        saves = Saves(cfg.run, savers, state_of=lambda state, i: state_of_run(state, i, runs))
        result = run_loop(runs.joint_setup, state, source, log, saves)
        with CLOCK.phase("checkpoint"):
            results = [result_of_run(runs, result, i, log) for i in range(len(runs.cfgs))]
    if cfg.run.output_dir and cfg.run.progress and not any(one.interrupted or one.unsaved for one in results):
        say(next_commands(cfg.run.output_dir, seeds))
    return results


class PreparedSeeds(NamedTuple):
    """Runs that are checked and resolved, before their directories are opened."""

    runs: Runs
    states: list[TeamState]  # of each run, at step 0
    source: Source
    identity: dict[str, Any]  # see `open_run`
    cfg: TrainConfig  # common settings, without auto


def prepare_seeds(
    team: Team,
    reward: Callable | Environment | TextEnvironment,
    items: Sequence[dict],
    cfg: TrainConfig,
    seeds: Sequence[int],
    params: Sequence[Any] | None,
    eval_items: Sequence[dict],
) -> PreparedSeeds:
    """Check the arguments of `train_seeds`, and prepare its runs. Writes nothing, so that a dry run can do the same."""
    env = environment_of(team, reward, cfg)
    check_seeds(seeds, cfg)
    cfg = resolve_auto(cfg, cfg.for_seed(int(seeds[0])))
    cfgs = tuple(cfg.for_seed(int(seed)) for seed in seeds)
    items, eval_items = read_rows(items), read_rows(() if eval_items is None else eval_items)
    all_items = items
    check_run(items, cfgs[0], None)
    keep_programs(say if cfg.run.progress else None)
    check_team(team, cfg)
    items, eval_items, shared = items_that_fit(team, env, items, eval_items, cfg)
    say_what_is_shared(shared, cfg)
    meshes = [sharding.mesh_for(cfg.run.mesh, [len(s.members) * count for s in team.stacks]) for count in (1, len(cfgs))]
    params = initial_params(team, params, cfg.lora.lora_rank > 0)
    say_what_runs(team, params, cfg)
    params = common_params(team, params, cfgs[0], meshes[0])
    started = [start(team, [map_own(jnp.copy, stack) for stack in params], run_cfg) for run_cfg in cfgs]
    runs, cfg = settle_runs(Runs(started[0][0], cfgs, *meshes), started[0][1], cfg, items, env)
    source, identity = seeds_source(runs, items, env, eval_items), run_identity(runs.setup, all_items, env)
    return PreparedSeeds(runs, [state for _, state in started], source, identity, cfg)


def settle_runs(
    runs: Runs, state: TeamState, cfg: TrainConfig, items: Sequence[dict], env: Environment
) -> tuple[Runs, TrainConfig]:
    """Return the runs and their common settings without auto, see `settle_updates`. state: of the first run.

    On several GPUs nothing is proved: auto is what is fast where memory does not matter.
    """
    if runs.mesh is not None:
        runs = dataclasses.replace(runs, setup=with_settings(runs.setup, update_settings(with_ample_memory(cfg))))

    def longest() -> tuple[Work, Updates]:
        work, updates = longest_update(runs.joint_setup, joined, longest_prompts(runs.setup, items, env))
        return work, lambda setup: updates(dataclasses.replace(runs, setup=setup).joint_setup)

    joined = joined_shapes(state, runs)
    setup, cfg = settle_updates(runs.setup, joined, cfg, longest)
    cfgs = tuple(run_cfg.replace(**update_settings(cfg)) for run_cfg in runs.cfgs)
    return dataclasses.replace(runs, setup=setup, cfgs=cfgs), cfg


def result_of_run(runs: Runs, result: LoopResult, i: int, log: SeedsLog) -> TrainResult:
    """Write the models of run i and return what `train` would return for it."""
    state = state_of_run(result.state, i, runs)
    before, after = (None if results is None else results[i] for results in (result.before, result.after))
    run = runs.cfgs[i].run
    unsaved = ("" if result.interrupted else write_models(run, runs.team, state)) or result.unsaved
    if run.output_dir and not (result.interrupted or unsaved):
        mark_complete(run.output_dir, run.num_updates)
    return TrainResult(runs.team, state, log.logs[i].rewards, before, after, result.interrupted, unsaved)


def check_seeds(seeds: Sequence[int], cfg: TrainConfig) -> None:
    """Raise an error for seeds and settings that cannot be trained together. Experiments call this before they load models."""
    seeds, cfg = [int(seed) for seed in seeds], resolve_resume(cfg, seeds)
    single_run = bool(cfg.run.output_dir) and checkpoints_of(cfg).exists()
    require(SEEDS, facts(cfg, seeds=seeds, saves=cfg.run.saves, single_run=single_run))
    if cfg.run.output_dir:
        check_unlocked(cfg.run.output_dir)
    for seed in seeds:
        check_settings(cfg.for_seed(seed))


def common_params(team: Team, params: Sequence[Any], cfg: TrainConfig, mesh: Mesh | None) -> list[Any]:
    """Return the parameters that all runs start from: stacks that get new LoRA adapters without them, on the mesh."""
    common = []
    for old, adapted in zip(params, with_adapters(team, params, cfg, mesh), strict=True):
        has_new_adapters = cfg.lora.lora_rank and not lora.targets_of(old)
        common.append(lora.split(adapted)[0] if has_new_adapters else adapted)
    return common


def open_runs(
    runs: Runs, states: Sequence[TeamState], identity: dict[str, Any], opened: contextlib.ExitStack
) -> tuple[TeamState, list[RolloutLog], list[tuple[Checkpointer, dict]]]:
    """Open the directory of each run, or resume all runs at the newest step that all of them have saved.

    Args:
        states: initial state of each run; donated.
        identity: see `open_run`.
        opened: closes the directories.

    Returns:
        The state of all runs, and per run its log and its checkpoints with their metadata (empty without checkpoints).
    """
    cfg = runs.cfgs[0]
    step = common_step(runs.cfgs) if cfg.run.resume else None
    if cfg.run.output_dir and not cfg.run.resume:
        set_aside(str(Path(cfg.run.output_dir).parent))
    pairs = zip(runs.cfgs, states, strict=True)
    open_ = [opened.enter_context(open_run(run_cfg, state, identity, None, step)) for run_cfg, state in pairs]
    logs = [RolloutLog(runs.team, run_cfg, run.writer) for run_cfg, run in zip(runs.cfgs, open_, strict=True)]
    return join_states([run.state for run in open_], runs), logs, [saver for run in open_ for saver in run.savers]


def common_step(cfgs: Sequence[TrainConfig]) -> int:
    """Return the newest step of which all runs have an intact checkpoint: a kill may leave the newest one in only some of them.
    Only reads, because the directories are not locked yet."""
    with contextlib.ExitStack() as opened:
        savers = [opened.enter_context(Checkpointer(checkpoints_of(cfg), read_only=True)) for cfg in cfgs]
        common = set.intersection(*(set(saver.steps()) for saver in savers))
        common &= common if cfgs[0].run.resume_step is None else {cfgs[0].run.resume_step}
        for step in sorted(common, reverse=True):
            if all([saver.is_intact(step, cfgs[0].run.strict_checkpoints) for saver in savers]):
                return step
        steps = ", ".join(f"{cfg.run.output_dir}: {saver.steps()}" for cfg, saver in zip(cfgs, savers, strict=True))
    raise ValueError(f"the runs have no checkpoint of one step in common ({steps}): resume them one by one with train")


def in_callers_thread(play: Callable[..., Rollout], env: Environment) -> Callable[[Any], Rollout]:
    """Return a function for `play_together` that calls the environment in the caller's thread."""
    return lambda sample: play(sample, env=CallersEnvironment(env, sample))


def seeds_source(runs: Runs, items: Sequence[dict], env: Environment, eval_items: Sequence[dict]) -> Source:
    """Return the source of several runs: each step plays the episodes of all runs and samples their completions together."""
    cfgs = [cfg.replace(overlap_rewards=False) for cfg in runs.cfgs]  # the runs call one environment
    setups = [setup._replace(cfg=cfg) for setup, cfg in zip(runs.setups, cfgs, strict=True)]

    def play(step: int, state: TeamState) -> list[RolloutExperience]:
        draws = [partial(tasks_at, items, cfg, step) for cfg in cfgs]
        plays = [
            in_callers_thread(partial(play_step, setup=setup, tasks=draw(), step=step, further=draw), env)
            for draw, setup in zip(draws, setups, strict=True)
        ]
        rollouts = play_together(runs, state, plays)
        if step == 0:  # later updates may lack a valid reward
            for rollout in rollouts:
                check_valid(rollout)
        return [RolloutExperience(rollout, draw()) for rollout, draw in zip(rollouts, draws, strict=True)]

    def make_batches(state: TeamState, played: Sequence[RolloutExperience]) -> Batches:
        return batches_together(runs, state, [run.rollout for run in played])

    def evaluate(state: TeamState) -> list[Evaluation]:
        plays = [in_callers_thread(partial(play_held_out, team=runs.team, items=eval_items, cfg=cfg), env) for cfg in cfgs]
        return [summarize(rollout) for rollout in play_together(runs, state, plays)]

    return Source(play, make_batches, evaluate if eval_items else None)
