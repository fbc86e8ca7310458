"""`jmarl launch`: processes without JAX, which take milliseconds. Those that join are in test_joined_processes.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jmarl.cli.launch import run_directory, without_resume
from jmarl.cli.main import main
from jmarl.processes import ending
from jmarl.processes.children import Exit, LaunchResult
from jmarl.processes.launch import Launch, check_gpus, process_command, variables, visible_gpus

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), len(open("starts").read().split()) if os.path.exists("starts") else 0
def start(): open("starts", "a").write(f"{rank} ")
def leave(number, frame):
    print(f"got {signal.Signals(number).name}")
    sys.exit(75)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, leave)
print("here", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])
"""


@pytest.fixture
def script(tmp_path):
    """`script(lines, *flags) -> Popen` of a launcher whose processes run SCRIPT and then these lines."""
    processes = []

    def start(lines, *flags):
        (tmp_path / "own.py").write_text(SCRIPT + lines)
        command = [sys.executable, "-m", "jmarl", "launch", "--log-dir", "kept", *flags, "--", "own.py"]
        env = {name: value for name, value in os.environ.items() if name not in ("SLURM_STEP_ID", "RANK")}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=env, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_output_has_the_rank_in_front_and_is_in_files(script, tmp_path):
    out, err = (process := script("", "--nproc_per_node=2")).communicate(timeout=30)
    assert process.returncode == 0 and sorted(out.splitlines()) == ["[rank 0] here 0 2 0", "[rank 1] here 1 2 1"]
    for rank in range(2):
        header, line = (tmp_path / f"kept/rank_{rank}.txt").read_text().splitlines()
        assert header.startswith("--- ") and "attempt 1, 2 processes: " in header and line == f"here {rank} 2 {rank}"
    assert err == "jmarl: 2 processes on this host, their output is in kept/rank_N.txt\n"


def test_the_first_that_failed_is_named_with_its_last_lines_and_the_others_are_ended(script):
    lines = "if rank == 1: print('why'); os.kill(os.getpid(), signal.SIGKILL)\nwhile True: time.sleep(0.02)"
    out, err = (process := script(lines, "--nproc-per-node", "3", "--grace", "0.2")).communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL and out.count("got SIGTERM") == 2
    assert "jmarl: process 1 failed first: it was killed by SIGKILL. Its last lines, of kept/rank_1.txt:\n" in err
    assert "    | here 1 3 1\n    | why\n" in err


@pytest.mark.long
def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(script):
    lines = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank == 1: time.sleep(0.2); sys.exit(3)\ntime.sleep(60)"
    begin = time.monotonic()
    _, err = (process := script(lines, "--nproc-per-node", "2", "--grace", "0.3")).communicate(timeout=30)
    assert time.monotonic() - begin < 15 and process.returncode == 3
    assert "process 1 failed first: it ended with exit code 3." in err and "process 0 was killed by SIGKILL after it" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_forwarded_and_the_code_says_that_all_have_saved(script, number):
    process = script("while True: time.sleep(0.02)", "--nproc-per-node", "2")
    for _ in range(2):
        assert process.stdout.readline().startswith("[rank ")
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 75 and out.count(f"got {number.name}\n") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends processes with the one that started them")
def test_a_launcher_that_is_killed_leaves_no_processes(script):
    process = script("print(os.getpid())\nwhile True: time.sleep(0.02)", "--nproc-per-node", "2")
    lines = [process.stdout.readline() for _ in range(4)]
    pids = [int(line.split()[-1]) for line in lines if "here" not in line]
    process.kill()
    end = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(pids) == 2 and not left


def is_alive(pid):
    """Whether a process runs; one that has ended may wait for its new parent to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.long
def test_all_are_started_again_elastic_without_the_one_that_failed(script, tmp_path):
    lines = "start()\nif rank == 1 and attempt < 3: time.sleep(0.3); sys.exit(5)\nif attempt < 3: time.sleep(60)"
    out, err = (
        process := script(lines, "--nproc-per-node", "3", "--restarts", "2", "--elastic", "--grace", "0.2")
    ).communicate()
    assert process.returncode == 0 and "jmarl: attempt 2 of 3, 2 processes\n" in err
    assert out.splitlines()[-2:] in (
        ["[rank 0] here 0 2 0", "[rank 1] here 1 2 1"],
        ["[rank 1] here 1 2 1", "[rank 0] here 0 2 0"],
    )
    assert "attempt 2, 2 processes" in (tmp_path / "kept/rank_0.txt").read_text()


@pytest.mark.parametrize(("code", "attempts"), [(4, 2), (2, 1)])
def test_it_ends_with_the_code_of_the_last_attempt_and_wrong_input_is_not_tried_again(script, code, attempts):
    out, _ = (process := script(f"sys.exit({code})", "--nproc-per-node", "1", "--restarts", "1")).communicate(timeout=30)
    assert process.returncode == code and out.count("here") == attempts


def test_who_ended_because_of_another_one_did_not_fail_first():
    def first(*codes):
        return LaunchResult([Exit(time, rank, code) for time, (rank, code) in enumerate(codes)], [], {}).first_failed

    assert first((2, 76), (0, -signal.SIGABRT), (1, 1)).rank == 1  # process 0 gives the others time to read its reason
    assert first((2, 76), (0, -signal.SIGABRT)).rank == 2
    assert first((0, 75), (1, 0)) is None


def test_each_process_has_gpus_of_its_own(monkeypatch):
    run = Launch((), (), 2, Path("logs"), nodes=2, node=1, address="node0", port=7, devices=2)
    env = variables(run, 3, 2, 7, 1, ["4", "5", "6", "7"])
    assert {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "7",
    }.items() <= env.items()
    assert env["CUDA_VISIBLE_DEVICES"] == "6,7" and env["JAX_LOCAL_DEVICE_IDS"] == "0,1" and "JAX_NUM_CPU_DEVICES" not in env
    assert variables(run, 3, 2, 7, 1, [])["JAX_NUM_CPU_DEVICES"] == "2"
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,4"}) == ["3", "4"] and visible_gpus({"JAX_PLATFORMS": "cpu"}) == []
    with pytest.raises(ValueError, match="2 processes need 4 GPUs, and this host has 3: lower --nproc-per-node"):
        check_gpus(run, ["0", "1", "2"])


def test_train_is_started_again_from_its_newest_checkpoint():
    words = ["train", "--config", "a.yaml", "--resume", "--set", "seed=1"]
    assert without_resume(words) == ["train", "--config", "a.yaml", "--set", "seed=1"]
    assert without_resume(["train", "--resume", "40", "--resume=auto", "--config", "a"]) == ["train", "--config", "a"]
    assert process_command(["jmarl", *words], ["train"])[1:] == ["-m", "jmarl", *words]
    assert process_command(["-m", "a.b", "--x"], [])[1:] == ["-m", "a.b", "--x"]


@pytest.mark.parametrize(
    ("text", "flags", "directory"),
    [
        ("experiment_name: x", [], "runs/x"),
        ("", [], "runs/a"),
        ("output_dir: b", ["--output", "c"], "c"),
        ("training: {checkpoint_dir: d}", [], "d"),
        ("mesh: agent=2", ["--set", "output_dir=e"], "e"),
    ],
)
def test_the_output_goes_into_the_directory_of_the_run(text, flags, directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("models: [m]\n" + text)
    assert run_directory(["train", "--config", "a.yaml", *flags]) == (f"{directory}/logs", "mesh" in text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--", "train", "--config", "a"], "--nproc-per-node None is not allowed: give a number of at least 1"),
        (["--nproc-per-node", "2", "--nnodes", "2", "--", "a.py"], "--nnodes 2 needs --master-addr, the name of host 0"),
        (["--nproc-per-node", "2", "--node-rank", "1", "--", "a.py"], "--node-rank 1 is not allowed: from 0 to 0"),
        (["--nproc-per-node", "2", "--elastic", "--", "a.py"], "--elastic needs --restarts N and one host"),
        (["--nproc-per-node", "2", "--", "a.py"], "there is no script a.py"),
        (["--nproc-per-node", "2", "--", "trai"], "trai after -- is not allowed: write a command of jmarl such as train"),
    ],
)
def test_wrong_flags_are_one_line(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *flags]) == 2 and message in capsys.readouterr().err


def test_flags_after_the_dashes_are_those_of_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--nproc-per-nod", "2", "--", "train"])
    assert "there is no flag --nproc-per-nod; did you mean '--nproc-per-node'?" in capsys.readouterr().err


class Coordinator:
    """What is told to JAX's, as far as `ending` uses it."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        if key in self.values:
            raise RuntimeError("ALREADY_EXISTS")
        self.values[key] = value


def test_only_the_first_error_has_a_code_of_its_own(monkeypatch):
    codes, coordinator = [], Coordinator()
    monkeypatch.setattr(ending.Watcher, "end", lambda self, text, code: codes.append(code))
    for process in (1, 2):
        ending.Watcher(coordinator, process, 3).fail("KeyError: 'city'", 2)
    ending.Watcher(Coordinator(), 1, 3).fail("RuntimeError: process 0 of 3 failed: KeyError", 1)
    assert codes[:3] == [2, ending.FOLLOWED, ending.FOLLOWED]
    assert coordinator.values[ending.KEY].startswith("process 1 of 3 (host ")
