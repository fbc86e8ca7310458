"""Choose settings of a run for a GPU that is not here: those that are auto, as the run does, or all with which it fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.stages import Compiled, Lowered

from jmarl.algorithms import on_platform, resolve
from jmarl.config import TrainConfig
from jmarl.learning.choose import MAX_PROOFS, all_options, candidates, choose, is_open, proofs, work_of
from jmarl.learning.meshes import mesh_that_fits
from jmarl.models.sharding import largest_agent_axis
from jmarl.plan.devices import GIB, Gpu, compile_devices, compile_for
from jmarl.plan.plan import LARGEST_POOL, POOL, Plan, make_plan, parts_of_state
from jmarl.plan.programs import shapes_of_run, widths_of
from jmarl.rollout.make_batches import rollout_batches
from jmarl.rollout.zeros import zero_rollout
from jmarl.team import Team


def choose_settings(
    team: Team, cfg: TrainConfig, gpu: Gpu | None, prompt_tokens: int, num_devices: int = 1
) -> tuple[TrainConfig, str]:
    """Return the settings without auto, as a run on these devices has them, and the lines that it shows, if any."""
    cfg, mesh_line = on_platform(cfg, "cpu" if gpu is None else "gpu"), ""
    if gpu is not None:
        cfg, mesh_line = mesh_that_fits(team, cfg, resolve(cfg), num_devices, int(POOL * gpu.memory))
    if gpu is None or not is_open(cfg):
        return cfg, mesh_line
    setup, state = shapes_of_run(team, cfg, compile_devices(gpu, num_devices), prompt_tokens)
    batches = rollout_batches(setup, state, zero_rollout(setup, widths_of(team, prompt_tokens)))
    size, rooms = sum(parts_of_state(state).values()), [int(share * gpu.memory) for share in (POOL, LARGEST_POOL)]

    def compile_update(update: Lowered) -> Compiled:
        return compile_for(gpu, {"update": update})["update"]

    setup, line = choose(setup, state, batches, size, rooms, compile_update)
    return setup.cfg, "\n".join(filter(None, (mesh_line, line)))


def meshes(team: Team, cfg: TrainConfig, num_devices: int) -> list[dict[str, Any]]:
    """Return the settings of meshes to try, those that exchange least first: whole agents, then rows, then weights."""
    if num_devices == 1 or cfg.run.mesh != "auto":
        return [{}]
    agents = largest_agent_axis([len(spec.members) for spec in team.stacks], num_devices)
    if agents > num_devices // 2:
        return [{"mesh": f"agent={agents}"}, {"mesh": f"data={num_devices}"}]
    text = f"agent={agents},data={num_devices // agents}" if agents > 1 else f"data={num_devices}"
    return [{"mesh": text, "strategy": "ddp"}, {"mesh": text, "strategy": "fsdp"}]


def prove(
    team: Team, cfg: TrainConfig, gpu: Gpu, prompt_tokens: int, eval_items: int, num_devices: int = 1
) -> Iterator[tuple[dict[str, Any], Plan, bool]]:
    """Yield settings, the plan with them and whether it fits, until one does or `MAX_PROOFS` for each mesh have been compiled.

    The result of a run with them is the same but for rounding. Only where no mesh fits, prompts are halved.
    """
    cfg = on_platform(cfg, "gpu").replace(remat="auto", micro_batches="auto")
    prompts, tried, choices = cfg.episodes.num_prompts, 0, meshes(team, cfg, num_devices)
    sizes = prompt_tokens, eval_items, num_devices
    while prompts >= 1 and tried < MAX_PROOFS * len(choices):
        smaller, before = {} if prompts == cfg.episodes.num_prompts else {"num_prompts": prompts}, tried
        for mesh in choices:
            for settings, plan, fits in prove_on(team, cfg.replace(**mesh, **smaller), gpu, *sizes):
                tried += 1
                yield mesh | settings | smaller, plan, fits
                if fits:
                    return
        if tried == before:  # on no mesh the state alone fits
            return
        prompts //= 2


def prove_on(
    team: Team, cfg: TrainConfig, gpu: Gpu, prompt_tokens: int, eval_items: int, num_devices: int
) -> Iterator[tuple[dict[str, Any], Plan, bool]]:
    """Yield what `prove` yields, for one mesh and one number of prompts; nothing if the state alone does not fit."""
    setup, shapes = shapes_of_run(team, cfg, compile_devices(gpu, num_devices), prompt_tokens)
    state, room, plans = sum(parts_of_state(shapes).values()), int(LARGEST_POOL * gpu.memory), list[Plan]()
    if state > room:
        return

    def peak_of(settings: dict[str, Any]) -> int:
        plans.append(make_plan(team, cfg.replace(**settings), gpu, prompt_tokens, eval_items, False, num_devices))
        return plans[-1].peak.peak

    work = work_of(setup, rollout_batches(setup, shapes, zero_rollout(setup, widths_of(team, prompt_tokens))))
    options = all_options(work, cfg, [*dict.fromkeys([cfg.sampling.compute_dtype, "bfloat16"])])
    for proof in proofs(candidates(work, options), state, room, peak_of, MAX_PROOFS):
        yield proof.settings, plans[-1], proof.fits


def line_of(settings: dict[str, Any], plan: Plan, fits: bool) -> str:
    """Return one line about a proof."""
    assert plan.gpu is not None
    names = " ".join(f"{name}={value}" for name, value in settings.items())
    need = f"{plan.peak.peak / GIB:.1f} of {plan.gpu.memory / GIB:.1f} GiB"
    by_default = "" if plan.peak.peak <= POOL * plan.gpu.memory else f", with XLA_PYTHON_CLIENT_MEM_FRACTION={LARGEST_POOL}"
    return f"{names}: {plan.peak.name} needs {need}, {f'fits{by_default}' if fits else 'does not fit'}"
