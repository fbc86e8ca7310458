"""Runs from random weights: they follow from the seed and the agent, and no file of weights is needed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import jmarl.team
from jmarl import ExperimentConfig, run_experiment
from jmarl.cli.main import main
from jmarl.cli.teams.sources import load_source
from jmarl.config.yaml_file import dump_yaml
from jmarl.models.hub.agents import config_to_hf, open_agent
from jmarl.runs.experiment import learns_from_completions, task_of, team_of
from jmarl.runs.kinds.seeds import several
from jmarl.runs.prepare import prepare
from jmarl.team import Team, agents_of, initial_params, policies, random_agents
from tests.house import HOUSE

SEEDS = (3, 0)
ITEMS = [{"prompt": f"Item {i} is"} for i in range(4)]


def letters(*texts):
    """A reward."""
    return [float(sum(map(len, action))) for action in zip(*texts, strict=True)]


@pytest.fixture(scope="module")
def model(tiny_config, tiny_tokenizer, tmp_path_factory) -> str:
    """A directory with a model's config.json and tokenizer, without weights."""
    path = tmp_path_factory.mktemp("random") / "model"
    tiny_tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config_to_hf(tiny_config(), None)))
    return str(path)


def configure(model: str, tmp_path: Path, **settings) -> ExperimentConfig:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ITEMS))
    own = dict(models=[model], num_agents=2, random_weights=True, data=str(tmp_path / "rows.jsonl"))
    return ExperimentConfig.of(**own, reward=f"{__name__}:letters", **HOUSE | settings)


def equal(x, y) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


def test_weights_follow_from_the_seed_and_the_agent(model):
    team = Team.load([model] * 3, random_weights=True)
    first, again, other = (random_agents(team, seed) for seed in (5, 5, 6))
    assert equal([a.params for a in first], [a.params for a in again])
    different = [agent.params["embed"] for agent in (*first, *other)]
    assert all(not np.array_equal(x, y) for i, x in enumerate(different) for y in different[:i])
    assert np.std(different[0]) == pytest.approx(0.02, rel=0.05) and (first[0].params["final_norm"] == 1).all()
    assert np.array_equal(initial_params(team, None, seed=6)[0]["embed"], different[3:])
    assert team.in_context(True).random_weights
    shared = Team.load([model] * 2, random_weights=True, shared_weights=True)
    assert np.array_equal(initial_params(shared, None, seed=6)[0]["embed"][0], different[3])


def test_weights_are_needed_where_they_are_not_random(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor"):
        open_agent(model)
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json: write one with"):
        Team.load([tmp_path / "model"], random_weights=True)


def test_adapters_of_a_random_base_are_refused(model, tmp_path):
    """By all commands that read the settings, and of a team that was loaded in Python."""
    cfg, message = configure(model, tmp_path, lora_rank=2), "lora_rank=2 does not go with random_weights"
    with pytest.raises(ValueError, match=message):
        learns_from_completions(cfg)
    task = task_of(cfg.task, cfg.team)
    with pytest.raises(ValueError, match=message):
        prepare(cfg.train, team_of(cfg.team), task)
    learns_from_completions(cfg.replace(random_weights=False))


@pytest.mark.parametrize("algorithm", ["ippo", "maac"])
def test_several_seeds_start_from_the_weights_of_each_seed_alone(model, tmp_path, algorithm):
    """Bit for bit, agents and critics, which are copies of them."""
    cfg = configure(model, tmp_path, algorithm=algorithm, seed=8)
    team, task = team_of(cfg.team), task_of(cfg.task, cfg.team)
    together = prepare(cfg.train, team, task, kind=several(SEEDS))[1]
    for seed, state in zip(SEEDS, together, strict=True):
        alone = prepare(cfg.train.replace(seed=seed), team, task)[1]
        assert equal(state, alone), seed
        assert equal(policies(state)[0], initial_params(team, None, seed=seed)[0])
        assert equal(state.critics[0].params["embed"][0], state.stacks[0].params["embed"][0])
    assert not np.array_equal(*(state.stacks[0].params["embed"] for state in together))
    given = initial_params(team, None, seed=1)
    same = prepare(cfg.train, team, task, params=given, kind=several(SEEDS))[1]
    assert equal(policies(same[0]), policies(same[1])), "parameters that are given are those of all seeds"


@pytest.mark.slow
def test_a_run_resumes_from_its_checkpoint_and_its_agents_need_no_file_of_weights(model, tmp_path, monkeypatch):
    whole = run_experiment(configure(model, tmp_path, output_dir=str(tmp_path / "whole")))
    cfg = configure(model, tmp_path, output_dir=str(tmp_path / "run"), save_every=1)
    run_experiment(cfg.replace(num_updates=1))
    zeros = jax.tree.map(np.zeros_like, random_agents(team_of(cfg.team), 0)[0].params)
    monkeypatch.setattr(jmarl.team, "draw_params", lambda config, key: zeros)
    resumed = run_experiment(cfg.replace(resume=True))
    assert equal(whole.state.stacks[0].params, resumed.state.stacks[0].params)
    shutil.rmtree(tmp_path / "run" / "models")
    source = load_source([str(tmp_path / "run")])
    assert source.text.startswith("the checkpoint of step 2")
    for agent, saved in zip(source.agents, agents_of(whole.team, policies(whole.state)), strict=True):
        assert equal(agent.params, saved.params)


@pytest.mark.slow
def test_eval_plays_the_random_weights_of_the_seed_of_a_yaml_file(model, tmp_path, monkeypatch):
    """They are those before training, as in the log of the run."""
    monkeypatch.chdir(tmp_path)
    cfg = configure(model, tmp_path, held_out=2, eval_generations=3, seed=4)
    (tmp_path / "a.yaml").write_text(dump_yaml(cfg.changed_dict()))
    before = run_experiment(cfg).before
    together = run_experiment(cfg.replace(seeds=(4, 5)))
    assert together[0].before.mean == before.mean and together[0].before.rollout.turns[0].texts == before.rollout.turns[0].texts
    flags = ("-n", "6", "--num-generations", "3", "--seeds", "4", "--trust", "--batch-size", "2", "-o", "out.json")
    assert main(["eval", "--config", "a.yaml", *flags]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["mean"] == pytest.approx(before.mean) and "random weights of seed 4" in result["model"]
