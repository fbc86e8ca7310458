"""Count what a run on CPUs holds beside the arrays of its programs: its process, and copies of weights on the host.

The process of a plan imports and compiles what the process of the run does, so its own memory is measured for it. The compiler
gives back little of what it takes. A run whose programs are in the persistent cache already compiles nothing and needs less.
"""

import ctypes
import gc
import resource
import sys
from pathlib import Path

from jmarl.config import TrainConfig
from jmarl.files.saved_arrays import nbytes
from jmarl.team import Team

STATUS = Path("/proc/self/status")  # on Linux


def parts_of_process(team: Team, cfg: TrainConfig) -> dict[str, int]:
    """Return the bytes of each part. Call it after the run's programs were compiled, and before anything runs."""
    if cfg.run.output_dir and cfg.run.tensorboard:
        from tensorboard.plugins.text import summary_v2  # noqa: F401  (the run imports it too)
    gguf = [agent for agent in team.agents if agent.name.endswith(".gguf")]  # other files are read a layer at a time
    loaded = {agent.name: agent.params for agent in gguf}
    return {"Python, JAX and its compiler": peak_of_process()} | ({"weights as loaded": nbytes(loaded)} if loaded else {})


def peak_of_process() -> int:
    """Return the largest number of bytes that this process has had in memory so far.

    Linux's getrusage would also count the process that started this one.
    """
    if STATUS.is_file():
        return _of_status("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def memory_now() -> int | None:
    """Return the number of bytes that this process has in memory; None where only its peak is known.

    What was freed is given back to the system first, so that differences are those of what is in use.
    """
    if not STATUS.is_file():
        return None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _of_status("VmRSS")


def restart_peak() -> None:
    """Let `peak_of_process` begin again; a no-op where `memory_now` is None."""
    memory_now()
    if STATUS.is_file():
        STATUS.with_name("clear_refs").write_text("5", encoding="utf-8")


def _of_status(name: str) -> int:
    return 1024 * int(STATUS.read_text(encoding="utf-8").split(f"{name}:")[1].split()[0])


def checkpoints_beside_steps(cfg: TrainConfig) -> bool:
    """Return whether checkpoints are written while the next step runs: all but the one at the end of a run are."""
    return (cfg.run.save_every or 1) < cfg.run.num_updates


def writes_checkpoints(cfg: TrainConfig) -> bool:
    """Return whether a run writes checkpoints, at least at its end."""
    return bool(cfg.run.output_dir) and cfg.run.save_every != 0
