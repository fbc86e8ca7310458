"""Join this process to the others of a run, by JAX's own distributed runtime.

All devices of all processes are then one list for JAX. What is added here: torchrun's variables, which GPU a process takes, a
meeting with a time-out and words (`meeting.py`), and an end of all processes when one fails (`ending.py`).
"""

from __future__ import annotations

import collections
import functools
import os
import socket
from collections.abc import Callable

from jmarl.processes import ending
from jmarl.processes.meeting import is_loopback, meet
from jmarl.processes.place import PER_PROCESS, Place, find_place

HEARTBEAT = 30  # seconds without a heartbeat after which JAX ends the others; they come from a thread, also while Python waits
NO_PROXY = "no_grpc_proxy"  # hosts that JAX's connections reach without a proxy; gRPC reads it in small letters
HTTP_NO_PROXY = "no_proxy"

_place: Place | None = None


def joined_place() -> Place | None:
    """Return the place of this process among those that have joined; None if it is the only one."""
    return _place


def join_processes(text: str = "", timeout: float = 60.0) -> None:
    """Join this process to the others of a run; does nothing if it is the only one, or has joined before.

    Call it before anything uses the devices of JAX. When one process then fails, all others end within a minute.

    Args:
        text: auto (what torchrun, jmarl launch, Slurm, Open MPI or Kubernetes say), or HOST:PORT of process 0; with nothing,
            only what torchrun and jmarl launch say counts.
        timeout: seconds in which all processes must be there.

    Raises:
        ValueError: nothing says how many processes there are, or they have other devices than was asked for.
        RuntimeError: not all processes came in time, or JAX has started already.
    """
    global _place
    if _place is not None:
        return
    place = find_place(text, timeout)
    if place is None:
        return
    import jax
    from jax._src import distributed, xla_bridge

    if xla_bridge.backends_are_initialized():
        raise RuntimeError("the processes are joined too late: call jmarl.join_processes before anything uses JAX's devices")
    own = meet(place, timeout, functools.partial(ending.say, place.process))
    without = os.environ.get(NO_PROXY) or os.environ.get(HTTP_NO_PROXY, "")
    os.environ[NO_PROXY] = ",".join(filter(None, [without, place.address.rpartition(":")[0]]))
    jax.config.update("jax_check_proxy_envs", False)  # of proxies, which are not asked for the coordinator then
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which ends a run after its update
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        place.address,
        place.count,
        place.process,
        place.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(round(timeout), 1),
        heartbeat_timeout_seconds=HEARTBEAT,
    )
    _place = place
    ending.watch(distributed.global_state.client, place.process, place.count)
    _connect_hosts(own)
    check_devices([device.process_index for device in jax.devices()], place, os.environ.get(PER_PROCESS, ""))
    if place.process == 0:
        ending.say(0, f"{place.count} processes have joined: {jax.device_count()} devices ({jax.default_backend()})")


def _connect_hosts(own: str) -> None:
    """Let gloo use the address by which this host reaches the coordinator, where its name leads to itself: gloo tells the
    others the address of the host's name, which Debian's /etc/hosts sets to 127.0.1.1."""
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "127.0.0.1"
    if is_loopback(named) and not is_loopback(own):
        make: Callable = _jax.make_gloo_tcp_collectives
        _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=own)  # type: ignore[assignment]


def check_devices(process_of: list[int], place: Place, per_process: str) -> None:
    """Raise ValueError if the processes do not have equally many devices, or others than jmarl launch has given them.

    process_of: the process of each device. per_process: how many each should have; empty: any number."""
    counts = collections.Counter(process_of)
    least, most = (choose(range(place.count), key=lambda n: counts[n]) for choose in (min, max))
    if counts[least] != counts[most]:
        raise ValueError(
            f"the {place.count} processes have {len(process_of)} devices, process {most} {counts[most]} and process {least} "
            f"{counts[least]}: give all equally many (CUDA_VISIBLE_DEVICES, JAX_NUM_CPU_DEVICES)"
        )
    if per_process and counts[least] != int(per_process):
        raise ValueError(
            f"the {place.count} processes have {len(process_of)} devices, {counts[least]} each, and {per_process} each were "
            "asked for: see --devices-per-process, CUDA_VISIBLE_DEVICES and `jmarl info`"
        )
