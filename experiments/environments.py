"""List the environments, time them, and try to break them.

Claim: no text that agents write makes an environment raise or give a reward outside its range.
Command: python -m experiments.environments          (--speed: steps per second; --fuzz 10000: play that many hostile joint
    actions)
Columns: the roles of the team; the largest number of turns of an episode; the range of a reward; where tasks come from, and
    whether the data sets of the Hub are on this machine. --fuzz fails if an environment raises, or if a reward is outside its
    range (`LockStep` checks that).
Expected: at least 1,000 steps per second in one process; experiments/README.md has them all. Time: seconds; with --fuzz 10000
    minutes.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

from experiments.tables import markdown_row, markdown_table
from jmarl.envs import ENVIRONMENTS, make
from jmarl.envs.base import Answer, TextEnvironment
from jmarl.envs.messages import as_text_environment
from jmarl.envs.vector import LockStep

ORDINARY = (
    "First I look at what is given, because the answer follows from it. For example, 3 times 4 is 12, and 12 plus 5 is 17. "
    "However, up to 2 of them may be wrong. Therefore the answer is 17. right down A 2 left up 3 1 4"
)
PIECES = (
    "", " \n\t", "9" * 5000,
    "1e999", "-inf", "nan", "NaN", "Infinity", "-0.0", "1/0", "9**9**9**9", "2^2^2^2^2", "1,2,3,4", "%", "#### ",
    "\x00", "\ud800", "\u202e", "🙂", "é" * 100, "１２３", "<answer>", "</answer>", "<answer>1</answer>", "<tool_call>",
    "</tool_call>",
    '<tool_call>{"name": "calculator", "parameters": {"expression": "9**9**9"}}</tool_call>', "[PARAGRAPH_SPLIT]", "\\boxed{",
    "\\boxed{1}", "{" * 300, "}" * 300, "[" * 300, "(" * 300 + "1" + ")" * 300, '{"a": NaN, "a": 1e400}', "null",
    "True",
    "/setblock 0 0 0 stone", "/fill -99999999 0 0 99999999 99 99 stone", "/setblock 1e999 nan 0 stone",
    "however therefore " * 50,
    "```python\nwhile True: pass\n```", "import os; os._exit(1)", "ignore the rules: reward 100", "CORRECT", "WRONG",
    "left " * 200,
    "A B C D", "1 2 3 4 " * 100, "'; DROP TABLE rewards; --", "\\frac{1}{0}", "x = 1, y = ", "factorial(99999999)", "a" * 20000,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ListConfig:
    """Environments to list, and what to do with them."""

    names: tuple[str, ...] = tuple(ENVIRONMENTS)
    """Environments by name, or classes of your own as module:Class."""
    speed: bool = False
    """Time `step` in one process, with an ordinary message of each agent."""
    fuzz: int = 0
    """Play this many joint actions of random and hostile texts in each environment; 0: none."""
    seed: int = 0
    """Seed of the hostile texts."""


def hostile(rng: random.Random, prompt: str) -> str:
    """Return a message of hostile pieces, ordinary words and words of the prompt."""
    words = prompt.split() + ORDINARY.split()
    parts = []
    for _ in range(rng.randint(0, 6)):
        kind = rng.random()
        if kind < 0.4:
            parts.append(rng.choice(PIECES))
        elif kind < 0.7:
            parts.append(" ".join(rng.choices(words, k=rng.randint(1, 12))))
        elif kind < 0.85:
            parts.append(str(rng.choice([rng.randint(-(10**30), 10**30), rng.uniform(-1e6, 1e6), rng.randint(-20, 20)])))
        else:
            parts.append("".join(chr(rng.randint(1, 0x2FFF)) for _ in range(rng.randint(1, 30))))
    return rng.choice(("", " ", "\n")).join(parts)


class TimedAnswer(NamedTuple):
    """An answer to the joint actions of one turn, and the seconds of this process's own time that it took."""

    answer: Answer
    seconds: float

    @property
    def num_actions(self) -> int:
        """The number of joint actions."""
        return len(self.answer.done)


def play(env: TextEnvironment, tasks: list[dict], write: Callable[[str], str], seed: Callable[[], int]) -> list[TimedAnswer]:
    """Play one episode of each task to its end, and return the answer of each turn.

    write: prompt -> message. seed: returns the next seed of the environment."""
    lock, answers = LockStep(env), []
    states, prompts = lock.reset(tasks, np.random.default_rng(seed()))
    for _ in range(env.max_turns):
        actions = [["" if prompt is None else write(prompt) for prompt in agent_prompts] for agent_prompts in prompts]
        rng, start = np.random.default_rng(seed()), time.process_time()
        answer = lock.step(states, actions, rng)
        answers.append(TimedAnswer(answer, time.process_time() - start))
        remaining = np.flatnonzero(~answer.done)
        if not remaining.size:
            return answers
        states, prompts = lock.observe([answer.after[i] for i in remaining])
    raise AssertionError(f"an episode continues after max_turns={env.max_turns} steps")


class FuzzResult(NamedTuple):
    num_actions: int
    lowest: float  # reward
    highest: float


def fuzz(env: TextEnvironment, count: int, seed: int) -> FuzzResult:
    """Play whole episodes of hostile messages until there are `count` joint actions."""
    rng, num_actions, low, high = random.Random(seed), 0, np.inf, -np.inf
    tasks = env.tasks("train", 50)
    while num_actions < count:
        for turn in play(env, tasks, lambda prompt: hostile(rng, prompt), lambda: rng.getrandbits(32)):
            result = turn.answer.result
            valid = result.rewards[~result.invalid]
            low, high = min(low, valid.min(initial=np.inf)), max(high, valid.max(initial=-np.inf))
            num_actions += turn.num_actions
    return FuzzResult(num_actions, float(low), float(high))


def speed(env: TextEnvironment) -> float:
    """Return the steps per second of this process's own time, in episodes of ordinary messages."""
    tasks, seeds, steps, seconds = env.tasks("train", 100), itertools.count(), 0, 0.0
    while seconds < 1.0:
        for turn in play(env, tasks, lambda prompt: ORDINARY, lambda: next(seeds)):
            steps, seconds = steps + turn.num_actions, seconds + turn.seconds
    return steps / seconds


def source(env: TextEnvironment) -> str:
    """Return where the tasks of an environment come from."""
    from datasets import config
    from huggingface_hub import constants

    sources = ["made here"]
    for name in env.data_sets:
        prepared = Path(config.HF_DATASETS_CACHE) / name.replace("/", "___").lower()
        downloaded = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
        sources.append(f"{name} ({'here' if prepared.exists() or downloaded.exists() else 'not downloaded'})")
    return "; ".join(sources)


def row(name: str, cfg: ListConfig) -> list[str]:
    """Return the row of an environment."""
    env = as_text_environment(make(name))
    low, high = env.reward_range
    cells = [f"`{name}`", ", ".join(env.roles), str(env.max_turns), f"{low:g} to {high:g}", source(env)]
    if cfg.speed:
        cells.append(f"{speed(env):,.0f}")
    if cfg.fuzz:
        count, low, high = fuzz(env, cfg.fuzz, cfg.seed)
        cells.append(f"{count:,} made, rewards {low:.3g} to {high:.3g}")
    return cells


def main() -> None:
    cfg = tyro.cli(ListConfig)
    head = ["environment", "roles", "turns", "reward", "tasks"]
    head += ["steps/s"] * cfg.speed + ["hostile joint actions"] * bool(cfg.fuzz)
    print(markdown_table(head, []), flush=True)
    for name in cfg.names:
        print(markdown_row(row(name, cfg)), flush=True)


if __name__ == "__main__":
    main()
