"""Count the page faults of each step of a run, and measure what it costs to touch memory for the first time. On Linux.

Claim: faults take 0.8 to 1.7 of about 10 CPU seconds, in steps 2 to 4 as in later ones. Where early steps take longer, other
processes had the cores.
Command: python -m experiments.bench.faults; with GLIBC_TUNABLES=glibc.malloc.hugetlb=0 before it pages have 4 KiB, else 2 MiB.
Prints one JSON object per line: a first touch of 1 GiB by size of a page and by the seconds since that much memory was given
back, then sampling and update of each step. `seconds` is wall time; `own_s` and `kernel_s` are CPU seconds of this process and
of the system's kernel for it; `others_s` are CPU seconds of all other processes. Kernel seconds hardly depend on other work.
Expected: 0.8 to 1.7 kernel seconds a step, 2 GiB a second in small pages; in huge ones 10 GiB a second for memory that was
given back a moment ago, and 0.5 for older memory, which a virtual machine has returned to its host. Time: 2 minutes
(estimated).
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import tyro

from experiments.bench.step import Bench as StepOptions
from experiments.bench.step import Step, seconds
from experiments.report import peak_memory
from jmarl.config import Count

TICKS = os.sysconf("SC_CLK_TCK")  # of /proc/stat a second


@dataclasses.dataclass(frozen=True)
class Bench:
    """One configuration; prints one JSON object per line."""

    model: str = "smollm2-135m-instruct"
    """A model to load, or one of random weights (see bench.step)."""
    group: Count = 4
    """Completions of the one prompt."""
    max_new_tokens: Count = 64
    """Length of all completions."""
    steps: Count = 6
    """Steps, the first with its first touches of memory."""
    touch_mib: Count = 1024
    """Memory to touch."""
    idle: tuple[float, ...] = (0.0, 1.0, 8.0)
    """Seconds between giving memory back and touching as much again."""


def counters() -> dict[str, float]:
    """Return what this process and the machine have used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:9])
    own = used.ru_utime + used.ru_stime
    others = (user + nice + system + irq + softirq) / TICKS - own
    huge = next(
        line for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines() if line.startswith("thp_fault_alloc")
    )
    return dict(
        seconds=time.perf_counter(), own_s=own, kernel_s=used.ru_stime, others_s=others, faults=used.ru_minflt,
        huge_pages_of_machine=int(huge.split()[1]),
    )  # fmt: skip


def since(before: dict[str, float]) -> dict[str, float]:
    """Return how much of each counter was used since then."""
    return {name: round(x - before[name], 3) for name, x in counters().items()}


def counted(call: Callable[[], Any]) -> dict[str, float]:
    """Return how much of each counter a call takes."""
    before = counters()
    call()
    return since(before)


def touch(mib: int, huge: bool) -> None:
    """Write to each byte of fresh memory, and give it back."""
    memory = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    view = ctypes.c_char.from_buffer(memory)
    ctypes.memset(ctypes.addressof(view), 1, mib << 20)
    del view
    memory.close()


def main() -> None:
    options = tyro.cli(Bench)
    for huge in (False, True):
        touch(options.touch_mib, huge)
        for idle in options.idle:
            time.sleep(idle)
            cost = counted(lambda huge=huge: touch(options.touch_mib, huge))
            line = dict(touched_mib=options.touch_mib, page_kib=2048 if huge else 4, idle_s=idle)
            print(json.dumps(line | {name: cost[name] for name in ("seconds", "kernel_s", "faults")}), flush=True)
    names = ("model", "group", "max_new_tokens")
    before = counters()
    step = Step(StepOptions(**{name: getattr(options, name) for name in names}))
    jax.block_until_ready(step.state)
    step.compile()
    print(json.dumps(dict(step=0, phase="start") | since(before)), flush=True)
    for number in range(1, options.steps + 1):
        for phase, half in (("sampling", step.generate), ("update", step.update)):
            print(json.dumps(dict(step=number, phase=phase) | counted(lambda half=half: seconds(half))), flush=True)
    print(json.dumps(peak_memory()))


if __name__ == "__main__":
    main()
