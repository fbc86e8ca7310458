"""Several optimiser steps on one batch, and what is left out of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import TrainConfig
from jmarl.learning.optimizer import apply_gradients, init_stack, schedule
from jmarl.learning.program import make_program, update_keys
from jmarl.learning.step import gradients, minibatches, shuffle
from jmarl.models import decoder
from jmarl.models.heads import with_value_head
from jmarl.objectives.policy import PolicyTargets, initial_running, token_loss
from jmarl.sampling.scoring import score
from tests.batches import agent_gradients, loss_inputs, rollouts, update_of, update_stack

A, P, G, T, S = 2, 2, 4, 5, 8
BASE = TrainConfig.of(algorithm="grpo", learning_rate=1e-2, adam_eps=1e-4, max_grad_norm=0.5, loss_aggregation="token_mean")


@pytest.fixture(scope="module")
def model(tiny_config):
    return tiny_config()


@pytest.fixture(scope="module")
def params(model):
    return jax.vmap(functools.partial(decoder.init_params, model))(jax.random.split(jax.random.key(0), A))


@pytest.fixture(scope="module")
def batch(model, params):
    """Completions as their own policy rates them, so that the first ratio is 1."""
    rng = np.random.default_rng(0)
    prompts, tokens = (jnp.asarray(rng.integers(3, 320, shape)) for shape in ((A, P, S), (A, P, G, T)))
    lengths, mask = jnp.full((A, P), S), jnp.asarray(np.arange(T) < rng.integers(2, T + 1, (A, P, G, 1)))
    old = jax.vmap(functools.partial(score, cfg=model))(params, prompts=prompts, lengths=lengths, tokens=tokens).logprobs
    rewards = jnp.asarray(rng.normal(size=(A, P, G)), jnp.float32)
    groups = jnp.broadcast_to(jnp.arange(P)[:, None], (A, P, G))
    ended = jnp.asarray(rng.random((A, P, G)) < 0.7).at[:, :, 0].set(True)
    return rollouts(prompts, lengths, tokens, mask, jnp.where(mask, old, 0), ended, rewards, groups)


def run(params, batch, model, keys=None, **changes):
    """Return the state and the metrics after one update. keys: of the order of minibatches."""
    algorithm = resolve(BASE.replace(**changes))
    state = init_stack(jax.tree.map(jnp.copy, params), algorithm)
    return jax.device_get(update_stack(state, batch, model=model, algorithm=algorithm, keys=keys))


def by_hand(params, batch, model, order, n):
    """The same steps of agent 0 in a Python loop: advantages of the whole batch, means over each part."""
    algorithm, update = resolve(BASE), update_of(model, resolve(BASE.replace(num_minibatches=n)))
    one = functools.partial(jax.tree.map, lambda x: x[0])
    state = one(init_stack(jax.tree.map(jnp.copy, params), algorithm))
    inputs, _ = loss_inputs(one(batch), state.running, model, algorithm)
    parts, _ = minibatches(update, inputs)
    grad = jax.jit(functools.partial(gradients, update))
    for i in order:
        grads, metrics = grad(state.params, jax.tree.map(lambda x, i=i: x[i], parts), None)
        state, _ = apply_gradients(state, grads, metrics["loss"], algorithm=algorithm)
    return jax.device_get(state.params)


def assert_close(got, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, expected)


@pytest.mark.long
def test_epochs_and_minibatches_are_steps_in_order(params, batch, model):
    """Two passes over two parts: four Adam steps, the third with ratios that are not 1 any more; vmap and map agree."""
    got, metrics = run(params, batch, model, num_epochs=2, num_minibatches=2)
    assert_close(jax.tree.map(lambda x: x[0], got.params), by_hand(params, batch, model, [0, 1, 0, 1], 2))
    assert metrics["steps"].tolist() == [4, 4] and got.opt_state[1][0].count.tolist() == [4, 4]
    assert (metrics["clip_share"] > 0).any(), "some ratios were clipped"
    assert (np.abs(metrics["ratio"] - 1) > 1e-4).all()
    together, _ = run(params, batch, model, per_agent="vmap", num_epochs=2, num_minibatches=2)
    assert_close(together.params, got.params)


@pytest.mark.long
def test_micro_batches_of_a_minibatch_are_the_minibatch(params, batch, model):
    whole, _ = run(params, batch, model, num_minibatches=2)
    parts, _ = run(params, batch, model, num_minibatches=2, micro_batches=2)
    assert_close(parts.params, whole.params)


@pytest.mark.long
def test_target_kl_holds_an_agent_that_has_moved(params, batch, model):
    """A tiny target lets the first step through, after which the policy has moved; a wide one lets all of them."""
    held, metrics = run(params, batch, model, num_epochs=3, target_kl=1e-9)
    assert metrics["steps"].tolist() == [1, 1] and metrics["skipped"].tolist() == [0, 0]
    assert_close(held.params, run(params, batch, model)[0].params)
    free, metrics = run(params, batch, model, num_epochs=3, target_kl=1e3)
    assert metrics["steps"].tolist() == [3, 3]
    assert_close(free.params, run(params, batch, model, num_epochs=3)[0].params)


@pytest.mark.long
def test_an_agent_is_held_alone(params, batch, model):
    """Agent 1 has equal rewards and does not move: it makes all its steps (of size 0) while agent 0 is held."""
    equal = batch._replace(rewards=batch.rewards.at[1].set(1.0))
    got, metrics = run(params, equal, model, num_epochs=3, target_kl=1e-9)
    assert metrics["steps"].tolist() == [1, 3]
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[1], old[1]), got.params, jax.device_get(params))


def test_a_schedule_counts_optimiser_steps(params, batch, model):
    """Linear to 0 over 2 updates of 4 steps: after one update half of it is left."""
    _, metrics = run(params, batch, model, num_epochs=2, num_minibatches=2, lr_schedule="linear", num_updates=2)
    np.testing.assert_allclose(metrics["learning_rate"], 1e-2 * (1 - 3 / 8), rtol=1e-6)


@pytest.mark.long
def test_parts_are_filled_up_where_turns_make_any_number_of_prompts(params, batch, model):
    """Three prompts in two parts: a fourth of weight 0 is added, and an update of both parts has the whole gradient. A part of
    padding alone is no step."""
    three = jax.tree.map(lambda x: jnp.concatenate([x, x[:, :1]], 1), batch)
    per_prompt = three.prompts, three.prompt_lengths
    three = type(three)(*per_prompt, *(x[:, :, :3] for x in three[len(per_prompt) :]))
    whole, _ = run(params, three, model)
    parts, _ = run(params, three, model, micro_batches=2)
    assert_close(parts.params, whole.params)
    nothing = three._replace(rewards=three.rewards.at[:, 1].set(jnp.nan))
    _, metrics = run(params, nothing, model, num_minibatches=3)
    assert metrics["steps"].tolist() == [2, 2]


def test_parts_that_do_not_fit_are_named(params, batch, model):
    with pytest.raises(ValueError, match="num_minibatches=3 does not divide 2 prompts of 4 completions"):
        run(params, batch, model, num_minibatches=3)


def test_overlong_completions_are_left_out(params, batch, model):
    """DAPO's row: gradients are those of a batch in which the unfinished completions' tokens are masked; their rewards count in
    the baseline as before."""
    dapo = BASE.replace(algorithm="dapo")
    one = functools.partial(jax.tree.map, lambda x: x[0])
    assert not batch.ended[0].all()
    running = one(initial_running(1, 1, 0.0))

    @functools.partial(jax.jit, static_argnames="algorithm")
    def gradients_of(params, batch, algorithm):
        return agent_gradients(params, batch, running, model, algorithm)[0]

    with_cut = resolve(dapo.replace(mask_overlong=False))
    got = gradients_of(one(params), one(batch), algorithm=resolve(dapo))
    masked = batch._replace(action_mask=batch.action_mask & batch.ended[..., None])
    expected = gradients_of(one(params), one(masked), algorithm=with_cut)
    assert_close(got, expected)
    plain = gradients_of(one(params), one(batch), algorithm=with_cut)
    assert max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True)) > 1e-4


# --- whose log-probabilities, and how far they may be off ----------------------------------------------------------------


@pytest.mark.long
def test_rescored_ratios_are_exactly_one_at_the_first_update(params, batch, model):
    """Old log-probabilities that are off by a noise: from the sampler the ratio is not 1; rescored, it is 1 for each token."""
    noise = 0.1 * jax.random.normal(jax.random.key(1), batch.old_logprobs.shape)
    off = batch._replace(old_logprobs=jnp.where(batch.action_mask, batch.old_logprobs + noise, 0))
    for changes, exact in ((dict(old_logprobs="rescored"), True), ({}, False)):
        _, metrics = run(params, off, model, **changes)
        assert (np.abs(metrics["ratio"] - 1) < 1e-6).all() == exact
        shift = np.sum(np.abs(noise), -1, where=np.asarray(batch.action_mask)).sum((1, 2)) / batch.action_mask.sum((1, 2, 3))
        (
            np.testing.assert_allclose(metrics["mismatch"], shift, rtol=1e-3),
            "the mismatch of the sampler is a metric in both cases",
        )


@pytest.mark.long
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_sampling(params, batch, model, level):
    """Advantages times min(learner / sampler, cap), by numpy; the ratio is then to the rescored policy, which is exactly 1."""
    off = 0.5 * jax.random.normal(jax.random.key(2), batch.old_logprobs.shape)
    sampled = batch._replace(truncated_logprobs=jnp.where(batch.action_mask, batch.old_logprobs + off, 0))
    algorithm = resolve(BASE.replace(importance_cap=1.2, importance_level=level))
    one = functools.partial(jax.tree.map, lambda x: x[0])
    running = one(initial_running(1, 1, 0.0))
    make = functools.partial(loss_inputs, running=running, model=model, params=one(params))
    inputs, _ = make(one(sampled), algorithm=algorithm)
    plain, _ = make(one(batch), algorithm=resolve(BASE))
    difference = np.where(batch.action_mask[0], batch.old_logprobs[0] - sampled.truncated_logprobs[0], 0)
    if level == "sequence":
        difference = difference.sum(-1, keepdims=True)
    weight = np.minimum(np.exp(difference), 1.2)
    assert (weight == 1.2).any() and (weight < 1).any()
    np.testing.assert_allclose(inputs.targets.advantages, plain.targets.advantages * weight, rtol=1e-4, atol=1e-5)
    _, metrics = run(params, sampled, model, importance_cap=1.2, importance_level=level)
    assert (np.abs(metrics["ratio"] - 1) < 1e-6).all()
    mask = np.asarray(batch.action_mask[0])
    token_weights = np.broadcast_to(weight, mask.shape)[mask]
    np.testing.assert_allclose(metrics["importance"][0], token_weights.mean(), rtol=1e-3)
    np.testing.assert_allclose(metrics["importance_capped"][0], (token_weights == 1.2).mean(), rtol=1e-3)


def test_the_kl_coefficient_follows_its_target(params, batch, model):
    """Times 1 + 0.1 clip(KL / target - 1, -0.2, 0.2) an update: down by 2 % where the policy is the reference itself, up by
    2 % where it is far away; and it weighs the KL term."""
    algorithm = resolve(BASE.replace(kl_coef=0.5, kl_target=1e-3, learning_rate=1e-1))
    state = init_stack(jax.tree.map(jnp.copy, params), algorithm)
    state, metrics = update_stack(state, batch, model=model, algorithm=algorithm)
    np.testing.assert_allclose(state.running.kl_coef, 0.5 * 0.98, rtol=1e-6)
    np.testing.assert_allclose(metrics["kl_coef"], 0.5)
    losses = []
    for factor in (1.0, 2.0):
        changed = state._replace(running=state.running._replace(kl_coef=factor * state.running.kl_coef))
        after, metrics = update_stack(jax.tree.map(jnp.copy, changed), batch, model=model, algorithm=algorithm)
        losses.append(jax.device_get(metrics["loss"]))
        np.testing.assert_allclose(after.running.kl_coef, factor * 0.49 * 1.02, rtol=1e-6)
    np.testing.assert_allclose(losses[1] - losses[0], 0.49 * metrics["kl"], rtol=1e-3)


def test_what_target_kl_measures():
    """KL(old || new) by k3 of the old policy's samples, in closed form."""
    one = jnp.ones(1)
    targets = PolicyTargets(one > 0, one, one, -one, -one, one, one)
    metrics = token_loss(-0.5 * one, 0 * one, targets, resolve(BASE.replace(num_epochs=2, target_kl=1.0)))[1]
    assert float(metrics["kl_moved"]) == pytest.approx(np.exp(0.5) - 1.5, rel=1e-5)


@pytest.mark.long
def test_an_agent_that_has_moved_too_far_makes_no_later_step(params, batch, model):
    """Also where a later part has not moved; and one that is held stays so through all steps, weight decay included."""
    old = batch.old_logprobs.at[:, 0].add(jnp.where(batch.action_mask[:, 0], 1.0, 0.0))
    _, metrics = run(params, batch._replace(old_logprobs=old), model, num_minibatches=2, target_kl=0.1)
    assert metrics["steps"].tolist() == [0, 0]
    algorithm = resolve(BASE.replace(num_epochs=2, target_kl=1e3, weight_decay=0.1))
    state = init_stack(jax.tree.map(jnp.copy, params), algorithm)
    active = np.array([False, True])
    after, metrics = update_stack(state, batch, model=model, algorithm=algorithm, active=active)
    assert metrics["steps"].tolist() == [0, 2]
    jax.tree.map(lambda new, was: np.testing.assert_array_equal(new[0], was[0]), after.params, params)


def test_parts_have_the_weight_of_the_batch(batch, model):
    """Of the policy, its KL term and the values alike."""
    settings = dict(algorithm="ippo", separate_critic=False, kl_coef=0.5, loss_aggregation="token_mean", num_minibatches=2)
    algorithm = resolve(TrainConfig.of(**settings))
    mine = jax.tree.map(lambda x: x[0], batch._replace(values=jnp.zeros(batch.tokens.shape)))
    running = jax.tree.map(lambda x: x[0], initial_running(1, 1, 0.5))
    inputs, _ = loss_inputs(mine, running, model, algorithm)
    policy, values = minibatches(update_of(model, algorithm), inputs)[0].targets
    np.testing.assert_allclose(policy.kl_weights, 0.5 * policy.weights, rtol=1e-6)
    for targets in (policy, values):
        np.testing.assert_allclose(targets.weights.sum((1, 2, 3)).mean(0), 1, rtol=1e-5)


def test_a_value_head_learns_from_what_the_policy_leaves_out(params, batch, model):
    """A part of cut off completions alone: with mask_overlong the policy has nothing to learn there, the values have."""
    cfg = BASE.replace(
        algorithm="ippo", separate_critic=False, mask_overlong=True, num_minibatches=2, loss_aggregation=None
    )  # fmt: skip
    algorithm = resolve(cfg)
    cut = batch._replace(ended=batch.ended.at[:, 0].set(False), values=jnp.zeros(batch.tokens.shape))
    state = init_stack(with_value_head(jax.tree.map(jnp.copy, params)), algorithm)
    _, metrics = update_stack(state, cut, model=model, algorithm=algorithm)
    assert metrics["steps"].tolist() == [2, 2]


def test_warm_up_counts_all_steps_of_an_update():
    cfg = TrainConfig.of(learning_rate=1.0, warmup_updates=2, num_updates=9, num_epochs=2, num_minibatches=2)
    rate = schedule(resolve(cfg))
    np.testing.assert_allclose([rate(k) for k in range(9)], [*np.arange(1, 9) / 8, 1], rtol=1e-6)


# --- the order of minibatches --------------------------------------------------------------------------------------------


def inputs_of(params, batch, model):
    """Return the loss inputs of agent 0."""
    one = functools.partial(jax.tree.map, lambda x: x[0])
    running = one(init_stack(jax.tree.map(jnp.copy, params), resolve(BASE))).running
    return loss_inputs(one(batch), running, model, resolve(BASE))[0]


def test_a_shuffle_keeps_prompts_with_their_completions_and_completions_with_their_targets(params, batch, model):
    inputs = inputs_of(params, batch, model)
    shuffled = shuffle(jnp.int32(1), jax.random.key(3), inputs)

    def rows(inputs):
        """Return all that belongs to each completion, as bytes."""
        arrays = jax.device_get((inputs.tokens, *jax.tree.leaves(inputs.targets)))
        prompts = np.asarray(inputs.prompts)
        return [
            (prompts[p].tobytes(), *(x[p, g].tobytes() for x in arrays))
            for p in range(P)
            for g in range(inputs.tokens.shape[1])
        ]

    assert sorted(rows(shuffled)) == sorted(rows(inputs)) and rows(shuffled) != rows(inputs)


def test_each_epoch_and_each_agent_has_an_order_of_its_own_and_a_seed_repeats_it(params, batch, model):
    keys = update_keys(0, 5, 0, A)
    inputs = inputs_of(params, batch, model)
    orders = [shuffle(jnp.int32(epoch), keys[agent], inputs).tokens.tolist() for agent in range(A) for epoch in range(8)]
    assert len({str(order) for order in orders}) > 8
    assert (jax.random.key_data(update_keys(0, 5, 0, A)) == jax.random.key_data(keys)).all()
    in_run = functools.partial(make_program, model, ((0,), (1,)), run=BASE.run, number=0, team_size=A, mesh=None)
    program = in_run(resolve(BASE.replace(num_minibatches=2, num_epochs=2)))
    assert (jax.random.key_data(program.keys(5)) == jax.random.key_data(keys)).all()
    assert in_run(resolve(BASE.replace(num_epochs=2))).keys(5) is None  # nothing to shuffle


@pytest.mark.long
def test_minibatches_are_drawn_in_another_order_in_each_epoch(params, batch, model):
    """Equal to steps by hand on the shuffled parts of each epoch."""
    changes = dict(num_epochs=2, num_minibatches=2)
    keys, update = update_keys(0, 0, 0, A), update_of(model, resolve(BASE.replace(**changes)))
    one = functools.partial(jax.tree.map, lambda x: x[0])
    algorithm = resolve(BASE)
    state = one(init_stack(jax.tree.map(jnp.copy, params), algorithm))
    inputs = inputs_of(params, batch, model)
    for epoch in range(2):
        shuffled = shuffle(jnp.int32(epoch), keys[0], inputs)
        parts, _ = minibatches(update, shuffled)
        for i in range(2):
            part = jax.tree.map(lambda x, i=i: x[i], parts)
            grads, metrics = jax.jit(functools.partial(gradients, update))(state.params, part, None)
            state, _ = apply_gradients(state, grads, metrics["loss"], algorithm=algorithm)
    got = run(params, batch, model, keys, **changes)[0]
    assert_close(one(got.params), jax.device_get(state.params))
    plain = run(params, batch, model, **changes)[0]
    assert any(not np.allclose(a, b, atol=1e-6) for a, b in zip(*map(jax.tree.leaves, (got.params, plain.params)), strict=True))
