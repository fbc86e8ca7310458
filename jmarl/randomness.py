"""Choose the items of a step and seed random numbers. Both follow from (seed, step) alone, so a run can be resumed."""

import functools
from typing import Any, NamedTuple

import numpy as np

# Purposes of random numbers: numbers drawn for different purposes at one seed and step are independent.
TRAIN, EVAL, GREEDY = 0, 1, 2  # playing
COMPARE, PAIRS, DRAW, PROPOSE = 3, 4, 5, 6  # preferences: texts of comparators; choosing pairs (2); texts of the team
FURTHER, FIT = 7, 8  # dynamic sampling; fitting reward models
LEAGUE, POPULATION = 9, 10  # opponents and seats; which members are copied


class Randomness(NamedTuple):
    """The numbers that determine all random numbers of a rollout."""

    seed: Any  # an integer; [K] integers in a request of K runs
    step: int
    purpose: int = TRAIN
    draw: int = 0  # number of the rollout, if a step plays several lists of items
    env_purpose: int | None = None  # purpose of the environment's random numbers; None: the same

    def environment_rng(self) -> np.random.Generator:
        """Return the random number generator of the environment."""
        purpose = self.purpose if self.env_purpose is None else self.env_purpose
        return np.random.default_rng((self.seed, self.step, purpose, self.draw))


def tasks_of(step: int, num_items: int, per_step: int, seed: int) -> list[int]:
    """Return the indices of a step's items. Every epoch has a new order of all items, which follows from (seed, epoch)."""
    positions = range(step * per_step, (step + 1) * per_step)
    return [int(_order(num_items, seed, p // num_items)[p % num_items]) for p in positions]


@functools.lru_cache(maxsize=16)  # with a million items, shuffling takes longer than making a batch
def _order(num_items: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_items)
