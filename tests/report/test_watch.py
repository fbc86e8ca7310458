"""`jmarl report --watch`: the server answers on the loopback interface, follows a run, and says what it refuses."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from browser import dom, needs_chromium
from run_directories import turn, watched, write_run

from jmarl.cli.main import main
from jmarl.logs.completions_file import CompletionsFile, newest_records
from jmarl.report import serve


def get(address: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    """Return the code and the text of an answer. body: of a POST; headers: _ stands for -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, named), timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_run_is_followed_while_it_writes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(serve, "SHARE", 1e9)  # rows are read at each request
    run = write_run(tmp_path / "run")
    with watched(run) as address:
        code, page = get(address)
        assert code == 200 and "connect-src 'self'" in page and 'id="newest"' in page and "function follow" in page
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "reward/mean": 0.5}\n{"step": 6, "rew')  # the second row is being written
        file = CompletionsFile(run / "completions.jsonl.gz", 5, 10**8)
        file.write(5, "train", {"tasks": [], "turns": [turn(4, 0, random.Random(0), 1)]})
        file.close()
        news = json.loads(get(f"{address}data?after=4")[1])
    assert news["groups"][0]["curves"]["reward/mean"]["x"] == [1, 2, 3, 4, 5] and news["groups"][0]["updates"] == 5
    assert [(x["run"], x["kind"], x["step"]) for x in news["completions"]] == [(0, "train", 4), (0, "eval", 4), (0, "train", 5)]
    assert "<i>step 4 turn 0 agent 0 prompt 0" in news["completions"][-1]["turns"][0]["completions"][0][0][0]
    assert not caplog.text, "a half-written row is no damage"


def test_only_the_page_itself_may_send_a_message_and_a_wrong_one_is_refused(tmp_path):
    """A page from elsewhere can send text and forms, but names itself, and no JSON unless this server allowed it."""
    right = {"run": 0, "step": 1, "task": 0, "agent": 0, "turn": 0, "joint": [0], "say": "x"}
    with watched(write_run(tmp_path / "run")) as address:
        own = {"Origin": address.rstrip("/"), "Content_Type": "application/json"}

        def sent(asked: object, **headers: str) -> tuple[int, str]:
            return get(f"{address}what-if", json.dumps(asked).encode(), **own | headers)

        for headers in (
            {"Origin": "http://elsewhere"},
            {"Origin": "null"},
            {"Content_Type": "text/plain"},
            {"Host": "elsewhere"},
        ):
            assert sent(right, **headers)[0] == 403, headers
        wrong = [{"step": "1"}, {"joint": [-1]}, {"turn": True}]
        for change in [*wrong, *({"say": text} for text in (3, "a\0", "\ud83d", "x" * 20_001))]:
            assert sent(right | change)[0] == 400, change
        assert sent([])[0] == 400 and get(f"{address}step", b"{}", **own)[0] == 400
        assert sent(right | {"run": 7})[0] == 404 and sent(right | {"name": "another"})[0] == 404


@needs_chromium
def test_the_page_shows_the_newest_episode_and_asks_again(tmp_path):
    run = write_run(tmp_path / "run", turns=2)
    with watched(run) as address:
        page = dom(address, tmp_path / "profile")
    newest = page.split('id="newest"')[1].split('id="curves"')[0]
    assert "held-out, after 4 updates" in newest and newest.count('class="message"') == 2, "the evaluation has one turn"
    for agent in (0, 1):
        assert f"&lt;i&gt;step 99 turn 0 agent {agent} prompt 1 completion 1&lt;/i&gt;" in newest, "joint action 2 of prompt 2"
    assert int(re.findall(r'data-asked="(\d+)"', page)[0]) >= 2 and "Live: asks every 3 s" in page


def test_rows_are_read_for_a_small_part_of_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "SHARE", 1e-6)
    run = write_run(tmp_path / "run")
    with watched(run) as address:
        updates = []
        for step in (5, 6):
            with (run / "metrics.jsonl").open("a") as file:
                file.write(f'{{"step": {step}, "reward/mean": 0.5}}\n')
            updates.append(json.loads(get(f"{address}data")[1])["groups"][0]["updates"])
    assert updates == [5, 5], "the second request came too early"


def test_only_this_machine_is_answered_and_what_cannot_be_read_is_said(tmp_path):
    run = write_run(tmp_path / "run")
    with watched(run) as address:
        assert get(address, Host="example.org:80") == (
            403,
            "This page is for this machine only: open it as 127.0.0.1 or localhost.",
        )
        assert get(address, Host="localhost:9000")[0] == 200, "another port: it may be forwarded"
        assert get(f"{address}../etc/passwd") == (404, "There is no /../etc/passwd here, only /, /data and /step.")
        run.rename(tmp_path / "earlier_1")
        code, text = get(f"{address}data?after=3")
        assert code == 503 and text.startswith("The runs cannot be read: there is no run in") and get(address)[0] == 503


def test_the_newest_records_are_read_from_the_end(tmp_path):
    path = tmp_path / "file"
    file = CompletionsFile(path, 0, 10**8)
    for step in range(9):
        file.write(step, "train", {"turns": [turn(step, 0, random.Random(step), 30)]})
    file.write(8, "eval", {"turns": []})
    file.close()
    steps = [(record["step"], record["kind"]) for record in newest_records(path, 7)]
    assert steps == [(7, "train"), (8, "train"), (8, "eval")]
    assert [record["step"] for record in newest_records(path, -1)] == [5, 6, 7, 8, 8], "not more than five"
    path.write_bytes(path.read_bytes()[:-3])
    assert [record["step"] for record in newest_records(path, 8)] == [8], "the half-written one is left out"
    path.write_bytes(b"")
    assert newest_records(path, -1) == []


def test_what_cannot_be_served_is_refused_by_a_sentence(tmp_path, capsys):
    run = str(write_run(tmp_path / "run"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = {
            "--watch --port 70000 RUN": "port=70000 is not allowed: port must be 0, for a free one, or a number up to 65535",
            f"--watch --port {port} RUN": f"port={port} cannot be used: Address already in use; choose another one, or none",
            "--port 8000 RUN": "--port 8000 has no effect without --watch, which serves a page: add --watch or remove --port",
            "--watch -o r.html RUN": "--output r.html has no effect with --watch, which writes no file: remove one of them",
            "--watch RUN/none": f"there is no run in {run}/none: give the output_dir of a run",
        }
        for flags, sentence in refused.items():
            assert main(["report", *flags.replace("RUN", run).split()]) == 2
            assert capsys.readouterr().err.startswith(f"jmarl: {sentence}")


def test_ctrl_c_ends_the_server(tmp_path):
    command = [sys.executable, "-m", "jmarl", "report", "--watch", str(write_run(tmp_path / "run"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8") as process:
        try:
            assert process.stdout
            address, follows, *_ = process.stdout.readline().split()
            assert follows == "follows" and get(address)[0] == 200
            os.kill(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()  # no effect where it has ended
    assert (process.returncode, errors) == (0, "")
    with pytest.raises(urllib.error.URLError):
        get(address)


def test_older_steps_are_served_by_need_and_nothing_but_the_completions_of_the_runs(tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    (tmp_path / "secret").write_text("secret")
    with watched(run) as address:
        code, text = get(f"{address}step?run=0&kind=train&step=2")
        assert code == 200 and (json.loads(text)["run"], json.loads(text)["step"]) == (0, 2)
        assert "<i>step 1 turn 0 agent 0" in json.loads(text)["turns"][0]["completions"][0][0][0]
        assert json.loads(get(f"{address}step?run=0&kind=eval&step=3")[1])["updates"] == 3
        assert get(f"{address}step?run=0&name=another&kind=train&step=2")[0] == 404
        assert get(f"{address}step?run=0&kind=train&step=9")[0] == get(f"{address}step?run=1&kind=train&step=2")[0] == 404
        for query in (
            "run=../../secret&kind=train&step=1",
            "run=-1&kind=train&step=1",
            "run=0&kind=../secret&step=1",
            "run=0",
            "",
        ):
            code, text = get(f"{address}step?{query}")
            assert code == 400 and text == "Give a run, a kind and a step, such as run=0&kind=train&step=3."
        assert get(f"{address}step/../../secret")[0] == get(f"{address}secret")[0] == get(f"{address}../secret")[0] == 404
        assert get(f"{address}step?run=0&kind=train&step=2", Host="example.org")[0] == 403
        data = (run / "completions.jsonl.gz").read_bytes()
        (run / "completions.jsonl.gz").write_bytes(b"\x1f\x8bdamaged" + data)  # all records are elsewhere
        assert json.loads(get(f"{address}step?run=0&kind=train&step=2")[1])["step"] == 2
        (run / "completions.jsonl.gz").unlink()
        (run / "completions.jsonl.gz").symlink_to(tmp_path / "secret")
        code, text = get(f"{address}step?run=0&kind=train&step=2")
        assert code == 503 and "is a link to" in text and "is not read" in text
