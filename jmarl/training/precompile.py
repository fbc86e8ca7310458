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

from jmarl.algorithms import algorithm, value_kind
from jmarl.config import TrainConfig
from jmarl.envs.environment import Environment
from jmarl.learning.batches import batch_of, positions
from jmarl.learning.critics import Critics, judges_as_it_learns, penalises, trains
from jmarl.learning.per_agent import held_at, of_stack
from jmarl.learning.update import lower_update
from jmarl.models import lora
from jmarl.randomness import EVAL, GREEDY, TRAIN
from jmarl.rollout.chunks import cut_prompts, parts_of
from jmarl.rollout.play import acting, check_size, keeps, writing
from jmarl.sampling.generate import SampleRequest, pad, read, sample_stack, sample_team
from jmarl.team import Team
from jmarl.types import Batch, Completions, TeamState


def compile_all(programs: Iterable[Lowered]) -> None:
    """Compile programs, each in a thread, while the next of them are still being traced. jax keeps them: the jitted functions
    that they come from, called with such arguments, do not compile again."""
    with ThreadPoolExecutor() as threads:
        list(threads.map(Lowered.compile, programs))


def programs_of_run(
    team: Team,
    critics: Critics,
    state: TeamState,
    tasks: Sequence[dict],
    eval_items: Sequence[dict],
    env: Environment,
    cfg: TrainConfig,
) -> Iterator[Lowered]:
    """What a step on `tasks` with completions of full length runs, and an evaluation on `eval_items` if there are; of several
    turns the sampler of the first, because the later ones' lengths are not known. Left out for the same reason: a central
    critic's; and programs that only give values, which are small."""
    learning, row = cfg.learning(), algorithm(cfg.algorithm)
    params = [lora.model_of(s) for s in state.stacks]

    def samplers(items, settings, group: int, purpose: int):
        _, prompts = env.reset(items, np.random.default_rng((cfg.seed, 0, purpose)))
        check_size(team, prompts)
        encoded, ids = pad(team, read(team, prompts, settings, cfg.episodes())), np.arange(len(items), dtype=np.uint32)
        keep = keeps(cfg.episodes(), settings, turn=0)
        size = len(items) // parts_of(len(items), cfg.episodes())
        part = cut_prompts(team, encoded, slice(0, size))
        how: dict[str, Any] = dict(seed=cfg.seed, step=0, purpose=purpose, keep=keep, acts=writing(acting(prompts)))
        request = SampleRequest(part, settings, group=group, prompt_ids=ids[:size], **how)
        return encoded, sample_team(team, params, request, sample_stack.lower)

    encoded, lowered = samplers(tasks, cfg.sampling(), cfg.num_generations, TRAIN)
    yield from lowered
    if row.advantage == "greedy_baseline":
        yield from samplers(tasks, dataclasses.replace(cfg.sampling(), temperature=0.0), 1, GREEDY)[1]
    if cfg.num_turns == 1:
        shared, kind = trains(learning) == "both", value_kind(learning)
        held = held_at(cfg, team.num_agents, state.step)
        for i, (spec, prompts, sampler) in enumerate(zip(team.stacks, encoded, lowered, strict=True)):
            if set(spec.order) <= set(cfg.frozen_agents):
                continue
            mine, own = of_stack(cfg, learning, spec.members, team.num_agents, held)
            how: dict[str, Any] = dict(learning=mine, own=own, mode=cfg.per_agent, trains=trains(learning))
            batch = example_batch(prompts, sampler, cfg, len(spec.members[0]))
            batch = batch._replace(dropout=lora.dropout_keys(cfg, cfg.seed, 0, i, len(spec.members)))
            of_critic = batch if kind == "token" else positions(batch, kind, cut=not shared)
            of_critic = of_critic._replace(values=None) if judges_as_it_learns(learning) else of_critic
            yield lower_update(state.stacks[i], of_critic if shared else batch, cfg=spec.config, **how)
            if row.critic == "own" and not shared:
                mine, own = of_stack(cfg, critics.learning, spec.members, team.num_agents, held)
                how = dict(cfg=critics.specs[i].config, learning=mine, own=own, mode=cfg.per_agent)
                yield lower_update(state.critics[i], of_critic, **how, trains="values")
    if eval_items:
        yield from samplers(eval_items, cfg.eval_sampling(), cfg.eval_generations, EVAL)[1]


def example_batch(prompts: tuple, sampler: Lowered, cfg: TrainConfig, roles: int) -> Batch:
    """A batch of the shapes of a first turn, with values where the algorithm has them."""
    done, row = example_completions(sampler, prompts[0].shape[1] // sampler.out_info.tokens.shape[1]), algorithm(cfg.algorithm)
    of_rows = example(done.tokens.shape[:3])
    values = of_rows if row.advantage in ("value_baseline", "greedy_baseline") else None
    batch = batch_of(prompts, done, of_rows, of_rows[0, :, 0], done.tokens.shape[-1], roles=roles, values=values)
    zeros = example(done.tokens.shape)
    batch = batch._replace(values=zeros) if row.advantage == "gae" else batch
    return batch._replace(ref_logprobs=zeros, penalty=zeros) if penalises(cfg.learning()) else batch


def example_completions(sampler: Lowered, parts: int = 1) -> Completions:
    """What a sampler returns in so many parts: zeros, of full length."""
    about = sampler.out_info._replace(kept=None, steps=None)
    done = jax.tree.map(lambda x: example((x.shape[0], x.shape[1] * parts, *x.shape[2:]), x.dtype), about)
    return done._replace(steps=np.full(done.tokens.shape[0], done.tokens.shape[-1], np.int32))


def example(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Zeros of which one is in memory: a batch too large for the device is first told of where it is sampled."""
    return np.broadcast_to(np.zeros((), dtype), shape)
