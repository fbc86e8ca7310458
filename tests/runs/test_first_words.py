"""What a run shows before and while it trains, as a process whose stdout is a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jmarl.config import ExperimentConfig, TrainConfig
from jmarl.config.yaml_file import dump_yaml
from jmarl.files.run_files import next_commands
from jmarl.models.lora import init_adapters
from jmarl.preferences.pairs import Pair, Trajectory
from jmarl.runs.first_words import line_of_data, line_of_run, short_number
from jmarl.team import make_team

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, jax, jmarl
from jmarl.runs.precompile import keep_programs
team = jmarl.Team.load([sys.argv[1]] * 2)
items = [{"prompt": "apples"}]
cfg = jmarl.TrainConfig.of(num_updates=2, num_generations=2, max_new_tokens=2)
jmarl.train(team, lambda a, b: [len(x) for x in a], items, cfg, eval_items=items)
jax.config.update("jax_compilation_cache_dir", None)  # as where a process begins
keep_programs(print)
"""


@pytest.mark.parametrize(
    ("data", "held_out", "line"),
    [
        ([Trajectory(("a",), ("b",))] * 3, [], "learns from 3 trajectories"),
        ([Trajectory(("a",), ("b",), agent=role) for role in ("solver", "verifier", "solver")], ["x"],
         "learns from 3 trajectories of 2 agents (solver: 2, verifier: 1); 1 held out"),
        ([Pair(("a",), ("b",), ("c",))], [], "learns from 1 pairs"),
    ],
)  # fmt: skip
def test_the_first_words_count_given_data_and_their_agents(data, held_out, line):
    assert line_of_data(data, held_out) == line


def test_agents_that_share_a_base_are_counted_whole(random_agent, tiny_config, tiny_tokenizer):
    """With one base of two agents each has the size that one agent has, and LoRA trains as many parameters as are made."""
    agent = random_agent(tiny_config(), tiny_tokenizer, 0)
    cfg = TrainConfig.of(algorithm="dpo", lora_rank=2)
    size = short_number(sum(x.size for x in jax.tree.leaves(agent.params)))
    adapters = jax.eval_shape(lambda key: init_adapters(agent.config, cfg.lora, key), jax.random.key(0))
    trained = short_number(sum(x.size for x in jax.tree.leaves(adapters)))
    for count, each in ((1, ""), (2, " each")):
        text = f"({count} x {size} parameters, of which LoRA trains {trained}{each})"
        assert text in line_of_run(make_team([agent] * count, lora=True)[0], cfg)


@pytest.mark.parametrize(
    ("task", "seeds", "line"),
    [
        (dict(environment="grid"), [], "next: jmarl report D  |  jmarl play --model D"),
        (dict(environment="grid"), [3, 4], "next: jmarl report D  |  jmarl play --model D/seed_3"),
        (dict(data="a.jsonl", reward="m:f", held_out=2), [], "next: jmarl report D  |  jmarl play --model D"),
        (dict(data="a.jsonl", reward="m:f"), [], "next: jmarl report D  |  jmarl play --model D --split train"),
        (dict(data="a.jsonl"), [], "next: jmarl report D"),  # pairs, which nothing rewards
        (None, [], "next: jmarl report D"),  # train() was called, and its environment has no name
    ],
)  # fmt: skip
def test_the_last_words_name_commands_that_work(task, seeds, line, tmp_path):
    if task is not None:
        cfg = ExperimentConfig.of(models=["m"], num_agents=2, seeds=seeds, **task)
        (tmp_path / "config.yaml").write_text(dump_yaml(cfg.as_dict()))
    assert next_commands(str(tmp_path), seeds).replace(str(tmp_path), "D") == line


@pytest.mark.long
def test_a_run_says_what_it_does_and_where_programs_are_kept_once(tmp_path, tiny_dir):
    """Who learns, what was compiled, the result on held-out items before training, and the first step, of a run of a script
    without output_dir. The user's cache directory is empty before it, and named only then."""
    directory = tmp_path / "jmarl" / "programs"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-c", SCRIPT, str(tiny_dir("llama"))]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    words = [
        f"compiled programs are kept in {directory}",
        "1 of 1 held-out tasks are also trained on",
        "magrpo: 2 agents (2 x 35 k parameters) on 1 x cpu, 2 updates, nothing is written",
        "compiled 3 programs in ",
        "after 0 updates",
        "step 1/2  ",
        "step 2/2  ",
        "after 2 updates",
    ]
    assert [word for word in words if done.stdout.count(word) != 1] == []
    assert sorted(words, key=done.stdout.index) == words
    assert any(path.name.startswith("jit_sample_stack") for path in directory.iterdir())
