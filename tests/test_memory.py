"""When a device is out of memory, the error names the programs and settings to lower, and checkpoints stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

BEGIN = """
import dataclasses, resource, sys
import jax, numpy as np
from experiments.tiny import random_agents, tokenizer
from jmarl.config import TrainConfig
from jmarl.learning.team_update import update_calls
from jmarl.memory import ProgramCall, explain_memory
from jmarl.randomness import tasks_of
from jmarl.team import Team, make_team
from jmarl.runs.start import start
from jmarl.runs.train import train
from jmarl.types import Batches
from tests.batches import rollouts

resource.setrlimit(resource.RLIMIT_AS, (16 << 30, resource.RLIM_INFINITY))  # larger programs fail immediately, on any machine
"""

LONG_PROMPT = """
agents = [
    agent._replace(config=dataclasses.replace(agent.config, max_positions=1 << 18))
    for agent in random_agents("tiny", tokenizer(("a", "b")), 2, seed=0, width=16)
]
items = [{"prompt": "a b"} for _ in range(3)]
items[tasks_of(2, 3, 1, seed=0)[0]] = {"prompt": "a b" * (1 << 15)}  # the item of the third update
cfg = TrainConfig.of(num_updates=6, num_generations=4, max_new_tokens=8, output_dir=sys.argv[1], save_every=1, progress=False)
reward = lambda a, b: [float(len(x)) for x in a]
try:
    train(Team.of(agents), reward, items, cfg)
except MemoryError as error:
    print(error)
    print("from", repr(error.__cause__)[:40])
cfg = cfg.replace(resume=True, allow_changed="data")
resumed = train(Team.of(agents), reward, [{"prompt": "a b"}] * 3, cfg)
print("resumed:", len(resumed.rewards), int(resumed.state.step))
"""

LARGE_BATCH = """
print("LARGE BATCH")
team, params = make_team(random_agents("tiny", tokenizer(("a", "b")), 2, seed=0, width=256))
cfg = TrainConfig.of(num_generations=1 << 14, max_new_tokens=64, micro_batches=2, progress=False)
setup, state = start(team, params, cfg)
rows = (2, 1, cfg.episodes.num_generations)
tokens, numbers, valid = (np.broadcast_to(x, (*rows, 64)) for x in (np.int32(0), np.float32(0), np.True_))
prompts = np.zeros((2, 1, 16), np.int32), np.full((2, 1), 4, np.int32)
batch = rollouts(*prompts, tokens, valid, numbers, valid[..., 0], numbers[..., 0], tokens[..., 0])
other = ProgramCall("sampling", 2, 1, 4, 16, 8, 1, jax.jit(lambda x: x).lower(0.0))
update = lambda: update_calls(setup, state, Batches([batch]))
try:  # as in the next step, where sampling waits for the update
    with explain_memory(update), explain_memory(lambda: [other]):
        jax.block_until_ready(setup.programs[0](state.stacks[0], batch, 0))
except MemoryError as error:
    print(error)
try:
    with explain_memory(update):
        raise jax.errors.JaxRuntimeError("INTERNAL: another error")
except jax.errors.JaxRuntimeError as error:
    print("as it was:", error)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> str:
    """What both scripts print, in one process of limited memory."""
    command = [sys.executable, "-c", BEGIN + LONG_PROMPT + LARGE_BATCH, str(tmp_path_factory.mktemp("run"))]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
def test_a_prompt_too_long_for_the_memory_is_named_and_the_run_can_resume(printed):
    """Its attention alone has 2^32 numbers per head."""
    text, _ = printed.split("LARGE BATCH")
    assert "the device is out of memory (RESOURCE_EXHAUSTED" in text and "from JaxRuntimeError" in text
    assert "sampling of 2 agents x 1 prompts x 4 completions, prompts of 65536 and completions of 8 tokens: about" in text
    first = text.split("prompts of 65536 and completions of 8 tokens: about ")[1]
    assert float(first.split(" GiB")[0].replace(",", "")) > 16
    assert "Set lower: num_generations=2, or max_new_tokens=4, or num_prompts" in text
    assert "resumed: 4 6" in text, "it resumes from the checkpoint before the long prompt"


@pytest.mark.long
def test_a_batch_too_large_for_the_memory_is_named(printed):
    """The error of an update is raised later, where its numbers are read."""
    _, text = printed.split("LARGE BATCH")
    assert "update of 2 agents x 1 prompts x 16384 completions, prompts of 16 and completions of 64 tokens, in 2" in text
    needs = text.split("in 2 micro_batches: about ")[1]
    assert float(needs.split(" GiB")[0]) > 16
    assert "\n  sampling of 2 agents x 1 prompts x 4 completions" in text
    assert "Set lower: micro_batches=4, or num_generations=8192" in text and "remat='full'" in text
    assert "as it was: INTERNAL: another error" in text
