"""Options that every environment has, whatever its constructor takes (host code, no jax).

    make("math", reward_scale=2.0, reward_clip=1.0, problems="own.jsonl")

reward_scale, reward_bias, reward_clip: the reward r becomes clip(reward_scale * r + reward_bias), between -c and c for one
number c, or between the two numbers of a list. problems: the tasks, a list of dicts or a .json or .jsonl file of them, instead
of those that the environment makes; a fifth of them is the split eval. timeout: seconds that a program may take, where the
environment runs programs. servers: where the environment is played instead of here, see `jmarl.remote.client`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jmarl.envs.base import TextEnvironment
from jmarl.envs.data import check_split, split_rows
from jmarl.envs.messages import SimulatedEnvironment
from jmarl.envs.reward_values import Processor
from jmarl.envs.rewards import RewardProcessors
from jmarl.envs.rows import read_rows
from jmarl.envs.vector import LockStep
from jmarl.lazy import Table

GENERAL = ("reward_scale", "reward_clip", "reward_bias", "problems")
# What an option needs of another room.
GUESTS = Table[Any]({"servers": "jmarl.remote:make_remote", "timeout": "jmarl.sandbox:Limits"})


class OwnTasks:
    """Tasks of the user, split into train and eval by a hash of their content."""

    def __init__(self, rows: Sequence[Mapping]):
        if not rows or not all(isinstance(row, Mapping) for row in rows):
            raise ValueError(f"problems is a list of dicts, got {rows!r:.80}")
        self.rows = [dict(row) for row in rows]

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return up to `count` tasks of a split in random order, the same for the same seed."""
        check_split(split)
        rows = split_rows([json.dumps(row, sort_keys=True) for row in self.rows], split)
        return [json.loads(rows[i]) for i in np.random.default_rng(seed).permutation(len(rows))[:count]]

    def describe(self) -> dict[str, Any]:
        """Return what must be unchanged when a run is resumed."""
        return {"problems": len(self.rows)}


class WithOptions(LockStep):
    """An environment with a processed reward, or with tasks of the user."""

    def __init__(self, env: TextEnvironment | SimulatedEnvironment, options: Mapping[str, Any]):
        super().__init__(env, processor=reward_processor(options))
        self.own_tasks = OwnTasks(read_rows(options["problems"])) if "problems" in options else None
        self.reward_options = {name: options[name] for name in GENERAL[:3] if name in options}

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        return (self.own_tasks or self.env).tasks(split, count, seed)

    def describe(self) -> dict[str, Any]:
        return super().describe() | self.reward_options | (self.own_tasks.describe() if self.own_tasks else {})


def reward_processor(options: Mapping[str, Any]) -> Processor | None:
    """Return the processor of reward_scale, reward_bias and reward_clip; None without them."""
    for name in GENERAL[:3]:
        values = options.get(name, 0)
        values = values if name == "reward_clip" and isinstance(values, list | tuple) else [values]
        if not all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in values):
            raise ValueError(f"{name}={options[name]!r} is not allowed: give a number")
    steps = []
    if "reward_scale" in options:
        steps.append(RewardProcessors.scale(options["reward_scale"]))
    if "reward_bias" in options:
        steps.append(RewardProcessors.shift(options["reward_bias"]))
    if "reward_clip" in options:
        clip = options["reward_clip"]
        low, high = clip if isinstance(clip, list | tuple) else (-abs(clip), abs(clip))
        steps.append(RewardProcessors.clamp(low, high))
    return RewardProcessors.chain(steps) if steps else None


def split_options(cls: type, options: Mapping[str, Any], own: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a constructor, and the options of this file. own: the parameters of the constructor."""
    general = {name: value for name, value in options.items() if name in GENERAL and name not in own}
    arguments = {name: value for name, value in options.items() if name not in general}
    if "timeout" in arguments and "timeout" not in own and "limits" in own:
        default, seconds = inspect.signature(cls).parameters["limits"].default, arguments.pop("timeout")
        Limits = GUESTS["timeout"]
        limits = default if isinstance(default, Limits) else Limits()
        arguments["limits"] = dataclasses.replace(limits, wall_s=seconds, cpu_s=max(1, math.ceil(seconds)))
    return arguments, general
