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
from tests.families.test_families import CASES, FULL, family_of, nightly_but

ROOT = Path(__file__).resolve().parents[2]
DIVIDED = [case for case in CASES if family_of(case) != "qwen3_5_text"]  # see the last test
TRAINED = {  # of two layers
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
}
# Axes of weights are divided by their letters: biases of Llama, norms of all heads and the head of OLMo 2, experts, and by
# Gemma 2's caps the logits of a part of the vocabulary. Rows: a row of Qwen3.5 has a state, and those of others have keys.
IN_CI = ("llama", "gemma2", "qwen3_moe", "olmo2"), ("qwen3_5_text",)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts_of(tiny_dir):
    """`facts_of(kind, case)`: what `family_mesh_process` prints of a case, in a process with two virtual CPU devices.

    One process computes all cases of CI, and one all others."""
    printed = {}

    def facts(kind, case):
        in_ci = case in IN_CI[kind == "updates"]
        if in_ci not in printed:
            divided, trained = (
                [x for x in cases if (x in own) == in_ci] for cases, own in zip((DIVIDED, TRAINED), IN_CI, strict=True)
            )
            fields = {x: CASES[x] for x in divided}, {x: CASES[x] | TRAINED[x] | {"num_hidden_layers": 2} for x in trained}
            directories = [{x: str(tiny_dir(family_of(x), **FULL | own)) for x, own in cases.items()} for cases in fields]
            env = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
            script = str(Path(__file__).with_name("family_mesh_process.py"))
            done = subprocess.run(
                [sys.executable, script, *map(json.dumps, directories)], env=env, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, done.stderr[-3000:]
            printed[in_ci] = json.loads(done.stdout.splitlines()[-1])
        assert printed[in_ci]["devices"] == 2
        return printed[in_ci][kind][case] if kind != "experts" else printed[in_ci][kind]

    return facts


@pytest.mark.parametrize("case", nightly_but(*IN_CI[0], of=DIVIDED))
def test_logits_of_a_model_on_two_devices_equal_those_on_one(facts_of, case):
    """Each device has half of every matrix; of norms over all heads, too."""
    logits, parts = facts_of("logits", case)
    assert logits < 1e-5
    feed_forward = {name for name in parts if name.endswith(("gate", "up", "down"))}
    assert feed_forward and {name for name, count in parts.items() if count == 2} >= {"qkv", "out"} | feed_forward
    assert parts.get("q_norm_of_all", 2) == 2


def test_experts_that_two_devices_divide_exchange_the_width_of_a_token_once(facts_of):
    """Once forward and once backward, and not for each of its experts; beside it the gradients of its shares. Experts of odd
    width are whole on each device."""
    differences, widths, of_odd_width = facts_of("experts", IN_CI[0][0])
    assert differences < 1e-5 and 2 <= widths < 2.3 and of_odd_width < 1e-5


@pytest.mark.parametrize("case", nightly_but(*IN_CI[1], of=TRAINED))
def test_an_update_whose_rows_are_on_two_devices_equals_that_on_one(facts_of, case):
    """Rewards follow from the sampled tokens. Parameters are equal up to the order of sums."""
    rewards, parameters, moved = facts_of("updates", case)
    assert rewards == 0 and parameters < 1e-6 and moved > 1e-3


def test_heads_of_recurrent_layers_are_not_divided(tiny_dir):
    config = load_agent(tiny_dir("qwen3_5_text", **FULL | CASES["qwen3_5_text"])).config
    mesh = Mesh(np.array(2 * jax.devices()[:1]).reshape(1, 1, 2), AXES)  # as if there were two
    with pytest.raises(ValueError, match="model=2 is not allowed for qwen3_5_text: the heads of its recurrent layers"):
        model_on(DeviceMesh(mesh), config)
