"""Runs of 2 and of 4 processes equal those of one; a run survives faults of a process.

Each number of processes is started once, for many facts, because each process imports and traces for itself."""

from __future__ import annotations

import functools
import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jmarl.models.hub.agents import load_agent, open_agent
from tests.processes import run_in_processes
from tests.processes.run_in_processes import ADAPTERS, AGAIN, CENTRAL, EXCHANGE, GIVEN, PLAY, RUNS, SHARDS, TURNS
from tests.processes.test_joined_processes import ENV, start

SCRIPT = str(Path(__file__).with_name("run_in_processes.py"))
pytestmark = pytest.mark.slow


def launch(count, out, *arguments, fault=""):
    """Run the script in some processes, by the launcher. Returns its exit code and all that was printed."""
    flags = ["--nproc-per-node", str(count), "--grace", "2", "--log-dir", str(out / "logs"), "--"]
    command = [sys.executable, "-m", "jmarl", "launch", *flags, SCRIPT, str(out), *map(str, arguments)]
    done = subprocess.run(command, env=ENV | {"FAULT": fault}, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


class Start(NamedTuple):
    """What some processes that were started once have written."""

    out: Path
    results: dict[str, Any]
    text: str
    logs: list[str]


@pytest.fixture(scope="module")
def models(tiny_dir):
    return [tiny_dir("qwen2", seed=seed) for seed in (0, 1)]


PLANS = {  # number of processes -> what they run, what goes wrong at the end, and the exit code
    2: ((EXCHANGE, TURNS, ADAPTERS, CENTRAL, PLAY), "killed of 1", 128 + signal.SIGKILL),
    4: ((TURNS, GIVEN, SHARDS), "bad luck of 3", 1),
}
IN_PLANS = [(count, name) for count, (names, *_) in PLANS.items() for name in names if name in RUNS]
RARE = [pytest.param(n, name, marks=pytest.mark.nightly) for n in PLANS for name in RUNS if (n, name) not in IN_PLANS]


@pytest.fixture(scope="module")
def started(models, tmp_path_factory):
    """`started(count)`: the start of so many processes. `started(count, name)`: one that has the run of this name."""

    @functools.cache
    def once(count, names, fault="", expected=0):
        out = tmp_path_factory.mktemp(f"processes_{count}")
        if count == 4 and TURNS in names:
            copy_two_updates(get(2).out, out / TURNS)
        code, text = launch(count, out, *models, *names, fault=fault)
        assert code == expected, text[-4000:]
        results, processes, devices = pickle.loads((out / "results.pkl").read_bytes())
        assert processes == devices == count
        return Start(out, results, text, [(out / "logs" / f"rank_{rank}.txt").read_text() for rank in range(count)])

    def get(count, name=""):
        return once(count, *PLANS[count]) if not name or (count, name) in IN_PLANS else once(count, (name,))

    return get


@pytest.fixture(scope="module")
def alone(models, started, tmp_path_factory):
    """`alone(name)`: what a run gives in this process."""
    agents, out = [open_agent(str(model)) for model in models], tmp_path_factory.mktemp("alone")

    @functools.cache
    def get(name):
        if name == AGAIN:
            copy_two_updates(started(2).out, out / AGAIN)
        return run_in_processes.played(agents) if name == PLAY else run_in_processes.result_of(name, agents, out)

    return get


def copy_two_updates(out, copy):
    """Copy the run of two turns as it was after two of its three updates."""
    shutil.copytree(out / TURNS, copy)
    shutil.rmtree(copy / "checkpoints" / "3")


def largest_difference(a, b):
    pairs = zip(a, b, strict=True)
    return max(float(np.abs(np.asarray(x, float) - np.asarray(y, float)).max(initial=0)) for x, y in pairs)


@pytest.mark.parametrize("count, name", [*IN_PLANS, *RARE])
def test_several_processes_equal_one(started, alone, name, count):
    """Three updates: rewards to the last bit, rows and the whole state up to the order of sums. The reward ranks the joint
    actions of the step and draws random numbers; the environment draws some in each episode. Of two turns, the third update of
    4 processes follows two of 2, from a checkpoint."""
    (rewards, rows, state, _), (other_rewards, other_rows, other_state, _) = alone(name), started(count, name).results[name]
    assert other_rewards == (rewards[2:] if (name, count) == (TURNS, 4) else rewards)
    assert largest_difference(state, other_state) < 1e-5
    assert [row.keys() for row in rows] == [row.keys() for row in other_rows]
    for row, other in zip(rows, other_rows, strict=True):
        np.testing.assert_allclose([*row.values()], [*other.values()], rtol=1e-4, atol=1e-5)


def test_two_processes_exchange_objects_errors_and_arrays(started):
    logs = started(2).logs
    assert ["no output directory was given: it is runs/story_magrpo" in log for log in logs] == [True, False]
    assert "error: ZeroDivisionError" in logs[0]
    assert "error: FailedProcess process 0 of 2 failed: ZeroDivisionError" in logs[1]
    for log in logs:
        assert "interrupted: Interrupted because it rains" in log
        assert re.search(
            "errors: .* a reward failed on 13 of the 20 joint actions of the last 5 batches, more than max_err", log
        )
        assert "state: TypeError the states of Locked cannot be pickled (TypeError: cannot pickle '_thread.lock' object)" in log
        for what in ("sweep: RuntimeError sweeps", "seeds: RuntimeError several seeds in one program"):
            assert f"{what} need one process, and this run has 2" in log
        assert "algorithms that train a reward model need one process, and this run has 2" in log
        assert "mesh='agent=1' has 1 devices, and the 2 processes of this run have 2: a mesh of several" in log
        assert "auto: [{'agent': 2}, {'data': 2}]" in log


def test_rows_say_what_was_exchanged(started):
    lines = (started(2).out / CENTRAL / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step_s" in row]  # not those of evaluations
    assert all(0 < row["exchange/seconds"] < row["time/step_s"] + row["time/compiling"] for row in rows)
    sent = [row["exchange/sent_bytes"] for row in rows]
    assert min(sent) > 300 and max(sent) < 20_000, sent  # observations, rewards and states of four episodes


@pytest.mark.parametrize("count", PLANS)
def test_saved_models_are_the_gathered_arrays(started, count):
    out, results, *_ = started(count)
    for i, params in enumerate(results[TURNS][3]):
        saved = load_agent(out / TURNS / "models" / f"agent_{i}").params
        jax.tree.map(np.testing.assert_array_equal, saved, params)
    files = [load_file(out / TURNS / "models" / f"agent_{i}" / "model.safetensors") for i in range(2)]
    assert files[0].keys() == files[1].keys()


def test_models_that_four_processes_hold_in_parts_are_saved_whole(started, models):
    """With model=4: equal to the files that they were read from, to the last bit."""
    out, results, *_ = started(4)
    assert results[SHARDS] < 0.3
    for i, model in enumerate(models):
        files = (load_file(Path(x) / "model.safetensors") for x in (out / SHARDS / f"agent_{i}", model))
        jax.tree.map(np.testing.assert_array_equal, *files)


def test_a_checkpoint_of_two_processes_resumes_in_one(alone):
    whole, (rewards, _, state, _) = alone(TURNS), alone(AGAIN)
    assert rewards == whole[0][2:] and largest_difference(state, whole[2]) < 1e-5


def test_evaluations_and_texts_of_two_processes_equal_those_of_one(started, alone):
    """And what two cannot do is refused by a sentence."""
    (returns, texts, _), (other_returns, other_texts, refused) = alone(PLAY), started(2).results[PLAY]
    np.testing.assert_array_equal(returns, other_returns)
    assert texts == other_texts and len({*texts[0], *texts[1]}) > 2
    assert refused[0] == "pairings of cross-play need one process, and this run has 2: start a single one"
    assert refused[1] == "async_steps=1 needs one process, and this run has 2: set async_steps=0"


def test_a_run_survives_the_end_of_a_process_and_goes_on_on_two_hosts(started, models, hosts):
    """One of two is 20 s late and then killed: the other ends. They go on, on two hosts, past a proxy that does not answer and
    host names that are loopback or unknown; one gets SIGTERM: both save and end with 75. At the end, on one host, the state is
    that of a run that never stopped, bit for bit. Then an update raises in one of two, outside an exchange: the other is told
    at its next exchange."""
    out, whole, text, _ = started(2)
    assert "process 1 failed first: it was killed by SIGKILL" in text
    proxy = "http://10.77.42.9:9"
    others = dict(host=hosts.address, prefixes=hosts.prefixes, http_proxy=proxy, https_proxy=proxy, FAULT="stopped of 1")
    processes = start(str(out), *map(str, models), script=SCRIPT, **others)
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [75, 75], outputs
    (updates,) = {*re.findall(r"ended after (\d) updates", "".join(outputs))}
    assert 1 < int(updates) < 4
    begin = time.monotonic()
    code, text = launch(2, out, *models, fault="update")
    assert "ended after 4 updates" in text, text[-4000:]
    for a, b in zip(pickle.loads((out / "state.pkl").read_bytes()), whole[CENTRAL][2], strict=True):
        np.testing.assert_array_equal(a, b)
    assert code == 1 and "process 1 failed first" in text and time.monotonic() - begin < 120
    assert all("bad update" in (out / "logs" / f"rank_{rank}.txt").read_text() for rank in range(2))
    if hosts.one:
        pytest.skip(f"all was on one host: {hosts.one}")


def test_an_error_of_the_user_ends_all_with_its_process_file_and_line(started):
    _, _, text, logs = started(4)
    assert "process 3 failed first" in text and re.search(r"run_in_processes.py\D+\d+", text) and "bad luck" in text
    assert len(logs) == 4 and all("bad luck" in log for log in logs)
