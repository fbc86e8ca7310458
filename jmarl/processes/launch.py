"""Start one run as several processes on this host, and start it again when it fails: what is behind `jmarl launch`.

The processes find each other by the variables of torchrun, which are set here. Each host has its own launcher; when a process
fails on one, JAX ends those of the others, and each launcher starts its own again. Left out: launchers that know of each other,
so that fewer processes than before (`elastic`) are for one host.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jmarl.processes.children import LaunchResult, run_children
from jmarl.processes.place import PER_PROCESS

WRONG_INPUT = 2  # exit code of a wrong flag, setting or file


@dataclass(frozen=True)
class Launch:
    """What to start, and how often."""

    command: tuple[str, ...]  # of each process
    again: tuple[str, ...]  # of each process when it is started again
    processes: int  # on this host
    logs: Path
    nodes: int = 1
    node: int = 0  # number of this host
    address: str = ""  # name of the first host; empty: this one
    port: int = 0  # 0: a free one
    devices: int | None = None  # of each process; None: a GPU, or what JAX takes on a CPU
    restarts: int = 0
    elastic: bool = False
    grace: float = 15.0  # seconds between SIGTERM and SIGKILL when a process has failed


def launch(run: Launch, say: Callable[[str], None]) -> int:
    """Run all processes, again if one fails and `restarts` allows it. Returns the exit code of the first one that failed, 75 if
    all have saved to be started again, else 0."""
    slots = list(range(run.processes))  # which GPUs a process takes; one that failed leaves its own unused
    gpus = visible_gpus(os.environ)
    check_gpus(run, gpus)
    code = 0
    for attempt in range(run.restarts + 1):
        command = run.again if attempt else run.command
        count = run.nodes * len(slots)
        header = f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} attempt {attempt + 1}, {count} processes: {shlex.join(command)}"
        if attempt:
            say(f"attempt {attempt + 1} of {run.restarts + 1}, {count} processes")
        port = run.port or free_port()
        places = enumerate(slots, start=run.node * len(slots))
        commands = {rank: (command, os.environ | variables(run, rank, len(slots), port, slot, gpus)) for rank, slot in places}
        result = run_children(commands, run.logs, header, run.grace)
        first = result.first_failed
        if first is None:
            return max((end.code for end in result.exits), default=0)
        code = first.exit_code
        if result.signals:
            say(f"stopped by {signal.Signals(result.signals[0]).name}: process {first.rank} {first.words}")
            break
        say(report(result, run.logs))
        if first.code == WRONG_INPUT:  # it would fail again
            break
        if run.elastic and len(slots) > 1:
            slots.pop(first.rank)
    return code


def report(result: LaunchResult, logs: Path) -> str:
    """Return lines that say which process failed first, how, and what it wrote last."""
    first = result.first_failed
    assert first is not None
    others = [end for end in sorted(result.exits) if end.rank != first.rank and end.failed]
    lines = [f"process {first.rank} failed first: it {first.words}. Its last lines, of {logs / f'rank_{first.rank}.txt'}:"]
    lines += [f"    | {line}" for line in result.last_lines[first.rank]]
    return "\n".join(lines + [f"    process {end.rank} {end.words} after it" for end in others])


def variables(run: Launch, rank: int, here: int, port: int, slot: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of one process.

    here: the number of processes on this host. slot: which part of the GPUs is the process's."""
    env = {
        "RANK": rank, "WORLD_SIZE": run.nodes * here, "LOCAL_RANK": rank - run.node * here, "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": run.address or "127.0.0.1", "MASTER_PORT": port, "PYTHONUNBUFFERED": 1,
    }  # fmt: skip
    count = run.devices or (1 if gpus else None)
    if gpus and count:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * count : (slot + 1) * count])
        env["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(count)))  # among the visible ones
    elif count:
        env["JAX_NUM_CPU_DEVICES"] = count
    if count:
        env[PER_PROCESS] = count
    return {name: str(value) for name, value in env.items()}


def check_gpus(run: Launch, gpus: Sequence[str]) -> None:
    """Raise ValueError if there are not enough GPUs."""
    needed = run.processes * (run.devices or 1)
    if gpus and needed > len(gpus):
        raise ValueError(
            f"{run.processes} processes need {needed} GPUs, and this host has {len(gpus)}: lower --nproc-per-node or "
            "--devices-per-process, or set JAX_PLATFORMS=cpu"
        )


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """Return the GPUs that processes of this host may use, as CUDA_VISIBLE_DEVICES names them. JAX is not asked: it would
    take them."""
    if env.get("JAX_PLATFORMS") == "cpu":
        return []
    if "CUDA_VISIBLE_DEVICES" in env:
        return [name.strip() for name in env["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")]
    numbers = [match[1] for path in Path("/dev").glob("nvidia*") if (match := re.fullmatch(r"nvidia(\d+)", path.name))]
    return [str(i) for i in range(len(numbers))]


def free_port() -> int:
    """Return a port that is free now, below those which connections take (from 32768), one of which would soon be in use."""
    ports = range(20000, 30000)
    while True:
        with contextlib.suppress(OSError), socket.create_server(("", port := random.choice(ports))):
            return port


def process_command(words: Sequence[str], commands: Sequence[str]) -> list[str]:
    """Return the command of a process: `train ...` is jmarl's, `FILE.py ...` a script, `-m MODULE ...` a module."""
    words = list(words[1:]) if words[:1] == ["jmarl"] else list(words)
    if words[:1] == ["-m"] and len(words) > 1:
        return [sys.executable, *words]
    if words and words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise FileNotFoundError(f"there is no script {words[0]}")
        return [sys.executable, *words]
    if not words or words[0] not in commands or words[0] == "launch":
        raise ValueError(
            f"{' '.join(words[:1]) or 'nothing'} after -- is not allowed: write a command of jmarl such as train "
            "--config FILE, a script FILE.py, or -m MODULE"
        )
    return [sys.executable, "-m", "jmarl", *words]
