"""Rows with a temperature and a top-p of their own choose as all rows with these settings do."""

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.config import Sampling
from jmarl.sampling.choice import RowSampling, choose_for_rows

SETTINGS = [(1.0, 1.0), (0.7, 0.9), (0.0, 1.0), (1.3, 0.4)]  # temperature, top-p
VOCAB = 50


def test_rows_choose_with_their_own_settings():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 3, (len(SETTINGS), VOCAB)), jnp.float32)
    bits, stop = jnp.asarray(rng.integers(0, 1 << 32, (len(SETTINGS), 2), np.uint32)), jnp.zeros((len(SETTINGS), 1), jnp.int32)

    def choose(cfg, own=None):
        return choose_for_rows(logits, bits, jnp.int32(0), None, stop, cfg, None, own)

    @jax.jit
    def choose_all(temperatures, top_ps):
        mixed = [choose(Sampling(), RowSampling(temperatures, x)) for x in (top_ps, jnp.ones_like(top_ps))]
        alike = [choose(Sampling(temperature=temperature, top_p=top_p)) for temperature, top_p in SETTINGS]
        return mixed, alike

    (mixed, whole), alike = choose_all(*map(jnp.array, zip(*SETTINGS, strict=True)))
    for row, (_, top_p) in enumerate(SETTINGS):
        for own in (mixed, whole) if top_p == 1 else (mixed,):
            for x, y in zip(own, alike[row], strict=True):
                np.testing.assert_allclose(x[row], y[row], rtol=1e-6)
