"""Time one training step of a team with random rewards: sampling and update, all completions at full length.

Claim: a step of two agents takes a quarter of the time of CoMLRL 1.4.3 in float32 on the same two cores.
Command: python -m experiments.bench.step --model smollm2-135m-instruct --agents 2 --prompts 1 --group 8 --max-new-tokens 128
Prints one JSON object. Times are medians in seconds over `--repeats` warm steps that are waited for. `startup_s` is the time to
load and place the models; `compile_s` is the time that the first step takes longer than a warm one.
`decode_share_of_bandwidth` compares sampling with its lower bound, reading every parameter once per decode step at the rate at
which this machine reads memory. `update_share_of_flops` compares the update with 6 · parameters · tokens operations at the rate
of a large matrix product. Both rates are measured right before and after each half of a step, because they change on a shared
machine; the shares are medians over steps. Peak memory is that of the first step, on a GPU also of the device.
Sampling is CoMLRL's: temperature 0.6, top-p 0.6, top-k 50.
Expected: steps of 10 to 12 s against 40 to 47 s of CoMLRL; see experiments/README.md. Time: about 70 s (estimated).
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.report import peak_memory
from experiments.start import TrainingBenchOptions, train_config
from jmarl.algorithms import resolve
from jmarl.config import Count
from jmarl.learning.batches import make_batch
from jmarl.learning.optimizer import init_stack
from jmarl.learning.program import make_program
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import init_params
from jmarl.models.hub.agents import load_agent
from jmarl.models.hub.tokenize import encode_prompts, stop_ids
from jmarl.models.platforms import platform_of
from jmarl.models.sharding import mesh_for, place
from jmarl.models.stack import stack_params
from jmarl.models.weights import num_params
from jmarl.runs.precompile import compile_all
from jmarl.sampling.sampler import RowIds
from jmarl.sampling.stack_program import SampleProgram, sample_stack
from jmarl.types import TRACES, Batch, Completions

PROMPTS = """Describe a city in the clouds:|Invent a new holiday and explain it:|Write a bedtime story for a dragon:
Explain how teleportation might work:|Tell a joke about dinosaurs:|Describe a world without electricity:
Create a superhero with a unique power:|Write a scene where the moon talks:""".replace("\n", "|").split("|")


def qwen(hidden: int, ffn: int, layers: int, heads: int) -> ModelConfig:
    """Return the shape of a Qwen2.5 model with two key-value heads."""
    options: dict[str, Any] = dict(max_positions=32768, rope_theta=1e6, qkv_bias=True)
    return ModelConfig("qwen2", 151936, hidden, ffn, layers, heads, 2, hidden // heads, **options)


SHAPES = {  # models of random weights: as fast as trained ones
    "qwen2.5-0.5b-random": qwen(896, 4864, 24, 14),
    "qwen2.5-1.5b-random": qwen(1536, 8960, 28, 12),
    "tiny-random": ModelConfig("llama", 512, 64, 128, 2, 4, 2, 16, 4096),
}


@dataclasses.dataclass(frozen=True)
class Bench(TrainingBenchOptions):
    """One configuration; prints one JSON object."""

    model: str = "smollm2-135m-instruct"
    """A model to load, or one of random weights: qwen2.5-0.5b-random, qwen2.5-1.5b-random, tiny-random."""
    agents: Count = 2
    """Agents of the team."""
    prompts: Count = 1
    """Prompts per step."""
    group: Count = 8
    max_new_tokens: Count = 128
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights are float32."""
    remat: Literal["none", "dots", "full"] = "dots"
    """What the backward pass keeps: everything (none), the large products (dots), or only the inputs of layers (full)."""
    repeats: Count = 3
    """Warm steps."""
    compile_cache: str = ""
    """Directory of the persistent compile cache; empty: none."""
    json: bool = True
    """Print JSON; --no-json prints one figure per line."""


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of a call, until its arrays are computed."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def machine_rates(dtype: str) -> Callable[[], tuple[float, float]]:
    """Return a function that measures the rates of this machine.

    It returns bytes per second that a sum reads (best of five) and operations per second of a matrix product (best of two).
    """
    bits, n = (26, 4096) if jax.default_backend() == "cpu" else (30, 8192)
    x, a = jnp.ones(1 << bits, jnp.float32), jnp.ones((n, n), dtype)
    total, product = jax.jit(jnp.sum), jax.jit(jnp.matmul)

    def rates() -> tuple[float, float]:
        read, multiply = min(seconds(lambda: total(x)) for _ in range(5)), min(seconds(lambda: product(a, a)) for _ in range(2))
        return x.nbytes / read, 2 * n**3 / multiply

    rates()  # compiles both
    return rates


class Loaded(NamedTuple):
    model: ModelConfig
    params: Any  # [A, ...]
    ids: list[list[int]]  # of the prompts
    stop: tuple[int, ...]


def load(options: Bench) -> Loaded:
    """Load or initialize the model, and encode the prompts."""
    texts = (PROMPTS * options.prompts)[: options.prompts]
    if options.model in SHAPES:
        model = SHAPES[options.model]
        params = jax.vmap(lambda key: init_params(model, key))(jax.random.split(jax.random.key(0), options.agents))
        return Loaded(model, params, [list(range(5, 12)) for _ in texts], (2,))
    agent = load_agent(options.model)
    ids = encode_prompts(agent.tokenizer, texts, agent.config.max_positions, options.max_new_tokens)
    return Loaded(agent.config, stack_params([agent.params] * options.agents), ids, stop_ids(agent.tokenizer))


class Step:
    """The state of a team, and the two halves of a training step."""

    def __init__(self, options: Bench):
        self.options = options
        self.model, params, self.ids, self.stop = load(options)
        cfg = train_config(
            options, min_new_tokens=options.max_new_tokens, temperature=0.6, top_k=50, top_p=0.6, learning_rate=5e-6,
            compute_dtype=options.dtype,
        )  # fmt: skip
        self.sampling, self.algorithm = cfg.sampling, resolve(cfg)
        width, a = max(map(len, self.ids)), options.agents
        rows = np.array([row + [self.stop[0]] * (width - len(row)) for row in self.ids], np.int32)
        lengths = np.array([len(row) for row in self.ids])
        self.prompts, self.lengths = (jnp.tile(jnp.asarray(x), (a, *[1] * x.ndim)) for x in (rows, lengths))
        self.mesh = mesh_for(options.mesh, [a])
        self.state = init_stack(place(params, self.mesh), self.algorithm, mesh=self.mesh)
        members = [[agent] for agent in range(a)]
        self.program = make_program(self.model, members, self.algorithm, cfg.run, number=0, team_size=a, mesh=self.mesh)
        self.rewards = np.asarray(jax.random.normal(jax.random.key(1), (a, options.prompts, options.group)))
        self.number = 0

    def sample(self, call: Callable[..., Any]) -> Any:
        """Return the result of `call` for the arguments of `sample_stack`."""
        self.number += 1
        agents, prompts = jnp.arange(self.options.agents)[:, None], jnp.arange(self.options.prompts)
        keys = RowIds(seed=0, step=self.number, purpose=0, stack=0, agents=agents, prompt_ids=prompts)
        platform = platform_of(self.state.params)
        program = SampleProgram(self.model, self.sampling, 1, self.options.group, platform, mesh=self.mesh)
        return call(self.state.params, (self.prompts, self.lengths), keys, jnp.array(self.stop), program=program)

    def batch(self, completions: Completions) -> Batch:
        """Return what the agents learn from."""
        groups = np.arange(self.options.prompts)
        return make_batch((self.prompts, self.lengths), completions, self.rewards, groups, self.options.max_new_tokens)

    def compile(self) -> None:
        compile_all(self.programs())

    def programs(self) -> Iterator[Any]:
        yield (sampler := self.sample(sample_stack.lower))
        zeros = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), sampler.out_info)
        yield self.program.lower(self.state, self.batch(zeros))

    def generate(self) -> Any:
        self.completions = self.sample(sample_stack)
        return self.completions

    def update(self) -> Any:
        self.state, metrics = self.program(self.state, self.batch(self.completions), 0)
        return self.state, metrics


def bench(options: Bench) -> dict[str, Any]:
    """Return all figures."""
    start = time.perf_counter()
    step = Step(options)
    jax.block_until_ready(step.state)
    startup = time.perf_counter() - start
    first = seconds(step.compile) + seconds(step.generate) + seconds(step.update)
    peak = peak_memory()
    measure_rates = machine_rates(options.dtype)  # after `peak`, because it allocates large arrays
    rates, times = [measure_rates()], []
    for _ in range(options.repeats):
        for half in (step.generate, step.update):
            times.append(seconds(half))
            rates.append(measure_rates())
    generate_s, update_s = np.median(np.reshape(times, (-1, 2)), 0).tolist()
    settings = {name: x for name, x in dataclasses.asdict(options).items() if name not in ("json", "compile_cache")}
    figures = dict(
        parameters=num_params(step.model),
        device=str(jax.devices()[0].device_kind),
        devices=1 if step.mesh is None else step.mesh.size,
        startup_s=startup,
        first_step_s=first,
        compile_s=max(first - generate_s - update_s, 0.0),
        generate_s=generate_s,
        update_s=update_s,
        step_s=generate_s + update_s,
        step_per_prompt_s=(generate_s + update_s) / options.prompts,
        tokens_per_s=options.agents * options.prompts * options.group * options.max_new_tokens / generate_s,
        decode_ms_per_agent=generate_s / options.max_new_tokens / options.agents * 1e3,
    )
    return (
        settings
        | figures
        | shares(options, step, np.array(rates), np.array(times))
        | dict(compiles=sum(TRACES.values()))
        | peak
    )


def shares(options: Bench, step: Step, rates: np.ndarray, times: np.ndarray) -> dict[str, float]:
    """Return the rates of the machine, and the shares of them that the halves of a step reach.

    rates: [2 R + 1, 2] bytes per second and operations per second before, between and after the halves of R steps. times: [2 R]
    seconds of the halves."""
    bandwidth, flops = np.median(rates, 0).tolist()
    near = (rates[1:] + rates[:-1]) / 2  # [2 R, 2]: of each half, the mean of the rates before and after
    a, t, params = options.agents, options.max_new_tokens, num_params(step.model)
    tokens = sum(map(len, step.ids)) + options.prompts * options.group * t
    decode_floors = a * t * params * jnp.dtype(options.dtype).itemsize / near[::2, 0]  # seconds
    update_floors = a * 6 * params * tokens / near[1::2, 1]
    return dict(
        read_gb_per_s=bandwidth / 1e9,
        matmul_gflop_per_s=flops / 1e9,
        decode_share_of_bandwidth=float(np.median(decode_floors / times[::2])),
        update_share_of_flops=float(np.median(update_floors / times[1::2])),
    )


def main() -> None:
    options = tyro.cli(Bench)
    if options.compile_cache:
        jax.config.update("jax_compilation_cache_dir", os.path.abspath(options.compile_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    figures = {name: round(x, 4) if isinstance(x, float) else x for name, x in bench(options).items()}
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {x}" for name, x in figures.items()))


if __name__ == "__main__":
    main()
