"""Logs: no row is lost, repeated or able to stop the run, and texts, tables and histograms are readable."""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import markdown
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jmarl.logs import samples, terminal
from jmarl.logs.metrics_writer import MetricsWriter, flatten, read_rows
from jmarl.logs.sinks import STEP, WANDB_ID
from jmarl.logs.tables import escape, joint_actions_table

ROOT = Path(__file__).resolve().parents[2]


def writer(run_dir, **kwargs):
    return MetricsWriter(run_dir, {"seed": 1}, **{"total_steps": 10, "progress": False} | kwargs)


def events(run_dir):
    accumulator = EventAccumulator(str(run_dir), size_guidance={"histograms": 0, "scalars": 0})  # 0: all of them
    accumulator.Reload()
    return accumulator


def test_rows_are_on_disk_at_once_and_readable_by_any_json_reader(tmp_path):
    row = {"reward/mean": np.float32(0.5), "agent_0/loss": math.nan, "a": math.inf, "b": -math.inf, "n": np.array([3])}
    with writer(tmp_path / "new" / "run", tensorboard=False) as out:
        out.write(0, row)
        line = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 0, "reward/mean": 0.5, "agent_0/loss": "NaN", "a": "Infinity", "b": "-Infinity", "n": 3.0,
    }  # fmt: skip
    back = read_rows(tmp_path / "new" / "run" / "metrics.jsonl")[0]
    assert math.isnan(back["agent_0/loss"]) and back["b"] == -math.inf and back["step"] == 0


def test_rows_that_are_read_share_the_texts_of_their_columns(tmp_path):
    """100,000 rows of 85 columns take a third less memory."""
    with writer(tmp_path, tensorboard=False) as out:
        for step in (1, 2):
            out.write(step, {"reward/mean": 0.5, "agent_0/loss": 1.0})
    first, second = read_rows(tmp_path / "metrics.jsonl")
    assert len(first) == 3 and all(name is other for name, other in zip(first, second, strict=True))


def test_a_resumed_run_equals_one_that_was_never_stopped(tmp_path):
    def run(directory, steps, **kwargs):
        with writer(directory, **kwargs) as out:
            for step in steps:
                out.write(step, {"reward/mean": step * 0.1, "agent_0/loss": -step})
                out.histogram(step, "rewards", np.arange(step + 1))

    run(tmp_path / "whole", range(10))
    run(tmp_path / "resumed", range(7))  # killed after step 6, the checkpoint is older
    run(tmp_path / "resumed", range(4, 10), start_step=4)
    whole, resumed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "resumed"))
    assert whole.read_text() == resumed.read_text()
    seen = events(tmp_path / "resumed")
    for tag in ("reward/mean", "agent_0/loss"):
        assert [e.step for e in seen.Scalars(tag)] == list(range(10))
    assert [e.step for e in seen.Histograms("rewards")] == list(range(10))


@pytest.mark.parametrize("tail", ['{"step": 2, "lo', '{"step": 2, "loss": 2.0}'], ids=["half", "no newline"])
def test_a_row_cut_short_by_a_kill_does_not_spoil_the_next(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 0.0}\n{"step": 1, "loss": 1.0}\n' + tail)
    with writer(tmp_path, start_step=3, tensorboard=False) as out:
        out.write(3, {"loss": 3})
    assert [row["step"] for row in read_rows(path)] == ([0, 1, 3] if tail.endswith("lo") else [0, 1, 2, 3])
    assert path.read_text().endswith('{"step": 3, "loss": 3.0}\n')


def test_a_file_that_counts_from_0_is_read_and_resumed_as_one_that_counts_updates(tmp_path):
    """As earlier versions wrote it: an evaluation had the step of the update before it."""
    path = tmp_path / "metrics.jsonl"
    old = [(0, 0), (0, None), (1, None), (1, 2), (2, None)]
    rows = [{"step": step} | ({"time/step_s": 1.0} if updates is None else {"eval/updates": updates}) for step, updates in old]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2, 2, 3]
    with writer(tmp_path, start_step=3, tensorboard=False) as out:
        assert set(out.evaluated) == {0, 2}
        out.write(3, {"time/step_s": 1.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3] == [row["step"] for row in read_rows(path)]


def test_dropped_rows_are_logged(tmp_path, caplog):
    for _ in range(2):
        with writer(tmp_path, tensorboard=False) as out:
            out.write(0, {"loss": 1})
    assert "dropped 1 of 1 rows, the run starts at step 0" in caplog.text
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1


def test_hyperparameters_text_and_histograms_reach_tensorboard(tmp_path):
    config = {"learning_rate": 1e-5, "roles": ["a|b", "c"], "loss": {"clip_eps_low": 0.2}, "none": None, "on": True}
    with MetricsWriter(tmp_path, config, total_steps=1, progress=False) as out:
        out.histogram(0, "rewards", [1.0, 2.0, np.nan, 2.0])
        out.histogram(0, "nothing", [np.inf])
    seen = events(tmp_path)
    tags = seen.Tags()
    table = seen.Tensors("hparams/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "loss/clip&#95;eps&#95;low | 0.2" in table and "a&#124;b" in table
    assert tags["histograms"] == ["rewards"] and seen.Histograms("rewards")[0].histogram_value.num == 3
    plugin = seen.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"learning_rate" in plugin and b"loss/clip_eps_low" in plugin and b"on" in plugin
    assert {f"_hparams_/{name}" for name in ("experiment", "session_start_info", "session_end_info")} <= {*tags["tensors"]}


@pytest.mark.parametrize("values", [[2.0], [0.1 + 0.2, 0.3], [-1e9, 0.0, 1e9], [*range(1000)]])
def test_a_histogram_counts_each_value_once_whatever_their_range(tmp_path, values):
    with writer(tmp_path) as out:
        out.histogram(0, "rewards", values)
    (event,) = events(tmp_path).Histograms("rewards")
    seen = event.histogram_value
    assert sum(seen.bucket) == seen.num == len(values) and (seen.min, seen.max) == (min(values), max(values))
    assert len(seen.bucket) == len(seen.bucket_limit) <= 64 and seen.bucket_limit[-1] >= max(values)


def test_an_unwritable_run_directory_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"run directory .*file/run cannot be written"):
        writer(tmp_path / "file" / "run")


UNWRITABLE = """
import os, sys
from jmarl.logs.metrics_writer import MetricsWriter

def run(where):
    with MetricsWriter(where, {}, total_steps=3, start_step=1, progress=False) as out:
        for step in range(1, 3):
            out.write(step, {"loss": 1})
        out.text(2, "name", "text")
    return out.log_errors

assert run(sys.argv[1]) == 0  # and imports what it needs
assert not {"torch", "tensorflow"} & {*sys.modules}
if os.getuid() == 0:  # for whom permissions do not hold
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
print(run(sys.argv[2]))
"""


def test_tensorboard_that_cannot_be_written_is_counted_and_logged_once(tmp_path):
    """A directory in which no file can be made, and `metrics.jsonl` is there already."""
    with tempfile.TemporaryDirectory() as where:
        path = Path(where) / "metrics.jsonl"
        path.write_text('{"step": 0, "loss": 0.0}\n')
        path.chmod(0o666)
        Path(where).chmod(0o555)
        command = [sys.executable, "-c", UNWRITABLE, str(tmp_path), where]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == ["1"], done.stderr
        assert done.stderr.count("TensorBoard cannot be written: [Errno 13] Permission denied") == 1
        assert [row["step"] for row in read_rows(path)] == [0, 1, 2]
        Path(where).chmod(0o755)


def test_rows_wait_for_space_on_a_full_disk(tmp_path, caplog, full_disk):
    """They are written in order, to `metrics.jsonl` and TensorBoard, and none is partial."""
    out = writer(tmp_path)
    out.write(0, {"loss": 0})
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    with full_disk(min(sizes) + 10):  # the next line fits in part
        out.write(1, {"loss": 1})
        out.text(1, "name", "x" * 20_000)
        for step in range(2, 200):
            out.write(step, {"loss": step})
        out.sync()
        assert out.log_errors == 2 * 199 + 2
    with full_disk(max(sizes) + 1000):  # there is space for some
        out.write(200, {"loss": 200})
    out.write(201, {"loss": 201})  # there is space again
    out.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(202))
    seen = events(tmp_path)
    assert [e.step for e in seen.Scalars("loss")] == list(range(202)) and seen.Tensors("name/text_summary")
    assert "damaged" not in caplog.text
    assert caplog.text.count("metrics.jsonl cannot be written") == 1


def test_rows_that_never_fit_are_reported_at_the_end(tmp_path, caplog, full_disk):
    out = writer(tmp_path, tensorboard=False)
    out.write(0, {"loss": 0})
    with full_disk((tmp_path / "metrics.jsonl").stat().st_size + 10):
        out.write(1, {"loss": 1})
        out.write(2, {"loss": 2})
        out.close()
    assert "metrics.jsonl: the last 2 records are lost: [Errno 27] File too large" in caplog.text
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "loss": 0.0}\n' and out.log_errors == 3


def test_rows_wait_for_space_on_a_file_system_that_is_full(tmp_path):
    """A real file system of 64 KiB, which another file fills and frees again."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "jmarl", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here (needs root)")
    try:
        out = writer(tmp_path)
        filler = tmp_path / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        for step in range(1000):
            out.write(step, {"loss": step})
        assert out.log_errors > 1000
        filler.write_bytes(b"")
        out.write(1000, {"loss": 1000})
        out.close()
        rows, seen = read_rows(tmp_path / "metrics.jsonl"), events(tmp_path)
        steps = [row["step"] for row in rows]
        assert steps == list(range(len(steps))) and len(steps) > 200, "as many as fit"
        assert [e.step for e in seen.Scalars("loss")][:200] == list(range(200))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_resumed_run_knows_its_earlier_evaluations(tmp_path):
    with writer(tmp_path, tensorboard=False) as out:
        assert not out.evaluated
        out.write(0, {"eval/updates": 0, "eval/reward": 1})
        for step in range(6):
            out.write(step, {"loss": step})
            if step % 2:
                out.write(step, {"eval/updates": step + 1})
    for start, evaluated in ((4, {0, 2, 4}), (3, {0, 2}), (0, set())):  # each drops the rows from there on
        with writer(tmp_path, tensorboard=False, start_step=start) as out:
            assert set(out.evaluated) == evaluated


def test_sync_puts_rows_on_the_disk_and_its_errors_are_counted(tmp_path, monkeypatch):
    with writer(tmp_path, tensorboard=False) as out:
        out.write(0, {"loss": 0})
        out.sync()
        assert out.log_errors == 0
        monkeypatch.setattr(os, "fsync", lambda fd: os.close(-1))  # "Bad file descriptor"
        out.sync()
        assert out.log_errors == 1


def test_lone_surrogates_reach_every_log_as_replacement_characters(tmp_path):
    lone, pair = "\ud83d", "\ud83d\ude00"
    with MetricsWriter(tmp_path, {lone: lone, "a": pair}, total_steps=1, progress=False) as out:
        out.write(0, {f"reward/{lone}": 1, f"reward/{pair}": 2})
        out.text(0, f"name{lone}", f"text{lone}")
        out.histogram(0, f"values{lone}", [1, 2])
        assert out.log_errors == 0
    line = (tmp_path / "metrics.jsonl").read_bytes().decode()
    assert json.loads(line) == {"step": 0, "reward/\ufffd": 1.0, "reward/😀": 2.0} and '\\ud83d"' not in line
    seen = events(tmp_path)
    assert "reward/\ufffd" in seen.Tags()["scalars"] and seen.Tags()["histograms"] == ["values\ufffd"]
    assert seen.Tensors("name\ufffd/text_summary")[0].tensor_proto.string_val[0].decode() == "text\ufffd"


def run_child(command, **options):
    """Run a command to its end."""
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, **options)


CHILD = """
import sys
from jmarl.logs.metrics_writer import MetricsWriter
out = MetricsWriter(sys.argv[1], {}, total_steps=30, tensorboard=False)
for step in range(1, 31):
    out.write(step, {"reward/mean": 1 / 3})
out.close()
sys.exit(40 + out.log_errors)
"""


@pytest.mark.parametrize(
    ("stdout", "errors"),
    [("closed", 2), ("full", 2), ("pipe without reader", 1)],  # the first and the last step; a pipe is given up at once
)
def test_stdout_that_cannot_be_written_does_not_stop_the_run(tmp_path, stdout, errors):
    reader, writer = os.pipe()
    os.close(reader)
    redirect = {"closed": ">&-", "full": ">/dev/full", "pipe without reader": f">&{writer}"}[stdout]
    command = ["bash", "-c", f'exec "$0" -c "$1" "$2" {redirect}', sys.executable, CHILD, str(tmp_path)]
    done = run_child(command, pass_fds=[writer])
    os.close(writer)
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 30
    assert "Traceback" not in done.stderr
    if stdout != "full":  # there Python itself cannot flush what is still buffered, and exits with 120
        assert done.returncode == 40 + errors


@pytest.mark.parametrize("redirect", [">&-", "| true"])
def test_a_line_printed_to_a_closed_stdout_is_no_error(redirect):
    """For example the message of a resumed run."""
    gone = "poll = select.poll(); poll.register(1, 0); poll.poll()"  # waits until there is no reader
    child = f"import select; {gone}; from jmarl.logs.terminal import say; [say('resuming') for _ in range(3)]"
    command = ["bash", "-o", "pipefail", "-c", f'"$0" -c "$1" {redirect}', sys.executable, child]
    done = run_child(command)
    assert done.returncode == 0 and not done.stderr


def test_a_bar_without_a_reader_does_not_stop_the_run(tmp_path):
    """A pipe that counts as a terminal and has no reader; rich would end the process."""
    reader, writer = os.pipe()
    os.close(reader)
    env = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm"}
    done = run_child([sys.executable, "-c", CHILD, str(tmp_path)], env=env, stdout=writer)
    os.close(writer)
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 30 and done.returncode == 40 + 1, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("bar", [True, False], ids=["bar", "lines"])
def test_a_terminal_that_closes_does_not_stop_the_run(tmp_path, bar):
    """It closes after the first rows; all rows are written, and the process ends normally."""
    ours, theirs = os.openpty()
    env = os.environ | {"TERM": "xterm", "TTY_COMPATIBLE": "1" if bar else "0"}
    wait = 'if step == 15:\n        os.write(2, b"half\\n"); sys.stdin.readline()'
    child = "import os" + CHILD.replace("    out.write(step", f"    {wait}\n    out.write(step")
    options = dict(cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", child, str(tmp_path)], start_new_session=True, **options) as process:
        try:
            os.close(theirs)
            assert process.stderr.readline() == "half\n"
            os.close(ours)
            _, errors = process.communicate("go on\n", timeout=60)
        finally:
            process.kill()  # no effect where it has ended
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 30 and process.returncode == 40 + 1, errors
    assert "Traceback" not in errors and "Exception ignored" not in errors


def test_plain_progress_lines_where_stdout_is_no_terminal(tmp_path, capsys):
    """Of the first and the last step here, because all steps are over within a second."""
    with writer(tmp_path, tensorboard=False, progress=True, total_steps=25, start_step=11) as out:
        for step in range(11, 26):
            out.write(step, {"eval/reward": 1})
            out.write(step, {"reward/mean": 1 / 3, "time/update": 2.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "step 11/25  reward 0.333  2.0 s, 100% updating  left -",
        "step 25/25  reward 0.333  2.0 s, 100% updating  in 0:00:00",
    ]


RECORD = {
    "turns": [
        {
            "prompts": [["Name a\x1b city:"], ["Name a\x1b city:"]],
            "acts": [[True], [True]],
            "completions": [[["Rome", "Oslo"]], [["\n".join(map(str, range(40))), ""]]],
            "joint": [[0, 0], [1, 1]],
            "rewards": [[[0.5, 0.5], [1.0, None]]],
            "items": [0],
        }
    ]
}


@pytest.fixture
def samples_on():
    samples.SAMPLES.setLevel("INFO")
    yield
    samples.SAMPLES.setLevel("WARNING")


def test_a_joint_action_is_shown_once_a_minute_where_samples_are_on(samples_on, capsys):
    with writer("", progress=True) as out:
        for step in range(1, 4):
            out.completions(step, "train", RECORD)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "-- step 1, prompt 1 of 1, joint action 1 of 2: reward 0.5"
    assert shown[1:5] == ["agent 0 reads:", "    Name a\\x1b city:", "agent 0 writes:", "    Rome"]
    long = [*(f"    {n}" for n in range(6)), "    ... 28 more lines ...", *(f"    {n}" for n in range(34, 40))]
    assert shown[5:] == ["agent 1 writes:", *long], "it reads the same"
    assert samples.sample_lines(2, RECORD)[0].endswith("joint action 2 of 2: reward 1 | none")


def test_no_joint_action_is_shown_by_default(capsys):
    with writer("", progress=True) as out:
        out.completions(0, "train", RECORD)
    assert capsys.readouterr().out == ""


def test_the_time_left_does_not_count_the_first_step(capsys):
    """It compiles."""
    sink = terminal.Terminal(200, 0, lambda: ("idle", 0.0))
    sink.started -= 0.3
    for step in range(1, 11):
        sink.shown -= 2 * (step == 10)  # two seconds without a line
        sink.write(step, {"loss": 1})
    sink.close()
    first, tenth = capsys.readouterr().out.splitlines()
    assert first.endswith("left -") and tenth.endswith("left 0:00:00"), "not 190 steps of 0.03 seconds"


def test_old_runs_show_fewer_lines(capsys):
    """A step is shown a second after the last line in a young run, and 18 seconds after it in a run of an hour."""
    sink = terminal.Terminal(1000, 0, lambda: ("idle", 0.0))
    for step, (age, quiet) in enumerate([(0, 0), (10, 0.9), (10, 1.1), (3600, 17), (3600, 19), (10**6, 31)], 1):
        now = time.monotonic()
        sink.started, sink.shown = now - age, now - quiet
        sink.write(step, {"loss": 1})
    sink.close()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/1000", "3/1000", "5/1000", "6/1000"]


ROW = {
    "reward/mean": 0.5, "agent_0/return": 0.75, "agent_1/return": 0.25, "agent_0/length": 12.4, "agent_1/length": 120.0,
    "agent_0/entropy": 2.314, "time/sampling": 0.8, "time/rewards": 0.08, "time/update": 1.12,
}  # fmt: skip


def test_the_line_of_a_step_shows_each_agent_and_the_longest_phase():
    """Rewards where they differ, "-" for a frozen agent, which has no entropy; fields are left out of narrow lines."""
    line = terminal.step_line("step 3/9", "reward/mean", ROW, "left 0:00:12", 120)
    start = "step 3/9  reward 0.500 (agents 0.750, 0.250)  tokens 12, 120"
    assert line == f"{start}  entropy 2.31, -  2.0 s, 56% updating  left 0:00:12"
    assert terminal.step_line("step 3/9", "reward/mean", ROW, "left 0:00:12", len(line) - 1) == (
        f"{start}  entropy 2.31, -  left 0:00:12"
    )
    equal = terminal.step_line("step 3/9", "reward/mean", ROW | {"agent_0/return": 0.25}, "left -")
    assert equal.startswith("step 3/9  reward 0.500  tokens")
    many = {f"agent_{n}/length": float(n) for n in range(12)} | {"loss": 1e-5}
    assert terminal.step_line("step 3/9", "loss", many, "left -") == "step 3/9  loss 1.0e-05  tokens 0 to 11  left -"
    pairs = {f"agent_{n}/{name}": x for n in (0, 1) for name, x in (("accuracy", 0.75), ("margin", 0.5 + n))} | {"loss": 0.6}
    line = terminal.step_line("step 3/9", "loss", pairs, "left -")
    assert line == "step 3/9  loss 0.600  accuracy 0.75  margin 0.50, 1.50  left -"
    turns = {"reward/mean": 0.0, "turn_0/agent_0/length": 4.0, "turn_1/agent_0/length": 8.0}
    assert "tokens 6 " in terminal.step_line("step 3/9", "reward/mean", turns, "left -")


def test_evaluations_are_shown(capsys):
    """Also where there is no directory to write to, in which case nothing else is done."""
    with writer("", progress=True) as out:
        out.write(0, {"eval/updates": 0, "eval/reward": 0.5, "eval/reward_ci95": 0.25})
        out.write(1, {"eval/updates": 1, "eval/reward": 0.5, "eval/reward_ci95": math.nan})
        out.write(0, {"eval/updates": 0, "eval/loss": 2})
        out.write(1, {"eval/updates": 1, "eval/loss": 2, "eval/accuracy": 0.75, "eval/margin": 0.5})
    assert capsys.readouterr().out.splitlines() == [
        "held-out reward 0.500 ± 0.250 after 0 updates",
        "held-out reward 0.500 after 1 updates",  # of one task
        "held-out loss 2.000 after 0 updates",
        "held-out loss 2.000, accuracy 0.75, margin 0.50 after 1 updates",
    ]


def printed(capsys, text: str) -> str:
    """Return what is printed until this text is."""
    out, late = "", time.monotonic() + 30
    while text not in (out := out + capsys.readouterr().out):
        assert time.monotonic() < late, out
        time.sleep(0.01)
    return out


def test_a_long_step_shows_what_the_run_does(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "QUIET", 0.2)
    with writer("", progress=True, phase=lambda: ("update", 7.0)) as out:
        out.write(1, {"loss": 1})
        shown = printed(capsys, "updating for 7 s, 0:00:00 since the start\n")
        out.write(10, {"loss": 1})
    first, *life, last = (shown + capsys.readouterr().out).splitlines()
    assert first.startswith("step 1/10  loss 1.000") and last.startswith("step 10/10")
    assert life and all(line.startswith("step 2/10: updating for 7 s, 0:00:00 since the start") for line in life)
    assert not [t for t in threading.enumerate() if "_watch" in t.name], "the thread ends with the writer"


def test_preparing_a_run_shows_what_it_does(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "QUIET", 0.05)
    monkeypatch.setattr(terminal, "SLOW", 0.05)
    with terminal.watched("preparing the run", True, lambda: ("compiling", 7.0)):
        shown = printed(capsys, "\n")
    with terminal.watched("preparing the run", False, lambda: ("compiling", 7.0)):
        time.sleep(0.1)
    *life, last = (shown + capsys.readouterr().out).splitlines()
    assert life and set(life) == {"preparing the run: compiling for 7 s, 0:00:00 since the start"}
    assert last == "preparing the run took 0:00:00"
    assert not [t for t in threading.enumerate() if "watch" in t.name]


def test_wandb_missing_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'jmarl\[wandb\]'"):
        writer(tmp_path, wandb_config={"mode": "offline"})


@pytest.mark.filterwarnings("default")  # W&B's own
def test_all_attempts_of_a_run_are_one_run_of_wandb_whose_steps_do_not_go_back(tmp_path, monkeypatch):
    """The second attempt repeats steps 2 and 3 and an evaluation; the third begins where the second ended. No network."""
    wandb = pytest.importorskip("wandb", reason="pip install 'jmarl[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sent, log = [], wandb.sdk.wandb_run.Run.log

    def record(run, row, step):
        sent.append((run.id, step, sorted(row)))
        log(run, row, step=step)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", record)
    for start, end in ((0, 4), (2, 5), (5, 6)):
        options = {"project": "p", "mode": "offline"}
        with writer(tmp_path, tensorboard=False, start_step=start, wandb_config=options) as out:
            out.write(max(start - 1, 0), {"eval/updates": start})
            for step in range(start, end):
                out.write(step, {"loss": 0.4375})
            out.histogram(end - 1, "lengths", [1, 2, 2])
            assert out.log_errors == 0
    assert {run_id for run_id, _, _ in sent} == {(tmp_path / WANDB_ID).read_text().strip()}
    assert [step for _, step, names in sent if names == ["loss"]] == list(range(6))
    assert [step for _, step, names in sent if names == ["eval/updates"]] == [0, 4, 5]
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    late = time.monotonic() + 30  # W&B's own process writes a file, which takes a while on a busy machine
    while not all(b"lengths" in file.read_bytes() for file in files) and time.monotonic() < late:
        time.sleep(0.1)
    assert len(files) == 3 and all(word in file.read_bytes() for file in files for word in (b"loss", b"0.4375", b"lengths"))
    given = {"project": "p", "mode": "offline", "id": "mine", "resume": "must"}
    with writer(tmp_path, tensorboard=False, start_step=6, wandb_config=given) as out:
        out.write(6, {"loss": 1.0})
    assert sent[-1][0] == "mine" == (tmp_path / WANDB_ID).read_text().strip()


@pytest.mark.filterwarnings("default")  # W&B's own
def test_rows_go_into_the_run_of_wandb_that_a_script_began_and_it_stays_open(tmp_path, monkeypatch):
    """The script logs before, between the rows and after; W&B counts steps of its own, and rows have theirs in a column. A
    second attempt in the same run sends no row again. A run with another id is one beside it."""
    wandb = pytest.importorskip("wandb", reason="pip install 'jmarl[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    sent, log = [], wandb.sdk.wandb_run.Run.log
    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", lambda run, row: sent.append((run.id, row)) or log(run, row))
    script = wandb.init(mode="offline", project="mine", dir=str(tmp_path), id="script")
    for number in range(9):
        script.log({"mine": number})
    for start in (0, 1):
        with writer(tmp_path / "run", tensorboard=False, start_step=start, wandb_config={"mode": "offline"}) as out:
            for step in range(start, start + 2):
                out.write(step, {"loss": 0.5})
                script.log({"mine": -step})
            assert out.log_errors == 0
    assert (tmp_path / "run" / WANDB_ID).read_text() == "script\n" and wandb.run is script
    assert [row for run, row in sent if "loss" in row] == [{"loss": 0.5, STEP: step} for step in range(3)]
    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", log)
    given = {"mode": "offline", "id": "beside", "dir": str(tmp_path)}
    with writer(tmp_path / "other", tensorboard=False, wandb_config=given) as out:
        out.write(0, {"loss": 0.5})
    assert (tmp_path / "other" / WANDB_ID).read_text() == "beside\n" and wandb.run is script
    script.log({"after": 1.0})
    assert {name: script.summary[name] for name in (STEP, "loss", "after")} == {STEP: 2, "loss": 0.5, "after": 1.0}
    script.finish()


def test_wandb_receives_rows_and_its_failures_are_counted(tmp_path, monkeypatch):
    class Error(Exception):
        pass

    class Run:
        rows: list = []
        step, offline = 0, False

        def log(self, row, step):
            if step == 1:
                raise Error("no network")
            self.rows.append((step, row))

        def finish(self):
            self.rows.append("finished")

    run, arguments = Run(), {}
    fake = types.SimpleNamespace(Error=Error, Histogram=list, init=lambda **kwargs: arguments.update(kwargs) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with writer(tmp_path, tensorboard=False, wandb_config={"project": "p"}) as out:
        out.write(0, {"loss": 1})
        out.write(1, {"loss": 2})
        out.histogram(2, "h", [1, 2])
        assert out.log_errors == 1
    run_id = (tmp_path / WANDB_ID).read_text().strip()
    assert arguments == {"project": "p", "dir": str(tmp_path), "config": {"seed": 1}, "id": run_id, "resume": "allow"}
    assert run.rows == [(0, {"loss": 1.0}), (2, {"h": [1.0, 2.0]}), "finished"]


def test_a_metric_that_is_no_number_is_named(tmp_path):
    with writer(tmp_path, tensorboard=False) as out, pytest.raises(ValueError, match=r"shape {'loss': \(2,\)}"):
        out.write(0, {"loss": np.ones(2), "other": np.ones(1)})


def test_flatten_names_leaves_by_path():
    assert dict(flatten({"a": {"b": 1, "c": None}, "d": (1, 2)})) == {"a/b": 1, "a/c": "None", "d": "(1, 2)"}


def table(n, limit, rewards=None, agents=2):
    rewards = list(range(n)) if rewards is None else rewards
    completions = [[f"c{a}-{i}" for i in range(n)] for a in range(agents)]
    prompts = [f"p{i}" for i in range(n)]
    text = joint_actions_table(prompts, completions, rewards, limit, np.random.default_rng(0))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_the_table_shows_best_random_and_worst_joint_actions():
    rows = table(20, 6)
    assert [row[0] for row in rows] == ["best"] * 2 + ["random"] * 2 + ["worst"] * 2
    assert [row[2] for row in rows[:2] + rows[4:]] == ["p19", "p18", "p1", "p0"]
    assert all(row[3:] == [f"c0-{row[2][1:]}", f"c1-{row[2][1:]}"] for row in rows)
    assert len({row[2] for row in rows}) == 6


def test_the_table_never_repeats_a_joint_action_and_counts_a_nan_reward_as_worst():
    for n, limit, count in ((0, 5, 0), (1, 5, 1), (3, 9, 3), (9, 1, 1), (9, 2, 2), (4, 4, 4)):
        shown = [row[2] for row in table(n, limit)]
        assert len(shown) == len(set(shown)) == count
    assert [row[2] for row in table(4, 2, rewards=[math.nan, 1, 2, 3])] == ["p3", "p0"]
    with pytest.raises(ValueError, match="'completions of agent 1': 1"):
        joint_actions_table(["p", "q"], [["a", "b"], ["a"]], [1, 2], 3, np.random.default_rng(0))


def test_long_texts_lose_their_middle():
    text = joint_actions_table(["a" * 50 + "b" * 50], [], [1], 1, np.random.default_rng(0), max_chars=20)
    assert "a" * 10 + " ...(80 more characters)... " + "b" * 10 in text


@pytest.mark.parametrize(
    "text",
    ["a | b", "*b* _it_ `x`", "<script>x</script>", "[a](b) \\n $x$ # h", "if x:\n    return 1", "&lt; & ~~a~~"],
)
def test_escaped_text_reads_as_it_was_written(text):
    page = markdown.markdown(f"| a | b |\n| --- | --- |\n| {escape(text)} | end |", extensions=["tables"])
    cells = page.split("<td>")[1:]
    assert len(cells) == 2 and cells[1].startswith("end")
    shown = cells[0].split("</td>")[0].replace("<br>", "\n").replace("<br />", "\n")
    assert "<" not in shown
    assert html.unescape(shown).replace("\xa0", " ") == text
