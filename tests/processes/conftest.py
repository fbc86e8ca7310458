"""Two hosts, as far as their network goes."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


@pytest.fixture
def two_hosts():
    """Commands in front of those of two hosts, network namespaces with a cable between them; and the address of the first."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("two network namespaces need root and the command ip")
    names = [f"jmarl{os.getpid()}{end}" for end in "ab"]
    commands = [f"netns add {names[0]}", f"netns add {names[1]}"]
    commands += [f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}"]
    for i, name in enumerate(names):
        commands += [
            f"-n {name} addr add 10.77.42.{i + 1}/24 dev cable",
            f"-n {name} link set cable up",
            f"-n {name} link set lo up",
        ]
    try:
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"two network namespaces cannot be made here: ip {command}: {done.stderr.strip()}")
        yield [("ip", "netns", "exec", name) for name in names], "10.77.42.1"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
