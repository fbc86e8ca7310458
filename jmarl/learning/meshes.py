"""Choose the mesh of a run where it is auto, and say what a mesh divides."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax

from jmarl.algorithms import Algorithm, find_row
from jmarl.config import TrainConfig
from jmarl.learning.choose import SHARE, Work, all_options, candidates
from jmarl.memory import GIB
from jmarl.models.config import ModelConfig
from jmarl.models.lora import num_trained
from jmarl.models.rows import divide
from jmarl.models.sharding import DeviceMesh, largest_agent_axis
from jmarl.models.weights import num_params
from jmarl.team import Team

MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}  # arrays like the parameters that an optimizer keeps


def mesh_that_fits(
    team: Team, cfg: TrainConfig, algorithm: Algorithm, num_devices: int, room: int, num_runs: int = 1
) -> tuple[TrainConfig, str]:
    """Return settings whose mesh, if it is auto, also divides rows and weights where whole agents do not fit, and a line that
    says so; else the settings unchanged and no line.

    Needs are those of a formula; what then fits is compiled when the run starts (`learning.choose`).

    Args:
        team: who learns.
        cfg: the settings.
        algorithm: that the settings resolve to.
        num_devices: that are there.
        room: bytes that JAX takes on each.
        num_runs: of this team that learn together.
    """
    counts = [len(spec.members) for spec in team.stacks]
    agents = largest_agent_axis(counts, num_devices)
    data = num_devices // agents
    noise_of_parts = cfg.lora.lora_dropout and cfg.optimizer.micro_batches not in (1, "auto")
    cannot = cfg.episodes.async_steps or cfg.run.strategy == "ddp" or noise_of_parts
    if cfg.run.mesh != "auto" or data == 1 or cannot:
        return cfg, ""
    sizes = [(spec.config, num_runs * count // agents) for spec, count in zip(team.stacks, counts, strict=True)]
    need = sum(bytes_of_state(model, algorithm) * own for model, own in sizes)
    need += max(bytes_of_programs(model, cfg, algorithm, own) for model, own in sizes)
    if need <= SHARE * room:
        return cfg, ""
    mesh = f"agent={agents},data={data}" if agents > 1 else f"data={data}"
    why = f"with whole agents a device would need about {need / GIB:.0f} GiB, and JAX takes {room / GIB:.0f}"
    return cfg.replace(mesh=mesh), f"mesh=auto is {mesh}: {why}"


def bytes_of_state(model: ModelConfig, algorithm: Algorithm) -> int:
    """Return about the bytes of one agent's state, and of its own critic: weights, moments, reference."""
    optimizer = algorithm.optimizer.optimizer
    moments = MOMENTS[optimizer if isinstance(optimizer, str) else optimizer[0]]
    copies = 1 + (algorithm.critic_kind == "own")
    if algorithm.lora.lora_rank:
        base = (2 if algorithm.compute_dtype == "bfloat16" else 4) * num_params(model)
        return base + copies * 4 * (1 + moments) * num_trained(model, algorithm.lora)
    return 4 * num_params(model) * (copies * (1 + moments) + bool(algorithm.loss.kl_coef))


def bytes_of_programs(model: ModelConfig, cfg: TrainConfig, algorithm: Algorithm, agents: int) -> int:
    """Return about the bytes that the larger of sampling and the least update of some agents takes beside their state."""
    wide = 2 if algorithm.compute_dtype == "bfloat16" else 4
    episodes, new = cfg.episodes, cfg.sampling.max_new_tokens
    rows = (episodes.num_prompts or 1) * episodes.num_generations
    attending = sum(not model.is_recurrent(n) for n in range(model.num_layers))
    cache = 2 * wide * attending * model.num_kv_heads * model.head_dim * rows * new
    if (d := model.delta) is not None:  # memories are float32
        cache += (model.num_layers - attending) * rows * 4 * d.heads * d.key_size * d.value_size
    sampling = agents * (wide * num_params(model) + cache)
    trained = 0 if cfg.lora.lora_rank else num_params(model)
    work = Work(model, rows * new, rows, trained)
    options = all_options(work, cfg, [algorithm.compute_dtype])
    return max(sampling, min(candidate.temporaries for candidate in candidates(work, options)))


def line_of_mesh(mesh: DeviceMesh, cfg: TrainConfig) -> str:
    """Return what a mesh divides, and which places stay empty where it does not divide the rows of an agent evenly."""
    parts = mesh.shape["data"]
    line = "mesh " + ",".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
    if parts == 1:
        return f"{line}: whole agents are spread over devices" if mesh.shape["model"] == 1 else f"{line}: weights are divided"
    prompts, group = rows_of(cfg)
    d = divide(prompts, group, parts)
    places, rows = d.prompts * (group // d.over_group), prompts * group
    weights = f"1/{parts} of its weights" if mesh.strategy == "fsdp" else "all of its weights (ddp)"
    padding = f"; {rows} rows do not divide by data={parts}, so {places - rows} places are padding" * (places > rows)
    return f"{line}: a device has {weights} and {places // parts} of {rows} rows of an agent{padding}"


def line_of_cores(team: Team) -> str:
    """Return how agents could use more cores of a CPU than one device does; empty where they cannot, or where it is chosen."""
    cores, agents = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, team.num_agents
    is_alone = jax.default_backend() == "cpu" and jax.device_count() == 1 and "JAX_NUM_CPU_DEVICES" not in os.environ
    if not is_alone or min(cores, *(len(spec.members) for spec in team.stacks)) < 2:
        return ""
    return (
        f"{agents} agents share one CPU device: JAX_NUM_CPU_DEVICES={cores}, set before Python starts, spreads them over "
        f"{cores} cores"
    )


def rows_of(cfg: TrainConfig) -> Sequence[int]:
    """Return the prompts of a step, or the pairs or texts, and the completions of each."""
    if find_row(cfg.algorithm).data == "rollouts":
        return cfg.episodes.num_prompts or 1, cfg.episodes.num_generations
    return cfg.preference.batch_size or 1, 1
