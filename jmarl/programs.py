"""Compile the programs of a run side by side, before the first of them runs.

XLA compiles a program on about one core, so several at once take little more than the longest. And a step that is never
interrupted by a compiler hands memory from sampler to update while the system still has it at hand (4 s of a first step of
25 on a virtual machine that takes freed memory back). Left out: other lengths of prompts and completions that may come;
they compile when they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered

from jmarl.config import Sampling, TrainConfig
from jmarl.rollout import EVAL, TRAIN, Formatter, batch_of, encode, sample_stack, sample_team
from jmarl.team import Team
from jmarl.types import Completions, TeamState
from jmarl.update import lower_update


def compile_all(programs: Iterable[Lowered]) -> None:
    """Compile programs, each in a thread; the jitted functions that they come from find them when they are called."""
    programs = list(programs)
    with ThreadPoolExecutor(max(len(programs), 1)) as threads:
        list(threads.map(lambda program: program.compile(), programs))


def compile_run(
    team: Team,
    state: TeamState,
    tasks: Sequence[dict],
    eval_items: Sequence[dict],
    formatters: Sequence[Formatter],
    cfg: TrainConfig,
) -> None:
    """Compile what a step on `tasks` with completions of full length runs, and an evaluation on `eval_items` if there are."""
    encoded, samplers = _samplers(team, state, tasks, formatters, cfg.sampling(), cfg, cfg.num_generations, TRAIN)
    updates = []
    for spec, stack, prompts, sampler in zip(team.stacks, state.stacks, encoded, samplers, strict=True):
        done = example_completions(sampler)
        batch = batch_of(prompts, done, np.zeros(done.tokens.shape[:3]))
        updates.append(lower_update(stack, batch, cfg=spec.config, learning=cfg.learning(), mode=cfg.per_agent))
    if eval_items:
        evaluation = cfg.eval_sampling(), cfg, cfg.eval_generations, EVAL
        samplers += _samplers(team, state, eval_items, formatters, *evaluation)[1]
    compile_all([*samplers, *updates])


def _samplers(
    team, state, items, formatters, settings: Sampling, cfg: TrainConfig, group: int, purpose: int
) -> tuple[Any, Any]:
    """The encoded prompts of items, and each stack's sampler for them."""
    encoded = encode(team, [[formatter(dict(item)) for item in items] for formatter in formatters], settings, cfg.chat)
    keys: dict[str, Any] = dict(seed=cfg.seed, step=0, group=group, prompt_ids=np.arange(len(items)), purpose=purpose)
    return encoded, sample_team(team, [s.params for s in state.stacks], encoded, settings, **keys, call=sample_stack.lower)


def example_completions(sampler: Lowered) -> Completions:
    """What a sampler returns: zeros, of full length."""
    done = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sampler.out_info)
    return done._replace(steps=done.steps + done.tokens.shape[-1])
