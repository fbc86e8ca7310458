"""Means that skip NaN, and their confidence intervals."""

from __future__ import annotations

import numpy as np


def valid_mean(x: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis of the numbers that are not NaN; NaN if there are none."""
    valid = np.isfinite(x)
    with np.errstate(invalid="ignore"):
        return np.where(valid, x, 0).sum(-1) / np.where(valid.any(-1), valid.sum(-1), np.nan)


def mean_and_interval(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of [..., P] over the P numbers that are not NaN, and half of its 95 % interval.

    The interval is by Student's t, which few numbers (seeds) need; NaN with less than two of them.
    """
    from scipy.special import stdtrit  # takes 0.15 s, and a run without evaluations has no intervals

    mean, count = valid_mean(x), np.isfinite(x).sum(-1)
    variance = valid_mean((x - mean[..., None]) ** 2)  # of a sample: times n / (n - 1) below
    freedom = np.where(count > 1, count - 1, np.nan)
    return mean, stdtrit(freedom, 0.975) * np.sqrt(variance / freedom)
