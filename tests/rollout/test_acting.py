"""Agents that do not act: they are not sampled, their rows are left out of the update, and they do not change."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import Episodes, TrainConfig
from jmarl.envs.vector import LockStep
from jmarl.learning.batches import select_in_few_sizes, take_rows
from jmarl.learning.optimizer import init_stack, steps_done
from jmarl.randomness import Randomness
from jmarl.rollout import make_batches
from jmarl.rollout.make_batches import to_batches
from jmarl.rollout.play import play
from jmarl.runs.stacked_seeds import join_requests
from jmarl.runs.train import train
from jmarl.sampling.generate import SampleRequest, pad, sample_team, tokenize
from jmarl.team import make_team
from tests.batches import update_stack
from tests.envs.test_vector import SETTINGS, Relay, Scaled


@pytest.fixture(scope="module")
def tiny_pair(tiny_config, tiny_tokenizer, random_agent):
    cfg = tiny_config(tie_embeddings=False)
    return [random_agent(cfg, tiny_tokenizer, seed) for seed in range(2)]


@pytest.mark.long
def test_rows_of_inactive_agents_do_not_change_the_update(tiny_pair, monkeypatch):
    """With and without the rows of inactive agents the parameters after an update are equal, and so with rows of padding.

    The batch has as many rows as the agent with most of them. Agent 0 acts in turns 0 and 2, agent 1 in turns 1 and 2.
    """
    team, params = make_team(tiny_pair)
    episodes = Episodes(num_turns=3, branching="chain")
    sample = partial(sample_team, team, params)
    got = play(sample, team, Relay().tasks(count=2), LockStep(Relay()), SETTINGS, episodes, 2, Randomness(seed=0, step=0))
    few = to_batches(team, got)[0]
    monkeypatch.setattr(make_batches, "used_rows", lambda team, *_: [None] * len(team.stacks))
    whole = to_batches(team, got)[0]
    assert whole.rewards.shape[1] == 12 and few.rewards.shape[1] == 8
    assert np.isfinite(np.asarray(few.rewards)).sum() == np.isfinite(np.asarray(whole.rewards)).sum() == 16
    more = take_rows(few, np.pad(np.tile(np.arange(8), (2, 1)), ((0, 0), (0, 3)), constant_values=-1))
    assert more.tokens.shape[1] == 11 and np.isnan(more.rewards[:, 8:]).all()
    algorithm = resolve(TrainConfig.of(algorithm="mareinforce", learning_rate=1e-2, num_generations=2))
    after = []
    for batch in (few, whole, more):
        stack = init_stack(jax.tree.map(np.copy, params[0]), algorithm)
        after.append(update_stack(stack, batch, model=tiny_pair[0].config, algorithm=algorithm)[0].params)
    for x, *remaining in zip(*map(jax.tree.leaves, after), strict=True):
        for y in remaining:
            np.testing.assert_allclose(x, y, atol=1e-5)
    assert np.abs(after[0]["embed"] - params[0]["embed"]).max((1, 2)).min() > 1e-3  # both moved


@pytest.mark.parametrize("most", [3, 9, 48, 50])
def test_batches_of_any_number_of_rows_have_few_sizes(most):
    """Each used row occurs once, before all others. There are few sizes, and none is much larger than needed."""
    rng = np.random.default_rng(0)
    for rows in range(1, most + 1):  # that were sampled
        for count in {1, rows // 2, rows} - {0}:  # that are used by the busier of two agents
            used = np.array([rng.permutation(np.arange(rows) < n) for n in (count, rng.integers(count + 1))])
            picked = select_in_few_sizes(used, most)
            if picked is None:
                continue
            size = picked.shape[1]
            assert size in (8, 16, 24, 32, 48, most) and count <= size < count + max(8, count / 2)
            for mask, indices in zip(used, picked, strict=True):
                first, behind = np.split(indices, [mask.sum()])
                assert set(first) == set(np.flatnonzero(mask)) and not mask[behind[behind >= 0]].any()
                assert len(behind[behind >= 0]) == min(size, rows) - mask.sum()
    assert select_in_few_sizes(np.ones((1, most), bool), most) is None, "all rows as they are"
    assert select_in_few_sizes(np.arange(40)[None] < 3, 40, smallest=20).shape == (1, 24)


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True])
def test_inactive_agents_are_not_sampled(tiny_pair, shared):
    """The completions of the active agents are those that they write when all agents are sampled."""
    team, params = make_team(tiny_pair[:1] * 2, shared_weights=True) if shared else make_team(tiny_pair)
    encoded = pad(team, tokenize(team, [["you first", "or you"]] * 2, SETTINGS, chat=False))
    request = SampleRequest(encoded, SETTINGS, Randomness(seed=1, step=0), 2, np.arange(2))
    whole = sample_team(team, params, request)[0]
    for agent in range(2):
        done = sample_team(team, params, request._replace(acts=np.arange(2) == agent))[0]
        own, other = (np.reshape(done.action_mask, (2, 2, 2, -1))[n] for n in (agent, 1 - agent))
        assert not other.any() and own.any(-1).all()
        assert shared or np.asarray(done.steps).tolist()[1 - agent] == 0  # and not sampled and then masked
        for name in ("tokens", "action_mask", "ended"):
            both = [np.reshape(getattr(completions, name), (2, 2, 2, -1))[agent] for completions in (done, whole)]
            assert (both[0] == both[1]).all(), name
        logprobs = [np.reshape(completions.logprobs, (2, 2, 2, -1))[agent] for completions in (done, whole)]
        np.testing.assert_allclose(*logprobs, atol=1e-5)
    nobody = sample_team(team, params, request._replace(acts=np.zeros(2, bool)))[0]
    assert not np.asarray(nobody.action_mask).any() and nobody.tokens.shape == whole.tokens.shape


def test_a_joined_request_samples_every_agent_that_acts_in_any_run(tiny_pair):
    team, _ = make_team(tiny_pair)
    encoded = pad(team, tokenize(team, [["you first", "or you"]] * 2, SETTINGS, chat=False))
    request = SampleRequest(encoded, SETTINGS, Randomness(seed=1, step=0), 2, np.arange(2))
    writes = [None if acts is None else np.array(acts) for acts in ([True, False], [False, True], [True, False], None)]
    requests = [request._replace(acts=acts) for acts in writes]
    assert join_requests(requests[:2], None).acts.tolist() == [True, True] and join_requests(requests[2:], None).acts is None
    assert join_requests([requests[0], requests[2]], None).acts.tolist() == [True, False]


def moved(before, after) -> list[bool]:
    """Return for each of two agents whether anything of it changed."""
    pairs = list(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    return [any(bool((x[agent] != np.asarray(y)[agent]).any()) for x, y in pairs) for agent in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("why", ["not asked", "cut off"])
def test_an_agent_without_a_row_is_not_updated(tiny_pair, minibatches, why):
    """Its parameters, its moments (no momentum) and its KL coefficient stay: if it does not act, and if all that it wrote was
    cut off and is masked for that."""
    team, params = make_team(tiny_pair)
    cfg = TrainConfig.of(
        algorithm="dapo", kl_coef=0.1, kl_target=0.01, learning_rate=1e-2, num_generations=2, num_minibatches=minibatches
    )
    state = init_stack(jax.tree.map(np.copy, params[0]), resolve(cfg))
    sample = partial(sample_team, team, params)
    got = play(sample, team, Scaled().tasks(count=2), LockStep(Scaled()), SETTINGS, Episodes(), 2, Randomness(seed=0, step=0))
    batch = to_batches(team, got)[0]
    batch = batch._replace(rewards=np.arange(8, dtype=np.float32).reshape(2, 2, 2), ended=np.ones((2, 2, 2), bool))
    static = dict(model=tiny_pair[0].config, algorithm=resolve(cfg))
    state, *_ = update_stack(state, batch, **static)
    before = jax.device_get((state.params, state.opt_state, state.running.kl_coef))
    second = np.arange(2)[:, None, None] == 1
    alone = (
        batch._replace(rewards=np.where(second, np.float32(np.nan), batch.rewards))
        if why == "not asked"
        else batch._replace(ended=np.broadcast_to(~second, (2, 2, 2)))
    )
    state, *_ = update_stack(state, alone, **static)
    assert moved(before, (state.params, state.opt_state, state.running.kl_coef)) == [True, False]


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["maac", "ippo", "iac"])
def test_critics_learn_from_agents_that_act_in_turns(tiny_pair, algorithm):
    """Also a central critic of type v, whose rows have no token."""
    team, params = make_team(tiny_pair)
    options = dict(num_updates=2, num_generations=2, max_new_tokens=3, num_turns=3, branching="chain", progress=False)
    cfg = TrainConfig.of(algorithm=algorithm, learning_rate=1e-2, **options)
    result = train(team, Relay(), Relay().tasks(count=2), cfg, params=params)
    assert (np.asarray(steps_done(result.state.critics[0])) == 2).all()
