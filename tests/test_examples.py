"""The examples run with --quick, print results before and after, and are short."""

from __future__ import annotations

import re

import jax
import pytest

from jmarl.sandbox import Sandbox, SandboxUnavailable
from tests.running import ROOT, call, start

NAMES = [
    "simple_ppo", "train_code_ppo", "train_math_ppo", "train_grpo_math", "train_dpo_preferences", "train_sft_world_model",
    "train_tool_use_ppo", "train_distributed_ppo", "train_multi_environment", "train_hybrid_sft_ppo", "train_from_config",
]  # fmt: skip
NEED_SANDBOX = {"train_code_ppo", "train_multi_environment"}
DISTRIBUTED = "train_distributed_ppo"
BYTES = re.compile(r"([\d,]+) bytes of weights, ([\d,]+) on each device")
RESULT = re.compile(r"-?\d\.\d+(( ± \d\.\d+)? -> | before training, )-?\d\.\d+")  # the second as `jmarl train` says it


def shares_of(output: str) -> list[tuple[int, int]]:
    """Return the bytes of all weights and of those on a device, as often as an example says them."""
    return [(int(whole.replace(",", "")), int(held.replace(",", ""))) for whole, held in BYTES.findall(output)]


def test_all_examples_are_here_and_short():
    files = {path.stem: path for path in (ROOT / "experiments/examples").glob("*.py")}
    assert files.keys() == {*NAMES, "start", "__init__"}
    for name in NAMES:
        text = files[name].read_text()
        assert len(text.splitlines()) <= 60 and f"python -m experiments.examples.{name} [--quick]" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "simple_ppo"])  # which `test_readme.py` runs
def test_an_example_prints_results_before_and_after(name):
    if name in NEED_SANDBOX:
        try:
            Sandbox().close()
        except SandboxUnavailable as error:
            pytest.skip(str(error))
    words = ["python", "-m", f"experiments.examples.{name}", "--quick"]
    alone = name == DISTRIBUTED and jax.device_count() < 2  # JAX counts its devices when it starts
    code, output = start(words, JAX_NUM_CPU_DEVICES="2") if alone else call(words)
    assert code == 0 and RESULT.search(output), output
    shares = shares_of(output)
    assert all(whole / 2 <= held < 0.51 * whole for whole, held in shares) and len(shares) == 2 * (name == DISTRIBUTED)
