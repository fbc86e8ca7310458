"""Show the progress of a run on a terminal, or as lines where stdout is a file or a pipe. A closed stdout stops no run."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jmarl.logs.log_file import REWARD_TAG, Sink

LOSS_TAG = "loss"  # in runs without rewards
QUIET = 30.0  # seconds after which a line is shown, whatever a step does
SLOW = 10.0  # seconds from which on the time of preparing a run is shown
LINES = 200  # a step is shown when this share of the run's time has passed since the last line: old runs show fewer
WIDTH = 100  # widest line of a step
WORDS = {
    "sampling": "sampling", "rewards": "rewards", "data": "reading data", "update": "updating", "compiling": "compiling",
    "checkpoint": "saving", "evaluation": "evaluating", "idle": "working",
    "reference": "computing the log-probabilities of the reference",
}  # fmt: skip
AGENT_COLUMN = re.compile(r"(?:turn_\d+/)?agent_(\d+)/(\w+)")

console = logging.getLogger("jmarl.console")  # the lines that are printed, for the log of an attempt
console.setLevel(logging.INFO)
console.propagate = False
console.addHandler(logging.NullHandler())


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich would end the process


class Terminal(Sink):
    """Lines: one for each step while steps are slow or the run is young, later up to one in `QUIET` seconds; evaluations; and
    the phase of the run if nothing was shown for `QUIET` seconds. On a terminal a bar below them shows the phase at once. Rows
    need a reward or a loss.

    phase: returns the phase of the run and its seconds, see `goodput.Clock.reader`.
    """

    errors = (OSError, ValueError)  # ValueError: stdout was closed

    def __init__(self, total_steps: int, start_step: int, phase: Callable[[], tuple[str, float]]):
        self.total, self.first, self.phase = total_steps, max(start_step - 1, 0), phase  # first: steps done before
        self.done = self.first
        self.first_row: tuple[int, float] | None = None  # steps done at the first row, and when it was
        self.started = self.shown = time.monotonic()  # shown: when the last line was
        self.bar = self.task = None
        screen = _Console()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if sys.stdout is not None and screen.is_terminal and not screen.is_jupyter:
            columns = MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[phase]}"), TimeElapsedColumn()
            left = TextColumn("left"), TimeRemainingColumn()
            self.bar = Progress(*columns, *left, console=screen, auto_refresh=False)
            self.task = self.bar.add_task("", total=total_steps, completed=self.first, phase="")
            _to_stdout(self.bar.start)
        self._thread.start()

    def write(self, step: int, row: dict[str, float]) -> None:
        if "eval/updates" in row:
            self._evaluation(row)
        tag = next((tag for tag in (REWARD_TAG, LOSS_TAG) if tag in row), None)
        if tag is None:
            return
        self.done = done = step
        self.first_row = self.first_row or (done, time.monotonic())
        if self.bar is not None and self.task is not None:
            _to_stdout(partial(self.bar.update, self.task, completed=done, refresh=True))
        elapsed = time.monotonic() - self.started
        if done in (self.first + 1, self.total) or self._quiet_for() >= min(max(1.0, elapsed / LINES), QUIET):
            time_left = f"in {clock(elapsed)}" if done == self.total else f"left {self._left(done)}"
            width = WIDTH if self.bar is None else min(WIDTH, self.bar.console.width)
            self._line(step_line(f"step {done}/{self.total}", tag, row, time_left, width))

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        if self.bar is not None:
            _to_stdout(self.bar.stop)

    def _left(self, done: int) -> str:
        """Return the time that the steps left will take, as those so far but the first, which includes compiling."""
        first, then = self.first_row or (done, 0.0)
        return clock((time.monotonic() - then) / (done - first) * (self.total - done)) if done > first else "-"

    def _evaluation(self, row: dict[str, float]) -> None:
        """Show the result of an evaluation, above the bar if there is one."""
        name = next((name for name in ("reward", "loss") if f"eval/{name}" in row), None)
        if name is not None:
            half = row.get(f"eval/{name}_ci95", math.nan)  # of a single task there is none
            interval = f" ± {half:.3f}" if math.isfinite(half) else ""
            pairs = "".join(f", {x} {number_text(row[f'eval/{x}'], 2)}" for x in ("accuracy", "margin") if f"eval/{x}" in row)
            counted = ""
            if invalid := row.get("eval/reward/invalid", 0.0):
                counted = f" ({row['eval/episodes'] - invalid:.0f} of {row['eval/episodes']:.0f} episodes)"
            result = f"{row[f'eval/{name}']:.3f}{interval}{counted}{pairs}"
            self._line(f"held-out {name} {result} after {row['eval/updates']:.0f} updates")

    def _line(self, text: str) -> None:
        self.shown = time.monotonic()
        console.info(text)
        plain = dict(markup=False, highlight=False, soft_wrap=True)
        show = partial(self.bar.console.print, **plain) if self.bar is not None else partial(print, flush=True)
        _to_stdout(lambda: show(encodable(text)))

    def _quiet_for(self) -> float:
        return time.monotonic() - self.shown

    def _watch(self) -> None:
        """Show the phase, in the bar every second, else in a line whenever there was none for a while. Ends at `close`, or if
        stdout has closed."""
        with contextlib.suppress(*self.errors):
            while not self._closed.wait(1.0 if self.bar is not None else max(QUIET - self._quiet_for(), 0.01)):
                name, seconds = self.phase()
                text = WORDS.get(name, name) + (f" for {seconds:.0f} s" if seconds >= 1 else "")
                if self.bar is not None and self.task is not None:
                    self.bar.update(self.task, phase=text, refresh=True)
                elif self._quiet_for() >= QUIET:
                    passed = clock(time.monotonic() - self.started)
                    self._line(f"step {min(self.done + 1, self.total)}/{self.total}: {text}, {passed} since the start")


def step_line(step: str, tag: str, row: Mapping[str, float], time_left: str, width: int = WIDTH) -> str:
    """Return the line of a step: its reward or loss, also of each agent where they differ; accuracy and margin of pairs; tokens
    of a completion and entropy of each agent; and its seconds, with the phase that took most of them. The last of these are
    left out beyond `width`."""
    name = tag.partition("/")[0]
    own = numbers_of_agents(row, "return" if tag == REWARD_TAG else LOSS_TAG, 3)
    headline = f"{name} {number_text(row[tag], 3)}" + (f" (agents {', '.join(own)})" if len(set(own)) > 1 else "")
    fields = [step, headline]
    for column in ("accuracy", "margin"):
        values = numbers_of_agents(row, column, 2)
        fields += [f"{column} {listed(values[:1] if len(set(values)) == 1 else values)}"] if values else []
    fields += [
        f"{word} {listed(values)}"
        for word, column, digits in (("tokens", "length", 0), ("entropy", "entropy", 2))
        if (values := numbers_of_agents(row, column, digits))
    ]
    seconds = {phase: row.get(f"time/{phase}", 0.0) for phase in WORDS}
    if total := sum(seconds.values()):
        longest = max(seconds, key=seconds.__getitem__)
        fields.append(f"{total:.1f} s, {seconds[longest] / total:.0%} {WORDS[longest]}")
    while len(line := "  ".join([*fields, time_left])) > width and len(fields) > 2:
        fields.pop()
    return line


def numbers_of_agents(row: Mapping[str, float], column: str, digits: int) -> list[str]:
    """Return a column of each agent, the mean over turns, as texts; "-" for agents without one, and [] if no agent has one."""
    values: dict[int, list[float]] = {}
    for tag, value in row.items():
        if match := AGENT_COLUMN.fullmatch(tag):
            numbers = values.setdefault(int(match[1]), [])
            numbers += [value] if match[2] == column else []
    texts = [number_text(sum(x) / len(x), digits) if x else "-" for _, x in sorted(values.items())]
    return texts if any(values.values()) else []


def listed(texts: Sequence[str]) -> str:
    """Return numbers of agents as one text: all of a few, the lowest and the highest of many."""
    if len(texts) <= 4:
        return ", ".join(texts)
    values = sorted((text for text in texts if text != "-"), key=float)
    return f"{values[0]} to {values[-1]}"


def number_text(value: float, digits: int) -> str:
    """Return a number with so many digits behind the point; one that would read as zero in scientific notation."""
    return f"{value:.1e}" if 0 < abs(value) < 0.5 * 10**-digits else f"{value:.{digits}f}"


@contextlib.contextmanager
def watched(what: str, show: bool, phase: Callable[[], tuple[str, float]]) -> Iterator[None]:
    """Show what is done in the context, before a run is open: a line whenever `QUIET` seconds have passed, and one at the end.

    Args:
        what: such as "loading the models".
        show: whether lines are wanted.
        phase: see `Terminal`.
    """
    started, ended = time.monotonic(), threading.Event()

    def watch() -> None:
        while not ended.wait(QUIET):
            name, seconds = phase()
            say(f"{what}: {WORDS.get(name, name)} for {seconds:.0f} s, {clock(time.monotonic() - started)} since the start")

    thread = threading.Thread(target=watch, daemon=True)
    if show:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if show:
            thread.join()
    if show and (seconds := time.monotonic() - started) >= SLOW:
        say(f"{what} took {clock(seconds)}")


def say(line: str) -> None:
    """Print a line. Errors are ignored, because a closed stdout must not stop a run."""
    console.info(line)
    with contextlib.suppress(*Terminal.errors):
        _to_stdout(lambda: print(encodable(line), flush=True))


def encodable(text: str) -> str:
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


def clock(seconds: float) -> str:
    """Return seconds as h:mm:ss."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
