"""Run the programs of a plan on a device that is here, with random weights, and measure time and memory.

Each program runs alone, with its own arguments: other stacks, critics and a reference that it does not read take no memory.
Completions have their full length, and prompts fill their width.
"""

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from jmarl.plan.devices import Gpu
from jmarl.plan.host import memory_now, peak_of_process, restart_peak
from jmarl.types import StackState

RUNS, ENOUGH = 3, 20.0  # runs of a program, of which the shortest counts; no further one after so many seconds


class Measured(NamedTuple):
    """What one program took."""

    seconds: float  # of the shortest run
    memory: int | None  # bytes of its arguments and temporaries; None where it cannot be measured


def present_device(gpu: Gpu | None) -> Any:
    """Return the device of this machine that a plan is for. Raises ValueError if it has none."""
    if gpu is None:
        return jax.devices("cpu")[0]
    names = sorted({device.device_kind for device in jax.devices()})
    if gpu.name not in names:
        raise ValueError(f"--measure needs the {gpu.name}, and JAX sees {', '.join(names)} here: leave --measure out")
    return next(device for device in jax.devices() if device.device_kind == gpu.name)


def measure(programs: Mapping[str, Compiled], device: Any, runs: int = RUNS) -> dict[str, Measured]:
    """Run programs, by name, that were compiled for a device of this machine."""

    def size(name: str) -> int:
        memory: Any = programs[name].memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    with jax.default_device(device):  # the smallest first: a GPU's peak only grows
        measured = {name: _measure_one(programs[name], device, runs) for name in sorted(programs, key=size)}
    return {name: measured[name] for name in programs}


def _measure_one(program: Compiled, device: Any, runs: int) -> Measured:
    before, seconds, begin = memory_now(), math.inf, time.perf_counter()
    arguments = random_arguments(program)
    jax.block_until_ready(arguments)
    restart_peak()
    for i in range(runs):
        start = time.perf_counter()
        if i and start - begin > ENOUGH:
            break
        out = jax.block_until_ready(program(*arguments))
        seconds = min(seconds, time.perf_counter() - start)
        if isinstance(arguments[0], StackState):  # an update has consumed it
            arguments = (out[0], *arguments[1:])
        del out
    if device.platform != "cpu":
        return Measured(seconds, device.memory_stats()["peak_bytes_in_use"])
    return Measured(seconds, None if before is None else peak_of_process() - before)


def random_arguments(program: Compiled) -> tuple[Any, ...]:
    """Return arguments for a sampler or an update: random weights, and data in which every token counts."""
    shapes, _ = program.args_info
    arguments = tuple(jax.tree.map(_random, x, is_leaf=lambda x: isinstance(x, jax.stages.ArgInfo)) for x in shapes)
    if isinstance(arguments[0], StackState):
        state, frozen, batch, *rest = arguments
        state = state._replace(opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))  # squares: not < 0
        full = jnp.full_like(batch.prompt_lengths, batch.prompts.shape[-1])
        batch = batch._replace(prompt_lengths=full, action_mask=jnp.ones_like(batch.action_mask))
        return state, frozen, batch, *rest
    params, prompts, row_ids, stop, *rest = arguments
    never = jnp.full_like(stop, -1)  # no token ends a completion
    return params, _as_long_as_can_be(prompts), row_ids, never, *rest


def _as_long_as_can_be(prompts: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return prompts, of one step or of two, whose lengths are the width of their array."""
    first, second = prompts
    if isinstance(first, tuple):
        return _as_long_as_can_be(first), _as_long_as_can_be(second)
    return first, jnp.full_like(second, first.shape[-1])


def _random(leaf: jax.stages.ArgInfo) -> Any:
    """Return random numbers, zeros for other types, or keys."""
    key = jax.random.key(0)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.asarray(0.02, leaf.dtype) * jax.random.normal(key, leaf.shape, leaf.dtype)
    return jnp.asarray(np.zeros(leaf.shape, leaf.dtype))
