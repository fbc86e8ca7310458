"""Compile the programs of a run in parallel, before the first step.

XLA compiles a program on about one core, so compiling several at once takes little longer than the slowest one. It also avoids
compiling between sampling and update: meanwhile the memory that the sampler freed would be returned to the system, or to the
host of a virtual machine (4 s of a first step of 25). Left out: other lengths of prompts and completions.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Lowered

from jmarl.algorithms import Algorithm
from jmarl.config import Episodes, Sampling
from jmarl.envs.base import Environment
from jmarl.learning.batches import critic_positions, make_batch, one_per_prompt
from jmarl.learning.choose import Work
from jmarl.learning.critics import penalizes_tokens, reuses_values, trains
from jmarl.learning.per_agent import for_stack, held_agents
from jmarl.learning.setup import Setup
from jmarl.learning.update import lower_update, update_keys
from jmarl.models import lora
from jmarl.models.config import ModelConfig
from jmarl.randomness import EVAL, GREEDY, TRAIN, Randomness
from jmarl.rollout.chunks import num_parts
from jmarl.rollout.make_batches import explicit_groups
from jmarl.rollout.play import acting_mask, agents_to_sample, check_number_of_agents, keeps_caches
from jmarl.rollout.turns import take_rows_of_nodes
from jmarl.sampling.generate import Encoded, SampleRequest, bucket, pad, sample_stack, sample_team, tokenize_first_turn
from jmarl.sampling.refill import refill_stack, refill_team
from jmarl.types import Batch, Completions, Data, StackState, TeamState

MEASURED_ITEMS = 64  # whose prompts are looked at for the longest
Updates = Callable[[Setup], Iterable[Lowered]]  # a setup -> the programs of its updates


def keep_programs(show: Callable[[str], None] | None) -> None:
    """Keep compiled programs in the user's cache directory, so that the next run need not compile them; show it the first time.

    A no-op where JAX already has a cache (JAX_COMPILATION_CACHE_DIR) or none is wanted (JAX_ENABLE_COMPILATION_CACHE=false).
    """
    settings: Any = jax.config  # its type has no such attributes
    if settings.jax_compilation_cache_dir is not None or not settings.jax_enable_compilation_cache:
        return
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jmarl" / "programs"
    jax.config.update("jax_compilation_cache_dir", str(directory))
    compilation_cache.reset_cache()  # JAX looks for a cache once, when it compiles its first program
    if show is not None and not directory.exists():
        show(f"compiled programs are kept in {directory}; JAX_ENABLE_COMPILATION_CACHE=false switches this off")


def compile_all(programs: Iterable[Lowered]) -> int:
    """Compile programs in threads, while the next ones are traced, and return their number. jax caches them: the jitted
    functions do not compile again for arguments of these shapes."""
    with ThreadPoolExecutor() as threads:
        return len(list(threads.map(Lowered.compile, programs)))


def programs_of_run(
    setup: Setup,
    state: TeamState,
    tasks: Sequence[dict],
    eval_items: Sequence[dict],
    env: Environment,
    following: Sequence[dict] = (),
) -> Iterator[Lowered]:
    """Yield the programs of a step on `tasks` with completions of full length, and of an evaluation on `eval_items`.

    following: the tasks of the next step, of which some begin in this one with async_steps.

    Left out, because their lengths are not known: later turns, updates with several turns, a central critic. Also left out:
    programs that only compute values, which are small.
    """
    team, cfg = setup.team, setup.cfg
    params = [lora.model_of(stack) for stack in state.stacks]

    def request_of(items: Sequence[dict], settings: Sampling, group: int, purpose: int) -> tuple[Encoded, SampleRequest]:
        """Return the encoded prompts of items, and the request for the first part of them."""
        randomness = Randomness(cfg.run.seed, 0, purpose)
        _, prompts = env.reset(items, randomness.environment_rng())
        check_number_of_agents(team, prompts)
        encoded, ids = (
            pad(team, tokenize_first_turn(team, prompts, settings, cfg.episodes)),
            np.arange(len(items), dtype=np.uint32),
        )
        keep, acts = keeps_caches(cfg.episodes, settings, turn=0), agents_to_sample(acting_mask(prompts))
        size = len(items) // num_parts(len(items), cfg.episodes)
        part = take_rows_of_nodes(team, encoded, slice(size))
        return encoded, SampleRequest(part, settings, randomness, group, ids[:size], keep_cache=keep, acts=acts)

    def samplers(items: Sequence[dict], settings: Sampling, group: int, purpose: int) -> tuple[Lowered, ...]:
        return sample_team(team, params, request_of(items, settings, group, purpose)[1], sample_stack.lower)

    of_training = cfg.sampling, cfg.episodes.num_generations, TRAIN
    encoded, request = request_of(tasks, *of_training)
    lowered = sample_team(team, params, request, sample_stack.lower)
    if state.pending:
        yield from refill_team(team, params, state.pending, request, request_of(following, *of_training)[1], refill_stack.lower)
    else:
        yield from lowered
    if setup.algorithm.row.baseline == "greedy":
        yield from samplers(tasks, dataclasses.replace(cfg.sampling, temperature=0.0), 1, GREEDY)
    if cfg.episodes.num_turns == 1:
        for i, (spec, prompts, sampler) in enumerate(zip(team.stacks, encoded, lowered, strict=True)):
            if not set(spec.order) <= set(cfg.run.frozen_agents):
                yield from updates_of_stack(setup, state, i, prompts, sampler)
    if eval_items:
        yield from samplers(eval_items, cfg.eval_sampling(), cfg.run.eval_generations, EVAL)


def longest_update(setup: Setup, state: TeamState, widths: Sequence[int]) -> tuple[Work, Updates]:
    """Return an update after all turns with completions of full length, and a function from a setup to its programs.

    widths: length of the prompts of the first turn of each stack, as they are padded.
    """
    team, encoded = setup.team, example_prompts(setup, widths)
    ids, group = np.arange(setup.cfg.episodes.num_prompts, dtype=np.uint32), setup.cfg.episodes.num_generations
    request = SampleRequest(encoded, setup.cfg.sampling, Randomness(0, 0, TRAIN), group, ids)
    samplers = sample_team(team, [lora.model_of(stack) for stack in state.stacks], request, sample_stack.lower)

    def updates(setup: Setup) -> Iterator[Lowered]:
        for i, (spec, prompts, sampler) in enumerate(zip(team.stacks, encoded, samplers, strict=True)):
            if not set(spec.order) <= set(setup.cfg.run.frozen_agents):
                yield from updates_of_stack(setup, state, i, rows_of_turns(setup, i, prompts), sampler)

    return work_of_rollouts(setup, widths), updates


def work_of_rollouts(setup: Setup, widths: Sequence[int]) -> Work:
    """Return what `longest_update` is for the formula of `learning.choose`."""
    episodes, new = setup.cfg.episodes, setup.cfg.sampling.max_new_tokens
    prompts, group = episodes.num_prompts, episodes.num_generations
    rows = [rows_of_turns(setup, i, x)[0].shape[1:] for i, x in enumerate(example_prompts(setup, widths))]
    apart = group if has_chains(episodes) else 1  # copies of a prompt
    tokens = max(count * (apart * width + group * new) for count, width in rows)
    # Several turns have any number of rows, at least those of the first.
    return Work.of(setup.team, setup.cfg, tokens, prompts * (group if episodes.num_turns == 1 else apart))


def example_prompts(setup: Setup, widths: Sequence[int]) -> Encoded:
    """Return prompts of zeros of the first turn of each stack."""
    shapes = [(len(spec.members), len(spec.members[0]) * setup.cfg.episodes.num_prompts) for spec in setup.team.stacks]
    return tuple(
        (example((*shape, width), np.int32), np.ones(shape, np.int32)) for shape, width in zip(shapes, widths, strict=True)
    )


def has_chains(episodes: Episodes) -> bool:
    """Return whether every completion is a row with a prompt of its own, because later turns continue with one completion."""
    return episodes.num_turns > 1 and episodes.branching == "chain"


def longest_prompts(setup: Setup, items: Sequence[dict], env: Environment) -> list[int]:
    """Return the length of the longest prompt of each stack in the first turn on the first items, as it is padded."""
    team, cfg = setup.team, setup.cfg
    _, prompts = env.reset(items[:MEASURED_ITEMS], Randomness(cfg.run.seed, 0, TRAIN).environment_rng())
    check_number_of_agents(team, prompts)
    encoded = pad(team, tokenize_first_turn(team, prompts, cfg.sampling, cfg.episodes))
    return [ids.shape[-1] for ids, _ in encoded]


def updates_of_batches(setup: Setup, state: TeamState, batches: Sequence[Data]) -> Iterator[Lowered]:
    """Yield the update of each stack that learns from its batch of pairs or texts."""
    team, run = setup.team, setup.cfg.run
    for i, (spec, stack, batch) in enumerate(zip(team.stacks, state.stacks, batches, strict=True)):
        if not set(spec.order) <= set(run.frozen_agents):
            algorithm, agents = for_stack(
                setup.algorithm, run, spec.members, team.num_agents, held_agents(run, team.num_agents, state.step)
            )
            batch = batch._replace(keys=update_keys(algorithm, run.seed, 0, i, len(spec.members)))
            yield lower_update(stack, batch, model=spec.config, algorithm=algorithm, agents=agents)


def rows_of_turns(setup: Setup, i: int, prompts: tuple) -> tuple:
    """Return the prompts [A, rows, S] of an update of stack i after all turns, from those of the first.

    Every later prompt holds the turns before, and no episode ends early."""
    (ids, lengths), episodes, spec = prompts, setup.cfg.episodes, setup.team.stacks[i]
    if episodes.num_turns == 1:
        return prompts
    branches = 1
    if episodes.branching == "tree":
        branches = episodes.num_generations ** (setup.team.num_agents if episodes.joint_mode == "cross" else 1)
    rows = ids.shape[1] * sum(branches**turn for turn in range(episodes.num_turns))
    longest = ids.shape[-1] + (episodes.num_turns - 1) * setup.cfg.sampling.max_new_tokens
    width = min(bucket(longest), spec.config.max_positions)
    return example((len(ids), rows, width), np.int32), np.ones((len(ids), rows), lengths.dtype)


def updates_of_stack(setup: Setup, state: TeamState, i: int, prompts: tuple, sampler: Lowered) -> Iterator[Lowered]:
    """Yield the update of stack i, and that of its own critics. prompts, sampler: of the stack."""
    team, critics, algorithm, cfg = setup
    spec, shared, kind = team.stacks[i], algorithm.has_value_head, algorithm.value_kind
    batch = example_batch(prompts, sampler, algorithm, len(spec.members[0]))
    batch = one_per_prompt(batch) if has_chains(cfg.episodes) else batch
    batch = batch._replace(keys=update_keys(algorithm, cfg.run.seed, 0, i, len(spec.members)))
    critic_batch = batch if kind == "token" else critic_positions(batch, kind, prompts_only=not shared)
    critic_batch = critic_batch._replace(values=None) if reuses_values(algorithm) else critic_batch

    def update(stack: StackState, batch: Batch, model: ModelConfig, stack_algorithm: Algorithm, part: str) -> Lowered:
        held = held_agents(cfg.run, team.num_agents, state.step)
        resolved, agents = for_stack(stack_algorithm, cfg.run, spec.members, team.num_agents, held)
        return lower_update(stack, batch, model=model, algorithm=resolved, agents=agents, trains=part)

    yield update(state.stacks[i], critic_batch if shared else batch, spec.config, algorithm, trains(algorithm))
    if algorithm.row.critic == "own" and not shared:
        yield update(state.critics[i], critic_batch, critics.specs[i].config, critics.algorithm, "values")


def example_batch(prompts: tuple, sampler: Lowered, algorithm: Algorithm, roles: int) -> Batch:
    """Return a batch with the shapes of a first turn, and with values if the algorithm has them."""
    done = example_completions(sampler, prompts[0].shape[1] // sampler.out_info.tokens.shape[1])
    rows, row = example(done.tokens.shape[:3]), algorithm.row
    values = rows if row.baseline in ("critic", "greedy") else None
    groups = rows[0, :, 0] if explicit_groups(row.grouping, done.tokens.shape[2]) else None
    batch = make_batch(prompts, done, rows, groups, done.tokens.shape[-1], roles=roles, values=values)
    zeros = example(done.tokens.shape)
    batch = batch._replace(values=zeros) if row.per_token else batch
    return batch._replace(ref_logprobs=zeros, penalty=zeros) if penalizes_tokens(algorithm) else batch


def example_completions(sampler: Lowered, parts: int = 1) -> Completions:
    """Return zeros with the shapes of completions of full length, sampled in this number of parts."""
    shapes = sampler.out_info._replace(cache=None, steps=None)
    done = jax.tree.map(lambda x: example((x.shape[0], x.shape[1] * parts, *x.shape[2:]), x.dtype), shapes)
    return done._replace(steps=np.full(done.tokens.shape[0], done.tokens.shape[-1], np.int32))


def example(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Return zeros that take the memory of one: a batch too large for the device must fail while sampling, not here."""
    return np.broadcast_to(np.zeros((), dtype), shape)
