"""Every text that leaves the sandbox can be encoded, and so can files with texts that models wrote."""

from __future__ import annotations

import dataclasses
import http.server
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from jmarl.envs.chat_api import ChatAPI
from jmarl.envs.code.completion import CodeCompletion
from jmarl.envs.code.generation import CodeGeneration
from jmarl.preferences.pairs import Pair, load_pairs, save_pairs
from jmarl.runs.kinds.rounds import load_round, save_round
from jmarl.sandbox import Sandbox, Session, asserts, pairs, unittests
from jmarl.sandbox.types import utf8

SUM = asserts("assert add(1, 2) == 3")
UNIT = unittests("import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)")
PROGRAMS = {
    "an exception's text": (r"def add(a, b): raise ValueError('\ud800')", SUM, r"\ud800"),
    "an exception's text while loading": (r"raise ValueError('\udfff')", SUM, r"\udfff"),
    "a missing key": (r"def add(a, b): return {}['x\udc80']", SUM, r"x\udc80"),
    "a name of a class": (r"def add(a, b): raise type('E\ud800', (Exception,), {})", SUM, ""),
    "a value": (r"def add(a, b): return '\ud800'", UNIT, r"\ud800"),
    "the error of a test method": (r"def add(a, b): raise KeyError('\ud800')", UNIT, r"\ud800"),
    "a script's error": (r"raise ValueError('\ud800')", pairs([("", "x")]), ""),
    "output": ("print('\\ud800')\nimport os\nos.write(2, b'\\xed\\xa0\\x80\\xff')", SUM, ""),
    "the program itself": ("x = '\ud800'", SUM, r"\ud800"),
}


def can_be_encoded(x: object) -> bool:
    json.dumps(x, ensure_ascii=False).encode()
    return True


@pytest.mark.parametrize("name", PROGRAMS)
def test_texts_of_results_can_be_encoded(sandbox: Sandbox, name: str) -> None:
    program, tests, shown = PROGRAMS[name]
    result = sandbox.run(program, tests)
    assert result.outcome == "failed" and can_be_encoded(dataclasses.asdict(result)) and shown in result.message, ascii(result)


@pytest.mark.parametrize("code", [r"'\ud800'", r"print('\ud800')", r"raise ValueError('\ud800')", r"{}['\ud800']"])
def test_texts_of_sessions_can_be_encoded(sandbox: Sandbox, code: str) -> None:
    with Session(sandbox) as session:
        reply = session.python(code)
        assert can_be_encoded(dataclasses.asdict(reply)) and r"\ud800" in reply.text


def test_names_of_files_in_sessions_can_be_encoded(sandbox: Sandbox) -> None:
    with Session(sandbox) as session:
        session.python(r"open('\udc80', 'w').close()")
        assert can_be_encoded(session.list().value) and r"\udc80" in session.list().value


def test_only_lone_surrogates_are_written_out() -> None:
    assert utf8({"é\ud800": ["\U0001f600", "\udc80", 1, None]}) == {"é\\ud800": ["\U0001f600", "\\udc80", 1, None]}


ITEM = {"prompt": "Write f.", "entry_point": "f", "test": "def check(f):\n    assert f() == 1"}
CLASS = {
    "prompt": "class A: ...", "imports": "", "constructor": "class A:\n    pass", "methods": [{"name": "f", "only_self": True}],
    "test": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(A().f(), 1)",
}  # fmt: skip


@pytest.mark.parametrize("env, item", [(CodeGeneration, ITEM), (CodeCompletion, CLASS)])
def test_prompts_of_later_turns_can_be_encoded(env: type, item: dict) -> None:
    """They show completions and the results of running them."""
    played, rng = env(1), np.random.default_rng(0)
    states, _ = played.reset([item], rng)
    answer = played.step(states, [["def f(*a):\n    raise ValueError('\ud800 \\udc80')"]], rng)
    _, prompts = played.observe(answer.after)
    assert can_be_encoded(prompts) and r"\ud800" in prompts[0][0]


PAIRS = [Pair(("p \ud800",), ("é \udc80",), ("no",), rewards=(1.0, 0.0))]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_pairs_are_unchanged_after_saving_and_loading(tmp_path: Path, suffix: str) -> None:
    save_pairs(tmp_path / f"pairs.{suffix}", PAIRS)
    (tmp_path / f"pairs.{suffix}").read_text(encoding="utf-8")
    assert [(pair.prompts, pair.chosen, pair.rejected) for pair in load_pairs(tmp_path / f"pairs.{suffix}", 1)] == [
        (pair.prompts, pair.chosen, pair.rejected) for pair in PAIRS
    ]


def test_rounds_are_unchanged_after_saving_and_loading(tmp_path: Path) -> None:
    save_round(tmp_path, 0, PAIRS)
    assert "é" in (tmp_path / "round_0000.jsonl").read_text(encoding="utf-8") and load_round(tmp_path, 0) == PAIRS


class Service(http.server.BaseHTTPRequestHandler):
    """A chat service whose completion has a lone surrogate."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = rb'{"choices": [{"message": {"content": "yes \ud800"}}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # nothing on standard error
        del format, args


def test_completions_of_a_service_can_be_encoded() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert ChatAPI(f"http://127.0.0.1:{server.server_port}/v1").complete("?", 1) == [(r"yes \ud800", True)]
        finally:
            server.shutdown()
            thread.join()
