"""Programs compiled for an H100 that is not here: memory, bytes and kernels stay within what was reached.

Needs the wheels of the extra `cuda12`; no GPU and no driver. Counts are those of `jmarl.plan.hlo` on Qwen2.5's shapes in
bfloat16, two agents, 8 prompts x 8 completions each, unless said. Nothing is timed. Bounds are a few per cent above what was
seen with jax 0.10.2.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.families import model_of
from experiments.bench.sizes import MODELS
from jmarl.config import TrainConfig
from jmarl.learning.choose import is_open
from jmarl.models import gpu
from jmarl.models.gpu import has_cuda
from jmarl.models.hub.agents import config_from_hf, config_to_hf
from jmarl.models.weights import num_params
from jmarl.plan.devices import GIB, GPUS, compile_devices, compile_for
from jmarl.plan.fit import choose_settings
from jmarl.plan.hlo import COLLECTIVES, Program, exchanged, largest, size_of
from jmarl.plan.plan import POOL, describe_team
from jmarl.plan.programs import programs_of_shapes, shapes_of_run
from jmarl.team import Team

QWEN3_MOE: dict[str, Any] = dict(
    model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=2,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, max_position_embeddings=32768, moe_intermediate_size=768,
    norm_topk_prob=True,
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_cuda(), reason="pip install 'jmarl[cuda12]'")]
nightly = pytest.mark.nightly  # figures of other sizes, whose bounds CI holds at one size


def compile_program(team: Team, kind: str, prompt: int, cfg: TrainConfig, devices: int = 1, hosts: int = 1) -> Any:
    """A program of a run for H100s."""
    setup, state = shapes_of_run(team, cfg, compile_devices(GPUS["h100"], devices, hosts))
    return compile_for(GPUS["h100"], {kind: programs_of_shapes(setup, state, prompt)[kind]})[kind]


def team_of(model: str) -> Team:
    """Two agents of this model, of which only the shapes are known."""
    return describe_team([(model, MODELS[model], None)] * 2, shared_weights=False)


@functools.cache
def compiled(model: str, kind: str, prompt: int, hosts: int = 1, **settings: Any) -> tuple[Any, Program]:
    """The program of a run for an H100, or for hosts of 8, and its counter."""
    cfg = TrainConfig.of(**dict(num_prompts=8, num_generations=8, remat="full", micro_batches=1) | settings)
    program = compile_program(team_of(model), kind, prompt, cfg, 8 * hosts if "data" in cfg.run.mesh else 1, hosts)
    return program, Program(program.as_text(), settings["max_new_tokens"], per_host=8 * (hosts > 1))


def gib(program: Any) -> tuple[float, float]:
    """GiB of temporaries, and of arguments and temporaries."""
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes / GIB, (memory.temp_size_in_bytes + memory.argument_size_in_bytes) / GIB


def test_a_decode_step_reads_each_weight_once() -> None:
    """One prompt x 8 completions: 1.98 GB of weights, and the cache. The loop's number of steps is known."""
    _, counter = compiled("0.5B", "sampling", 256, num_prompts=1, max_new_tokens=256)
    _, steps, cost = counter.loops()[1]  # the first is the loop over chunks of steps
    assert steps == gpu.STEPS_PER_LOOK and cost.bytes < 2.3e9 and cost.kernels < 400


def test_refilled_slots_cost_little() -> None:
    """`async_steps=1`, 64 rows: a step of rows of different ages has as many kernels as a dense one and reads 8 % more, because
    each slot has its own prompt's keys. All loops over tokens have a known number of steps; their caches are not copied."""
    program, counter = compiled("0.5B", "sampling", 256, max_new_tokens=256, async_steps=1)
    over_tokens = [cost for _, steps, cost in counter.loops() if steps == gpu.STEPS_PER_LOOK]
    assert len(over_tokens) == 3  # 64 slots, 16 and 4
    most = max(over_tokens, key=lambda cost: cost.bytes)
    assert most.bytes < 3.9e9 and most.kernels < 400
    assert gib(program)[0] < 2.9


@pytest.mark.parametrize(
    "model, num_prompts, bound",
    [("0.5B", 1, 2.5), pytest.param("0.5B", 8, 2.5, marks=nightly), pytest.param("1.5B", 8, 7.2, marks=nightly)],
)
def test_the_sampler_keeps_one_copy_of_the_weights(model: str, num_prompts: int, bound: float) -> None:
    """In bfloat16: 1.84 and 5.75 GiB. With the caches of 64 rows they are 2.26 and 6.74 GiB."""
    program, _ = compiled(model, "sampling", 256, num_prompts=num_prompts, max_new_tokens=256)
    assert gib(program)[0] < bound


def test_the_sampler_of_adapters_has_no_copy_of_the_base() -> None:
    """4 layers of Llama 3.1 8B, two agents of 32 rows: 0.55 GiB are caches, adapters, and a layer in prefill; the layers of the
    base are 1.63. A step of 16 tokens has as many kernels as one that reads copies."""
    model = dataclasses.replace(model_of("llama"), num_layers=4)
    cfg = TrainConfig.of(num_prompts=4, num_generations=8, max_new_tokens=256, lora_rank=16, remat="full", micro_batches=1)
    program = compile_program(describe_team([("base", model, None)] * 2, shared_weights=False), "sampling", 256, cfg)
    steps = [cost for _, count, cost in Program(program.as_text(), 16).loops() if count == gpu.STEPS_PER_LOOK]
    assert gib(program)[0] < 0.6
    assert max(cost.kernels for cost in steps) < 145 and max(cost.bytes for cost in steps) < 3.7e9


def test_an_update_that_saves_memory_is_small() -> None:
    program, counter = compiled("0.5B", "update", 256, max_new_tokens=512)
    assert gib(program)[1] < 17.6
    # No scores [query, key] in float32: the largest such array would have the tokens of a row on both axes.
    tokens = {512, 256, 256 + 512}
    scores = largest(counter.shapes(), lambda kind, axes: kind == "f32" and len(axes) >= 2 and set(axes[-2:]) <= tokens)
    assert scores == 0


@pytest.mark.parametrize(
    "model, prompt, settings, memory",
    [
        ("0.5B", 512, dict(max_new_tokens=2048), 24),
        pytest.param("1.5B", 256, dict(max_new_tokens=512), POOL * GPUS["h100"].memory / GIB, marks=nightly),
        pytest.param("7B", 256, dict(max_new_tokens=512, lora_rank=16), 40, marks=nightly),
    ],
)
def test_by_default_an_update_is_cut_until_it_fits(
    model: str, prompt: int, settings: dict[str, Any], memory: float, capsys: pytest.CaptureFixture
) -> None:
    """memory: GiB that JAX takes; of an H100 it is 59.3. Proved by two or three compilations."""
    cfg = TrainConfig.of(num_prompts=8, num_generations=8, **settings)
    gpu = GPUS["h100"]._replace(memory=int(memory * GIB / POOL))
    chosen, line = choose_settings(team_of(model), cfg, gpu, prompt)
    with capsys.disabled():
        print(f"\n{model}: {line}")
    assert chosen.sampling.compute_dtype == "bfloat16" and not is_open(chosen)
    need, room = map(float, re.findall(r"([\d.]+) of ([\d.]+) GiB", line)[0])
    assert need <= 0.951 * room and room == pytest.approx(memory, abs=0.06)


def test_programs_for_a_gpu_refuse_auto_that_was_not_chosen() -> None:
    cfg = TrainConfig.of(max_new_tokens=16)
    setup, state = shapes_of_run(team_of("0.5B"), cfg, compile_devices(GPUS["h100"]))
    assert setup.algorithm.compute_dtype == "bfloat16"
    with pytest.raises(ValueError, match="=auto is chosen on a GPU when a run starts"):
        programs_of_shapes(setup, state, 16)


def test_an_update_of_few_rows_moves_few_bytes() -> None:
    _, counter = compiled("0.5B", "update", 256, num_prompts=1, max_new_tokens=512)
    assert counter.cost().bytes < 300e9


def test_agents_that_are_mapped_are_merged_for_cudnn() -> None:
    """`per_agent=vmap`: jax 0.10.2 cannot map the gradient of cuDNN's attention."""
    program, _ = compiled("0.5B", "update", 256, num_prompts=1, max_new_tokens=256, per_agent="vmap")
    assert program.as_text().count("__cudnn$fmhaSoftmaxBackward") >= 1


def test_sums_over_tokens_have_no_order_that_changes() -> None:
    """Every scatter of an update writes each index once."""
    program, _ = compiled("0.5B", "update", 256, num_prompts=1, max_new_tokens=512)
    scatters = [line for line in program.as_text().splitlines() if " scatter(" in line]
    assert scatters and all("unique_indices=true" in line for line in scatters)


def test_no_kernel_of_a_decode_step_is_launched_by_itself(tmp_path: Path) -> None:
    """The body of the decode loop is one command buffer, which the GPU replays; read from XLA's list of what it launches.

    In the programs of `jmarl plan`, which says whether the run fits and how long it takes at best."""
    model = dataclasses.replace(MODELS["0.5B"], num_layers=4)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(model)))
    settings = [f"models={tmp_path}", "num_agents=2", "compute_dtype=bfloat16", "held_out=0"]
    command = [sys.executable, "-m", "jmarl", "plan", "--config", "magrpo", "--device", "h100", "--prompt-tokens", "200"]
    flags = f"--xla_dump_to={tmp_path / 'dump'} --xla_dump_hlo_module_re=.*sample_stack.*"
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([*command, "--set", *settings], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fits: " in done.stdout and re.search(r"at best: [\d,]+ tokens/s sampled", done.stdout)
    (path,) = (tmp_path / "dump").glob("*thunk_sequence_after_thunk_passes.txt")
    body = max(loop_bodies(path.read_text()), key=lambda body: (sum(kind == "kCuDnn" for _, kind in body), -len(body)))
    assert sum(kind == "kCuDnn" for _, kind in body) >= model.num_layers, "the innermost loop with attention in it"
    outermost = min(indent for indent, _ in body)
    assert {kind for indent, kind in body if indent == outermost} == {"kCommandBuffer"}


def loop_bodies(text: str) -> list[list[tuple[int, str]]]:
    """Return the body of each loop in a sequence of thunks: the indentation and the kind of each."""
    lines = [match for match in map(re.compile(r"( *)(?:\d+: (k\w+)|body:)").match, text.splitlines()) if match]
    bodies = []
    for i, line in enumerate(lines):
        if line[2] is None:
            end = next((j for j in range(i + 1, len(lines)) if len(lines[j][1]) <= len(line[1])), len(lines))
            bodies.append([(len(other[1]), other[2]) for other in lines[i + 1 : end] if other[2]])
    return bodies


# --- eight devices -----------------------------------------------------------------------------------------------------


def received(counter: Program) -> dict[str, float]:
    """Bytes that a device receives in each kind of collective operation, each counted once, also in loops."""
    totals: dict[str, float] = {}
    for lines in counter.computations.values():
        shapes = {line.name: line.shape for line in lines}
        for line in lines:
            if (kind := line.opcode.removesuffix("-start")) in COLLECTIVES:
                given = sum(size_of(shapes[name]) for name in line.operands if name in shapes)
                totals[kind] = totals.get(kind, 0) + exchanged(line, given)
    return totals


TWO_HOSTS = dict(model="0.5B", hosts=2, mesh="agent=2,data=8")  # of eight
ONE_HOST = [pytest.param(dict(model="1.5B", mesh=mesh), marks=nightly) for mesh in ("data=8", "agent=2,data=4")]


def compiled_on(kind: str, where: dict[str, Any]) -> tuple[Any, Program]:
    return compiled(kind=kind, prompt=256, max_new_tokens=256, **where)


@pytest.mark.parametrize("where", [TWO_HOSTS, *ONE_HOST], ids=str)
def test_an_update_exchanges_weights_and_their_gradients_only(where: dict[str, Any]) -> None:
    """The weights of an agent forward and backward in bfloat16, their gradient once, and less than 2 MB of all-reduces: norms,
    biases and metrics. With data=8 a device updates both agents."""
    _, counter = compiled_on("update", where)
    agents, others = {"data=8": (2, 7 / 8), "agent=2,data=4": (1, 3 / 4), "agent=2,data=8": (1, 7 / 8)}[where["mesh"]]
    weights = 2 * agents * num_params(MODELS[where["model"]])
    assert set(received(counter)) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert received(counter)["all-reduce"] < 2e6
    assert 2.6 < counter.cost().exchanged / (weights * others) <= 3  # embeddings are gathered once


@pytest.mark.parametrize("where", [TWO_HOSTS, *ONE_HOST], ids=str)
def test_decoding_exchanges_nothing(where: dict[str, Any]) -> None:
    """The loops of the sampler whose number of steps is not known are the decode loops; prefill gathers layers."""
    _, counter = compiled_on("sampling", where)
    decoding = [cost for _, count, cost in counter.loops() if count is None]
    assert decoding and all(cost.exchanged == 0 and cost.kernels > 300 for cost in decoding[:1])
    assert sum(cost.exchanged for cost in decoding) == 0 and counter.cost().exchanged > 0


def test_nothing_crosses_between_hosts_that_have_an_agent_each() -> None:
    """Each gathers the weights of its agent."""
    for kind in ("update", "sampling"):
        cost = compiled_on(kind, TWO_HOSTS)[1].cost()
        assert cost.exchanged > 0 and cost.crossed == 0


@nightly
def test_weights_that_two_hosts_divide_cross_between_them() -> None:
    cost = compiled_on("update", TWO_HOSTS | {"mesh": "data=16"})[1].cost()
    assert cost.crossed > 0.9 * cost.exchanged


@pytest.mark.parametrize("while_sampling", [False, pytest.param(True, marks=nightly)])
def test_two_7b_agents_with_full_weights_fit_eight_gpus(while_sampling: bool) -> None:
    """64 rows of each agent x 512 tokens, data=8: at most 60 GiB on each, with both moments in memory while sampling."""
    eight = dict(model="7B", mesh="data=8")
    update, _ = compiled_on("update", eight)
    assert gib(update)[1] < 40
    if while_sampling:
        state = update.memory_analysis().argument_size_in_bytes / GIB
        assert gib(compiled_on("sampling", eight)[0])[0] + state < 60


@functools.cache
def update_of_experts(experts: int, choices: int) -> tuple[float, float]:
    """Operations of an update of 2 layers of Qwen3-30B-A3B, and GiB of temporaries less the weights of a layer."""
    cfg = TrainConfig.of(num_prompts=8, num_generations=8, remat="full", micro_batches=1, max_new_tokens=128, lora_rank=8)
    fields = QWEN3_MOE | {"num_experts": experts, "num_experts_per_tok": choices}
    team = describe_team([("moe", config_from_hf(fields), None)], shared_weights=False)
    program = compile_program(team, "update", 128, cfg)
    weights = 2 * 3 * experts * QWEN3_MOE["hidden_size"] * QWEN3_MOE["moe_intermediate_size"]  # of a layer, in bytes
    return Program(program.as_text(), 1).cost().operations, gib(program)[0] - weights / GIB


def test_many_experts_take_no_more_operations_than_few() -> None:
    """128 as 16. What a layer holds grows by its weights alone."""
    (many, memory), (few, memory_of_few) = update_of_experts(128, 8), update_of_experts(16, 8)
    assert many < 1.1 * few and memory < 1.2 * memory_of_few


@nightly  # of programs for CPUs `test_experts` holds it
def test_operations_of_experts_grow_with_those_of_a_token() -> None:
    assert update_of_experts(128, 2)[0] < 0.8 * update_of_experts(128, 8)[0]


def test_a_token_reads_the_memory_of_recurrent_layers_twice() -> None:
    """And writes it once: 4 layers of Qwen3.5 9B, of which 3 are recurrent, two agents of 32 rows. 3.8 GB of weights are read
    once for both, and the memories are 0.4 GB; to read these a third time would be 6.1 GB."""
    model = model_of("qwen3_5_text")
    model = dataclasses.replace(model, num_layers=4, delta_layers=model.delta_layers[:4])
    cfg = TrainConfig.of(num_prompts=4, num_generations=8, max_new_tokens=256, lora_rank=16, remat="full", micro_batches=1)
    team = describe_team([("recurrent", model, None)] * 2, shared_weights=False)
    counter = Program(compile_program(team, "sampling", 256, cfg).as_text(), 16)
    steps = [cost for _, count, cost in counter.loops() if count == gpu.STEPS_PER_LOOK]
    assert 5e9 < max(cost.bytes for cost in steps) < 5.9e9
