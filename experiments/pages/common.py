"""What the pages share and no paper changes: flags, the agents they start from, padding, the line of an update."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from experiments.tiny import random_agents, tokenizer
from jmarl.models.hub.agents import Agent, load_agent


def make_flags(text: str | None, updates: int, rate: float) -> argparse.ArgumentParser:
    """Return the flags of a page. text: its docstring; updates, rate: defaults for agents of random weights."""
    flags = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="", help="what all agents start from, as for jmarl.load_agent; default: random")
    flags.add_argument("--updates", type=int, default=updates, help="updates of each agent")
    flags.add_argument("--rate", type=float, default=rate, help="learning rate")
    flags.add_argument("--seed", type=int, default=0, help="of weights, tasks and samples")
    return flags


def make_agents(model: str, words: tuple[str, ...], count: int, seed: int) -> list[Agent]:
    """Return `count` agents: of a model, else of different random weights, which read and write `words`."""
    return [load_agent(model)] * count if model else random_agents("random", tokenizer(words, spaced=True), count, seed)


def pad(rows: Sequence[Sequence[int]], width: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids [R, S], padded on the right to the longest row, or to `width` if that is more, and their lengths [R]."""
    width = max(width, *map(len, rows))
    return np.array([[*row, *[0] * (width - len(row))] for row in rows]), np.array([*map(len, rows)])


def show(update: int, name: str, value: float) -> None:
    """Print the line of an update with a bar for a value from 0 to 1."""
    print(f"update {update:3}  {name} {value:.2f}  {'#' * round(60 * value) if value == value else ''}", flush=True)
