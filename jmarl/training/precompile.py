"""Compile the programs of a run side by side, before the first of them runs.

XLA compiles a program on about one core, so several at once take little more than the longest. And a compiler that runs
between sampler and update leaves the memory that the sampler freed time to go back to the system, or to a virtual machine's
host (4 s of a first step of 25). Left out: other lengths of prompts and completions that may come; they compile when they do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.stages import Lowered

from jmarl.algorithms import Algorithm
from jmarl.envs.base import Environment
from jmarl.learning.batches import critic_positions, make_batch
from jmarl.learning.critics import penalizes_tokens, reuses_values, trains
from jmarl.learning.per_agent import for_stack, held_agents
from jmarl.learning.setup import Setup
from jmarl.learning.update import lower_update, update_keys
from jmarl.models import lora
from jmarl.randomness import EVAL, GREEDY, TRAIN, Randomness
from jmarl.rollout.chunks import num_parts
from jmarl.rollout.make_batches import explicit_groups
from jmarl.rollout.play import acting_mask, agents_to_sample, check_number_of_agents, keeps_caches
from jmarl.rollout.turns import take_rows_of_nodes
from jmarl.sampling.generate import SampleRequest, pad, sample_stack, sample_team, tokenize_first_turn
from jmarl.types import Batch, Completions, TeamState


def compile_all(programs: Iterable[Lowered]) -> None:
    """Compile programs, each in a thread, while the next of them are still being traced. jax keeps them: the jitted functions
    that they come from, called with such arguments, do not compile again."""
    with ThreadPoolExecutor() as threads:
        list(threads.map(Lowered.compile, programs))


def programs_of_run(
    setup: Setup, state: TeamState, tasks: Sequence[dict], eval_items: Sequence[dict], env: Environment
) -> Iterator[Lowered]:
    """What a step on `tasks` with completions of full length runs, and an evaluation on `eval_items` if there are; of several
    turns the sampler of the first, because the later ones' lengths are not known. Left out for the same reason: a central
    critic's; and programs that only give values, which are small."""
    team, critics, algorithm, cfg = setup
    row = algorithm.row
    params = [lora.model_of(s) for s in state.stacks]

    def samplers(items, settings, group: int, purpose: int):
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
        request = SampleRequest(part, settings, randomness, group, ids[:size], keep_cache=keep, acts=acts)
        return encoded, sample_team(team, params, request, sample_stack.lower)

    encoded, lowered = samplers(tasks, cfg.sampling, cfg.episodes.num_generations, TRAIN)
    yield from lowered
    if row.baseline == "greedy":
        yield from samplers(tasks, dataclasses.replace(cfg.sampling, temperature=0.0), 1, GREEDY)[1]
    if cfg.episodes.num_turns == 1:
        shared, kind = algorithm.has_value_head, algorithm.value_kind
        held = held_agents(cfg.run, team.num_agents, state.step)
        for i, (spec, prompts, sampler) in enumerate(zip(team.stacks, encoded, lowered, strict=True)):
            if set(spec.order) <= set(cfg.run.frozen_agents):
                continue
            mine, agents = for_stack(algorithm, cfg.run, spec.members, team.num_agents, held)
            batch = example_batch(prompts, sampler, algorithm, len(spec.members[0]))
            batch = batch._replace(keys=update_keys(algorithm, cfg.run.seed, 0, i, len(spec.members)))
            critic_batch = batch if kind == "token" else critic_positions(batch, kind, prompts_only=not shared)
            critic_batch = critic_batch._replace(values=None) if reuses_values(algorithm) else critic_batch
            yield lower_update(
                state.stacks[i],
                critic_batch if shared else batch,
                model=spec.config,
                algorithm=mine,
                agents=agents,
                trains=trains(algorithm),
            )
            if row.critic == "own" and not shared:
                mine, agents = for_stack(critics.algorithm, cfg.run, spec.members, team.num_agents, held)
                yield lower_update(
                    state.critics[i],
                    critic_batch,
                    model=critics.specs[i].config,
                    algorithm=mine,
                    agents=agents,
                    trains="values",
                )
    if eval_items:
        yield from samplers(eval_items, cfg.eval_sampling(), cfg.run.eval_generations, EVAL)[1]


def example_batch(prompts: tuple, sampler: Lowered, algorithm: Algorithm, roles: int) -> Batch:
    """Return a batch of the shapes of a first turn, with values where the algorithm has them."""
    done = example_completions(sampler, prompts[0].shape[1] // sampler.out_info.tokens.shape[1])
    rows, row = example(done.tokens.shape[:3]), algorithm.row
    values = rows if row.baseline in ("critic", "greedy") else None
    groups = rows[0, :, 0] if explicit_groups(row.grouping, done.tokens.shape[2]) else None
    batch = make_batch(prompts, done, rows, groups, done.tokens.shape[-1], roles=roles, values=values)
    zeros = example(done.tokens.shape)
    batch = batch._replace(values=zeros) if row.per_token else batch
    return batch._replace(ref_logprobs=zeros, penalty=zeros) if penalizes_tokens(algorithm) else batch


def example_completions(sampler: Lowered, parts: int = 1) -> Completions:
    """What a sampler returns in so many parts: zeros, of full length."""
    about = sampler.out_info._replace(cache=None, steps=None)
    done = jax.tree.map(lambda x: example((x.shape[0], x.shape[1] * parts, *x.shape[2:]), x.dtype), about)
    return done._replace(steps=np.full(done.tokens.shape[0], done.tokens.shape[-1], np.int32))


def example(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Zeros of which one is in memory: a batch too large for the device is first told of where it is sampled."""
    return np.broadcast_to(np.zeros((), dtype), shape)
