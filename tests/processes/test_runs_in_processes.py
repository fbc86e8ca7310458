"""Runs of 2 and of 4 processes equal those of one; a run survives faults of a process."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jmarl.models.hub.agents import load_agent
from tests.processes.run_in_processes import AGAIN, CENTRAL, PLAY, RUNS, SHARDS
from tests.processes.test_joined_processes import ENV, start

SCRIPT = str(Path(__file__).with_name("run_in_processes.py"))


def launch(count, out, *arguments, fault=""):
    """Run the script in some processes, by the launcher. Returns its exit code and all that was printed."""
    out.mkdir(parents=True, exist_ok=True)
    flags = ["--nproc-per-node", str(count), "--grace", "2", "--log-dir", str(out / "logs"), "--"]
    start = [] if count == 1 else ["-m", "jmarl", "launch", *flags]
    command = [sys.executable, *start, SCRIPT, str(out), *map(str, arguments)]
    done = subprocess.run(command, env=ENV | {"FAULT": fault}, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def models(tiny_dir):
    return [tiny_dir("qwen2", seed=seed) for seed in (0, 1)]


PLANS = {  # number of processes -> what they run, what goes wrong at the end, and the exit code
    1: ([*RUNS, PLAY, AGAIN], "", 0),
    2: ([*RUNS, PLAY], "killed of 1", 128 + signal.SIGKILL),
    4: ([*RUNS, SHARDS], "bad luck of 3", 1),
}


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    """`results(count)`: the directory of all runs in so many processes, what they gave, and what was printed. Each number of
    processes is started once, because compiling takes most of the time."""
    known = {}

    def get(count):
        if count not in known:
            out = tmp_path_factory.mktemp(f"processes_{count}")
            if count != 2:  # continues after two of three updates of two processes
                copy = out / (AGAIN if count == 1 else "two turns")
                shutil.copytree(get(2)[0] / "two turns", copy)
                shutil.rmtree(copy / "checkpoints" / "3")
            names, fault, expected = PLANS[count]
            code, text = launch(count, out, *models, *names, fault=fault)
            assert code == expected, text[-4000:]
            known[count] = out, pickle.loads((out / "results.pkl").read_bytes()), text
        return known[count]

    return get


def largest_difference(a, b):
    pairs = zip(a, b, strict=True)
    return max(float(np.abs(np.asarray(x, float) - np.asarray(y, float)).max(initial=0)) for x, y in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", RUNS)
def test_several_processes_equal_one(results, name, count):
    """Three updates: rewards to the last bit, rows and the whole state up to the order of sums. The reward ranks the joint
    actions of the step and draws random numbers; the environment draws some in each episode. Of two turns, the third update of
    4 processes follows two of 2, from a checkpoint."""
    (one, *_), (several, processes, devices) = results(1)[1], results(count)[1]
    assert processes == devices == count
    (rewards, rows, state, _), (other_rewards, other_rows, other_state, _) = one[name], several[name]
    assert other_rewards == (rewards[2:] if (name, count) == ("two turns", 4) else rewards)
    assert largest_difference(state, other_state) < 1e-5
    assert [row.keys() for row in rows] == [row.keys() for row in other_rows]
    for row, other in zip(rows, other_rows, strict=True):
        np.testing.assert_allclose([*row.values()], [*other.values()], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_say_what_was_exchanged(results):
    lines = (results(2)[0] / CENTRAL / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step_s" in row]  # not those of evaluations
    assert all(0 < row["exchange/seconds"] < row["time/step_s"] + row["time/compiling"] for row in rows)
    sent = [row["exchange/sent_bytes"] for row in rows]
    assert min(sent) > 300 and max(sent) < 20_000, sent  # observations, rewards and states of four episodes


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_saved_models_are_the_gathered_arrays(results, count):
    out, (several, *_), _ = results(count)
    for i, params in enumerate(several["two turns"][3]):
        saved = load_agent(out / "two turns" / "models" / f"agent_{i}").params
        jax.tree.map(np.testing.assert_array_equal, saved, params)
    files = [load_file(out / "two turns" / "models" / f"agent_{i}" / "model.safetensors") for i in range(2)]
    assert files[0].keys() == files[1].keys()


@pytest.mark.slow
def test_models_that_four_processes_hold_in_parts_are_saved_whole(results, models):
    """With model=4: equal to the files that they were read from, to the last bit."""
    out, (several, *_), _ = results(4)
    assert several[SHARDS] < 0.3
    for i, model in enumerate(models):
        files = (load_file(Path(x) / "model.safetensors") for x in (out / SHARDS / f"agent_{i}", model))
        jax.tree.map(np.testing.assert_array_equal, *files)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_resumes_in_one(results):
    one = results(1)[1][0]
    whole, (rewards, _, state, _) = one["two turns"], one[AGAIN]
    assert rewards == whole[0][2:] and largest_difference(state, whole[2]) < 1e-5


@pytest.mark.slow
def test_evaluations_and_texts_of_two_processes_equal_those_of_one(results):
    """And what two cannot do is refused by a sentence."""
    (returns, texts, _), (other_returns, other_texts, refused) = (results(count)[1][0][PLAY] for count in (1, 2))
    np.testing.assert_array_equal(returns, other_returns)
    assert texts == other_texts and len({*texts[0], *texts[1]}) > 2
    assert refused[0] == "pairings of cross-play need one process, and this run has 2: start a single one"
    assert refused[1] == "async_steps=1 needs one process, and this run has 2: set async_steps=0"


@pytest.mark.slow
def test_a_run_survives_the_end_of_a_process(results, models):
    """One of two is 20 s late and then killed: the other ends. Going on, one gets SIGTERM: both save and end with 75. At the
    end the state is that of a run that never stopped, bit for bit. Then an update raises in one of two, outside an exchange:
    the other is told at its next exchange."""
    out, (whole, *_), text = results(2)
    assert "process 1 failed first: it was killed by SIGKILL" in text
    code, text = launch(2, out, *models, fault="stopped of 1")
    assert code == 75 and len(set(re.findall(r"ended after (\d) updates", text))) == 1, text[-4000:]
    start = time.monotonic()
    code, text = launch(2, out, *models, fault="update")
    assert "ended after 4 updates" in text, text[-4000:]
    for a, b in zip(pickle.loads((out / "state.pkl").read_bytes()), whole[CENTRAL][2], strict=True):
        np.testing.assert_array_equal(a, b)
    assert code == 1 and "process 1 failed first" in text and time.monotonic() - start < 120
    for rank in range(2):
        assert "bad update" in (out / "logs" / f"rank_{rank}.txt").read_text()


@pytest.mark.slow
def test_a_run_on_two_hosts_equals_that_of_one_process(results, models, two_hosts, tmp_path):
    """The hosts are network namespaces; the second one reaches the coordinator by the address of the first."""
    prefixes, address = two_hosts
    whole, several = (results(count)[1][0][CENTRAL] for count in (1, 2))
    arguments = [str(tmp_path), *map(str, models), CENTRAL]
    processes = start(*arguments, script=SCRIPT, host=address, prefixes=prefixes, FAULT="")
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    rewards, rows, state, _ = pickle.loads((tmp_path / "results.pkl").read_bytes())[0][CENTRAL]
    assert rewards == whole[0] and largest_difference(state, whole[2]) < 1e-5
    assert largest_difference(state, several[2]) == 0 and len(rows) == len(whole[1])


@pytest.mark.slow
def test_an_error_of_the_user_ends_all_with_its_process_file_and_line(results):
    out, _, text = results(4)
    assert "process 3 failed first" in text and re.search(r"run_in_processes.py\D+\d+", text) and "bad luck" in text
    for rank in range(4):
        assert "bad luck" in (out / "logs" / f"rank_{rank}.txt").read_text()
