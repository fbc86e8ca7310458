"""Time one training step of a team on random rewards: generation and update, full length forced.

Command: python -m experiments.bench_step --model smollm2-135m-instruct --agents 2 --prompts 1 --group 8 --max-new-tokens 128
Prints one JSON object. Times are medians of `--repeats` warm steps in seconds, every one waited for; `startup_s` is loading
and placing, `compile_s` what the first step takes longer than a warm one. Shares: of the bytes floor (every parameter read
once a decode step, at the rate at which memory is read) and of the floor of operations (6 · parameters · tokens, at the rate
of a large matrix product). Both rates are measured right before and after each half of a step, because on a shared machine
they change; a share is the median of those of the single steps. Peak memory is that of the first step.
On a GPU also the device, its peak memory, and the same shares of its measured rates.
Sampling is the peer's: temperature 0.6, top-p 0.6, top-k 50.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jmarl.algorithms import resolve
from jmarl.config import TrainConfig
from jmarl.learning.optimizer import init_stack
from jmarl.learning.update import lower_update, update_stack
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import init_params
from jmarl.models.hub.agents import load_agent
from jmarl.models.hub.tokenize import encode_prompts, stop_ids
from jmarl.models.platforms import platform_of
from jmarl.models.sharding import mesh_for, place
from jmarl.models.stack import stack_params
from jmarl.sampling.generate import StackProgram, sample_stack
from jmarl.sampling.sampler import RowIds
from jmarl.training.precompile import compile_all, example_completions
from jmarl.types import TRACES, Batch

PROMPTS = """Describe a city in the clouds:|Invent a new holiday and explain it:|Write a bedtime story for a dragon:
Explain how teleportation might work:|Tell a joke about dinosaurs:|Describe a world without electricity:
Create a superhero with a unique power:|Write a scene where the moon talks:""".replace("\n", "|").split("|")


def qwen(hidden: int, ffn: int, layers: int, heads: int) -> ModelConfig:
    """A Qwen2.5 shape with two key-value heads."""
    rest: dict[str, Any] = dict(max_positions=32768, rope_theta=1e6, qkv_bias=True)
    return ModelConfig("qwen2", 151936, hidden, ffn, layers, heads, 2, hidden // heads, **rest)


SHAPES = {  # random weights: right for speed, wrong for everything else
    "qwen2.5-0.5b-random": qwen(896, 4864, 24, 14),
    "qwen2.5-1.5b-random": qwen(1536, 8960, 28, 12),
    "tiny-random": ModelConfig("llama", 512, 64, 128, 2, 4, 2, 16, 4096),
}


@dataclasses.dataclass(frozen=True)
class Bench:
    """One configuration; prints one JSON object."""

    model: str = "smollm2-135m-instruct"
    """A model to load, or qwen2.5-0.5b-random, qwen2.5-1.5b-random, tiny-random."""
    agents: int = 2
    prompts: int = 1
    group: int = 8
    max_new_tokens: int = 128
    dtype: str = "float32"
    """Compute dtype, float32 or bfloat16; master weights are float32."""
    per_agent: str = "map"
    """Gradients of the agents on one device: map (one after the other) or vmap (at once)."""
    mesh: str = "auto"
    """Devices by axis; agent=1 is one device; auto: agents over the devices there are."""
    remat: str = "dots"
    micro_batches: int = 1
    repeats: int = 3
    compile_cache: str = ""
    """Directory of the persistent compile cache; empty: none."""
    json: bool = True
    """Print JSON; --no-json prints one figure a line."""


def seconds(f: Callable[[], Any]) -> float:
    """Seconds of one call, waited for."""
    start = time.perf_counter()
    jax.block_until_ready(f())
    return time.perf_counter() - start


def machine(dtype: str) -> Callable[[], tuple[float, float]]:
    """A function that measures, in memory of its own, the rate at which memory is read (bytes/s, a sum; best of five) and that
    of a large matrix product (operations/s; best of two)."""
    bits, n = (26, 4096) if jax.default_backend() == "cpu" else (30, 8192)
    x, a = jnp.ones(1 << bits, jnp.float32), jnp.ones((n, n), dtype)
    total, product = jax.jit(jnp.sum), jax.jit(jnp.matmul)

    def rates() -> tuple[float, float]:
        read, multiply = min(seconds(lambda: total(x)) for _ in range(5)), min(seconds(lambda: product(a, a)) for _ in range(2))
        return x.nbytes / read, 2 * n**3 / multiply

    rates()  # compiles both
    return rates


def load(cfg: Bench) -> tuple[ModelConfig, Any, list[list[int]], tuple[int, ...]]:
    """Model, stacked parameters, encoded prompts and stop ids."""
    texts = (PROMPTS * cfg.prompts)[: cfg.prompts]
    if cfg.model in SHAPES:
        model = SHAPES[cfg.model]
        params = jax.vmap(lambda k: init_params(model, k))(jax.random.split(jax.random.key(0), cfg.agents))
        return model, params, [list(range(5, 12)) for _ in texts], (2,)
    agent = load_agent(cfg.model)
    ids = encode_prompts(agent.tokenizer, texts, agent.config.max_positions, cfg.max_new_tokens)
    return agent.config, stack_params([agent.params] * cfg.agents), ids, stop_ids(agent.tokenizer)


class Step:
    """A team's state and the two halves of a training step."""

    def __init__(self, cfg: Bench):
        self.cfg = cfg
        self.model, params, self.ids, self.stop = load(cfg)
        a, t = cfg.agents, cfg.max_new_tokens
        settings = TrainConfig.of(
            max_new_tokens=t,
            min_new_tokens=t,
            temperature=0.6,
            top_k=50,
            top_p=0.6,
            learning_rate=5e-6,
            remat=cfg.remat,
            micro_batches=cfg.micro_batches,
            compute_dtype=cfg.dtype,
            per_agent=cfg.per_agent,
        )
        self.sampling, self.algorithm = settings.sampling, resolve(settings)
        width = max(map(len, self.ids))
        rows = np.array([row + [self.stop[0]] * (width - len(row)) for row in self.ids], np.int32)
        lengths = np.array([len(row) for row in self.ids])
        self.prompts, self.lengths = (jnp.tile(jnp.asarray(x), (a, *[1] * x.ndim)) for x in (rows, lengths))
        self.mesh = mesh_for(cfg.mesh, [a])
        self.state = init_stack(place(params, self.mesh), self.algorithm)
        self.rewards = jax.random.normal(jax.random.key(1), (a, cfg.prompts, cfg.group))
        self.number = 0

    def sampler(self, call: Any):
        """`call` on the arguments of `sample_stack`."""
        self.number += 1
        agents, prompts = jnp.arange(self.cfg.agents)[:, None], jnp.arange(self.cfg.prompts)
        keys = RowIds(seed=0, step=self.number, purpose=0, stack=0, agents=agents, prompt_ids=prompts)
        platform = platform_of(self.state.params)
        program = StackProgram(self.model, self.sampling, 1, self.cfg.group, platform, mesh=self.mesh)
        return call(self.state.params, (self.prompts, self.lengths), keys, jnp.array(self.stop), program=program)

    def learner(self, call: Any):
        """`call` on the arguments of `update_stack`."""
        done = self.done
        batch = Batch(self.prompts, self.lengths, done.tokens, done.action_mask, done.logprobs, done.ended, self.rewards, None)
        return call(self.state, batch, model=self.model, algorithm=self.algorithm)

    def compile(self) -> None:
        compile_all(self.programs())

    def programs(self) -> Iterator[Any]:
        yield (sampler := self.sampler(sample_stack.lower))
        self.done = example_completions(sampler)
        yield self.learner(lower_update)

    def generate(self):
        self.done = self.sampler(sample_stack)
        return self.done

    def update(self):
        self.state, metrics, _ = self.learner(update_stack)
        return self.state, metrics


def bench(cfg: Bench) -> dict[str, Any]:
    began = time.perf_counter()
    step = Step(cfg)
    jax.block_until_ready(step.state)
    startup = time.perf_counter() - began
    first = seconds(step.compile) + seconds(step.generate) + seconds(step.update)
    peak_rss, on_device = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, jax.devices()[0].memory_stats()
    rates_now = machine(cfg.dtype)  # after that: it has arrays of its own
    rates, times = [rates_now()], []
    for _ in range(cfg.repeats):
        for half in (step.generate, step.update):
            times.append(seconds(half))
            rates.append(rates_now())
    around = (np.array(rates[1:]) + rates[:-1]) / 2  # [2 * repeats, 2]: the rates beside each half of a step
    (generate_s, update_s), (bandwidth, rate) = np.median(np.reshape(times, (-1, 2)), 0).tolist(), np.median(rates, 0).tolist()
    a, p, g, t = cfg.agents, cfg.prompts, cfg.group, cfg.max_new_tokens
    params = step.model.num_params()
    trained = sum(map(len, step.ids)) + p * g * t
    decode_floors = a * t * params * jnp.dtype(cfg.dtype).itemsize / around[::2, 0]
    update_floors = a * 6 * params * trained / around[1::2, 1]
    settings = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in ("json", "compile_cache")}
    out = settings | dict(
        parameters=params,
        device=str(jax.devices()[0].device_kind),
        devices=1 if step.mesh is None else step.mesh.size,
        startup_s=startup,
        first_step_s=first,
        compile_s=max(first - generate_s - update_s, 0.0),
        generate_s=generate_s,
        update_s=update_s,
        step_s=generate_s + update_s,
        step_per_prompt_s=(generate_s + update_s) / p,
        tokens_per_s=a * p * g * t / generate_s,
        decode_ms_per_agent=generate_s / t / a * 1e3,
        read_gb_per_s=bandwidth / 1e9,
        matmul_gflop_per_s=rate / 1e9,
        decode_share_of_bandwidth=float(np.median(decode_floors / times[::2])),
        update_share_of_flops=float(np.median(update_floors / times[1::2])),
        compiles=sum(TRACES.values()),
        peak_rss_gib=peak_rss / 2**20,
    )
    return out | ({"peak_device_gib": on_device["peak_bytes_in_use"] / 2**30} if on_device else {})


def main() -> None:
    cfg = tyro.cli(Bench)
    if cfg.compile_cache:
        jax.config.update("jax_compilation_cache_dir", os.path.abspath(cfg.compile_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    out = {k: round(v, 4) if isinstance(v, float) else v for k, v in bench(cfg).items()}
    print(json.dumps(out) if cfg.json else "\n".join(f"{k}: {v}" for k, v in out.items()))


if __name__ == "__main__":
    main()
