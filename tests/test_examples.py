"""The examples run with --quick, print results before and after, and are short."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jmarl.sandbox import Sandbox, SandboxUnavailable

ROOT = Path(__file__).resolve().parent.parent
NAMES = [
    "simple_ppo", "train_code_ppo", "train_math_ppo", "train_grpo_math", "train_dpo_preferences", "train_sft_world_model",
    "train_tool_use_ppo", "train_distributed_ppo", "train_multi_environment", "train_hybrid_sft_ppo", "train_from_config",
]  # fmt: skip
NEED_SANDBOX = {"train_code_ppo", "train_multi_environment"}
OWN_PROCESS = {"train_distributed_ppo"}  # JAX counts its devices when it starts
BYTES = re.compile(r"([\d,]+) bytes of weights, ([\d,]+) on each device")
RESULT = re.compile(r"-?\d\.\d+(( ± \d\.\d+)? -> | before training, )-?\d\.\d+")  # the second as `jmarl train` says it


def test_all_examples_are_here_and_short():
    files = {path.stem: path for path in (ROOT / "experiments/examples").glob("*.py")}
    assert files.keys() == {*NAMES, "start", "__init__"}
    for name in NAMES:
        text = files[name].read_text()
        assert len(text.splitlines()) <= 60 and f"python -m experiments.examples.{name} [--quick]" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_results_before_and_after(name, capfd):
    if name in NEED_SANDBOX:
        try:
            Sandbox().close()
        except SandboxUnavailable as error:
            pytest.skip(str(error))
    if name in OWN_PROCESS:
        command = [sys.executable, "-m", f"experiments.examples.{name}", "--quick"]
        env = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
        output = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
        shares = [tuple(int(x.replace(",", "")) for x in pair) for pair in BYTES.findall(output)]
        assert len(shares) == 2 and all(whole / 2 <= held < 0.51 * whole for whole, held in shares)
    else:
        importlib.import_module(f"experiments.examples.{name}").main(True)
        output = capfd.readouterr().out
    assert RESULT.search(output), output
