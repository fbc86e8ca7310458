"""Machines that forbid something, or where root is none: the level that is found is one that holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
from jmarl.sandbox import Sandbox, Session, asserts
with Sandbox() as box:
    right = box.run("def f(x): return x", asserts("assert f(2) == 2"))
    wrong = box.run("import socket\\nsocket.socket()\\ndef f(x): return x", asserts("assert f(2) == 2"))
    print(box.level, right.outcome, wrong.outcome, Session(box).python("1 + 1").value, sorted(box.reasons))
"""
FORBIDDEN = 'for f in user mnt pid net ipc uts; do echo 0 > /proc/sys/user/max_${f}_namespaces; done; exec "$@"'
INSIDE = ["unshare", "-Ur", "sh", "-c"]
MACHINES = {
    "a container without root": (["unshare", "-Ur"], ("S4", "S3")),
    "no user namespaces": ([*INSIDE, FORBIDDEN.replace("user mnt pid net ipc uts", "user"), "sh"], ("S2",)),
    "no namespaces at all": ([*INSIDE, FORBIDDEN, "sh"], ("S2",)),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_level_is_one_that_holds(name):
    command, allowed = MACHINES[name]
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip(f"{name}: this machine makes no such one")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, timeout=60)
    if "S2" in allowed and "needs Linux 6.7" in done.stderr:
        pytest.skip(f"{name}: level S2: no Landlock here")
    level, *rest = done.stdout.split(maxsplit=4)
    assert level in allowed and rest[:3] == ["passed", "failed", "2"], done
    if allowed == ("S2",):
        assert rest[3].strip() == "['S3', 'S4']"
