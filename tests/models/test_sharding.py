"""Results on meshes of eight virtual devices equal those on one device, and every device holds its share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from jmarl.models import sharding
from jmarl.models.rows import divide, divided, divided_prompts, joined
from tests.models.mesh_process import CENTRAL, MESHES, OWN_CRITICS, TWO_TURNS, VARIANTS

ROOT = Path(__file__).resolve().parents[2]
ROWS, AGENTS_AND_ROWS, ALL_AXES = MESHES
MESHES_IN_CI = {  # all others are nightly
    TWO_TURNS: (ROWS,),
    "adapters": (),  # tests/runs/test_lora_runs.py: test_a_mesh_equals_one_device
    OWN_CRITICS: (AGENTS_AND_ROWS,),
    CENTRAL: (ALL_AXES,),
    "several seeds, dynamic sampling": (AGENTS_AND_ROWS,),
    "rounds of preferences, replicated weights": (ROWS,),
    "given pairs": (AGENTS_AND_ROWS,),
}


def some(cases, in_ci):
    """Parameters of all cases; those that are not `in_ci` are marked nightly."""
    return [pytest.param(*case, marks=[] if case in in_ci else pytest.mark.nightly) for case in cases]


@pytest.fixture(scope="module")
def ask(tiny_dir, tmp_path_factory):
    """`ask(name, *arguments)` calls a function of `mesh_process`, in a process with eight virtual CPU devices."""
    directories = [str(tiny_dir("qwen2", seed=seed)) for seed in (0, 1)]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("mesh_process.py")), *directories]
    errors = tmp_path_factory.mktemp("mesh_process") / "errors"
    with errors.open("w") as file:
        child = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True)

    def ask(name, *arguments):
        limit = threading.Timer(600, child.kill)
        limit.start()
        child.stdin.write(json.dumps([name, *arguments]) + "\n")
        child.stdin.flush()
        answer = child.stdout.readline()
        limit.cancel()
        assert answer, errors.read_text()[-3000:]
        return json.loads(answer)

    with child:
        yield ask


@pytest.mark.long
@pytest.mark.parametrize(
    "variant, mesh", some([(x, mesh) for x in VARIANTS for mesh in MESHES], [(x, y) for x in VARIANTS for y in MESHES_IN_CI[x]])
)
def test_training_on_a_mesh_equals_one_device(ask, variant, mesh):
    """Two updates: rewards, which follow from the sampled tokens, are equal, and so is the whole state up to the order of
    sums."""
    rewards, state = ask("trained", variant, mesh)
    assert rewards == 0 and state < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("mesh, lora", some([(x, y) for x in MESHES for y in (False, True)], [(ROWS, True), (ALL_AXES, False)]))
def test_weights_are_divided_when_they_are_read(ask, mesh, lora):
    """They equal those that one device reads and then gives to the others, and lie like them; also a base of adapters."""
    assert ask("divided", mesh, lora)


@pytest.mark.long
@pytest.mark.parametrize("mesh", some(zip(MESHES, strict=True), [(ALL_AXES,)]))
def test_rows_move_into_fewer_slots_on_each_device(ask, mesh):
    assert ask("long", mesh)


@pytest.mark.long
@pytest.mark.parametrize("mesh", some(zip(MESHES, strict=True), [(ALL_AXES,)]))
def test_evaluation_and_cross_play_on_meshes_equal_one_device(ask, mesh):
    """3 completions of 3 prompts, which no mesh divides evenly, of 2 and of 4 agents."""
    assert ask("played", mesh) == 0


@pytest.mark.long
def test_rows_that_began_early_go_on_on_another_mesh(ask):
    """With async_steps=1, a first update on one device and two on two equal three updates on one."""
    steps, difference, rewards = ask("early")
    assert steps == 3 and difference < 1e-4 and rewards < 1e-6


@pytest.mark.long
def test_a_run_resumes_on_other_meshes(ask):
    """An update on each of two meshes equals two on one device, which reads what the second mesh has saved bit for bit."""
    steps, moved, difference = ask("resumed")
    assert steps == [1, 2, 2] and moved == 0 and difference < 1e-5


def test_auto_spreads_agents_over_devices():
    """Eight devices: 2 agents on 2; stacks of 3 and 6 on 3; 2 and 3 have no common divisor; 32 agents, 4 on each."""
    meshes = [sharding.mesh_for("auto", agents, devices=[*range(8)]) for agents in ([2], [3, 6], [2, 3], [32])]
    shapes = [None if mesh is None else (mesh.shape["agent"], mesh.size) for mesh in meshes]
    assert shapes == [(2, 2), (3, 3), None, (8, 8)]


@pytest.mark.long
def test_parameters_put_on_a_mesh_are_consumed(ask):
    """The state takes their memory; a second use raises an error."""
    assert "parameters of stack 0 were consumed by an earlier run" in ask("again")


@pytest.mark.long
def test_the_front_ends_do_not_import_torch(ask):
    assert not ask("imports_torch")


@pytest.mark.long
@pytest.mark.parametrize("variant, mesh", [(TWO_TURNS, ROWS), (OWN_CRITICS, AGENTS_AND_ROWS), (CENTRAL, ALL_AXES)])
def test_every_device_holds_its_share(ask, variant, mesh):
    """An eighth of every matrix, of its reference and of both its Adam moments; so of all bytes an eighth and a few percent."""
    seen, shares = set(), ask("shares", variant, mesh)
    for path, (total, *of_devices) in shares.items():
        name = path.split("'")[-2] if "layers" in path or "embed" in path else path
        if name in ("embed", "qkv", "out", "gate", "up", "down"):
            assert of_devices == [total // 8], path
            seen |= {(name, field) for field in ("params", "mu", "nu", "reference") if field in path}
    assert len(seen) == 6 * 4
    held, whole = (sum(max(size[i:]) for size in shares.values()) for i in (1, 0))
    assert held < 1.1 * whole / 8


@pytest.mark.long
@pytest.mark.parametrize("mesh", some(zip(MESHES, strict=True), [(ALL_AXES,)]))
def test_a_central_critic_is_divided_over_all_devices(ask, mesh):
    critic = {path: size for path, size in ask("shares", CENTRAL, mesh).items() if ".critics[0].params" in path}
    matrices = [size for path, size in critic.items() if path.split("'")[-2] in ("embed", "qkv", "down")]
    assert [size[1:] for size in matrices] == [[size[0] // 8] for size in matrices] and len(matrices) == 3


@pytest.mark.parametrize(
    "prompts, group, parts, over_group, padded",
    [(2, 32, 8, 4, 8), (8, 1, 8, 1, 8), (3, 4, 8, 2, 8), (3, 4, 2, 2, 6), (5, 1, 4, 1, 8), (1, 6, 4, 3, 4)],
)
def test_rows_are_divided_evenly_and_come_back(prompts, group, parts, over_group, padded):
    """Groups are divided only where prompts do not suffice, and padding comes last. No division has fewer rows on a device."""
    d = divide(prompts, group, parts)
    assert d == (over_group, padded)
    rows = np.arange(prompts * group * 2).reshape(prompts, group, 2) + 1

    @jax.jit
    def cut_and_join(rows, numbers):
        cut = divided(rows, d)
        return cut, joined(cut, prompts, group), divided_prompts(numbers, d)

    cut, again, of_prompts = jax.device_get(cut_and_join(rows, np.arange(prompts) + 1))
    np.testing.assert_array_equal(again, rows)
    real = (cut[..., 0] > 0).all(-1)
    np.testing.assert_array_equal(of_prompts[real], (cut[real][:, 0, 0] - 1) // (2 * group) + 1)
    assert not of_prompts[~real].any() and not cut[~real].any()


def test_keys_are_padded_with_keys():
    cut = jax.eval_shape(lambda: divided(jax.random.split(jax.random.key(0), 3)[:, None], divide(3, 1, 2)))
    assert cut.shape == (4, 1)


def test_an_axis_that_does_not_divide_is_not_split():
    """Three agents, hidden size 31, 65 columns; a vocabulary of 321; adapters; and a vector that is split by agent only."""
    odd = {"qkv": np.zeros((3, 2, 31, 65)), "embed": np.zeros((2, 321, 32)), "attn_norm": np.zeros((2, 2, 32))}
    odd["q_proj"] = {"a": np.zeros((2, 2, 32, 4)), "b": np.zeros((2, 2, 4, 32))}

    def specs(strategy):
        tree = sharding.state_specs(sharding.make_mesh("agent=2,data=2,model=2", strategy, [*range(8)]), odd)
        return {jax.tree_util.keystr(path, simple=True): list(spec) for path, spec in jax.tree_util.tree_leaves_with_path(tree)}

    names = {"attn_norm": ["agent"], "qkv": [None] * 4, "q_projb": ["agent"], "embed": ["agent", None, "data"]}
    assert specs("fsdp") == names | {"q_proja": ["agent", None, "data", None]}
    assert specs("ddp") == names | {"embed": ["agent", None, None], "q_proja": ["agent", None, None, None]}


def test_agents_that_a_mesh_cannot_divide_are_refused():
    with pytest.raises(ValueError, match=r"3 agents of one model cannot be divided by agent=2: use a divisor"):
        sharding.mesh_for("agent=2", [3], devices=[*range(8)])


@pytest.mark.parametrize("text", ["agents=2", "agent=0", "agent", "agent=2,", "agent=2;data=2", "agent=-1", "data=1.5"])
def test_mesh_text_that_cannot_be_read(text):
    with pytest.raises(ValueError, match=r"cannot read .*write for instance 'agent=2,data=2,model=2'"):
        sharding.make_mesh(text)


def test_a_mesh_larger_than_the_machine_names_both_numbers():
    with pytest.raises(ValueError, match=r"mesh='agent=500,data=3' needs 1500 devices, this process has \d+"):
        sharding.make_mesh("agent=500,data=3")


def test_axes_left_out_have_size_one():
    assert dict(sharding.make_mesh("data=1").shape) == {"agent": 1, "data": 1, "model": 1}
