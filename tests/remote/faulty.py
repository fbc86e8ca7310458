"""Environments and a reward that servers and messages have trouble with, and how tests wait for what must come soon."""

from __future__ import annotations

import threading
import time

import numpy as np

from jmarl.envs.base import Step, TextEnvironment
from jmarl.remote.catalog import read_offer
from tests.remote.served import HERE

THIS = "tests.remote.faulty"
OFFER = read_offer(f"{HERE}:Sum,{THIS}:Long,{THIS}:Slow,{THIS}:Drifting", f"{HERE}:length,{HERE}:failing,{THIS}:slow")
LONG, SLOW, DRIFTING = f"{THIS}:Long", f"{THIS}:Slow", f"{THIS}:Drifting"
resets: list[int] = []  # of `Drifting`


class Long(TextEnvironment):
    """Shows and answers a thousand characters."""

    roles, reward_range, max_turns = ("agent",), (0.0, 1.0), 3

    def tasks(self, split="train", count=100, seed=0):
        return [{"text": "x" * task_size(split)} for _ in range(count)]

    def reset(self, task, rng):
        return {}, ["x" * 1000]

    def step(self, state, messages, rng):
        return Step(state, ["y" * 1000], 0.5, False)


class Slow(TextEnvironment):
    """Takes a twentieth of a second for a step."""

    roles, reward_range, max_turns = ("agent",), (0.0, 1.0), 3

    def reset(self, task, rng):
        return {}, ["x"]

    def step(self, state, messages, rng):
        time.sleep(0.05)
        return Step(state, ["y"], 0.5, False)


class Drifting(TextEnvironment):
    """Is no function of its task: rewards, and observations if the task says so, count the resets."""

    roles, reward_range, max_turns = ("agent",), (0.0, 1e6), 3

    def reset(self, task, rng):
        resets.append(len(resets))
        return {"number": resets[-1]}, [f"guess {resets[-1] if task['shown'] else ''}"]

    def step(self, state, messages, rng):
        return Step(state, ["wrong"], float(state["number"]), False)


def slow(left, right):
    time.sleep(0.5)
    return np.array([[1.0, 2.0]] * len(left))


def task_size(split):
    return 100_000 if split == "long" else 10


def soon(function, seconds=10):
    """Return what a function returns or raises, which must be soon."""
    results = []

    def run():
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"no end after {seconds} s"
    return results[0]


def eventually(condition, seconds=5):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.01)


def forget(server):
    """End all sessions of a server, as if they had had no calls for long."""
    server.call(lambda: [server.server.sessions._end(x) for x in [*server.server.sessions._sessions.values()]])
