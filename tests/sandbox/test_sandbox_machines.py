"""On machines that restrict namespaces, or where root has no privileges, the level that auto chooses holds."""

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
FORBID_NAMESPACES = 'for f in user mnt pid net ipc uts; do echo 0 > /proc/sys/user/max_${f}_namespaces; done; exec "$@"'
IN_NAMESPACE = ["unshare", "-Ur", "sh", "-c"]
MACHINES = {
    "a container without root": (["unshare", "-Ur"], ("S4", "S3")),
    "no user namespaces": ([*IN_NAMESPACE, FORBID_NAMESPACES.replace("user mnt pid net ipc uts", "user"), "sh"], ("S2",)),
    "no namespaces at all": ([*IN_NAMESPACE, FORBID_NAMESPACES, "sh"], ("S2",)),
}


@pytest.mark.parametrize("name", MACHINES)
def test_auto_chooses_a_level_that_holds(name: str) -> None:
    command, allowed = MACHINES[name]
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip(f"{name}: it cannot be imitated on this machine")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    completed = subprocess.run([*command, sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, timeout=60)
    if "S2" in allowed and "needs Linux 6.7" in completed.stderr:
        pytest.skip(f"{name}: level S2: no Landlock here")
    level, right, wrong, value, reasons = completed.stdout.split(maxsplit=4)
    assert level in allowed and (right, wrong, value) == ("passed", "failed", "2"), completed
    if allowed == ("S2",):
        assert reasons.strip() == "['S3', 'S4']"
