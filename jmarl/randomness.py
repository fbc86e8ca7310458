"""Which items a step takes, and what random numbers are for: both follow from (seed, step) alone, so a run can go on."""

from __future__ import annotations

import functools

import numpy as np

# Purposes of random numbers: what is drawn for different ones at one seed and step has nothing in common. The first three are
# of playing; COMPARE and PROPOSE of what comparators and the team write for preferences, PAIRS and DRAW of choosing pairs, FIT
# of fitting reward models, FURTHER of dynamic sampling.
TRAIN, EVAL, GREEDY, COMPARE, PAIRS, DRAW, PROPOSE, FURTHER, FIT = range(9)


def tasks_of(step: int, num_items: int, per_step: int, seed: int) -> list[int]:
    """Indices of a step's items: every epoch is a new order of all of them, from (seed, epoch) alone."""
    positions = range(step * per_step, (step + 1) * per_step)
    return [int(_order(num_items, seed, p // num_items)[p % num_items]) for p in positions]


@functools.lru_cache(maxsize=16)  # of a million items, an order takes longer to make than a batch
def _order(num_items: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_items)
