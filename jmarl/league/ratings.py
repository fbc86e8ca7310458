"""Ratings of players from their games with each other: Elo, and the maximin mixture of a zero-sum game.

A game of two players has one point: 1 for the winner, a half each in a draw. `points[i, j]` is what player i has from its games
with player j, so points and their transpose add up to the games. Left out: an advantage of a seat, which cancels where both
players sit in each seat equally often; equilibria other than the one that the linear program ends at.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.optimize import linprog, minimize
from scipy.sparse.csgraph import connected_components
from scipy.special import expit, log_expit

ELO = 400 / np.log(10)  # points of Elo in one unit of the logarithm of the odds
NORMAL_95 = 1.959964  # half of a 95 % interval in standard deviations


class Ratings(NamedTuple):
    """Elo of players, relative to that of player 0."""

    elo: np.ndarray  # [K]; NaN for players whom no games connect with player 0
    interval: np.ndarray  # [K] half of the 95 % interval of the difference to player 0


def elo(points: Float[np.ndarray, "player player"], prior: float = 1.0) -> Ratings:
    """Return the most probable ratings of players (Bradley and Terry, 1952).

    Player i wins against j with probability 1 / (1 + 10^((r_j - r_i) / 400)), and a draw counts as half a win and half a loss.
    Intervals are from the inverse of the Hessian. They are too narrow where games are not independent, and too wide where
    many games are drawn.

    Args:
        points: of each player against each, see the module; the diagonal is ignored.
        prior: number of draws of each player against an average one that are added, so that the rating of a player who won all
            its games is finite.
    """
    count = len(points)
    points = np.where(np.eye(count, dtype=bool), 0.0, points)
    games = points + points.T

    def loss(x: np.ndarray) -> float:
        drawn = log_expit(x) + log_expit(-x)
        return float(-np.sum(points * log_expit(x[:, None] - x)) - prior / 2 * np.sum(drawn))

    def gradient(x: np.ndarray) -> np.ndarray:
        return np.sum(games * expit(x[:, None] - x) - points, 1) + prior * (expit(x) - 0.5)

    def hessian(x: np.ndarray) -> np.ndarray:
        information = games * expit(x[:, None] - x) * expit(x - x[:, None])
        return np.diag(information.sum(1) + prior * expit(x) * expit(-x)) - information

    x = minimize(loss, np.zeros(count), jac=gradient, hess=hessian, method="trust-exact", options={"gtol": 1e-8}).x
    covariance = np.linalg.inv(hessian(x))
    variance = covariance[0, 0] + np.diag(covariance) - 2 * covariance[0]
    parts = connected_components(games > 0, directed=False)[1]
    is_known = parts == parts[0]
    values = ELO * np.array([x - x[0], NORMAL_95 * np.sqrt(np.maximum(variance, 0))])
    return Ratings(*np.where(is_known, values, np.nan))


def nash_mixture(payoff: Float[np.ndarray, "player player"]) -> Float[np.ndarray, " player"]:
    """Return the mixture of players against which no player wins on average.

    It maximizes the smallest pay-off, by linear programming; of several such mixtures one is returned, always the same.

    Args:
        payoff: what each player earns against each, the negative of what the other earns.
    """
    payoff = np.asarray(payoff, float)
    if not np.allclose(payoff, -payoff.T, atol=1e-9):
        raise ValueError(
            f"the pay-offs are not those of a zero-sum game: what two players earn adds up to as much as "
            f"{np.nanmax(np.abs(payoff + payoff.T)):.3g}; give payoff = -payoff.T with finite numbers"
        )
    count = len(payoff)
    # Variables: the probabilities x, and the smallest pay-off v, which is maximized: v - payoff.T x <= 0.
    bounds = [(0.0, None)] * count + [(None, None)]
    result = linprog(
        np.append(np.zeros(count), -1.0),
        A_ub=np.hstack([-payoff.T, np.ones((count, 1))]),
        b_ub=np.zeros(count),
        A_eq=np.append(np.ones(count), 0.0)[None],
        b_eq=[1.0],
        bounds=bounds,
        method="highs",
    )
    if not result.success:
        raise ValueError(f"no mixture of {count} players was found: {result.message}")
    mixture = np.maximum(result.x[:-1], 0.0)
    return mixture / mixture.sum()


class Crosstable(NamedTuple):
    """The games between the players of a league: its slots, strangers, and last the present team since the newest snapshot."""

    points: np.ndarray  # [K + 1, K + 1] see the module
    ratings: np.ndarray  # [K + 1] Elo, relative to the team at the first snapshot; NaN: there is none

    @staticmethod
    def of_empty_slots(count: int, slots: int) -> "Crosstable":
        """Return results before the first game. count: of slots and, behind them, strangers; without slots the first stranger
        has a rating of 0."""
        ratings = np.append(np.full(count, np.nan), 0.0)
        ratings[:1] = np.nan if slots else 0.0
        return Crosstable(np.zeros((count + 1, count + 1)), ratings)

    def taking(self, k: int) -> "Crosstable":
        """Return results after slot k has taken the present weights: its games are those of the present team."""
        order = np.arange(len(self.points))
        order[k] = -1
        points = np.array(self.points[np.ix_(order, order)])
        points[-1] = points[:, -1] = 0
        return Crosstable(points, self.ratings[order])

    def adding(self, player: int, won: Float[np.ndarray, " slot"], games: Float[np.ndarray, " slot"]) -> "Crosstable":
        """Return results after games of a player against slots. won: its points."""
        points = np.array(self.points)
        points[player, :-1] += won
        points[:-1, player] += games - won
        return self._replace(points=points)

    def replacing(self, player: int, won: Float[np.ndarray, " slot"], games: Float[np.ndarray, " slot"]) -> "Crosstable":
        """Return results in which these are all games of a player against slots. won: its points."""
        points = np.array(self.points)
        points[player, :-1] = points[:-1, player] = 0
        return self._replace(points=points).adding(player, won, games)

    def rates(self) -> Float[np.ndarray, "player player"]:
        """Return how often each player wins against each, a draw as half; NaN where they never met."""
        games = self.points + self.points.T
        return np.divide(self.points, games, out=np.full(games.shape, np.nan), where=games > 0, dtype=float)

    def rated(self, order: np.ndarray) -> tuple["Crosstable", float]:
        """Return results with new ratings, and half of the 95 % interval of that of the present team; NaN: it met no one.

        The first player keeps its rating, and so do players whom no games connect with it.

        Args:
            order: numbers of the slots that are taken, the oldest first.
        """
        players = np.append(order, len(self.points) - 1)
        fit = elo(self.points[np.ix_(players, players)])
        ratings = np.array(self.ratings)
        ratings[players] = np.where(np.isnan(fit.elo), ratings[players], fit.elo + ratings[players[0]])
        return self._replace(ratings=ratings), float(fit.interval[-1])

    def table(self, ages: Sequence[int], strangers: Sequence[str]) -> str:
        """Return a Markdown table of how often the player of a row wins against each opponent. ages: update of each slot; -1:
        empty."""
        order = [k for k in np.argsort(ages, kind="stable") if ages[k] >= 0]
        names = [*(f"update {ages[k]}" for k in order), *(name.replace("|", "\\|") for name in strangers)]
        order += range(len(ages), len(ages) + len(strangers))
        rates = self.rates()[[*order, -1]][:, order]
        lines = [["", *names], ["---"] * (len(order) + 1)]
        for name, row in zip([*names, "present"], rates, strict=True):
            lines.append([name, *("" if np.isnan(x) else f"{100 * x:.0f} %" for x in row)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
