"""Which items a step takes, and what random numbers are for: both follow from (seed, step) alone, so a run can go on."""

from __future__ import annotations

import numpy as np

# Purposes of random numbers: what is drawn for different ones at one seed and step has nothing in common. The first three are
# of playing; COMPARE and PROPOSE of what comparators and the team write for preferences, PAIRS and DRAW of choosing pairs, FIT
# of fitting reward models, FURTHER of dynamic sampling.
TRAIN, EVAL, GREEDY, COMPARE, PAIRS, DRAW, PROPOSE, FURTHER, FIT = range(9)


def tasks_of(step: int, num_items: int, per_step: int, seed: int) -> list[int]:
    """Indices of a step's items: every epoch is a new order of all of them, from (seed, epoch) alone."""
    positions = range(step * per_step, (step + 1) * per_step)
    order = {e: np.random.default_rng((seed, e)).permutation(num_items) for e in {p // num_items for p in positions}}
    return [int(order[p // num_items][p % num_items]) for p in positions]
