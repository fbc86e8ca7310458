"""Say what a run needed where its device is out of memory, and what to set lower.

jax runs ahead: the error of an update comes where its numbers are read first, often in the next sampling. So the programs that
were started last are kept here with what they work on, and the message names all of them. The estimate is XLA's own, of the
compiled program. Left out: what else lies on the device, such as the optimizer's moments while the team is sampled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import jax
from jax.stages import Lowered

GIB = 2**30
_ESTIMATES: dict[Hashable, float | None] = {}  # GiB of each program so far
_LAST: dict[str, Program] = {}  # by what they do, the programs that were started last


class OutOfDeviceMemory(MemoryError):
    """A device could not hold what a run asked of it."""


class Program(NamedTuple):
    """What a program works on."""

    what: str
    agents: int
    prompts: int  # of an agent
    group: int  # completions of a prompt
    prompt_tokens: int  # with padding
    new_tokens: int
    parts: int = 1  # in which it makes gradients

    def __str__(self) -> str:
        text = f"{self.what} of {self.agents} agents x {self.prompts} prompts x {self.group} completions, prompts of "
        text += f"{self.prompt_tokens} and completions of {self.new_tokens} tokens"
        return text + (f", in {self.parts} micro_batches" if self.what == "update" else "")


def starting(program: Program, settings: Hashable, lower: Callable[[], Lowered]) -> None:
    """Keep what is about to be started. settings: what else makes it another program; lower: compiles nothing again that the
    call needs anyway, nor what was compiled before."""
    _LAST[program.what] = program
    key = (program, settings)
    if key not in _ESTIMATES:
        _ESTIMATES[key] = _ESTIMATES[program] = _needs(lower())


def _needs(lowered: Lowered) -> float | None:
    """GiB on each device, where the platform says so."""
    found = lowered.compile().memory_analysis()
    if found is None:
        return None
    sizes = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes
    return sizes / GIB


@contextlib.contextmanager
def explain_memory() -> Iterator[None]:
    """Raise `OutOfDeviceMemory` in place of XLA's error, with the sizes of what was started last and what to set lower."""
    _LAST.clear()
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfDeviceMemory(_message(str(error).splitlines()[0])) from error


def _message(xla: str) -> str:
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    device = f"a device of {limit / GIB:.1f} GiB" if limit else "the device"
    programs = sorted(_LAST.values(), key=lambda program: _ESTIMATES.get(program) or 0.0, reverse=True)
    lines = [f"{device} is out of memory ({xla}). Started last, the largest first:"]
    for program in programs:
        needs = _ESTIMATES.get(program)
        lines.append(f"  {program}: " + ("no estimate" if needs is None else f"about {needs:,.1f} GiB"))
    lines.append(f"Set lower: {_advice(programs)}.")
    lines.append("Checkpoints are as they were; a run with output_dir can go on from the newest with resume.")
    return "\n".join(lines)


def _advice(programs: list[Program]) -> str:
    """A smaller setting of what needs most, and others."""
    if not programs:
        return "use a smaller model, or compute_dtype='bfloat16' and lora_rank"
    largest = programs[0]
    first = []
    if largest.what == "update" and largest.parts < largest.prompts * largest.group:
        first.append(f"micro_batches={2 * largest.parts}")
    if largest.group > 2:
        first.append(f"num_generations={largest.group // 2}")
    if largest.new_tokens > 1:
        first.append(f"max_new_tokens={largest.new_tokens // 2}")
    more = "num_prompts or batch_size; and try remat='full', compute_dtype='bfloat16', per_agent='map', lora_rank=8"
    return ", or ".join([*first, more])
