"""Print one joint action a minute: its prompts, what the agents wrote, and the reward. `jmarl train -v` switches it on, and so
does `logging.getLogger("jmarl.samples").setLevel("INFO")`."""

from __future__ import annotations

import logging
import sys
import textwrap
import time
from collections.abc import Mapping
from typing import Any

from jmarl.logs.completions_file import TRAIN
from jmarl.logs.log_file import Sink
from jmarl.logs.terminal import Terminal, say

SAMPLES = logging.getLogger("jmarl.samples")  # only its level is used
SAMPLES.setLevel(logging.WARNING)
EVERY = 60.0  # seconds
WIDTH, MAX_LINES = 100, 12  # of a text


class Samples(Sink):
    """Prints the first joint actions of a run, and then one a minute, if the level of `SAMPLES` is INFO."""

    errors = Terminal.errors

    def __init__(self) -> None:
        self.next = 0.0  # `time.monotonic()` of the next one

    def write(self, step: int, row: dict[str, float]) -> None:
        """Do nothing: a terminal has a line for numbers."""

    def completions(self, step: int, kind: str, record: Mapping[str, Any]) -> None:
        if kind == TRAIN and are_on() and time.monotonic() >= self.next:
            self.next = time.monotonic() + EVERY
            say("\n".join(sample_lines(step, record)))


def are_on() -> bool:
    """Return whether samples are printed."""
    return SAMPLES.isEnabledFor(logging.INFO)


def sample_lines(step: int, record: Mapping[str, Any]) -> list[str]:
    """Return a joint action of the first turn of a step as lines, another one in each step.

    record: see `completions_file`.
    """
    turn = record["turns"][0]
    num_prompts, num_actions = len(turn["items"]), len(turn["joint"])
    p, j = (step - 1) % num_prompts, (step - 1) // num_prompts % num_actions
    rewards = ["none" if x is None else f"{x:.4g}" for x in turn["rewards"][p][j]]
    reward = rewards[0] if len(set(rewards)) == 1 else " | ".join(rewards)
    lines = [f"-- step {step}, prompt {p + 1} of {num_prompts}, joint action {j + 1} of {num_actions}: reward {reward}"]
    before = None
    for agent, texts in enumerate(turn["completions"]):
        if not turn["acts"][agent][p]:
            continue
        if (prompt := turn["prompts"][agent][p]) != before:
            lines += [f"agent {agent} reads:", *block(prompt, WIDTH, MAX_LINES)]
        before = prompt
        lines += [f"agent {agent} writes:", *block(texts[p][turn["joint"][j][agent]], WIDTH, MAX_LINES)]
    return lines


def block(text: str, width: int, max_lines: int = sys.maxsize) -> list[str]:
    """Return a text as indented lines of up to `width` columns, without control characters. Of one with more than `max_lines`
    the middle is left out."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    wrap = textwrap.TextWrapper(width - 4, replace_whitespace=False)
    lines = [f"    {part}".rstrip() for line in shown.split("\n") for part in wrap.wrap(line) or [""]]
    if len(lines) <= max_lines:
        return lines
    half = max_lines // 2
    return [*lines[:half], f"    ... {len(lines) - 2 * half} more lines ...", *lines[-half:]]
