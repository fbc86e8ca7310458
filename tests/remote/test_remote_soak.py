"""Half an hour of episodes on servers that are killed at random: no step is lost, none is played twice, nothing leaks."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jmarl import make
from jmarl.envs.vector import InProcess
from tests.remote.served import SUM, Process, Sum, calls
from tests.remote.serving import again, kill

SECONDS = float(os.environ.get("JMARL_SOAK_SECONDS", 1800))
SERVERS, SESSIONS, TURNS, KILL_EVERY = 3, 64, 30, 20.0


def state_of_process():
    """Resident memory in KiB, descriptors and threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]), len(os.listdir("/proc/self/fd")), int(status["Threads"])


class Killer(threading.Thread):
    """Kills a random server every 20 s, and starts another one at its address."""

    def __init__(self, servers):
        super().__init__(daemon=True)
        self.servers, self.kills, self.over = servers, 0, threading.Event()

    def run(self):
        start = time.monotonic()
        while not self.over.wait(start + (self.kills + 1) * KILL_EVERY - time.monotonic()):  # to start one takes seconds
            i = random.randrange(len(self.servers))
            kill(self.servers[i])
            self.servers[i].close()
            self.servers[i], self.kills = again(self.servers[i], SUM), self.kills + 1


@pytest.mark.soak
def test_servers_that_are_killed_lose_no_step():
    servers = [Process(environments=SUM) for _ in range(SERVERS)]
    killer = Killer(servers)
    far, here = make(SUM, servers=[server.address for server in servers]).engine, InProcess(Sum())
    rng, end, seen, steps = np.random.default_rng(0), time.monotonic() + SECONDS, [], 0
    killer.start()
    try:
        while time.monotonic() < end:
            tasks, seeds = (
                [{"start": int(n)} for n in rng.integers(100, size=SESSIONS)],
                rng.integers(2**63, size=SESSIONS).tolist(),
            )
            ours, theirs = here.reset(tasks, seeds), far.reset(tasks, seeds)
            for _ in range(TURNS):
                # Observations tell all messages so far, and random numbers of each step: a step that is lost or played twice
                # shows in all that follow.
                assert [observations for _, observations in theirs] == [observations for _, observations in ours]
                messages = rng.integers(1, 15, size=(SESSIONS, 2)).astype(str).tolist()
                seeds = rng.integers(2**63, size=SESSIONS).tolist()
                our_steps = here.step([state for state, _ in ours], messages, seeds)
                their_steps = far.step([state for state, _ in theirs], messages, seeds)
                assert [step[1:] for step in their_steps] == [step[1:] for step in our_steps]
                ours, theirs = ([(step.state, step.observations) for step in x] for x in (our_steps, their_steps))
                steps += SESSIONS
                time.sleep(0.01)
            calls.clear()  # what the environment notes in this process
            seen.append(state_of_process())
    finally:
        killer.over.set()
        killer.join(60)
        for server in servers:  # also those that were started later
            server.close()
    memory, descriptors, threads = np.array(seen)[len(seen) // 4 :].T
    slope = np.polyfit(np.arange(len(memory)), memory, 1)[0] * len(memory)  # over the whole time
    print(f"{steps} steps, {killer.kills} kills, memory {memory[0]} to {memory[-1]} KiB (slope {slope:.0f} KiB), descriptors "
          f"{descriptors.min()} to {descriptors.max()}, threads {threads.min()} to {threads.max()}")  # fmt: skip
    assert killer.kills >= SECONDS // KILL_EVERY - 2 and slope < 20_000 and memory[-1] < memory[0] + 30_000
    assert descriptors.max() - descriptors.min() <= 20 and threads.max() - threads.min() <= 8
