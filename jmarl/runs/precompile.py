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
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Lowered

from jmarl.config import Sampling
from jmarl.envs.base import Environment
from jmarl.learning.choose import Work
from jmarl.learning.setup import Setup
from jmarl.learning.team_update import lower_team
from jmarl.models import lora
from jmarl.randomness import EVAL, GREEDY, TRAIN, Randomness
from jmarl.rollout.play import first_request
from jmarl.rollout.zeros import zero_batches
from jmarl.sampling.generate import SampleRequest, lower_samplers
from jmarl.sampling.refill import lower_step
from jmarl.types import Batches, TeamState

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

    def request_of(items: Sequence[dict], settings: Sampling, group: int, purpose: int = TRAIN) -> SampleRequest:
        return first_request(team, items, env, settings, cfg.episodes, group, Randomness(cfg.run.seed, 0, purpose))

    def samplers(*arguments: Any) -> tuple[Lowered, ...]:
        return lower_samplers(team, params, request_of(*arguments))

    settings = cfg.sampling, cfg.episodes.num_generations
    request = request_of(tasks, *settings)
    yield from lower_step(team, state, request, request_of(following, *settings) if cfg.episodes.async_steps else request)
    if setup.algorithm.row.baseline == "greedy":
        yield from samplers(tasks, dataclasses.replace(cfg.sampling, temperature=0.0), 1, GREEDY)
    if cfg.episodes.num_turns == 1:
        yield from updates_of(setup, state, zero_batches(setup, state, [ids.shape[-1] for ids, _ in request.encoded]))
    if eval_items:
        yield from samplers(eval_items, cfg.eval_sampling(), cfg.run.eval_generations, EVAL)


def longest_update(setup: Setup, state: TeamState, widths: Sequence[int]) -> tuple[Work, Updates]:
    """Return an update after all turns with completions of full length, and a function from a setup to its programs.

    widths: length of the prompts of the first turn of each stack, as they are padded.
    """
    return work_of_rollouts(setup, state, widths), lambda setup: updates_of(setup, state, zero_batches(setup, state, widths))


def updates_of(setup: Setup, state: TeamState, batches: Batches) -> Iterator[Lowered]:
    """Yield the programs of an update, so that one compiles while the next is traced."""
    for _, _, lowered in lower_team(setup, state, batches):
        yield lowered


def work_of_rollouts(setup: Setup, state: TeamState, widths: Sequence[int]) -> Work:
    """Return what `longest_update` is for the formula of `learning.choose`."""
    episodes = setup.cfg.episodes
    prompts, group = episodes.num_prompts, episodes.num_generations
    shapes = [(*batch.prompts.shape, *batch.tokens.shape[2:]) for batch in zero_batches(setup, state, widths).stacks]
    tokens = max(count * (width + size * new) for _, count, width, size, new in shapes)
    # Several turns have any number of rows, at least those of the first; in chains each row has a prompt of its own.
    apart = group if episodes.num_turns > 1 and episodes.branching == "chain" else 1
    return Work.of(setup.team, setup.cfg, tokens, prompts * (group if episodes.num_turns == 1 else apart))


def longest_prompts(setup: Setup, items: Sequence[dict], env: Environment) -> list[int]:
    """Return the length of the longest prompt of each stack in the first turn on the first items, as it is padded."""
    team, cfg = setup.team, setup.cfg
    items, randomness = items[:MEASURED_ITEMS], Randomness(cfg.run.seed, 0, TRAIN)
    request = first_request(team, items, env, cfg.sampling, cfg.episodes, 1, randomness)
    return [ids.shape[-1] for ids, _ in request.encoded]
