"""Every file is UTF-8, whatever the locale says, and a terminal that cannot show a character shows a replacement."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jmarl.cli.main import main
from jmarl.config.yaml_file import read_yaml
from jmarl.logs.metrics_writer import MetricsWriter
from jmarl.logs.terminal import say
from tests.house import HOUSE

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for room in ("jmarl", "experiments") for path in (ROOT / room).rglob("*.py"))


def without_encoding(source: str) -> list[int]:
    """Return the lines of calls that read or write text in the encoding of the locale."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        function, keywords = node.func, {keyword.arg for keyword in node.keywords}
        name = function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
        values = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
        constants = [x.value for value in values for x in ast.walk(value) if isinstance(x, ast.Constant)]
        modes = [x for x in constants if isinstance(x, str) and 0 < len(x) < 4 and set(x) <= set("rwabt+x")]
        if name == "open":
            is_text = not any("b" in mode for mode in modes) and (isinstance(function, ast.Name) or bool(modes))
        elif name in ("run", "Popen", "check_output"):
            is_text = bool(keywords & {"text", "universal_newlines"})
        else:
            is_text = name in ("read_text", "write_text")
        if is_text:
            lines.append(node.lineno)
    return lines


def test_text_is_read_and_written_as_utf_8():
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in SOURCES}
    sources = {path: text for path, text in sources.items() if re.search(r"open\(|_text\(|text=|newlines=", text)}
    lines = {path: without_encoding(text) for path, text in sources.items()}
    assert len(lines) > 50 and {path: found for path, found in lines.items() if found} == {}


@pytest.mark.parametrize(
    "source", ["open(p)", "open(p, 'w')", "p.open('a')", "gzip.open(p, 'rt')", "p.read_text()", "subprocess.run(c, text=True)"]
)
def test_a_call_without_encoding_is_found(source):
    assert without_encoding(source) == [1] and without_encoding("open(p, 'rb'); os.open(p, 0); p.open('wb')") == []


# --- terminals -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    """`terminal(encoding)`: make stdout a stream of another encoding, and return the function that returns its bytes."""

    def make(encoding: str):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)

        def content() -> bytes:
            stream.flush()
            return stream.buffer.getvalue()

        return content

    return make


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("arguments", ["configs list", "configs show magrpo", "configs settings", "train --help"])
def test_commands_write_to_a_terminal_of_any_encoding(terminal, encoding, arguments):
    content = terminal(encoding)
    try:
        assert main(arguments.split()) == 0
    except SystemExit as end:
        assert end.code == 0
    assert len(content().decode(encoding)) > 100


@pytest.mark.parametrize(
    "text", ["held-out ± 0.1", "日本の首都は?", "lone \udce9 surrogate"], ids=["latin", "japanese", "surrogate"]
)
def test_lines_of_a_run_are_shown_with_replacements(terminal, tmp_path, text, monkeypatch):
    """The library itself prints too, in programs that set no error handler. A line is not lost."""
    monkeypatch.setattr(logging.getLogger("jmarl.console"), "disabled", True)  # pytest cannot send a surrogate in its report
    for encoding in ("ascii", "latin-1", "utf-8"):
        content = terminal(encoding)
        say(text)
        expected = text.encode(encoding, "backslashreplace")
        assert content() == expected + b"\n"
        with MetricsWriter(tmp_path / encoding, {}, total_steps=1, tensorboard=False) as writer:
            writer.write(0, {"reward/mean": 1.0, "eval/updates": 1, "eval/reward": 0.5, "eval/reward_ci95": 0.25})
        assert writer.log_errors == 0 and "± 0.250".encode(encoding, "backslashreplace") in content()


def test_a_closed_stdout_is_no_error(tmp_path):
    command = f"{sys.executable} -m jmarl configs list >&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# --- files ---------------------------------------------------------------------------------------------------------------


def test_a_yaml_file_may_have_a_byte_order_mark_and_is_utf_8(tmp_path):
    file = tmp_path / "größe.yaml"
    file.write_bytes(b"\xef\xbb\xbfmodels: [caf\xc3\xa9]\n")
    assert read_yaml(file).tree == {"models": ["café"]}
    file.write_bytes(b"seed: 1\nmodels: [caf\xe9]\n")
    with pytest.raises(
        ValueError, match=r"größe.yaml, line 2, column 13 is not UTF-8 \(the byte 0xe9\): save the file as UTF-8"
    ):
        read_yaml(file)


@pytest.fixture
def config(tmp_path, tiny_dir, monkeypatch):
    """The path of a configuration; its directory, data, prompts and roles have names in other scripts."""
    where = tmp_path / "Größe 日本"
    where.mkdir()
    monkeypatch.chdir(where)
    monkeypatch.setattr(sys, "path", [str(where), *sys.path])
    rows = [json.dumps({"prompt": f"{country}の首都は?"}, ensure_ascii=False) for country in ("日本", "中国")]
    (where / "prompts_日.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (where / "rewards_in_japan.py").write_text("def length(a, b):\n    return [float(len(x)) for x in a]\n", encoding="utf-8")
    models = dict(models=[str(tiny_dir("llama"))] * 2, roles=["Schüler", "先生"])
    files = dict(data="prompts_日.jsonl", reward="rewards_in_japan:length", save_models=False, tensorboard=False)
    content = json.dumps(models | files | HOUSE | {"num_updates": 1}, ensure_ascii=False)
    (where / "lauf.yaml").write_text("\ufeff" + content, encoding="utf-8")
    return "lauf.yaml"


@pytest.mark.long
def test_a_run_in_a_directory_of_any_name_shows_its_prompts_on_a_terminal_of_ascii_trains_and_resumes(terminal, config):
    train = ["train", "--config", config, "--output", "läufe/日"]
    shown = terminal("ascii")
    assert main([*train, "--dry-run"]) == 0
    text = shown().decode("ascii")
    assert "\\u65e5\\u672c" in text and "Sch\\xfcler" in text and "would write to l\\xe4ufe/\\u65e5" in text
    assert main(train) == 0
    assert read_yaml("läufe/日/config.yaml").tree["team"]["roles"] == ["Schüler", "先生"]
    assert main(["train", "--config", "läufe/日", "--resume", "--dry-run"]) == 0
    assert "would resume from step 1 of 1" in shown().decode("ascii")
