"""Choose `remat` and `micro_batches` so that an update fits into the memory of a GPU: rank settings by a formula, then prove
the best ones by compiling. The result of an update differs only in rounding.

A run uses it when it starts, and `jmarl plan` for a GPU that is not here. Left out: the sampler, which has neither setting, and
the update of a central critic.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Compiled, Lowered

from jmarl.config import TrainConfig
from jmarl.learning.setup import Setup, make_setup
from jmarl.learning.team_update import lower_team
from jmarl.models.config import ModelConfig
from jmarl.models.weights import num_params
from jmarl.types import Batches, TeamState

GIB = 2**30
MAX_PROOFS = 12
SHARE = 0.95  # of the memory that an update may need; batches and gaps between arrays are not counted
SLACK = 1.1  # settings that the formula puts this far above that are not compiled
REMAT_PASSES = {"none": 3.0, "dots": 3.3, "full": 4.0}  # forward passes that an update takes, the backward one counted twice
# An H100's, for ranking: other GPUs give nearly the same order.
OPERATIONS = {"bfloat16": 989e12, "float32": 67e12}  # per second
BANDWIDTH = 3.352e12  # bytes per second


class Work(NamedTuple):
    """An update of one agent, as far as the formula reads it."""

    model: ModelConfig
    tokens: int  # of all rows; a prompt counts once for its group
    parts: int  # micro-batches must divide this number
    trained: int  # parameters

    @classmethod
    def of(cls, setup: Setup, batches: Batches) -> "Work":
        """Return the work of an update of the team's largest model, on each device of its mesh."""
        cfg, episodes, algorithm, stacks = setup.cfg, setup.cfg.episodes, setup.algorithm, setup.team.stacks
        model, mesh = max((spec.config for spec in stacks), key=num_params), stacks[0].mesh
        shapes = [(*batch.prompts.shape, *batch.tokens.shape[2:]) for batch in batches.stacks]
        tokens = max(count * (width + size * new) for _, count, width, size, new in shapes)
        row_parts = 1 if mesh is None else mesh.shape["data"]
        # Several turns have any number of rows, at least those of the first; in chains each row has a prompt of its own. Only
        # powers of two are tried, by which they are split too.
        group = 1 if episodes.num_turns > 1 and episodes.branching == "tree" else episodes.num_generations
        rows = episodes.num_prompts * group if algorithm.row.data == "rollouts" else algorithm.preference.batch_size or 1
        rows = -(-rows // row_parts)
        # Each micro-batch of an update with dropout has noise of its own, so their number would change the result.
        parts = 1 if cfg.lora.lora_dropout or rows % cfg.optimizer.num_minibatches else rows // cfg.optimizer.num_minibatches
        divided = 1 if mesh is None or mesh.strategy == "ddp" else mesh.shape["data"]
        return cls(model, tokens // row_parts, parts, 0 if cfg.lora.lora_rank else num_params(model) // divided)


class Candidate(NamedTuple):
    """Settings to try, by the formula. Sizes in bytes, time in seconds."""

    settings: dict[str, Any]
    temporaries: int  # of an update
    time: float  # of an update of one agent, at best


class Proof(NamedTuple):
    """Settings whose update was compiled."""

    settings: dict[str, Any]
    peak: int  # bytes of the run's state and the temporaries
    fits: bool


def candidates(work: Work, options: Mapping[str, Sequence[Any]]) -> list[Candidate]:
    """Return all combinations of options by the time that an update takes, the fastest first.

    options: values by the names `compute_dtype`, `remat` and `micro_batches`.
    """
    combinations = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    return sorted((estimate(work, settings) for settings in combinations), key=lambda candidate: candidate.time)


def all_options(work: Work, cfg: TrainConfig, dtypes: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return the values to try of each setting: of remat and micro_batches, those given if they are not auto."""
    parts = [1 << i for i in range(work.parts.bit_length()) if work.parts % (1 << i) == 0]
    remat, micro_batches = cfg.optimizer.remat, cfg.optimizer.micro_batches
    return {
        "compute_dtype": dtypes,
        "remat": [*REMAT_PASSES] if remat == "auto" else [remat],
        "micro_batches": parts if micro_batches == "auto" else [micro_batches],
    }


def estimate(work: Work, settings: dict[str, Any]) -> Candidate:
    """Estimate the temporaries of an update, and its time, from sizes alone."""
    model, wide = work.model, 2 if settings["compute_dtype"] == "bfloat16" else 4
    parts, passes = settings["micro_batches"], REMAT_PASSES[settings["remat"]]
    stored = activations(model, settings["remat"]) * model.num_layers * wide + 5 * model.intermediate_size * wide
    accumulated = 4 * work.trained * (parts > 1)
    temporaries = (4 + 2 * wide) * work.trained + accumulated + work.tokens * stored // parts + 6 * 1024 * model.vocab_size
    of_a_token = num_params(dataclasses.replace(model, num_experts=model.experts_per_token))  # with its own experts only
    operations = passes * 2 * of_a_token * work.tokens
    traffic = parts * passes * wide * num_params(model) + (wide * stored * work.tokens if settings["remat"] != "full" else 0)
    return Candidate(settings, temporaries, operations / OPERATIONS[settings["compute_dtype"]] + traffic / BANDWIDTH)


def activations(model: ModelConfig, remat: str) -> int:
    """Return the numbers per token that a layer keeps for the backward pass."""
    heads = (1 + model.attention_gate) * model.num_heads + 2 * model.num_kv_heads
    mixed = heads * model.head_dim
    if (d := model.delta) is not None:
        mixed = max(mixed, d.channels + 2 * d.heads * d.value_size)
    products = mixed + 2 * model.intermediate_size
    return {"full": 0, "dots": products + model.hidden_size, "none": 3 * products}[remat] + model.hidden_size


def proofs(
    ranked: Sequence[Candidate], state: int, room: int, peak_of: Callable[[dict[str, Any]], int], limit: int = MAX_PROOFS
) -> Iterator[Proof]:
    """Yield settings with their peak until one fits, with a margin, or `limit` are proved. The last has the least memory.

    Args:
      ranked: from `candidates`.
      state: bytes that stay on the device.
      room: bytes that it has.
      peak_of: compiles the update with these settings and returns the bytes of state and temporaries.
    """
    smallest = min(ranked, key=lambda candidate: candidate.temporaries)
    scale, proved = 1.0, list[Candidate]()  # scale: how far the formula is off
    for candidate in [*ranked, smallest]:
        hopeless = state + scale * candidate.temporaries > SLACK * SHARE * room
        left = limit - len(proved) - (smallest not in proved)  # one is for the smallest
        if candidate in proved or ((hopeless or not left) and candidate is not smallest):
            continue
        proved.append(candidate)
        peak = peak_of(candidate.settings)
        yield Proof(candidate.settings, peak, peak <= SHARE * room)
        if peak <= SHARE * room:
            return
        scale = max(scale, (peak - state) / candidate.temporaries)


def is_open(cfg: TrainConfig) -> bool:
    """Return whether a setting of an update has still to be chosen."""
    return "auto" in update_settings(cfg).values()


def update_settings(cfg: TrainConfig) -> dict[str, Any]:
    """Return the settings that `choose` chooses."""
    return {"remat": cfg.optimizer.remat, "micro_batches": cfg.optimizer.micro_batches}


def with_settings(setup: Setup, settings: Mapping[str, Any]) -> Setup:
    """Return a setup with other settings of the optimizer, for agents and critics."""
    return make_setup(setup.team, setup.critics, setup.algorithm.with_optimizer(**settings), setup.cfg, setup.seeds)


def choose(
    setup: Setup,
    state: TeamState,
    batches: Batches,
    size: int,
    rooms: Sequence[int],
    compile_update: Callable[[Lowered], Compiled] = Lowered.compile,
) -> tuple[Setup, str]:
    """Choose the fastest settings with which the updates fit; if none do, those with the lowest peak.

    Args:
      setup: of the run. What is not auto in its settings is kept.
      state, batches: of the largest update; arrays may be shapes.
      size: bytes that stay on the device.
      rooms: bytes that it has. Another number is tried where nothing fits into the one before.
      compile_update: for the device of the run.

    Returns:
      The setup with these settings, and a line that says what was chosen and why.
    """
    peaks: dict[tuple, int] = {}

    def peak_of(settings: dict[str, Any]) -> int:
        key = tuple(settings.values())
        if key not in peaks:
            programs = lower_team(with_settings(setup, without_dtype(settings)), state, batches)
            peaks[key] = size + max((temporaries(compile_update(lowered)) for _, _, lowered in programs), default=0)
        return peaks[key]

    work = Work.of(setup, batches)
    ranked = candidates(work, all_options(work, setup.cfg, [setup.algorithm.compute_dtype]))

    def best_within(room: int) -> Proof:
        tried = proofs(ranked, size, room, peak_of)
        return min(tried, key=lambda proof: (not proof.fits, proof.peak))

    room, best = rooms[0], best_within(rooms[0])
    for larger in rooms[1:]:
        if not best.fits:
            room, best = larger, best_within(larger)
    return with_settings(setup, without_dtype(best.settings)), line_of(best, room)


def without_dtype(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the dtype, which the platform determines."""
    return {name: value for name, value in settings.items() if name != "compute_dtype"}


def line_of(proof: Proof, room: int) -> str:
    """Return what was chosen and why."""
    text = ", ".join(f"{name}={value}" for name, value in without_dtype(proof.settings).items())
    text += f": the update needs {proof.peak / GIB:.1f} of {room / GIB:.1f} GiB"
    advice = "set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95, lora_rank, or num_prompts and max_new_tokens lower"
    return text if proof.fits else f"{text}, the least of all that was tried, and may not fit: {advice}"


def temporaries(compiled: Compiled) -> int:
    """Return the bytes that a program needs besides its arguments."""
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def bytes_on_device(tree: Any) -> int:
    """Return the bytes of a pytree of arrays, or of their shapes, on one of its devices. An array in it twice counts once."""
    leaves = {id(x): x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | jax.ShapeDtypeStruct)}

    def size(x: Any) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return int(x.dtype.itemsize) * int(np.prod(shape))

    return sum(map(size, leaves.values()))
