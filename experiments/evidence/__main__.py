"""Run the claims of EVIDENCE.md, and draw the page and its figures from the numbers that they left.

Command: python -m experiments.evidence plan                     (what is planned, and what of it is done)
         python -m experiments.evidence run --minutes 150        (the next runs, two at a time; the same command again goes on)
         python -m experiments.evidence run --claims teams_grid
         python -m experiments.evidence run --quick              (two updates of each claim, nothing is recorded)
         python -m experiments.evidence draw                     (figures and tables, without training)
A claim is a YAML file beside this one, which `jmarl train --config FILE` runs alone. The runner starts one process for each of
its runs, on a core of its own, skips those that have left their numbers in results/, and stops after `--minutes`: a run that
is interrupted continues with the next command. On another machine only such a run is lost. Time: see `plan`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import tyro
import yaml

from experiments.evidence.record import RESULTS, write_record
from jmarl.config import Count, Positive, check, check_fields

HERE = Path(__file__).parent
ROOT = Path("runs/evidence")
INTERRUPTED = 75  # the exit code of an interrupted run that is saved


@dataclasses.dataclass(frozen=True)
class Job:
    """One process: a run of a claim, or all seeds of a condition in one program."""

    claim: str
    name: str  # of the directory below that of the claim
    seeds: tuple[str, ...]  # directories of single runs below that of the claim

    @property
    def is_done(self) -> bool:
        return all((RESULTS / self.claim / f"{seed}.json").is_file() for seed in self.seeds)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Run the claims of EVIDENCE.md, or draw it."""

    command: tyro.conf.Positional[Literal["plan", "run", "draw"]]
    """plan: list claims, planned minutes and runs that are done. run: make the next runs. draw: write figures and EVIDENCE.md."""
    claims: tuple[str, ...] = ()
    """Names of claims; empty: all, in the order of plan.yaml."""
    minutes: Positive = 150.0
    """Begin no run after so many minutes, and interrupt those that are not finished."""
    workers: Count = 2
    """Processes at the same time, each on a core of its own."""
    quick: bool = False
    """Two updates of one seed of each condition, to see that all of it runs; nothing is recorded."""

    def __post_init__(self) -> None:
        check_fields(self)
        unknown = set(self.claims) - set(plan())
        check("claims", self.claims, not unknown, f"some of {', '.join(plan())}")


def plan() -> dict[str, dict[str, Any]]:
    """Return what is planned for each claim."""
    return yaml.safe_load((HERE / "plan.yaml").read_text(encoding="utf-8"))


def jobs_of(claim: str) -> list[Job]:
    """Return the processes of a claim, seed by seed, so that conditions stay equally far."""
    names = subprocess.run(
        [sys.executable, "-m", "jmarl", "train", "--config", str(HERE / f"{claim}.yaml"), "--output", str(ROOT / claim), "--list"],
        check=True, capture_output=True, encoding="utf-8",
    ).stdout  # fmt: skip
    jobs = [Job(claim, one["name"], tuple(one["runs"])) for one in json.loads(names)]
    return sorted(jobs, key=lambda job: job.name.rpartition("seed_")[2] if "seed_" in job.name else "")


class Queue:
    """The jobs that are left, for several threads."""

    def __init__(self, jobs: Iterator[Job], minutes: float):
        self.jobs, self.end, self.lock = jobs, time.monotonic() + 60 * minutes, threading.Lock()
        self.processes: set[subprocess.Popen] = set()

    def next(self) -> Job | None:
        """Return the next job, and None where none is left or the time is over."""
        with self.lock:
            return next(self.jobs, None) if time.monotonic() < self.end else None

    def interrupt_late(self) -> None:
        """Wait for the end of the time, and interrupt what still runs."""
        while time.monotonic() < self.end:
            time.sleep(1)
        for process in list(self.processes):
            process.send_signal(signal.SIGTERM)


def work(queue: Queue, core: int, cfg: Evidence) -> None:
    """Run jobs on one core until none is left."""
    while (job := queue.next()) is not None:
        run_job(queue, job, core, cfg.quick)


def run_job(queue: Queue, job: Job, core: int, quick: bool) -> None:
    """Run one job in a process of its own, and record it if it made all its updates."""
    root = ROOT / ("quick" if quick else "") / job.claim
    command = [sys.executable, "-m", "jmarl", "train", "--config", str(HERE / f"{job.claim}.yaml")]
    command += ["--output", str(root), "--only", job.name, "--resume", "auto"]
    if quick:
        command += ["--set", "num_updates=2", "held_out=4", "num_tasks=16"]
    log = root / f"{job.name.replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(["taskset", "-c", str(core), *command], stdout=output, stderr=subprocess.STDOUT)
        queue.processes.add(process)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        queue.processes.discard(process)
    minutes, code = (time.monotonic() - start) / 60, process.returncode
    print(f"{job.claim} {job.name}: exit code {code}, {minutes:.1f} min; {log}", flush=True)
    if code == 0 and not quick:
        cpu = (usage.ru_utime + usage.ru_stime) / len(job.seeds)
        for seed in job.seeds:
            write_record(job.claim, seed, root / seed, cpu)


def run(cfg: Evidence) -> int:
    """Make the runs that are left. Returns the exit code: 0 if all are done."""
    claims = cfg.claims or tuple(plan())
    jobs = [job for claim in claims for job in jobs_of(claim) if cfg.quick or not job.is_done]
    print(f"{len(jobs)} processes are left of {', '.join(claims)}", flush=True)
    queue = Queue(iter(jobs), cfg.minutes)
    cores = sorted(os.sched_getaffinity(0))
    threads = [threading.Thread(target=work, args=(queue, cores[i % len(cores)], cfg)) for i in range(cfg.workers)]
    threading.Thread(target=queue.interrupt_late, daemon=True).start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


def main(cfg: Evidence) -> int:
    if cfg.command == "run":
        return run(cfg)
    from experiments.evidence import page

    if cfg.command == "plan":
        print(page.plan_table(plan()))
    else:
        page.write(plan())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Evidence)))
