"""Training with async_steps=1: what is equal to a run without it, what differs, and what it refuses."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from experiments.tiny import random_agents, tokenizer
from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.logs.completions_file import read_completions
from jmarl.runs.seeds import train_seeds
from jmarl.runs.train import train
from jmarl.team import make_team
from jmarl.types import TRACES

WORDS = ("red", "green", "blue", "one", "two", "six")
ITEMS = [{"prompt": f"{a} {b} {a}"} for a in WORDS[:3] for b in WORDS[3:]]
BASE = dict(num_updates=4, num_prompts=2, num_generations=4, max_new_tokens=32, learning_rate=1e-2, progress=False)


def reward(a, b):
    return [len(set(x.split()) & set(y.split())) for x, y in zip(a, b, strict=True)]


def run(env=reward, items=ITEMS, seeds=None, **fields):
    cfg = TrainConfig.of(**{**BASE, **fields})
    team, params = make_team(random_agents("tiny", tokenizer(WORDS, spaced=True), 2, seed=0, width=32))
    env = make_reward(env, num_agents=2) if env is reward else env
    if seeds:
        return train_seeds(team, env, items, cfg, params=params, seeds=seeds)
    return train(team, env, items, cfg, params=params)


def weights(result):
    return jax.device_get([stack.params for stack in result.state.stacks])


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    """A run whose rows begin early, and its directory."""
    directory = tmp_path_factory.mktemp("early")
    traced = TRACES["refill"]
    result = run(async_steps=1, output_dir=str(directory), temperature=0.9)
    return result, directory, TRACES["refill"] - traced


@pytest.mark.long
def test_with_constant_parameters_nothing_changes(tmp_path):
    """A learning rate of 1e-30 changes no float32 parameter. Then all completions, rewards and losses are equal, although most
    completions began in the step before."""
    settings = dict(learning_rate=1e-30, importance_cap=2.0)
    plain = run(output_dir=str(tmp_path / "plain"), **settings)
    moved = run(output_dir=str(tmp_path / "early"), async_steps=1, **settings)
    jax.tree.map(np.testing.assert_array_equal, weights(plain), weights(moved))
    texts = [list(read_completions(tmp_path / name / "completions.jsonl.gz")) for name in ("plain", "early")]
    assert texts[0] == texts[1]
    shares = [row["off_policy"] for row in rows(tmp_path / "early")]
    assert shares[0] == 0 and all(0 < share <= 1 for share in shares[1:])


@pytest.mark.long
def test_rows_that_began_early_are_weighted(early):
    """The parameters have changed since they were sampled: `importance` is not 1 where `off_policy` is not 0."""
    result, directory, traced = early
    logged = rows(directory)
    assert traced == 1, "one program samples all steps"
    assert logged[0]["off_policy"] == 0 and abs(logged[0]["agent_0/importance"] - 1) < 1e-4
    assert all(abs(row["agent_0/importance"] - 1) > 1e-4 for row in logged[1:] if row["off_policy"] > 0.5)
    assert all(row["time/sampling"] > 0 for row in logged)
    assert result.state.pending == (), "a result holds no unfinished completions"


@pytest.mark.long
def test_a_longer_run_goes_on_bit_equal(early, tmp_path):
    """Two updates, then two more: the rows that have begun are in the checkpoint."""
    settings = dict(async_steps=1, output_dir=str(tmp_path), temperature=0.9)
    run(num_updates=2, **settings)
    resumed = run(resume=True, **settings)
    jax.tree.map(np.testing.assert_array_equal, weights(resumed), weights(early[0]))
    assert [row["off_policy"] for row in rows(tmp_path)] == [row["off_policy"] for row in rows(early[1])]


class Stopping(RewardEnvironment):
    """An environment that fails once, in the third of its steps, when rows of the next step have begun."""

    steps = 0

    def step(self, states, actions, rng):
        Stopping.steps += 1
        if Stopping.steps == 3:
            raise OSError("the service of the reward is away")
        return super().step(states, actions, rng)


@pytest.mark.long
def test_a_run_that_failed_between_playing_and_its_update_goes_on_bit_equal(early, tmp_path):
    """The sampler has the early rows of two steps then; the checkpoint holds those of the step that is repeated."""
    settings = dict(async_steps=1, output_dir=str(tmp_path), temperature=0.9)
    env = Stopping(make_reward(reward, num_agents=2), [default_formatter] * 2)
    with pytest.raises(OSError, match="is away"):
        run(env, **settings)
    resumed = run(env, resume=True, **settings)
    jax.tree.map(np.testing.assert_array_equal, weights(resumed), weights(early[0]))


@pytest.mark.long
def test_prompts_may_become_longer(tmp_path):
    """Other widths compile another program and change no token."""
    items = ITEMS[:2] + [{"prompt": " ".join(["red"] * 20)}, *ITEMS[2:4]]
    settings = dict(items=items, num_prompts=1, num_updates=5, learning_rate=1e-30, importance_cap=2.0)
    plain, moved = run(**settings), run(async_steps=1, **settings)
    assert plain.rewards == moved.rewards


@pytest.mark.long
def test_several_stacks_and_shared_weights():
    """Stacks of different models each have slots of their own; two roles of shared weights share the slots of one stack."""
    words = tokenizer(WORDS, spaced=True)
    agents = [random_agents("narrow", words, 1, seed=0, width=32)[0], random_agents("wide", words, 1, seed=1, width=64)[0]]
    for kind, loaded, shared in (("stacks", agents, False), ("roles", [agents[0]] * 2, True)):
        rewards = []
        for async_steps in (0, 1):
            team, params = make_team(loaded, shared_weights=shared)
            settings = dict(learning_rate=1e-30, importance_cap=2.0, async_steps=async_steps)
            cfg = TrainConfig.of(**{**BASE, **settings})
            rewards.append(train(team, make_reward(reward, num_agents=2), ITEMS, cfg, params=params).rewards)
        assert rewards[0] == rewards[1], kind


@pytest.mark.long
def test_an_environment_that_changes_its_prompts_is_refused():
    """`reset` is called for a step twice: when its first rows begin, and when it is played."""

    class Changing(RewardEnvironment):
        calls = 0

        def reset(self, items, rng):
            states, prompts = super().reset(items, rng)
            Changing.calls += 1
            return states, [[f"{WORDS[Changing.calls % 6]} {text}" for text in row] for row in prompts]

    env = Changing(make_reward(reward, num_agents=2), [default_formatter] * 2, None)
    with pytest.raises(ValueError, match="other prompts for this step .* with other data start a new run"):
        run(env, async_steps=1)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_turns=2), r"async_steps=1 is not allowed: async_steps must be 0 with num_turns=2"),
        (dict(sample_parts=2), "must be 0 with sample_parts=2"),
        (dict(dynamic_sampling=1), "must be 0 with dynamic_sampling=1"),
        (dict(algorithm="madpo_iter"), "async_steps=1 has no effect for algorithm='madpo_iter'"),
        (dict(algorithm="marlhf_iter"), "async_steps=1 does not go with algorithm='marlhf_iter'"),
        (dict(seeds=(0, 1)), "async_steps=1 is for one seed in a program: call train once per seed"),
    ],
)
def test_what_does_not_go_with_it(fields, message):
    with pytest.raises(ValueError, match=message):
        run(async_steps=1, **fields)
