"""How fast programs are checked in the sandbox.

Claim: at least 60 checked programs a second, warm, on 2 cores; the first verdict at most 100 ms after the helper was asked for;
a killed helper is back within a second.
Command: python -m experiments.bench_sandbox        (prints one JSON object a level)
Each program is another one, made from templates (`jmarl.envs.code.problems`), and has six tests. 30 s a level.
"""

from __future__ import annotations

import json
import os
import statistics
import time

import tyro

from jmarl.envs.code.problems import generate
from jmarl.envs.code.scoring import item_tests
from jmarl.sandbox import Sandbox, SandboxUnavailable


def measure(level: str, programs: int, workers: list[int]) -> dict:
    """Of one level. cold_ms: from no helper to the first verdict, median of 7; the level is known by then."""
    items = generate(programs)
    sources, tests = [item["solution"] for item in items], [item_tests(item) for item in items]
    cold, back, rates = [], [], {}
    with Sandbox(level, cache=0) as sandbox:
        for _ in range(7):
            sandbox.close()
            began = time.perf_counter()
            sandbox.run(sources[0], tests[0])
            cold.append(1000 * (time.perf_counter() - began))
        alone = [sandbox.run(*each).wall_s for each in zip(sources[:50], tests[:50], strict=True)]
        for count in workers:
            began = time.perf_counter()
            results = sandbox.run_many(sources, tests, workers=count)
            rates[str(count)] = round(len(results) / (time.perf_counter() - began), 1)
            assert all(result.outcome == "passed" for result in results)
        for _ in range(5):
            sandbox.kill_helper()
            began = time.perf_counter()
            sandbox.run(sources[0], tests[0])
            back.append(1000 * (time.perf_counter() - began))
    return {
        "level": level,
        "cold_ms": round(statistics.median(cold), 1),
        "one_program_ms": round(1000 * statistics.median(alone), 1),
        "programs_per_s": rates,
        "back_after_kill_ms": round(statistics.median(back), 1),
        "cores": len(os.sched_getaffinity(0)),
    }


def main(levels: tuple[str, ...] = ("S4", "S3", "S2"), programs: int = 500, workers: tuple[int, ...] = (1, 2, 8)) -> None:
    """Levels that this machine does not have say why."""
    for level in levels:
        try:
            print(json.dumps(measure(level, programs, list(workers))), flush=True)
        except SandboxUnavailable as error:
            print(json.dumps({"level": level, "unavailable": str(error)}), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
