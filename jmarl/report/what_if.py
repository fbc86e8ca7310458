"""Play a step of a run again in which an agent says something else, for a page that is served: `jmarl replay` in a process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any, NamedTuple

MAX_TEXT, MAX_NUMBER, MAX_TURNS = 20_000, 10**9, 1000  # characters; MAX_NUMBER: of a step, a task and so on
NUMBERS = ("run", "step", "task", "agent", "turn")


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
            raise ValueError(f"give {fields}, and say: text of up to {MAX_TEXT} characters, without NUL and halves of them")
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
        self.process: subprocess.Popen[str] | None = None

    def answers(self, asked: WhatIf, path: Path) -> Generator[dict[str, Any]]:
        """Yield `{"progress": line}` while a step is played again, then `{"result": ...}` of `jmarl replay --json`, or
        `{"error": sentence}`. The process ends when the generator is closed."""
        if not self.busy.acquire(blocking=False):
            yield {"error": "another message is being played: wait for its answer"}
            return
        try:
            with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
                yield from self.lines(asked.command(path), output)
        finally:
            self.busy.release()

    def lines(self, command: list[str], output: IO[str]) -> Generator[dict[str, Any]]:
        """Run a command. output: the file of what it prints."""
        with subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, encoding="utf-8", errors="replace") as process:
            self.process, line = process, ""
            try:
                for line in map(str.strip, process.stderr or ()):
                    yield {"progress": line.removeprefix("jmarl: ")}
                code = process.wait()
            finally:
                process.kill()
        output.seek(0)
        yield (
            {"error": line.removeprefix("jmarl replay: ") or f"it ended with {code}"} if code else {"result": json.load(output)}
        )

    def close(self) -> None:
        """End the process that plays, if there is one."""
        if self.process:
            self.process.kill()
