"""Prepare a run: check it, resolve its settings, make critics, initial state and the source of experience.

`prepare` is the only start of a run. A dry run stops after it; nothing is written, and no directory is opened. `start` is the
part of it that makes the state, also for several seeds in one program and, of shapes, for `jmarl plan`.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jmarl.algorithms import Algorithm, find_row, resolve, with_fastest_updates
from jmarl.algorithms.constraints import facts
from jmarl.algorithms.run_constraints import HELD_OUT
from jmarl.config import TrainConfig, flat
from jmarl.config.constraints import require
from jmarl.envs.base import Environment, describe
from jmarl.envs.rows import read_rows
from jmarl.evaluation.evaluate import evaluation_of
from jmarl.files.identity import fingerprint
from jmarl.files.interrupt import line_of_ignored
from jmarl.files.run_directory import resolve_auto, resolve_resume, with_absolute_directory
from jmarl.files.run_files import shown
from jmarl.hardware import memory_in_use, memory_pool
from jmarl.learning.choose import Work, bytes_on_device, choose, is_open, update_settings, with_settings
from jmarl.learning.critics import critic_algorithm, make_critics
from jmarl.learning.meshes import line_of_cores, line_of_mesh, mesh_that_fits
from jmarl.learning.optimizer import init_stack
from jmarl.learning.per_agent import initial_state, settings_of_stack, with_adapters
from jmarl.learning.setup import Setup, make_setup
from jmarl.logs.goodput import CLOCK
from jmarl.logs.terminal import say
from jmarl.models import lora, sharding
from jmarl.models.heads import with_value_head
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.peft import merge
from jmarl.models.sharding import DeviceMesh
from jmarl.models.stack import map_own, to_host, unstack
from jmarl.models.weights import num_params
from jmarl.preferences.data_source import add_reference, batch_size, data_source, fitting_data, longest_batches
from jmarl.preferences.data_source import needs_long_context as data_needs_long_context
from jmarl.preferences.encoding import AgentTokens, Examples
from jmarl.preferences.pair_rounds import Rounds, pair_source
from jmarl.preferences.pairs import Trajectory, shared_examples
from jmarl.preferences.reward_model import Fit, LearnedRounds, policy_config, with_reward_models
from jmarl.processes import exchange
from jmarl.rollout.chunks import divided
from jmarl.rollout.experience import Source
from jmarl.rollout.prompt_check import items_that_fit, needs_long_context
from jmarl.runs.checks import check_data, check_fit, check_run, check_team, environment_of, find_own_algorithms
from jmarl.runs.precompile import Updates, keep_programs, longest_prompts, longest_update, updates_of
from jmarl.runs.rollouts import rollout_source, with_empty_slots
from jmarl.runs.run import Run, Task
from jmarl.shadows import explaining
from jmarl.team import Team, initial_params, on_mesh, policies, sort_into_stacks, stack_agents
from jmarl.types import Batches, TeamState


@explaining()
def prepare(
    cfg: TrainConfig,
    team: Team,
    task: Task,
    *,
    params: Sequence[Any] | None = None,
    wandb_config: dict | None = None,
    fit: Fit | None = None,
) -> tuple[Run, TeamState]:
    """Check a run, and return it with its state at step 0. Writes nothing.

    Args:
        cfg: the settings.
        team: who learns.
        task: what from.
        params: parameters [A, ...] of each stack, instead of those of the team's agents. They are donated.
        wandb_config: keyword arguments of `wandb.init`, to be checked.
        fit: `jmarl.fit`, which trains reward models; for algorithms that learn from one.
    """
    find_own_algorithms(cfg.algorithm, cfg.preference.rl_algorithm)
    cfg = with_absolute_directory(of_this_process(cfg))
    given = exchange.from_first(partial(resolve_resume, cfg))  # files are read by one process
    cfg = of_this_process(exchange.from_first(partial(resolve_auto, given)))
    cfg = choose_mesh(team, cfg)
    task, data, cfg = checked_task(cfg, team, task, wandb_config)
    check_equal(cfg, data, team)
    team = on_mesh(team, cfg.run)
    task, encoded = encoded_task(team, task, cfg)
    first_words(team, task, cfg, team.stacks[0].mesh)
    setup, state = start(team, initial_params(team, params, cfg.lora.lora_rank > 0), cfg)
    if cfg.episodes.async_steps:
        state = with_empty_slots(setup, state, task.items, task.env)
    if task.env is None:
        setup = choose_updates(setup, state, partial(longest_of_data, setup, state, encoded[0]))
        make_source = partial(source_of_data, setup, *encoded)
    else:
        played = task._replace(env=divided(task.env, cfg.episodes.rewards_divided))
        setup = choose_updates(setup, state, partial(longest_of_items, setup, state, task.items, played.env))
        make_source = partial(source_of_items, setup, played, given, fit)
    return Run(setup, task, identity_of(setup, state, task.env, data), make_source), state


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


def checked_task(cfg: TrainConfig, team: Team, task: Task, wandb_config: dict | None) -> tuple[Task, Any, TrainConfig]:
    """Check the arguments of a run. Returns the task with an `Environment` and lists of what fits the agents' contexts, the
    fingerprints of all that was given, and the settings with the context, see `Run.long_context`."""
    if task.env is None:
        check_fit(cfg, wandb_config)
        check_data(task.items, cfg)
        if not isinstance(task.held_out, list | tuple) or task.held_out:
            check_data(task.held_out, cfg)
        require([HELD_OUT], facts(cfg, held_out=task.held_out))
        check_team(team, cfg)
        keep_programs(say if cfg.run.progress else None)
        is_long = partial(data_needs_long_context, team, [*task.items, *task.held_out], cfg)
        return task, of_rows(task.items, task.held_out), in_chosen_context(team, cfg, is_long)
    env = environment_of(team, task.env, cfg)
    items, held_out = read_rows(task.items), read_rows(() if task.held_out is None else task.held_out)
    check_run(items, cfg, wandb_config)
    require([HELD_OUT], facts(cfg, held_out=held_out))
    keep_programs(say if cfg.run.progress else None)
    check_team(team, cfg)
    data = of_rows(items, held_out)
    cfg = in_chosen_context(team, cfg, partial(needs_long_context, team, env, [*items, *held_out], cfg))
    items, held_out, overlap = items_that_fit(team.in_context(cfg.run.long_context), env, items, held_out, cfg)
    return task._replace(env=env, items=items, held_out=held_out, overlap=overlap), data, cfg


def of_rows(items: Iterable[Any], held_out: Iterable[Any]) -> dict[str, Any]:
    """Return the fingerprints of the items of a run and of its held-out items."""
    return {"data": fingerprint.of_data(items), "held_out": fingerprint.of_data(held_out)}


def encoded_task(team: Team, task: Task, cfg: TrainConfig) -> tuple[Task, list[Examples]]:
    """Return a task with the given data that fits the agents' contexts, and this and the held-out data as token ids; a task
    with an environment as it is."""
    if task.env is not None:
        return task, []
    (items, examples), (others, held_out) = fitting_data(team, task.items, task.held_out, cfg)
    return task._replace(items=items, held_out=others, overlap=shared_examples(items, others)), [examples, held_out]


def in_chosen_context(team: Team, cfg: TrainConfig, is_long: Callable[[], bool]) -> TrainConfig:
    """Return settings that say whether models with two contexts compute in the long one: it is chosen here, once for a run.

    is_long: whether the run needs it, for auto. Raises ValueError if it is set and no model has two."""
    models = [*(spec.config for spec in team.stacks), *(x.config for x in (team.critic, team.reward_model) if x is not None)]
    if cfg.run.long_context is True and not any(config.has_two_contexts for config in models):
        raise ValueError(
            "long_context=True has no effect: no model of the team has factors of longrope for short and for long contexts; "
            "remove it"
        )
    if cfg.run.long_context != "auto" or not is_long():
        return cfg
    if cfg.run.progress:
        say("computes with longrope's long factors, in all rows (long_context=True): prompts need them")
    return cfg.replace(long_context=True)


def choose_mesh(team: Team, cfg: TrainConfig, num_runs: int = 1) -> TrainConfig:
    """Return settings for the devices that are here, see `mesh_that_fits`, and say what was chosen.

    num_runs: of this team that learn together."""
    room = memory_pool()
    if room is None or exchange.count() > 1:  # unknown, as on CPUs; processes use all devices anyway, see `mesh_of_processes`
        return cfg
    cfg, line = mesh_that_fits(team, cfg, policy_algorithm(cfg), jax.device_count(), room, num_runs)
    if line and cfg.run.progress:
        say(line)
    return cfg


def place_team(agents: Sequence[Agent], cfg: TrainConfig, shared_weights: bool = False) -> tuple[TrainConfig, Team, list[Any]]:
    """Return the settings with their mesh, a team on it without agents, and the parameters [A, ...] of its stacks, for callers
    that keep parameters between runs. Arguments as of `make_team`."""
    team = Team(sort_into_stacks(agents, shared_weights))
    cfg = choose_mesh(team, cfg)
    team = on_mesh(team, cfg.run)
    return cfg, team, stack_agents(team.stacks, agents, cfg.lora.lora_rank > 0)


def start(team: Team, params: Sequence[Any], cfg: TrainConfig, devices: Sequence[Any] | None = None) -> tuple[Setup, TeamState]:
    """Return the setup of a run and its state at step 0, on the devices where it trains.

    params: parameters [A, ...] of each stack, which are donated. devices: of the mesh; None: those of this process. Others are
    for shapes.
    """
    team = on_mesh(team, cfg.run, devices)
    mesh = team.stacks[0].mesh
    divides_rows = mesh is not None and mesh.shape["data"] > 1
    algorithm = dataclasses.replace(policy_algorithm(cfg), divides_rows=divides_rows)
    params = with_adapters(team, params, cfg)
    critics, critic_params = make_critics(team, params, algorithm, cfg.run.seed)
    if algorithm.has_value_head:
        params = [with_value_head(stack) for stack in params]
    if algorithm.row.margin == "score":  # params of an earlier fit have a head
        params = [stack if "value" in stack else with_value_head(stack) for stack in params]
    state, own = initial_state(team, params, algorithm, cfg.run), algorithm.row.critic == "own"
    learns = [stack.opt_state != () for stack in state.stacks] if own else [True]  # frozen agents have frozen critics
    critic_states = tuple(
        init_stack(
            sharding.place(weights, spec.mesh),
            settings_of_stack(critic_algorithm(algorithm), cfg.run, spec.members, team.num_agents)[0],
            learns=critic_learns,
            mesh=spec.mesh,
        )
        for spec, weights, critic_learns in zip(critics, critic_params, learns, strict=False)
    )
    return make_setup(team, critics, algorithm, cfg), state._replace(critics=critic_states)


def policy_algorithm(cfg: TrainConfig) -> Algorithm:
    """Return the resolved algorithm by which the team learns: of a run on a learned reward, `rl_algorithm`."""
    return resolve(policy_config(cfg) if find_row(cfg.algorithm).learned else cfg)


def identity_of(setup: Setup, state: TeamState, env: Environment | None, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must not change when a run resumes, as JSON values: team, critics, environment, data, held-out items, reward
    and, if they are the reference of preferences, the weights before training. Of LoRA the digests of the bases are compared
    instead.

    state: at step 0. data: see `of_rows`.
    """
    algorithm = setup.algorithm
    has_reference = algorithm.row.margin in ("own", "joint") and not algorithm.preference.reference_free
    compared = has_reference and not algorithm.lora.lora_rank
    identity = {
        "team": setup.team.describe(),
        "critics": Team(setup.critics).describe(),
        **data,
        "initial": [lora.digest(stack) for stack in policies(state)] if compared else [],
    }
    if env is None:
        return identity
    return identity | {
        "environment": describe(env),
        "options": fingerprint.of_options(env),
        "reward": fingerprint.of_reward(env),
        "error_handling": fingerprint.error_handling(env),
    }


# --- how updates fit into the memory -----------------------------------------------------------------------------------


def choose_updates(setup: Setup, state: TeamState, longest: Callable[[], tuple[Work, Updates]]) -> Setup:
    """Return a setup without auto: choose how the updates of a run fit into the memory, and say so.

    longest: returns the largest update, and a function from a setup to its programs.
    """
    rooms = exchange.gather(memory_pool)  # all processes choose the same
    if is_open(setup.cfg) and (room := min(filter(None, rooms), default=None)) is not None:
        work, updates = longest()
        size = max(exchange.gather(lambda: max(bytes_on_device(state), memory_in_use())))
        setup, line = choose(setup, work, size, [room], updates)
        if setup.cfg.run.progress:
            say(line)
    elif is_open(setup.cfg):  # a platform that does not say how much memory it has
        setup = with_settings(setup, update_settings(with_fastest_updates(setup.cfg)))
    return setup


def longest_of_items(setup: Setup, state: TeamState, items: Sequence[dict], env: Environment) -> tuple[Work, Updates]:
    """Return the largest update of a run on items, and a function from a setup to its programs."""
    widths = longest_prompts(setup, items, env)
    if setup.algorithm.row.data == "rollouts":
        return longest_update(setup, state, widths)
    row = [0] * setup.cfg.sampling.max_new_tokens
    agents = {agent: width for spec, width in zip(setup.team.stacks, widths, strict=True) for agent in spec.order}
    pair = [AgentTokens([0] * agents[agent], (row, row)) for agent in range(setup.team.num_agents)]
    return longest_of_data(setup, state, Examples([pair]))


def longest_of_data(setup: Setup, state: TeamState, examples: Examples) -> tuple[Work, Updates]:
    """Return an update on the longest prompts and rows of examples, and a function from a setup to its programs."""
    batches = longest_batches(setup.team, examples, setup.algorithm)
    tokens = max(x.prompts.shape[1] * (x.prompts.shape[2] + x.tokens.shape[2] * x.tokens.shape[3]) for x in batches)
    work = Work.of(setup.team, setup.cfg, tokens, batch_size(setup.algorithm))
    return work, lambda setup: updates_of(setup, state, Batches(batches))


# --- the source of experience ------------------------------------------------------------------------------------------


def source_of_data(setup: Setup, examples: Examples, held_out: Examples, state: TeamState) -> Source:
    """Return the source of a run on given data, with the log-probabilities of its pairs under the initial weights."""
    with CLOCK.phase("reference" if setup.algorithm.row.data == "pairs" else "data"):
        params = policies(state)
        examples, held_out = (add_reference(setup.team, params, part, setup.algorithm) for part in (examples, held_out))
    return data_source(setup, examples, held_out)


def source_of_items(setup: Setup, task: Task, given: TrainConfig, fit: Fit | None, state: TeamState) -> Source:
    """Return the source of a run on completions: on rollouts, on pairs in rounds, or on rollouts with a learned reward.

    given: settings with auto, which reward models choose for themselves; fit: see `prepare`.
    """
    team, cfg, row = setup.team, setup.cfg, find_row(setup.cfg.algorithm)
    evaluate = evaluation_of(team, task.held_out, task.env, cfg, task.eval_metrics)
    if not row.makes_pairs:
        return rollout_source(setup, task.items, task.env, task.held_out, evaluate)
    algorithm, initial = resolve(cfg), policies(state)
    rounds = Rounds(team, copies_for_rounds(initial, algorithm), task.items, task.env, algorithm, cfg)
    if not row.learned:
        return pair_source(setup, rounds, evaluate)
    assert fit is not None, "reward models are trained by jmarl.fit"
    learned = LearnedRounds(rounds, team.reward_model or first_agent(team, initial), algorithm, given, fit)
    return with_reward_models(rollout_source(setup, task.items, learned.env, task.held_out, evaluate), learned)


def copies_for_rounds(initial: Sequence[Any], algorithm: Algorithm) -> list[Any]:
    """Return copies of each stack's parameters, for rounds that use them as reference or comparator; else []."""
    settings = algorithm.preference
    if settings.comparator != "initial" and (algorithm.row.learned or settings.reference_free):
        return []
    return [map_own(jnp.copy, stack) for stack in initial]


def first_agent(team: Team, initial: Sequence[Any]) -> Agent:
    """Return the first agent of a team as it was loaded."""
    spec = team.stacks[0]
    weights = merge(spec.config, to_host(unstack(initial[0], 0)))
    return Agent("first", spec.config, weights, spec.tokenizer, spec.generation_config)


# --- the first words -----------------------------------------------------------------------------------------------------


def first_words(team: Team, task: Task, cfg: TrainConfig, mesh: DeviceMesh | None) -> None:
    """Show the first lines of a run, if it shows anything. mesh: of the run, or of all runs that learn together."""
    if task.env is None:
        lines = [line_of_run(team, cfg), line_of_data(task.items, task.held_out), task.overlap]
    else:
        lines = [task.overlap, line_of_run(team, cfg, getattr(task.env, "roles", ()))]
    lines += [line_of_mesh(mesh, cfg) if mesh else line_of_cores(team), line_of_ignored()]
    for line in filter(None, lines if cfg.run.progress else []):
        say(line)


def line_of_run(team: Team, cfg: TrainConfig, roles: Sequence[str] = ()) -> str:
    """Return who learns, where, how long, and where to. roles: of the agents in their environment."""
    counts = [len(spec.members) for spec in team.stacks]
    stacks = list(zip(counts, team.stacks, strict=True))
    sizes = " + ".join(f"{count} x {short_number(num_params(spec.config))}" for count, spec in stacks)
    devices = jax.devices()
    where = f"written to {shown(cfg.run.output_dir)}" if cfg.run.output_dir else "nothing is written (set output_dir)"
    in_bfloat16 = cfg.sampling.compute_dtype == "bfloat16"
    precision = "; computes in bfloat16, weights in float32" if in_bfloat16 else ""
    trained = [short_number(lora.num_trained(spec.config, cfg.lora)) for spec in team.stacks] if cfg.lora.lora_rank else []
    trained_text = f", of which LoRA trains {' + '.join(trained)}{' each' * (sum(counts) > 1)}" if trained else ""
    named = f"{', '.join(roles)}; " if team.num_agents > 1 and len(roles) == team.num_agents else ""
    agents = f"{team.num_agents} agent{'s' * (team.num_agents > 1)} ({named}{sizes} parameters{trained_text})"
    return (
        f"{cfg.algorithm}: {agents} on {len(devices)} x {devices[0].device_kind}, "
        f"{cfg.run.num_updates} update{'s' * (cfg.run.num_updates != 1)}, {where}{precision}"
    )


def short_number(count: float) -> str:
    """Return a number as "135 M", "1.2 M", "12 k" or "850"."""
    for unit, name in ((1e6, " M"), (1e3, " k")):
        if count >= 0.9995 * unit:
            return f"{count / unit:,.{int(count < 9.95 * unit)}f}{name}"
    return f"{count:.0f}"


def line_of_data(data: Sequence[Any], held_out: Sequence[Any]) -> str:
    """Return how many pairs or trajectories a run learns from, and of which agents if the data says so."""
    counts = Counter(item.agent for item in data if isinstance(item, Trajectory) and item.agent)
    agents = f" of {len(counts)} agents ({', '.join(f'{name}: {n}' for name, n in counts.items())})" if len(counts) > 1 else ""
    kind = "trajectories" if isinstance(data[0], Trajectory) else "pairs"
    return f"learns from {len(data)} {kind}{agents}" + (f"; {len(held_out)} held out" if held_out else "")
