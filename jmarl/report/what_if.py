"""Play a step of a run again in which an agent says something else, for a page that is served: `jmarl replay` in a process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jmarl.processes.children import with_launcher

MAX_TEXT, MAX_NUMBER, MAX_TURNS = 20_000, 10**9, 1000  # characters; MAX_NUMBER: of a step, a task and so on
MAX_LOG = 1 << 16  # bytes at the end of what a process says
NUMBERS = ("run", "step", "task", "agent", "turn")
# The run that is followed goes first: on the processor, and in the memory of a GPU.
NICENESS, SMALL = 10, {"PYTHONUTF8": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class WhatIf(NamedTuple):
    """What if the agent had said this? Numbers as in the completions of the run."""

    run: int
    step: int
    task: int
    agent: int
    turn: int
    joint: list[int]  # joint action of each turn
    say: str
    name: str | None = None  # of the run

    @staticmethod
    def of(body: bytes) -> WhatIf:
        """Return what a request asks. Raises ValueError where it has other fields or values."""

        def is_number(value: Any) -> bool:
            return type(value) is int and 0 <= value < MAX_NUMBER

        asked = json.loads(body)
        right = isinstance(asked, dict) and all(is_number(asked.get(name)) for name in NUMBERS)
        right = right and isinstance(asked.get("joint"), list) and all(map(is_number, asked["joint"][:MAX_TURNS]))
        text = asked.get("say") if right else None
        if not isinstance(text, str) or len(text) > MAX_TEXT or re.search("[\0\ud800-\udfff]", text):
            fields = f"{', '.join(NUMBERS)} as numbers, joint as a list of them"
            raise ValueError(f"give {fields}, and say: text without NUL and half characters, of up to {MAX_TEXT}")
        numbers = {name: asked[name] for name in NUMBERS}
        return WhatIf(**numbers, joint=asked["joint"][:MAX_TURNS], say=text, name=asked.get("name"))

    def command(self, path: Path) -> list[str]:
        """Return the command that answers it. path: directory of the run."""
        numbers = [f"--{name}={getattr(self, name)}" for name in NUMBERS if name != "run"]
        words = ["--json", *numbers, "--joint", *map(str, self.joint), f"--say={self.say}", "--", str(path.absolute())]
        return [sys.executable, "-m", "jmarl", "replay", *words]


class Replays:
    """Answers what is asked, one at a time."""

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def answers(self, asked: WhatIf, path: Path) -> Generator[dict[str, Any]]:
        """Yield `{"progress": line}` twice a second while a step is played again, then `{"result": ...}` of
        `jmarl replay --json`, or `{"error": sentence}`. The process ends when the generator is closed."""
        if not self.busy.acquire(blocking=False):
            yield {"error": "another message is being played: wait for its answer"}
            return
        try:
            with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
                yield from self.play(asked.command(path), output, log)
        finally:
            self.busy.release()

    def play(self, command: Sequence[str], output: BinaryIO, log: BinaryIO) -> Generator[dict[str, Any]]:
        """Run a command. output, log: files of what it prints and of what it says about itself."""
        with subprocess.Popen(
            with_launcher(command), stdin=subprocess.DEVNULL, stdout=output, stderr=log, env=os.environ | SMALL, process_group=0
        ) as process:
            self.process = process
            try:
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
                while process.poll() is None:
                    yield {"progress": last_line(log)}
                    time.sleep(0.5)
            finally:
                self.close()
        output.seek(0)
        if process.returncode < 0:
            yield {"error": f"the process was killed by {signal.Signals(-process.returncode).name}"}
        else:
            yield {"error": last_line(log)} if process.returncode else {"result": json.load(output)}

    def close(self) -> None:
        """End the process that plays, and those that it has started."""
        process, self.process = self.process, None
        if process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def last_line(log: BinaryIO) -> str:
    """Return the last line that jmarl has written to a file, which a process goes on writing."""
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), MAX_LOG, max(0, size - MAX_LOG)).decode("utf-8", "replace")
    return next(iter(re.findall(r"^jmarl(?: replay)?: (.*\S)", text, re.MULTILINE)[::-1]), "")
