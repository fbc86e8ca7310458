"""Several processes of `jax.distributed`: training is refused, and no function returns a wrong result silently."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import sys
import jax

port, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)

import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmarl.config import TrainConfig
from jmarl.models.sharding import make_mesh
from jmarl.models.stack import unstack
from jmarl.runs import checks, seeds
from jmarl.types import Shared


def refused(name, call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        print(f"{name}: {error}", flush=True)
    else:
        print(f"{name}: not refused", flush=True)


stacked = np.arange(8.0).reshape(2, 4)
for mesh, axes in (("data=2", P(None, "data")), ("agent=2", P("agent"))):
    where = NamedSharding(make_mesh(mesh).mesh, axes)
    spread = jax.make_array_from_callback(stacked.shape, where, lambda index: stacked[index])
    refused(mesh, lambda: unstack({"w": spread}, 0))
here = jax.device_put(stacked, jax.local_devices()[0])
assert (np.asarray(unstack({"w": here, "base": Shared(here)}, 1)["w"]) == stacked[1]).all()

items, cfg = [{"prompt": "a"}], TrainConfig.of(num_updates=1)
refused("train", lambda: checks.check_run(items, cfg, None))
refused("experiments", lambda: checks.check_settings(cfg))
refused("seeds", lambda: seeds.check_seeds([0, 1], cfg))
refused("fit", lambda: checks.check_fit(TrainConfig.of(algorithm="sft", num_updates=1), None))
"""


@pytest.fixture(scope="module")
def outputs_of_processes():
    """The lines that each of two processes prints: name -> message."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    options = dict(env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen([sys.executable, "-c", CHILD, port, str(i)], **options) for i in range(2)]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [dict(line.split(": ", 1) for line in output.splitlines() if ": " in line) for output, _ in outputs]


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data=2", "agent=2"])
def test_arrays_spread_over_processes_are_not_unstacked(outputs_of_processes, mesh):
    for messages in outputs_of_processes:
        assert "an array [2, 4] is spread over 2 processes, and this one holds only a part of it" in messages[mesh]


@pytest.mark.long
@pytest.mark.parametrize("entry", ["train", "experiments", "seeds", "fit"])
def test_training_in_several_processes_is_refused(outputs_of_processes, entry):
    for messages in outputs_of_processes:
        assert messages[entry].startswith("training runs in one process, and jax.distributed has joined 2")
