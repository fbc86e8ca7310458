"""Metrics and losses of pairs and texts by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jmarl.algorithms import resolve
from jmarl.config import TrainConfig
from jmarl.objectives.pairs import PairTargets, loss_of_numbers
from jmarl.objectives.texts import TextTargets, token_loss


def test_metrics_of_pairs_by_hand():
    """Means over two valid pairs; the third is padding. Values after the end of a completion are ignored, also NaN."""
    numbers = jnp.array([[[-1.0, -2.0], [-4.0, jnp.nan]], [[-2.0, -jnp.inf], [-1.0, -1.0]], [[-9.0, -9.0], [-8.0, -7.0]]])
    take = jnp.array([[[1.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]])
    reference = jnp.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    targets = PairTargets(take, reference, team_margin=jnp.array([0.5, 1.0, 0.0]), share=jnp.array([0.5, 0.5, 0.0]))
    loss, metrics = loss_of_numbers(numbers, targets, resolve(TrainConfig.of(algorithm="madpo", beta=0.2)))
    expected = {"chosen": (-4 - 2) / 2, "rejected": (-4 - 4) / 2, "margin": (0.5 + 3) / 2, "accuracy": 1.0}
    expected["loss"] = np.log1p(np.exp(-0.2 * np.array([0.5, 3.0]))).mean()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
    assert loss == metrics["loss"]


def test_metrics_of_texts_by_hand():
    logp, entropy = -jnp.array([1.0, 2.0, 4.0, 8.0]), jnp.array([1.0, 3.0, 5.0, 7.0])
    targets = TextTargets(jnp.array([0.5, 0.5, 0.0, 0.0]), jnp.array([0.0, 0.0, 1.0, 0.0]))
    for weight, more in ((0.0, {}), (0.3, {"nll_world": 4.0})):
        algorithm = resolve(TrainConfig.of(algorithm="sft", bc_weight=0.7, world_model_weight=weight))
        loss, metrics = token_loss(logp, entropy, targets, algorithm)
        expected = {"nll": 1.5, "entropy": 2.0, "loss": 0.7 * 1.5 + weight * 4} | more
        assert metrics == pytest.approx(expected) and loss == metrics["loss"]
