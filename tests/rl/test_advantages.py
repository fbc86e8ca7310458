"""Advantage estimators against closed forms."""

from __future__ import annotations

import functools
import math
import typing

import jax
import numpy as np
import pytest
from jax.extend import core

from jmarl.algorithms import ALGORITHMS
from jmarl.config import Loss
from jmarl.rl import masked
from jmarl.rl.advantages import (
    ROWS_AT_ONCE,
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
from jmarl.rl.advantages import gae as gae_eagerly
from tests.matrix import product

# One program, not one per operation.
estimate = jax.jit(estimate_eagerly, static_argnums=0, static_argnames=("scale", "num_roles"))
gae = jax.jit(gae_eagerly, static_argnums=(3, 4))

ALL_SCALES = typing.get_args(typing.get_args(typing.get_type_hints(Loss)["advantage_scale"])[0])
SCALES = tuple(scale for scale in ALL_SCALES if scale != "running_std")  # tested separately

R = np.array([[1.0, 2.0, 4.0, 9.0]], np.float32)  # one prompt, a group of four; mean 4, best 9
STD = np.sqrt(9.5)  # population: ((-3)² + (-2)² + 0² + 5²) / 4
CLOSED = {
    raw: [1, 2, 4, 9],
    group_mean: [-3, -2, 0, 5],
    leave_one_out: [-4, -8 / 3, 0, 20 / 3],
    max_baseline: [-8, -7, -5, 0],
}
OTHERS = {  # by numpy, of one group
    raw: lambda r: r,
    group_mean: lambda r: r - r.mean(),
    leave_one_out: lambda r: [x - np.delete(r, i).mean() for i, x in enumerate(r)],
    max_baseline: lambda r: r - r.max(),
}
CASES = [(estimator, scale) for estimator in CLOSED for scale in SCALES]


@jax.jit
def by_all(returns, groups=None):
    """The advantages of a batch by all estimators and scales, in the order of `CASES`."""
    return [estimate_eagerly(estimator, returns, groups, scale=scale) for estimator, scale in CASES]


def test_every_estimator_of_the_table_has_a_closed_form():
    assert set(CLOSED) == {row.estimator for row in ALGORITHMS.values() if row.data == "rollouts"}


def test_closed_forms_of_one_group_and_of_a_batch():
    """An estimator is a function of one group [G]. A scale only divides, by the population std of the returns of the group
    (std) or of the whole batch (batch_std). One that subtracted the mean again would make estimators equal, as in CoMLRL."""
    of_a_group = jax.jit(lambda *group: [estimator(*group) for estimator in CLOSED])(R[0], np.ones(4, bool))
    np.testing.assert_allclose(of_a_group, [*CLOSED.values()], atol=1e-5)
    two = np.concatenate([R, np.float32([[0, 0, 10, 6]])])
    for (estimator, scale), one, both in zip(CASES, by_all(R), by_all(two), strict=True):
        np.testing.assert_allclose(one[0], np.array(CLOSED[estimator]) / (STD if scale != "none" else 1), rtol=1e-5, atol=1e-5)
        std = {"none": 1, "std": two.std(-1, keepdims=True), "batch_std": two.std()}[scale]
        np.testing.assert_allclose(both, np.array([*map(OTHERS[estimator], two)]) / std, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [1, 3, 7])
def test_equal_returns_and_groups_of_one_give_exactly_zero(group):
    """Adam would turn a rounding error of 1e-9 into a full step. The means of values such as 0.1 are rounded. Raw returns are 0
    where they are scaled."""
    values = np.float32([0.0, 1.0, 0.1, -1 / 3, 1000.1, 1e6 + 0.3, 1e-8, 1e18])
    for case, advantages in zip(CASES, jax.vmap(by_all)(np.broadcast_to(values[:, None, None], (8, 2, group))), strict=True):
        assert (np.asarray(advantages) == 0).all() or case == (raw, "none"), case


@pytest.mark.parametrize("case", range(len(CASES)))
def test_an_invalid_return_is_ignored(case):
    """The advantage of a NaN return is 0, and the other advantages are those of the group without it. All NaN: all 0. A single
    valid return is a group of one."""
    nan = np.float32(np.nan)
    got = np.asarray(by_all(np.float32([[1, nan, 2, 4, 9], [nan] * 5]))[case])
    np.testing.assert_allclose(got[0, [0, 2, 3, 4]], by_all(R)[case][0], rtol=1e-5, atol=1e-6)
    assert got[0, 1] == 0 and (got[1] == 0).all()
    single = np.asarray(by_all(np.float32([[nan, 5.3, nan, nan, nan], [nan] * 5]))[case])
    assert (single == 0).all() or CASES[case] == (raw, "none")


def test_advantages_of_huge_returns_are_finite():
    """Rewards above 1e18 are masked before they get here."""
    assert np.isfinite(by_all(np.float32([[1e18, -1e18, 0.0, 1e18]]))).all()


def test_agents_are_independent():
    """vmap over an agent axis gives the result of each agent alone."""
    returns = np.float32(np.random.default_rng(1).normal(size=(2, 2, 5)))
    together = np.stack(jax.vmap(by_all)(returns))
    for agent in range(2):
        np.testing.assert_allclose(together[:, agent], by_all(returns[agent]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", [i for i, (_, scale) in enumerate(CASES) if scale != "batch_std"])
def test_rows_with_equal_numbers_form_a_group(case):
    """Rows of a group that is scattered over prompts get the same advantages as rows of one prompt; one row is invalid."""
    rng = np.random.default_rng(2)
    groups = rng.permutation(np.repeat([0, 3, 7], 4)).reshape(6, 2)
    returns = rng.normal(size=(6, 2)).astype(np.float32)
    returns[2, 1] = np.nan
    got = np.asarray(by_all(returns, groups)[case])
    for number in (0, 3, 7):
        alone = by_all(returns[groups == number][None])[case][0]
        np.testing.assert_allclose(got[groups == number], alone, rtol=1e-5, atol=1e-6)
    assert got[2, 1] == 0


def test_groups_numbered_by_prompt_equal_none():
    """None means that the completions of a prompt form a group. Equal up to float32 rounding, because the order of sums
    differs; two rows are invalid."""
    returns, valid = np.random.default_rng(3).normal(size=(2, 5)).astype(np.float32), np.ones((2, 5), bool)
    valid[0, 2] = valid[1, 0] = False
    numbers, functions = np.broadcast_to(np.arange(2)[:, None], (2, 5)), (*CLOSED, group_std, max_return)
    of_groups = jax.jit(lambda *arrays: [per_group(f, *arrays) for f in functions])
    by_prompt, by_number = (np.stack(of_groups(returns, valid, groups)) for groups in (None, numbers))
    np.testing.assert_allclose(by_number[:, valid], by_prompt[:, valid], rtol=1e-6, atol=1e-6)
    returns = np.where(valid, returns, np.float32(np.nan))
    np.testing.assert_allclose(by_all(returns, numbers), by_all(returns), rtol=1e-5, atol=1e-5)


def test_groups_that_span_several_chunks_of_rows():
    """The rows of every group lie in all chunks of `ROWS_AT_ONCE`; the last chunk is not full."""
    rows = 2 * ROWS_AT_ONCE + 88
    rng = np.random.default_rng(4)
    returns, groups = rng.normal(size=(rows // 4, 4)).astype(np.float32), rng.integers(0, 7, (rows // 4, 4))
    for (estimator, scale), advantages in zip(CASES, by_all(returns, groups), strict=True):
        for number in range(7 if scale == "std" else 0):
            alone = returns[groups == number]
            expected = OTHERS[estimator](alone) / alone.std()
            np.testing.assert_allclose(np.asarray(advantages)[groups == number], expected, rtol=1e-4, atol=1e-5)


def shapes_in(jaxpr: core.Jaxpr) -> set[tuple[int, ...]]:
    """Return the shapes of all intermediate arrays of a program, including its inner programs."""
    shapes = {variable.aval.shape for equation in jaxpr.eqns for variable in equation.outvars}
    for equation in jaxpr.eqns:
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr)):
            if isinstance(parameter, core.Jaxpr | core.ClosedJaxpr):
                shapes |= shapes_in(parameter.jaxpr if isinstance(parameter, core.ClosedJaxpr) else parameter)
    return shapes


@pytest.mark.parametrize("estimator, scale", product([*CLOSED], SCALES))
def test_memory_is_linear_in_the_number_of_rows(estimator, scale):
    """With numbered groups, no array has an entry for each pair of rows."""
    rows = 1024
    returns, groups = np.zeros((rows // 4, 4), np.float32), np.zeros((rows // 4, 4), np.int32)
    program = jax.make_jaxpr(functools.partial(estimate, estimator, scale=scale))(returns, groups)
    shapes = shapes_in(program.jaxpr)
    sizes = [math.prod(shape) for shape in shapes]
    assert max(sizes) < rows * rows
    if estimator is not raw:
        assert max(sizes) == ROWS_AT_ONCE * rows  # inner programs are included


# --- other baselines and running statistics ------------------------------------------------------------------------------


def test_returns_minus_another_baseline():
    """A NaN baseline (a greedy episode without a valid reward) gives advantage 0. batch_std is the std of R - b per role."""
    returns, expected = np.float32([[1, 2], [4, 9]]), np.float32([[0.5, 0.5], [3, np.nan]])
    np.testing.assert_allclose(estimate(raw, returns - expected), [[0.5, 1.5], [1.0, 0.0]])
    roles, expected = np.array([[0, 0], [1, 1]]), np.float32([[0.5, 0.5], [3, 3]])
    scaled = estimate(raw, returns - expected, scale="batch_std", roles=roles, num_roles=2)
    np.testing.assert_allclose(scaled, [[0.5 / 0.5, 1.5 / 0.5], [1 / 2.5, 6 / 2.5]], rtol=1e-6)


def test_running_statistics():
    """Moments of all valid returns so far equal numpy's. The moving average of a role changes only when the role plays."""
    rng, valid_returns, baseline = np.random.default_rng(0), [], np.zeros(2)
    moving, moments = np.zeros(2, np.float32), [np.float32(0)] * 3
    advance = jax.jit(lambda a, b, *new: (moving_baseline(a, *new, 0.9), merge_moments(*b, new[0])))
    for step in range(5):
        returns = (rng.normal(size=(2, 3)) * 10 + step).astype(np.float32)
        returns[1, 0] = np.nan
        roles = np.array([[0] * 3, [step % 2] * 3])
        moving, moments = advance(moving, moments, returns, roles)
        valid_returns += returns[np.isfinite(returns)].tolist()
        for role in set(roles.ravel().tolist()):
            baseline[role] = 0.9 * baseline[role] + 0.1 * np.nanmean(returns[roles == role])
    count, mean, squares = moments
    assert count == len(valid_returns) == 25
    std = jax.jit(moments_std)(count, squares)
    np.testing.assert_allclose([mean, std], [np.mean(valid_returns), np.std(valid_returns)], rtol=1e-5)
    np.testing.assert_allclose(moving, baseline, rtol=1e-5)
    scaled = estimate(group_mean, R, scale="running_std", running_std=std)
    np.testing.assert_allclose(scaled[0], np.array(CLOSED[group_mean]) / np.std(valid_returns), rtol=1e-5)
    unscaled = estimate(group_mean, R, scale="running_std", running_std=np.float32(0))
    assert (np.asarray(unscaled) == 0).all()


# --- generalized advantages ----------------------------------------------------------------------------------------------


def test_gae_by_hand():
    """r = [1, 2, 4], V = [.5, .25, -1], gamma .9: with lambda 0 A = [.725, .85, 5]; with 1 the return minus the value."""
    r, v, mask = np.float32([1, 2, 4]), np.float32([0.5, 0.25, -1]), np.ones(3, bool)
    np.testing.assert_allclose(gae(r, v, mask, 0.9, 0.0), [0.725, 0.85, 5.0], rtol=1e-6)
    returns = [1 + 0.9 * (2 + 0.9 * 4), 2 + 0.9 * 4, 4]
    np.testing.assert_allclose(gae(r, v, mask, 0.9, 1.0), np.array(returns) - v, rtol=1e-6)


def test_truncated_episodes_bootstrap():
    """A value after the last token adds gamma V to the last delta."""
    r, v, mask = np.float32([[1, 2, 4]] * 2), np.float32([[0.5, 0.25, -1]] * 2), np.ones((2, 3), bool)
    ended, cut = gae(r, v, mask, 0.9, 0.5, np.float32([0, 2]))
    np.testing.assert_allclose(cut - ended, [0.45**2 * 1.8, 0.45 * 1.8, 1.8], rtol=1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_skips_masked_tokens(lam):
    """The result is the sum of (gamma lambda)^k delta in numpy over the tokens of random masks."""
    rng = np.random.default_rng(0)
    r, v = rng.normal(size=(2, 4, 7)).astype(np.float32)
    mask = rng.random((4, 7)) < 0.6
    got = np.asarray(gae(r, v, mask, 0.9, lam))
    for i in range(4):
        rewards, values = r[i][mask[i]], [*v[i][mask[i]], 0.0]
        delta = [rewards[t] + 0.9 * values[t + 1] - values[t] for t in range(len(rewards))]
        expected = [sum((0.9 * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]
        np.testing.assert_allclose(got[i][mask[i]], expected, rtol=1e-4, atol=1e-5)
        assert (got[i][~mask[i]] == 0).all()


def test_terminal_rewards_are_at_the_last_token_of_the_mask():
    mask = np.array([[True, True, False], [False, True, False], [False, False, False]])
    rewards = jax.jit(terminal_rewards)(np.float32([2, 3, 4]), mask)
    np.testing.assert_allclose(rewards, [[0, 2, 0], [0, 3, 0], [0, 0, 0]])


# --- masked reductions ---------------------------------------------------------------------------------------------------


def test_masked_reductions():
    """Closed forms. Masked entries may be NaN, and an empty mask gives 0."""
    x, mask = np.float32([[1, 3, np.nan], [np.inf, np.nan, 5]]), np.array([[1, 1, 0], [0, 0, 1]], bool)
    reduce = jax.jit(lambda x, mask: (masked.total(x, mask, -1), masked.mean(x, mask, -1), masked.mean(x, mask)))
    total, mean, overall = reduce(x, mask)
    assert (total.tolist(), mean.tolist(), float(overall)) == ([4, 5], [2, 5], 3)
    total, mean, overall = reduce(x, np.zeros_like(mask))
    assert (total.tolist(), mean.tolist(), float(overall)) == ([0, 0], [0, 0], 0)
