"""The optimiser of an agent: its own clip, schedule and Adam state, on tiny parameter trees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmarl.algorithms import resolve
from jmarl.config import TrainConfig
from jmarl.learning.optimizer import apply_gradients, init_stack, schedule
from jmarl.models.weights import WEIGHTS


def make(algorithm, agents=2):
    """A stack's state, gradients of norm 0.25 an agent, and a jitted step of the whole stack."""
    ones = np.ones((agents, 3), np.float32)
    params, grads = {"w": ones, "b": 2 * ones[:, :1]}, {"w": 0.125 * ones, "b": -0.125 * ones[:, :1]}
    return init_stack(jax.tree.map(jnp.array, params), algorithm), grads, stepper(algorithm)


def stepper(algorithm):
    return jax.jit(jax.vmap(functools.partial(apply_gradients, algorithm=algorithm)))


def test_the_clip_couples_no_agents():
    """Agent 0's gradient a million times larger: its step is that of the gradient scaled to norm 0.5; agent 1's step is
    bit-equal. One norm over the stack would have scaled agent 1's gradient down to nothing."""
    algorithm = resolve(TrainConfig.of(learning_rate=0.1, max_grad_norm=0.5, adam_eps=1.0))
    state, grads, step = make(algorithm)
    huge = jax.tree.map(lambda x: x * np.float32([[1e6], [1]]), grads)
    (small, m_small), (large, m_large) = (jax.device_get(step(state, x, np.zeros(2))) for x in (grads, huge))
    np.testing.assert_allclose(m_small["grad_norm"], 0.25)
    np.testing.assert_allclose(m_large["grad_norm"], [0.25e6, 0.25])
    for name in ("w", "b"):
        np.testing.assert_array_equal(large.params[name][1], small.params[name][1])
        clipped = 2 * grads[name][0]  # from norm 0.25 up to the 0.5 that the clip leaves
        # Adam's first step: g / (|g| + eps), here with eps = 1
        expected = np.asarray(state.params[name])[0] - 0.1 * clipped / (np.abs(clipped) + 1)
        np.testing.assert_allclose(large.params[name][0], expected, rtol=1e-5)


def test_a_gradient_below_the_clip_is_left_alone():
    state, grads, step = make(resolve(TrainConfig.of(learning_rate=0.1, max_grad_norm=0.26, adam_eps=1.0)))
    new, _ = step(state, grads, np.zeros(2))
    np.testing.assert_allclose(new.params["w"], 1 - 0.1 * 0.125 / 1.125, rtol=1e-6)


def test_weight_decay_is_decoupled():
    """AdamW: w - lr (step + decay w), whatever the gradient's size."""
    state, grads, step = make(resolve(TrainConfig.of(learning_rate=0.1, weight_decay=0.5, max_grad_norm=9.0, adam_eps=1.0)))
    new, _ = step(state, jax.tree.map(np.zeros_like, grads), np.zeros(2))
    np.testing.assert_allclose(new.params["w"], 1 - 0.1 * 0.5, rtol=1e-6)
    np.testing.assert_allclose(new.params["b"], 2 - 0.1 * 0.5 * 2, rtol=1e-6)


def test_norms_biases_and_rates_do_not_decay():
    """Of any family, by their names; all other weights do, and so do both matrices of an adapter and a value head."""
    layers = {name.removeprefix("layers."): np.ones((2, 3, 1)) for name in WEIGHTS if name.startswith("layers.")}
    rest = {name: np.ones((2, 1)) for name in [*WEIGHTS, "value", "value_bias"] if "." not in name}
    adapter = {"q_proj": {"a": np.ones((2, 3, 1)), "b": np.ones((2, 3, 1))}}
    params = jax.tree.map(np.float32, rest | {"layers": layers | adapter})
    algorithm = resolve(TrainConfig.of(learning_rate=0.1, weight_decay=0.5))
    state, zeros = init_stack(jax.tree.map(jnp.array, params), algorithm), jax.tree.map(np.zeros_like, params)
    new = stepper(algorithm)(state, zeros, np.zeros(2))[0].params
    flat = {path[-1].key: float(x.max()) for path, x in jax.tree_util.tree_leaves_with_path(new)}
    vectors = {name for name, x in flat.items() if x == 1}
    assert vectors == {name for name in flat if "norm" in name or "bias" in name or name == "delta_rate"}
    assert all(flat[name] == pytest.approx(0.95) for name in flat.keys() - vectors)


@pytest.mark.parametrize(
    "fields", [{}, dict(optimizer="lion"), dict(optimizer="sgd", momentum=0.5), dict(optimizer="sgd")], ids=str
)
def test_states_of_checkpoints_have_the_tree_of_optax(fields):
    """Runs that began when all weights decayed resume: which of them do is no part of the state."""
    algorithm = resolve(TrainConfig.of(**fields))
    state, rate = init_stack({"w": jnp.ones((1, 3))}, algorithm), optax.constant_schedule(1.0)
    momentum = optax.trace(0.5) if "momentum" in fields else optax.identity()
    sgd = optax.chain(momentum, optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(rate))
    kind = {"adamw": optax.adamw(rate), "lion": optax.lion(rate), "sgd": sgd}[fields.get("optimizer", "adamw")]
    expected = optax.chain(optax.clip_by_global_norm(1.0), kind).init({"w": jnp.ones(3)})
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(expected)


@pytest.mark.parametrize(
    "fields, expected",
    [
        (dict(lr_schedule="constant"), [1, 1, 1, 1, 1, 1, 1, 1]),
        (dict(lr_schedule="constant", warmup_updates=4), [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        (dict(lr_schedule="constant", warmup_updates=1), [1, 1, 1, 1, 1, 1, 1, 1]),
        (dict(lr_schedule="constant", warmup_updates=2, num_epochs=2, num_minibatches=2), [*np.arange(1, 9) / 8, 1, 1]),
        (dict(lr_schedule="linear"), [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0]),
        (dict(lr_schedule="linear", warmup_updates=2), [0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
        (dict(lr_schedule="cosine", warmup_updates=2), [0.5, 1, *(0.5 + 0.5 * np.cos(np.pi * np.arange(7) / 6)), 0]),
    ],
    ids=str,
)
def test_schedules_closed_form(fields, expected):
    """Eight updates; the first warm-up step is not 0, the peak is reached, and the end is 0."""
    algorithm = resolve(TrainConfig.of(learning_rate=3e-4, num_updates=8, **fields))
    np.testing.assert_allclose([schedule(algorithm)(k) for k in range(len(expected))], 3e-4 * np.array(expected), atol=1e-10)


def test_the_logged_learning_rate_is_the_one_used():
    """And that of its position in the schedule: the rate after a step that is skipped is that of the next position."""
    algorithm = resolve(TrainConfig.of(learning_rate=1.0, warmup_updates=4, adam_eps=1e-12, max_grad_norm=1e9))
    state, grads, apply = init_stack({"w": jnp.ones((1, 3))}, algorithm), {"w": np.ones((1, 3), np.float32)}, stepper(algorithm)
    for position, (rate, loss) in enumerate([(0.25, 0.0), (0.5, np.nan), (0.75, 0.0), (1.0, 0.0)]):
        before = np.asarray(state.params["w"])
        state, metrics = apply(state, grads, np.float32([loss]), None, {}, np.array([position]))
        assert metrics["learning_rate"].tolist() == [rate]
        expected = 0 if np.isnan(loss) else rate  # Adam's step with a constant gradient is the learning rate
        np.testing.assert_allclose(before - state.params["w"], expected, rtol=1e-4)


def test_the_state_is_updated_in_place():
    """With the state donated, an update allocates next to nothing: no copy of parameters or moments."""
    params = {"w": jnp.ones((1, 256, 128)), "b": jnp.ones((1, 64, 128))}
    algorithm = resolve(TrainConfig.of())
    state = init_stack(params, algorithm)
    step = jax.jit(jax.vmap(functools.partial(apply_gradients, algorithm=algorithm)), donate_argnums=0, keep_unused=True)
    memory = step.lower(state, params, jnp.zeros(1)).compile().memory_analysis()
    nbytes = sum(x.nbytes for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= nbytes - 64
    assert memory.temp_size_in_bytes < 0.1 * nbytes
