"""The memory that `jmarl plan --device cpu` predicts is within 20 % of what `jmarl train` takes.

Models of random weights, large enough that their arrays count beside Python, JAX and the compiler (about 1 GiB).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from experiments.tiny import tokenizer
from jmarl.models.config import ModelConfig
from jmarl.models.decoder import init_params
from jmarl.models.hub.agents import save_pretrained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="measures by /proc, which only Linux has"),
]

MODELS = {
    "16M": ModelConfig("llama", 8192, 384, 1024, 8, 6, 2, 64, 1024),
    "55M": ModelConfig("llama", 16384, 640, 1792, 10, 10, 2, 64, 1024),
}
CONFIGURATION = """
data: data.jsonl
reward: own_reward:reward
num_agents: 2
num_updates: 1
num_prompts: 2
num_generations: 8
max_new_tokens: 64
progress: false
"""
COMMAND = """
import sys
from jmarl.cli.main import main
assert main(sys.argv[1:]) == 0
print(open("/proc/self/status").read())
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models, data, a reward and a configuration."""
    path, words = tmp_path_factory.mktemp("cpu_memory"), tokenizer(tuple("abcdefghijklmnopqrstuvwxyz "))
    for name, model in MODELS.items():
        save_pretrained(path / name, model, jax.device_get(init_params(model, jax.random.key(0))), words)
    item = json.dumps({"prompt": "abc def ghi jkl mno pqr stu " * 2})
    (path / "data.jsonl").write_text(8 * f"{item}\n")
    (path / "own_reward.py").write_text("def reward(first, second):\n    return [float(len(text)) for text in first]\n")
    (path / "base.yaml").write_text(CONFIGURATION)
    return path


def jmarl(directory: Path, *arguments: str) -> str:
    """The output of a command in a process of its own, which ends with the process's status; nothing comes from a cache."""
    root = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    env["JAX_NUM_CPU_DEVICES"] = "1"  # a plan is for one device
    command = [sys.executable, "-c", COMMAND, *arguments]
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "settings",
    [
        ["models=55M"],
        pytest.param(["models=55M", "lora_rank=16", "save_every=0"], marks=pytest.mark.nightly),
        ["models=16M", "algorithm=iac", "num_generations=1", "num_prompts=16", "max_new_tokens=128", "save_every=0"],
    ],
    ids=["all weights, and a checkpoint", "adapters", "critics and longer completions"],
)
def test_predicted_memory_is_near_what_a_run_takes(directory: Path, settings: list[str]) -> None:
    planned = jmarl(directory, "plan", "--config", "base.yaml", "--device", "cpu", "--set", *settings)
    peaks = [float(peak) for peak in re.findall(r"^(?:sampling|update|checkpoint).* ([\d.]+)$", planned, re.M)]
    run = jmarl(directory, "train", "--config", "base.yaml", "--output", f"run-{len(settings)}", "--set", *settings)
    measured = int(re.search(r"VmHWM:\s+(\d+) kB", run)[1]) / 2**20  # type: ignore[index]
    print(f"{settings}: predicted {max(peaks):.2f} GiB, measured {measured:.2f}")
    assert max(peaks) == pytest.approx(measured, rel=0.2)
