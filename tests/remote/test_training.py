"""Runs on servers are bit-equal to runs in one process: parameters and metric rows, also where servers are killed and added."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jmarl.cli.main import main
from jmarl.config import TrainConfig
from jmarl.envs import make
from jmarl.envs.vector import vectorize
from jmarl.models.hub.agents import load_agent
from jmarl.runs.train import train
from jmarl.team import make_team
from tests.remote.serving import again, kill, serving

NAMES = "math,math_planner,sudoku"
SETTINGS = dict(num_updates=3, num_prompts=2, num_generations=2, max_new_tokens=4, learning_rate=1e-2, progress=False)


@pytest.fixture(scope="module")
def servers():
    with serving(NAMES, 2) as servers:
        yield servers


@pytest.fixture(scope="module")
def model(tiny_dir):
    return tiny_dir("llama", max_position_embeddings=2048)


def rows_of(directory):
    """The rows of a run, without what depends on time and on compiled programs."""
    rows = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return [{k: x for k, x in row.items() if "time" not in k and k not in ("tokens_per_s", "compiles")} for row in rows]


def run(env, model, directory, **settings):
    """Train a team in trees; return its parameters and rows."""
    env = vectorize(env)
    team, params = make_team([load_agent(model)] * env.num_agents)
    cfg = TrainConfig.of(**SETTINGS | settings, num_turns=env.max_turns, output_dir=str(directory), eval_every=2)
    result = train(team, env, env.tasks("train", 4), cfg, params=params, eval_items=env.tasks("eval", 2))
    assert not result.interrupted and cfg.episodes.branching == "tree"
    return jax.tree.leaves(jax.device_get([stack.params for stack in result.state.stacks])), rows_of(directory)


def assert_equal(one, other):
    assert one[1] == other[1] and len(one[1]) >= 3
    assert all(np.array_equal(x, y) for x, y in zip(one[0], other[0], strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", ["math", "math_planner", "sudoku"])
def test_a_run_on_servers_is_the_run_of_this_process(name, servers, model, tmp_path):
    here = run(make(name), model, tmp_path / "here")
    far = run(make(name, servers=[server.address for server in servers]), model, tmp_path / "far")
    assert_equal(here, far)


@pytest.mark.long
def test_a_run_whose_servers_are_killed_and_replaced_is_the_same(servers, model, tmp_path, capfd):
    """One is killed with SIGKILL while it plays, another one is added to the file, and the first comes back at its address."""
    here = run(make("sudoku"), model, tmp_path / "here")
    file = tmp_path / "servers.txt"
    with serving(NAMES, 2) as (victim, added):
        file.write_text(f"{victim.address}=5\n{servers[0].address}\n")
        env, restarted = make("sudoku", servers=str(file)), []
        step, calls = env.engine.step, []

        def watched(*arguments):
            calls.append(1)
            if len(calls) == 2:
                threading.Timer(0.01, kill, [victim]).start()
            if len(calls) == 4:
                file.write_text(f"{victim.address}\n{added.address}\n")
            if len(calls) == 6:
                restarted.append(again(victim, NAMES))
            return step(*arguments)

        env.engine.step = watched
        env.within = lambda num_turns: env  # the engine that is watched
        try:
            assert_equal(here, run(env, model, tmp_path / "far"))
        finally:
            for server in restarted:
                server.close()
    told = capfd.readouterr().err
    assert f"server {victim.address} is put aside: " in told and f"server {added.address} comes" in told and len(calls) >= 9


def test_a_run_that_finds_no_server_fails_and_one_that_resumes_can_be_resumed_later(tmp_path, monkeypatch, capfd):
    """The addresses of a run that begins may be wrong."""
    monkeypatch.setattr("jmarl.remote.client.servers.START_SECONDS", 0.1)
    file, run = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(json.dumps({"models": ["a"], "environment": "sudoku", "options": {"servers": "127.0.0.1:1"}}))
    command = ["train", "--config", str(file), "--output", str(run), "--resume", "auto"]
    assert main(command) == 1
    sentence = "no server of 'sudoku' answers (127.0.0.1:1: it cannot be reached (Connection refused)): start one there"
    assert sentence in capfd.readouterr().err
    (run / "checkpoints" / "3").mkdir(parents=True)
    (run / "checkpoints" / "3" / "meta.json").touch()
    assert main(command) == 75
    assert f"interrupted because {sentence}" in capfd.readouterr().out


@pytest.mark.long
def test_a_run_without_servers_saves_ends_with_75_and_goes_on(model, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    settings = SETTINGS | dict(
        algorithm="grpo", models=[str(model)], num_agents=2, num_updates=6, num_turns=3, num_tasks=4, held_out=2, save_every=5,
        progress=True, tensorboard=False,
    )  # fmt: skip

    def config(name, **options):
        file = Path(f"{name}.yaml")
        file.write_text(json.dumps(settings | {"environment": "sudoku", "options": options}))
        return ["train", "--config", str(file), "--output", name]

    assert main(config("here")) == 0
    with serving(NAMES) as (only,):
        Path("servers.txt").write_text(only.address)
        far = config("far", servers={"address": "servers.txt", "patience": 1.0})

        def kill_after_a_row():
            while not (Path("far/metrics.jsonl").is_file() and len(rows_of("far")) >= 2):
                time.sleep(0.02)
            kill(only)

        killer = threading.Thread(target=kill_after_a_row)
        killer.start()
        assert main(far) == 75
        killer.join()
    printed = capfd.readouterr()
    updates = len([row for row in rows_of("far") if "reward/mean" in row])
    assert f"interrupted after update {updates} of 6 because no server of 'sudoku' answers" in printed.out
    assert "no server of 'sudoku' answers" in printed.err
    assert main([*far, "--resume"]) == 75
    with serving(NAMES) as (other,):
        Path("servers.txt").write_text(f"{other.address}  # a new one\n")
        assert main([*far, "--resume"]) == 0
    assert rows_of("far") == rows_of("here")
    for file in sorted(Path("here/models").rglob("*.safetensors")):
        ours, others = load_file(file), load_file(Path("far") / file.relative_to("here"))
        assert ours.keys() == others.keys() and all(np.array_equal(ours[key], others[key]) for key in ours)
