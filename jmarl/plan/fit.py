"""Find settings with which a run fits on a device: rank them by a formula, then prove the best ones by compiling."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from jmarl.config import TrainConfig
from jmarl.models.config import ModelConfig
from jmarl.plan.devices import GIB, Gpu, compile_device
from jmarl.plan.plan import LARGEST_POOL, POOL, Plan, make_plan, parts_of_state
from jmarl.plan.programs import shapes_of_run
from jmarl.team import Team

MAX_PROOFS = 12
REMAT_PASSES = {"none": 3.0, "dots": 3.3, "full": 4.0}  # forward passes that an update takes, the backward one counted twice


class Candidate(NamedTuple):
    """Settings to try, by a formula. Sizes in bytes, time in seconds."""

    settings: dict[str, Any]
    temporaries: float  # of an update
    time: float  # of an update of one agent, at best


def candidates(team: Team, cfg: TrainConfig, gpu: Gpu, prompt_tokens: int) -> list[Candidate]:
    """Return settings with the same result but for rounding, or with fewer prompts a step; the fastest of them first."""
    rows = cfg.episodes.num_prompts * cfg.episodes.num_generations
    micro_batches = [2**i for i in range(rows.bit_length()) if rows % 2**i == 0]
    dtypes = dict.fromkeys([cfg.sampling.compute_dtype, "bfloat16"])
    options = [
        estimate(team, cfg, gpu, prompt_tokens, dict(compute_dtype=dtype, remat=remat, micro_batches=parts))
        for dtype, remat, parts in itertools.product(dtypes, REMAT_PASSES, micro_batches)
    ]
    return sorted(options, key=lambda candidate: candidate.time)


def estimate(team: Team, cfg: TrainConfig, gpu: Gpu, prompt_tokens: int, settings: dict[str, Any]) -> Candidate:
    """Estimate the temporaries of an update, and its time, from sizes alone."""
    model = max((spec.config for spec in team.stacks), key=lambda config: config.num_params())
    wide = 2 if settings["compute_dtype"] == "bfloat16" else 4
    group, parts = cfg.episodes.num_generations, settings["micro_batches"]
    tokens = cfg.episodes.num_prompts * (prompt_tokens + group * cfg.sampling.max_new_tokens)
    trained = 0 if cfg.lora.lora_rank else model.num_params()
    passes = REMAT_PASSES[settings["remat"]]
    stored = activations(model, settings["remat"]) * model.num_layers * wide + 5 * model.intermediate_size * wide
    accumulated = 4 * trained * (parts > 1)
    temporaries = (4 + 2 * wide) * trained + accumulated + tokens / parts * stored + 6 * 1024 * model.vocab_size
    speed = gpu.bfloat16 if wide == 2 else gpu.float32
    operations = passes * 2 * model.num_params() * tokens
    traffic = parts * passes * wide * model.num_params() + (wide * stored * tokens if settings["remat"] != "full" else 0)
    return Candidate(settings, temporaries, operations / speed + traffic / gpu.bandwidth)


def activations(model: ModelConfig, remat: str) -> float:
    """Return the numbers per token that a layer keeps for the backward pass."""
    products = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim + 2 * model.intermediate_size
    return {"full": 0, "dots": products + model.hidden_size, "none": 3 * products}[remat] + model.hidden_size


def prove(
    team: Team, cfg: TrainConfig, gpu: Gpu, prompt_tokens: int, eval_items: int
) -> Iterator[tuple[dict[str, Any], Plan, bool]]:
    """Yield settings, the plan with them and whether it fits, until one does or `MAX_PROOFS` have been compiled.

    Settings that the formula puts far above the memory are left out. If only few prompts fit, they are halved.
    """
    state = sum(parts_of_state(shapes_of_run(team, cfg, compile_device(gpu))[1]).values())
    proofs, prompts = 0, cfg.episodes.num_prompts
    while prompts >= 1:
        smaller = {} if prompts == cfg.episodes.num_prompts else {"num_prompts": prompts}
        part = cfg.replace(**smaller)
        for candidate in candidates(team, part, gpu, prompt_tokens):
            if state > gpu.memory or state + candidate.temporaries > 1.2 * gpu.memory:
                continue
            if proofs == MAX_PROOFS:
                return
            proofs += 1
            settings = candidate.settings | smaller
            plan = make_plan(team, part.replace(**candidate.settings), gpu, prompt_tokens, eval_items)
            fits = plan.peak.peak <= LARGEST_POOL * gpu.memory
            yield settings, plan, fits
            if fits:
                return
        prompts //= 2


def line_of(settings: dict[str, Any], plan: Plan, fits: bool) -> str:
    """Return one line about a proof."""
    assert plan.gpu is not None
    names = " ".join(f"{name}={value}" for name, value in settings.items())
    need = f"{plan.peak.peak / GIB:.1f} of {plan.gpu.memory / GIB:.1f} GiB"
    by_default = "" if plan.peak.peak <= POOL * plan.gpu.memory else f", with XLA_PYTHON_CLIENT_MEM_FRACTION={LARGEST_POOL}"
    return f"{names}: {plan.peak.name} needs {need}, {f'fits{by_default}' if fits else 'does not fit'}"
