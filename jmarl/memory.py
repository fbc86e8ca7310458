"""Explain an out-of-memory error of a device: which programs ran, an estimate of what they need, and settings to lower.

jax runs asynchronously: the error of an update is raised where its numbers are first read, often before the next sampling. So
the loop keeps the shapes of its last batches. Estimates are XLA's own, of the compiled program. Left out: other arrays on
the device, such as optimizer moments while the team is sampled.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.stages import Lowered

GIB = 2**30


class ProgramCall(NamedTuple):
    """A call of a program: its kind and shapes."""

    kind: str  # sampling | update | update of critics
    agents: int
    prompts: int  # per agent
    group: int  # completions per prompt
    prompt_tokens: int  # with padding
    new_tokens: int
    parts: int  # micro-batches
    program: Lowered

    def __str__(self) -> str:
        text = f"{self.kind} of {self.agents} agents x {self.prompts} prompts x {self.group} completions, prompts of "
        text += f"{self.prompt_tokens} and completions of {self.new_tokens} tokens"
        return text + (f", in {self.parts} micro_batches" if self.kind == "update" else "")


def _estimate(lowered: Lowered) -> float | None:
    """Return the GiB that a program needs on each device, if the platform reports it."""
    sizes = lowered.compile().memory_analysis()
    if sizes is None:
        return None
    arguments, outputs = sizes.argument_size_in_bytes, sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return (arguments + outputs + sizes.temp_size_in_bytes) / GIB


class OutOfDeviceMemory(MemoryError):
    """A device has too little memory for a program."""

    def __init__(self, xla_error: str, estimates: Sequence[tuple[float | None, ProgramCall]]):
        super().__init__(_message(xla_error, estimates))
        self.xla_error, self.estimates = xla_error, estimates


@contextlib.contextmanager
def explain_memory(calls: Callable[[], Sequence[ProgramCall]]) -> Iterator[None]:
    """Raise `OutOfDeviceMemory` in place of XLA's error, with the shapes of programs and settings to lower.

    calls: returns those that may have failed. Within another `explain_memory` the error names the programs of both, because the
    inner program may have waited for an outer one.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfDeviceMemory(str(error).splitlines()[0], _estimates(calls())) from error
    except OutOfDeviceMemory as error:
        raise OutOfDeviceMemory(error.xla_error, [*error.estimates, *_estimates(calls())]) from error.__cause__


def _estimates(calls: Sequence[ProgramCall]) -> list[tuple[float | None, ProgramCall]]:
    return [(_estimate(call.program), call) for call in calls]


def shapes_of(tree: Any) -> Any:
    """Return the shapes of a pytree of arrays, and where those on devices lie."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if isinstance(x, jax.Array) else None)

    return jax.tree.map(shape, tree)


def are_shapes(tree: Any) -> bool:
    """Return whether a pytree has shapes in place of arrays."""
    return isinstance(jax.tree.leaves(tree)[0], jax.ShapeDtypeStruct)


def _message(xla_error: str, estimates: Sequence[tuple[float | None, ProgramCall]]) -> str:
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    device = f"a device of {limit / GIB:.1f} GiB" if limit else "the device"
    estimates = sorted(estimates, key=lambda pair: -(pair[0] or 0.0))
    lines = [f"{device} is out of memory ({xla_error}). The last programs, the largest first:"]
    for size, call in estimates:
        lines.append(f"  {call}: " + ("no estimate" if size is None else f"about {size:,.1f} GiB"))
    lines.append(f"Set lower: {_advice([call for _, call in estimates])}.")
    lines.append(
        "Checkpoints are intact; a run with output_dir can continue from the newest with resume and these settings. A new run "
        "needs less with lora_rank=8."
    )
    return "\n".join(lines)


def _advice(calls: Sequence[ProgramCall]) -> str:
    """Name smaller settings for the largest program, which is the first."""
    if not calls:
        return "compute_dtype='bfloat16'; or start a new run with a smaller model or lora_rank"
    largest, settings = calls[0], []
    if largest.kind == "update" and largest.parts < largest.prompts * largest.group:
        settings.append(f"micro_batches={2 * largest.parts}")
    if largest.group > 2:
        settings.append(f"num_generations={largest.group // 2}")
    if largest.new_tokens > 1:
        settings.append(f"max_new_tokens={largest.new_tokens // 2}")
    settings.append("num_prompts or batch_size; try remat='full', compute_dtype='bfloat16' or per_agent='map'")
    return ", or ".join(settings)
