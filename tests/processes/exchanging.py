"""What two processes give each other, and what is refused in several of them. Each prints what `test_exchange.py` looks for."""

from __future__ import annotations

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
from jmarl.runs import checks
from jmarl.types import Shared


class Locked(TextEnvironment):
    """Its states cannot be sent."""

    roles = ("only",)

    def reset(self, task, rng):
        return threading.Lock(), [task["prompt"]]


def refused(name, call):
    """Print the error of a call."""
    try:
        call()
    except (ValueError, RuntimeError, TypeError, ZeroDivisionError, Interrupted) as error:
        print(f"{name}: {type(error).__name__} {error}", flush=True)


def exchange_objects(number):
    assert exchange.gather(lambda: number * 10) == [0, 10]
    assert exchange.from_first(lambda: f"of {number}") == "of 0"
    assert exchange.any_of(number == 1) and not exchange.any_of(False)
    assert exchange.gather(lambda: bytes(3_000_000 + number))[1] == bytes(3_000_001)  # larger than a part
    assert [*range(5)][exchange.share(5)] == [[0, 1], [2, 3, 4]][number]

    def interrupt():
        if number == 1:
            raise Interrupted("because it rains")

    refused("error", lambda: exchange.gather(lambda: 1 // number))
    assert exchange.gather(lambda: number) == [0, 1]  # after an error, too
    refused("interrupted", lambda: exchange.gather(interrupt))  # in both, which go on together
    assert exchange.gather(lambda: number) == [0, 1]


def divide_rewards(number):
    scored, rng = [], np.random.default_rng(0)

    def reward(texts):
        scored.append(len(texts))
        return [len(text) for text in texts]

    def fails_on_bad(texts):
        return [1 / (text != "bad") for text in texts]

    def begun(judge, count):
        env = divided(RewardEnvironment(judge, [lambda item: item["prompt"]]), rewards_divided=True)
        return env, env.reset([{"prompt": "a"}] * count, rng)[0]

    env, states = begun(make_reward(reward, num_agents=1), 3)
    assert env.step(states, [["a", "bb", "ccc"]], rng).result.total.tolist() == [1, 2, 3] and scored == [[1], [2]][number]
    lenient = make_reward(fails_on_bad, num_agents=1, batched=False, on_error="mask", max_error_share=0.6)
    env, states = begun(lenient, 4)
    for _ in range(9):
        assert env.step(states, [["bad", "bad", "ok", "ok"]], rng).result.num_raised == 2  # all of those of process 0
    refused("errors", lambda: [env.step(states, [["bad", "bad", "bad", "ok"]], rng) for _ in range(9)])
    refused("state", lambda: divided(LockStep(Locked())).reset([{"prompt": "a"}] * 2, rng))


def spread_arrays():
    stacked = np.arange(8.0).reshape(2, 4)
    for mesh, axes in (("data=2", P(None, "data")), ("agent=2", P("agent"))):
        spread = exchange.to_devices(stacked, NamedSharding(make_mesh(mesh).mesh, axes))
        assert not spread.is_fully_addressable
        assert (unstack({"w": spread}, 0)["w"] == stacked[0]).all() and (to_host({"w": spread})["w"] == stacked).all()
    here = jax.device_put(stacked, jax.local_devices()[0])
    assert (np.asarray(unstack({"w": here, "base": Shared(here)}, 1)["w"]) == stacked[1]).all()
    shapes = [{name: n for name, n in mesh_for("auto", [n]).shape.items() if n > 1} for n in (2, 3)]
    print("auto:", shapes, flush=True)


def exchange_all():
    """Call it in both of two processes."""
    number = exchange.number()
    exchange_objects(number)
    divide_rewards(number)
    spread_arrays()
    refused("sweep", lambda: run(["train", "--config", "magrpo", "--set", "sweep.learning_rate=[1e-3, 1e-2]"]))
    refused("seeds", lambda: checks.check_seeds([0, 1], TrainConfig.of(num_updates=1)))
    refused("reward model", lambda: checks.check_settings(TrainConfig.of(algorithm="marlhf", num_updates=1, num_candidates=2)))
    refused("mesh", lambda: mesh_for("agent=1", [2]))
