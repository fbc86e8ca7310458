"""Training with async_steps=1: what is equal to a run without it, what differs, and what it refuses."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from jmarl.config import TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.logs.completions_file import read_completions
from jmarl.runs.seeds import train_seeds
from jmarl.runs.train import train
from jmarl.team import make_team
from jmarl.types import TRACES
from tests.house import HOUSE
from tests.runs.training_process import WORDS, tiny_agents, tiny_team

ITEMS = [{"prompt": f"{a} {b} {a}"} for a in WORDS[:3] for b in WORDS[3:]]
# Rows may begin when others have ended at the eighth token.
BASE = HOUSE | dict(num_updates=4, num_generations=4, max_new_tokens=16)
# Changes no float32 parameter, and weights as async_steps does.
STILL = dict(learning_rate=1e-30, importance_cap=2.0)


def reward(a, b):
    return [len(set(x.split()) & set(y.split())) for x, y in zip(a, b, strict=True)]


def run(env=reward, items=ITEMS, seeds=None, **fields):
    cfg = TrainConfig.of(**{**BASE, **fields})
    team, params = tiny_team()
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
    result = run(async_steps=1, output_dir=str(directory))
    return result, directory, TRACES["refill"] - traced


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
def test_with_constant_parameters_nothing_changes(tmp_path):
    """All completions, rewards and losses are equal, although most completions began in the step before."""
    plain = run(output_dir=str(tmp_path / "plain"), **STILL)
    moved = run(output_dir=str(tmp_path / "early"), async_steps=1, **STILL)
    jax.tree.map(np.testing.assert_array_equal, weights(plain), weights(moved))
    texts = [list(read_completions(tmp_path / name / "completions.jsonl.gz")) for name in ("plain", "early")]
    assert texts[0] == texts[1]
    shares = [row["off_policy"] for row in rows(tmp_path / "early")]
    assert shares[0] == 0 and all(0 < share <= 1 for share in shares[1:])


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
    settings = dict(async_steps=1, output_dir=str(tmp_path))
    env = Stopping(make_reward(reward, num_agents=2), [default_formatter] * 2)
    with pytest.raises(OSError, match="is away"):
        run(env, **settings)
    resumed = run(env, resume=True, **settings)
    jax.tree.map(np.testing.assert_array_equal, weights(resumed), weights(early[0]))


@pytest.mark.long
def test_prompts_may_become_longer_and_shorter():
    """Other widths compile another program and change no token."""
    items = [*ITEMS[:1], {"prompt": " ".join(["red"] * 20)}, *ITEMS[1:2]]
    settings = STILL | dict(items=items, num_prompts=1, num_updates=3, num_generations=8)
    plain, moved = run(**settings), run(async_steps=1, **settings)
    assert plain.rewards == moved.rewards


@pytest.mark.long
def test_several_stacks_and_shared_weights():
    """Stacks of different models each have slots of their own; two roles of shared weights share the slots of one stack."""
    agents = [*tiny_agents(1), *tiny_agents(1, seed=1, width=64)]
    for kind, loaded, shared in (("stacks", agents, False), ("roles", [agents[0]] * 2, True)):
        rewards = []
        for async_steps in (0, 1):
            team, params = make_team(loaded, shared_weights=shared)
            cfg = TrainConfig.of(**BASE | STILL | dict(num_updates=2, async_steps=async_steps))
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
