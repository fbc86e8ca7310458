"""Processes that join by JAX's runtime: real ones, which fail, are killed, or are on two hosts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jmarl.processes.launch import free_port
from tests.running import ROOT
from tests.test_examples import RESULT, shares_of

CHILD = str(Path(__file__).parent / "joined_process.py")
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")
ENV = {name: value for name, value in os.environ.items() if name not in OWN} | {
    "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start(*arguments, script=CHILD, host="127.0.0.1", prefixes=((), ()), **env):
    """Start two processes without a launcher."""
    place = env | {"WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen([*prefix, sys.executable, script, *arguments], env=ENV | place | {"RANK": str(rank)}, **PIPES)
        for rank, prefix in enumerate(prefixes)
    ]


def wait_until_joined(process):
    """Return the line of a process that says so."""
    return next(line for line in iter(process.stdout.readline, "") if line.startswith("total "))


def kill_and_wait(what, victim):
    """Kill one of two processes. Returns what the other one wrote, its exit code, and the seconds until it ended."""
    processes = start(what)
    try:
        for process in processes:
            assert wait_until_joined(process) == "total 28.0 of 2 processes, 2 devices\n"
        processes[victim].kill()
        begin = time.monotonic()
        output, _ = processes[1 - victim].communicate(timeout=60)
        return output, processes[1 - victim].returncode, time.monotonic() - begin
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_when_one_is_killed_the_other_ends_within_a_minute_with_a_reason():
    output, code, seconds = kill_and_wait("wait", victim=1)  # it notices by the heartbeats alone
    assert code == -signal.SIGABRT and 5 < seconds < 45
    assert "The following tasks are unhealthy (stopped sending heartbeats):\n1\n" in output


@pytest.mark.long
def test_when_one_is_killed_in_an_exchange_the_other_says_that_it_has_ended():
    output, code, seconds = kill_and_wait("exchange", victim=1)
    assert code == 1 and seconds < 20
    assert "(another process has ended, and its output says why)" in output.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_ends_all_with_its_rank_file_and_line(tmp_path, rank):
    """Process 0, without which no other can go on, gives them time to read its reason."""
    flags = ["--nproc-per-node", "2", "--log-dir", str(tmp_path), "--devices-per-process", "2"]
    command = [sys.executable, "-m", "jmarl", "launch", *flags, "--", CHILD, "fail", str(rank)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120)
    assert f"[rank {1 - rank}] total 120.0 of 2 processes, 4 devices" in done.stdout
    line = 1 + Path(CHILD).read_text().splitlines().index('    {}["no such city"]')
    reason, last = (
        f"failed: KeyError: 'no such city', in {CHILD}, line {line}",
        f"Its last lines, of {tmp_path}/rank_{rank}.txt:",
    )
    assert f"jmarl: process {rank} failed first: it ended with exit code 1. {last}" in done.stderr
    assert reason in done.stderr and done.returncode == 1
    if rank == 0:
        assert "process 1 ended with exit code 76 after it" in done.stderr
    else:
        (own,) = [text for text in done.stdout.splitlines() if text.startswith("[rank 0] jmarl: process 1 of 2 (host ")]
        assert reason in own and own.endswith("ends too")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("torchrun") is None, reason="torchrun is not installed")
def test_the_example_of_the_document_divides_weights_over_the_processes_of_torchrun():
    command = ["torchrun", "--nproc_per_node=2", "--master_port", str(free_port())]
    command += ["experiments/examples/train_distributed_ppo.py", "--strategy", "fsdp", "--quick"]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300)
    shares = shares_of(done.stdout)
    assert len(shares) == 4, (done.stdout, done.stderr)  # of two processes, before training and after it
    assert all(whole / 2 <= on_device < 0.51 * whole for whole, on_device in shares) and RESULT.search(done.stdout)


@pytest.mark.long
def test_joining_ends_in_time_with_a_sentence_where_no_coordinator_is():
    script = "import jmarl\njmarl.join_processes('auto', timeout=1.0)"
    env = ENV | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "RuntimeError: process 1 of 2 did not reach process 0 at 127.0.0.1:" in done.stderr
