"""Find the place of this process among those of a run: the coordinator's address, how many they are, and which one this is.

torchrun and `jmarl launch` say it in environment variables, which JAX does not read; Slurm, Open MPI and Kubernetes are
detected by JAX.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun and jmarl launch set, beside LOCAL_RANK
PER_PROCESS = "JMARL_DEVICES_PER_PROCESS"  # set by jmarl launch: how many devices each process must have
FIRST_PORT = 61440  # JAX's ports on Slurm begin here
NUM_PORTS = 4096


@dataclass(frozen=True)
class Place:
    """Where a process stands among the others."""

    address: str  # HOST:PORT of the coordinator, which is process 0
    process: int
    count: int
    local_devices: list[int] | None = None  # GPUs of this process by their numbers among the visible ones; None: all
    here: int | None = None  # processes on this host; None: unknown


def find_place(text: str, timeout: float, env: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place of this process, or None if it is the only one.

    Args:
        text: auto, HOST:PORT of process 0, or nothing: then only torchrun's variables count, if all of them are there.
        timeout: seconds that a name may take to be known on Kubernetes.

    Raises:
        ValueError: text is something else, or nothing says how many processes there are.
    """
    if text not in ("", "auto") and not re.fullmatch(r"\S+:\d{1,5}", text):
        raise ValueError(f"--distributed {text} is not allowed: give auto, or HOST:PORT of process 0 such as node1:29500")
    if text == "" and any(name not in env for name in LAUNCHER):
        return None
    if text not in ("", "auto") and "RANK" in env and "WORLD_SIZE" in env:
        place = _of_launcher(env, text)
    elif all(name in env for name in LAUNCHER):
        place = _of_launcher(env, f"{env['MASTER_ADDR']}:{_port(env)}")
    else:
        place = _of_cluster(None if text == "auto" else text, timeout, env)
    return place if place.count > 1 else None


def check_processes(asked: Mapping[str, int], place: Place | None) -> None:
    """Raise ValueError if the processes of a run are not those that the section `distributed` of a file asks for.

    asked: enabled (if false), num_nodes or nnodes, nproc_per_node, world_size, as far as given. place: that of this process;
    None: it is the only one."""
    count, here = (place.count, place.here) if place else (1, 1)
    if not asked.get("enabled", True):
        if count > 1:
            raise ValueError(f"distributed.enabled is false, and {count} processes have joined: set it to true, or start one")
        return
    nodes = count // here if here else None
    actual = {"num_nodes": nodes, "nnodes": nodes, "nproc_per_node": here, "world_size": count}
    for name, value in asked.items():
        if actual[name] not in (None, value):
            raise ValueError(
                f"distributed.{name}={value}, and here it is {actual[name]} ({count} processes): start them by jmarl launch "
                f"(--nnodes, --nproc-per-node), torchrun or srun, or change {name}"
            )


def _of_launcher(env: Mapping[str, str], address: str) -> Place:
    process, count = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if process >= count:
        raise ValueError(f"RANK={process} is not allowed: with WORLD_SIZE={count} it is at most {count - 1}")
    own, here = env.get("LOCAL_RANK"), env.get("LOCAL_WORLD_SIZE", "")
    on_host = int(here) if here else None
    return Place(address, process, count, _devices(env, int(own) if own else None, on_host), on_host)


def _port(env: Mapping[str, str]) -> int:
    """Return the coordinator's port: MASTER_PORT, or one that follows from it where torchrun's own process listens there.

    That one is below those which connections take, as MASTER_PORT itself may be."""
    port = _number(env, "MASTER_PORT")
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return port
    other = 10000 + port % 10000
    return other if other != port else port + 1


def _of_cluster(address: str | None, timeout: float, env: Mapping[str, str]) -> Place:
    """Return the place that JAX detects on Slurm, Open MPI or Kubernetes."""
    from jax._src.clusters import ClusterEnv  # initialize() would not say what it detects before it waits

    given = address is not None
    place = ClusterEnv.auto_detect_unset_distributed_params(address, None, None, None, None, round(timeout))
    address, count, process, own = place
    if address is None or count is None or process is None:
        missing = ", ".join(name for name in (LAUNCHER if address is None else LAUNCHER[:2]) if name not in env)
        raise ValueError(
            "nothing says how many processes there are: Slurm (srun), Open MPI (mpirun) and Kubernetes (an Indexed Job, with "
            f"pip install kubernetes) were not detected, and {missing} of torchrun and jmarl launch are not set"
        )
    if not given and "SLURM_STEP_ID" in env and "JAX_COORDINATOR_PORT" not in env:  # JAX takes one port for all steps of a job
        host, _, port = address.rpartition(":")
        step = int(env["SLURM_STEP_ID"])
        address = f"{host}:{FIRST_PORT + (int(port) - FIRST_PORT + step) % NUM_PORTS}" if step < NUM_PORTS else address
    on_host = _tasks_here(env)
    return Place(address, process, count, _devices(env, own[0] if own else None, on_host), on_host)


def _tasks_here(env: Mapping[str, str]) -> int | None:
    """Return the number of processes on this host, None where nothing says it."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in env:
        return int(env["OMPI_COMM_WORLD_LOCAL_SIZE"])
    text, counts = env.get("SLURM_STEP_TASKS_PER_NODE", ""), list[int]()
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):  # such as 2(x3),1
        counts += [int(count)] * int(times or 1)
    node = int(env.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else None


def _devices(env: Mapping[str, str], own: int | None, here: int | None) -> list[int] | None:
    """Return the GPU of one of several processes on a host: the one with its local rank.

    A process that is alone on its host, or sees only one GPU (as with Slurm's --gpus-per-task=1), takes all that it sees."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    sees_one = visible is not None and len(visible.split(",")) == 1
    if own is None or here == 1 or sees_one or "JAX_LOCAL_DEVICE_IDS" in env:
        return None
    return [own]


def _number(env: Mapping[str, str], name: str) -> int:
    if not env[name].isdecimal():
        raise ValueError(f"the environment variable {name}={env[name]!r} is not a number")
    return int(env[name])
