"""Say what a run needs on a device, and how long it takes at best, from its compiled programs.

A best time is the longer of two: operations at the device's full speed, and bytes at its full bandwidth. Real kernels reach a
part of that; no time here was measured. Memory is what XLA's compiler assigns, and the state of the run, which stays on the
device; on a CPU also what the run's process holds (`host.py`).
"""

import datetime
import os
from typing import Any, NamedTuple

from jax.stages import Compiled

from jmarl.config import TrainConfig
from jmarl.files.saved_arrays import nbytes
from jmarl.learning.choose import bytes_on_device
from jmarl.memory import temporaries
from jmarl.models.agent import Agent
from jmarl.models.config import ModelConfig
from jmarl.models.platforms import steps_per_look
from jmarl.models.sharding import DeviceMesh
from jmarl.plan.devices import GIB, NETWORK, Gpu, compile_devices, compile_for
from jmarl.plan.hlo import Cost, Program
from jmarl.plan.host import checkpoints_beside_steps, parts_of_process, writes_checkpoints
from jmarl.plan.measure import RUNS, Measured, measure, present_device
from jmarl.plan.programs import UnknownTokenizer, programs_of_shapes, shapes_of_agent, shapes_of_run
from jmarl.rollout.chunks import num_parts
from jmarl.team import Team, to_checkpoint
from jmarl.types import StackState, TeamState

POOL = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))  # share of a GPU's memory that JAX takes
LARGEST_POOL = 0.95  # that can be asked for


class ProgramPlan(NamedTuple):
    """What one program needs. Sizes in bytes, times in seconds."""

    name: str
    arguments: int
    temporaries: int  # and outputs that take no argument's place
    peak: int  # with all of the run's state on the device
    cost: Cost | None  # None on CPUs
    compute_time: float
    memory_time: float
    exchange_time: float
    measured: Measured | None = None

    @property
    def time(self) -> float:
        """The best time."""
        return max(self.compute_time, self.memory_time, self.exchange_time)


class Plan(NamedTuple):
    """What a run needs on a device, one of `num_devices`."""

    programs: list[ProgramPlan]
    parts: dict[str, int]  # bytes of what is in memory all the time: each part of the state, and on CPUs of the process
    tokens: int  # sampled in a step
    updates: int
    evaluations: int
    gpu: Gpu | None
    num_devices: int = 1
    mesh: DeviceMesh | None = None
    num_hosts: int = 1

    @property
    def peak(self) -> ProgramPlan:
        """The program with the highest peak."""
        return max(self.programs, key=lambda program: program.peak)


def describe_team(models: list[tuple[str, ModelConfig, Any]], shared_weights: bool) -> Team:
    """Return a team whose parameters are shapes. models: name, architecture and tokenizer (or None) of each agent."""
    shapes = {config: shapes_of_agent(config) for _, config, _ in models}
    unknown = {config: UnknownTokenizer(config.vocab_size) for _, config, _ in models}
    agents = [Agent(name, config, shapes[config], tokenizer or unknown[config]) for name, config, tokenizer in models]
    return Team.of(agents, shared_weights=shared_weights)


def make_plan(
    team: Team,
    cfg: TrainConfig,
    gpu: Gpu | None,
    prompt_tokens: int,
    eval_items: int = 0,
    measures: bool = False,
    num_devices: int = 1,
    num_hosts: int = 1,
) -> Plan:
    """Compile the programs of a run for a device or for several, and count what each does.

    Args:
      team: from `describe_team`.
      gpu: None: the CPU of this machine.
      prompt_tokens: length of the longest prompt.
      eval_items: number of held-out tasks.
      measures: also run the programs on a device of this kind, which must be here.
      num_devices: that the setting `mesh` may use, on all hosts.
      num_hosts: that have equally many of them.
    """
    present = present_device(gpu) if measures else None
    setup, state = shapes_of_run(team, cfg, compile_devices(gpu, num_devices, num_hosts), prompt_tokens)
    per_host = 0 if num_hosts == 1 else num_devices // num_hosts
    compiled = compile_for(gpu, programs_of_shapes(setup, state, prompt_tokens, eval_items))
    parts = ({} if gpu else parts_of_process(team, cfg)) | parts_of_state(state)
    programs = [
        plan_program(
            name, program, sum(parts.values()), cfg.sampling.max_new_tokens, calls_of(name, cfg, eval_items), gpu, per_host
        )
        for name, program in compiled.items()
    ]
    if gpu is None and writes_checkpoints(cfg):
        programs.append(plan_checkpoint(state, sum(parts.values()), programs, cfg))
    if present is not None:
        if gpu is not None:  # compiled with all that the run itself would have, such as autotuning
            lowered = programs_of_shapes(*shapes_of_run(team, cfg, [present], prompt_tokens), prompt_tokens, eval_items)
            compiled = {name: program.compile() for name, program in lowered.items()}
        measured = measure(compiled, present)
        programs = [x._replace(measured=measured.get(x.name)) for x in programs]
    rows = cfg.episodes.num_turns * cfg.episodes.num_prompts * cfg.episodes.num_generations
    tokens = team.num_agents * rows * cfg.sampling.max_new_tokens
    every = cfg.run.eval_every or cfg.run.num_updates
    evaluations = 1 + -(-cfg.run.num_updates // every) if eval_items else 0
    return Plan(
        programs, parts, tokens, cfg.run.num_updates, evaluations, gpu, num_devices, setup.team.stacks[0].mesh, num_hosts
    )


def calls_of(name: str, cfg: TrainConfig, eval_items: int) -> int:
    """Return how often a program runs in a step or an evaluation: samplers once for each turn and part of the prompts."""
    if name.startswith("update"):
        return 1
    prompts = eval_items if name.startswith("evaluation") else cfg.episodes.num_prompts
    return cfg.episodes.num_turns * num_parts(prompts, cfg.episodes)


def plan_program(
    name: str, compiled: Compiled, state: int, new_tokens: int, calls: int, gpu: Gpu | None, per_host: int = 0
) -> ProgramPlan:
    """Count one program. state: bytes that stay in memory, the program's own part included. per_host: see `Program`."""
    memory: Any = compiled.memory_analysis()
    sizes = memory.argument_size_in_bytes, temporaries(compiled), state + temporaries(compiled)
    if gpu is None:
        return ProgramPlan(name, *sizes, None, 0.0, 0.0, 0.0)
    text: Any = compiled.as_text()
    cost = Program(text, unknown_trips=new_tokens // steps_per_look("gpu", new_tokens), per_host=per_host).cost()
    speed = gpu.bfloat16 if "bf16" in text else gpu.float32
    exchange = (cost.exchanged - cost.crossed) / gpu.link + cost.crossed / NETWORK
    times = calls * cost.operations / speed, calls * cost.bytes / gpu.bandwidth, calls * exchange
    return ProgramPlan(name, *sizes, cost, *times)


def plan_checkpoint(state: TeamState, resident: int, programs: list[ProgramPlan], cfg: TrainConfig) -> ProgramPlan:
    """Return what a checkpoint needs on a CPU: a copy of what it saves. resident: bytes that stay in memory.

    The programs of the next step run while it is written.
    """
    size = nbytes(to_checkpoint(state))
    beside = max(program.temporaries for program in programs) if checkpoints_beside_steps(cfg) else 0
    return ProgramPlan("checkpoint", size, size, resident + size + beside, None, 0.0, 0.0, 0.0)


def parts_of_state(state: TeamState) -> dict[str, int]:
    """Return the bytes on a device of each part of a run's state that is not empty."""

    def size(stacks: tuple[StackState, ...], *fields: str) -> int:
        return bytes_on_device([getattr(stack, field) for stack in stacks for field in fields])

    parts = {
        "parameters": size(state.stacks, "params"),
        "base of the adapters": size(state.stacks, "base"),
        "moments of the optimizer": size(state.stacks, "opt_state"),
        "reference": size(state.stacks, "reference"),
        "gradients": size(state.stacks, "grads"),
        "critics": size(state.critics, *(field for field in StackState._fields if field != "base")),  # the agents' base
        "completions that have begun": bytes_on_device(state.pending),
    }
    return {name: count for name, count in parts.items() if count}


def lines_of(plan: Plan) -> list[str]:
    """Return the table of programs and what follows from it, as text."""
    head = f"{'program':<20}{'arguments':>11}{'temporary':>11}{'peak GiB':>10}"
    if plan.gpu:
        head += f"{'TFLOP':>9}{'GB':>9}{'kernels':>10}{'compute s':>11}{'memory s':>10}"
    if plan.mesh:
        head += f"{'exchanged GB':>14}{'exchange s':>12}" + f"{'between hosts GB':>18}" * (plan.num_hosts > 1)
    has_measured = any(x.measured for x in plan.programs)
    lines = [head + f"{'measured s':>12}{'GiB alone':>11}" * has_measured]
    for x in plan.programs:
        line = f"{x.name:<20}{x.arguments / GIB:>11.2f}{x.temporaries / GIB:>11.2f}{x.peak / GIB:>10.2f}"
        if x.cost:
            line += f"{x.cost.operations / 1e12:>9.1f}{x.cost.bytes / 1e9:>9.1f}{x.cost.kernels:>10,.0f}"
            line += f"{x.compute_time:>11.3f}{x.memory_time:>10.3f}"
            line += f"{x.cost.exchanged / 1e9:>14.2f}{x.exchange_time:>12.3f}" if plan.mesh else ""
            line += f"{x.cost.crossed / 1e9:>18.4f}" if plan.num_hosts > 1 else ""
        lines.append(line + columns_of(x.measured))
    if has_measured:
        lines += [
            "",
            f"measured: the shortest of up to {RUNS} runs, random weights; GiB alone: beside arguments + temporary",
        ]
    lines += [
        "",
        f"in {'memory' if plan.gpu is None else 'its memory'} all the time: "
        + ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in plan.parts.items()),
    ]
    sizes = plan.parts | {f"temporaries of {plan.peak.name}": plan.peak.temporaries}
    largest = max(sizes, key=lambda name: sizes[name])
    lines.append(f"the largest thing in memory: {largest}, {sizes[largest] / GIB:.2f} GiB")
    return lines + (lines_of_gpu(plan, plan.gpu) if plan.gpu else [line_of_cpu(plan)])


def line_of_cpu(plan: Plan) -> str:
    """Return whether the run fits into the memory of this machine."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    verb = "fits" if plan.peak.peak <= room else "does not fit"
    return f"{verb}: {plan.peak.name} needs {plan.peak.peak / GIB:.1f} GiB, this machine has {room / GIB:.1f}"


def columns_of(measured: Measured | None) -> str:
    """Return the measured time and memory of a program, as far as they are known."""
    if measured is None:
        return ""
    memory = "-" if measured.memory is None else f"{measured.memory / GIB:.2f}"
    return f"{measured.seconds:>12.3f}{memory:>11}"


def lines_of_gpu(plan: Plan, gpu: Gpu) -> list[str]:
    """Return whether the run fits on the GPU, and its best times."""
    need, room = plan.peak.peak, gpu.memory
    text = f"{plan.peak.name} needs {need / GIB:.1f} GiB, the {gpu.name} has {room / GIB:.1f}"
    if plan.mesh:
        axes = ",".join(f"{name}={size}" for name, size in plan.mesh.shape.items() if size > 1)
        text += f" (each of {plan.mesh.size}: mesh={axes}, strategy={plan.mesh.strategy})"
    if need <= POOL * room:
        lines = [f"fits: {text}"]
    elif need <= LARGEST_POOL * room:
        lines = [f"fits: {text}, of which JAX takes {100 * POOL:.0f} %: set XLA_PYTHON_CLIENT_MEM_FRACTION={LARGEST_POOL}"]
    else:
        lines = [
            f"does not fit: {text}. Lower it by micro_batches, remat=full, num_prompts, lora_rank or compute_dtype=bfloat16"
        ]
    times = {x.name: x.time for x in plan.programs}
    evaluation = sum(time for name, time in times.items() if name.startswith("evaluation"))
    sampling = sum(time for name, time in times.items() if "sampling" in name)
    step = sum(times.values()) - evaluation
    run = plan.updates * step + plan.evaluations * evaluation
    lines.append(
        f"at best: {plan.tokens / sampling:,.0f} tokens/s sampled, {step:.2f} s a step ({sampling:.2f} s of it sampling), "
        f"{datetime.timedelta(seconds=round(run))} for {plan.updates} updates; "
        "rewards, launches of kernels and compiling are not counted"
        + (", and what is exchanged may be hidden behind the rest or not: nothing of it was timed" if plan.mesh else "")
    )
    return lines
