"""An output directory: files of the user stay, a path that checkpoints cannot have is refused, what disappears is told."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

from jmarl.config import TrainConfig
from jmarl.files.changes import CannotGoOn
from jmarl.files.checkpoint import saved_steps
from jmarl.files.lock import DirectoryInUse, keep, locked
from jmarl.files.own_files import check_free, set_aside
from jmarl.files.run_directory import check_directory, try_checkpoint
from jmarl.logs.log_file import LogFile
from tests.runs.test_faults import first_words, run

EVENTS = "events.out.tfevents.1764359000.host.1764359000123456789.77"
OF_RUNS = [  # one file of each kind
    "checkpoints/3/state/x", "checkpoints/4.saving/x", "checkpoints/best.json", "models/agent_0/config.json",
    "models/agent_1.old/x", "pairs/round_0000.jsonl", "history/round_000000.npz", "reward_model/config.json",
    "reward_model_0/metrics.jsonl",
    "failed_update_4.pkl", "metrics.jsonl", "completions.jsonl.gz", "wandb_id.txt", "trackio_name.txt", "config.yaml",
    EVENTS,
]  # fmt: skip
OF_USERS = [
    "checkpoints/last.ckpt", "checkpoints/epoch_3/model.bin", "models/base/config.json", "models/agent_x/config.json",
    "pairs/mine.jsonl", "history/2024.npz", "history/notes.txt", "events.csv", "events/party.txt", "completions_of_mine.txt",
    "events.out.tfevents.1764359000.host.77.0", "metrics.csv", "manifest.json", "report.html", "reward_model.py",
    "attempts/first/a",
]  # fmt: skip


def write(root, names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def files_in(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_a_new_run_moves_what_an_earlier_one_wrote_and_nothing_of_the_user(tmp_path, caplog):
    write(tmp_path, [*OF_RUNS, *OF_USERS, "attempts/1/start.json", "attempts/1/log.txt"])
    set_aside(str(tmp_path))
    moved = {f"earlier_1/{name}" for name in [*OF_RUNS, "attempts/1/start.json", "attempts/1/log.txt"]}
    assert files_in(tmp_path) == {*OF_USERS, *moved}
    assert f"{tmp_path} held an earlier run; its metrics, checkpoints and models are now in" in caplog.text
    set_aside(str(tmp_path))
    assert files_in(tmp_path) == {*OF_USERS, *moved}, "there is no other run"


def test_a_start_that_failed_before_its_first_step_leaves_only_its_empty_files(tmp_path):
    write(tmp_path, ["attempts/1/start.json", "events/party.txt", EVENTS])
    for name in ("metrics.jsonl", "completions.jsonl.gz"):
        (tmp_path / name).touch()
    set_aside(str(tmp_path))
    assert files_in(tmp_path) == {"attempts/1/start.json", "events/party.txt"}


@pytest.mark.parametrize("name", OF_RUNS)
def test_a_run_does_not_begin_where_a_file_of_the_user_has_a_name_of_its_own(tmp_path, name):
    write(tmp_path, [name, *OF_USERS])
    before = files_in(tmp_path)
    cfg = TrainConfig.of(output_dir=str(tmp_path))
    for resume in (False, "auto", True):
        with pytest.raises(CannotGoOn, match=r"has .*, which no run of jmarl has written.*choose another output_dir"):
            check_directory(cfg.replace(resume=resume))
    with pytest.raises(CannotGoOn, match=name.split("/")[0]):
        set_aside(str(tmp_path))
    assert files_in(tmp_path) == before


def test_a_directory_with_other_files_of_the_user_is_free_and_so_is_one_with_a_checkpoint(tmp_path):
    write(tmp_path, OF_USERS)
    check_free(tmp_path)
    write(tmp_path, ["metrics.jsonl", "checkpoints/3/meta.json"])  # as older versions left it
    check_free(tmp_path)


def test_a_run_beside_files_of_the_user_leaves_them_also_when_another_follows(tmp_path):
    write(tmp_path, OF_USERS)
    for _ in range(2):
        run(output_dir=str(tmp_path), num_updates=1, tensorboard=False)
    assert {*OF_USERS} <= files_in(tmp_path) and (tmp_path / "earlier_1" / "models" / "agent_0" / "config.json").is_file()
    assert (tmp_path / "models" / "agent_1" / "config.json").is_file()


# --- the lock ------------------------------------------------------------------------------------------------------------


def test_a_lock_that_is_a_file_of_the_user_or_a_link_is_left_alone(tmp_path):
    (tmp_path / "lock").write_text("mine")
    with pytest.raises(FileExistsError, match="has a file lock that no run of jmarl has written"), locked(tmp_path):
        pass
    assert (tmp_path / "lock").read_text() == "mine"
    (tmp_path / "lock").rename(tmp_path / "precious")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError, match="its lock is a link"), locked(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml.tmp", "checkpoints/best.json.tmp", "history/round_000000.tmp"])
def test_a_run_writes_through_no_link_and_into_no_pipe(tmp_path, name):
    (precious := tmp_path / "precious").write_text("precious")
    write(run := tmp_path / "run", ["attempts/1/start.json", "checkpoints/3/meta.json", "history/x"])
    (run / "checkpoints").rename(tmp_path / "scratch")
    (run / "checkpoints").symlink_to(tmp_path / "scratch")
    check_free(run)  # a link to a folder may be
    (run / name).symlink_to(precious)
    for target in (str(run), TrainConfig.of(output_dir=str(run), resume=True)):
        with pytest.raises(CannotGoOn, match=f"has {name}, which is a link, and a run would write to it"):
            check_free(target) if isinstance(target, str) else check_directory(target)
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(CannotGoOn, match=f"has {name}, which is a pipe"):
        check_free(run)
    for path, link in ((run / "log.txt", precious), (run / "pipe", None)):
        path.symlink_to(link) if link else os.mkfifo(path)
        with pytest.raises(OSError, match="symbolic links|No such device"):
            LogFile(path)
    assert precious.read_text() == "precious"


def test_a_lock_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(FileExistsError, match="has a file lock that no run of jmarl has written"), locked(tmp_path):
        pass


def test_a_lock_that_was_removed_is_taken_anew_unless_another_run_has_it(tmp_path):
    with locked(tmp_path / "run"):
        assert keep(tmp_path / "run")
        shutil.rmtree(tmp_path / "run")
        assert keep(tmp_path / "run") and (tmp_path / "run" / "lock").is_file()
        with pytest.raises(DirectoryInUse), locked(tmp_path / "run"):
            pass
        (tmp_path / "run" / "lock").unlink()
        (tmp_path / "run" / "lock").write_text('{"host": "other"}')
        assert not keep(tmp_path / "run")


# --- paths ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exp[v2]", "a*b", "what?", "back\\slash", "\udcff"])
def test_a_path_that_orbax_reads_as_a_pattern_is_refused_before_the_first_update(tmp_path, name):
    cfg = TrainConfig.of(output_dir=f"{tmp_path}/{name}/run")
    for refused in (cfg, cfg.replace(save_every=0, resume=True)):
        with pytest.raises(ValueError, match="cannot hold checkpoints: .*choose another output_dir"):
            check_directory(refused)
    check_directory(cfg.replace(save_every=0))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["plain", " in side ", "{a,b}", "a]", "é日本", "new\nline", "%20#&;'\"", "..."])
def test_a_small_checkpoint_is_written_read_back_and_deleted(tmp_path, name):
    check_directory(TrainConfig.of(output_dir=str(tmp_path / name)))
    (folder := tmp_path / name / "checkpoints").mkdir(parents=True)
    try_checkpoint(folder)
    assert not [*folder.iterdir()]


def test_a_directory_that_cannot_hold_a_checkpoint_is_refused(tmp_path):
    """Here with the rule about its name left out."""
    (folder := tmp_path / "[v2]" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"the output directory .*\[v2\] cannot hold checkpoints: checkpoint step 0 in"):
        try_checkpoint(folder)
    assert not [*folder.iterdir()]


def test_a_relative_directory_stays_where_it_is_if_a_reward_changes_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()

    def reward(a, b, batch_items, rng):
        os.chdir(tmp_path / "other")
        return first_words(a, b, batch_items, rng)

    result = run(reward=reward, output_dir="run/", num_updates=2)
    assert not result.unsaved and not [*(tmp_path / "other").iterdir()]
    assert (tmp_path / "run" / "models" / "agent_0").is_dir() and (tmp_path / "run" / "attempts" / "1" / "end.json").is_file()


# --- what disappears -----------------------------------------------------------------------------------------------------


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_by_a_copy(path):
    """As editors do."""
    shutil.copy(path, copy := path.with_suffix(".new"))
    copy.replace(path)


def made_anew(path):
    remove(path)
    path.mkdir()


LOST = {  # what happens to what -> what is said to be lost; None: nothing is
    "the directory": (remove, "", "metrics.jsonl and 5 more were removed"),
    "the directory, made anew": (made_anew, "", "metrics.jsonl and 5 more were removed"),
    "metrics": (remove, "metrics.jsonl", "metrics.jsonl was removed or replaced"),
    "metrics, replaced": (replace_by_a_copy, "metrics.jsonl", "metrics.jsonl was removed or replaced"),
    "settings": (remove, "config.yaml", "config.yaml was removed or replaced"),
    "settings, replaced": (replace_by_a_copy, "config.yaml", None),
    "attempts": (remove, "attempts", "attempts/1 and 1 more were removed or replaced"),
    "checkpoints": (remove, "checkpoints", None),
}


@pytest.mark.parametrize("what", LOST)
@pytest.mark.filterwarnings("default")
def test_what_disappears_during_a_run_is_told_and_the_rest_is_saved(tmp_path, what):
    """Training goes on, and writes its last checkpoint and its models where they belong."""
    (place, path, text), calls, where = LOST[what], [], tmp_path / "run"
    write(where, ["attempts/1/start.json"])
    (where / "config.yaml").write_text("seed: 0\n")  # as a command writes it

    def reward(a, b, batch_items, rng):
        calls.append(1)
        if len(calls) == 3:
            while not saved_steps(where / "checkpoints"):  # else it is removed under a checkpoint that is being written
                time.sleep(0.01)
            place(where / path)
        return first_words(a, b, batch_items, rng)

    result = run(reward=reward, held_out=(), output_dir=str(where), num_updates=4, save_every=2)
    assert len(result.rewards) == 4 and saved_steps(where / "checkpoints")[-1] == 4
    assert (where / "models" / "agent_1" / "model.safetensors").is_file()
    assert text in result.unsaved if text else not result.unsaved
    assert (where / "attempts" / "2" / "end.json").is_file() == (text is None)


@pytest.mark.filterwarnings("default")
def test_nothing_is_written_to_a_directory_that_another_run_has_taken(tmp_path):
    where = tmp_path / "run"

    def reward(a, b, batch_items, rng):
        if where.exists() and not (where / "other").exists():
            shutil.rmtree(where)
            write(where, ["other"])
            (where / "lock").write_text(json.dumps({"host": "other", "pid": 1, "since": "now"}))
        return first_words(a, b, batch_items, rng)

    result = run(reward=reward, held_out=(), output_dir=str(where), num_updates=2, save_every=1)
    assert "was removed or replaced while the run went on, and is in use by another now" in result.unsaved
    assert files_in(where) == {"other", "lock"} and len(result.rewards) == 2


def test_a_run_of_several_seeds_does_not_replace_a_file_of_the_user(tmp_path):
    write(tmp_path, ["metrics.jsonl"])
    with pytest.raises(CannotGoOn, match=r"has metrics.jsonl, which no run"):
        run("seeds", output_dir=str(tmp_path), num_updates=1)
    assert files_in(tmp_path) == {"metrics.jsonl"}
