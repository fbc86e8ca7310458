"""What processes of a run give each other, and what is refused in several of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jmarl.processes import exchange
from tests.processes.test_joined_processes import ENV

CHILD = """
import jmarl

jmarl.join_processes(timeout=30)

import threading

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmarl.cli.main import run
from jmarl.config import TrainConfig
from jmarl.envs.base import TextEnvironment
from jmarl.envs.reward_environment import RewardEnvironment
from jmarl.envs.rewards import make_reward
from jmarl.envs.vector import LockStep
from jmarl.models.sharding import make_mesh, mesh_for
from jmarl.models.stack import to_host, unstack
from jmarl.processes import exchange
from jmarl.processes.ending import Interrupted
from jmarl.rollout.chunks import divided
from jmarl.runs import checks, seeds
from jmarl.types import Shared

number = exchange.number()
assert exchange.gather(lambda: number * 10) == [0, 10]
assert exchange.from_first(lambda: f"of {number}") == "of 0"
assert exchange.any_of(number == 1) and not exchange.any_of(False)
assert exchange.gather(lambda: bytes(3_000_000 + number))[1] == bytes(3_000_001)  # larger than a part
assert [*range(5)][exchange.share(5)] == [[0, 1], [2, 3, 4]][number]
try:
    exchange.gather(lambda: 1 // number)
except (ZeroDivisionError, exchange.FailedProcess) as error:
    print(f"error: {number} {type(error).__name__} {error}")
assert exchange.gather(lambda: number) == [0, 1]  # after an error, too


def interrupt():
    if number == 1:
        raise Interrupted("because it rains")


try:
    exchange.gather(interrupt)
except Interrupted as reason:  # in both, which go on together
    print(f"interrupted: {number} {reason}")
assert exchange.gather(lambda: number) == [0, 1]

scored = []


def reward(texts):
    scored.append(len(texts))
    return [len(text) for text in texts]


env = divided(RewardEnvironment(make_reward(reward, num_agents=1), [lambda item: item["prompt"]]), rewards_divided=True)
rng = np.random.default_rng(0)
states, _ = env.reset([{"prompt": "a"}] * 3, rng)
assert env.step(states, [["a", "bb", "ccc"]], rng).result.total.tolist() == [1, 2, 3] and scored == [[1], [2]][number]



def refused(name, call):
    try:
        call()
    except (ValueError, RuntimeError, TypeError) as error:
        print(f"{name}: {error}", flush=True)


def fails_on_bad(texts):
    return [1 / (text != "bad") for text in texts]


lenient = make_reward(fails_on_bad, num_agents=1, batched=False, on_error="mask", max_error_share=0.6)
env = divided(RewardEnvironment(lenient, [lambda item: item["prompt"]]), rewards_divided=True)
states, _ = env.reset([{"prompt": "a"}] * 4, rng)
for _ in range(9):
    assert env.step(states, [["bad", "bad", "ok", "ok"]], rng).result.num_raised == 2  # all of those of process 0
refused("errors", lambda: [env.step(states, [["bad", "bad", "bad", "ok"]], rng) for _ in range(9)])


class Locked(TextEnvironment):
    roles = ("only",)

    def reset(self, task, rng):
        return threading.Lock(), [task["prompt"]]


refused("state", lambda: divided(LockStep(Locked())).reset([{"prompt": "a"}] * 2, rng))

stacked = np.arange(8.0).reshape(2, 4)
for mesh, axes in (("data=2", P(None, "data")), ("agent=2", P("agent"))):
    spread = exchange.to_devices(stacked, NamedSharding(make_mesh(mesh).mesh, axes))
    assert not spread.is_fully_addressable
    assert (unstack({"w": spread}, 0)["w"] == stacked[0]).all() and (to_host({"w": spread})["w"] == stacked).all()
here = jax.device_put(stacked, jax.local_devices()[0])
assert (np.asarray(unstack({"w": here, "base": Shared(here)}, 1)["w"]) == stacked[1]).all()

refused("sweep", lambda: run(["train", "--config", "magrpo", "--set", "sweep.learning_rate=[1e-3, 1e-2]"]))
refused("seeds", lambda: seeds.check_seeds([0, 1], TrainConfig.of(num_updates=1)))
refused("reward model", lambda: checks.check_settings(TrainConfig.of(algorithm="marlhf", num_updates=1, num_candidates=2)))
refused("mesh", lambda: mesh_for("agent=1", [2]))
shapes = [{name: n for name, n in mesh_for("auto", [n]).shape.items() if n > 1} for n in (2, 3)]
print("auto:", shapes, flush=True)
"""


def test_a_single_process_exchanges_nothing() -> None:
    assert exchange.gather(lambda: 3) == [3] and exchange.from_first(lambda: "a") == "a"
    assert exchange.share(5) == slice(0, 5) and exchange.is_first() and not exchange.any_of(False)
    assert exchange.take() == {}


@pytest.mark.long
def test_two_processes_exchange_objects_errors_and_arrays(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, "-m", "jmarl", "launch", "--nproc-per-node", "2", "--log-dir", str(tmp_path), "--"]
    done = subprocess.run([*command, str(tmp_path / "child.py")], env=ENV, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [(tmp_path / f"rank_{rank}.txt").read_text() for rank in range(2)]
    assert ["no output directory was given: it is runs/story_magrpo" in log for log in logs] == [True, False]
    assert "error: 0 ZeroDivisionError" in logs[0]
    assert "error: 1 FailedProcess process 0 of 2 failed: ZeroDivisionError" in logs[1]
    for rank, log in enumerate(logs):
        assert f"interrupted: {rank} because it rains" in log
        assert (
            "errors: a reward failed on 13 of the 20 joint actions of the last 5 batches, more than max_error_share=0.6" in log
        )
        assert "state: the states of Locked cannot be pickled (TypeError: cannot pickle '_thread.lock' object), and the" in log
        assert "sweep: sweeps need one process, and this run has 2" in log
        assert "seeds: several seeds in one program need one process, and this run has 2" in log
        assert "reward model: algorithms that train a reward model need one process, and this run has 2" in log
        assert "mesh: mesh='agent=1' has 1 devices, and the 2 processes of this run have 2: a mesh of several" in log
        assert "auto: [{'agent': 2}, {'data': 2}]" in log
