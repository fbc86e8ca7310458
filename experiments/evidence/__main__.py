"""Run the claims of EVIDENCE.md, and draw the page and its figures from the numbers that they left.

Command: python -m experiments.evidence plan                     (what is planned, and what of it is done)
         python -m experiments.evidence run --minutes 150        (the next runs, two at a time; the same command again goes on)
         python -m experiments.evidence run --claims teams_grid
         python -m experiments.evidence run --quick              (an update of each condition, nothing is recorded)
         python -m experiments.evidence draw                     (figures and tables, without training)
A claim is a YAML file beside this one, which `jmarl train --config FILE` runs alone. The runner starts one process for each of
its runs, on a core of its own, skips those that have left their numbers in results/, and stops after `--minutes`: a run that
is interrupted continues with the next command. On another machine only such a run is lost. Time: see `plan`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import tyro
import yaml

from experiments.evidence.record import RESULTS, checked_out, write_record
from jmarl.cli.configuration import read_configuration
from jmarl.cli.main import Parser
from jmarl.cli.sweep import points_of
from jmarl.cli.train import add_arguments
from jmarl.config import Count, Positive, check, check_fields

HERE = Path(__file__).parent
ROOT = Path("runs/evidence")
INTERRUPTED = 75  # exit code where runs are left


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
    """plan: list claims, planned minutes, and what is done. run: make the next runs. draw: write figures and tables."""
    claims: tuple[str, ...] = ()
    """Names of claims; empty: all, in the order of plan.yaml."""
    conditions: tuple[str, ...] = ()
    """Run these conditions alone, such as way=team."""
    minutes: Positive = 150.0
    """Begin no run after so many minutes, and interrupt those that are not finished."""
    workers: Count = 2
    """Processes at the same time, each on a core of its own."""
    quick: bool = False
    """An update of one seed of each condition, evaluated on two tasks, to see that all of it runs; nothing is recorded."""

    def __post_init__(self) -> None:
        check_fields(self)
        known = [claim for claim, own in plan().items() if "minutes" in own or self.command == "draw"]
        check("claims", self.claims, set(self.claims) <= set(known), f"some of {', '.join(known)}")


def plan() -> dict[str, dict[str, Any]]:
    """Return what is planned for each claim."""
    return yaml.safe_load((HERE / "plan.yaml").read_text(encoding="utf-8"))


def jobs_of(claim: str, root: Path) -> list[Job]:
    """Return the processes of a claim, seed by seed, so that all conditions are equally far."""
    args = Parser()
    add_arguments(args)
    given = args.parse_args(["--config", str(HERE / f"{claim}.yaml"), "--output", str(root / claim)])
    points = points_of(given, read_configuration(given))
    below = root / claim
    jobs = [
        Job(claim, str(Path(point.cfg.train.run.output_dir).relative_to(below)),
            tuple(str(directory.relative_to(below)) for directory in point.directories))
        for point in points
    ]  # fmt: skip
    return sorted(jobs, key=lambda job: int(job.seeds[0].rpartition("seed_")[2]))


class Queue:
    """The jobs that are left, for several threads."""

    def __init__(self, jobs: Iterator[Job], minutes: float):
        self.jobs, self.end, self.lock = jobs, time.monotonic() + 60 * minutes, threading.Lock()
        self.processes: set[int] = set()  # ids of those that run

    def next(self) -> Job | None:
        """Return the next job, and None where none is left or the time is over."""
        with self.lock:
            return next(self.jobs, None) if time.monotonic() < self.end else None

    def interrupt_late(self) -> None:
        """Wait for the end of the time, and interrupt what still runs."""
        while time.monotonic() < self.end:
            time.sleep(1)
        with self.lock:
            for pid in self.processes:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGTERM)


def work(queue: Queue, core: int, cfg: Evidence) -> None:
    """Run jobs on one core until none is left."""
    while (job := queue.next()) is not None:
        run_job(queue, job, core, ROOT / "quick" if cfg.quick else ROOT, cfg.quick)


def run_job(queue: Queue, job: Job, core: int, root: Path, quick: bool) -> None:
    """Run one job in a process of its own, and record it if it made all its updates."""
    root = root / job.claim
    command = [sys.executable, "-m", "jmarl", "train", "--config", str(HERE / f"{job.claim}.yaml")]
    command += ["--output", str(root), "--only", job.name, "--resume", "auto"]
    if quick:
        is_evaluated = "held_out" in yaml.safe_load((HERE / f"{job.claim}.yaml").read_text(encoding="utf-8"))
        command += ["--set", "num_updates=1", *["held_out=2"] * is_evaluated]
    log = root / f"{job.name.replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start, commit = time.monotonic(), checked_out()
    with log.open("a", encoding="utf-8") as output:
        with queue.lock:
            if start >= queue.end:
                return
            process = subprocess.Popen(["taskset", "-c", str(core), *command], stdout=output, stderr=subprocess.STDOUT)
            queue.processes.add(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        queue.processes.discard(process.pid)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    with log.with_suffix(".cpu").open("a+", encoding="utf-8") as seconds:  # a line for each attempt
        seconds.write(f"{usage.ru_utime + usage.ru_stime:.0f}\n")
        seconds.seek(0)
        cpu = sum(map(int, seconds))
    print(f"{job.claim} {job.name}: exit code {code}, {(time.monotonic() - start) / 60:.1f} min; {log}", flush=True)
    if code == 0 and not quick:
        for seed in job.seeds:
            write_record(job.claim, seed, root / seed, cpu / len(job.seeds), commit)
            shutil.rmtree(root / seed / "checkpoints", ignore_errors=True)  # they would fill the disk


def run(cfg: Evidence) -> int:
    """Make the runs that are left. Returns the exit code: 0 if all are done, else 75."""
    claims = cfg.claims or tuple(claim for claim, own in plan().items() if "minutes" in own)
    root = ROOT / "quick" if cfg.quick else ROOT
    jobs = [job for claim in claims for job in jobs_of(claim, root)]
    names = {job.name.partition("/")[0] for job in jobs}
    check("conditions", cfg.conditions, names.issuperset(cfg.conditions), f"some of {', '.join(sorted(names))}")
    chosen = {*cfg.conditions} or names
    jobs = [job for job in jobs if job.name.partition("/")[0] in chosen and (cfg.quick or not job.is_done)]
    if cfg.quick:  # one process of each condition
        jobs = list({(job.claim, job.name.partition("/")[0]): job for job in reversed(jobs)}.values())[::-1]
    print(f"{len(jobs)} processes are left of {', '.join(claims)}", flush=True)
    queue = Queue(iter(jobs), cfg.minutes)
    cores = sorted(os.sched_getaffinity(0))
    threading.Thread(target=queue.interrupt_late, daemon=True).start()
    with ThreadPoolExecutor(cfg.workers) as pool:
        workers = [pool.submit(work, queue, cores[i % len(cores)], cfg) for i in range(cfg.workers)]
        try:
            for worker in workers:
                worker.result()
        except BaseException:  # Ctrl+C, which the processes get too, or an error: begin nothing more
            queue.end = 0.0
            raise
    return 0 if cfg.quick or all(job.is_done for job in jobs) else INTERRUPTED


def main(cfg: Evidence) -> int:
    if cfg.command == "run":
        return run(cfg)
    from experiments.evidence import page

    if cfg.command == "plan":
        print(page.plan_table(plan()))
    else:
        page.write(plan(), cfg.claims)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Evidence)))
