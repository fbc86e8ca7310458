"""trackio: all attempts of a run are one run of it, read back with its own library, and nothing is asked of the network."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from jmarl import TrainConfig
from jmarl.logs.completions_file import EVAL, NAME, TRAIN, read_completions
from jmarl.logs.metrics_writer import read_rows
from jmarl.logs.sinks import TRACKIO_NAME, traces_of
from jmarl.models.hub.messages import ChatPrompt
from tests.logs.test_metrics_writer import writer
from tests.runs.test_faults import run

HOSTILE = "<script>alert(1)</script>\x00 \u202eabc \ud800 \U0001f600 </trackio> " + 9999 * "x"
READABLE = HOSTILE.replace("\ud800", "\ufffd")
SETTINGS = dict(tensorboard=False, trackio={"project": "p", "trace_every": 2})


@pytest.fixture(scope="module")
def trackio(tmp_path_factory):
    """The library, which keeps its files where the variable says when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        yield pytest.importorskip("trackio", reason="pip install 'jmarl[trackio]'")


@pytest.fixture
def asked(monkeypatch):
    """The addresses that were asked for, of which none answers; there is a token of the Hub."""
    addresses: list = []

    def refuse(*address, **kwargs):
        addresses.append(address)
        raise OSError("no network")

    for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setenv("HF_TOKEN", "hf_a_token_of_nobody")
    return addresses


def stored(trackio, project):
    return trackio.sqlite_storage.SQLiteStorage, trackio.sqlite_storage.SQLiteStorage.get_runs(project)


def turn(prompts, completions, rewards, parents=(0,), acts=((True,), (True,))):
    """A turn of two agents with one node, and one joint action for each completion."""
    joint = [[g, g] for g in range(len(completions[0][0]))]
    parts = {"prompts": prompts, "acts": acts, "completions": completions, "joint": joint, "rewards": rewards}
    return parts | {"parts": {}, "measures": {}, "parents": list(parents), "items": [0]}


@pytest.mark.parametrize("mode", ["sqlite", "jsonl"])
def test_all_attempts_of_a_run_are_one_run_of_trackio_and_nobody_is_asked(mode, trackio, tmp_path, asked, monkeypatch):
    """The second attempt repeats steps 2 and 3; the third begins where it ended, and ends by Ctrl+C. On a network file system
    trackio writes files that its dashboard reads later."""
    monkeypatch.setenv("TRACKIO_STORAGE_MODE", mode)
    given = SETTINGS | {"trackio": {"project": mode, "trace_every": 2}}
    with pytest.raises(KeyboardInterrupt):
        for start, end in ((0, 4), (2, 5), (5, 6)):
            with writer(tmp_path / "mine", start_step=start, **given) as out:
                out.write(start, {"eval/updates": start})
                for step in range(start, end):
                    out.write(step, {"loss": 0.5 * step, "agent_0/kl": float("nan")})
                out.histogram(end - 1, "lengths", [1, 2, 2])
                assert out.log_errors == 0
                if end == 6:
                    raise KeyboardInterrupt
    trackio.fragments.import_inbox_dir()
    storage, runs = stored(trackio, mode)
    assert runs == [(tmp_path / "mine" / TRACKIO_NAME).read_text(encoding="utf-8").strip()] and runs[0].startswith("mine-")
    assert len(storage.get_run_records(mode)) == 1, "by their id too"
    rows = storage.get_logs(mode, runs[0])
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(step, 0.5 * step) for step in range(6)]
    assert {str(row["agent_0/kl"]) for row in rows if "loss" in row} <= {"nan", "NaN"}
    assert [row["step"] for row in rows if "eval/updates" in row] == [0, 2, 5]
    assert [sum(row["lengths"]["values"]) for row in rows if "lengths" in row] == [3, 3, 3]
    assert storage.get_run_config(mode, runs[0])["seed"] == 1 and asked == []


def test_a_run_that_a_script_has_begun_stays_open_beside_it(trackio, tmp_path, asked):
    script = trackio.init("q", name="script", embed=False, auto_log_cpu=False)
    given = SETTINGS | {"trackio": {"project": "q", "trace_every": 1}}
    with writer(tmp_path / "a", **given) as out:
        out.write(1, {"loss": 1.0})
        trackio.log({"own": 1.0})
    trackio.log({"own": 2.0})
    trackio.finish()
    storage, runs = stored(trackio, "q")
    assert len(runs) == 2 and [row["own"] for row in storage.get_logs("q", script.name)] == [1.0, 2.0]


def test_hostile_texts_of_the_best_and_the_worst_episode_come_back_from_its_traces(trackio, tmp_path):
    chat = ChatPrompt([{"role": "system", "content": "be brief"}, {"role": "user", "content": HOSTILE}])
    record = {"turns": [turn([[chat], ["b"]], [[[HOSTILE, "mid", "bad"]], [["r", "s", "t"]]], [[[1, 1], [0, 0], [-1, None]]])]}
    with writer(tmp_path / "texts", max_completions_mb=1, **SETTINGS | {"trackio": {"project": "t", "trace_every": 2}}) as out:
        for step, kind in ((1, TRAIN), (2, TRAIN), (2, EVAL)):
            out.completions(step, kind, record)
        assert out.log_errors == 0
    storage, runs = stored(trackio, "t")
    traces = storage.get_traces("t", runs[0])
    assert {(trace["step"], trace["metadata"]["session_id"]) for trace in traces} == {
        (step, f"{kind} {step}, episode {number}") for step, kind in ((1, TRAIN), (2, EVAL)) for number in (0, 2)
    }
    assert len(traces) == 8
    [first] = [x for x in traces if x["metadata"]["session_id"] == "train 1, episode 0" and x["metadata"]["agent"] == 0]
    assert [(m["role"], m["content"]) for m in first["messages"]] == [
        ("system", "be brief"), ("user", READABLE), ("assistant", READABLE),
    ]  # fmt: skip
    assert first["metadata"]["rewards"] == [1]


def test_a_trace_has_the_turns_in_which_its_agent_acts():
    """Joint action 1 of the first turn is continued; agent 1 answers in the second turn alone."""
    first = turn([["a"], [""]], [[["x", "y"]], [["", ""]]], [[[0, 0], [1, 1]]], acts=((True,), (False,)))
    second = turn([["again"], ["you"]], [[["z"]], [["w"]]], [[[2, 3]]], parents=(1,))
    best, other, worst = traces_of("train 1", [first, second])
    assert [m["content"] for m in best[0]] == ["a", "y", "again", "z"] and best[1]["rewards"] == [1, 2]
    assert [m["content"] for m in other[0]] == ["you", "w"] and other[1]["agent"] == 1
    assert [m["content"] for m in worst[0]] == ["a", "x"] and worst[1]["session_id"] == "train 1, episode 0"


def test_a_database_that_cannot_be_written_is_counted_and_the_rows_are_in_the_file(trackio, tmp_path):
    (Path(os.environ["TRACKIO_DIR"]) / "broken.db").mkdir()
    with writer(tmp_path, **SETTINGS | {"trackio": {"project": "broken", "trace_every": 1}}) as out:
        out.write(1, {"loss": 0.5})
        assert out.log_errors == 1
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]


def test_trackio_missing_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ImportError, match=r"pip install 'jmarl\[trackio\]'"):
        writer(tmp_path, **SETTINGS)


def test_a_run_needs_a_directory_for_the_name_that_it_has_in_trackio():
    with pytest.raises(ValueError, match="trackio.*must be empty without output_dir"):
        TrainConfig.of(trackio="p")
    assert TrainConfig.of(trackio="p", output_dir="runs/mine").run.trackio == "p"


@pytest.mark.long
def test_a_run_that_resumes_has_the_rows_of_its_file_and_its_own_texts_in_trackio(trackio, tmp_path, asked):
    settings: dict[str, Any] = dict(output_dir=str(tmp_path), trackio="runs", log_every=1, save_every=1)
    run(num_updates=2, **settings)
    run(num_updates=3, resume=True, **settings)
    storage, runs = stored(trackio, "runs")
    rows = [row for row in storage.get_logs("runs", *runs) if "agent_0/loss" in row]
    written = [row for row in read_rows(tmp_path / "metrics.jsonl") if "agent_0/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [{name: row[name] for name in x} for row, x in zip(rows, written, strict=True)] == written
    turns = [turn for record in read_completions(tmp_path / NAME) for turn in record["turns"]]
    texts = {text for turn in turns for agent in turn["completions"] for group in agent for text in group}
    said = {m["content"] for x in storage.get_traces("runs", *runs) for m in x["messages"] if m["role"] == "assistant"}
    assert said and said <= texts and asked == []
