"""Time sampling of rows that end at very different lengths: all rows to the end, moved into fewer slots, and refilled.

Claim: rows that have ended cost little if the others move together (`jmarl.sampling.slots`), and less if the next batch's rows
    take their slots (`jmarl.sampling.refill`, async_steps=1). The tokens are the same.
Command: python -m experiments.bench.refill            (flags: --help)
    python -m experiments.bench.refill --model smollm2-135m-instruct --agents 1 --prompts 2 --batches 6 --mean 50 --cap 256
Every row ends after a number of tokens that is drawn lognormal and follows from its random key, in place of an end token. The
    three ways sample batch after batch by turns in one process; compiling is not counted. Prints a JSON object for each:
    tokens per second, the ratio to the first way, and the share of its tokens that differ from the first way's (where a
    random number lies at a boundary, rounding decides, and the rest of the row may differ).
Expected: ratios 1, 2.9 and 2.8 and equal tokens with the first command, in five minutes on two cores; 1, 1.35 and 1.65 and
    equal tokens with the second, in four.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array

from experiments.start import load_team
from jmarl.config import Count, NotNegative, Sampling, TrainConfig, check_fields
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import init_params
from jmarl.models.platforms import COMPILER_OPTIONS, fuses_decoding, steps_per_look
from jmarl.sampling import choice, refill, sampler
from jmarl.sampling.stack_program import SampleProgram, sample_stack
from jmarl.types import Completions

TINY = ModelConfig("llama", 320, 64, 128, 2, 4, 2, 16, 4096)
PROMPT = 32  # tokens of each prompt


@dataclasses.dataclass(frozen=True)
class Refill:
    """Tokens per second of rows of different lengths."""

    model: str = "tiny"
    """tiny: two layers of random weights; or a model of all agents: a name, a directory, a .gguf file or a Hub id."""
    agents: Count = 2
    """Agents, in one stack."""
    prompts: Count = 8
    """Prompts of a batch."""
    generations: Count = 8
    """Completions of each prompt and agent."""
    batches: Count = 20
    """Batches of each way."""
    mean: Count = 200
    """Mean length of a row, in tokens, before it is cut."""
    sigma: NotNegative = 0.8
    """Standard deviation of its logarithm."""
    cap: Count = 1024
    """Longest row."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype."""

    def __post_init__(self) -> None:
        check_fields(self)


def schedule(cfg: Refill) -> None:
    """Let rows end after the lengths that follow from their keys, and nowhere else.

    Random bits that are all 1 stand for the end; end tokens are not allowed before `cap`.
    """
    plain_bits, plain_choose, end = choice.random_bits, choice.choose_for_rows, np.uint32(2**32 - 1)

    def random_bits(keys: Array, count: int) -> Array:
        normal = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, count)))(keys)
        length = jnp.exp(math.log(cfg.mean) - cfg.sigma**2 / 2 + cfg.sigma * normal)
        at_end = jnp.arange(count)[:, None] >= length - 1
        return jnp.where(at_end[..., None], end, plain_bits(keys, count))

    def choose_for_rows(
        logits: Array, bits: Array, t: Array, seen: Any, stop: Array, settings: Sampling, *options: Any
    ) -> tuple[Any, ...]:
        token, *rest = plain_choose(logits, bits, t, seen, stop, settings, *options)
        return jnp.where(jnp.all(bits == end, -1), stop[..., 0].astype(token.dtype), token), *rest

    for module, name, function in (
        (choice, "choose_for_rows", choose_for_rows),
        (sampler, "random_bits", random_bits),
    ):
        setattr(module, name, function)


def load(cfg: Refill) -> tuple[ModelConfig, Any]:
    """Return the architecture and the parameters [A, ...] of the agents."""
    if cfg.model == "tiny":
        return TINY, jax.vmap(partial(init_params, TINY))(jax.random.split(jax.random.key(0), cfg.agents))
    team, params = load_team(cfg.model, cfg.agents, TrainConfig())
    return team.stacks[0].config, params[0]


def ways(cfg: Refill) -> dict[str, Callable[[int], Completions]]:
    """Return the three ways to sample a batch, by name: functions of its number."""
    model, params = load(cfg)
    settings = Sampling(cfg.cap, min_new_tokens=cfg.cap, compute_dtype=cfg.dtype)
    program = SampleProgram(model, settings, 1, cfg.generations, jax.default_backend())
    stop, lengths = np.array([1], np.int32), np.full((cfg.agents, cfg.prompts), PROMPT, np.int32)

    def prompts(k: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.random.default_rng(k).integers(2, model.vocab_size, (cfg.agents, cfg.prompts, PROMPT))
        return ids.astype(np.int32), lengths

    def ids(k: int) -> sampler.RowIds:
        return sampler.RowIds(0, k, 0, 0, np.arange(cfg.agents)[:, None], np.arange(cfg.prompts))

    @partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def to_the_end(params: Any, prompts: Any, ids: Any) -> Completions:
        token_ids, lengths = prompts
        inputs = sampler.SampleInputs(token_ids, lengths, sampler.row_keys(ids, cfg.generations), jnp.asarray(stop))
        fused, steps = fuses_decoding(program.platform, cfg.dtype, model), steps_per_look(program.platform, cfg.cap)
        return sampler.sample(params, model, settings, inputs, fused=fused, steps=steps)

    nothing = refill.empty_pending(prompts(0), cfg.generations, model, settings, program.platform, stop)
    pending = nothing

    def refilled(k: int) -> Completions:
        nonlocal pending
        pending = nothing if k == 0 else pending
        both, numbers = (prompts(k), prompts(k + 1)), (ids(k), ids(k + 1))
        completions, pending = refill.refill_stack(params, both, numbers, stop, pending, program=program)
        return completions

    return {
        "all rows to the end": lambda k: to_the_end(params, prompts(k), ids(k)),
        "fewer slots": lambda k: sample_stack(params, prompts(k), ids(k), stop, program=program),
        "refilled": refilled,
    }


def main(cfg: Refill) -> None:
    """Sample all batches in all ways, and print the rates."""
    schedule(cfg)
    functions = ways(cfg)
    for sample in functions.values():  # compiles
        jax.block_until_ready(sample(cfg.batches))
    seconds, tokens, differ = (dict.fromkeys(functions, 0.0) for _ in range(3))
    for k in range(cfg.batches):
        first = None
        for name, sample in functions.items():
            start = time.perf_counter()
            done = jax.device_get(jax.block_until_ready(sample(k)))
            seconds[name] += time.perf_counter() - start
            tokens[name] += float(done.action_mask.sum())
            first = done if first is None else first
            differ[name] += float((done.tokens != first.tokens).sum())
    base = next(iter(seconds.values()))
    for name, time_s in seconds.items():
        row = {"way": name, "tokens_per_s": round(tokens[name] / time_s, 1), "ratio": round(base / time_s, 3)}
        print(json.dumps(row | {"differ": round(differ[name] / tokens[name], 6)}), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Refill))
