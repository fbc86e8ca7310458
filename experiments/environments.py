"""List the environments, time them, and try to break them.

Command: python -m experiments.environments          (--speed: steps a second; --fuzz 10000: so many hostile joint actions each)
Columns: the team's roles; turns of an episode at most; range of a reward; where tasks come from, and whether a data set of the
hub is on this machine. --fuzz fails if an environment raises, or gives a reward outside its range (`LockStep` refuses it).
Expected: at least 1,000 steps a second in one process, see experiments/README.md. Time: seconds; with --fuzz 10000 minutes.
"""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path

import numpy as np
import tyro

from jmarl.envs import ENVIRONMENTS, make
from jmarl.envs.base import TextEnvironment
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
    """What to do beside listing."""

    names: tuple[str, ...] = tuple(ENVIRONMENTS)
    """Environments, or classes of your own as module:Class."""
    speed: bool = False
    """Time `step` in one process, with an ordinary message of each agent."""
    fuzz: int = 0
    """Play so many joint actions of random and hostile texts in each."""
    seed: int = 0
    """Of the hostile texts."""


def hostile(rng: random.Random, read: str | None) -> str:
    """A message made of hostile pieces, ordinary words and what the agent read."""
    words = (read or "").split() + ORDINARY.split()
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


def fuzzed(env: TextEnvironment, count: int, seed: int) -> tuple[int, float, float]:
    """Play until `count` joint actions are made: how many, and the least and the largest reward seen."""
    lock, rng, made, low, high = LockStep(env), random.Random(seed), 0, np.inf, -np.inf
    tasks = env.tasks("train", 50)
    while made < count:
        states, read = lock.reset(tasks, np.random.default_rng(rng.getrandbits(32)))
        for _ in range(env.max_turns):
            said = [["" if text is None else hostile(rng, text) for text in of_agent] for of_agent in read]
            answer = lock.step(states, said, np.random.default_rng(rng.getrandbits(32)))
            made += len(states)
            valid = answer.result.rewards[~answer.result.invalid]
            low, high = min(low, valid.min(initial=np.inf)), max(high, valid.max(initial=-np.inf))
            going = np.flatnonzero(~answer.done)
            if not going.size:
                break
            states, read = lock.observe([answer.after[i] for i in going])
        else:
            raise AssertionError(f"an episode goes on after max_turns={env.max_turns} steps")
    return made, float(low), float(high)


def speed(env: TextEnvironment) -> float:
    """Steps a second of this process's own time, of episodes played to their end."""
    lock, steps, spent = LockStep(env), 0, 0.0
    tasks = env.tasks("train", 100)
    while spent < 1.0:
        states, read = lock.reset(tasks, np.random.default_rng(steps))
        for _ in range(env.max_turns):
            said = [["" if text is None else ORDINARY for text in of_agent] for of_agent in read]
            began = time.process_time()
            answer = lock.step(states, said, np.random.default_rng(steps))
            spent, steps = spent + time.process_time() - began, steps + len(states)
            going = np.flatnonzero(~answer.done)
            if not going.size:
                break
            states, read = lock.observe([answer.after[i] for i in going])
    return steps / spent


def source(env: TextEnvironment) -> str:
    """Where its tasks come from."""
    from datasets import config
    from huggingface_hub import constants

    found = ["made here"]
    for name in env.data_sets:
        kept = Path(config.HF_DATASETS_CACHE) / name.replace("/", "___").lower()
        downloaded = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
        found.append(f"{name} ({'here' if kept.exists() or downloaded.exists() else 'not downloaded'})")
    return "; ".join(found)


def row(name: str, cfg: ListConfig) -> list[str]:
    env = as_text_environment(make(name))
    low, high = env.reward_range
    told = [f"`{name}`", ", ".join(env.roles), str(env.max_turns), f"{low:g} to {high:g}", source(env)]
    if cfg.speed:
        told.append(f"{speed(env):,.0f}")
    if cfg.fuzz:
        made, low, high = fuzzed(env, cfg.fuzz, cfg.seed)
        told.append(f"{made:,} made, rewards {low:.3g} to {high:.3g}")
    return told


def main() -> None:
    cfg = tyro.cli(ListConfig)
    head = [
        "environment",
        "roles",
        "turns",
        "reward",
        "tasks",
        *["steps/s"] * cfg.speed,
        *["hostile joint actions"] * bool(cfg.fuzz),
    ]
    for cells in (head, ["---"] * len(head), *(row(name, cfg) for name in cfg.names)):
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
