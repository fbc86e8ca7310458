"""Every family computes on two devices what it computes on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jmarl.models.hub.agents import load_agent
from jmarl.models.sharding import AXES, DeviceMesh, model_on
from tests.families.test_families import CASES, FULL, family_of

ROOT = Path(__file__).resolve().parents[2]
TRAINED = {  # of two layers
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
}
DIVIDED = {case: fields for case, fields in CASES.items() if family_of(case) != "qwen3_5_text"}  # see the last test

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts(tiny_dir):
    """What `family_mesh_process` prints, in a process with two virtual CPU devices."""
    fields = DIVIDED, {case: CASES[case] | TRAINED[case] | {"num_hidden_layers": 2} for case in TRAINED}
    directories = [{case: str(tiny_dir(family_of(case), **FULL | own)) for case, own in cases.items()} for cases in fields]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    script = str(Path(__file__).with_name("family_mesh_process.py"))
    done = subprocess.run(
        [sys.executable, script, *map(json.dumps, directories)], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", DIVIDED)
def test_logits_of_a_model_on_two_devices_equal_those_on_one(facts, case):
    """Each device has half of every matrix; of norms over all heads, too."""
    logits, parts = facts["logits"][case]
    assert facts["devices"] == 2 and logits < 1e-5
    feed_forward = {name for name in parts if name.endswith(("gate", "up", "down"))}
    assert feed_forward and {name for name, count in parts.items() if count == 2} >= {"qkv", "out"} | feed_forward
    assert parts.get("q_norm_of_all", 2) == 2


@pytest.mark.parametrize("case", TRAINED)
def test_an_update_whose_rows_are_on_two_devices_equals_that_on_one(facts, case):
    """Rewards follow from the sampled tokens. Parameters are equal up to the order of sums."""
    rewards, parameters, moved = facts["updates"][case]
    assert rewards == 0 and parameters < 1e-6 and moved > 1e-3


def test_heads_of_recurrent_layers_are_not_divided(tiny_dir):
    config = load_agent(tiny_dir("qwen3_5_text", **FULL | CASES["qwen3_5_text"])).config
    mesh = Mesh(np.array(2 * jax.devices()[:1]).reshape(1, 1, 2), AXES)  # as if there were two
    with pytest.raises(ValueError, match="model=2 is not allowed for qwen3_5_text: the heads of its recurrent layers"):
        model_on(DeviceMesh(mesh), config)
