"""Measure how fast the sandbox checks programs.

Claim: on 2 cores a running sandbox checks at least 60 programs per second; the first verdict comes at most 100 ms after the
    start of the helper process; after a kill, the helper answers again within a second.
Command: python -m experiments.bench.sandbox        (prints one JSON object per level)
Programs: all different, generated from templates (`jmarl.envs.code.problems`), with six tests each.
Expected: 83 to 139 programs per second, a first verdict after 60 to 80 ms and after a kill in 64 to 86 ms. Time: 30 s per
    level.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence

import tyro

from jmarl.envs.code.problems import generate_problems
from jmarl.envs.code.scoring import item_tests
from jmarl.sandbox import Sandbox, SandboxUnavailable


def milliseconds(action: Callable[[], object]) -> float:
    """Return the time that an action takes."""
    start = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - start)


def measure(level: str, programs: int, workers: Sequence[int]) -> dict:
    """Return the measurements of one level.

    cold_ms: median time from the start of the helper to the first verdict, once the level is known to work. back_after_kill_ms:
    median time from a kill of the helper to the next verdict.
    """
    items = generate_problems(programs)
    sources, tests = [item["solution"] for item in items], [item_tests(item) for item in items]
    cold, back, rates = [], [], {}
    with Sandbox(level, cache=0) as sandbox:
        for _ in range(7):
            sandbox.close()
            cold.append(milliseconds(lambda: sandbox.run(sources[0], tests[0])))
        single = [sandbox.run(source, own_tests).wall_s for source, own_tests in zip(sources[:50], tests[:50], strict=True)]
        for count in workers:
            start = time.perf_counter()
            results = sandbox.run_many(sources, tests, workers=count)
            rates[str(count)] = round(len(results) / (time.perf_counter() - start), 1)
            assert all(result.outcome == "passed" for result in results)
        for _ in range(5):
            sandbox.kill_helper()
            back.append(milliseconds(lambda: sandbox.run(sources[0], tests[0])))
    return {
        "level": level,
        "cold_ms": round(statistics.median(cold), 1),
        "one_program_ms": round(1000 * statistics.median(single), 1),
        "programs_per_s": rates,
        "back_after_kill_ms": round(statistics.median(back), 1),
        "cores": len(os.sched_getaffinity(0)),
    }


def main(levels: tuple[str, ...] = ("S4", "S3", "S2"), programs: int = 500, workers: tuple[int, ...] = (1, 2, 8)) -> None:
    """Measure each sandbox level, or print why this machine does not support it.

    Args:
        levels: Levels to measure.
        programs: Number of programs to check.
        workers: Numbers of programs to check at the same time.
    """
    for level in levels:
        try:
            print(json.dumps(measure(level, programs, workers)), flush=True)
        except SandboxUnavailable as error:
            print(json.dumps({"level": level, "unavailable": str(error)}), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
