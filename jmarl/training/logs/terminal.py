"""Show the progress of a run on a terminal, or as lines where stdout is a file or a pipe. A closed stdout stops no run."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jmarl.training.logs.sinks import REWARD_TAG, Sink

LOSS_TAG = "loss"  # in runs without rewards
SPEED_TAG = "tokens_per_s"
STEPS_PER_LINE = 10
QUIET = 30.0  # seconds after which a line is shown, whatever a step does

console = logging.getLogger("jmarl.console")  # the lines that are printed, for the log of an attempt
console.setLevel(logging.INFO)
console.propagate = False
console.addHandler(logging.NullHandler())


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich would end the process


class Terminal(Sink):
    """A progress bar on a terminal, else lines: for the first step, every tenth step, the last one, evaluations, and
    whatever a step does at least every `QUIET` seconds. Rows need a reward or a loss."""

    errors = (OSError, ValueError)  # ValueError: stdout was closed

    def __init__(self, total_steps: int, start_step: int):
        self.total, self.first = total_steps, start_step
        self.done = start_step
        self.first_row: tuple[int, float] | None = None  # steps done at the first row, and when it was
        self.started = self.shown = time.monotonic()  # shown: when the last line was
        self.bar = self.task = None
        screen = _Console()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._show_life, daemon=True)
        if sys.stdout is not None and screen.is_terminal and not screen.is_jupyter:
            texts = map(TextColumn, ("{task.fields[reward]}", "{task.fields[speed]} tokens/s"))
            columns = MofNCompleteColumn(), BarColumn(), *texts, TimeElapsedColumn(), TextColumn("left")
            self.bar = Progress(*columns, TimeRemainingColumn(), console=screen, auto_refresh=False)
            self.task = self.bar.add_task("", total=total_steps, completed=start_step, reward="", speed="-")
            _to_stdout(self.bar.start)
        else:
            self._thread.start()

    def write(self, step: int, row: dict[str, float]) -> None:
        if "eval/updates" in row:
            self._evaluation(row)
        tag = next((tag for tag in (REWARD_TAG, LOSS_TAG) if tag in row), None)
        if tag is None:
            return
        reward = f"{tag.partition('/')[0]} {row[tag]:.3f}"
        speed = f"{row[SPEED_TAG]:,.0f}" if SPEED_TAG in row else "-"
        self.done = done = step + 1
        self.first_row = self.first_row or (done, time.monotonic())
        if self.bar is not None and self.task is not None:
            shown = dict(completed=done, reward=reward, speed=speed, refresh=True)
            _to_stdout(partial(self.bar.update, self.task, **shown))
        elif done % STEPS_PER_LINE == 0 or done in (self.first + 1, self.total) or self._quiet_for() >= QUIET:
            elapsed = _clock(time.monotonic() - self.started)
            self._line(f"step {done}/{self.total}  {reward}  {speed} tokens/s  elapsed {elapsed}  left {self._left(done)}")

    def close(self) -> None:
        self._closed.set()
        if self.bar is not None:
            _to_stdout(self.bar.stop)
        else:
            self._thread.join()

    def _left(self, done: int) -> str:
        """Return the time that the steps left will take, as those so far but the first, which includes compiling."""
        first, then = self.first_row or (done, 0.0)
        if done > first or done == self.total:
            return _clock((time.monotonic() - then) / max(done - first, 1) * (self.total - done))
        return "-"

    def _evaluation(self, row: dict[str, float]) -> None:
        """Show the result of an evaluation, above the bar if there is one."""
        name = next((name for name in ("reward", "loss") if f"eval/{name}" in row), None)
        if name is not None:
            half = row.get(f"eval/{name}_ci95", math.nan)  # of a single task there is none
            interval = f" ± {half:.3f}" if math.isfinite(half) else ""
            self._line(f"held-out {name} {row[f'eval/{name}']:.3f}{interval} after {row['eval/updates']:.0f} updates")

    def _line(self, text: str) -> None:
        self.shown = time.monotonic()
        console.info(text)
        show = partial(self.bar.console.print, markup=False) if self.bar is not None else partial(print, flush=True)
        _to_stdout(lambda: show(printable(text)))

    def _quiet_for(self) -> float:
        return time.monotonic() - self.shown

    def _show_life(self) -> None:
        """Show a line whenever there was none for a while. Ends at `close`, or where stdout has closed."""
        with contextlib.suppress(*self.errors):
            while not self._closed.wait(max(QUIET - self._quiet_for(), 0.01)):
                if self._quiet_for() >= QUIET:
                    self._line(
                        f"after step {self.done}/{self.total}: working, elapsed {_clock(time.monotonic() - self.started)}"
                    )


def say(line: str) -> None:
    """Print a line. Errors are ignored, because a closed stdout must not stop a run."""
    console.info(line)
    with contextlib.suppress(*Terminal.errors):
        _to_stdout(lambda: print(printable(line), flush=True))


def printable(text: str) -> str:
    """Return text with escapes in place of the characters that stdout cannot show."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a stream of a notebook may have None
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _to_stdout(show: Callable[[], Any]) -> None:
    """Call a function that writes to stdout. If the pipe or terminal has closed, redirect stdout to the null device, so that
    flushing its buffer at the exit of the process does not fail."""
    if sys.stdout is None:
        raise OSError("there is no stdout")
    try:
        show()
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
        raise


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
