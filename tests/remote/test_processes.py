"""Several processes of a run play episodes on servers: each owns the sessions of the episodes that it plays."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.processes.test_joined_processes import ENV
from tests.remote.served import SUM
from tests.remote.serving import serving

CHILD = """
import sys
import jmarl

jmarl.join_processes(timeout=60)

import numpy as np
from jmarl import make
from jmarl.envs.vector import LockStep
from jmarl.processes import exchange
from jmarl.processes.ending import Interrupted
from jmarl.rollout.chunks import divided
from tests.remote.playing import plain, play
from tests.remote.served import SUM, Sum

address, number = sys.argv[1], exchange.number()
far = make(SUM, servers={"address": address, "patience": 0.5})
tasks = [{"start": n} for n in range(5)]
sizes = []


def sessions(turn):
    sizes.append(sum(len(server.sessions) for server in far.engine.servers.all.values()))


both = divided(far)
assert both is not far and type(both.engine).__name__ == "DividedEngine"
equal = plain(play(both, tasks, between_turns=sessions)) == plain(play(LockStep(Sum()), tasks))
print(f"process {number}: equal {equal}, sessions {sizes}", flush=True)
exchange.wait_for_all()
if number == 0:
    far.engine.servers.patience = 0.1
    for server in far.engine.servers.all.values():  # this process alone reaches none
        server.connection.target = "127.0.0.1:1"
        far.engine.servers.lose(server, "the test says so")
try:
    both.reset(tasks, np.random.default_rng(0))
except Interrupted as reason:
    print(f"process {number}: interrupted {reason}"[:70], flush=True)
exchange.wait_for_all()
"""


@pytest.mark.long
def test_processes_play_their_shares_on_servers_and_are_interrupted_together(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    with serving(SUM) as (server,):
        command = [sys.executable, "-m", "jmarl", "launch", "--nproc-per-node", "2", "--log-dir", str(tmp_path), "--"]
        command += [str(tmp_path / "child.py"), server.address]
        done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [(tmp_path / f"rank_{rank}.txt").read_text() for rank in range(2)]
    own = [re.search(r"equal True, sessions \[(\d+), (\d+)\]", log) for log in logs]
    assert all(own), logs
    # Half of the 10 joint actions of the first turn each.
    assert [int(x[1]) for x in own if x] == [5, 5]
    assert all("interrupted because no server of" in log for log in logs)
