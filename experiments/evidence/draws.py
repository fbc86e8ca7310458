"""The reward of README.md's first script, with other ways to draw a token. Not an experiment.

In a YAML file `reward: experiments/evidence/draws.py:NAME` trains with the draw NAME, because looking the name up replaces the
library's draw, before any program is traced:

- `by_blocks`: the library's own, see `jmarl.sampling.choice.draw_index`.
- `by_cumulative_sum`: the place of one uniform number in the cumulative sum of the weights, as the library drew before.
- `by_categorical`: `jax.random.categorical`, with noise for each token of the vocabulary. Its noise has 24 bits, so tokens with
  probabilities below 6e-8 are never drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jmarl.sampling import choice

library_draw = choice.draw_index


def cumulative_sum(weights: Float[Array, " vocab"], bits: UInt32[Array, " 2"]) -> Int[Array, ""]:
    """Return index i with probability w_i / sum_j w_j."""
    ends = jnp.cumsum(weights)
    goal = (bits[0] >> 8).astype(jnp.float32) * 2.0**-24 * ends[-1]
    i = jnp.minimum(jnp.sum(ends <= goal), weights.shape[0] - 1)
    return jnp.where(weights[i] > 0, i, jnp.argmax(weights))


def categorical(weights: Float[Array, " vocab"], bits: UInt32[Array, " 2"]) -> Int[Array, ""]:
    """Return index i with probability w_i / sum_j w_j."""
    return jax.random.categorical(jax.random.wrap_key_data(bits, impl="threefry2x32"), jnp.log(weights))


DRAWS = {"by_blocks": library_draw, "by_cumulative_sum": cumulative_sum, "by_categorical": categorical}


def three_times_as_long(setups: Sequence[str], stories: Sequence[str]) -> list[float]:
    """Return one number for both agents: 1 if the second text is three times as long as the first."""
    return [1 - min(abs(len(b) / max(len(a), 1) - 3) / 3, 1) for a, b in zip(setups, stories, strict=True)]


def __getattr__(name: str) -> Callable[[Sequence[str], Sequence[str]], list[float]]:
    if name not in DRAWS:
        raise AttributeError(f"{__name__} has no {name}: it has {', '.join(DRAWS)}")
    choice.draw_index = DRAWS[name]
    jax.clear_caches()  # programs of this process that were traced with another draw
    return three_times_as_long
