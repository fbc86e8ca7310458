"""Which slots of a league the team meets, and what its results say of them."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from jmarl.league.ratings import nash_mixture


def win_rates(won: Float[np.ndarray, " slot"], games: Float[np.ndarray, " slot"]) -> Float[np.ndarray, " slot"]:
    """Return how often the team wins against each slot, a draw as half; NaN for slots that it never met."""
    # Checkpoints have float32: a run that resumes is to draw the same.
    return np.divide(won, games, out=np.full(len(won), np.nan), where=games > 0, dtype=float)


def probabilities(
    rule: str,
    ages: Int[np.ndarray, " slot"],
    won: Float[np.ndarray, " slot"],
    games: Float[np.ndarray, " slot"],
    rates: Float[np.ndarray, "slot slot"],
) -> Float[np.ndarray, " slot"]:
    """Return how probably each filled slot is drawn.

    Args:
        rule: `latest`: the newest slot alone. `uniform`: all alike. `winrate`: by (1 - p)^2, where p is how often the team wins
            against the slot (PFSP of AlphaStar, Nature 575); slots that it never met come first. `nash`: the mixture of slots
            that no slot beats, see `nash_mixture`; without those that met no slot yet.
        ages: the update at which each slot was taken.
        won: games that the team won against each, a draw as half.
        games: games against each.
        rates: how often each slot wins against each, a draw as half; NaN where they never met.
    """
    if rule == "latest":
        weights = (ages == ages.max()).astype(float)
    elif rule == "winrate":
        own = win_rates(won, games)
        weights = np.isnan(own).astype(float) if np.isnan(own).any() else (1 - own) ** 2
    elif rule == "nash":
        has_met, weights = np.isfinite(rates).any(1), np.zeros(len(ages))
        among = rates[np.ix_(has_met, has_met)]
        payoff = np.nan_to_num(among - among.T)  # pairs without a valid game count as drawn
        weights[has_met] = nash_mixture(payoff) if has_met.any() else 0
    else:
        weights = np.ones(len(ages))
    return weights / weights.sum() if weights.sum() else np.full(len(ages), 1 / len(ages))
