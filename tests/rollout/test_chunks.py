"""Sampling a turn in parts, with rewards computed while the next part is sampled, does not change the results."""

from __future__ import annotations

import sqlite3
import threading
from functools import partial

import jax
import math_verify
import numpy as np
import pytest

from jmarl.config import Episodes, TrainConfig
from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.envs.rewards import make_reward
from jmarl.randomness import Randomness
from jmarl.rollout.chunks import num_parts
from jmarl.rollout.play import play
from jmarl.runs.train import train
from jmarl.sampling.generate import sample_team
from jmarl.team import Team, make_team
from jmarl.types import TRACES
from tests.house import HOUSE
from tests.matrix import product

SETTINGS = TrainConfig.of(**HOUSE, compute_dtype="float32").sampling  # what runs make of "auto", so their programs
ITEMS = [{"prompt": text} for text in ("The answer", "seven apples and three pears", "def add", "two agents")]


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in (0, 1)]


def answer(agent_completions, num_agents, **_):
    return [f"and {agent_completions[1 - i]}" for i in range(num_agents)]


def length_reward(a, b, rng):
    """Return rewards with a random term; some are invalid."""
    return [len(x) - 2 * len(y) + rng.random() if len(x) % 7 else float("nan") for x, y in zip(a, b, strict=True)]


def environment(reward=length_reward, transition=None):
    return RewardEnvironment(make_reward(reward, num_agents=2), [default_formatter] * 2, transition)


def play_turns(pair, env, sample=None, **episodes):
    team, params = pair
    options = 3, Randomness(seed=0, step=0)
    return play(sample or partial(sample_team, team, params), team, ITEMS, env, SETTINGS, Episodes(**episodes), *options)


def assert_equal_trees(first, second):
    left, right = jax.tree.leaves(first), jax.tree.leaves(second)
    assert len(left) == len(right)
    for x, y in zip(left, right, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.long
@pytest.mark.parametrize("branching, shared", product(["tree", "chain"], [False, True]))
def test_parts_and_overlap_do_not_change_a_rollout(agents, shared, branching):
    """Rollouts of two turns, for two agents of a stack and for two roles of one parameter set, are equal.

    At this size the rounding of the sampler does not depend on the number of rows.
    """
    pair = make_team(agents[:1] * 2, shared_weights=True) if shared else make_team(agents)
    options = dict(num_turns=2, branching=branching)
    rollouts = [
        play_turns(pair, environment(transition=answer), **options, **parts)
        for parts in ({}, dict(sample_parts=2), dict(sample_parts=2, overlap_rewards=False))
    ]
    assert_equal_trees(rollouts[1], rollouts[2])  # with and without overlap
    for rollout in rollouts[1:]:
        assert [turn.texts for turn in rollout.turns] == [turn.texts for turn in rollouts[0].turns]
        assert [turn.invalid for turn in rollout.turns] == [turn.invalid for turn in rollouts[0].turns]
        assert_equal_trees([turn.rewards for turn in rollout.turns], [turn.rewards for turn in rollouts[0].turns])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:update")
@pytest.mark.parametrize("algorithm", ["magrpo", "remax", pytest.param("ippo", marks=pytest.mark.nightly)])
def test_parameters_are_bit_equal_with_and_without_overlap(agents, algorithm):
    states = []
    for overlap in (True, False):
        env, pair = make_reward(length_reward, num_agents=2), make_team(agents)
        changes = dict(algorithm=algorithm, num_prompts=4, sample_parts=2, overlap_rewards=overlap)
        settings = TrainConfig.of(**HOUSE | changes)
        states.append(train(pair[0], env, ITEMS, settings, params=pair[1]).state)
    assert_equal_trees(*states)
    assert not np.array_equal(jax.tree.leaves(states[0].stacks[0].params)[0], jax.tree.leaves(make_team(agents)[1][0])[0])


def test_rewards_are_computed_while_the_next_part_is_sampled(agents):
    """The reward of the first part waits until the second part is requested, so it would fail without overlap."""
    team, params = make_team(agents)
    second, requests = threading.Event(), []

    def sample(request):
        requests.append(request)
        if len(requests) == 2:
            second.set()
        return sample_team(team, params, request)

    def reward(a, b):
        return [float(second.wait(20))] * len(a)

    assert (play_turns((team, params), environment(reward), sample, sample_parts=2).turns[0].rewards == 1).all()
    assert len(requests) == 2 and requests[0].encoded[0][0].shape[1] == 2


def test_rewards_of_all_parts_are_computed_in_the_callers_thread(agents):
    """math_verify limits its time by signals, which only the main thread gets; a reward may keep what belongs to a thread."""
    connection = sqlite3.connect(":memory:")

    async def reward(a, b):
        assert threading.current_thread() is threading.main_thread()
        assert connection.execute("select 1").fetchone() == (1,)
        equal = math_verify.verify(math_verify.parse("$\\frac{1}{2}$"), math_verify.parse("$0.5$"))
        return [float(equal)] * len(a)

    assert (play_turns(make_team(agents), environment(reward), sample_parts=2).turns[0].rewards == 1).all()


def test_a_keyboard_interrupt_in_a_reward_ends_the_play_and_its_thread(agents):
    def interrupted(a, b):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play_turns(make_team(agents), environment(interrupted), sample_parts=2)
    assert not any(thread.name.startswith("sampling") for thread in threading.enumerate())


@pytest.mark.slow  # compiles under another setting
def test_parts_are_sampled_with_the_settings_of_jax_of_the_callers_thread(agents):
    before = TRACES["sample"]
    with jax.default_matmul_precision("float32"):
        play_turns(make_team(agents), environment(), sample_parts=2)
    assert TRACES["sample"] == before + 1  # of both parts together, under this setting


def test_faults_of_later_parts_have_the_right_index_and_errors_are_raised(agents):
    def broken(a, b, batch_items):
        return [float("nan") if item["prompt"] == "two agents" else 1.0 for item in batch_items]

    turn = play_turns(make_team(agents), environment(broken), sample_parts=2).turns[0]
    assert turn.invalid == 3 and "joint action" in turn.fault and np.isnan(turn.rewards[3]).all()

    def raises(a, b):
        raise ZeroDivisionError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        play_turns(make_team(agents), environment(raises), sample_parts=2)


@pytest.mark.long
def test_the_sampler_of_parts_is_compiled_before_the_first_step(agents):
    changes = dict(num_prompts=4, max_new_tokens=7, min_new_tokens=7, sample_parts=2)  # of no other test: nothing is there yet
    cfg = TrainConfig.of(**HOUSE | changes)
    before, traces = TRACES.copy(), []

    def reward(a, b):
        traces.append((TRACES["sample"] - before["sample"], TRACES["update"] - before["update"]))
        return [float(len(x)) for x in a]

    train(Team.of(agents), make_reward(reward, num_agents=2), ITEMS, cfg)
    assert traces == [(1, 1)] * 4


def test_parts_divide_the_prompts_and_turns_with_history_have_one_part():
    assert [num_parts(count, Episodes(sample_parts=4)) for count in (1, 2, 3, 6, 8)] == [1, 2, 1, 2, 4]
    assert num_parts(8, Episodes(sample_parts=4, num_turns=2, history="append")) == 1
    with pytest.raises(ValueError, match="sample_parts=0"):
        Episodes(sample_parts=0)
