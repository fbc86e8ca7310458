"""Steps of other worlds than a reward function are made again bit for bit, or refused by a sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jmarl.cli.main import main
from jmarl.config import ExperimentConfig
from jmarl.files.checkpoint import saved_steps
from jmarl.remote.catalog import read_offer
from jmarl.sandbox import Sandbox, SandboxUnavailable
from tests.house import HOUSE
from tests.remote.served import running
from tests.replay import hints as world
from tests.replay.conftest import HINT
from tests.replay.test_replay import files_of

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]


def assert_equal_to_stored(replayed, directory, *words):
    """Make step 2 again with the update before it, and compare both with what is stored."""
    before = files_of(directory)
    code, out, err = replayed(directory, "--json", *words)
    assert code == 0, err
    assert json.loads(out)["compared"] == 2 and "update 1 of 1 is made again" in err
    assert files_of(directory) == before
    return json.loads(out)


@pytest.fixture(scope="module")
def readers(tiny_dir):
    """Settings of a run whose model reads long prompts, with a checkpoint after the last update alone."""
    return dict(models=[str(tiny_dir("llama", max_position_embeddings=4096))], num_agents=1, save_every=2, num_tasks=4)


def test_steps_with_tools_are_made_again(begin_run, readers, replayed, tmp_path):
    begin_run(tmp_path / "run", environment="tools", options={"max_turns": 2}, num_turns=2, **readers)
    result = assert_equal_to_stored(replayed, tmp_path / "run", "--task", "1", "--say", "a")
    assert result["replaced"]["turn 0, agent 0 writes"] == "a"
    assert result["replaced"]["turn 0, agent 0 reads"] == result["episode"]["turn 0, agent 0 reads"]


def test_steps_with_programs_in_the_sandbox_are_made_again(begin_run, readers, replayed, tmp_path):
    try:
        Sandbox().close()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox: {error}")
    begin_run(tmp_path / "run", environment="code", **readers)
    assert_equal_to_stored(replayed, tmp_path / "run")


def test_steps_of_adapters_are_made_again(begin_run, replayed, tmp_path):
    begin_run(tmp_path / "run", **HINT, lora_rank=4, save_every=2)
    assert_equal_to_stored(replayed, tmp_path / "run", "--task", "1", "--say", "six")


def test_steps_on_a_server_are_made_again_and_another_world_there_is_caught(begin_run, replayed, tmp_path, monkeypatch):
    """Nobody can know whether the world of a server has changed but by what it answers: that is compared."""
    with running(read_offer("tests.replay.hints:Hint")) as server:
        begin_run(tmp_path / "run", **HINT, options={"servers": [server.address]}, save_every=2)
        assert_equal_to_stored(replayed, tmp_path / "run")
        monkeypatch.setattr(world, "WORDS", world.WORDS[::-1])
        code, out, err = replayed(tmp_path / "run")
        assert (code, out) == (2, "") and "step 1 is not as the run has stored it" in err and "on a service" in err
    code, out, err = replayed(tmp_path / "run")
    assert (code, out) != (0, "") and "step 2 is" not in out


def command(*words, devices=1):
    """Start `jmarl ...` in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen([sys.executable, "-m", "jmarl", *words], env=env, cwd=ROOT)


def written(tiny_words, directory, **settings):
    """Write the settings of a run to a file, and return it."""
    run = dict(models=[str(tiny_words)], output_dir=str(directory), save_models=False, tensorboard=False, **HINT)
    file = Path(directory).with_suffix(".yaml")
    file.write_text(json.dumps(ExperimentConfig.of(**run | HOUSE | settings).as_dict()), encoding="utf-8")
    return file


def test_a_step_of_another_mesh_is_equal_or_the_mesh_is_named(tiny_words, replayed, tmp_path):
    """A run on two devices, whose sums a single one rounds in another way."""
    file = written(tiny_words, tmp_path / "run", save_every=2)
    process = command("train", "--config", str(file), devices=2)
    assert process.wait(300) == 0
    start = json.loads((tmp_path / "run" / "attempts" / "1" / "start.json").read_text(encoding="utf-8"))
    assert len(start["devices"]) == 2
    code, out, err = replayed(tmp_path / "run")
    assert "2 steps equal" in out or (code == 2 and "these have changed: devices ['cpu:0', 'cpu:1'] -> ['cpu:0']" in err)


def test_a_killed_run_goes_on_with_the_checkpoints_of_keep_every_and_a_replay_begins_at_the_nearest(
    tiny_words, tmp_path, capsys
):
    where = tmp_path / "run"
    sizes = dict(num_updates=130, keep_every=50, save_every=20, save_total_limit=1, progress=True)
    file = written(tiny_words, where, **sizes)
    process = command("train", "--config", str(file))
    while process.poll() is None and not (where / "checkpoints" / "50").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 50 in saved_steps(where / "checkpoints")
    assert main(["train", "--config", str(file), "--resume"]) == 0
    assert "keep_every=50: 2 checkpoints are kept, 0.478 MiB each, 0.955 MiB in all" in capsys.readouterr().out
    assert saved_steps(where / "checkpoints") == [50, 100, 130]
    for step, first in ((53, 50), (101, 100), (2, 0)):
        assert main(["replay", str(where), "--step", str(step), "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out) == {"step": step, "from": first, "compared": step - first}
