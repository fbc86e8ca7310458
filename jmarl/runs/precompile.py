"""Compile the programs of a run in parallel, before the first step, and choose how its updates fit into the memory.

XLA compiles a program on about one core, so compiling several at once takes little longer than the slowest one. It also avoids
compiling between sampling and update: meanwhile the memory that the sampler freed would be returned to the system, or to the
host of a virtual machine (4 s of a first step of 25). Left out: other lengths of prompts and completions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Lowered

from jmarl.algorithms import with_fastest_updates
from jmarl.config import Sampling
from jmarl.envs.base import Environment
from jmarl.hardware import memory_in_use, memory_pool
from jmarl.lazy import Table, collector_paused
from jmarl.learning.choose import bytes_on_device, choose, is_open, update_settings, with_settings
from jmarl.learning.setup import Setup
from jmarl.learning.team_update import lower_team
from jmarl.logs.terminal import say
from jmarl.memory import shapes_of
from jmarl.models import lora
from jmarl.processes import exchange
from jmarl.randomness import EVAL, GREEDY, TRAIN, Randomness
from jmarl.rollout.make_batches import rollout_batches
from jmarl.rollout.play import first_request
from jmarl.rollout.zeros import zero_rollout
from jmarl.runs.run import Kind, Task
from jmarl.sampling.generate import SampleRequest, lower_samplers
from jmarl.types import TeamState

EARLY = Table[Any](  # what async_steps needs
    {
        "sampler": "jmarl.sampling.refill:EarlyRows",
        "rows": "jmarl.sampling.refill:empty_rows",
        "lower": "jmarl.sampling.refill:lower_step",
    }
)
MOST_KEPT, MOST_FILES = 2**31, 8192  # bytes of kept programs when a run starts, and their number: a start looks at each
ROOM = 2**22  # bytes that the programs of a run may take
MEASURED_ITEMS = 64  # whose prompts are looked at for the longest


def keep_programs(show: Callable[[str], None] | None) -> None:
    """Keep compiled programs in the user's cache directory, so that the next run need not compile them; show it the first time,
    and where nothing can be written. At most `MOST_KEPT` bytes of earlier runs stay, those that were used last.

    A no-op where JAX already has a cache (JAX_COMPILATION_CACHE_DIR) or none is wanted (JAX_ENABLE_COMPILATION_CACHE=false).
    """
    settings: Any = jax.config  # its type has no such attributes
    if settings.jax_compilation_cache_dir is not None or not settings.jax_enable_compilation_cache:
        return
    show = show or (lambda line: None)
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jmarl" / "programs"
        is_new = not directory.is_dir()
        directory.mkdir(parents=True, exist_ok=True)
        remove_oldest(directory, MOST_KEPT, MOST_FILES)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(ROOM))  # JAX would warn of every program, and leave a part of it
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        show(f"compiled programs are not kept: {error}; JAX_COMPILATION_CACHE_DIR names another directory")
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if settings.jax_persistent_cache_min_compile_time_secs == 1.0:  # the default: small programs together take seconds, too
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # JAX looks for a cache once, when it compiles its first program
    if is_new:
        show(f"compiled programs are kept in {directory}; JAX_ENABLE_COMPILATION_CACHE=false switches this off")


def remove_oldest(directory: Path, most: int, most_files: int) -> None:
    """Remove the programs in a directory that were written and read longest ago, until the others take at most so many bytes
    in at most so many files. Other processes may do the same.

    JAX's own bound (`jax_compilation_cache_max_size`) looks at all files whenever it writes a program, 0.18 s of 4,000, and
    fails where there are programs that were kept without it."""
    files = {}
    for file in directory.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):
            files[file] = file.stat()
    size = 0
    newest = sorted(files.items(), key=lambda x: max(x[1].st_atime_ns, x[1].st_mtime_ns), reverse=True)
    for number, (file, status) in enumerate(newest):
        size += status.st_size
        is_empty = not status.st_size  # what a full disk leaves, which JAX would never write again
        if size > most or number >= most_files or is_empty:
            file.unlink(missing_ok=True)


def compile_all(programs: Iterable[Lowered]) -> int:
    """Compile programs in threads, while the next ones are traced, and return their number. jax caches them: the jitted
    functions do not compile again for arguments of these shapes."""
    with collector_paused(), ThreadPoolExecutor() as threads:
        return len(list(threads.map(Lowered.compile, programs)))


def programs_of_run(
    setup: Setup,
    state: TeamState,
    tasks: Sequence[Any],
    eval_items: Sequence[Any],
    following: Sequence[Any],
    request_of: Callable[[Sequence[Any], Sampling, int, int], SampleRequest],
    any_turn: bool = False,
) -> Iterator[tuple[str, int, Lowered]]:
    """Yield kind, number of the stack and program: of a step on `tasks` with completions of full length, and of an evaluation
    on `eval_items`. One compiles while the next is traced.

    Left out: samplers of later turns, a central critic, and programs that only compute values, which are small.

    Args:
        following: the tasks of the next step, of which some begin in this one with async_steps.
        request_of: (items, settings, group, purpose) -> the request for the first part of the items.
        any_turn: also updates after several turns, whose lengths are not known.
    """
    team, cfg = setup.team, setup.cfg
    params = [lora.model_of(stack) for stack in state.stacks]

    def samplers(kind: str, *arguments: Any) -> Iterator[tuple[str, int, Lowered]]:
        return ((kind, i, program) for i, program in enumerate(lower_samplers(team, params, request_of(*arguments))))

    settings = cfg.sampling, cfg.episodes.num_generations, TRAIN
    request = request_of(tasks, *settings)
    if cfg.league.on and not any_turn:  # another program, which the first step compiles
        lowered = ()
    elif state.pending:
        lowered = EARLY["lower"](team, state, request, request_of(following, *settings))
    else:
        lowered = lower_samplers(team, params, request)
    yield from (("sampling", i, program) for i, program in enumerate(lowered))
    if setup.algorithm.has_greedy_baseline:
        yield from samplers("greedy sampling", tasks, dataclasses.replace(cfg.sampling, temperature=0.0), 1, GREEDY)
    if cfg.episodes.num_turns == 1 or any_turn:
        rollout = zero_rollout(setup, [ids.shape[-1] for ids, _ in request.encoded])
        yield from lower_team(setup, state, rollout_batches(setup, shapes_of(state), rollout))
    if eval_items:
        yield from samplers("evaluation", eval_items, cfg.eval_sampling(), cfg.run.eval_generations, EVAL)


def first_part(
    setup: Setup, env: Environment, items: Sequence[dict], settings: Sampling, group: int, purpose: int
) -> SampleRequest:
    """Return the request for the first part of the prompts of items, see `programs_of_run`."""
    randomness = Randomness(setup.cfg.run.seed, 0, purpose)
    return first_request(setup.team, items, env, settings, setup.cfg.episodes, group, randomness)


def longest_prompts(setup: Setup, items: Sequence[dict], env: Environment) -> list[int]:
    """Return the length of the longest prompt of each stack in the first turn on the first items, as it is padded."""
    request = first_part(setup, env, items[:MEASURED_ITEMS], setup.cfg.sampling, 1, TRAIN)
    return [ids.shape[-1] for ids, _ in request.encoded]


def choose_updates(kind: Kind, setup: Setup, state: TeamState, task: Task) -> Setup:
    """Return a setup without auto: choose how the updates of a run fit into the memory, and say so."""
    rooms = exchange.gather(memory_pool)  # all processes choose the same
    if is_open(setup.cfg) and (room := min(filter(None, rooms), default=None)) is not None:
        batches = kind.make_batches(setup, shapes_of(state), kind.longest(setup, task))
        on_device = state._replace(pending=()) if setup.cfg.league.on else state  # slots are in the host's memory
        size = max(exchange.gather(lambda: max(bytes_on_device(on_device), memory_in_use())))
        setup, line = choose(setup, state, batches, size, [room])
        if setup.cfg.run.progress:
            say(line)
    elif is_open(setup.cfg):  # a platform that does not say how much memory it has
        setup = with_settings(setup, update_settings(with_fastest_updates(setup.cfg)))
    return setup
