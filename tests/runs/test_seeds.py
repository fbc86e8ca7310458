"""Runs of several seeds in one program: each run and its directory equal those of its seed alone; refused settings.

Tests marked slow are those that several devices change: CI runs them with two, over which the runs are spread.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import RewardError, make_reward
from jmarl.runs.seeds import train_seeds
from jmarl.runs.train import train
from jmarl.team import make_team
from jmarl.types import TRACES
from tests.house import HOUSE
from tests.runs.test_faults import rows_of

ITEMS = [{"prompt": text} for text in ("The answer", "seven apples and three pears", "is", "of fruit")]
SEEDS = (3, 0, 11)
CONFIG = TrainConfig.of(
    **HOUSE, eval_generations=HOUSE["num_generations"], adam_eps=1e-2, lora_rank=2, lora_targets="q_proj,down_proj",
    per_agent="vmap",
)  # fmt: skip  # adam_eps: or the first steps are the signs of gradients, also of those that are rounding alone


def short(a, b):
    """Return rewards that depend on every letter."""
    return [sum(map(ord, x)) % 13 / 13 - len(y) / 20 for x, y in zip(a, b, strict=True)]


def go_on(agent_completions, **_):
    return [f"{agent_completions[1 - n][:8]} {n}" for n in range(2)]


@pytest.fixture(scope="module")
def agent(tiny_config, tiny_tokenizer, random_agent):
    return random_agent(tiny_config(), tiny_tokenizer, 0)


def run(agent, cfg, seeds=None, items=ITEMS, reward=short):
    """Return the results of `train_seeds`, or for a single seed the result of `train`."""
    team, params = make_team([agent, agent], lora=cfg.lora.lora_rank > 0)
    transition = go_on if cfg.episodes.num_turns > 1 else None
    env = RewardEnvironment(make_reward(reward, num_agents=2), [default_formatter] * 2, transition)
    if isinstance(seeds, int):
        return train(team, env, items, cfg.replace(seed=seeds), params=params, eval_items=ITEMS[:2])
    return train_seeds(team, env, items, cfg, params=params, seeds=seeds, eval_items=ITEMS[:2])


def assert_equal(one, other):
    """Check that completions and rewards are equal, and parameters up to rounding."""
    np.testing.assert_allclose(one.rewards, other.rewards, rtol=1e-12)
    assert one.before.mean == other.before.mean and one.after.mean == other.after.mean
    assert one.after.rollout.turns[-1].texts == other.after.rollout.turns[-1].texts
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), one.state, other.state)


ONE_DEVICE = {
    # the noise of dropout depends on how wide a batch is: here equally for all
    "own critics": dict(algorithm="ippo", learning_rate=(1e-2, 3e-2), lora_dropout=0.2, min_new_tokens=4),
    "all weights": dict(algorithm="remax", lora_rank=0, lora_targets=None, per_agent="map", update_order="alternating"),
}
SEVERAL_DEVICES = {
    "central critic, episodes that end": dict(
        algorithm="maac", num_turns=2, history="append", early_termination_threshold=0.25, num_generations=2
    ),
    "further prompts": dict(dynamic_sampling=2, num_generations=2, eval_generations=2, frozen_agents=(1,)),
}


@pytest.mark.parametrize(
    "changes",
    [pytest.param(changes, marks=pytest.mark.long, id=name) for name, changes in ONE_DEVICE.items()]
    + [pytest.param(changes, marks=pytest.mark.slow, id=name) for name, changes in SEVERAL_DEVICES.items()],
)
def test_every_run_equals_the_run_of_its_seed_alone(agent, changes):
    cfg = CONFIG.replace(**changes)
    short = [item for item in ITEMS if len(item["prompt"]) < 12]  # of one width, so that there are fewer programs to compile
    together = run(agent, cfg, SEEDS, short)
    for seed, result in zip(SEEDS, together, strict=True):
        assert_equal(run(agent, cfg, seed, short), result)
    assert len({result.rewards[-1] for result in together}) == len(SEEDS), "seeds differ"
    for critic in together[0].state.critics:  # value heads and adapters over the first agent's base
        assert critic.params["value"].shape == (1 if cfg.algorithm == "maac" else 2, 32)
        assert np.abs(critic.params["value"]).max() > 0
        assert max(np.abs(critic.params["layers"]["down_proj"]["b"]).max(-1).max(-1).ravel()) > 1e-5


def step_rows(directory):
    return [row for row in rows_of(directory) if "eval/updates" not in row]


@pytest.fixture(scope="module")
def whole(agent, tmp_path_factory):
    """Four updates of all runs without a break, and how many programs of each kind were traced."""
    where, before = tmp_path_factory.mktemp("whole"), TRACES.copy()
    results = run(agent, CONFIG.replace(num_updates=4, save_every=2, output_dir=str(where)), SEEDS)
    return where, results, TRACES - before


@pytest.mark.slow
def test_all_runs_are_trained_by_one_program(agent, whole):
    """For any number of seeds: one sampler for training and evaluation, one update."""
    assert whole[2] == {"sample": 1, "update": 1}
    before = TRACES.copy()
    run(agent, CONFIG, (5, 6, 7))
    assert before == TRACES, "other seeds are no other program"


@pytest.mark.slow
def test_a_directory_equals_the_directory_of_a_single_run(agent, whole, tmp_path):
    """Metrics (losses up to rounding), checkpoints and models; beside them the means over the runs."""
    where, results, _ = whole
    alone = run(agent, CONFIG.replace(num_updates=4, save_every=2, output_dir=str(tmp_path)), 0)
    assert_equal(alone, results[1])
    for mine, other in zip(step_rows(tmp_path), step_rows(where / "seed_0"), strict=True):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-5)
    models, seed_models = ({p.relative_to(d) for p in d.rglob("*")} for d in (tmp_path / "models", where / "seed_0" / "models"))
    assert models == seed_models and models
    per_seed = [[row["reward/mean"] for row in rows_of(where / f"seed_{seed}") if "reward/mean" in row] for seed in SEEDS]
    together = [row for row in rows_of(where) if "reward/mean" in row]
    np.testing.assert_allclose([row["reward/mean"] for row in together], np.mean(per_seed, 0))
    np.testing.assert_allclose(
        [row["reward/mean_ci95"] for row in together], 4.302653 * np.std(per_seed, 0, ddof=1) / np.sqrt(len(SEEDS))
    )


@pytest.mark.slow
def test_runs_resume_together_and_alone(agent, whole, tmp_path):
    """From checkpoints at update 2: together bit for bit, and one run alone with `train` up to rounding."""
    cfg = CONFIG.replace(num_updates=4, save_every=2, output_dir=str(tmp_path))
    run(agent, cfg.replace(num_updates=2), SEEDS)
    shutil.copytree(tmp_path / "seed_0", tmp_path / "alone")
    resumed = run(agent, cfg.replace(resume=True), SEEDS)
    for one, other in zip(whole[1], resumed, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.state, other.state)
        assert one.rewards[2:] == other.rewards
    assert step_rows(tmp_path / "seed_3") == step_rows(whole[0] / "seed_3")
    done = run(agent, cfg.replace(resume=True), SEEDS)  # nothing is left to make
    assert [(one.rewards, one.after.mean) for one in done] == [([], one.after.mean) for one in resumed]
    alone = run(agent, cfg.replace(output_dir=str(tmp_path / "alone"), resume=True), 0)
    np.testing.assert_allclose(alone.rewards, resumed[1].rewards, rtol=1e-12)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), alone.state, resumed[1].state)


@pytest.mark.slow
def test_failed_runs_resume_from_their_last_update(agent, whole, tmp_path):
    """The logs of all runs and the means over the runs contain it."""
    calls = []

    def breaks(a, b):
        calls.append(1)
        if len(calls) == 5 * len(SEEDS):  # the evaluation and three updates came before
            raise OSError("no service")
        return short(a, b)

    cfg = CONFIG.replace(num_updates=4, save_every=100, output_dir=str(tmp_path))
    with pytest.raises(RewardError, match="no service"):
        run(agent, cfg, SEEDS, reward=breaks)
    assert [len(step_rows(tmp_path / where)) for where in ("", *(f"seed_{seed}" for seed in SEEDS))] == [3] * 4
    resumed = run(agent, cfg.replace(resume=True, allow_changed="reward"), SEEDS)
    for one, other in zip(whole[1], resumed, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.state, other.state)
        assert one.rewards[3:] == other.rewards


@pytest.mark.slow
def test_runs_killed_between_saves_resume(agent, whole, tmp_path):
    """From the newest checkpoint that all of them have."""
    where = tmp_path / "run"
    shutil.copytree(whole[0], where)
    shutil.rmtree(where / "seed_0" / "checkpoints" / "4")
    cfg = CONFIG.replace(num_updates=4, save_every=2, output_dir=str(where), resume=True)
    for one, other in zip(whole[1], run(agent, cfg, SEEDS), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.state, other.state)
        assert one.rewards[2:] == other.rewards
    assert [len(step_rows(where / f"seed_{seed}")) for seed in SEEDS] == [4] * 3
    shutil.rmtree(where / "seed_0" / "checkpoints" / "2")
    shutil.rmtree(where / "seed_3" / "checkpoints" / "4")
    with pytest.raises(ValueError, match=r"no checkpoint of one step in common .*seed_3: \[2\].*seed_0: \[4\]"):
        run(agent, cfg, SEEDS)


STARTS = """
import sys
import jax
from jmarl.config import TrainConfig
from jmarl.models.hub.agents import load_agent
from jmarl.team import make_team
from jmarl.runs.kinds.seeds import start_seeds
from jmarl.runs.kinds.seeds import join_states, runs_of, state_of_run

assert jax.device_count() == 2
agent = load_agent(sys.argv[1])
team, params = make_team([agent, agent], lora=True)
cfg = TrainConfig.of(num_generations=2, lora_rank=8, progress=False)
for _ in range(40):
    setup, states = start_seeds(range(4), team, params, cfg, None)
    runs = runs_of(setup, range(4))
    state = join_states(states, runs)
    jax.block_until_ready([state_of_run(state, run, runs) for run in range(4)])
"""


@pytest.mark.slow
def test_starts_on_two_devices_do_not_deadlock(tiny_dir):
    """XLA for CPUs deadlocked in one of 10 to 30 starts, until it ended the process, when programs that move data between
    devices were dispatched without waiting for each other."""
    env = os.environ | {
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    env |= {"JAX_ENABLE_COMPILATION_CACHE": "0", "XLA_FLAGS": ""}  # as users start; it was not seen otherwise
    command = [sys.executable, "-c", STARTS, str(tiny_dir())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_story_experiment_takes_seeds(tmp_path):
    """Seeds that train_seeds refuses are refused before a model is loaded."""
    from experiments.story_length import StoryConfig

    cfg = StoryConfig.of(seeds=(0, 1), output_dir=str(tmp_path))
    assert [(c.run.seed, c.run.output_dir, c.seeds) for c in map(cfg.for_seed, cfg.seeds)] == [
        (seed, str(tmp_path / f"seed_{seed}"), ()) for seed in (0, 1)
    ]
    with pytest.raises(ValueError, match="each once"):
        StoryConfig.of(seeds=(0, 0))
    with pytest.raises(ValueError, match="seed_0.checkpoints has no complete checkpoint"):
        StoryConfig.of(seeds=(0, 1), output_dir=str(tmp_path), resume=True)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="holds the checkpoints of a single run"):
        StoryConfig.of(seeds=(0, 1), output_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "seeds", "message"),
    [
        ({}, (), r"seeds=\[\] is not allowed: give at least one"),
        ({}, (1, 2, 1), r"seeds=\[1, 2, 1\] is not allowed: .* each once"),
        (dict(algorithm="madpo", num_generations=4), (0, 1), "algorithm='madpo' learns from pairs .* call train once per seed"),
    ],
)
def test_settings_that_cannot_be_trained_together_are_refused(agent, changes, seeds, message):
    with pytest.raises(ValueError, match=message):
        run(agent, CONFIG.replace(**changes), seeds)
