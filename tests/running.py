"""What runs the texts that users read: documents, guides, examples, the README and experiments.

They are trained with one tiny model and in the same few sizes, so that they share programs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from safetensors.numpy import load_file

from jmarl.cli.main import main
from tests.house import HOUSE

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("JMARL_DATA") or ROOT.parent / "shared" / "data")
SIZES = {name: HOUSE[name] for name in ("num_updates", "num_prompts", "num_generations", "max_new_tokens")}
REAL = "smollm2-135m-instruct"  # in place of which the tiny model stands
SERVES = re.compile(r"http://\S+:\d+|127\.0\.0\.1:\d+")  # what a server prints when it can be called


def tiny_model(tiny_dir) -> str:
    """Return the directory of the tiny model; it reads long prompts."""
    return str(tiny_dir("llama", max_position_embeddings=4096))


def changed(text: str, *rules: Mapping[str, str]) -> str:
    """Return a text in which each rule has replaced something."""
    for old, new in (pair for rule in rules for pair in rule.items()):
        assert old in text, f"a rule changes nothing: there is no {old} in {text}"
        text = text.replace(old, new)
    return text


def small(text: str, model: str) -> str:
    """Return a YAML text with the tiny model, and small sizes where it has sizes."""
    text = text.replace(REAL, model)
    for name, size in (SIZES | {"held_out": 2}).items():
        text = re.sub(rf"(?m)^(\s*{name}: *)[\d.e]+", rf"\g<1>{size}", text)
    return text


class Done(NamedTuple):
    """How a command ended, and all that it printed."""

    code: int
    text: str


def call(words: Iterable[str], stops: bool = False) -> Done:
    """Run `jmarl …` or `python -m …` in this process. stops: it serves until Ctrl+C, which comes when it can be called."""
    name, *arguments = words
    out, ended = io.StringIO(), threading.Event()

    def stop() -> None:
        while not ended.wait(0.05):
            if SERVES.search(out.getvalue()):
                os.kill(os.getpid(), signal.SIGINT)
                ended.wait(2)  # once more if nobody has heard it

    stopper = threading.Thread(target=stop)
    with contextlib.ExitStack() as stack:
        for context in (contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings()):
            stack.enter_context(context)
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(mock.patch.object(sys, "argv", arguments[1:]))
        if stops:
            stopper.start()
        try:
            if name == "jmarl":
                return Done(main(arguments), out.getvalue())
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # another test has imported it
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            return Done(0, out.getvalue())
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            return Done(code, out.getvalue() + (end.code if isinstance(end.code, str) else ""))
        finally:
            ended.set()
            if stops:
                stopper.join()


def start(words: Iterable[str], **env: str) -> Done:
    """Run `python …` in a process of its own."""
    command = [sys.executable, *list(words)[1:]]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    return Done(done.returncode, done.stdout + done.stderr)


def rows(directory: str | Path) -> list[dict]:
    """Return the rows of metrics of a run."""
    return [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]


def rewards(directory: str | Path) -> list[float]:
    """Return the mean reward of each update of a run."""
    return [row["reward/mean"] for row in rows(directory) if "reward/mean" in row]


def differs(directory: str | Path, model: str) -> bool:
    """Return whether saved weights are other than those of the model."""
    before, after = (load_file(Path(path) / "model.safetensors") for path in (model, directory))
    return any((before[name] != after[name]).any() for name in before)
