"""Faults that a run survives: signals, kills, damaged files, full disks, a second process, numbers that are not finite.

What is promised is in the README, "What is promised under faults".
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jmarl.algorithms import ALGORITHMS, AlgorithmRow
from jmarl.config import ExperimentConfig, TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.files.attempt import is_complete
from jmarl.files.checkpoint import CheckpointError, saved_steps
from jmarl.files.config_file import written_config
from jmarl.files.interrupt import interruptible
from jmarl.files.lock import DirectoryInUse, locked
from jmarl.files.run_directory import CannotGoOn, check_directory
from jmarl.files.saving import Saves
from jmarl.logs import rollout_log
from jmarl.logs.failed_update import NonFiniteError, read_failed_update
from jmarl.preferences.pairs import Pair, Trajectory
from jmarl.rl.advantages import group_mean
from jmarl.runs.seeds import train_seeds
from jmarl.runs.train import fit, train
from jmarl.team import policies, save_team, to_checkpoint
from tests.runs import training_process
from tests.runs.training_process import BASE, ITEMS, KINDS, tiny_team

ROOT = Path(__file__).resolve().parents[2]
NOT_COMPARED = ("time/", "tokens_per_s", "compiles")  # what a resumed run measures anew


def rows_of(output_dir):
    rows = [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: x for k, x in row.items() if not k.startswith(NOT_COMPARED)} for row in rows]


def arrays_of(output_dir, step):
    """The arrays of a checkpoint, by path."""
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(Path(output_dir).absolute() / "checkpoints" / str(step) / "state")


def assert_equal_runs(one, other, step=BASE["num_updates"], seeds=("",)):
    """Check that the state after the last update, the rows and the models are equal bit for bit."""
    for seed in seeds:
        a, b = Path(one) / seed, Path(other) / seed
        jax.tree.map(np.testing.assert_array_equal, arrays_of(a, step), arrays_of(b, step))
        assert rows_of(a) == rows_of(b)
        for model in sorted((a / "models").rglob("*.safetensors")):
            assert model.read_bytes() == (b / model.relative_to(a)).read_bytes()


# --- in a process of its own ---------------------------------------------------------------------------------------------


def begin(fields, wait_in=0):
    """Start `training_process`. wait_in: the call of the reward in which it waits for a line of input."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    args = [sys.executable, "-m", "tests.runs.training_process", json.dumps(fields), str(wait_in)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(args, cwd=ROOT, env=env, text=True, **pipes)
    watch = threading.Timer(300, process.kill)  # a test that waits for a line that never comes is to fail, not to hang
    watch.daemon = True
    watch.start()
    return process


def wait_for(process, text, pipe="stdout"):
    for seen in getattr(process, pipe):
        if text in seen:
            return
    raise AssertionError(f"{text!r} never came: {process.communicate()[1][-3000:]}")


def finish(process, code, text=None):
    out, err = process.communicate(text, timeout=300)
    assert process.returncode == code, (process.returncode, out[-1000:], err[-3000:])
    return out, err


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run without interruption, in this process."""
    where = tmp_path_factory.mktemp("whole")
    run(output_dir=str(where))
    return where


def resume_here(where):
    """Go on in this process with what another process began; its reward is of another module."""
    return run(output_dir=str(where), resume=True, allow_changed="reward")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_signal_saves_the_run_and_exits_with_75_and_the_resumed_run_is_bit_equal(whole, tmp_path, number):
    """F1, F5: with default settings, long before a checkpoint is due."""
    process = begin({"output_dir": str(tmp_path)}, wait_in=4)
    wait_for(process, "rewarded 4")  # of the third update, because an evaluation comes first
    process.send_signal(number)
    wait_for(process, f"{number.name}: the current update is finished and saved", "stderr")
    out, _ = finish(process, 75, "\n")
    assert saved_steps(tmp_path / "checkpoints") == [3]
    assert f"interrupted after update 3 of 8, saved in {tmp_path}: resume continues from there" in out
    assert [row["step"] for row in rows_of(tmp_path) if "reward/mean" in row] == [1, 2, 3]
    assert not (tmp_path / "models").exists()
    finish(begin({"output_dir": str(tmp_path), "resume": True}), 0)
    assert_equal_runs(whole, tmp_path)


@pytest.mark.long
def test_a_run_whose_reward_hangs_refuses_a_second_run_and_ends_at_the_second_signal(whole, tmp_path):
    """F5, F9, F12: the error names the process, which the first signal does not end. No lock is left."""
    process = begin({"output_dir": str(tmp_path), "save_every": 1}, wait_in=4)
    wait_for(process, "rewarded 4")
    in_use = f"the output directory {tmp_path} is in use by process {process.pid} on .*wait for it to end, or choose another"
    with pytest.raises(DirectoryInUse, match=in_use):
        run(output_dir=str(tmp_path))
    process.send_signal(signal.SIGTERM)
    wait_for(process, "SIGTERM: the current update is finished and saved", "stderr")
    assert process.poll() is None and saved_steps(tmp_path / "checkpoints")
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == -signal.SIGTERM
    finish(process, -signal.SIGTERM)
    resume_here(tmp_path)
    assert_equal_runs(whole, tmp_path)


@pytest.mark.long
def test_a_reward_that_exits_the_process_loses_the_updates_since_the_last_checkpoint(whole, tmp_path):
    """F12: os._exit in the sixth update stands for a library that crashes. The row behind the checkpoint is written again."""
    process = begin({"output_dir": str(tmp_path), "save_every": 3}, wait_in=7)
    wait_for(process, "rewarded 7")
    while not saved_steps(tmp_path / "checkpoints"):
        time.sleep(0.02)
    finish(process, 3, "exit\n")
    assert saved_steps(tmp_path / "checkpoints") == [3]
    assert [row["step"] for row in rows_of(tmp_path) if "reward/mean" in row] == [1, 2, 3, 4], "rows are written a step late"
    resume_here(tmp_path)
    assert_equal_runs(whole, tmp_path)


def killed_at_random(whole, where, kills, seed):
    """Kill a run at random moments around its saves, `kills` times, and resume it each time; restart it when it has ended.

    Returns how many kills interrupted a save.
    """
    rng, met, resumed = random.Random(seed), 0, False
    for i in range(kills):
        process = begin({"output_dir": str(where), "save_every": 1, "resume": resumed})
        wait_for(process, "rewarded")
        time.sleep(rng.uniform(0, 0.6))
        reported = saved_steps(where / "checkpoints")
        process.kill()
        process.communicate()
        steps = saved_steps(where / "checkpoints")
        assert steps[-1:] >= reported[-1:]
        met += bool(list((where / "checkpoints").glob("*.saving")) + list((where / "checkpoints").glob("*.deleting")))
        for step in steps:
            arrays_of(where, step)  # whatever is listed can be read
        resumed = bool(steps)
        if resumed and (i == kills - 1 or process.returncode == 0 or steps[-1] == BASE["num_updates"]):
            resume_here(where)
            assert_equal_runs(whole, where)
            shutil.rmtree(where)
            resumed = False
    return met


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing_that_was_saved(whole, tmp_path):
    """F3."""
    killed_at_random(whole, tmp_path / "run", 5, seed=0)


@pytest.mark.soak
def test_two_hundred_kills_lose_nothing_that_was_saved(whole, tmp_path):
    """F3."""
    print(killed_at_random(whole, tmp_path / "run", 200, seed=1), "of 200 kills met a save or a deletion")


# --- in this process -----------------------------------------------------------------------------------------------------


def first_words(a, b, batch_items, rng):
    return [len(set(x.split()) & set(y.split())) + rng.random() for x, y in zip(a, b, strict=True)]


def run(kind="plain", reward=first_words, items=ITEMS, held_out=ITEMS[:2], **fields):
    cfg = TrainConfig.of(**{**BASE, **KINDS[kind], "progress": False, **fields})
    team, params = tiny_team(lora=cfg.lora.lora_rank > 0)
    transition = training_process.transition if cfg.episodes.num_turns > 1 else None
    env = RewardEnvironment(make_reward(reward, num_agents=2), [default_formatter] * 2, transition)
    if kind == "seeds":
        return train_seeds(team, env, items, cfg, params=params, seeds=(0, 1), eval_items=held_out)[0]
    return train(team, env, items, cfg, params=params, eval_items=held_out)


class Signalling:
    """`first_words`, which sends a signal to this process in its n-th call; 0: never. It counts down: runs resume with another
    number."""

    __name__ = "first_words"

    def __init__(self, at, number=signal.SIGINT):
        self.calls_left, self.number = at, number

    def __call__(self, a, b, batch_items, rng):
        self.calls_left -= 1
        if self.calls_left == 0:
            os.kill(os.getpid(), self.number)
        return first_words(a, b, batch_items, rng)


@pytest.mark.long
def test_an_update_without_a_valid_reward_may_be_the_first_after_a_resume(tmp_path):
    """The uninterrupted run warns and continues, and so does the resumed one."""

    def reward(calls, calls_left):
        def of(a, b, batch_items, rng):
            nonlocal calls_left
            calls.append(1)
            calls_left -= 1
            if calls_left == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return [None] * len(a) if len(calls) == 5 else first_words(a, b, batch_items, rng)  # of the fourth update

        return of

    with pytest.warns(UserWarning, match="6 of 6 joint actions have no valid reward"):
        run(reward=reward([], 0), output_dir=str(tmp_path / "whole"))
    assert run(reward=reward([], 4), output_dir=str(tmp_path / "parts")).interrupted
    with pytest.warns(UserWarning, match="6 of 6 joint actions have no valid reward"):
        run(reward=reward([1] * 4, 0), output_dir=str(tmp_path / "parts"), resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.long
def test_an_interruption_while_a_row_is_written_loses_no_row(whole, tmp_path, monkeypatch):
    """Two signals come while the host waits for the metrics of an update: the second raises KeyboardInterrupt there."""
    to_host, calls = rollout_log.to_host, []

    def interrupted(tree):
        calls.append(1)
        if len(calls) == 3:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        return to_host(tree)

    monkeypatch.setattr(rollout_log, "to_host", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(output_dir=str(tmp_path))
    assert saved_steps(tmp_path / "checkpoints") == [4]
    run(output_dir=str(tmp_path), resume=True)
    assert_equal_runs(whole, tmp_path)


@pytest.mark.long
def test_an_interrupted_run_returns_its_state_and_restores_the_signal_handlers(tmp_path):
    """As in a notebook, without an output directory. The weights can be saved."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stopped, whole = run(reward=Signalling(4)), run(num_updates=3)
    assert stopped.interrupted and repr(stopped).endswith("interrupted)") and int(stopped.state.step) == 3
    jax.tree.map(np.testing.assert_array_equal, to_checkpoint(stopped.state), to_checkpoint(whole.state))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    save_team(tmp_path, tiny_team()[0], policies(stopped.state))
    assert (tmp_path / "agent_1" / "model.safetensors").is_file()


@pytest.mark.parametrize("updates", [0, pytest.param(8, marks=pytest.mark.long)])
def test_a_signal_in_an_evaluation_ends_it_and_the_resumed_run_makes_it(whole, tmp_path, updates):
    stopped = run(reward=Signalling(1 + updates + bool(updates)), output_dir=str(tmp_path))
    assert stopped.interrupted and saved_steps(tmp_path / "checkpoints")[-1] == updates
    assert updates not in [row["eval/updates"] for row in rows_of(tmp_path) if "eval/updates" in row]
    end = json.loads((tmp_path / "attempts/1/end.json").read_text())
    assert end == {"num_updates": 8, "updates": updates, "interrupted": True} and not is_complete(tmp_path, 8)
    resume_here(tmp_path)
    assert_equal_runs(whole, tmp_path)
    assert is_complete(tmp_path, 8)


@pytest.mark.long
def test_a_signal_during_an_update_leaves_the_evaluation_after_it_to_the_resumed_run(tmp_path, monkeypatch):
    """The host waits for the third update where the evaluation is due."""
    to_host, waits, settings = rollout_log.to_host, [], {"num_updates": 4, "eval_every": 3}
    run(output_dir=str(tmp_path / "whole"), **settings)

    def interrupted(tree):
        waits.append(1)
        if len(waits) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return to_host(tree)

    monkeypatch.setattr(rollout_log, "to_host", interrupted)
    reward = Signalling(0)
    assert run(reward=reward, output_dir=str(tmp_path / "cut"), **settings).interrupted
    assert reward.calls_left == -4, "before training and in each update"
    run(output_dir=str(tmp_path / "cut"), resume=True, allow_changed="reward", **settings)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut", step=4)


def test_a_ctrl_c_that_python_drops_ends_the_run():
    """It comes in a callback of the garbage collector, such as JAX has, before the first update."""

    def formatter(item):
        def interrupted(*_):
            gc.callbacks.remove(interrupted)
            os.kill(os.getpid(), signal.SIGINT)

        gc.callbacks.append(interrupted)
        gc.collect()
        Event().wait(60)
        raise AssertionError("the signal is lost")

    team, params = tiny_team()
    env = RewardEnvironment(make_reward(first_words, num_agents=2), [formatter] * 2)
    with pytest.raises(KeyboardInterrupt):
        train(team, env, ITEMS, TrainConfig.of(**BASE | {"progress": False}), params=params)


def test_ignored_signals_stay_ignored_and_a_second_one_raises():
    with pytest.raises(KeyboardInterrupt), interruptible(True) as note:
        os.kill(os.getpid(), signal.SIGINT)
        assert note.by == "SIGINT"
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as nohup does with SIGHUP
    try:
        with interruptible(True) as note:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not note.requested
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_that_ignores_ctrl_c_says_so_in_its_first_lines(capsys):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for a job in the background of a script
    try:
        run(progress=True, num_updates=1, held_out=())
    finally:
        signal.signal(signal.SIGINT, before)
    (line,) = [line for line in capsys.readouterr().out.splitlines()[:3] if line.startswith("SIGINT is ignored here")]
    assert f"`kill {os.getpid()}` does" in line


def test_the_signal_of_a_queue_stops_a_run_unless_the_program_has_a_handler_of_its_own():
    calls, before = [], signal.getsignal(signal.SIGUSR1)
    with interruptible(saves=True) as note:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert note.requested and note.by == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before
    signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
    try:
        with interruptible(saves=True) as note:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert calls == [signal.SIGUSR1] and not note.requested
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The directory of an interrupted run with checkpoints of updates 4 and 5."""
    where = tmp_path_factory.mktemp("stopped")
    run(reward=Signalling(6), output_dir=str(where), save_every=1)
    assert saved_steps(where / "checkpoints") == [4, 5]
    return where


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_costs_only_the_updates_since_the_one_before(stopped, whole, tmp_path, caplog):
    """F4: one bit of the largest file, the weights, is flipped."""
    where = Path(shutil.copytree(stopped, tmp_path / "run"))
    damaged = max((where / "checkpoints" / "5" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    flip(damaged)
    with pytest.raises(CheckpointError, match=f"step 5 in .* is damaged: .*{damaged.name} has other bytes"):
        run(reward=Signalling(0), output_dir=str(where), resume=True, strict_checkpoints=True)
    result = run(reward=Signalling(0), output_dir=str(where), resume=True)
    assert len(result.rewards) == 4 and damaged.name in caplog.text and (where / "checkpoints" / "5.damaged").is_dir()
    assert_equal_runs(whole, where)


def test_resuming_is_refused_if_all_checkpoints_are_damaged(stopped, tmp_path):
    where = Path(shutil.copytree(stopped, tmp_path / "run"))
    for step in (4, 5):
        (where / "checkpoints" / str(step) / "meta.json").unlink()
    with pytest.raises(ValueError, match="nothing to resume: all checkpoints in .* are damaged"):
        run(reward=Signalling(0), output_dir=str(where), resume=True)


def test_an_unfinished_run_is_not_overwritten(stopped):
    with pytest.raises(ValueError, match="checkpoints up to step 5 of a run that has not ended: continue it with --resume"):
        run(output_dir=str(stopped))


def test_changed_data_and_rewards_are_refused_by_name_unless_allowed(stopped, tmp_path):
    """F10."""
    where = Path(shutil.copytree(stopped, tmp_path / "run"))

    def other(a, b):
        return [1.0] * len(a)

    with pytest.raises(ValueError, match=r"(?s)data: 9 items -> 8\n.*allow_changed=data resumes with"):
        run(reward=Signalling(0), items=ITEMS[:8], output_dir=str(where), resume=True)
    changed = [dict(item, prompt="red red") for item in ITEMS[:1]] + ITEMS[1:]
    with pytest.raises(ValueError, match="data: other items"):
        run(reward=Signalling(0), items=changed, output_dir=str(where), resume=True)
    with pytest.raises(ValueError, match=r"(?s)held_out: 2 items -> 1\n.*allow_changed=held_out resumes with"):
        run(reward=Signalling(0), held_out=ITEMS[:1], output_dir=str(where), resume=True)
    with pytest.raises(ValueError, match=r"reward: .*Signalling \(gone\), .*other \(new\)"):
        run(reward=other, output_dir=str(where), resume=True, allow_changed="data")
    other_data = dict(items=changed, held_out=ITEMS[1:3], allow_changed="data, reward, held_out")
    result = run(reward=other, output_dir=str(where), resume=True, **other_data)
    assert len(result.rewards) == 3
    with pytest.raises(ValueError, match="allow_changed='team' is not allowed: .* some of data,reward,environment"):
        TrainConfig.of(allow_changed="team")


def test_checkpoints_by_time_take_at_most_a_twentieth_of_it(tmp_path):
    """With save_minutes=0 the interval between checkpoints is 20 times the duration of the last one."""

    class Saver:
        seconds = 0.0

    saves = Saves(TrainConfig.of(output_dir=str(tmp_path), save_minutes=0.0).run, [(Saver(), {})])  # type: ignore[list-item]
    assert saves.is_due(1)
    Saver.seconds = 100.0
    assert not saves.is_due(2)
    assert not Saves(TrainConfig.of(output_dir=str(tmp_path)).run, [(Saver(), {})]).is_due(1)  # type: ignore[list-item]
    assert TrainConfig.of(output_dir="runs").run.saves and not TrainConfig.of(output_dir="runs", save_every=0).run.saves


# --- disks ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """`small_disk(size)` mounts a file system of that many bytes and returns its directory."""
    mounted = []

    def make(size):
        where = tmp_path / f"disk{len(mounted)}"
        where.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
        mounted.append(where)
        return where

    yield make
    for where in mounted:
        subprocess.run(["umount", where], check=True)


def test_training_continues_on_a_disk_too_small_for_a_checkpoint(small_disk):
    """F6: the run warns at the start and counts the failure, and no partial model is left."""
    where = small_disk(150_000)  # a checkpoint has 500 kB, the models 180
    with pytest.warns(UserWarning) as warned:
        result = run(output_dir=str(where / "run"), save_every=2)
    texts = [str(one.message) for one in warned]
    assert "GiB free, and a checkpoint takes about" in texts[0] and "two of them do not fit" in texts[0]
    assert sum("checkpoint not saved, training goes on" in text for text in texts) == 1, "until there is room again"
    assert any("models could not be written" in text for text in texts)
    assert len(result.rewards) == 8 and result.unsaved.startswith("models: ")
    assert [row["failed_saves"] for row in rows_of(where / "run") if "reward/mean" in row][-1] == 1
    assert not list((where / "run").rglob("*.safetensors")) and not list((where / "run" / "models").iterdir())


def test_a_checkpoint_is_written_as_soon_as_there_is_room(small_disk):
    """F6: other files fill the disk until the fifth update."""
    where = small_disk(3_000_000)
    (where / "other").write_bytes(bytes(2_700_000))
    calls = []

    def reward(a, b, batch_items, rng):
        calls.append(saved_steps(where / "run" / "checkpoints"))
        if len(calls) == 6:  # behind the first evaluation
            (where / "other").unlink()
        return first_words(a, b, batch_items, rng)

    with pytest.warns(UserWarning) as warned:
        result = run(reward=reward, output_dir=str(where / "run"), save_every=2)
    assert sum("not saved, training goes on: " in str(one.message) for one in warned) == 1
    assert calls[5] == [] and saved_steps(where / "run" / "checkpoints")[-1] == 8 and not result.unsaved


def test_a_failed_save_of_models_leaves_the_earlier_models_unchanged(tmp_path, full_disk):
    """F6: in the middle of the second agent's weights."""
    team, params = tiny_team()
    save_team(tmp_path, team, params)
    before = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = tiny_team(seed=1)[1]
    with full_disk(20_000), pytest.raises(Exception, match="File too large"):
        save_team(tmp_path, team, other)
    assert {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    save_team(tmp_path, team, other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent_0", "agent_1"]
    assert (tmp_path / "agent_0" / "model.safetensors").read_bytes() != before[Path("agent_0/model.safetensors")]


def test_an_unwritable_directory_raises_before_any_episode(tmp_path):
    """F7."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        run(reward=lambda a, b: pytest.fail("it was played"), output_dir=str(tmp_path / "file" / "run"))


# --- numbers that are not finite -----------------------------------------------------------------------------------------


def nan_from(update):
    """`first_words` before an update (counted from 0, after one evaluation), and NaN from it on."""
    calls = []

    def reward(a, b, batch_items, rng):
        calls.append(1)
        values = first_words(a, b, batch_items, rng)
        return values if len(calls) <= update + 1 else [float("nan")] * len(values)

    return reward


def test_rewards_that_are_all_nan_stop_the_run_after_three_updates(tmp_path):
    """F15, F11: the rollout is in a file, and the models of an earlier run are unchanged."""
    (tmp_path / "models").mkdir()
    with (
        pytest.warns(UserWarning, match="6 of 6 joint actions have no valid reward"),
        pytest.raises(NonFiniteError, match="stopped: in updates 3 to 5 of the run in .* no joint action had a valid"),
    ):
        run(reward=nan_from(2), output_dir=str(tmp_path))
    summary = json.loads((tmp_path / "failed_update_5.json").read_text(encoding="utf-8"))
    assert summary["step"] == 5 and len(summary["items"]) == 2
    assert summary["turns"][0]["prompts"][0][0] == summary["items"][0]["prompt"]
    assert saved_steps(tmp_path / "checkpoints")[-1] >= 5 and not list((tmp_path / "models").glob("*"))


def broken_loss(logp, old, advantages, weights):
    import jax.numpy as jnp

    return jnp.log(-jnp.abs(advantages).sum()) * logp.sum(), {}


@pytest.mark.long
def test_losses_that_are_not_finite_stop_the_run_and_the_update_can_be_replayed(monkeypatch, tmp_path, capsys):
    """F15: the weights do not change by a bit. One warning names both agents."""
    monkeypatch.setitem(ALGORITHMS, "broken", AlgorithmRow(broken_loss, group_mean))
    with (
        pytest.warns(
            UserWarning,
            match="update 1.*: a loss or gradient is not finite, so the optimizer step was skipped .*agent_0/skipped, agent_1/",
        ) as warned,
        pytest.raises(NonFiniteError, match=r"a loss or gradient was not finite .*--set replay_rollout=.*failed_update_3.pkl"),
    ):
        run(algorithm="broken", output_dir=str(tmp_path), num_updates=20)
    assert len(warned) == 1 and [row["agent_1/skipped"] for row in rows_of(tmp_path) if "reward/mean" in row][:3] == [1, 2, 3]
    [step] = saved_steps(tmp_path / "checkpoints")
    params = arrays_of(tmp_path, step)
    fresh = tiny_team()[1][0]
    np.testing.assert_array_equal(params["stacks/0/params/embed"], fresh["embed"])
    dump = str(tmp_path / "failed_update_3.pkl")
    capsys.readouterr()
    for resume in (False, True):
        result = run(algorithm="broken", output_dir=str(tmp_path), num_updates=20, replay_rollout=dump, resume=resume)
        row = json.loads(capsys.readouterr().out)
        assert row["step"] == 3 and row["agent_0/skipped"] >= 1 and len(result.rewards) == 1
    with pytest.raises(ValueError, match="is of algorithm='broken', and this run has 'magrpo'"):
        run(replay_rollout=dump)
    monkeypatch.setitem(ALGORITHMS, "broken", ALGORITHMS["magrpo"])
    run(algorithm="broken", output_dir=str(tmp_path), num_updates=20, replay_rollout=dump)
    assert json.loads(capsys.readouterr().out)["agent_0/grad_norm"] > 0, "it was the loss"


def test_an_update_that_another_version_wrote_is_refused(tmp_path):
    """Its pickle names records and modules as they were."""
    (path := tmp_path / "failed_update_1.pkl").write_bytes(b"cjmarl.runs.former\nPlayed\n.")
    with pytest.raises(ValueError, match=r"failed_update_1.pkl' was written by another version of jmarl \(No module named"):
        read_failed_update(TrainConfig.of(replay_rollout=str(path)))


def test_non_finite_losses_on_given_data_stop_the_run_too(tmp_path, capsys):
    """F15: the initial weights contain a NaN."""
    team, (params,) = tiny_team(1)
    broken = params | {"embed": params["embed"].at[0, 0].set(np.nan)}
    data = [Trajectory((item["prompt"],), ("red two",)) for item in ITEMS]
    cfg = TrainConfig.of(algorithm="sft", num_updates=8, batch_size=4, output_dir=str(tmp_path), mesh="agent=1", progress=False)
    with (
        pytest.warns(UserWarning, match="the optimizer step was skipped"),
        pytest.raises(NonFiniteError, match="stopped: in updates 1 to 3 of .*failed_update_3.pkl"),
    ):
        fit(team, data, cfg, params=[jax.tree.map(jax.numpy.copy, broken)])
    assert "red two" in json.loads((tmp_path / "failed_update_3.json").read_text(encoding="utf-8"))["texts"][0][0][0]
    again = cfg.replace(output_dir="", replay_rollout=str(tmp_path / "failed_update_3.pkl"))
    fit(team, data, again, params=[params])
    row = json.loads(capsys.readouterr().out)
    assert row["step"] == 3 and np.isfinite(row["agent_0/loss"]), "it was the weights"


@pytest.mark.long
def test_resuming_with_another_reference_is_refused(tmp_path):
    """F10: the reference of dpo is the weights before training."""
    data = [Pair((item["prompt"],), ("red two",), ("blue six",)) for item in ITEMS]
    cfg = TrainConfig.of(algorithm="dpo", num_updates=1, batch_size=4, output_dir=str(tmp_path), mesh="agent=1", progress=False)
    for seed, resume in ((0, False), (0, True), (7, True)):
        team, params = tiny_team(1, seed)
        again = cfg.replace(resume=resume, num_updates=2)
        if seed == 7:
            with pytest.raises(ValueError, match="initial: other weights before training, which are the reference"):
                fit(team, data, again, params=params)
        else:
            fit(team, data, again if resume else cfg, params=params)


def test_stop_after_nonfinite_0_never_stops_a_run(tmp_path):
    with pytest.warns(UserWarning, match="no valid reward"):
        assert len(run(reward=nan_from(2), output_dir=str(tmp_path), stop_after_nonfinite=0).rewards) == 8


def test_a_forked_process_does_not_hold_the_locks_of_its_parent(tmp_path):
    """For example a worker of a reward that outlives the run."""
    script = (
        "import os, sys, time; from jmarl.files.lock import locked\n"  # no jax, which must not be forked
        "with locked(sys.argv[1]):\n"
        "    if os.fork() == 0: print('forked', flush=True); time.sleep(20); os._exit(0)\n"
        "    sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    wait_for(parent, "forked")
    with pytest.raises(DirectoryInUse), locked(tmp_path):
        pass
    parent.kill()
    parent.wait()
    with locked(tmp_path):
        pass
    os.killpg(parent.pid, signal.SIGKILL)
    for pipe in (parent.stdin, parent.stdout):
        pipe.close()


def test_a_lock_can_be_taken_only_once_in_a_process(tmp_path):
    with locked(tmp_path):
        with pytest.raises(DirectoryInUse, match=f"process {os.getpid()} on "), locked(tmp_path):
            pass
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    with contextlib.ExitStack() as again:
        again.enter_context(locked(tmp_path))


def test_no_other_run_gets_a_directory_whose_config_is_written(tmp_path):
    """From before config.yaml is written until the run has ended; the run in the context itself shares the lock."""
    run = TrainConfig.of(output_dir=str(tmp_path))
    cfg = ExperimentConfig.of(models=["a"], environment="math", train=run)

    def other() -> str:
        try:
            with locked(tmp_path):
                return "locked"
        except DirectoryInUse:
            return "in use"

    with ThreadPoolExecutor(1) as thread:
        with written_config(cfg):
            assert thread.submit(other).result() == "in use"
            check_directory(run)
            with locked(tmp_path):
                assert [thread.submit(other).result(), other()] == ["in use", "in use"]
            assert thread.submit(other).result() == "in use"
        assert thread.submit(other).result() == "locked"


@pytest.mark.long
def test_the_config_of_an_unfinished_run_stays(tmp_path):
    """Another process may have begun it while this one loaded its models."""
    assert run(reward=Signalling(4), output_dir=str(tmp_path)).interrupted
    (tmp_path / "config.yaml").write_text("of the unfinished run")
    cfg = ExperimentConfig.of(models=["a"], environment="math", output_dir=str(tmp_path))
    with pytest.raises(CannotGoOn, match="of a run that has not ended"), written_config(cfg):
        raise AssertionError("the run must not begin")
    assert (tmp_path / "config.yaml").read_text() == "of the unfinished run" and not (tmp_path / "earlier_1").exists()
