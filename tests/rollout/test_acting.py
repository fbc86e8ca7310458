"""Agents that act in turns: idle ones are not sampled, their rows are left out of the update, and they do not change."""

from __future__ import annotations

import json
from functools import partial

import jax
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import Episodes, TrainConfig
from jmarl.envs.mixture import Mixture
from jmarl.envs.vector import LockStep
from jmarl.learning.batches import select_in_few_sizes, take_rows
from jmarl.learning.optimizer import init_stack, steps_done
from jmarl.logs.rollout_log import rollout_metrics
from jmarl.randomness import Randomness
from jmarl.rl import advantages
from jmarl.rollout import make_batches
from jmarl.rollout.make_batches import to_batches
from jmarl.rollout.play import play
from jmarl.runs.kinds.seeds import join_requests
from jmarl.runs.train import train
from jmarl.sampling.generate import SampleRequest, choose_acting, fewer_rows, pad, sample_team, tokenize
from jmarl.team import Team, make_team
from tests.batches import update_stack
from tests.envs.in_turns import Pass, Relay, Scaled, Silent
from tests.house import HOUSE
from tests.matrix import product

SETTINGS = TrainConfig.of(**HOUSE, compute_dtype="float32").sampling  # what runs make of "auto", so their programs
nightly = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def pair(agents):
    return make_team(agents)


def played(pair, env, tasks=({}, {"more": 1}), **episodes):
    """Return a rollout of two tasks, of three completions each."""
    team, params = pair
    sample, randomness = partial(sample_team, team, params), Randomness(seed=0, step=0)
    return play(sample, team, [*tasks], LockStep(env), SETTINGS, Episodes(**episodes), 3, randomness)


def trained(agents, env, **changes):
    return train(Team.of(agents), env, [{"id": 0}, {"id": 1}], TrainConfig.of(**HOUSE | changes))


# --- rollouts and batches ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("branching", ["chain", "tree"])
def test_agents_learn_only_from_turns_in_which_they_act(pair, branching):
    rollout = played(pair, Relay(), num_turns=3, branching=branching)
    first, second, third = rollout.turns
    assert first.acts.tolist() == [[True] * 2, [False] * 2] and third.acts.all()
    assert set(sum(first.texts[1], [])) == {""} and first.prompts == [["you first"] * 2, [""] * 2]
    assert not second.acts[0].any() and second.acts[1].all()
    # Returns include later steps, for agents that act: 3 steps of 1 for agent 0, then 2 of 2 for agent 1, then the last step.
    assert (rollout.returns[0][0] == 3.0).all() and np.isnan(rollout.returns[0][1]).all()
    assert np.isnan(rollout.returns[1][0]).all() and (rollout.returns[1][1] == 4.0).all()
    assert (rollout.returns[2][0] == 1.0).all() and (rollout.returns[2][1] == 2.0).all()
    row = rollout_metrics(pair[0], rollout)
    assert "turn_0/agent_0/length" in row and "turn_0/agent_1/length" not in row
    rows = np.isfinite(np.asarray(to_batches(pair[0], rollout)[0].rewards)).reshape(2, -1).sum(1)
    assert rows.tolist() == ([6 + 6, 6 + 6] if branching == "chain" else [6 + 54, 18 + 54])


@pytest.mark.long
def test_rows_of_inactive_agents_do_not_change_the_update(agents, pair, monkeypatch):
    """With and without the rows of inactive agents the parameters after an update are equal, and so with rows of padding.

    The batch has as many rows as the agent with most of them, or a few more. Agent 0 acts in turns 0 and 2, agent 1 in turns 1
    and 2.
    """
    team, params = pair
    got = played(pair, Relay(), num_turns=3, branching="chain")
    few = to_batches(team, got)[0]
    monkeypatch.setattr(make_batches, "used_rows", lambda team, *_: [None] * len(team.stacks))
    whole = to_batches(team, got)[0]
    assert whole.rewards.shape[1] == 18 and few.rewards.shape[1] == 16
    assert np.isfinite(np.asarray(few.rewards)).sum() == np.isfinite(np.asarray(whole.rewards)).sum() == 24
    first = np.tile(np.arange(12), (2, 1))  # the rows that are used
    more = take_rows(take_rows(few, first), np.pad(first, ((0, 0), (0, 6)), constant_values=-1))
    assert more.tokens.shape == whole.tokens.shape and np.isnan(more.rewards[:, 12:]).all()
    algorithm = resolve(TrainConfig.of(algorithm="mareinforce", learning_rate=1e-2, num_generations=2))
    after = []
    for batch in (few, whole, more):
        stack = init_stack(jax.tree.map(np.copy, params[0]), algorithm)
        after.append(update_stack(stack, batch, model=agents[0].config, algorithm=algorithm)[0].params)
    for x, *remaining in zip(*map(jax.tree.leaves, after), strict=True):
        for y in remaining:
            np.testing.assert_allclose(x, y, atol=1e-5)
    assert np.abs(after[0]["embed"] - params[0]["embed"]).max((1, 2)).min() > 1e-3  # both moved


@pytest.mark.long
def test_advantages_are_centered_per_agent(pair):
    """Advantages have mean zero in every group of every agent, whatever the scale of rewards, and similar sizes when divided by
    the std."""
    rollout = played(pair, Scaled())
    assert (rollout.returns[0][0] <= 1).all() and np.abs(rollout.returns[0][1]).max() > 10
    batch = to_batches(pair[0], rollout)[0]
    for estimator in (advantages.group_mean, advantages.leave_one_out):
        estimate = [jax.jit(jax.vmap(partial(advantages.estimate, estimator, scale=scale))) for scale in ("none", "std")]
        plain, scaled = (np.asarray(program(batch.rewards, batch.groups)) for program in estimate)
        for agent_advantages, size in zip(plain, (1.0, 1000.0), strict=True):
            assert agent_advantages.shape == (2, 3)
            np.testing.assert_allclose(agent_advantages.mean(-1), 0, atol=1e-5 * size)
        assert np.abs(plain[1]).max() > 30 * np.abs(plain[0]).max()
        assert 0.5 < np.abs(scaled[0]).max() / np.abs(scaled[1]).max() < 2


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
def test_inactive_agents_are_not_sampled(agents, pair, shared):
    """The completions of the active agents are those that they write when all agents are sampled."""
    team, params = make_team(agents[:1] * 2, shared_weights=True) if shared else pair
    encoded = pad(team, tokenize(team, [["you first", "or you"]] * 2, SETTINGS, chat=False))
    request = SampleRequest(encoded, SETTINGS, Randomness(seed=1, step=0), 3, np.arange(2))
    whole = sample_team(team, params, request)[0]
    for agent in range(2):
        done = sample_team(team, params, request._replace(acts=np.repeat(np.arange(2)[:, None] == agent, 2, 1)))[0]
        own, other = (np.reshape(done.action_mask, (2, 2, 3, -1))[n] for n in (agent, 1 - agent))
        assert not other.any() and own.any(-1).all()
        assert shared or np.asarray(done.steps).tolist()[1 - agent] == 0  # and not sampled and then masked
        for name in ("tokens", "action_mask", "ended"):
            both = [np.reshape(getattr(completions, name), (2, 2, 3, -1))[agent] for completions in (done, whole)]
            assert (both[0] == both[1]).all(), name
        logprobs = [np.reshape(completions.logprobs, (2, 2, 3, -1))[agent] for completions in (done, whole)]
        np.testing.assert_allclose(*logprobs, atol=1e-5)
    nobody = sample_team(team, params, request._replace(acts=np.zeros((2, 2), bool)))[0]
    assert not np.asarray(nobody.action_mask).any() and nobody.tokens.shape == whole.tokens.shape
    acts = np.eye(2, dtype=bool)  # each at one prompt
    rows = sample_team(team, params, request._replace(acts=acts, fewer=True))[0]
    assert choose_acting(team.stacks[0], acts, fewer=True).rows.shape == ((1, 2) if shared else (2, 1))
    for name in ("tokens", "action_mask", "ended"):
        one, both = (np.reshape(getattr(completions, name), (2, 2, 3, -1)) for completions in (rows, whole))
        assert (one[acts] == both[acts]).all(), name
    assert not np.reshape(rows.action_mask, (2, 2, 3, -1))[~acts].any()
    assert choose_acting(team.stacks[0], acts) is None


def test_rows_that_act_are_sampled_in_few_sizes():
    rng = np.random.default_rng(0)
    for count in range(1, 65):
        active = np.array([rng.permutation(np.arange(64) < n) for n in (count, count // 2, 0)])
        if (rows := fewer_rows(active)) is None:
            assert count > 48
            continue
        assert rows.shape[1] in (16, 32, 48)
        for own, chosen in zip(active, rows, strict=True):
            assert set(chosen[: own.sum()]) == set(np.flatnonzero(own))
            assert own[chosen].all() or not own.any()


def test_a_joined_request_samples_every_agent_that_acts_in_any_run(pair):
    team, _ = pair
    encoded = pad(team, tokenize(team, [["you first", "or you"]] * 2, SETTINGS, chat=False))
    request = SampleRequest(encoded, SETTINGS, Randomness(seed=1, step=0), 3, np.arange(2))
    writes = [
        None if acts is None else np.array(acts) for acts in ([[True], [False]], [[False], [True]], [[True], [False]], None)
    ]
    requests = [request._replace(acts=acts) for acts in writes]
    assert (
        join_requests(requests[:2], None).acts.tolist() == [[True], [True]] and join_requests(requests[2:], None).acts is None
    )
    assert join_requests([requests[0], requests[2]], None).acts.tolist() == [[True], [False]]


# --- training ------------------------------------------------------------------------------------------------------------


def moved(before, after) -> list[bool]:
    """Return for each of two agents whether anything of it changed."""
    pairs = list(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    return [any(bool((x[agent] != np.asarray(y)[agent]).any()) for x, y in pairs) for agent in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("why, minibatches", product(["not asked", "cut off"], [1, 2]))
def test_an_agent_without_a_row_is_not_updated(agents, pair, minibatches, why):
    """Its parameters, its moments (no momentum) and its KL coefficient stay: if it does not act, and if all that it wrote was
    cut off and is masked for that."""
    cfg = TrainConfig.of(
        algorithm="dapo", kl_coef=0.1, kl_target=0.01, learning_rate=1e-2, num_generations=2, num_minibatches=minibatches
    )
    state = init_stack(jax.tree.map(np.copy, pair[1][0]), resolve(cfg))
    batch = to_batches(pair[0], played(pair, Scaled()))[0]
    batch = batch._replace(rewards=np.arange(12, dtype=np.float32).reshape(2, 2, 3), ended=np.ones((2, 2, 3), bool))
    static = dict(model=agents[0].config, algorithm=resolve(cfg))
    state, *_ = update_stack(state, batch, **static)
    before = jax.device_get((state.params, state.opt_state, state.running.kl_coef))
    second = np.arange(2)[:, None, None] == 1
    alone = (
        batch._replace(rewards=np.where(second, np.float32(np.nan), batch.rewards))
        if why == "not asked"
        else batch._replace(ended=np.broadcast_to(~second, (2, 2, 3)))
    )
    state, *_ = update_stack(state, alone, **static)
    assert moved(before, (state.params, state.opt_state, state.running.kl_coef)) == [True, False]


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["magrpo", "maac", "ippo", *map(nightly, ["grpo", "iac", "remax"])])
def test_algorithms_train_agents_that_act_in_turns(agents, algorithm):
    """No update is skipped, although agents are idle in some turns, and critics learn; also a central critic of type v, whose
    rows have no token."""
    result = trained(agents, Relay(), algorithm=algorithm, num_turns=3, branching="chain")
    assert result.rewards == [4.5, 4.5] and result.state.stacks[0].skipped.tolist() == [0, 0]
    assert all((np.asarray(steps_done(critic)) == 2).all() for critic in result.state.critics)
    assert bool(result.state.critics) == (algorithm in ("maac", "ippo", "iac"))


@pytest.mark.long
def test_an_agent_that_never_acts_does_not_change(agents, pair):
    (before,), after = pair[1], trained(agents, Silent()).state.stacks[0].params
    assert moved(jax.device_get(before), after) == [True, False]


@pytest.mark.long
@pytest.mark.parametrize("row, joint", [("c3", "counterfactual"), ("remax", "aligned")])
def test_alternatives_in_which_other_agents_act_are_trained_on(agents, row, joint):
    """Counterfactual credit continues them without messages of agents that do not act there. The greedy episode is a baseline
    also for agents that do not act in it."""
    options = dict(num_updates=1, num_turns=2, branching="chain", joint_mode=joint)
    assert trained(agents, Pass(), algorithm=row, **options).rewards == [1.5]


@pytest.mark.long
def test_a_mixture_of_a_mixture_is_sampled_dynamically(agents, tmp_path):
    """The rounds of one step have parts of different environments."""
    both = Mixture({"games": Mixture({"scaled": Scaled(), "silent": Silent()}), "relay": Relay()}, {"games": 2, "relay": 1})
    options = dict(num_turns=3, branching="chain", dynamic_sampling=2, output_dir=str(tmp_path))
    result = train(Team.of(agents), both, both.tasks("train", 9), TrainConfig.of(**HOUSE | options))
    assert len(result.rewards) == 2 and np.isfinite(result.rewards).all()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(row["dynamic/replaced"] for row in rows)


@pytest.mark.long
def test_options_that_need_all_agents_to_act_are_refused(agents, pair):
    with pytest.raises(ValueError, match="history='append' needs agents that act in every turn"):
        played(pair, Relay(), num_turns=3, history="append")
    with pytest.raises(ValueError, match="not all agents act in the first turn"):
        trained(agents, Silent(), algorithm="madpo_iter")
