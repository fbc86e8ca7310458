"""Thousands of updates leak nothing: memory, descriptors, threads, processes, temporary files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import theilslopes

ROOT = Path(__file__).resolve().parents[2]
UPDATES, EVERY, WARM = 2000, 100, 600

CHILD = """
import gc, json, os, sys, tempfile
from pathlib import Path
from experiments.tiny import random_agents, tokenizer
from jmarl.config import TrainConfig
from jmarl.team import make_team
from jmarl.runs.train import train

directory, updates, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
seen, calls = [], 0

def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]  # state and parent
    except OSError:
        return ["", ""]

def reward(a, b):
    global calls
    calls += 1
    if calls % every == 0:
        gc.collect()  # what is only waiting to be collected is no leak
        children = [state for pid in os.listdir("/proc") if pid.isdigit() for state, parent in [state_of(pid)]
                    if parent == str(os.getpid())]
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        seen.append({
            "update": calls, "rss_kb": int(status["VmRSS"].split()[0]), "threads": int(status["Threads"]),
            "descriptors": len(os.listdir("/proc/self/fd")), "children": len(children), "zombies": children.count("Z"),
            "temporary": len(list(Path(tempfile.gettempdir()).rglob("*"))),
        })
    return [float(len(x)) for x in a]

team, params = make_team(random_agents("tiny", tokenizer(("a", "b")), 2, seed=0, width=8))
cfg = TrainConfig.of(num_updates=updates, num_generations=2, max_new_tokens=2, output_dir=directory, save_every=every,
                     log_every=every, progress=False)
train(team, reward, [{"prompt": "a b"}, {"prompt": "b"}], cfg, params=params)
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_two_thousand_updates_leave_nothing_behind(tmp_path):
    """Samples are taken in the reward function; the first ones do not count, because caches fill up."""
    (tmp_path / "tmp").mkdir()
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-c", CHILD, str(tmp_path / "run"), str(UPDATES), str(EVERY)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert [row["update"] for row in seen] == list(range(EVERY, UPDATES + 1, EVERY))
    warm = [row for row in seen if row["update"] > WARM]
    # The median over pairs: memory that is given back at one time hides no growth at all others.
    slope = theilslopes([row["rss_kb"] for row in warm], [row["update"] for row in warm])[0] * 100 / 1024
    assert slope < 1, f"memory grows by {slope:.2f} MB in 100 updates: {[row['rss_kb'] for row in seen]}"
    for name in ("descriptors", "threads", "children", "zombies", "temporary"):
        counts = [row[name] for row in warm]
        assert max(counts) <= counts[0] + 2, f"{name} grows: {[row[name] for row in seen]}"  # a save may be under way
        slope = np.polyfit(range(len(counts)), counts, 1)[0]
        limit = 0.5 if name == "threads" else 0.1  # the pools of JAX may add one thread in all
        assert slope < limit, f"{name} grows: {[row[name] for row in seen]}"
