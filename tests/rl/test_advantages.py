"""Advantage estimators against closed forms."""

from __future__ import annotations

import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jmarl.algorithms import ALGORITHMS
from jmarl.config import Loss
from jmarl.rl import masked
from jmarl.rl.advantages import (
    ROWS_AT_ONCE,
    gae,
    group_mean,
    group_std,
    leave_one_out,
    max_baseline,
    max_return,
    merge_moments,
    moments_std,
    moving_baseline,
    per_group,
    raw,
    terminal_rewards,
)
from jmarl.rl.advantages import estimate as estimate_eagerly

# One program, not one per operation.
estimate = jax.jit(estimate_eagerly, static_argnums=0, static_argnames=("scale", "num_roles"))

ALL_SCALES = typing.get_args(typing.get_args(typing.get_type_hints(Loss)["advantage_scale"])[0])
SCALES = tuple(scale for scale in ALL_SCALES if scale != "running_std")  # tested separately

R = jnp.array([[1.0, 2.0, 4.0, 9.0]])  # one prompt, a group of four; mean 4, best 9
STD = np.sqrt(9.5)  # population: ((-3)² + (-2)² + 0² + 5²) / 4
CLOSED = {
    raw: [1, 2, 4, 9],
    group_mean: [-3, -2, 0, 5],
    leave_one_out: [-4, -8 / 3, 0, 20 / 3],
    max_baseline: [-8, -7, -5, 0],
}
COMPARING = tuple(estimator for estimator in CLOSED if estimator is not raw)  # estimators that compare a group
all_estimators = pytest.mark.parametrize("estimator", CLOSED, ids=lambda estimator: estimator.__name__)
all_comparing = pytest.mark.parametrize("estimator", COMPARING, ids=lambda estimator: estimator.__name__)
all_scales = pytest.mark.parametrize("scale", SCALES)


def test_every_estimator_of_the_table_has_a_closed_form():
    assert set(CLOSED) == {row.estimator for row in ALGORITHMS.values() if row.data == "rollouts"}


@all_estimators
def test_closed_form_of_one_group(estimator):
    """An estimator is a function of one group [G]."""
    np.testing.assert_allclose(estimator(R[0], jnp.ones(4, bool)), CLOSED[estimator], atol=1e-5)


@all_estimators
def test_closed_form_of_a_batch(estimator):
    np.testing.assert_allclose(estimate(estimator, R)[0], CLOSED[estimator], atol=1e-5)


@all_scales
def test_estimators_differ_under_every_scale(scale):
    """A scale that subtracted the mean again would make them equal, as in CoMLRL: [-0.97, -0.65, 0, 1.62] four times."""
    rows = [np.asarray(estimate(estimator, R, scale=scale)[0]) for estimator in CLOSED]
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            assert np.abs(a - b).max() > 0.3


@all_estimators
def test_scaling_only_divides(estimator):
    """The divisor is the population std of the returns of the group (std) or of the whole batch (batch_std)."""
    np.testing.assert_allclose(estimate(estimator, R, scale="std")[0], np.array(CLOSED[estimator]) / STD, rtol=1e-5, atol=1e-6)
    returns = jnp.array([[1.0, 2.0, 4.0, 9.0], [0.0, 0.0, 10.0, 6.0]])
    plain = estimate(estimator, returns)
    np.testing.assert_allclose(estimate(estimator, returns, scale="batch_std"), plain / np.std(returns), rtol=1e-5, atol=1e-6)
    group_std = np.std(returns, axis=-1, keepdims=True)
    np.testing.assert_allclose(estimate(estimator, returns, scale="std"), plain / group_std, rtol=1e-5, atol=1e-6)


@all_scales
@all_comparing
def test_equal_returns_and_groups_of_one_give_exactly_zero(estimator, scale):
    """Adam would turn a rounding error of 1e-9 into a full step. The means of values such as 0.1 are rounded."""
    for value in (0.0, 1.0, 0.1, -1 / 3, 1000.1, 1e6 + 0.3, 1e-8, 1e18):
        for group in (1, 2, 3, 7, 8):
            advantages = estimate(estimator, jnp.full((2, group), value), scale=scale)
            assert (np.asarray(advantages) == 0).all(), (value, group)


@pytest.mark.parametrize("scale", ["std", "batch_std"])
def test_scaled_raw_advantages_of_equal_returns_are_zero(scale):
    assert (np.asarray(estimate(raw, jnp.full((2, 7), 1000.1), scale=scale)) == 0).all()


@all_scales
@all_estimators
def test_an_invalid_return_is_ignored(estimator, scale):
    """The advantage of a NaN return is 0, and the other advantages are those of the group without it. All NaN: all 0."""
    with_nan = jnp.array([[1.0, jnp.nan, 2.0, 4.0, 9.0], [jnp.nan] * 5])
    got = np.asarray(estimate(estimator, with_nan, scale=scale))
    np.testing.assert_allclose(got[0, [0, 2, 3, 4]], estimate(estimator, R, scale=scale)[0], rtol=1e-5, atol=1e-6)
    assert got[0, 1] == 0 and (got[1] == 0).all()


def test_a_single_valid_return_is_a_group_of_one():
    for estimator in COMPARING:
        for scale in SCALES:
            got = estimate(estimator, jnp.array([[jnp.nan, 5.3, jnp.nan]]), scale=scale)
            assert (np.asarray(got) == 0).all()


def test_advantages_of_huge_returns_are_finite():
    """Rewards above 1e18 are masked before they get here."""
    returns = jnp.array([[1e18, -1e18, 0.0, 1e18]])
    for estimator in CLOSED:
        for scale in SCALES:
            assert np.isfinite(estimate(estimator, returns, scale=scale)).all()


def test_leave_one_out_subtracts_the_mean_of_the_other_returns():
    returns = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    others = np.stack([np.delete(returns, g, 1).mean(1) for g in range(6)], 1)
    np.testing.assert_allclose(estimate(leave_one_out, jnp.asarray(returns)), returns - others, atol=1e-6)


def test_agents_are_independent():
    """vmap over an agent axis gives the result of each agent alone."""
    returns = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 4)), jnp.float32)
    for estimator in CLOSED:
        for scale in SCALES:
            one_by_one = jnp.stack([estimate(estimator, r, scale=scale) for r in returns])
            together = jax.vmap(functools.partial(estimate, estimator, scale=scale))(returns)
            np.testing.assert_allclose(together, one_by_one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", ["none", "std"])
@all_estimators
def test_rows_with_equal_numbers_form_a_group(estimator, scale):
    """Rows of a group that is scattered over prompts get the same advantages as rows of one prompt; one row is invalid."""
    rng = np.random.default_rng(2)
    groups = rng.permutation(np.repeat([0, 3, 7], 4)).reshape(6, 2)
    returns = rng.normal(size=(6, 2)).astype(np.float32)
    returns[2, 1] = np.nan
    got = np.asarray(estimate(estimator, jnp.asarray(returns), jnp.asarray(groups), scale=scale))
    for number in (0, 3, 7):
        alone = estimate(estimator, jnp.asarray(returns[groups == number])[None], scale=scale)[0]
        np.testing.assert_allclose(got[groups == number], alone, rtol=1e-5, atol=1e-6)
    assert got[2, 1] == 0


@all_estimators
def test_groups_numbered_by_prompt_equal_none(estimator):
    """None means that the completions of a prompt form a group. Equal up to float32 rounding, because the order of sums
    differs; two rows are invalid."""
    returns = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)
    valid = np.ones((5, 4), bool)
    valid[1, 2] = valid[3, 0] = False
    numbers = jnp.asarray(np.broadcast_to(np.arange(5)[:, None], (5, 4)))
    for function in (estimator, group_std, max_return):
        arrays = jnp.asarray(returns), jnp.asarray(valid)
        by_prompt, by_number = (per_group(function, *arrays, groups) for groups in (None, numbers))
        np.testing.assert_allclose(by_number[valid], by_prompt[valid], rtol=1e-6, atol=1e-6)
    returns[~valid] = np.nan
    for scale in SCALES:
        by_prompt, by_number = (estimate(estimator, jnp.asarray(returns), groups, scale=scale) for groups in (None, numbers))
        np.testing.assert_allclose(by_number, by_prompt, rtol=1e-5, atol=1e-6)


@all_estimators
def test_groups_that_span_several_chunks_of_rows(estimator):
    """The rows of every group lie in all chunks of `ROWS_AT_ONCE`; the last chunk is not full."""
    rows = 2 * ROWS_AT_ONCE + 88
    rng = np.random.default_rng(4)
    returns, groups = rng.normal(size=(rows // 4, 4)).astype(np.float32), rng.integers(0, 7, (rows // 4, 4))
    advantages = np.asarray(estimate(estimator, jnp.asarray(returns), jnp.asarray(groups), scale="std"))
    for number in range(7):
        alone = estimate(estimator, jnp.asarray(returns[groups == number])[None], scale="std")[0]
        np.testing.assert_allclose(advantages[groups == number], alone, rtol=1e-5, atol=1e-5)


def shapes_in(jaxpr: core.Jaxpr) -> set[tuple[int, ...]]:
    """Return the shapes of all intermediate arrays of a program, including its inner programs."""
    shapes = {variable.aval.shape for equation in jaxpr.eqns for variable in equation.outvars}
    for equation in jaxpr.eqns:
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr)):
            if isinstance(parameter, core.Jaxpr | core.ClosedJaxpr):
                shapes |= shapes_in(parameter.jaxpr if isinstance(parameter, core.ClosedJaxpr) else parameter)
    return shapes


@all_estimators
@all_scales
def test_memory_is_linear_in_the_number_of_rows(estimator, scale):
    """With numbered groups, no array has an entry for each pair of rows."""
    rows = 1024
    returns, groups = jnp.zeros((rows // 4, 4)), jnp.zeros((rows // 4, 4), jnp.int32)
    program = jax.make_jaxpr(functools.partial(estimate, estimator, scale=scale))(returns, groups)
    shapes = shapes_in(program.jaxpr)
    sizes = [math.prod(shape) for shape in shapes]
    assert max(sizes) < rows * rows
    if estimator is not raw:
        assert max(sizes) == ROWS_AT_ONCE * rows  # inner programs are included


# --- other baselines and running statistics ------------------------------------------------------------------------------


def test_returns_minus_another_baseline():
    """A NaN baseline (a greedy episode without a valid reward) gives advantage 0. batch_std is the std of R - b per role."""
    returns, expected = jnp.array([[1.0, 2.0], [4.0, 9.0]]), jnp.array([[0.5, 0.5], [3.0, jnp.nan]])
    np.testing.assert_allclose(estimate(raw, returns - expected), [[0.5, 1.5], [1.0, 0.0]])
    roles, expected = jnp.array([[0, 0], [1, 1]]), jnp.array([[0.5, 0.5], [3.0, 3.0]])
    scaled = estimate(raw, returns - expected, scale="batch_std", roles=roles, num_roles=2)
    np.testing.assert_allclose(scaled, [[0.5 / 0.5, 1.5 / 0.5], [1 / 2.5, 6 / 2.5]], rtol=1e-6)


def test_batch_std_is_computed_per_role():
    """Two roles of shared weights, one with returns 100 times larger: both get the same advantages."""
    small = np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32)
    returns, roles = jnp.asarray(np.concatenate([small, 100 * small])), jnp.array([[0] * 4, [1] * 4])
    got = np.asarray(estimate(group_mean, returns, scale="batch_std", roles=roles, num_roles=2))
    np.testing.assert_allclose(got[0], got[1], rtol=1e-4)


def test_running_statistics():
    """Moments of all valid returns so far equal numpy's. The moving average of a role changes only when the role plays."""
    rng, valid_returns, baseline = np.random.default_rng(0), [], np.zeros(2)
    moving, (count, mean, squares) = jnp.zeros(2), (jnp.float32(0),) * 3
    for step in range(5):
        returns = (rng.normal(size=(2, 3)) * 10 + step).astype(np.float32)
        returns[1, 0] = np.nan
        roles = np.array([[0] * 3, [step % 2] * 3])
        moving = moving_baseline(moving, jnp.asarray(returns), jnp.asarray(roles), 0.9)
        count, mean, squares = merge_moments(count, mean, squares, jnp.asarray(returns))
        valid_returns += returns[np.isfinite(returns)].tolist()
        for role in set(roles.ravel().tolist()):
            baseline[role] = 0.9 * baseline[role] + 0.1 * np.nanmean(returns[roles == role])
    assert count == len(valid_returns) == 25
    std = moments_std(count, squares)
    np.testing.assert_allclose([mean, std], [np.mean(valid_returns), np.std(valid_returns)], rtol=1e-5)
    np.testing.assert_allclose(moving, baseline, rtol=1e-5)
    scaled = estimate(group_mean, R, scale="running_std", running_std=std)
    np.testing.assert_allclose(scaled[0], np.array(CLOSED[group_mean]) / np.std(valid_returns), rtol=1e-5)
    unscaled = estimate(group_mean, R, scale="running_std", running_std=jnp.float32(0))
    assert (np.asarray(unscaled) == 0).all()


# --- generalized advantages ----------------------------------------------------------------------------------------------


def test_gae_by_hand():
    """r = [1, 2, 4], V = [.5, .25, -1], gamma .9: with lambda 0 A = [.725, .85, 5]; with 1 the return minus the value."""
    r, v, mask = jnp.array([1.0, 2.0, 4.0]), jnp.array([0.5, 0.25, -1.0]), jnp.ones(3, bool)
    np.testing.assert_allclose(gae(r, v, mask, 0.9, 0.0), [0.725, 0.85, 5.0], rtol=1e-6)
    returns = [1 + 0.9 * (2 + 0.9 * 4), 2 + 0.9 * 4, 4]
    np.testing.assert_allclose(gae(r, v, mask, 0.9, 1.0), np.array(returns) - np.asarray(v), rtol=1e-6)


def test_truncated_episodes_bootstrap():
    """A value after the last token adds gamma V to the last delta."""
    r, v, mask = jnp.array([[1.0, 2.0, 4.0]] * 2), jnp.array([[0.5, 0.25, -1.0]] * 2), jnp.ones((2, 3), bool)
    ended, cut = gae(r, v, mask, 0.9, 0.5, bootstrap=jnp.array([0.0, 2.0]))
    np.testing.assert_allclose(cut - ended, [0.45**2 * 1.8, 0.45 * 1.8, 1.8], rtol=1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_skips_masked_tokens(lam):
    """The result is the sum of (gamma lambda)^k delta in numpy over the tokens of random masks."""
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


def test_terminal_rewards_are_at_the_last_token_of_the_mask():
    mask = jnp.array([[True, True, False], [False, True, False], [False, False, False]])
    np.testing.assert_allclose(terminal_rewards(jnp.array([2.0, 3.0, 4.0]), mask), [[0, 2, 0], [0, 3, 0], [0, 0, 0]])


# --- masked reductions ---------------------------------------------------------------------------------------------------


def test_masked_reductions():
    """Closed forms. Masked entries may be NaN, and an empty mask gives 0."""
    x, mask = jnp.array([[1.0, 3.0, jnp.nan], [jnp.inf, jnp.nan, 5.0]]), jnp.array([[1, 1, 0], [0, 0, 1]], bool)
    np.testing.assert_allclose(masked.total(x, mask, -1), [4, 5])
    np.testing.assert_allclose(masked.mean(x, mask, -1), [2, 5])
    assert float(masked.mean(x, mask)) == 3
    empty = jnp.zeros_like(mask)
    for reduce in (masked.total, masked.mean):
        assert (np.asarray(reduce(x, empty, -1)) == 0).all()


def test_batch_std_is_of_advantages_not_of_returns():
    """With a baseline per row, R - b is 1, 2, 1, 2, whose std is 1/2."""
    returns, expected = jnp.array([[1.0, 2.0], [5.0, 6.0]]), jnp.array([[0.0, 0.0], [4.0, 4.0]])
    got = estimate(raw, returns - expected, jnp.zeros((2, 2), int), scale="batch_std")
    np.testing.assert_allclose(got, [[2.0, 4.0], [2.0, 4.0]], rtol=1e-6)
