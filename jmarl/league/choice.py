"""Which slots of a league the team meets, and what its results say of them."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def win_rates(won: Float[np.ndarray, " slot"], games: Float[np.ndarray, " slot"]) -> Float[np.ndarray, " slot"]:
    """Return how often the team wins against each slot, a draw as half; NaN for slots that it never met."""
    return np.divide(won, games, out=np.full(len(won), np.nan), where=games > 0)


def probabilities(
    rule: str, ages: Int[np.ndarray, " slot"], won: Float[np.ndarray, " slot"], games: Float[np.ndarray, " slot"]
) -> Float[np.ndarray, " slot"]:
    """Return how probably each filled slot is drawn.

    Args:
        rule: `latest`: the newest slot alone. `uniform`: all alike. `winrate`: by (1 - p)^2, where p is how often the team wins
            against the slot (PFSP of AlphaStar, Nature 575); slots that it never met come first.
        ages: the update at which each slot was taken.
        won: games that the team won against each, a draw as half.
        games: games against each.
    """
    if rule == "latest":
        weights = (ages == ages.max()).astype(float)
    elif rule == "winrate":
        rates = win_rates(won, games)
        weights = np.isnan(rates).astype(float) if np.isnan(rates).any() else (1 - rates) ** 2
    else:
        weights = np.ones(len(ages))
    return weights / weights.sum() if weights.sum() else np.full(len(ages), 1 / len(ages))
