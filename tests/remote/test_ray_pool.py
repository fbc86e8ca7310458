"""Environments and rewards on a cluster of Ray: a local one of two nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jmarl.cli.configuration import read_configuration
from jmarl.cli.main import parser_for
from jmarl.config import TaskConfig
from jmarl.envs import make
from jmarl.envs.base import Step, TextEnvironment
from jmarl.envs.pool import Pool, in_pool
from jmarl.envs.reward_values import RewardError
from jmarl.envs.rewards import make_reward
from jmarl.envs.vector import LockStep
from jmarl.remote.pools.ray_pool import RayPool


class Draws(TextEnvironment):
    """Two agents; observations, rewards and measures depend on random numbers. Some messages make trouble."""

    roles, reward_range, max_turns = ("a", "b"), (0.0, 1.0), 3

    def tasks(self, split="train", count=100, seed=0):
        return [{"id": i} for i in range(count)]

    def reset(self, task, rng):
        return {"id": task["id"], "turn": 0, "drawn": rng.random()}, [f"go {rng.random()}"] * 2

    def step(self, state, messages, rng):
        if messages[0] == "sleep":
            time.sleep(600)
        if messages[0] == "die" or messages[0].startswith("/") and _is_first(messages[0]):
            os.kill(os.getpid(), signal.SIGKILL)
        if messages[0] == "bug":
            raise KeyError("a mistake")
        state["turn"] += 1
        observations = [f"{state['id']} {state['drawn']} {rng.random()}"] * 2
        return Step(state, observations, [rng.random(), state["drawn"]], state["turn"] == 3, {"more": rng.random()})


def _is_first(path: str) -> bool:
    """Create a file; return whether it is new."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Unstartable(Draws):
    def __setstate__(self, state):
        raise RuntimeError("no such device on this node")

    def __getstate__(self):
        return {"a": 1}


def worker(env, wait=0.2) -> tuple[int, str]:
    """Return the process and the node of an actor."""
    import ray

    time.sleep(wait)  # so that each actor gets a call
    return os.getpid(), ray.get_runtime_context().get_node_id()


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two nodes, and RAY_ADDRESS. A line to its input removes the second node."""
    ray = pytest.importorskip("ray")
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(Path(__file__).parent / "ray_cluster.py")]
    process = subprocess.Popen(
        command, env=os.environ | settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None and process.stdout is not None
    with pytest.MonkeyPatch.context() as patch, process:
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.setenv("RAY_ADDRESS", process.stdout.readline().strip())
        yield process
        ray.shutdown()
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def pool(cluster):
    with RayPool(Draws(), timeout=2) as pool:
        yield pool


def trajectory(engine, messages=("one", "two", "three"), between=lambda turn: None) -> list:
    """Return all that training sees of 5 episodes."""
    lock, rng = LockStep(engine), np.random.default_rng(5)
    states, prompts = lock.reset(lock.env.tasks("train", 5), rng)
    record: list = [states, prompts]
    for turn, message in enumerate(messages):
        between(turn)
        answer = lock.step(states, [[message] * 5, ["other"] * 5], rng)
        record.append(
            [*(x.tolist() for x in (answer.result.rewards, answer.result.invalid, answer.done)), answer.result.faults]
        )
        record.append({name: values.tolist() for name, values in answer.result.measures.items()})
        states, prompts = lock.observe(answer.after)
        record += [states, prompts]
    return record


def workers_of(pool) -> dict[int, str]:
    """Return the node of each process of a pool of two, when both run."""
    for _ in range(50):
        if len(workers := dict(pool.call_all(worker, [()] * 4))) == 2:
            return workers
    raise AssertionError("an actor was not replaced")


@pytest.mark.slow
def test_trajectories_are_equal_while_actors_are_killed(pool, tmp_path):
    """Bit for bit. One actor dies between two calls and one in a call; both are replaced. The actors are on two nodes."""
    local, first = trajectory(Draws()), workers_of(pool)
    assert len(set(first.values())) == 2
    assert trajectory(pool, between=lambda turn: turn == 1 and os.kill(next(iter(first)), signal.SIGKILL)) == local
    second = workers_of(pool)
    assert len(second.keys() & first.keys()) == 1
    path = str(tmp_path / "file")
    assert trajectory(pool, ("one", path, "three")) == local and os.path.exists(path)
    assert len(workers_of(pool).keys() & second.keys()) == 1


@pytest.mark.slow
def test_an_environment_of_the_package_answers_as_in_process(cluster):
    env, message = make("sudoku"), "1 2 3 4 A B"
    with RayPool(env) as pool:
        engines = [LockStep(env).engine, pool]
        starts = [engine.reset(env.tasks("train", 3), range(3)) for engine in engines]
        states, messages = [state for state, _ in starts[0]], [[message] * env.num_agents] * 3
        steps = [engine.step(states, messages, range(3)) for engine in engines]
    assert repr(starts[0]) == repr(starts[1]) and repr(steps[0]) == repr(steps[1])


@pytest.mark.slow
def test_calls_that_hang_or_die_are_repeated_and_then_masked(pool):
    lock, rng = LockStep(pool), np.random.default_rng(0)
    states, _ = lock.reset([{"id": i} for i in range(4)], rng)
    start = time.monotonic()
    result = lock.step(states, [["fine", "sleep", "die", "fine"], [""] * 4], rng).result
    assert time.monotonic() - start < 300  # new actors take long to start beside other work
    assert result.invalid.tolist() == [False, True, True, False] and np.isnan(result.rewards[1:3]).all()
    assert result.faults[1] == "Draws did not answer within 2 s, 2 times"
    assert result.faults[2].startswith("Draws lost its actor (The actor is dead because its worker process has died")
    with pytest.raises(KeyError, match="a mistake") as raised:
        lock.step(states, [["fine", "bug", "fine", "fine"], [""] * 4], rng)
    place, _, trace = raised.value.__notes__
    assert "test_ray_pool.py, line" in place and trace.startswith("in an actor of the pool:\nTraceback") and "step" in trace
    assert not lock.step(states, [["fine"] * 4, [""] * 4], rng).result.invalid.any()


# --- rewards ----------------------------------------------------------------------------------------------------------


def close_to_random(a, b, rng):
    return [[rng.random(), len(x) - len(y)] for x, y in zip(a, b, strict=True)]


async def troubled(a, b, rng):
    """A reward of one joint action."""
    if a[0] == "bug":
        raise KeyError("a mistake")
    if a[0] == "exit":
        sys.exit(0)
    if a[0] == "sleep":
        time.sleep(60)
    return rng.random() + os.getpid() * (b[0] == "where")


def scores(functions, first, **options):
    reward = make_reward(functions, num_agents=2, timeout=2, **options)
    try:
        second = ["ab"] * len(first)
        return reward([first, second], ["p"] * len(first), [{} for _ in first], np.random.default_rng(0))
    finally:
        reward.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Pool, RayPool])
def test_rewards_in_a_pool_are_those_of_this_process(cluster, kind):
    """Also those of functions that draw random numbers or are coroutine functions."""
    texts = ["a", "abc", "x"]
    for functions, options in (([close_to_random, troubled], {"batched": False}), (close_to_random, {})):
        local, remote = (scores(functions, texts, **options, **more) for more in ({}, {"pool": kind}))
        assert local.rewards.tolist() == remote.rewards.tolist() and repr(local.parts) == repr(remote.parts)


@pytest.mark.slow
def test_errors_of_rewards_in_a_pool_are_those_of_rewards(cluster):
    result = scores(troubled, ["fine", "bug", "exit", "sleep"], batched=False, on_error="mask", pool=RayPool)
    assert result.invalid.tolist() == [False, True, True, True] and result.num_raised == 3
    assert "reward 'troubled' raised KeyError: 'a mistake'" in result.faults[1]
    assert " in tests/remote/test_ray_pool.py, line " in result.faults[1]
    assert "exit(0) was called" in result.faults[2] and "did not answer within 2 s, 2 times" in result.faults[3]
    with pytest.raises(RewardError, match="a mistake") as raised:
        scores(troubled, ["bug"], pool=RayPool)
    assert raised.value.__cause__.__notes__[-1].startswith("in a worker of the pool:\nTraceback")


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rewards", "environment"])
def test_a_run_with_a_pool_of_ray_is_that_without(cluster, tiny_dir, tmp_path, kind):
    """Bit for bit; the second one begins in the pool and resumes without."""
    from jmarl import ExperimentConfig, run_experiment

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Item {i} is"}) + "\n" for i in range(4)))
    data = {"data": str(rows), "reward": f"{__name__}:close_to_random", "timeout": 30}
    task = data if kind == "rewards" else {"environment": f"{__name__}:Draws", "num_turns": 3, "branching": "chain"}
    task |= dict(
        num_prompts=2, max_new_tokens=4, num_generations=2, progress=False, models=str(tiny_dir("llama")), num_agents=2
    )

    def run(name, **settings):
        return run_experiment(ExperimentConfig.of(**task | settings, output_dir=str(tmp_path / name)))

    one, *_, two = run("local", num_updates=2), run("pool", num_updates=1, pool="ray"), run("pool", num_updates=2, resume=True)
    for a, b in zip(jax.tree.leaves(one.state.stacks[0].params), jax.tree.leaves(two.state.stacks[0].params), strict=True):
        assert (np.asarray(a) == np.asarray(b)).all()
    first, second = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("local", "pool"))
    assert len(first) == len(second) == 2
    for rows in zip(map(json.loads, first), map(json.loads, second), strict=True):
        numbers, others = ({k: x for k, x in row.items() if not k.startswith(("time", "tokens_per_s"))} for row in rows)
        assert numbers == others and len(numbers) > 20


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_actors_that_cannot_begin_are_an_error(cluster):
    with (
        RayPool(Unstartable()) as pool,
        pytest.raises(RuntimeError, match=r"4 actors in a row could not begin .* no such device"),
    ):
        pool.reset([{"id": 0}], [0])


@pytest.mark.slow
def test_a_pool_of_ray_without_a_cluster_is_refused(monkeypatch):
    """It starts none: that would fork, and leave processes."""
    ray = pytest.importorskip("ray")

    def init(address, **settings):
        raise ConnectionError(f"could not find {address}")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for address, cause in (("", "could not find auto"), ("127.0.0.1:1", "refused"), ("ray://[::1]:1", ""), ("a:99999", "")):
        monkeypatch.setenv("RAY_ADDRESS", address)  # Ray itself tries for minutes where nobody listens
        sentence = f"there is no cluster of Ray at RAY_ADDRESS={re.escape(address or 'auto')}: `ray start --head` begins one"
        with pytest.raises(RuntimeError, match=sentence) as raised:
            RayPool(Draws()).reset([{"id": 0}], [0])
        assert cause in str(raised.value.__cause__) and bool(address) == ("could not find" not in str(raised.value.__cause__))


def test_a_pool_of_ray_without_ray_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"a pool of Ray needs the ray package: pip install 'jmarl\[ray\]'"):
        RayPool(Draws())


def test_the_flag_pool_is_the_setting_pool(tmp_path, capsys):
    pytest.importorskip("ray", reason="pip install 'jmarl[ray]'")
    config = tmp_path / "grid.yaml"
    config.write_text("models: [a]\nenvironment: grid\npool_workers: 3\ntimeout: 5\n")
    command = ["train", "--config", str(config)]
    task = read_configuration(parser_for(command).parse_args([*command, "--pool", "ray"])).experiment.task
    assert (task.pool, task.pool_workers) == ("ray", 3)
    lock = in_pool(make("grid"), task, 1)
    assert type(lock.engine) is RayPool and (lock.engine.workers, lock.engine.timeout) == (3, 5.0)
    with pytest.raises(SystemExit):
        parser_for(command).parse_args([*command, "--pool", "threads"])
    assert "choose from" in capsys.readouterr().err


def test_what_a_pool_cannot_call_is_refused():
    with pytest.raises(ValueError, match="rewards in a pool need timeout"):
        make_reward(close_to_random, num_agents=2, pool=Pool)
    with pytest.raises(ValueError, match="pool='threads' is not allowed: pool must be one of .*processes.*ray"):
        TaskConfig("grid", pool="threads")
    with pytest.raises(ValueError, match="pool='ray' is not allowed: pool must be None without reward or environment"):
        TaskConfig(data="a.jsonl", pool="ray")
    with pytest.raises(ValueError, match="timeout=None is not allowed: timeout must be a number of seconds"):
        TaskConfig(data="a.jsonl", reward="a:b", pool="ray")
    with pytest.raises(ValueError, match="pool='processes' is not allowed for object: it answers all episodes"):
        in_pool(object(), TaskConfig("grid", pool="processes"), 1)


@pytest.mark.slow
def test_actors_of_a_node_that_is_lost_are_replaced(cluster):
    """The last test: one node is left."""
    local = trajectory(Draws())
    with RayPool(Draws(), start_timeout=30) as pool:
        assert len(set(workers_of(pool).values())) == 2

        def lose(turn):
            if turn == 1:
                cluster.stdin.write("remove\n")
                assert cluster.stdout.readline() == "removed\n"

        assert trajectory(pool, between=lose) == local
        assert len(set(workers_of(pool).values())) == 1
