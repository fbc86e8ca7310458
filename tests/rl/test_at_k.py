"""Figures of k samples of a prompt: closed forms and means over all choices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jmarl.rl.returns import best_at_k, majority_at_k, pass_at_k

NAN = np.nan


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_at_k_is_the_mean_over_all_choices_of_k_samples(k):
    returns = np.random.default_rng(0).normal(size=(6, 5))
    returns[0] = returns[0, 0]  # equal ones
    expected = [np.mean([max(samples) for samples in itertools.combinations(row, k)]) for row in returns]
    np.testing.assert_allclose(best_at_k(returns, k), expected)
    solved = (returns > 0).astype(float)
    np.testing.assert_allclose(best_at_k(solved, k), pass_at_k(solved, k))


def test_best_at_k_leaves_out_invalid_samples():
    returns = np.array([[4.0, NAN, 1.0, 2.0], [NAN, 3.0, NAN, NAN], [NAN] * 4])
    np.testing.assert_allclose(best_at_k(returns, 2), [(4 + 4 + 2) / 3, NAN, NAN])
    np.testing.assert_allclose(best_at_k(returns, 1), [7 / 3, 3, NAN])


VOTES = {  # solved, choices, k -> majority@k
    "two of three": ([1, 0, 0], [5, 2, 2], 3, 0.0),
    "of the majority alone": ([1, 0, 0, 1], [2, 2, 2, 7], 4, 1 / 3),  # its three samples: one was solved
    "a tie is the mean over choices": ([1, 1, 0, 0, 0], [1, 1, 2, 2, 3], 5, 0.5),
    "all differ": ([1, 0, 0, 0], [1, 2, 3, 4], 4, 0.25),
    "groups in order": ([1, 1, 0, 1, 0, 0, 1], [1, 1, 2, 3, 2, 2, 1], 3, (1 + 0) / 2),  # the last sample is in no group
    "one is the mean": ([1, 0, 0, 1], [1, 1, 1, 2], 1, 0.5),
    "invalid samples do not vote": ([NAN, 1, NAN, 0, 1], [2, 1, 2, 2, 1], 3, 1.0),
    "too few": ([1, NAN, NAN], [1, 1, 1], 2, NAN),
}


@pytest.mark.parametrize(("solved", "choices", "k", "expected"), VOTES.values(), ids=VOTES)
def test_majority_at_k_is_the_success_of_the_choice_of_most(solved, choices, k, expected):
    got = majority_at_k(np.array([solved, [NAN] * len(solved)]), np.array([choices, choices], float), k)
    np.testing.assert_allclose(got, [expected, NAN])
