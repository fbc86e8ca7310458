"""The mesh of a run whose setting is auto, and the line that says what a mesh divides."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.bench.sizes import MODELS
from jmarl.algorithms import resolve
from jmarl.config import TrainConfig
from jmarl.learning.meshes import line_of_mesh, mesh_that_fits
from jmarl.models.sharding import make_mesh
from jmarl.plan.devices import GIB, GPUS
from jmarl.plan.fit import choose_settings
from jmarl.plan.plan import POOL, describe_team

ROOM = int(0.75 * 79.1 * GIB)  # that JAX takes of an H100
# The update with the least memory. To try all of them, as AUTO does, takes seconds.
LEAST = dict(remat="full", micro_batches=64)
STEP: dict[str, Any] = dict(num_prompts=8, num_generations=8, max_new_tokens=512, compute_dtype="bfloat16", **LEAST)
AUTO = dict(remat="auto", micro_batches="auto")


def chosen(model: str, devices: int = 8, agents: int = 2, **settings: Any) -> tuple[str, str]:
    """The mesh and the line for agents of a model."""
    team, cfg = describe_team([(model, MODELS[model], None)] * agents, False), TrainConfig.of(**STEP | settings)
    cfg, line = mesh_that_fits(team, cfg, resolve(cfg), devices, ROOM)
    return cfg.run.mesh, line


@pytest.mark.parametrize(
    "model, settings, mesh",
    [
        ("0.5B", {}, "auto"),
        ("7B", AUTO, "agent=2,data=4"),
        ("7B", dict(agents=3), "agent=3,data=2"),  # 2 of 8 devices are left over
        ("7B", dict(lora_rank=16), "auto"),
        ("7B", dict(devices=2), "auto"),  # none is left to divide an agent
        ("7B", dict(mesh="agent=2"), "agent=2"),
        ("7B", dict(async_steps=1), "auto"),
        ("7B", dict(strategy="ddp"), "auto"),
    ],
)
def test_auto_divides_weights_where_whole_agents_do_not_fit(model: str, settings: dict[str, Any], mesh: str) -> None:
    text, line = chosen(model, **settings)
    assert text == mesh
    assert bool(line) == (text != settings.get("mesh", "auto"))
    if line:
        assert line.startswith(f"mesh=auto is {text}: with whole agents a device would need about ")


def test_seeds_that_learn_together_need_more() -> None:
    team = describe_team([("0.5B", MODELS["0.5B"], None)] * 2, False)
    cfg = TrainConfig.of(**STEP)
    meshes = [mesh_that_fits(team, cfg, resolve(cfg), 8, ROOM, seeds)[0].run.mesh for seeds in (1, 20)]
    assert meshes == ["auto", "agent=2,data=4"]


def test_a_plan_has_the_mesh_of_the_run() -> None:
    """Nothing else is auto here, so nothing is compiled."""
    team = describe_team([("7B", MODELS["7B"], None)] * 2, False)
    cfg = TrainConfig.of(**STEP)
    planned, line = choose_settings(team, cfg, GPUS["h100"], 256, 8)
    run, line_of_run = mesh_that_fits(team, cfg, resolve(cfg), 8, int(POOL * GPUS["h100"].memory))
    assert (planned.run.mesh, line) == (run.run.mesh, line_of_run) and run.run.mesh == "agent=2,data=4"


@pytest.mark.parametrize(
    "mesh, strategy, settings, line",
    [
        ("agent=2", "fsdp", {}, "mesh agent=2: whole agents are spread over devices"),
        ("model=2", "fsdp", {}, "mesh model=2: weights are divided"),
        ("data=8", "fsdp", {}, "mesh data=8: a device has 1/8 of its weights and 8 of 64 rows of an agent"),
        ("data=4", "ddp", {}, "mesh data=4: a device has all of its weights (ddp) and 16 of 64 rows of an agent"),
        ("data=8", "fsdp", dict(num_prompts=3, num_generations=4), "mesh data=8: a device has 1/8 of its weights and 2 of 12 "
         "rows of an agent; 12 rows do not divide by data=8, so 4 places are padding"),
    ],
)  # fmt: skip
def test_the_line_says_what_is_divided_and_what_is_padding(mesh, strategy, settings, line) -> None:
    assert line_of_mesh(make_mesh(mesh, strategy, [*range(8)]), TrainConfig.of(**STEP | settings)) == line
