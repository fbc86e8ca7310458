"""Compile the programs of a run side by side, before the first of them runs.

XLA compiles a program on about one core, so several at once take little more than the longest. And a compiler that runs
between sampler and update leaves the memory that the sampler freed time to go back to the system, or to a virtual machine's
host (4 s of a first step of 25). Left out: other lengths of prompts and completions that may come; they compile when they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered

from jmarl.config import TrainConfig
from jmarl.rollout import EVAL, TRAIN, Formatter, batch_of, sample_items, sample_stack
from jmarl.team import Team
from jmarl.types import Completions, TeamState
from jmarl.update import lower_update


def compile_all(programs: Iterable[Lowered]) -> None:
    """Compile programs, each in a thread. jax keeps them: the jitted functions that they come from, called with such arguments,
    do not compile again."""
    with ThreadPoolExecutor() as threads:
        list(threads.map(Lowered.compile, programs))


def compile_run(
    team: Team,
    state: TeamState,
    tasks: Sequence[dict],
    eval_items: Sequence[dict],
    formatters: Sequence[Formatter],
    cfg: TrainConfig,
) -> None:
    """Compile what a step on `tasks` with completions of full length runs, and an evaluation on `eval_items` if there are."""
    params = [s.params for s in state.stacks]
    options: dict[str, Any] = dict(chat=cfg.chat, seed=cfg.seed, step=0, call=sample_stack.lower)
    training: dict[str, Any] = options | dict(group=cfg.num_generations, purpose=TRAIN)
    _, encoded, programs = sample_items(team, params, tasks, formatters, cfg.sampling(), **training)
    for spec, stack, prompts, sampler in zip(team.stacks, state.stacks, encoded, programs, strict=True):
        done = example_completions(sampler)
        batch = batch_of(prompts, done, np.zeros(done.tokens.shape[:3]))
        programs += (lower_update(stack, batch, cfg=spec.config, learning=cfg.learning(), mode=cfg.per_agent),)
    if eval_items:
        evaluation: dict[str, Any] = options | dict(group=cfg.eval_generations, purpose=EVAL)
        programs += sample_items(team, params, eval_items, formatters, cfg.eval_sampling(), **evaluation)[2]
    compile_all(programs)


def example_completions(sampler: Lowered) -> Completions:
    """What a sampler returns: zeros, of full length."""
    done = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sampler.out_info)
    return done._replace(steps=done.steps + done.tokens.shape[-1])
