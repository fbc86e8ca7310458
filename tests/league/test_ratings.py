"""Elo and mixtures of players against closed forms, and the games that a league remembers."""

from __future__ import annotations

import numpy as np
import pytest

from jmarl.evaluation.zero_shot import is_zero_sum
from jmarl.league.ratings import Crosstable, elo, nash_mixture

ROUND_ROBIN = np.array([[0, 5.5, 7, 1], [4.5, 0, 6, 2], [3, 4, 0, 2.5], [9, 8, 7.5, 0]])


def test_elo_of_two_players_follows_from_their_share_of_points():
    """75 % of the points are 400 log10(3) = 190.8 Elo; a prior draw of each with an average player takes 1.2 of them."""
    points = np.array([[0.0, 25.0], [75.0, 0.0]])
    np.testing.assert_allclose(elo(points, prior=1e-9).elo, [0, 400 * np.log10(3)], rtol=1e-5)
    np.testing.assert_allclose(elo(points).elo, [0, 189.617], rtol=1e-5)
    half = 189.617 / 800 * np.log(10)  # of the difference in logits: the gradient of the posterior is 0
    assert abs(75 - 100 / (1 + np.exp(-2 * half)) + 0.5 - 1 / (1 + np.exp(-half))) < 1e-4
    np.testing.assert_allclose(
        elo(points, prior=1e-9).interval, [0, 1.959964 * 400 / np.log(10) / np.sqrt(100 * 3 / 16)], rtol=1e-4
    )


def test_equal_points_are_equal_ratings_and_all_wins_a_finite_one():
    np.testing.assert_allclose(elo(np.full((3, 3), 2.0)).elo, 0, atol=1e-6)
    assert 300 < elo(np.array([[0.0, 0.0], [10.0, 0.0]])).elo[1] < 1000


def test_elo_does_not_depend_on_the_order_of_players():
    order = np.array([2, 0, 3, 1])
    ratings, moved = elo(ROUND_ROBIN).elo, elo(ROUND_ROBIN[np.ix_(order, order)]).elo
    np.testing.assert_allclose(moved, ratings[order] - ratings[2], atol=1e-3)


def test_intervals_shrink_with_the_root_of_the_number_of_games():
    few, many = elo(ROUND_ROBIN, 1e-6).interval, elo(100 * ROUND_ROBIN, 1e-6).interval
    np.testing.assert_allclose(few[1:], 10 * many[1:], rtol=1e-3)


def test_players_without_a_connection_to_the_first_have_no_rating():
    points = np.zeros((4, 4))
    points[0, 1] = points[2, 3] = 1
    ratings = elo(points)
    assert np.isnan(ratings.elo).tolist() == np.isnan(ratings.interval).tolist() == [False, False, True, True]


def test_mixtures_that_no_player_beats():
    np.testing.assert_allclose(nash_mixture(np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0.0]])), 1 / 3)
    np.testing.assert_allclose(nash_mixture(np.array([[0, 0.2], [-0.2, 0]])), [1, 0], atol=1e-9)
    dominated = np.array([[0, -1, 2, 1], [1, 0, -3, 1], [-2, 3, 0, 1], [-1, -1, -1, 0.0]])
    np.testing.assert_allclose(nash_mixture(dominated), np.array([3, 2, 1, 0]) / 6, atol=1e-9)
    rng = np.random.default_rng(0)
    payoff = rng.normal(size=(9, 9))
    mixture = nash_mixture(payoff - payoff.T)
    assert (mixture @ (payoff - payoff.T)).min() > -1e-9 and abs(mixture.sum() - 1) < 1e-12
    with pytest.raises(ValueError, match="not those of a zero-sum game: .* as much as 2"):
        nash_mixture(np.ones((2, 2)))


def test_a_game_is_zero_sum_if_returns_add_up_to_0():
    assert is_zero_sum(np.array([[1.0, -1.0], [np.nan, np.nan], [0.0, 0.0]]))
    assert not is_zero_sum(np.array([[1.0, -1.0], [1.0, 1.0]])) and is_zero_sum(np.array([[2.0, -1.0, -1.0]]))


def test_a_slot_takes_the_games_of_the_team_and_loses_its_own():
    """Two slots: the team beats slot 0 three times, is slot 1, draws twice with it, and then takes the place of slot 0."""
    results = Crosstable.of_empty_slots(2, 2).taking(0).adding(-1, np.array([3.0, 0.0]), np.array([3.0, 0.0])).taking(1)
    np.testing.assert_array_equal(results.points, [[0, 0, 0], [3, 0, 0], [0, 0, 0]])
    results = results.adding(-1, np.array([0.0, 1.0]), np.array([0.0, 2.0]))
    np.testing.assert_array_equal(results.rates(), [[np.nan, 0, np.nan], [1, np.nan, 0.5], [np.nan, 0.5, np.nan]])
    np.testing.assert_array_equal(results.taking(0).points, [[0, 1, 0], [1, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(
        results.replacing(1, np.zeros(2), np.array([4.0, 0])).points, [[0, 4, 0], [0, 0, 1], [0, 1, 0]]
    )
    assert results.table([0, 5], []).splitlines()[2:] == [
        "| update 0 |  | 0 % |",
        "| update 5 | 100 % |  |",
        "| present |  | 50 % |",
    ]


def test_ratings_stay_where_the_oldest_slot_is_replaced():
    """A rating is relative to the first snapshot, also after that one has gone; who met no one keeps the rating."""
    results = Crosstable.of_empty_slots(2, 2).taking(0).adding(-1, np.array([75.0, 0.0]), np.array([100.0, 0.0]))
    results, interval = results.rated(np.array([0]))
    np.testing.assert_allclose(results.ratings, [0, np.nan, 189.617], rtol=1e-5)
    assert 70 < interval < 90
    results, interval = results.taking(1).rated(np.array([0, 1]))
    assert results.ratings[1] == results.ratings[2] and np.isnan(interval)
    results = results.taking(0).adding(-1, np.array([0.0, 50.0]), np.array([0.0, 100.0]))
    np.testing.assert_allclose(results.rated(np.array([1, 0]))[0].ratings, 189.617, rtol=1e-4)
