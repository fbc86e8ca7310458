"""Explain an out-of-memory error of a device: which programs ran, an estimate of what they need, and settings to lower.

jax runs asynchronously: the error of an update is raised where its numbers are first read, often in the next sampling. So this
module remembers the last program of each kind and its shapes, and the error names all of them. Estimates are XLA's own, of the
compiled program. Left out: other arrays on the device, such as optimizer moments while the team is sampled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import jax
from jax.stages import Lowered

GIB = 2**30
_ESTIMATES: dict[Hashable, float | None] = {}  # GiB of each program so far
_LAST: dict[str, Program] = {}  # kind -> the last program of that kind


class OutOfDeviceMemory(MemoryError):
    """A device has too little memory for a program."""


class Program(NamedTuple):
    """Kind and shapes of a program."""

    kind: str  # sampling | update | update of critics
    agents: int
    prompts: int  # per agent
    group: int  # completions per prompt
    prompt_tokens: int  # with padding
    new_tokens: int
    parts: int = 1  # micro-batches

    def __str__(self) -> str:
        text = f"{self.kind} of {self.agents} agents x {self.prompts} prompts x {self.group} completions, prompts of "
        text += f"{self.prompt_tokens} and completions of {self.new_tokens} tokens"
        return text + (f", in {self.parts} micro_batches" if self.kind == "update" else "")


def starting(program: Program, settings: Hashable, lower: Callable[[], Lowered]) -> None:
    """Remember a program that is about to run.

    Args:
      settings: everything else that another compiled program depends on.
      lower: returns the lowered program. It is compiled for the estimate, which the run then reuses.
    """
    _LAST[program.kind] = program
    key = (program, settings)
    if key not in _ESTIMATES:
        _ESTIMATES[key] = _ESTIMATES[program] = _estimate(lower())


def _estimate(lowered: Lowered) -> float | None:
    """Return the GiB that a program needs on each device, if the platform reports it."""
    sizes = lowered.compile().memory_analysis()
    if sizes is None:
        return None
    arguments, outputs = sizes.argument_size_in_bytes, sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return (arguments + outputs + sizes.temp_size_in_bytes) / GIB


@contextlib.contextmanager
def explain_memory() -> Iterator[None]:
    """Raise `OutOfDeviceMemory` in place of XLA's error, with the shapes of the last programs and settings to lower."""
    _LAST.clear()
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfDeviceMemory(_message(str(error).splitlines()[0])) from error


def _message(xla_error: str) -> str:
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    device = f"a device of {limit / GIB:.1f} GiB" if limit else "the device"
    programs = sorted(_LAST.values(), key=lambda program: _ESTIMATES.get(program) or 0.0, reverse=True)
    lines = [f"{device} is out of memory ({xla_error}). The last programs, the largest first:"]
    for program in programs:
        size = _ESTIMATES.get(program)
        lines.append(f"  {program}: " + ("no estimate" if size is None else f"about {size:,.1f} GiB"))
    lines.append(f"Set lower: {_advice(programs)}.")
    lines.append(
        "Checkpoints are intact; a run with output_dir can continue from the newest with resume and these settings. A new run "
        "needs less with lora_rank=8."
    )
    return "\n".join(lines)


def _advice(programs: list[Program]) -> str:
    """Name smaller settings for the largest program, which is the first."""
    if not programs:
        return "compute_dtype='bfloat16'; or start a new run with a smaller model or lora_rank"
    largest, settings = programs[0], []
    if largest.kind == "update" and largest.parts < largest.prompts * largest.group:
        settings.append(f"micro_batches={2 * largest.parts}")
    if largest.group > 2:
        settings.append(f"num_generations={largest.group // 2}")
    if largest.new_tokens > 1:
        settings.append(f"max_new_tokens={largest.new_tokens // 2}")
    settings.append("num_prompts or batch_size; try remat='full', compute_dtype='bfloat16' or per_agent='map'")
    return ", or ".join(settings)
