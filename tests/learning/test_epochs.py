"""Several optimiser steps on one batch, and what is left out of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import TrainConfig
from jmarl.learning.optimizer import apply_gradients, init_stack
from jmarl.learning.program import make_program, update_keys
from jmarl.learning.step import gradients, shuffle
from jmarl.models import decoder
from jmarl.models.stack import unstack
from jmarl.objectives.policy import POLICY, PolicyTargets, initial_running, token_loss
from jmarl.objectives.table import objective_of
from jmarl.sampling.scoring import score
from tests.batches import (
    agent_gradients,
    assert_close,
    assert_equal,
    loss_inputs,
    minibatches,
    put,
    rollouts,
    update_stack,
)

pytestmark = pytest.mark.long  # few programs for nearly all of them

A, P, G, T, S = 2, 2, 4, 5, 8
BASE = TrainConfig.of(algorithm="grpo", learning_rate=1e-2, adam_eps=1e-4, max_grad_norm=0.5, loss_aggregation="token_mean")
CUT = dict(num_epochs=2, num_minibatches=2, lr_schedule="linear", num_updates=2, weight_decay=0.1)  # four steps
HELD = CUT | dict(target_kl=1e-4)  # less than a step makes


@pytest.fixture(scope="module")
def model(tiny_config):
    return tiny_config()


@pytest.fixture(scope="module")
def params(model):
    init = jax.jit(jax.vmap(functools.partial(decoder.init_params, model)))
    return jax.device_get(init(jax.random.split(jax.random.key(0), A)))


@pytest.fixture(scope="module")
def batch(model, params):
    """Completions as their own policy rates them, so that the first ratio is 1."""
    rng = np.random.default_rng(0)
    prompts, tokens = (rng.integers(3, 320, shape) for shape in ((A, P, S), (A, P, G, T)))
    lengths, mask = np.full((A, P), S), np.arange(T) < rng.integers(2, T + 1, (A, P, G, 1))
    rate = jax.jit(jax.vmap(functools.partial(score, cfg=model)))
    old = np.asarray(rate(params, prompts=prompts, lengths=lengths, tokens=tokens).logprobs)
    rewards, groups = np.float32(rng.normal(size=(A, P, G))), np.broadcast_to(np.arange(P)[:, None], (A, P, G))
    ended = rng.random((A, P, G)) < 0.7
    ended[:, :, 0] = True
    return jax.device_get(rollouts(prompts, lengths, tokens, mask, np.where(mask, old, 0), ended, rewards, groups))


def started(params, algorithm):
    return init_stack(jax.tree.map(jnp.array, params), algorithm)


def run(params, batch, model, keys=None, active=None, number=0, **changes):
    """The state and the metrics after one update. keys: of the order of minibatches; active: agents that learn."""
    algorithm = resolve(BASE.replace(**changes))
    settings = dict(model=model, algorithm=algorithm, keys=keys, active=active, number=number)
    return jax.device_get(update_stack(started(params, algorithm), batch, **settings))


@pytest.fixture(scope="module")
def cut(params, batch, model):
    """Two passes over two parts: the state and the metrics."""
    return run(params, batch, model, **CUT)


@functools.partial(jax.jit, static_argnums=(2, 3))
def step_by_hand(state, part, model, algorithm):
    grads, metrics = gradients(state.params, None, part, model, POLICY, algorithm)
    return apply_gradients(state, grads, metrics["loss"], algorithm=algorithm)[0]


def by_hand(params, batch, model, order, key=None):
    """Agent 0 after steps of `CUT` in a Python loop: advantages of the whole batch, means over each part.

    order: epoch and part of each step; key: of the order of each epoch."""
    algorithm = resolve(BASE.replace(**CUT))
    state = unstack(jax.device_get(started(params, algorithm)), 0)
    inputs, _ = loss_inputs(unstack(batch, 0), state.running, model, algorithm)
    for epoch, i in order:
        shuffled = inputs if key is None else jax.jit(shuffle)(epoch, key, inputs)
        parts, _ = jax.device_get(minibatches(shuffled, 2, POLICY))
        state = step_by_hand(state, unstack(parts, i), model, algorithm)
    return jax.device_get(state.params)


FOUR = [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_epochs_and_minibatches_are_steps_in_order(params, batch, model, cut):
    """Two passes over two parts: four Adam steps, the third with ratios that are not 1 any more; the schedule, linear to 0 over
    two updates, counts them; vmap and map agree."""
    got, metrics = cut
    assert_close(unstack(got.params, 0), by_hand(params, batch, model, FOUR))
    assert metrics["steps"].tolist() == [4, 4] and got.opt_state[1][0].count.tolist() == [4, 4]
    assert (metrics["clip_share"] > 0).any(), "some ratios were clipped"
    assert (np.abs(metrics["ratio"] - 1) > 1e-4).all()
    np.testing.assert_allclose(metrics["learning_rate"], 1e-2 * (1 - 3 / 8), rtol=1e-6)
    together, _ = run(params, batch, model, per_agent="vmap", **CUT)
    assert_close(together.params, got.params)


def test_micro_batches_of_a_minibatch_are_the_minibatch(params, batch, model, cut):
    assert_close(run(params, batch, model, micro_batches=2, **CUT)[0].params, cut[0].params)


def test_target_kl_holds_an_agent_that_has_moved(params, batch, model):
    """A tiny target lets the first step through, after which the policy has moved. It does not where it is far away already,
    also if a later part is not. An agent that has equal rewards makes all its steps (of size 0) while the other is held."""
    held, metrics = run(params, batch, model, **HELD)
    assert metrics["steps"].tolist() == [1, 1] and metrics["skipped"].tolist() == [0, 0]
    assert_close(unstack(held.params, 0), by_hand(params, batch, model, FOUR[:1]))
    far = put(batch.old_logprobs, np.s_[:, 0], batch.old_logprobs[:, 0] + batch.action_mask[:, 0])
    assert run(params, batch._replace(old_logprobs=far), model, **HELD)[1]["steps"].tolist() == [0, 0]
    equal = batch._replace(rewards=put(batch.rewards, 1, 1.0))
    got, metrics = run(params, equal, model, **HELD | dict(weight_decay=0.0))
    assert metrics["steps"].tolist() == [1, 4]
    assert_equal(unstack(got.params, 1), unstack(params, 1))


def test_the_schedule_follows_the_update_whatever_is_skipped(params, batch, model):
    """The second of two updates goes on at half of the peak, also of an agent that has made no step before, and ends at an
    eighth of it where steps are left out: after `target_kl`, of a part without valid rows, and of an update without any."""
    nothing = batch._replace(rewards=put(batch.rewards, np.s_[0], np.nan))
    half = batch._replace(rewards=put(batch.rewards, np.s_[:, 1], np.nan))
    for data, settings, made in ((batch, HELD, [1, 1]), (half, CUT, [2, 2]), (nothing, CUT, [0, 4])):
        got, metrics = run(params, data, model, number=1, **settings)
        assert metrics["steps"].tolist() == made and got.opt_state[1][-1].count.tolist() == made
        np.testing.assert_allclose(metrics["learning_rate"], 1e-2 / 8, rtol=1e-6)
    first, second = (run(params, batch, model, number=number, **HELD)[0].params for number in (0, 1))  # one step of each
    moved = [unstack(after, 0)["final_norm"] - unstack(params, 0)["final_norm"] for after in (first, second)]
    np.testing.assert_allclose(moved[1], moved[0] / 2, rtol=1e-3, atol=1e-7)


def test_a_wide_target_lets_all_steps_through_and_an_inactive_agent_makes_none(params, batch, model, cut):
    """It stays as it was through all steps, weight decay included."""
    after, metrics = run(params, batch, model, active=np.array([False, True]), target_kl=1e3, **CUT)
    assert metrics["steps"].tolist() == [0, 4]
    assert_equal(unstack(after.params, 0), unstack(params, 0))
    assert_close(unstack(after.params, 1), unstack(cut[0].params, 1))


@functools.partial(jax.jit, static_argnames=("model", "algorithm"))
def gradients_of(params, batch, model, algorithm):
    """The gradients of agent 0."""
    params, batch, running = (unstack(x, 0) for x in (params, batch, initial_running(1, 1, 0.0)))
    return agent_gradients(params, batch, running, model, algorithm)[0]


def test_parts_are_filled_up_where_turns_make_any_number_of_prompts(params, batch, model):
    """Three prompts in two parts: a fourth of weight 0 is added, and both parts have the whole gradient. A part of padding
    alone is no step."""
    three = jax.tree.map(lambda x: np.concatenate([x, x[:, :1]], 1), batch)
    three = jax.tree.map(lambda x: x[:, :, :3] if x.shape[2:3] == (G,) else x, three)
    whole, parts = (gradients_of(params, three, model, resolve(BASE.replace(micro_batches=n))) for n in (1, 2))
    assert_close(parts, whole)
    nothing = batch._replace(rewards=put(batch.rewards, np.s_[:, 1], np.nan))
    assert run(params, nothing, model, **CUT)[1]["steps"].tolist() == [2, 2]


def test_parts_that_do_not_fit_are_named(params, batch, model):
    with pytest.raises(ValueError, match="num_minibatches=3 does not divide 2 prompts of 4 completions"):
        run(params, batch, model, num_minibatches=3)


def test_overlong_completions_are_left_out(params, batch, model):
    """DAPO's row: gradients are those of a batch in which the unfinished completions' tokens are masked; their rewards count in
    the baseline as before."""
    assert not batch.ended[0].all()
    dapo = resolve(BASE.replace(algorithm="dapo"))
    with_cut = resolve(BASE.replace(algorithm="dapo", mask_overlong=False))
    got = gradients_of(params, batch, model, dapo)
    masked = batch._replace(action_mask=batch.action_mask & batch.ended[..., None])
    assert_close(got, gradients_of(params, masked, model, with_cut))
    plain = gradients_of(params, batch, model, with_cut)
    assert max(np.abs(a - b).max() for a, b in zip(*jax.device_get([*map(jax.tree.leaves, (got, plain))]), strict=True)) > 1e-4


# --- whose log-probabilities, and how far they may be off ----------------------------------------------------------------

TO_TARGET = dict(kl_coef=0.5, kl_target=1e-3)


def test_rescored_ratios_are_exactly_one_at_the_first_update(params, batch, model):
    """Old log-probabilities that are off by a noise: from the sampler the ratio is not 1; rescored, it is 1 for each token. The
    mismatch of the sampler is a metric in both cases."""
    mask, noise = batch.action_mask, 0.1 * np.random.default_rng(1).normal(size=batch.old_logprobs.shape)
    off = batch._replace(old_logprobs=np.float32(np.where(mask, batch.old_logprobs + noise, 0)))
    shift = np.sum(np.abs(noise), (1, 2, 3), where=mask) / mask.sum((1, 2, 3))
    for changes, exact in ((dict(old_logprobs="rescored"), True), (TO_TARGET, False)):
        _, metrics = run(params, off, model, **changes)
        assert (np.abs(metrics["ratio"] - 1) < 1e-6).all() == exact
        np.testing.assert_allclose(metrics["mismatch"], shift, rtol=1e-3)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_sampling(params, batch, model, level):
    """Advantages times min(learner / sampler, cap), by numpy; the ratio is then to the rescored policy."""
    mine, rng = unstack(batch, 0), np.random.default_rng(2)
    off = np.float32(np.where(mine.action_mask, mine.old_logprobs + 0.5 * rng.normal(size=mine.tokens.shape), 0))
    sampled = mine._replace(truncated_logprobs=off, old_logprobs=off)
    algorithm = resolve(BASE.replace(importance_cap=1.2, importance_level=level))
    running = unstack(initial_running(1, 1, 0.0), 0)
    make = functools.partial(loss_inputs, running=running, model=model, params=unstack(params, 0))
    inputs, metrics = make(sampled, algorithm=algorithm)
    plain, _ = make(mine, algorithm=resolve(BASE))
    difference = np.where(mine.action_mask, mine.old_logprobs - off, 0)
    if level == "sequence":
        difference = difference.sum(-1, keepdims=True)
    weight = np.minimum(np.exp(difference), 1.2)
    assert (weight == 1.2).any() and (weight < 1).any()
    np.testing.assert_allclose(inputs.targets.advantages, plain.targets.advantages * weight, rtol=1e-4, atol=1e-5)
    rescored = np.where(mine.action_mask, inputs.targets.old_logprobs, 0)
    np.testing.assert_allclose(rescored, mine.old_logprobs, rtol=1e-6, atol=1e-5)
    token_weights = np.broadcast_to(weight, mine.action_mask.shape)[mine.action_mask]
    np.testing.assert_allclose(metrics["importance"], token_weights.mean(), rtol=1e-3)
    np.testing.assert_allclose(metrics["importance_capped"], (token_weights == 1.2).mean(), rtol=1e-3)


def test_the_kl_coefficient_follows_its_target(params, batch, model):
    """Times 1 + 0.1 clip(KL / target - 1, -0.2, 0.2) an update: down by 2 % where the policy is the reference itself, up by
    2 % where it is far away; and it weighs the KL term."""
    algorithm = resolve(BASE.replace(**TO_TARGET, learning_rate=1e-1))
    update = functools.partial(update_stack, batch=batch, model=model, algorithm=algorithm)
    state, metrics = jax.device_get(update(started(params, algorithm)))
    np.testing.assert_allclose(state.running.kl_coef, 0.5 * 0.98, rtol=1e-6)
    np.testing.assert_allclose(metrics["kl_coef"], 0.5)
    losses = []
    for factor in (1, 2):
        changed = state._replace(running=state.running._replace(kl_coef=np.float32(factor) * state.running.kl_coef))
        after, metrics = jax.device_get(update(jax.tree.map(jnp.array, changed)))
        losses.append(metrics["loss"])
        np.testing.assert_allclose(after.running.kl_coef, factor * 0.49 * 1.02, rtol=1e-6)
    np.testing.assert_allclose(losses[1] - losses[0], 0.49 * metrics["kl"], rtol=1e-3)


def test_what_target_kl_measures():
    """KL(old || new) by k3 of the old policy's samples, in closed form."""
    one = np.ones(1, np.float32)
    targets, algorithm = PolicyTargets(one > 0, one, one, -one, -one, one, one), resolve(BASE.replace(**CUT, target_kl=1.0))
    metrics = jax.jit(lambda *arrays: token_loss(*arrays, algorithm)[1])(-0.5 * one, 0 * one, targets)
    assert float(metrics["kl_moved"]) == pytest.approx(np.exp(0.5) - 1.5, rel=1e-5)


def targets_of_parts(batch, model, **changes):
    """The targets of the policy and of the values in two minibatches of agent 0, and the tokens of each."""
    settings = dict(algorithm="ippo", separate_critic=False, num_minibatches=2, loss_aggregation="token_mean")
    algorithm = resolve(BASE.replace(**settings | changes))
    mine = unstack(batch._replace(values=np.zeros(batch.tokens.shape, np.float32)), 0)
    inputs, _ = loss_inputs(mine, unstack(initial_running(1, 1, 0.5), 0), model, algorithm)
    parts, tokens = minibatches(inputs, 2, objective_of(algorithm))
    return *parts.targets, tokens


def test_parts_have_the_weight_of_the_batch(batch, model):
    """Of the policy, its KL term and the values alike."""
    policy, values, _ = targets_of_parts(batch, model, kl_coef=0.5)
    np.testing.assert_allclose(policy.kl_weights, 0.5 * policy.weights, rtol=1e-6)
    for targets in (policy, values):
        np.testing.assert_allclose(np.sum(targets.weights, (1, 2, 3)).mean(0), 1, rtol=1e-5)


def test_a_value_head_learns_from_what_the_policy_leaves_out(batch, model):
    """A part of cut off completions alone: with mask_overlong the policy has nothing to learn there, the values have, so that
    it is a step."""
    cut_off = batch._replace(ended=put(batch.ended, np.s_[:, 0], False))
    policy, values, tokens = targets_of_parts(cut_off, model, mask_overlong=True)
    assert not policy.mask[0].any() and policy.mask[1].any()
    assert np.any(values.mask, (1, 2, 3)).all() and (np.asarray(tokens) > 0).all()


# --- the order of minibatches --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(batch, model):
    """The loss inputs of agent 0."""
    return jax.device_get(loss_inputs(unstack(batch, 0), unstack(initial_running(1, 1, 0.0), 0), model, resolve(BASE))[0])


def test_a_shuffle_keeps_prompts_with_their_completions_and_completions_with_their_targets(inputs):
    shuffled = jax.device_get(jax.jit(shuffle)(1, jax.random.key(3), inputs))

    def rows(inputs):
        """All that belongs to each completion, as bytes."""
        arrays = inputs.tokens, *jax.tree.leaves(inputs.targets)
        return [(inputs.prompts[p].tobytes(), *(x[p, g].tobytes() for x in arrays)) for p, g in np.ndindex(P, G)]

    assert sorted(rows(shuffled)) == sorted(rows(inputs)) and rows(shuffled) != rows(inputs)


def test_each_epoch_and_each_agent_has_an_order_of_its_own_and_a_seed_repeats_it(inputs, model):
    keys = update_keys(0, 5, 0, A)
    of_agents = jax.vmap(jax.vmap(shuffle, (0, None, None)), (None, 0, None))
    orders = np.asarray(jax.jit(of_agents)(np.arange(8), keys, inputs).tokens).reshape(A * 8, -1)
    assert len(np.unique(orders, axis=0)) > 8
    assert (jax.random.key_data(update_keys(0, 5, 0, A)) == jax.random.key_data(keys)).all()
    in_run = functools.partial(make_program, model, ((0,), (1,)), run=BASE.run, number=0, team_size=A, mesh=None)
    program = in_run(resolve(BASE.replace(num_minibatches=2, num_epochs=2)))
    assert (jax.random.key_data(program.keys(5)) == jax.random.key_data(keys)).all()
    assert in_run(resolve(BASE.replace(num_epochs=2))).keys(5) is None  # nothing to shuffle


def test_minibatches_are_drawn_in_another_order_in_each_epoch(params, batch, model, cut):
    """Equal to steps by hand on the shuffled parts of each epoch."""
    keys = update_keys(0, 0, 0, A)
    got = unstack(run(params, batch, model, keys, **CUT)[0].params, 0)
    assert_close(got, by_hand(params, batch, model, FOUR, keys[0]))
    plain = unstack(cut[0].params, 0)
    assert any(not np.allclose(a, b, atol=1e-6) for a, b in zip(*map(jax.tree.leaves, (got, plain)), strict=True))
