"""The first lines that a run shows: who learns from what, where, and where to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from jmarl.config import TrainConfig
from jmarl.envs.data import Trajectory
from jmarl.files.interrupt import line_of_ignored
from jmarl.files.run_files import shown
from jmarl.learning.meshes import line_of_cores, line_of_mesh
from jmarl.logs.terminal import say
from jmarl.models import lora
from jmarl.models.sharding import mesh_for
from jmarl.models.weights import num_params
from jmarl.runs.run import Task
from jmarl.team import Team


def first_words(team: Team, task: Task, cfg: TrainConfig, num_runs: int) -> None:
    """Show the first lines of a run, if it shows anything. num_runs: of this team that learn together."""
    mesh = mesh_for(cfg.run.mesh, [num_runs * len(spec.members) for spec in team.stacks], cfg.run.strategy)
    if task.env is None:
        lines = [line_of_run(team, cfg), line_of_data(task.items, task.held_out), task.overlap]
    else:
        lines = [task.overlap, line_of_run(team, cfg, getattr(task.env, "roles", ()))]
    lines += [line_of_mesh(mesh, cfg) if mesh else line_of_cores(team), line_of_ignored()]
    for line in filter(None, lines if cfg.run.progress else []):
        say(line)


def line_of_run(team: Team, cfg: TrainConfig, roles: Sequence[str] = ()) -> str:
    """Return who learns, where, how long, and where to. roles: of the agents in their environment."""
    counts = [len(spec.members) for spec in team.stacks]
    stacks = list(zip(counts, team.stacks, strict=True))
    sizes = " + ".join(f"{count} x {short_number(num_params(spec.config))}" for count, spec in stacks)
    devices = jax.devices()
    where = f"written to {shown(cfg.run.output_dir)}" if cfg.run.output_dir else "nothing is written (set output_dir)"
    in_bfloat16 = cfg.sampling.compute_dtype == "bfloat16"
    precision = "; computes in bfloat16, weights in float32" if in_bfloat16 else ""
    trained = [short_number(lora.num_trained(spec.config, cfg.lora)) for spec in team.stacks] if cfg.lora.lora_rank else []
    trained_text = f", of which LoRA trains {' + '.join(trained)}{' each' * (sum(counts) > 1)}" if trained else ""
    named = f"{', '.join(roles)}; " if team.num_agents > 1 and len(roles) == team.num_agents else ""
    agents = f"{team.num_agents} agent{'s' * (team.num_agents > 1)} ({named}{sizes} parameters{trained_text})"
    return (
        f"{cfg.algorithm}: {agents} on {len(devices)} x {devices[0].device_kind}, "
        f"{cfg.run.num_updates} update{'s' * (cfg.run.num_updates != 1)}, {where}{precision}"
    )


def short_number(count: float) -> str:
    """Return a number as "135 M", "1.2 M", "12 k" or "850"."""
    for unit, name in ((1e6, " M"), (1e3, " k")):
        if count >= 0.9995 * unit:
            return f"{count / unit:,.{int(count < 9.95 * unit)}f}{name}"
    return f"{count:.0f}"


def line_of_data(data: Sequence[Any], held_out: Sequence[Any]) -> str:
    """Return how many pairs or trajectories a run learns from, and of which agents if the data says so."""
    counts = Counter(item.agent for item in data if isinstance(item, Trajectory) and item.agent)
    agents = f" of {len(counts)} agents ({', '.join(f'{name}: {n}' for name, n in counts.items())})" if len(counts) > 1 else ""
    kind = "trajectories" if isinstance(data[0], Trajectory) else "pairs"
    return f"learns from {len(data)} {kind}{agents}" + (f"; {len(held_out)} held out" if held_out else "")
