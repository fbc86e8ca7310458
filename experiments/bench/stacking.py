"""Measure where stacking stops paying: N agents in one program against N programs of one agent, one after the other.

Claim: one program saves what the agents have in common. With LoRA that is reading the base: sampling gains most of N while N
    agents have fewer than R tokens in flight, of which a product takes as long as reading its weights (`break_even`), and
    less and less beyond. With full weights it is launches of kernels, which matter for small models.
Command: python -m experiments.bench.stacking --out experiments/stacking.png      (15 minutes, estimated; flags: --help)
         python -m experiments.bench.stacking --gpu --out experiments/stacking.png    (compiles for an H100; 8, estimated)
         python -m experiments.bench.stacking --draw --out experiments/stacking.png   (draws the points that are there)
On the CPU both ways are timed by turns, with random weights, and must sample equal tokens and learn equal parameters up to
rounding; a figure is the median of the ratios. `--gpu` needs the wheels of jax[cuda12] and no GPU: it counts bytes, operations
and kernels of the programs that XLA compiles, and their best time is max(bytes / bandwidth, operations / peak) + kernels x
`LAUNCH`. Nothing of it is timed. A JSON file keeps all points; a case replaces its own. Expected: experiments/README.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.sizes import MODELS
from experiments.bench.step import SHAPES, machine_rates, seconds
from experiments.tables import markdown_table, pyplot
from jmarl.config import TrainConfig
from jmarl.learning.batches import make_batch
from jmarl.models import lora
from jmarl.models.agent import Agent
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import init_params
from jmarl.models.stack import take_agents
from jmarl.plan.devices import GPUS, Gpu, compile_devices, compile_for
from jmarl.plan.plan import LARGEST_POOL, describe_team, parts_of_state, plan_program
from jmarl.plan.programs import UnknownTokenizer, programs_of_shapes, shapes_of_run
from jmarl.runs.precompile import compile_all
from jmarl.runs.start import start
from jmarl.sampling.sampler import RowIds
from jmarl.sampling.stack_program import SampleProgram, sample_stack
from jmarl.team import make_team
from jmarl.types import Batch, Completions, StackState

SMOLLM2 = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, rope_theta=1e5)
LAUNCH = 2e-6  # seconds of a kernel in a command buffer; timed on an H200: (2.1 ms - 3.39 GB / 3.8 TB/s) / 391 kernels = 3e-6
RANK, GROUP = 16, 8
POINTS = Path(__file__).parents[1] / "stacking.json"


class Case(NamedTuple):
    """A model, what is trained of it, and the numbers that are tried."""

    model: str
    config: ModelConfig
    weights: str  # full | LoRA
    agents: tuple[int, ...]
    rows: tuple[int, ...]  # of an agent
    tokens: int  # of each prompt, and of each completion
    ways: tuple[str, ...]  # of `WAYS`
    repeats: int = 0  # 0: compiled, not timed


# How the agents of one program are computed: the setting per_agent, which only updates read, and the setting mesh
WAYS = {"vmap": ("vmap", "agent=1"), "map": ("map", "agent=1"), "cores": ("map", "auto")}
TINY, QWEN = SHAPES["tiny-random"], ("Qwen2.5-0.5B", MODELS["0.5B"])
MEASURED = {
    "tiny:full": Case("tiny", TINY, "full", (2, 4, 16), (1, 8, 64), 16, ("vmap", "map", "cores"), 15),
    "tiny:lora": Case("tiny", TINY, "LoRA", (2, 4, 16), (1, 8, 64), 16, ("vmap", "map"), 15),
    "smollm2:full": Case("SmolLM2-135M", SMOLLM2, "full", (2,), (1, 8, 32), 16, ("map", "cores"), 3),
    "smollm2:lora": Case("SmolLM2-135M", SMOLLM2, "LoRA", (4,), (1, 8, 32), 16, ("map",), 3),
}
COMPILED = {
    "0.5B:full": Case(*QWEN, "full", (1, 4), (1, 8, 64), 128, ("vmap", "map")),
    "0.5B:lora": Case(*QWEN, "LoRA", (1, 4, 16), (8, 64, 256), 128, ("vmap", "map")),
    "7B:lora": Case("Qwen2.5-7B", MODELS["7B"], "LoRA", (1, 4, 16), (8, 64, 256), 128, ("vmap", "map")),
}
QUICK = {"tiny:full": MEASURED["tiny:full"]._replace(agents=(2,), rows=(8,), tokens=8, ways=("map",), repeats=1)}
Point = dict[str, Any]


def settings(case: Case, rows: int, per_agent: str = "map", mesh: str = "agent=1") -> TrainConfig:
    """Return the settings of a run; all completions have their full length."""
    return TrainConfig.of(
        algorithm="mareinforce", num_prompts=max(rows // GROUP, 1), num_generations=min(rows, GROUP), learning_rate=1e-4,
        max_new_tokens=case.tokens, min_new_tokens=case.tokens, lora_rank=RANK if case.weights == "LoRA" else 0,
        per_agent=per_agent, mesh=mesh, remat="dots", micro_batches=1, compute_dtype="float32" if case.repeats else "bfloat16",
    )  # fmt: skip


# --- timed on this machine ---------------------------------------------------------------------------------------------


class Stack:
    """Agents in one program, each with weights that follow from its number."""

    def __init__(self, case: Case, cfg: TrainConfig, agents: Sequence[int]):
        base = Agent(case.model, case.config, random_weights(case.config), UnknownTokenizer(case.config.vocab_size))
        self.numbers, self.cfg, lora_on = agents, cfg, case.weights == "LoRA"
        self.setup, state = start(*make_team([base] * len(agents), lora=lora_on), cfg)
        self.state: StackState = state.stacks[0]._replace(params=vary(state.stacks[0].params, np.array(agents)))
        p, s = cfg.episodes.num_prompts, case.tokens
        ids = np.random.default_rng(0).integers(1, case.config.vocab_size, (p, s), np.int32)
        self.prompts = np.tile(ids, (len(agents), 1, 1)), np.full((len(agents), p), s, np.int32)

    def sample(self, call: Any = sample_stack) -> Any:
        """Return the completions of the agents."""
        prompt_ids, agents = np.arange(self.cfg.episodes.num_prompts), np.array(self.numbers)[:, None]
        keys = RowIds(seed=0, step=0, purpose=0, stack=0, agents=agents, prompt_ids=prompt_ids)
        spec, group = self.setup.team.stacks[0], self.cfg.episodes.num_generations
        program = SampleProgram.of(spec, self.cfg.sampling, group, self.state.params)
        return call(lora.model_of(self.state), self.prompts, keys, np.array([0], np.int32), program=program)

    def update(self, batch: Batch) -> Any:
        """Learn from a batch."""
        self.state, metrics = self.setup.programs[0](self.state, batch, 0)
        return self.state.params, metrics

    def programs(self, only: Sequence[str]) -> Iterator[Any]:
        """Yield the lowered programs of these kinds."""
        lowered = self.sample(sample_stack.lower)
        if "sampling" in only:
            yield lowered
        zeros = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), lowered.out_info)
        yield self.setup.programs[0].lower(self.state, self.batch(zeros))

    def weights(self, place: int) -> Any:
        """Return a copy of what one agent trains, [1, ...]; not committed to a device, or programs would be compiled again."""
        return jax.tree.map(lambda x: jnp.array(jax.device_get(take_agents(x, slice(place, place + 1)))), self.state.params)

    def batch(self, completions: Completions) -> Batch:
        """Return what the agents learn from: random rewards."""
        shape = completions.ended.shape
        rewards = np.random.default_rng(1).normal(size=shape)
        return make_batch(self.prompts, completions, rewards, np.arange(shape[1]), completions.tokens.shape[-1])


@functools.cache
def random_weights(config: ModelConfig) -> Any:
    """Return the weights that all agents of a model start from, on the host."""
    return jax.device_get(init_params(config, jax.random.key(0)))


@functools.partial(jax.jit, donate_argnums=0)
def vary(trained: Any, agents: Any) -> Any:
    """Return what is trained [A, ...] with a change that follows from the agents' numbers [A]; adapters start equal."""

    def moved(x: jax.Array) -> jax.Array:
        places = jnp.arange(x[0].size, dtype=jnp.float32).reshape(x.shape[1:])
        return x + 0.01 * jax.vmap(lambda agent: jnp.cos(places + agent))(agents)

    return jax.tree.map(moved, trained)


def measure(case: Case) -> Iterator[Point]:
    """Yield the points of a case, each timed in both ways by turns."""
    for rows in case.rows:
        alone = Stack(case, settings(case, rows), [0])
        compile_all(alone.programs(("sampling", "update")))
        for agents in case.agents:
            samples, name = list[Completions](), dict(agents=agents, rows=rows)
            for way in case.ways:
                one = Stack(case, settings(case, rows, *WAYS[way]), range(agents))
                of_mesh = "cores" if way == "cores" else "one"  # the sampler does not read per_agent
                kinds = ("sampling", "update") if way in (case.ways[0], "cores") else ("update",)
                compile_all(one.programs(kinds))
                if "sampling" in kinds:
                    tokens, point = time_sampling(case, alone, one)
                    samples.append(tokens)
                    yield dict(kind="sampling", way=of_mesh) | name | point
                yield dict(kind="update", way=way) | name | time_update(case, alone.cfg, one, samples[-1])
                del one


def time_sampling(case: Case, alone: Stack, one: Stack) -> tuple[Completions, Point]:
    """Time one program against one program after the other, which must sample the same tokens."""
    models = [one.weights(a) for a in one.numbers]

    def in_turn() -> list[Completions]:
        out = []
        for alone.numbers, params in zip(([a] for a in one.numbers), models, strict=True):
            alone.state = alone.state._replace(params=params)
            out.append(jax.block_until_ready(alone.sample()))
        return out

    samples, separate = jax.device_get((one.sample(), in_turn()))
    equal = np.mean([np.mean(samples.tokens[i] == x.tokens[0]) for i, x in enumerate(separate)])
    if equal < 0.9:  # a token that is drawn within rounding of another changes the rest of its row
        raise ValueError(f"{case.model}, {case.weights}: only {equal:.3f} of the tokens are equal in one program")
    return samples, ratios(case, one.sample, in_turn)


def time_update(case: Case, cfg: TrainConfig, one: Stack, samples: Completions) -> Point:
    """Time an update of one program against updates one after the other, which must learn the same parameters.

    The last agent is updated N times in place of N agents: the time does not depend on the weights. cfg: of one agent.
    """
    batch, last = one.batch(samples), one.numbers[-1]
    parts = [jax.tree.map(lambda x, i=i: x[i : i + 1], batch) for i in range(len(one.numbers))]
    alone, before = Stack(case, cfg, [last]), jax.device_get(one.weights(last))
    alone.state = alone.state._replace(params=one.weights(last))
    jax.block_until_ready((alone.update(parts[-1]), one.update(batch)))
    learned = alone.weights(0), one.weights(last)
    squares = jax.tree.map(lambda x, y, z: [jnp.sum((y - z) ** 2), jnp.sum((y - x) ** 2)], before, *learned)
    difference, change = np.sum(np.reshape(jax.tree.leaves(squares), (-1, 2)), 0, dtype=float)
    distance = (difference / change) ** 0.5
    if not distance < 0.05:  # Adam's first step is a sign: where a gradient is 0 but for rounding, it may differ
        raise ValueError(f"{case.model}, {case.weights}: changes of the parameters differ by {distance:.2g} in one program")

    def in_turn() -> None:
        for part in parts:
            jax.block_until_ready(alone.update(part))

    return ratios(case, lambda: one.update(batch), in_turn)


def ratios(case: Case, together: Any, in_turn: Any) -> Point:
    """Return the median times of both ways, and the median of their ratios; both have run once."""
    times = np.array([[seconds(together), seconds(in_turn)] for _ in range(case.repeats)])
    together_s, in_turn_s, ratio = np.median(np.c_[times, times[:, 1] / times[:, 0]], 0).tolist()
    return dict(together_s=round(together_s, 5), in_turn_s=round(in_turn_s, 5), ratio=round(ratio, 3))


# --- compiled for a GPU that is not here -------------------------------------------------------------------------------


def count(case: Case, gpu: Gpu) -> Iterator[Point]:
    """Yield the points of a case: what programs of N agents do, N = 1 included. Left out: those that do not fit on the GPU."""
    for agents in case.agents:
        for rows in case.rows:
            counted = [*count_programs(case, gpu, agents, rows)]
            fitting = [x for x in counted if x["peak"] <= LARGEST_POOL * gpu.memory]
            yield from fitting
            if not fitting:
                break  # more rows do not fit either


def count_programs(case: Case, gpu: Gpu, agents: int, rows: int) -> Iterator[Point]:
    """Yield what the sampler and the updates of N agents do. An update of `map` grows with N: one number of agents says it."""
    team, state_size, programs = describe_team([(case.model, case.config, None)] * agents, False), 0, {}
    for way in case.ways:
        if way == "map" and agents != case.agents[1]:
            continue
        cfg = settings(case, rows, *WAYS[way]).replace(micro_batches=max(rows // GROUP, 1))
        setup, state = shapes_of_run(team, cfg, compile_devices(gpu))
        lowered = programs_of_shapes(setup, state, case.tokens)
        programs |= {(kind, "one" if kind == "sampling" else way): x for kind, x in lowered.items()}
        state_size = sum(parts_of_state(state).values())
    for (kind, way), compiled in compile_for(gpu, programs).items():
        plan = plan_program(kind, compiled, state_size, case.tokens, 1, gpu)
        counts = {} if plan.cost is None else plan.cost._asdict()
        numbers = {name: round(counts[name]) for name in ("bytes", "operations", "kernels")}
        yield dict(kind=kind, way=way, agents=agents, rows=rows) | numbers | dict(peak=plan.peak)


def best_time(point: Point, gpu: Gpu) -> float:
    """Return the seconds that a program takes at least."""
    work = max(point["bytes"] / gpu.bandwidth, point["operations"] / gpu.bfloat16)
    return work + point["kernels"] * LAUNCH


def break_even(operations: float, bandwidth: float, size: int) -> float:
    """Return R, the number of tokens in flight at which a product of weights takes as long as reading them.

    A token multiplies and adds once for each weight of `size` bytes. operations, bandwidth: per second.
    """
    return operations * size / (2 * bandwidth)


def with_ratio(points: Sequence[Point], gpu: Gpu) -> list[Point]:
    """Return counted points of several agents with the ratio of the best times."""
    one = {(x["kind"], x["rows"]): best_time(x, gpu) for x in points if x["agents"] == 1}
    several = [x for x in points if x["agents"] > 1 and (x["kind"], x["rows"]) in one]
    return [x | dict(ratio=x["agents"] * one[x["kind"], x["rows"]] / best_time(x, gpu)) for x in several]


# --- the figure --------------------------------------------------------------------------------------------------------

COLORS = {2: "C0", 4: "C1", 16: "C3"}
LINES: dict[str, Any] = {"one": "-", "vmap": "-", "map": ":", "cores": "--"}
GROUPS = ("tiny", "smollm2", "0.5B", "7B")
RULE = """LoRA: one read of the base serves all agents. Sampling gains 3/4 of N or more until rows x N reach R tokens in flight
(bound of an H100 in bfloat16, R = 295; two shared cores: half of N), then less. Full weights: only launches are saved.
Updates: one agent fills the device; per_agent=vmap saves launches and reads of the base. per_agent=map, the default, has the
memory of one agent and saves no byte; with full weights it copies each agent's, and is slower where tokens are few."""


def draw(data: dict[str, Any], out: Path) -> None:
    """Draw a line of panels for each model: sampling and update, full weights and LoRA."""
    gpu, cases, machine = GPUS["h100"], MEASURED | COMPILED, data["machine"]
    figure, grid = pyplot().subplots(len(GROUPS), 4, figsize=(13, 12), sharex=True, sharey=True, constrained_layout=True)
    for group, line in zip(GROUPS, grid, strict=True):
        case = cases[f"{group}:lora"]
        rates = (machine["multiply"], machine["read"], 4) if case.repeats else (gpu.bfloat16, gpu.bandwidth, 2)
        tokens = break_even(*rates)
        for axes, (kind, weights) in zip(line, itertools.product(("sampling", "update"), ("full", "lora")), strict=True):
            own = [x for x in data["points"].get(f"{group}:{weights}", []) if x["kind"] == kind]
            of_a_row = 1 if kind == "sampling" else case.tokens * (1 + 1 / GROUP)  # tokens in flight
            draw_panel(axes, own if case.repeats else with_ratio(own, gpu), tokens / of_a_row)
            where = "timed on two cores" if case.repeats else "compiled for an H100, not timed"
            trained = "LoRA" if weights == "lora" else "full weights"
            axes.set_title(f"{kind}, {trained}\n{case.model}, {where}", fontsize=8)
            if not own:
                text = "not measured" if f"{group}:{weights}" in cases else "one agent does not fit on an H100"
                axes.text(0.5, 0.6, text, ha="center", transform=axes.transAxes)
    for axes in grid[:, 0]:
        axes.set_ylabel("time of N programs /\ntime of one program", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("rows of an agent", fontsize=9)
    draw_legend(figure)
    figure.suptitle(RULE, fontsize=10.5, x=0.01, ha="left")
    figure.savefig(out, dpi=100)


def draw_panel(axes: Any, points: Sequence[Point], reach: float) -> None:
    """Draw one curve for each number of agents and way; below 1, one program is slower. reach: rows with R tokens in flight."""
    axes.set(xscale="log", yscale="log", ylim=(0.3, 20), xlim=(0.85, 400))
    axes.axhspan(0.3, 1, color="0.93")
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.axvline(reach, color="0.6", linewidth=0.8, linestyle="-.")
    axes.set_xticks(ticks := [1, 8, 32, 64, 256], ticks, fontsize=8)
    axes.set_yticks(ticks := [0.5, 1, 2, 4, 8, 16], ticks, fontsize=8)
    axes.minorticks_off()
    for agents, way in sorted({(x["agents"], x["way"]) for x in points}):
        own = sorted((x["rows"], x["ratio"]) for x in points if (x["agents"], x["way"]) == (agents, way))
        axes.plot(*zip(*own, strict=True), linestyle=LINES[way], color=COLORS[agents], marker="o", markersize=3, linewidth=1.3)


def draw_legend(figure: Any) -> None:
    """Say what colors and lines mean."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=color, label=f"N = {agents} agents") for agents, color in COLORS.items()]
    names = {"vmap": "one device (updates: per_agent=vmap)", "map": "updates: per_agent=map", "cores": "a device per core, map"}
    lines += [Line2D([], [], color="0.2", linestyle=LINES[way], label=text) for way, text in names.items()]
    lines += [Line2D([], [], color="0.6", linestyle="-.", label="R tokens in flight")]
    figure.legend(handles=lines, loc="outside lower center", ncols=4, fontsize=9)


# --- the command -------------------------------------------------------------------------------------------------------


def table(points: Sequence[Point]) -> str:
    """Return the ratios as a table: a line for each kind, way and number of agents, a column for each number of rows."""
    rows = sorted({x["rows"] for x in points})
    lines = sorted({(x["kind"], x["way"], x["agents"]) for x in points})
    cells = {(x["kind"], x["way"], x["agents"], x["rows"]): f"{x['ratio']:.2f}" for x in points}
    body = [[kind, way, str(n), *(cells.get((kind, way, n, r), "") for r in rows)] for kind, way, n in lines]
    return markdown_table(["part", "way", "agents", *(f"{r} rows" for r in rows)], body)


def read(path: Path) -> dict[str, Any]:
    """Return what was measured before."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"machine": {}, "points": {}}


def write(path: Path, data: dict[str, Any]) -> None:
    """Write what was measured, a point in each line."""
    cases = (f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, own)) + "\n]" for name, own in data["points"].items())
    path.write_text(
        f'{{"machine": {json.dumps(data["machine"])}, "points": {{\n' + ",\n".join(cases) + "\n}}\n", encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="compile for an H100 in place of timing on this machine")
    parser.add_argument("--quick", action="store_true", help="two tiny agents only; writes no points")
    parser.add_argument("--draw", action="store_true", help="only draw the points that are there")
    parser.add_argument("--cases", default="", help="of " + ",".join(MEASURED) + "; with --gpu " + ",".join(COMPILED))
    parser.add_argument("--points", type=Path, default=POINTS, help="JSON file of all points")
    parser.add_argument("--out", type=Path, help="picture to write")
    options = parser.parse_args()
    data, cases = read(options.points), QUICK if options.quick else COMPILED if options.gpu else MEASURED
    names = options.cases.split(",") if options.cases else [*cases]
    if not (options.gpu or options.quick or options.draw):
        rates = zip(("read", "multiply"), map(round, machine_rates("float32")()), strict=True)
        data["machine"] = {name: max(rate, data["machine"].get(name, 0)) for name, rate in rates}  # others may use the machine
    if unknown := set(names) - set(cases):
        parser.error(f"--cases {','.join(unknown)}: choose of {','.join(cases)}")
    for name in () if options.draw else names:
        own = data["points"][name] = list[Point]()
        for point in count(cases[name], GPUS["h100"]) if options.gpu else measure(cases[name]):
            own.append(point)
            if not options.quick:
                write(options.points, data)
        print(f"{name}\n{table(with_ratio(own, GPUS['h100']) if options.gpu else own)}", flush=True)
    if options.out:
        draw(data, options.out)


if __name__ == "__main__":
    main()
