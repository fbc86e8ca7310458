"""Agents that do not act: they are not sampled, their rows are not learned from, and they do not change."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jmarl import rollout
from jmarl.config import Episodes, TrainConfig
from jmarl.generate import Ask, encode, sample_team
from jmarl.lockstep import LockStep
from jmarl.rollout import play, to_batches
from jmarl.team import make_team
from jmarl.update import init_stack, update_stack
from tests.test_lockstep import SETTINGS, Relay, Scaled


@pytest.fixture(scope="module")
def tiny_pair(tiny_config, tiny_tokenizer, random_agent):
    cfg = tiny_config(tie_embeddings=False)
    return [random_agent(cfg, tiny_tokenizer, seed) for seed in range(2)]


def test_what_agents_learn_does_not_depend_on_rows_that_are_left_out(tiny_pair, monkeypatch):
    """With and without the rows of agents that do not act: as many as the busier agent has, and the same parameters. Agent 0
    acts in turns 0 and 2, agent 1 in 1 and 2."""
    team, params = make_team(tiny_pair)
    how = Episodes(num_turns=3, branching="chain")
    got = play(team, params, Relay().tasks(count=2), LockStep(Relay()), SETTINGS, how, seed=0, step=0, group=2)
    few = to_batches(team, got)[0]
    monkeypatch.setattr(rollout, "acting_rows", lambda *_: None)
    whole = to_batches(team, got)[0]
    assert whole.rewards.shape[1] == 12 and few.rewards.shape[1] == 8
    assert np.isfinite(np.asarray(few.rewards)).sum() == np.isfinite(np.asarray(whole.rewards)).sum() == 16
    learning = TrainConfig(algorithm="mareinforce", learning_rate=1e-2, num_generations=2).learning()
    after = []
    for batch in (few, whole):
        stack = init_stack(jax.tree.map(np.copy, params[0]), learning)
        after.append(update_stack(stack, batch, cfg=tiny_pair[0].config, learning=learning)[0].params)
    for x, y in zip(*map(jax.tree.leaves, after), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert np.abs(after[0]["embed"] - params[0]["embed"]).max((1, 2)).min() > 1e-3  # both moved


@pytest.mark.parametrize("shared", [False, True])
def test_agents_that_do_not_act_are_not_sampled(tiny_pair, shared):
    """The others write what they write when all are sampled."""
    team, params = make_team(tiny_pair[:1] * 2, shared_weights=True) if shared else make_team(tiny_pair)
    encoded = encode(team, [["you first", "or you"]] * 2, SETTINGS, chat=False)
    ask = Ask(encoded, SETTINGS, seed=1, step=0, group=2, prompt_ids=np.arange(2))
    whole = sample_team(team, params, ask)[0]
    for agent in range(2):
        done = sample_team(team, params, ask._replace(acts=np.arange(2) == agent))[0]
        own, other = (np.reshape(done.action_mask, (2, 2, 2, -1))[n] for n in (agent, 1 - agent))
        assert not other.any() and own.any(-1).all()
        for name in ("tokens", "action_mask", "ended"):
            both = [np.reshape(getattr(of, name), (2, 2, 2, -1))[agent] for of in (done, whole)]
            assert (both[0] == both[1]).all(), name
        logprobs = [np.reshape(of.logprobs, (2, 2, 2, -1))[agent] for of in (done, whole)]
        np.testing.assert_allclose(*logprobs, atol=1e-5)
    nobody = sample_team(team, params, ask._replace(acts=np.zeros(2, bool)))[0]
    assert not np.asarray(nobody.action_mask).any() and nobody.tokens.shape == whole.tokens.shape


@pytest.mark.parametrize("minibatches", [1, 2])
def test_an_agent_that_was_not_asked_is_not_carried_on_by_its_momentum(tiny_pair, minibatches):
    """Neither its parameters nor its moments move in an update without a token of its own."""
    team, params = make_team(tiny_pair)
    learning = TrainConfig(learning_rate=1e-2, num_generations=2, num_minibatches=minibatches).learning()
    state = init_stack(jax.tree.map(np.copy, params[0]), learning)
    items = Scaled().tasks(count=2)
    got = play(team, params, items, LockStep(Scaled()), SETTINGS, Episodes(), seed=0, step=0, group=2)
    how = dict(cfg=tiny_pair[0].config, learning=learning)
    batch = to_batches(team, got)[0]
    state, _ = update_stack(state, batch, **how)
    before = jax.device_get((state.params, state.opt_state))
    alone = np.where(np.arange(2)[:, None, None] == 1, np.nan, np.arange(8.0).reshape(2, 2, 2))
    state, _ = update_stack(state, batch._replace(rewards=np.float32(alone)), **how)
    pairs = list(zip(jax.tree.leaves(before), jax.tree.leaves((state.params, state.opt_state)), strict=True))
    moved = [[bool((x[agent] != np.asarray(y)[agent]).any()) for x, y in pairs] for agent in range(2)]
    assert any(moved[0]) and not any(moved[1])
