"""The interquartile mean over runs and tasks with its interval, and tokens until a reward is reached. Not an experiment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats


class Estimate(NamedTuple):
    """A number with its 95 % interval."""

    mean: float
    low: float
    high: float


def interquartile_mean(scores: np.ndarray) -> float:
    """Return the mean of the middle half of all scores of an algorithm, of all runs and tasks."""
    return float(stats.trim_mean(scores.ravel(), 0.25))


def stratified_interval(scores: Float[np.ndarray, "run task"], samples: int = 10_000, seed: int = 0) -> Estimate:
    """Return the interquartile mean with its 95 % interval by the bootstrap: runs are drawn with replacement within each task
    (arXiv 2108.13264)."""
    runs, tasks = scores.shape
    drawn = np.random.default_rng(seed).integers(runs, size=(samples, runs, tasks))
    means = stats.trim_mean(scores[drawn, np.arange(tasks)].reshape(samples, -1), 0.25, axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(interquartile_mean(scores), float(low), float(high))


def tokens_to(goal: float, tokens: Iterable[float], rewards: Iterable[float]) -> float:
    """Return the tokens after which a curve first reaches a reward; NaN if it never does."""
    return next((x for x, reward in zip(tokens, rewards, strict=True) if reward >= goal), float("nan"))
