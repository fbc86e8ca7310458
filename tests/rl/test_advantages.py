"""Advantage estimators against the closed forms of spec section 2."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.config import CHOICES
from jmarl.learning.probes import remember
from jmarl.rl import masked
from jmarl.rl.advantages import ESTIMATORS, at_the_end, estimate, gae, nothing_remembered, running_std

SCALES = tuple(how for how in CHOICES["advantage_scale"][1:] if how != "running_std")  # that has tests of its own

R = jnp.array([[1.0, 2.0, 4.0, 9.0]])  # one prompt, a group of four; mean 4, best 9
STD = np.sqrt(9.5)  # population: ((-3)² + (-2)² + 0² + 5²) / 4
CLOSED = {
    "raw": [1, 2, 4, 9],
    "group_mean": [-3, -2, 0, 5],
    "leave_one_out": [-4, -8 / 3, 0, 20 / 3],
    "max_baseline": [-8, -7, -5, 0],
}


def test_every_estimator_has_a_closed_form():
    given = {"greedy_baseline", "ema_baseline", "value_baseline"}  # R - b, with a test of its own
    assert set(CLOSED) == set(ESTIMATORS) - given


@pytest.mark.parametrize("name", CLOSED)
def test_closed_form(name):
    np.testing.assert_allclose(estimate(name, "none", R)[0], CLOSED[name], atol=1e-5)


@pytest.mark.parametrize("how", SCALES)
def test_the_estimators_stay_different_under_every_scale(how):
    """A scale that subtracted the mean again would make them equal, as in CoMLRL: [-0.97, -0.65, 0, 1.62] four times."""
    rows = [np.asarray(estimate(name, how, R)[0]) for name in CLOSED]
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            assert np.abs(a - b).max() > 0.3


@pytest.mark.parametrize("name", CLOSED)
def test_scaling_only_divides(name):
    """By the population std of the returns: the group's, or the batch's over prompts and group."""
    np.testing.assert_allclose(estimate(name, "std", R)[0], np.array(CLOSED[name]) / STD, rtol=1e-5, atol=1e-6)
    returns = jnp.array([[1.0, 2.0, 4.0, 9.0], [0.0, 0.0, 10.0, 6.0]])
    plain = estimate(name, "none", returns)
    np.testing.assert_allclose(estimate(name, "batch_std", returns), plain / np.std(returns), rtol=1e-5, atol=1e-6)
    each = np.std(returns, axis=-1, keepdims=True)
    np.testing.assert_allclose(estimate(name, "std", returns), plain / each, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", SCALES)
@pytest.mark.parametrize("name", sorted(set(CLOSED) - {"raw"}))
def test_equal_rewards_and_groups_of_one_give_exactly_zero(name, how):
    """Exactly: Adam would turn a rounding error of 1e-9 into a step of full size. 0.1 and others have rounded means."""
    for value in (0.0, 1.0, 0.1, -1 / 3, 1000.1, 1e6 + 0.3, 1e-8, 1e18):
        for group in (1, 2, 3, 7, 8):
            advantages = estimate(name, how, jnp.full((2, group), value))
            assert (np.asarray(advantages) == 0).all(), (value, group)


@pytest.mark.parametrize("how", ["std", "batch_std"])
def test_equal_rewards_scaled_are_zero_for_raw_returns_too(how):
    assert (np.asarray(estimate("raw", how, jnp.full((2, 7), 1000.1))) == 0).all()


@pytest.mark.parametrize("how", SCALES)
@pytest.mark.parametrize("name", CLOSED)
def test_an_invalid_reward_counts_nowhere(name, how):
    """NaN: its advantage is 0 and the others are those of the group without it; a group of nothing else is 0."""
    with_nan = jnp.array([[1.0, jnp.nan, 2.0, 4.0, 9.0], [jnp.nan] * 5])
    got = np.asarray(estimate(name, how, with_nan))
    np.testing.assert_allclose(got[0, [0, 2, 3, 4]], estimate(name, how, R)[0], rtol=1e-5, atol=1e-6)
    assert got[0, 1] == 0 and (got[1] == 0).all()


def test_one_valid_reward_left_is_a_group_of_one():
    for name in sorted(set(CLOSED) - {"raw"}):
        for how in SCALES:
            got = estimate(name, how, jnp.array([[jnp.nan, 5.3, jnp.nan]]))
            assert (np.asarray(got) == 0).all()


def test_huge_rewards_stay_finite():
    """1e18 is the largest reward that is not masked."""
    returns = jnp.array([[1e18, -1e18, 0.0, 1e18]])
    for name in CLOSED:
        for how in SCALES:
            assert np.isfinite(estimate(name, how, returns)).all()


def test_leave_one_out_is_the_mean_of_the_others():
    returns = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    others = np.stack([np.delete(returns, g, 1).mean(1) for g in range(6)], 1)
    np.testing.assert_allclose(estimate("leave_one_out", "none", jnp.asarray(returns)), returns - others, atol=1e-6)


def test_agents_are_independent():
    """An agent axis in front (by vmap) changes nothing."""
    returns = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 4)), jnp.float32)
    for name in CLOSED:
        for how in SCALES:
            one_by_one = jnp.stack([estimate(name, how, r) for r in returns])
            together = jax.vmap(functools.partial(estimate, name, how))(returns)
            np.testing.assert_allclose(together, one_by_one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("how", ["none", "std"])
@pytest.mark.parametrize("name", CLOSED)
def test_a_group_is_the_rows_with_one_number(name, how):
    """Rows scattered over prompts, with an invalid one among them, get what they get side by side as one prompt's group."""
    rng = np.random.default_rng(2)
    groups = rng.permutation(np.repeat([0, 3, 7], 4)).reshape(6, 2)
    returns = rng.normal(size=(6, 2)).astype(np.float32)
    returns[2, 1] = np.nan
    got = np.asarray(estimate(name, how, jnp.asarray(returns), jnp.asarray(groups)))
    for number in (0, 3, 7):
        alone = estimate(name, how, jnp.asarray(returns[groups == number])[None])[0]
        np.testing.assert_allclose(got[groups == number], alone, rtol=1e-5, atol=1e-6)
    assert got[2, 1] == 0


# --- baselines from elsewhere --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["greedy_baseline", "ema_baseline", "value_baseline"])
def test_a_given_baseline_is_subtracted(name):
    """R - b; an expectation that is NaN (a greedy episode without a valid reward) gives no advantage. batch_std is the std of
    what is left, of each role."""
    returns, expected = jnp.array([[1.0, 2.0], [4.0, 9.0]]), jnp.array([[0.5, 0.5], [3.0, jnp.nan]])
    got = estimate(name, "none", returns, expected=expected)
    np.testing.assert_allclose(got, [[0.5, 1.5], [1.0, 0.0]])
    roles = jnp.array([[0, 0], [1, 1]])
    scaled = estimate(name, "batch_std", returns, expected=jnp.array([[0.5, 0.5], [3.0, 3.0]]), roles=roles)
    np.testing.assert_allclose(scaled, [[0.5 / 0.5, 1.5 / 0.5], [1 / 2.5, 6 / 2.5]], rtol=1e-6)


def test_batch_std_does_not_pool_roles():
    """Two roles of shared weights, one with returns a hundred times as large: each is divided by its own std."""
    small = np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32)
    returns, roles = jnp.asarray(np.concatenate([small, 100 * small])), jnp.array([[0] * 4, [1] * 4])
    got = np.asarray(estimate("group_mean", "batch_std", returns, roles=roles))
    np.testing.assert_allclose(got[0], got[1], rtol=1e-4)


def test_what_is_remembered():
    """Moments of all valid returns so far equal numpy's; the moving average of a role moves where it played."""
    rng, running, seen, baseline = np.random.default_rng(0), one(nothing_remembered(1, 2, 0.0)), [], np.zeros(2)
    for step in range(5):
        returns = (rng.normal(size=(2, 3)) * 10 + step).astype(np.float32)
        returns[1, 0] = np.nan
        roles = np.array([[0] * 3, [step % 2] * 3])
        running = remember(running, jnp.asarray(returns), jnp.asarray(roles), 0.9)
        seen += returns[np.isfinite(returns)].tolist()
        for role in set(roles.ravel().tolist()):
            baseline[role] = 0.9 * baseline[role] + 0.1 * np.nanmean(returns[roles == role])
    assert running.count == len(seen) == 25
    np.testing.assert_allclose([running.mean, running_std(running)], [np.mean(seen), np.std(seen)], rtol=1e-5)
    np.testing.assert_allclose(running.baseline, baseline, rtol=1e-5)
    scaled = estimate("group_mean", "running_std", R, running_std=running_std(running))
    np.testing.assert_allclose(scaled[0], np.array(CLOSED["group_mean"]) / np.std(seen), rtol=1e-5)
    assert (np.asarray(estimate("group_mean", "running_std", R, running_std=jnp.float32(0))) == 0).all()


def one(tree):
    return jax.tree.map(lambda x: x[0], tree)


# --- generalised advantages ----------------------------------------------------------------------------------------------


def test_gae_of_the_spec():
    """r = [1, 2, 4], V = [.5, .25, -1], gamma .9: with lambda 0 A = [.725, .85, 5]; with 1 the return minus the value."""
    r, v, all_three = jnp.array([1.0, 2.0, 4.0]), jnp.array([0.5, 0.25, -1.0]), jnp.ones(3, bool)
    np.testing.assert_allclose(gae(r, v, all_three, 0.9, 0.0), [0.725, 0.85, 5.0], rtol=1e-6)
    returns = [1 + 0.9 * (2 + 0.9 * 4), 2 + 0.9 * 4, 4]
    np.testing.assert_allclose(gae(r, v, all_three, 0.9, 1.0), np.array(returns) - np.asarray(v), rtol=1e-6)


def test_truncation_bootstraps_and_termination_does_not():
    """Behind the last token stands the value of what comes next, or nothing: gamma V more in the last delta."""
    r, v, all_three = jnp.array([[1.0, 2.0, 4.0]] * 2), jnp.array([[0.5, 0.25, -1.0]] * 2), jnp.ones((2, 3), bool)
    ended, cut = gae(r, v, all_three, 0.9, 0.5, after=jnp.array([0.0, 2.0]))
    np.testing.assert_allclose(cut - ended, [0.45**2 * 1.8, 0.45 * 1.8, 1.8], rtol=1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_passes_over_what_is_masked(lam):
    """Rows of random masks: as if the masked tokens were not there; by the sum of (gamma lambda)^k delta in numpy."""
    rng = np.random.default_rng(0)
    r, v = rng.normal(size=(2, 4, 7)).astype(np.float32)
    mask = rng.random((4, 7)) < 0.6
    got = np.asarray(gae(jnp.asarray(r), jnp.asarray(v), jnp.asarray(mask), 0.9, lam))
    for i in range(4):
        rewards, values = r[i][mask[i]], [*v[i][mask[i]], 0.0]
        delta = [rewards[t] + 0.9 * values[t + 1] - values[t] for t in range(len(rewards))]
        expected = [sum((0.9 * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]
        np.testing.assert_allclose(got[i][mask[i]], expected, rtol=1e-4, atol=1e-5)
        assert (got[i][~mask[i]] == 0).all()


def test_a_return_comes_with_the_last_token():
    mask = jnp.array([[True, True, False], [False, True, False], [False, False, False]])
    np.testing.assert_allclose(at_the_end(jnp.array([2.0, 3.0, 4.0]), mask), [[0, 2, 0], [0, 3, 0], [0, 0, 0]])


# --- masked reductions ---------------------------------------------------------------------------------------------------


def test_masked_reductions():
    """Closed forms; what is masked may be NaN; an empty mask is 0."""
    x, mask = jnp.array([[1.0, 3.0, jnp.nan], [jnp.inf, jnp.nan, 5.0]]), jnp.array([[1, 1, 0], [0, 0, 1]], bool)
    np.testing.assert_allclose(masked.total(x, mask, -1), [4, 5])
    np.testing.assert_allclose(masked.mean(x, mask, -1), [2, 5])
    assert float(masked.mean(x, mask)) == 3
    nothing = jnp.zeros_like(mask)
    for reduce in (masked.total, masked.mean):
        assert (np.asarray(reduce(x, nothing, -1)) == 0).all()


def test_batch_std_is_of_advantages_not_of_returns():
    """Baselines that differ from row to row: R - b is 1, 2, 1, 2 here, of which the spread is 1/2."""
    returns, expected = jnp.array([[1.0, 2.0], [5.0, 6.0]]), jnp.array([[0.0, 0.0], [4.0, 4.0]])
    got = estimate("value_baseline", "batch_std", returns, jnp.zeros((2, 2), int), expected=expected)
    np.testing.assert_allclose(got, [[2.0, 4.0], [2.0, 4.0]], rtol=1e-6)
