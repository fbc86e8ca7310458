"""Two hosts, as far as their network goes."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import NamedTuple

import pytest


class Hosts(NamedTuple):
    """Where two processes start: commands in front of theirs, and the address of the first."""

    prefixes: tuple = ((), ())
    address: str = "127.0.0.1"
    one: str = ""  # why both are this host


@pytest.fixture
def hosts():
    """Two network namespaces with a cable between them; twice this host where they cannot be made."""
    if os.geteuid() or shutil.which("ip") is None:
        yield Hosts(one="two network namespaces need root and the command ip")
        return
    names = [f"jmarl{os.getpid()}{end}" for end in "ab"]
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}"]
    for i, name in enumerate(names, 1):
        commands += [f"-n {name} addr add 10.77.42.{i}/24 dev cable"]
        commands += [f"-n {name} link set {device} up" for device in ("cable", "lo")]
    try:
        runs = (subprocess.run(["ip", *command.split()], capture_output=True, text=True) for command in commands)
        failed = next((done for done in runs if done.returncode), None)
        if failed:
            yield Hosts(one=f"two network namespaces cannot be made here: {failed.args}: {failed.stderr.strip()}")
        else:
            yield Hosts(tuple(("ip", "netns", "exec", name) for name in names), "10.77.42.1")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
